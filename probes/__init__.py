"""Probes: they run the real trainer and need the training stack, which `planner` does not.

`from probes import MemoryPlanCallback` is for the user's own runs. It imports Transformers, so its import is lazy.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from probes.callback.callback import MemoryPlanCallback

__all__ = ["MemoryPlanCallback"]


def __getattr__(name: str) -> object:
    if name == "MemoryPlanCallback":
        from probes.callback.callback import MemoryPlanCallback

        return MemoryPlanCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
