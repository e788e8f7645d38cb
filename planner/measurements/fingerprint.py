"""Keys of candidates and models: two candidates are the same if all settings that are read and all layers are equal."""

import hashlib
import json
from functools import lru_cache

from msgspec.structs import replace

from planner.candidate import MODEL_FIELDS, Candidate
from planner.jobs.settings import settings_of
from planner.models.shape import ModelShape
from planner.settings.table import SETTING_OF

MODEL_NAMES = {field: SETTING_OF[field].written for field in MODEL_FIELDS}


def candidate_key(candidate: Candidate) -> str:
    """Return a text that is equal for candidates that run alike; a part of lines in files and of a study's trials."""
    models = {name: getattr(candidate, field) for field, name in MODEL_NAMES.items()}
    settings = settings_of(candidate) | {name: model and model_key(model) for name, model in models.items()}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=list).encode()).hexdigest()[:24]


@lru_cache(maxsize=256)
def model_key(model: ModelShape) -> str:
    """Return a text that is equal for models of the same layers.

    Leaves out a checkpoint's name, tokens and published dtype, which change no tensor, and its quantization, which the
    candidate has; only the group size of GPTQ and AWQ is the checkpoint's own.
    """
    group_size = model.quantization_group_size if model.quantization_row.own_groups else 0
    kinds = [layer for layer, _ in model.layer_kinds]
    shape = (
        model.model_type,
        model.params,
        model.embed_params,
        model.lm_head_params,
        model.vocab_size,
        group_size,
        model.vision_params,
        [repr(replace(layer, measure=None)) for layer in kinds],
        [kinds.index(layer) for layer in model.layers],
    )
    return hashlib.sha256(repr(shape).encode()).hexdigest()[:24]
