"""Tensors with shapes and without data, and the record of what is allocated while code runs on them."""
