"""Architectures without formulas: one layer of each kind, measured on fake tensors."""
