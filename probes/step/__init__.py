"""What a training step shows of itself, on fake tensors and on real ones alike: its phases, its rollouts, its allocations."""
