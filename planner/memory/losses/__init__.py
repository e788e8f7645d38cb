"""Memory of the output head and the loss."""
