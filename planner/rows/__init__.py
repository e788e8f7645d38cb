"""Lengths of the rows of a dataset: files, batches, packing."""
