"""Parameters of a job: tensors of the policy and of LoRA, their widths, and which of them are trained."""
