"""Trace of allocations, PyTorch's CUDA caching allocator, and the bytes that a trace reserves on a card."""
