"""A decoder layer, written with operators that track tensor sizes (autograd.py)."""
