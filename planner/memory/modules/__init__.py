"""The modules of a decoder layer, written with `planner/memory/operators.py` as Transformers and PEFT write them."""

from planner.memory.modules.recipe import Kernel, Recipe

__all__ = ["Kernel", "Recipe"]
