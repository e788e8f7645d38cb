"""`plan estimate` in Python, from TRL's own configs: `estimate(SFTConfig(...), Qwen2Config(...), "1xL4")`."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.candidate import Candidate
from planner.errors import InputError, shortened
from planner.estimate import RISK
from planner.estimate import estimate as estimate_candidate
from planner.gpus.cluster import Cluster
from planner.jobs.settings import fields_named, setting_names
from planner.methods import METHOD_OF, MethodName, method_of_config
from planner.models.catalogue import load_model
from planner.models.from_config import NOT_COUNTED, shape_of
from planner.models.shape import ModelShape
from planner.notebook.answer import WIDTH, options_of, table_html
from planner.quantities import Estimate
from planner.settings.table import has_setting

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from planner.requests.read_options import LoadModel
    from planner.requests.train_config import TrainConfig

HINT = f"It can be {', '.join(METHOD_OF)}."
# Fields of peft's LoraConfig -> settings of TRL's ModelConfig, and those that change memory and are not modelled.
# Source: peft 0.21, tuners/lora/config.py; trl 1.16, trainer/utils.py, `get_peft_config`.
LORA_SETTINGS = {
    "r": "lora_r",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "target_parameters": "lora_target_parameters",
    "use_dora": "use_dora",
}
LORA_UNMODELLED = (
    "exclude_modules", "bias", "layers_to_transform", "rank_pattern", "trainable_token_indices",
    "alora_invocation_tokens", "layer_replication", "lora_bias",
)  # fmt: skip
DERIVED = ("generation_batch_size",)  # of steps_per_generation, by the config itself: trl 1.16, grpo_config.py
NESTED = ("BitsAndBytesConfig", "ParallelismConfig")  # classes of a config inside a config
BITSANDBYTES = "bitsandbytes"  # as `quant_method` of a config


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateAnswer(Estimate):
    """An estimate that a notebook shows as the command's table. `warnings`: settings that it does not count."""

    cluster: Cluster
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the command's table."""
        from planner.report.table import estimate_table

        return estimate_table(self, self.cluster, self.warnings, WIDTH).plain

    def _repr_html_(self) -> str:
        """Return the table as HTML without colours of its own, so that it suits light and dark notebooks."""
        return table_html(repr(self))

    def plot_memory(self) -> "Figure":
        """Return a bar of memory for each phase of the step, with the card's end and the interval of the peak.

        Raises:
            PlanError: plotly is not installed.
        """
        from planner.notebook.figures import memory_figure

        return memory_figure(self)


def estimate(
    args: Any, model: Any, gpus: str | None = None, /, *, peft_config: Any = None, **asked: Any
) -> EstimateAnswer:
    """Estimate the memory and the speed of one training, as `plan estimate` does with the same settings in a file.

    Args:
        args: TRL's config of a method, such as `SFTConfig(...)`; or a `Candidate`, with its `Cluster` and a `risk`.
        model: a Transformers config, TRL's `ModelConfig`, or a name as `--model`.
        gpus: as `--gpus`: "1xL4".
        peft_config: PEFT's `LoraConfig`.
        asked: the command's flags (`risk`, `prompt_length`, `free_memory`, `accelerate_config`, `deepspeed_config`,
            ...) with underscores, and settings by the libraries' names; they win over `args`.

    Example: `estimate(SFTConfig(max_length=4096, use_cpu=True), "Qwen2.5-7B", "1xL4", peft_config=LoraConfig(r=16))`.
    On a machine without a GPU, TRL's configs want `use_cpu=True` or `bf16=False`; `use_cpu` changes no estimate.

    Raises:
        PlanError: what the command refuses, in its words; or `args` is no config of a TRL method.
    """
    if isinstance(args, Candidate):
        if not isinstance(model, Cluster) or gpus is not None or asked.keys() - {"risk"}:
            raise InputError("estimate takes a Candidate with its Cluster, and no setting but risk=0.01 beside them.")
        return _answer(estimate_candidate(args, model, asked.get("risk", RISK)), model, ())
    from planner.commands.estimate import corrected, formula_estimate
    from planner.requests.options import CandidateOptions
    from planner.requests.read_options import read_options
    from planner.training_stack import complete_models

    method = method_of_config(type(args), HINT)
    keys, name, load = _of_model(model)
    config = _config({**keys, **_lora_keys(peft_config), **_field_values(args, _unread_by(method))})
    options = options_of(CandidateOptions, {"model": name, "gpus": gpus, "method": method}, asked)
    if options.config is not None:
        raise InputError(f"config={shortened(options.config)} contradicts the {type(args).__name__}. Drop one of them.")
    request = read_options(options, complete_models(lambda line: None), load, config)
    answer, notes = corrected(request, formula_estimate(request))
    return _answer(answer, request.cluster, (*request.warnings, *notes))


def _answer(found: Estimate, cluster: Cluster, warnings: tuple[str, ...]) -> EstimateAnswer:
    own = {field.name: getattr(found, field.name) for field in fields(Estimate)}
    return EstimateAnswer(**own, cluster=cluster, warnings=warnings)


def _of_model(model: Any) -> "tuple[dict[str, Any], str | None, LoadModel]":
    """Return a model's settings, its name, and the function that returns the shapes of it and of other models.

    Raises:
        InputError: it is neither a name nor a config.
    """
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if isinstance(model, str):
        return {}, model, load_model
    if "ModelConfig" in kinds:
        return _field_values(model), None, load_model
    if kinds.isdisjoint({"PreTrainedConfig", "PretrainedConfig"}):
        raise InputError(
            f"estimate takes a model's config, TRL's ModelConfig or a name, not {shortened(type(model).__name__)}. "
            "Of a loaded model, give model.config."
        )
    config = json.loads(model.to_json_string(use_diff=False))
    name = str(model._name_or_path or config.get("model_type"))
    keys: dict[str, Any] = {}
    if (config.get("quantization_config") or {}).get("quant_method") == BITSANDBYTES:
        keys["quantization_config"] = config.pop("quantization_config")  # made while loading: not the checkpoint's
    shape = shape_of(config, id=name, counts=NOT_COUNTED)

    def load(other: str) -> ModelShape:
        return shape if other == name else load_model(other)

    return keys, name, load


def _field_values(config: Any, unread: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of a config. Those that nothing reads, or whose effect is not modelled, only if they are set.

    `to_dict()` of Transformers' arguments would replace the quantization config inside the caller's own object.
    """
    from planner.requests.train_config import UNMODELLED

    read = {
        field.name: getattr(config, field.name) for field in fields(config) if field.init and field.name not in DERIVED
    }
    if_set = {*UNMODELLED, *unread}
    defaults = {field.name: field.default for field in fields(config)}
    return {
        name: _plain(value) for name, value in read.items() if name not in if_set or value not in (defaults[name], None)
    }


def _unread_by(method: MethodName) -> set[str]:
    """Return the settings that a method does not have, though its class of configs may inherit them."""
    return {name for name in setting_names() if not all(has_setting(method, field) for field in fields_named([name]))}


def _lora_keys(peft_config: Any) -> dict[str, Any]:
    """Return a LoraConfig as TRL's ModelConfig would have it.

    Raises:
        InputError: it is another kind of adapters.
    """
    if peft_config is None:
        return {}
    if type(peft_config).__name__ != "LoraConfig":
        raise InputError(f"Adapters of {type(peft_config).__name__} are not counted, only those of a LoraConfig.")
    named = {name: _plain(getattr(peft_config, field)) for field, name in LORA_SETTINGS.items()}
    beyond = {
        field.name: _plain(getattr(peft_config, field.name))
        for field in fields(peft_config)
        if field.name in LORA_UNMODELLED and getattr(peft_config, field.name) not in (field.default, {}, None)
    }
    return {"use_peft": True, **named, **beyond}


def _config(keys: Mapping[str, Any]) -> "TrainConfig":
    """Return the settings of configs. A dataclass has every key of its class: those without effect need no warning."""
    from planner.requests.train_config import train_config

    read = train_config(keys, Path())
    return replace(read, ignored=(), unmodelled=(*read.unmodelled, *(keys.keys() & LORA_UNMODELLED)))


def _plain(value: Any) -> Any:
    """Return a value of a config as YAML has it: the value of an enum, "bfloat16" for torch.bfloat16."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(each) for each in (sorted(value) if isinstance(value, set) else value)]
    if type(value).__name__ in NESTED:
        return {name.removeprefix("_"): _plain(each) for name, each in vars(value).items()}
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value).removeprefix("torch.")
