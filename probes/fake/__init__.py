"""A trainer without weights and without a GPU, which allocates what the real one does on CUDA: the parts of a dry run.

Whichever of them is imported first, their libraries come quickly.
"""

from importlib import import_module

from probes.imports import quick_imports

with quick_imports():
    for library in ("torch", "transformers", "trl", "peft", "datasets"):
        import_module(library)
