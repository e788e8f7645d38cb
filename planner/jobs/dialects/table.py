"""The dialects that are read."""

from planner.jobs.dialects.axolotl import AXOLOTL
from planner.jobs.dialects.dialect import Dialect, Keys
from planner.jobs.dialects.llama_factory import LLAMA_FACTORY

DIALECTS: tuple[Dialect, ...] = (AXOLOTL, LLAMA_FACTORY)


def dialect_of(keys: Keys) -> Dialect | None:
    """Return the dialect of a config; None: it has no key of another tool."""
    return next((each for each in DIALECTS if any(mark in keys for mark in each.marks)), None)
