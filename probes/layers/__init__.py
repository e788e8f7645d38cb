"""Layers that have no formulas, built and run one of each kind: the parts of `coefficients.py`."""
