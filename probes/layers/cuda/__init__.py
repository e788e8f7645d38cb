"""Allocations of CUDA kernels that differ from those of the CPU, for layers on fake tensors."""
