"""The dialects that are read."""

from planner.jobs.dialects.axolotl import AXOLOTL
from planner.jobs.dialects.dialect import Dialect, Keys
from planner.jobs.dialects.llama_factory import LLAMA_FACTORY
from planner.models.lora_targets import read_targets
from planner.models.shape import ModelShape

DIALECTS: tuple[Dialect, ...] = (AXOLOTL, LLAMA_FACTORY)


def dialect_of(keys: Keys) -> Dialect | None:
    """Return the dialect of a config; None: it has no key of another tool."""
    return next((each for each in DIALECTS if any(mark in keys for mark in each.marks)), None)


def planned_targets(tool: object, model: ModelShape, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the modules that get adapters in a tool's run: names, or an expression that leaves out a vision tower.

    Raises:
        InputError: `targets` is an expression that cannot be counted, see `read_targets`.
    """
    return next((each.targets for each in DIALECTS if each.tool == tool), read_targets)(model, targets)
