"""ZeRO-3, with DeepSpeed's coordinator and the modules that a trainer's passes call."""
