"""The dry run: one training step of the installed trainer on fake tensors."""
