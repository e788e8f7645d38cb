"""What a profile depends on besides sizes: the recipe of a candidate, as a dict that is a file's key, and the sizes that it is asked with.

The widths of a model are sizes too, so models of one architecture share their profiles. What allocations depend on by a threshold (one
row, chunks of tokens, tiles of the vocabulary, lengths that kernels pad) is the regime, a part of the recipe.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from operator import attrgetter

from planner.candidate import ROWS_OF_MAX_LENGTH, Candidate
from planner.memory.sharding import SHARDED
from planner.model import ModelShape
from planner.trace.compose import single_process
from planner.trace.profile import NoProfile
from planner.trace.terms import TOKEN_CHUNK, VOCAB_CHUNK

MASK_ALIGNMENT = 16  # the memory-efficient kernel pads masks to it: probes/substitutions.py, EFFICIENT_BIAS_ALIGNMENT
SHORTEST_ROLLOUT = 9  # shorter ones are generated token by token: probes/rollout.py, WHOLE_ROLLOUT_TOKENS
MANY_CHUNKS = 3  # a first, a last, and some between: from here on every further one is like those between
MANY_TILES = 3  # of the vocabulary, likewise
FEWEST_LAYERS = 2  # a first and a last; those between are put in by the deeper traces

# Widths by the name of config.json. `head_dim` is not in every config.
WIDTH_FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
DEPTH_FIELDS = ("num_hidden_layers", "max_window_layers")
# No tensor of a training step has another size for these.
NO_EFFECT = frozenset(
    {"architectures", "attention_dropout", "attn_implementation", "auto_map", "bos_token_id", "cache_implementation", "dtype", "eos_token_id", "head_dim",
     "initializer_range", "layer_norm_eps", "max_position_embeddings", "original_max_position_embeddings", "pad_token_id", "pretraining_tp", "rms_norm_eps",
     "rope_theta", "tie_word_embeddings", "torch_dtype", "transformers_version", "unsloth_fixed", "use_cache", "_name_or_path", "name_or_path"}
)  # fmt: skip
# What a config says when it says nothing: written out or left out, it is the same model.
DEFAULTS: dict[str, object] = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "hidden_act": "silu", "rope_scaling": None}
# Position scalings whose frequencies are computed once, before the first step (transformers 5.23, modeling_rope_utils.py).
STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
# Layers after which the pattern begins anew: transformers 5.23, configuration_gemma3.py (sliding_window_pattern), configuration_smollm3.py
# (no_rope_layer_interval), configuration_gemma2.py (layer_types), configuration_cohere2.py.
PERIODS: dict[str, int] = {"gemma3_text": 6, "smollm3": 4, "gemma2": 2, "cohere2": 4}

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

BLOCKED_WEIGHTS = 64 * 256  # that share a nested absmax: probes/quantized.py, BLOCK and NESTED_BLOCK
HEAD_ALIGNMENT = 8  # heads of other sizes are padded for the flash kernel: probes/substitutions.py
QUANTIZED = ("none", "nf4", "nf4-double", "int8")  # whose kernels a dry run knows: probes/quantized.py

# Candidates that the traces do not stand for, and why; of the second kind are those that sizes decide.
REFUSALS: tuple[tuple[str, Callable[[Candidate], bool]], ...] = (
    ("states on the host", lambda candidate: candidate.sharding not in SHARDED and (candidate.offload_optimizer or candidate.offload_param)),
    ("Liger kernels", lambda candidate: candidate.use_liger_kernel),
    ("quantized weights of that kind", lambda candidate: candidate.quantization not in QUANTIZED),
    ("PPO", lambda candidate: candidate.method == "ppo"),
    ("a reward model", lambda candidate: candidate.reward_model is not None),
    ("a teacher of another shape", lambda candidate: candidate.teacher_model is not None and candidate.teacher_model.config != candidate.model.config),
)
REFUSED_SIZES: tuple[tuple[str, Callable[[Candidate], bool]], ...] = (
    ("rows cut at max_length", lambda candidate: candidate.method in ROWS_OF_MAX_LENGTH and candidate.row_tokens < _whole_row(candidate)),
    ("rollouts of a few tokens", lambda candidate: candidate.method_row.generates and candidate.max_completion_length < SHORTEST_ROLLOUT),
    ("unfinished groups", lambda candidate: candidate.method in ("grpo", "rloo") and candidate.generation_rows % candidate.num_generations != 0),
)


def _whole_row(candidate: Candidate) -> int:
    return candidate.prompt_length + candidate.max_completion_length


def recipe_of(candidate: Candidate) -> dict[str, object]:
    """All that a candidate's profile depends on: architecture, settings, regime.

    Raises:
        NoProfile: the candidate is one of the refused, or its architecture has no layers that repeat.
    """
    return {**_of_family(candidate), "regime": regime(candidate)}


def _of_family(candidate: Candidate) -> dict[str, object]:
    """The part of a recipe that sizes have no say in. Where states are sharded, the step is one of 16-bit layers without them (compose.py)."""
    _refuse(REFUSALS, candidate)
    one = single_process(candidate)
    model = architecture(one.model)
    if one.quantization != "none" and any(first * second % BLOCKED_WEIGHTS for first, second in product(_features(one.model), repeat=2)):
        raise NoProfile(f"The weights of {one.model.id} are no whole blocks of quantization statistics.")
    settings = {name: getattr(one, name) for name in RECIPE_FIELDS}
    settings["lora_target_modules"] = list(one.lora_target_modules) if one.tuning == "lora" else []
    settings["lora_dropout"] = one.tuning == "lora" and one.lora_dropout > 0
    settings["padded"] = one.pads  # not what is said of the data: a row alone is of the recipe without padding
    settings["engine"] = one.vllm != "off"
    settings["beta"] = one.beta > 0 if one.method in ("grpo", "rloo") else True
    settings["states"] = "elsewhere" if candidate.sharding in SHARDED else "here"
    return {"architecture": model, "settings": settings}


def _refuse(refusals: tuple[tuple[str, Callable[[Candidate], bool]], ...], candidate: Candidate) -> None:
    for what, applies in refusals:
        if applies(candidate):
            raise NoProfile(f"A profile does not stand for {what}.")


def key_of(recipe: Mapping[str, object]) -> str:
    """A file name for a recipe: that of its family, then that of its regime."""
    return f"{_digest({name: recipe[name] for name in ('architecture', 'settings')})[:16]}-{_digest(recipe['regime'])[:8]}"


def _digest(part: object) -> str:
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Asked:
    """A candidate seen without its sizes: equal where `fields` are."""

    fields: tuple[object, ...]
    candidate: Candidate = field(compare=False)


def family_key(candidate: Candidate) -> str:
    """The first part of a candidate's key, empty where profiles do not stand for it. Remembered: a search asks for many sizes of one family."""
    return _family_key(_Asked(FAMILY(candidate), candidate))


@lru_cache(maxsize=4096)
def _family_key(asked: _Asked) -> str:
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


def architecture(model: ModelShape) -> dict[str, object]:
    """A config without widths and depth, which are sizes; with how they relate where that decides what runs.

    Raises:
        NoProfile: the config lacks a width, or its layers do not repeat.
    """
    config = model.config
    if any(not isinstance(config.get(name), int) for name in (*WIDTH_FIELDS, "num_hidden_layers")):
        raise NoProfile(f"The config of {model.id} does not name its widths as a profile's terms do.")
    heads, key_heads = numbers(config, "num_attention_heads", "num_key_value_heads")
    if head_of(config) % HEAD_ALIGNMENT:
        raise NoProfile(f"The heads of {model.id} have {head_of(config)} features, which kernels pad.")
    kept = {
        name: value
        for name, value in config.items()
        if name not in (*WIDTH_FIELDS, *DEPTH_FIELDS, *NO_EFFECT, "sliding_window", "layer_types") and DEFAULTS.get(name, kept_always) != value
    }
    scaling = kept.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) in STATIC_ROPE:
        del kept["rope_scaling"]
    return kept | {
        "tied": model.tied,
        "key heads": "one" if key_heads == 1 else "all" if key_heads == heads else "some",
        "vocabulary tiles": min(-(-numbers(config, "vocab_size")[0] // VOCAB_CHUNK), MANY_TILES),
        "layers": (numbers(config, "num_hidden_layers")[0] - FEWEST_LAYERS) % period(model),
    }


kept_always = object()


def numbers(config: dict[str, object], *names: str) -> list[int]:
    """Fields of a config that are numbers."""
    found = [config[name] for name in names]
    assert all(isinstance(number, int) for number in found)
    return found  # type: ignore[return-value]


def head_of(config: dict[str, object]) -> int:
    """Features of an attention head."""
    hidden, heads = numbers(config, "hidden_size", "num_attention_heads")
    head = config.get("head_dim") or hidden // heads
    assert isinstance(head, int)
    return head


def _features(model: ModelShape) -> tuple[int, ...]:
    """Inputs and outputs of the linear layers."""
    hidden, intermediate, heads, key_heads = numbers(model.config, *WIDTH_FIELDS[:4])
    return hidden, intermediate, heads * head_of(model.config), key_heads * head_of(model.config)


def period(model: ModelShape) -> int:
    """After how many layers their pattern begins anew.

    Raises:
        NoProfile: the config lists kinds of layers, and not one kind only.
    """
    kinds = model.config.get("layer_types")
    if model.config.get("use_sliding_window"):
        raise NoProfile(f"Some layers of {model.id} have a window, and no profile knows which.")
    if model.model_type in PERIODS:
        return PERIODS[model.model_type]
    if isinstance(kinds, list) and len(set(kinds)) > 1:
        raise NoProfile(f"The layers of {model.id} are of several kinds, whose pattern no profile knows.")
    return 1


def base_layers(model: ModelShape) -> int:
    """The depth of the traces: the least that has a first layer, a last one, every kind, and the pattern's rest that the model has."""
    repeat = period(model)
    least = FEWEST_LAYERS + (numbers(model.config, "num_hidden_layers")[0] - FEWEST_LAYERS) % repeat
    return least if least >= repeat else least + repeat


# -- sizes ---------------------------------------------------------------------------------------------------------------


def sizes_of(candidate: Candidate) -> dict[str, int]:
    """What a profile is asked with: the values of `terms.py`."""
    config = candidate.model.config
    hidden, intermediate, heads, key_heads, vocabulary = numbers(config, *WIDTH_FIELDS)
    sizes = {
        "rows": candidate.per_device_train_batch_size, "tokens": candidate.row_tokens, "hidden": hidden, "intermediate": intermediate, "heads": heads,
        "key heads": key_heads, "head": head_of(config), "vocabulary": vocabulary, "rank": candidate.lora_r,
        "accumulation": candidate.gradient_accumulation_steps,
    }  # fmt: skip
    if not candidate.method_row.generates:
        return sizes
    generated = candidate.generation_rows
    groups = generated // candidate.num_generations if candidate.method in ("grpo", "rloo") else generated
    rollout = {"prompt": candidate.prompt_length, "completion": candidate.max_completion_length, "generated": generated, "groups": groups}
    return sizes | rollout


def regime(candidate: Candidate) -> dict[str, object]:
    """Which thresholds a candidate's sizes are beyond.

    One row copies less than two; more tokens than a chunk of TRL's loss are scored in a loop; a mask whose length is no multiple of 16
    is padded for the memory-efficient kernel; what accumulates stays. Trainers that generate keep lists with a tensor a row: there rows count.

    Raises:
        NoProfile: it is not one of the sizes that traces stand for.
    """
    _refuse(REFUSED_SIZES, candidate)
    found: dict[str, object] = {
        "one row": candidate.per_device_train_batch_size == 1,
        "chunks": chunks(candidate),
        "aligned": [length % MASK_ALIGNMENT == 0 for length in _masked_lengths(candidate)],
        "window": beyond_window(candidate),
        "accumulation": min(candidate.gradient_accumulation_steps, 2),
    }
    if not candidate.method_row.generates:
        return found
    return found | {
        "accumulation": candidate.gradient_accumulation_steps,
        "rows": candidate.per_device_train_batch_size,
        "generated": candidate.generation_rows,
        "groups": sizes_of(candidate)["groups"],
    }


def _masked_lengths(candidate: Candidate) -> list[int]:
    """The lengths of masks that attention is given; FlashAttention is given none."""
    if candidate.attn_implementation == "flash_attention_2":
        return []
    tokens, prompt = candidate.row_tokens, candidate.prompt_length
    return [tokens, tokens - 1, prompt, prompt + 1, prompt + 2] if candidate.method_row.generates and candidate.vllm == "off" else [tokens]


def chunks(candidate: Candidate) -> int:
    """Chunks that the loss is computed in, the many taken together; 0 where it is not chunked.

    Raises:
        NoProfile: it depends on how many tokens of each row are scored.
    """
    if candidate.method_row.loss not in ("fused", "divergence"):
        return 0
    scored = candidate.max_completion_length if candidate.method_row.generates else candidate.row_tokens
    counts = {min(-(-candidate.rows * max(length, 1) // TOKEN_CHUNK), MANY_CHUNKS) for length in (scored, scored - 2)}
    if len(counts) > 1:
        raise NoProfile(f"{candidate.rows} rows of {scored} tokens are too near to a whole number of chunks.")
    return counts.pop()


def beyond_window(candidate: Candidate) -> str:
    """Whether attention's window is shorter than the rows.

    Raises:
        NoProfile: `generate` keeps a cache as long as the window.
    """
    window = candidate.model.config.get("sliding_window")
    if not isinstance(window, int) or candidate.model.config.get("use_sliding_window") is False:
        return "none"
    if window > candidate.row_tokens:
        return "longer"
    if candidate.method_row.generates and candidate.vllm == "off":
        raise NoProfile("A profile does not stand for caches as long as a window.")
    return "shorter"
