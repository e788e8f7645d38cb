"""PEFT's default `lora_target_modules` by model type, and the names of fused experts for `lora_target_parameters`."""

import re
from functools import lru_cache
from typing import Literal

from planner.errors import InputError
from planner.models.layers import ExpertPart, Experts
from planner.models.shape import ModelShape

# Axolotl's fused kernels of LoRA: of gate, up and down; of queries, keys and values; of the output projection.
AdapterKernel = Literal["mlp", "qkv", "o"]
# Gate and up are one parameter, whose rank PEFT doubles where the targets are modules of transformers 4.
# Source: peft 0.21.2, utils/transformers_weight_conversion.py, `_convert_peft_config_moe`.
FUSED_BRANCHES = 2

# Fused parameters in the module that holds the experts, with a gate and without.
EXPERT_NAMES: dict[ExpertPart, str] = {"gate_up": "experts.gate_up_proj", "down": "experts.down_proj"}
UNGATED_NAMES: dict[ExpertPart, str] = {"gate_up": "experts.up_proj", "down": "experts.down_proj"}
PREFIXES = ("", "model.", "model.language_model.", "language_model.model.")  # of `layers`, as `named_modules` has them


def widest_targets(model: ModelShape) -> tuple[str, ...]:
    """Return `lora_target_modules` for adapters on all linear layers: PEFT's shorthand, or names where it stops."""
    stops = model.architecture.stops_all_linear
    if (not stops and model.quantization_row.nn_linear) or not model.known:
        return ("all-linear",)
    names = {linear.name for layer, _ in model.layer_kinds for linear in layer.linears}
    return tuple(sorted(names - {stops}))


# Modules of a decoder layer that hold linear layers: those of attention and of a dense MLP, and others.
BLOCKS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"), ("self_attn",)),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj", "gate_up_proj"), ("mlp", "feed_forward")),
}
OTHER_BLOCKS = ("self_attn", "linear_attn", "mixer", "conv", "attn", "attention", "self_attention", "mlp", "mamba")
SIGLIP_NAMES = {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}  # models/siglip/modeling_siglip.py
SPECIAL = re.compile(r"[*+?()\[\]|^$\\]")  # in a regular expression, not in the name of a module


def read_targets(model: ModelShape, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Return `lora_target_modules` as the plan keeps them: names of modules, or an expression that leaves a tower out.

    PEFT takes one string, or TRL a list of one, as an expression for the whole path of a module. Names of modules reach
    a vision tower that has them too, so an expression for the language model alone stays one, whatever the tower.
    Source: peft 0.21.2, utils/other.py, `match_target_against_key`; trl 1.16, trainer/model_config.py.

    Raises:
        InputError: it is no expression, matches nothing, modules of some layers or of a tower only, or fused experts.
    """
    if not is_expression(targets) or not model.known:
        return targets
    try:
        pattern = re.compile(targets[0])
    except re.error as error:
        raise InputError(f"lora_target_modules {targets[0]} is no regular expression: {error}.") from error
    found = _found(model, pattern)
    names = tuple(sorted(name for name, matched in found.items() if True in matched))
    in_tower = [name for name in names if name in tower_names(model)]
    left_out = [name for name in in_tower if not _matches_tower(pattern, name)]
    beside = not any(_matches_tower(pattern, name) for name in tower_names(model))
    partly = [name for name in names if False in found[name]]
    fused = expert_parameters(model) and any(_matches(pattern, 0, "mlp.experts", name) for name in BLOCKS)
    problems = (
        (bool(fused), "reaches fused experts"),
        (bool(partly), f"matches {', '.join(partly)} in some layers only"),
        (bool(left_out) and not beside, f"leaves out only {', '.join(left_out)} of the vision tower"),
        (not names, "matches no module"),
    )
    for refused, what in problems:
        if refused:
            known = ", ".join(sorted(found))
            raise InputError(f"lora_target_modules {targets[0]} {what} of {model.id}. Name modules out of {known}.")
    return targets if beside and tower_names(model) else names


@lru_cache(maxsize=1024)
def name_of_path(model: ModelShape, target: str) -> str:
    """Return the last name of a target that is the end of a path, if it reaches every linear layer of that name, or "".

    Example: `self_attn.q_proj`, `linear_attn.out_proj`, `shared_expert.up_proj` where no layer has a dense MLP.
    """
    block, _, name = target.rpartition(".")
    named = [layer for layer, _ in model.layer_kinds if any(linear.name == name for linear in layer.linears)]
    if not named or name in tower_names(model):
        return ""
    shared = [isinstance(layer.feed_forward, Experts) for layer in named]
    if "mlp" not in BLOCKS.get(name, ()):
        return name if block in BLOCKS.get(name, OTHER_BLOCKS) else ""
    reached = all(shared) if block.startswith("shared_expert") else block in BLOCKS[name] and not any(shared)
    return name if reached else ""


def is_expression(targets: tuple[str, ...]) -> bool:
    """True if the targets are one regular expression."""
    return len(targets) == 1 and SPECIAL.search(targets[0]) is not None


def listed_targets(model: ModelShape, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Return `targets` as names of modules: PEFT's default and a regular expression become names, others stay."""
    if targets == ("default",):
        return model.architecture.lora_targets
    return _names_of_expression(model, targets[0]) if is_expression(targets) else targets


@lru_cache(maxsize=256)
def _names_of_expression(model: ModelShape, expression: str) -> tuple[str, ...]:
    found = _found(model, re.compile(expression))
    return tuple(sorted(name for name, matched in found.items() if True in matched))


def _found(model: ModelShape, pattern: re.Pattern[str]) -> dict[str, set[bool]]:
    """For each name of a linear layer: whether an expression matches it, in each decoder layer that has it."""
    found: dict[str, set[bool]] = {}
    for i, layer in enumerate(model.layers):
        for linear in layer.linears:
            blocks = BLOCKS.get(linear.name, OTHER_BLOCKS)
            found.setdefault(linear.name, set()).add(any(_matches(pattern, i, block, linear.name) for block in blocks))
    return found


def text_targets(model: ModelShape, targets: tuple[str, ...] = ("all-linear",)) -> tuple[str, ...]:
    """Return `targets` without those in the vision tower; () where experts are in the way of an expression.

    Where the tower has modules of the same names they are an expression, as `read_targets` reads it.
    """
    linears = {linear.name for layer, _ in model.layer_kinds for linear in layer.linears}
    names = sorted(linears if targets == ("all-linear",) else listed_targets(model, targets))
    if tower_names(model).isdisjoint(names):
        return tuple(names)
    return () if expert_parameters(model) else (rf".*language_model.*\.({'|'.join(names)})",)


def adapts_tower(model: ModelShape, targets: tuple[str, ...]) -> bool:
    """True if modules of the model's vision tower have adapters."""
    if not model.vision_params or is_expression(targets):
        return False
    return targets == ("all-linear",) or not tower_names(model).isdisjoint(listed_targets(model, targets))


def tower_names(model: ModelShape) -> set[str]:
    """Names of the linear layers in the vision tower, which PEFT finds by the same names."""
    if not model.vision_params:
        return set()
    return SIGLIP_NAMES if model.architecture.tower == "siglip" else {linear.name for linear, _ in model.vision_linears}


def _matches_tower(pattern: re.Pattern[str], name: str) -> bool:
    """True if the expression matches a module of a vision tower's first layer."""
    return any(
        pattern.fullmatch(f"model.{tower}.{layers}.0.{block}.{name}")
        for tower in ("visual", "vision_tower", "vision_model", "vision_tower.vision_model")
        for layers in ("blocks", "layers", "encoder.layers", "transformer.layers")
        for block in ("self_attn", "attn", "attention", "mlp", "feed_forward")
    )


def _matches(pattern: re.Pattern[str], layer: int, block: str, name: str) -> bool:
    """True if the expression matches a module's path, from a model's own root or below a wrapper's."""
    return any(pattern.fullmatch(f"{prefix}layers.{layer}.{block}.{name}") for prefix in PREFIXES[1:])


def default_targets(model: ModelShape) -> tuple[str, ...]:
    """Return PEFT's default `lora_target_modules` for a model.

    Raises:
        InputError: PEFT has no default for this model type and would raise.
    """
    if not model.architecture.lora_targets:
        raise InputError(
            f"PEFT has no default lora_target_modules for {model.model_type}. "
            "Name them in the config, such as lora_target_modules: all-linear."
        )
    return model.architecture.lora_targets


def expert_parameters(model: ModelShape) -> dict[ExpertPart, str]:
    """Names of the fused parameters in a decoder layer with experts; none where they are not known."""
    mixture = any(isinstance(layer.feed_forward, Experts) for layer in model.layers)
    row = model.architecture
    if not mixture or row.expert_names == "other":
        return {}
    block, names = row.expert_block, dict(UNGATED_NAMES if row.expert_names == "ungated" else EXPERT_NAMES)
    if block:
        names["router"] = row.router_name
    return {part: f"{block}.{name}".lstrip(".") for part, name in names.items()}


@lru_cache(maxsize=1024)
def named_parts(model: ModelShape, named: tuple[str, ...]) -> tuple[frozenset[ExpertPart], ...]:
    """The fused parameters of each layer that names of `lora_target_parameters` reach.

    A name is the end of the parameter's path: `mlp.experts.down_proj`, or `7.mlp.experts.down_proj` for one layer.
    Source: peft 0.21.2, tuners/tuners_utils.py, `BaseTuner._inject_parameters`.

    Raises:
        InputError: a name reaches no parameter of experts. PEFT itself ignores it if another one does.
    """
    known = expert_parameters(model)
    found: list[set[ExpertPart]] = [set() for _ in model.layers]
    for name in named:
        reached = [
            (i, part)
            for i, layer in enumerate(model.layers)
            if isinstance(layer.feed_forward, Experts)
            for part, parameter in known.items()
            if _ends_with(f"layers.{i}.{parameter}", name)
        ]
        if not reached:
            has = f"has {', '.join(known.values())}" if known else "has no fused experts whose names are known here"
            raise InputError(f"lora_target_parameters {name} reaches no experts of {model.id}: it {has}.")
        for i, part in reached:
            found[i].add(part)
    return tuple(frozenset(parts) for parts in found)


def _ends_with(parameter: str, name: str) -> bool:
    """True if a path of a parameter in `layers` ends with a name, whose own path may begin above `layers`."""
    return any(f".{prefix}{parameter}".endswith(f".{name}") for prefix in PREFIXES)
