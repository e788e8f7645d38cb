"""Parameters of a job: tensors of the policy and of LoRA, and how they are sharded."""
