"""A trainer without weights and without a GPU, which allocates what the real one does on CUDA: the parts of a dry run."""
