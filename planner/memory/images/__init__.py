"""Activations of the tower that reads images."""
