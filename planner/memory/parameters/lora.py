"""LoRA: the modules that PEFT wraps, and the shapes of the matrices that it adds."""

from collections.abc import Iterator
from functools import lru_cache

from msgspec.structs import replace

from planner.cache_keys import StateInput
from planner.errors import InputError, UnknownArchitecture, UnknownName
from planner.memory.parameters.tensors import (
    EqualTensors,
    decoder_linears,
    expert_shapes,
    outer_linears,
    vision_linears,
)
from planner.models.architectures.table import ARCHITECTURES
from planner.models.layers import ExpertPart, Experts, Layer, Linear
from planner.models.lora_targets import FUSED_BRANCHES, is_expression, listed_targets, name_of_path, named_parts
from planner.models.shape import ModelShape

ALL_LINEAR = "all-linear"  # peft 0.21.2, utils/constants.py, `INCLUDE_LINEAR_LAYERS_SHORTHAND`
DEFAULT = "default"  # this program's word for: target_modules not set, so that PEFT chooses by architecture
AdaptersKey = tuple[int, tuple[str, ...], tuple[str, ...]]  # rank, targeted modules, named parameters


def adapters_key(candidate: StateInput) -> AdaptersKey | tuple[()]:
    """The settings of a candidate that `lora_in_order` takes; () without adapters."""
    if candidate.tuning == "full":
        return ()
    return candidate.lora_r, candidate.lora_target_modules, candidate.lora_target_parameters


@lru_cache(maxsize=4096)
def lora_tensors(
    model: ModelShape, lora_r: int, targets: tuple[str, ...], dora: bool = False, named: tuple[str, ...] = ()
) -> tuple[EqualTensors, ...]:
    """The matrices that PEFT adds for `targets`: names of modules, an expression, `("all-linear",)`, `("default",)`.

    `named`: fused experts by the names of their parameters (`target_parameters`).

        each targeted module    A is [r, in], B is [out, r]
        fused experts           A is [r x experts, in], B is [out, r x experts]; by names of modules r is doubled for
                                gate and up, by `named` it is not
        with `dora`             also a vector of [out]: the magnitude (peft, tuners/lora/dora.py, `DoraLinearLayer`)

    A name also matches modules of the vision tower, which an expression leaves out; text batches do not use those.

    Source: peft 0.21.2, tuners/tuners_utils.py, `_maybe_include_all_linear_layers` (all-linear: every nn.Linear and
    Conv1D but the output head, including the vision tower), tuners/lora/layer.py `ParamWrapper` (experts).

    Example: Qwen3-30B-A3B on all-linear, r 16: 996,507,648 parameters, of which attention has only 13,369,344. Since
    transformers 5 all experts of a layer are one parameter, and PEFT gives it rank r for every expert.

    Raises:
        InputError: the targets match nothing, match half of a fused parameter, or match fused experts with `dora` (PEFT
            raises for all three), or are paths.
        UnknownArchitecture: the shapes of the targeted modules are not known.
    """
    found: dict[EqualTensors, int] = {}
    experts = _expert_matrices(model, lora_r, targets, named)
    if experts and dora:
        raise InputError(
            f"PEFT has no DoRA for the fused experts of {model.id}. Change use_dora to false, or "
            "name lora_target_modules of the attention."
        )
    for matrix in (*experts, *module_matrices(model, lora_r, targets, dora)):
        one = replace(matrix, count=1)
        found[one] = found.get(one, 0) + matrix.count
    if not found:
        known = ", ".join(sorted({linear.name for linear, _, _ in _linears(model, targets)}))
        raise InputError(f"lora_target_modules {', '.join(targets)} match no module of {model.id}: it has {known}.")
    return tuple(replace(one, count=count) for one, count in found.items())


@lru_cache(maxsize=4096)
def module_matrices(
    model: ModelShape, lora_r: int, targets: tuple[str, ...], dora: bool = False
) -> tuple[EqualTensors, ...]:
    """The matrices of `lora_tensors` on modules, without those on fused experts."""
    return tuple(_matrices(_linears(model, targets), lora_r, target_names(model, targets), dora))


@lru_cache(maxsize=256)
def lora_in_order(
    model: ModelShape, lora_r: int, targets: tuple[str, ...], named: tuple[str, ...] = ()
) -> tuple[EqualTensors, ...]:
    """The matrices of `lora_tensors` layer by layer, in the order of `named_parameters`, fused experts last."""
    linears = [
        (linear, 1, layer.passed and linear.learns) for layer in model.layers for linear in decoder_linears(layer)
    ] + _outer_and_vision_linears(model, targets)
    experts = _expert_matrices(model, lora_r, targets, named)
    return (*_matrices(linears, lora_r, target_names(model, targets)), *experts)


@lru_cache(maxsize=4096)
def target_names(model: ModelShape, targets: tuple[str, ...]) -> frozenset[str]:
    """Names of the `nn.Linear` modules that PEFT wraps for `targets`; for fused experts see `targets_experts`.

    Raises:
        InputError: a target is a path that does not reach all modules of its last name.
    """
    paths = {} if is_expression(targets) else {each: name_of_path(model, each) for each in targets if "." in each}
    for path in (path for path, name in paths.items() if not name):
        raise InputError(
            f"lora_target_modules {path} does not reach every {path.rpartition('.')[2]} of {model.id}, which is not "
            "counted. Give the last name of the module alone."
        )
    return frozenset(_targeted_names(model, targets) - model.architecture.converted_names.keys()) | {*paths.values()}


@lru_cache(maxsize=1024)
def targets_experts(model: ModelShape, targets: tuple[str, ...]) -> bool:
    """True if `targets` include fused experts (see `lora_tensors`)."""
    converted = model.architecture.converted_names
    return any(converted[name] != "router" for name in _targeted_names(model, targets) & converted.keys())


def wraps_parameters(candidate: StateInput) -> bool:
    """True if PEFT puts adapters on parameters of fused experts or of their router (`ParamWrapper`)."""
    model = candidate.model
    converted = model.architecture.converted_names
    return bool(candidate.lora_target_parameters) or (
        bool(converted) and not converted.keys().isdisjoint(_targeted_names(model, candidate.lora_target_modules))
    )


def _targeted_names(model: ModelShape, targets: tuple[str, ...]) -> frozenset[str]:
    """Names of the targeted modules but those of paths; projections of experts have their names of transformers 4.

    Raises:
        UnknownArchitecture: the shapes of the modules are not known.
        UnknownName: PEFT has no default targets for the architecture.
    """
    if not model.known:
        raise UnknownArchitecture(
            f"{model.id} ({model.model_type}) has no layer shapes here, so its LoRA matrices cannot be counted. Use "
            "--tuning full."
        )
    if targets == (ALL_LINEAR,):
        if model.vision_linear_params and not vision_linears(model):
            raise UnknownArchitecture(
                f"all-linear reaches the vision tower of {model.id}, whose shapes are not known here. Name "
                "lora_target_modules."
            )
        return (
            frozenset(linear.name for linear, _, _ in _linears(model, targets)) - {"lm_head"}
            | model.architecture.converted_names.keys()
        )
    if targets == (DEFAULT,) and not model.architecture.lora_targets:
        raise UnknownName(
            "default LoRA targets of",
            model.model_type,
            (name for name, row in ARCHITECTURES.items() if row.lora_targets),
            hint="PEFT has none for it either: set lora_target_modules.",
        )
    return frozenset(name for name in listed_targets(model, targets) if "." not in name)


def _linears(model: ModelShape, targets: tuple[str, ...]) -> list[tuple[Linear, int, bool]]:
    """Every `nn.Linear` that `targets` may reach with its count, and False if a text batch does not use it."""
    found = [
        (linear, count, layer.passed and linear.learns)
        for layer, count in model.layer_kinds
        for linear in decoder_linears(layer)
    ]
    return [
        *found,
        *_outer_and_vision_linears(model, targets),
        (Linear(name="lm_head", in_features=model.hidden_size, out_features=model.vocab_size), 1, True),
    ]


def _outer_and_vision_linears(model: ModelShape, targets: tuple[str, ...]) -> list[tuple[Linear, int, bool]]:
    """The `nn.Linear` modules outside the decoder layers, without the head, as `_linears` returns them."""
    of_tower = () if is_expression(targets) else vision_linears(model)
    return [(linear, count, True) for linear, count in outer_linears(model)] + [
        (linear, count, False) for linear, count in of_tower
    ]


def _matrices(
    linears: list[tuple[Linear, int, bool]], lora_r: int, names: frozenset[str], dora: bool = False
) -> Iterator[EqualTensors]:
    """A and B, and with `dora` the magnitude, of every module of `linears` whose name is in `names`."""
    for linear, count, passed in linears:
        if linear.name in names:
            yield EqualTensors(part="adapter", shape=(lora_r, linear.in_features), count=count, passed=passed)
            yield EqualTensors(part="adapter", shape=(linear.out_features, lora_r), count=count, passed=passed)
            if dora:
                yield EqualTensors(part="adapter", shape=(linear.out_features,), count=count, passed=passed)


@lru_cache(maxsize=256)
def expert_ranks(
    model: ModelShape, lora_r: int, targets: tuple[str, ...], named: tuple[str, ...]
) -> tuple[dict[ExpertPart, int], ...]:
    """Adapter rank of each fused expert parameter and router, one dict per layer.

    A parameter selected both by `named` (`lora_target_parameters`) and by `targets` (`lora_target_modules`) has one
    adapter, with the rank for `targets`: 2 x `lora_r` for gate and up, else `lora_r`.

    Raises:
        InputError: only one of gate and up is targeted, which are one parameter.
    """
    converted, names = model.architecture.converted_names, _targeted_names(model, targets)
    targeted = sorted({converted[name] for name in names & converted.keys()})
    missing = {name for name in converted if converted[name] == "gate_up"} - names
    if "gate_up" in targeted and missing:
        raise InputError(
            f"lora_target_modules also needs {', '.join(sorted(missing))}: {model.id} has the experts' gate and up "
            "projections in one parameter."
        )
    everywhere = {part: lora_r * (FUSED_BRANCHES if part == "gate_up" else 1) for part in targeted}
    parts = named_parts(model, named) if named else (frozenset(),) * len(model.layers)
    return tuple(everywhere | {part: lora_r for part in sorted(own - set(targeted))} for own in parts)


def _expert_matrices(
    model: ModelShape, lora_r: int, targets: tuple[str, ...], named: tuple[str, ...]
) -> list[EqualTensors]:
    """A and B of the targeted fused experts and routers."""
    ranks = expert_ranks(model, lora_r, targets, named)
    return [
        matrix
        for layer, of_layer in zip(model.layers, ranks, strict=True)
        for part, rank in of_layer.items()
        for matrix in fused_matrices(layer, part, rank)
    ]


def fused_matrices(layer: Layer, part: ExpertPart, rank: int) -> tuple[EqualTensors, ...]:
    """A and B on a fused parameter of a layer; none in a layer without experts."""
    experts = layer.feed_forward
    if not isinstance(experts, Experts):
        return ()
    (num, gate_up_out, hidden), (_, _, inner) = expert_shapes(layer, experts)
    shapes: dict[ExpertPart, tuple[int, int, int]] = {
        "gate_up": (num * rank, hidden, gate_up_out),
        "down": (num * rank, inner, hidden),
        "router": (rank, hidden, num),
    }
    total, in_features, out_features = shapes[part]
    return tuple(EqualTensors(part="adapter", shape=shape) for shape in ((total, in_features), (out_features, total)))
