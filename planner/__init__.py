"""Plan the memory of a fine-tuning run: the largest, fastest configuration that fits the GPUs, and how sure that is."""
