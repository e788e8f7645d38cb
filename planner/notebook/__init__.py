"""The answers as Python functions: plan, estimate, sweep, plots."""
