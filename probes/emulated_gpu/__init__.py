"""The emulated rung: PyTorch's CUDA build and the real trainer on a GPU that counts memory and runs no kernel.

NVIDIA's driver and libraries are replaced by the sources in `driver/`, which `build.py` compiles on first use. A worker
of `--device cuda` runs on them unchanged, with the environment of `start.py`: its allocator, its kernels' choices, its
workspaces, streams and processes are the real ones, and every byte that they take is counted.
"""
