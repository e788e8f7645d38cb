"""The simulated and the measured rung: what runs the real trainer. Needs the training stack; `planner` does not.

`from probes import MemoryPlanCallback` is for the user's own runs. It imports Transformers, so it is imported when it is asked for.
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
