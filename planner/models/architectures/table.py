"""The table of model types (`ARCHITECTURES`): one row each, in the file of its kind."""

from planner.models.architectures.architecture import Architecture
from planner.models.architectures.dense import DENSE
from planner.models.architectures.measured import MEASURED
from planner.models.architectures.mixtures import MIXTURES
from planner.models.architectures.plain import PLAIN
from planner.models.architectures.with_images import WITH_IMAGES

ARCHITECTURES: dict[str, Architecture] = {**DENSE, **PLAIN, **MIXTURES, **WITH_IMAGES, **MEASURED}
KNOWN_MODEL_TYPES = frozenset(name for name, row in ARCHITECTURES.items() if row.has_formulas)
_USUAL = Architecture()


def architecture_of(model_type: str) -> Architecture:
    """Return the row of a model type; without one the type is the usual in everything, and its layers are measured."""
    return ARCHITECTURES.get(model_type, _USUAL)
