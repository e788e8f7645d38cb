"""What a profile depends on besides sizes: the recipe of a candidate, as a dict that is a file's key.

The widths of a model are sizes too, so models of one architecture share their profiles. What allocations depend on by a threshold (one
row, chunks of tokens, tiles of the vocabulary, lengths that kernels pad) is the regime (`sizes.py`), a part of the recipe.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from operator import attrgetter

from planner.candidate import Candidate, Seen
from planner.memory.sharding import SHARDED
from planner.trace.architecture import architecture, features
from planner.trace.compose import single_process
from planner.trace.profile import NoProfile
from planner.trace.refusals import REFUSALS, refuse
from planner.trace.sizes import regime

# Fields of a candidate that change which allocations there are, not only their sizes.
RECIPE_FIELDS = (
    "method", "trl_version", "tuning", "autocast_adapter_dtype", "dtype", "precision", "num_iterations", "packing", "padding_free",
    "precompute_ref_log_probs", "gradient_checkpointing", "checkpoint_every_n_layers", "checkpoint_offload", "activation_offloading", "attn_implementation",
    "optim", "quantization",
)  # fmt: skip
# What a family of recipes is found by: the fields above, and those that become words of it or refuse it.
FAMILY = attrgetter(
    *RECIPE_FIELDS, "pads", "model", "lora_target_modules", "lora_dropout", "vllm", "beta", "sharding", "offload_optimizer", "offload_param",
    "use_liger_kernel", "reward_model", "teacher_model",
)  # fmt: skip

BLOCKED_WEIGHTS = 64 * 256  # that share a nested absmax: probes/fake/quantized.py, BLOCK and NESTED_BLOCK


def recipe_of(candidate: Candidate) -> dict[str, object]:
    """All that a candidate's profile depends on: architecture, settings, regime.

    Raises:
        NoProfile: the candidate is one of the refused, or its architecture has no layers that repeat.
    """
    return {**_of_family(candidate), "regime": regime(candidate)}


def _of_family(candidate: Candidate) -> dict[str, object]:
    """The part of a recipe that sizes have no say in. Where states are sharded, the step is one of 16-bit layers without them (compose.py)."""
    refuse(REFUSALS, candidate)
    one = single_process(candidate)
    model = architecture(one.model)
    if one.quantization != "none" and any(first * second % BLOCKED_WEIGHTS for first, second in product(features(one.model), repeat=2)):
        raise NoProfile(f"The weights of {one.model.id} are no whole blocks of quantization statistics.")
    settings = {name: getattr(one, name) for name in RECIPE_FIELDS}
    settings["lora_target_modules"] = list(one.lora_target_modules) if one.tuning == "lora" else []
    settings["lora_dropout"] = one.tuning == "lora" and one.lora_dropout > 0
    settings["padded"] = one.pads  # not what is said of the data: a row alone is of the recipe without padding
    settings["engine"] = one.vllm != "off"
    settings["beta"] = one.beta > 0 if one.method in ("grpo", "rloo") else True
    settings["states"] = "elsewhere" if candidate.sharding in SHARDED else "here"
    return {"architecture": model, "settings": settings}


def key_of(recipe: Mapping[str, object]) -> str:
    """A file name for a recipe: that of its family, then that of its regime."""
    return f"{_digest({name: recipe[name] for name in ('architecture', 'settings')})[:16]}-{_digest(recipe['regime'])[:8]}"


def _digest(part: object) -> str:
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()


def family_key(candidate: Candidate) -> str:
    """The first part of a candidate's key, empty where profiles do not stand for it. Remembered: a search asks for many sizes of one family."""
    return _family_key(Seen(FAMILY(candidate), candidate))


@lru_cache(maxsize=4096)
def _family_key(asked: Seen) -> str:
    try:
        return _digest(_of_family(asked.candidate))[:16]
    except NoProfile:
        return ""


def regime_key(candidate: Candidate) -> str:
    """The second part.

    Raises:
        NoProfile: the candidate's sizes are of no regime.
    """
    return _digest(regime(candidate))[:8]
