"""The process of a probe: workload, longest rows, random weights, memory by phase."""
