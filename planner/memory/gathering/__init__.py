"""ZeRO-3's gathered parameters: DeepSpeed's coordinator, and the modules that a trainer's passes call."""
