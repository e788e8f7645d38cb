"""Read a TRL config file (YAML, as in `trl sft --config train.yaml`): its settings, and the keys that are not used."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from os.path import isfile
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from planner.errors import InputError, UnknownName, shortened
from planner.jobs.config_changes import Needs, unread_note
from planner.jobs.dialects.dialect import Dialect, read_keys
from planner.jobs.dialects.table import dialect_of
from planner.jobs.dialects.unread import refuse_unread
from planner.jobs.settings import DISTRIBUTED, is_implied, parse_assignments, setting_names, settings_text
from planner.launch.trl_config import FACTS
from planner.quantities import Note
from planner.requests.file_keys import older_keys, refuse_misspelt, with_newer_keys
from planner.requests.launch_config import (
    DEEPSPEED_UNMODELLED,
    PROCESSES,
    load_launch_config,
    parse_mapping,
    read_deepspeed_config,
)
from planner.settings.setting import Value
from planner.settings.table import FSDP_OFFLOAD, RELEASES
from planner.settings.tools import TOOLS
from planner.settings.unread import UNMODELLED

# Keys whose value is a mapping of further settings.
# Source: trl/scripts/utils.py, `TrlParser.parse_args_and_config` (env), transformers/training_args.py,
# `TrainingArguments.activation_checkpointing` and `fsdp_config`, trl/trainer/base_config.py (model_init_kwargs);
# transformers 5.23, trainer_pt_utils.py, `AcceleratorConfig`.
NESTED_KEYS = (
    "env",
    "model_init_kwargs",
    "gradient_checkpointing_kwargs",
    "activation_checkpointing_kwargs",
    "parallelism_config",
    "accelerator_config",
    "gradient_accumulation_kwargs",
)

# Defaults of TRL's config classes for keys that a file leaves out. Source: trl/trainer/model_config.py,
# trl/trainer/grpo_config.py; accelerate 1.15, utils/dataclasses.py, `GradientAccumulationPlugin`.
FILE_DEFAULTS: dict[str, Value] = {
    "use_peft": False,
    "use_vllm": False,
    "bf16": True,
    "fp16": False,
    "lora_dropout": 0.05,
    "sync_each_batch": False,
}

NO_FLAGS: Mapping[str, object] = {}

# Keys of `fsdp_config` -> settings, and those with the values that the plan counts on.
FSDP_KEYS = {"version": "fsdp_version", "cpu_offload": FSDP_OFFLOAD, "offload_params": FSDP_OFFLOAD}
FSDP_DEFAULTS: dict[str, tuple[object, ...]] = {
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "transformer_based_wrap"),
    "reshard_after_forward": (True, "full_shard"),
    "activation_checkpointing": (False,),
    "cpu_ram_efficient_loading": (True, False),
    "state_dict_type": ("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
}

# Keys of `BitsAndBytesConfig` in `model_init_kwargs` -> settings of TRL's ModelConfig.
# Source: transformers 5.23, utils/quantization_config.py; trl 1.16, trainer/utils.py, `get_quantization_config`.
QUANTIZATION_KEYS = {
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
    "bnb_4bit_quant_storage": "bnb_4bit_quant_storage",
}

# Keys of `distributed_config` -> settings, other keys with the values that change nothing, and why some are refused.
# Source: transformers 5.23, distributed/configuration_utils.py, `DistributedConfig`, mixin.py,
# `DistributedMixin._resolve_parallel_plans`.
MESH_SIZES = {"fsdp_size": "num_processes", "ep_size": "ep_size", "dp_replicate_size": "dp_replicate_size"}
MESH_DEFAULTS: dict[str, tuple[object, ...]] = {
    "ep_implementation": ("auto", "all_to_all"), "tp_plan": ({},),
    "enable_sequence_parallel": (True,),  # "Not wired up yet"
}  # fmt: skip
_NO_PLAN = 'Transformers 5.23 stops at experts without tensor parallelism ("has no `tp_plan`")'
MESH_REFUSED = {
    **dict.fromkeys(
        ("ep_implementation", "tp_plan", "ep_plan", "fsdp_plan", "fsdp_cpu_offload", "fsdp_mixed_precision"),
        "it was not started",
    ),
    "tp_size": "tensor parallelism is planned with the model's own tp_plan, and without ep_size beside it",
    "enable_expert_parallel": _NO_PLAN,
    "pp_size": "Transformers 5.24 trains with no pipeline: what a stage sends to the next has no gradient, and no "
    "stage returns a loss (distributed/pipeline_parallel.py); nor does it combine one with FSDP2",
}
MESH_UNKNOWN = "Transformers has no such key and leaves it out (`DistributedConfig.from_dict`)"

# Keys for `trl`, which hands them to accelerate, not for the trainer. Source: trl 1.16, cli/commands/training.py.
LAUNCHER, PRECISION = "accelerate_config", "mixed_precision"
LAUNCH_KEY = "compute_environment"  # of every file that `accelerate config` writes
FACTS_OF_FLAGS = ("method", "trl_version", LAUNCHER)  # in an exported file's line of facts: options, and no settings

# Of these, the ones that a search keeps: it decides the others itself.
SEARCH_DEFAULTS: dict[str, Value] = {"lora_dropout": 0.05}

# Launchers that start processes without sharding.
UNSHARDED = (("distributed_type", "NO"), ("distributed_type", "MULTI_GPU"))

# Keys of nested mappings that change memory or speed and are not modelled. Other keys of `generation_kwargs` choose the
# next token. Source: transformers 5.23, generation/configuration_utils.py, `GenerationConfig`.
INNER_UNMODELLED = {
    "teacher_model_init_kwargs": {"quantization_config", "attn_implementation"},
    "generation_kwargs": {
        "assistant_early_exit", "cache_implementation", "num_beams", "num_return_sequences", "output_hidden_states",
        "output_logits", "output_scores", "prompt_lookup_num_tokens", "use_cache",
    },
}  # fmt: skip


class TrainConfig(Struct, frozen=True, kw_only=True):
    """The settings of a config file. `ignored`: keys without effect; `unmodelled`: keys with an unknown effect."""

    settings: dict[str, Value]
    ignored: tuple[str, ...]
    unmodelled: tuple[str, ...]
    accelerate: Path | None = None  # the launch file that it names
    method: str = ""  # of a file that was exported; empty: it does not say
    trl_version: str = ""
    older: Mapping[str, str] = field(default_factory=dict)  # keys of older releases -> the last one that has it
    untruncated: bool = False  # its max_length is null: TRL does not cut the rows
    notes: tuple[Note, ...] = ()  # of another tool's config, and of settings that nothing reads

    @property
    def warnings(self) -> tuple[Note, ...]:
        """One warning for the unmodelled keys and one for the ignored keys, if there are any."""
        notes = (Note("keys_not_counted", {"keys": self.unmodelled}), Note("keys_not_used", {"keys": self.ignored}))
        return (*self.notes, *(note for note in notes if note.values["keys"]))


class ConfigFiles(Struct, frozen=True, kw_only=True):
    """The files that a training is started with; None: not given. `deepspeed` wins over a file that another names.

    `method`: the one that was asked for; empty: that of an exported train.yaml, or unknown. `flags`: the
    switches that flags decide, such as `use_vllm`, with what belongs to them.
    """

    train: Path | None = None
    accelerate: Path | None = None
    deepspeed: Path | None = None
    method: str = ""
    flags: Mapping[str, object] = field(default_factory=dict)


def load_config_files(
    files: ConfigFiles, defaults: Mapping[str, Value] = FILE_DEFAULTS, train: TrainConfig | None = None
) -> TrainConfig:
    """Load a TRL config, accelerate's launch file and a DeepSpeed config, as one set of settings.

    `defaults`: settings of a TRL config that leaves them out. `train`: one that was read already, instead of a file.

    Raises:
        InputError: a file cannot be read, or two of them give a setting different values.
    """
    if files.train:
        train = load_train_config(files.train, defaults, files.method, files.flags)
    train = train or TrainConfig(settings={}, ignored=(), unmodelled=())
    launcher = files.accelerate or train.accelerate
    launch = load_launch_config(launcher, files.deepspeed)
    replaced = {*launch.settings, *DEEPSPEED_UNMODELLED} if files.deepspeed else set()
    settings = {name: value for name, value in train.settings.items() if name not in replaced}
    unmodelled = (*(name for name in train.unmodelled if name not in replaced), *launch.unmodelled)
    settings = _with_launchers_precision(settings, launch.mixed_precision)
    sharded = "zero_stage" in settings or "distributed_type" in settings
    for name, value in launch.settings.items():
        if sharded and (name, value) in UNSHARDED:
            continue  # the trainer's own arguments shard what the launcher has only started
        kept = settings.setdefault(name, value)
        if kept is not value and kept != value and name not in PROCESSES:  # NaN differs from itself
            where, other = files.train or "the config", launcher or files.deepspeed
            raise InputError(f"{name} is {kept} in {where} and {value} in {other}. Drop one of them.")
    return replace(train, settings=settings, unmodelled=unmodelled, accelerate=launcher)


def _with_launchers_precision(settings: dict[str, Value], precision: Value) -> dict[str, Value]:
    """Return the settings with accelerate's mixed precision, which a training without one of its own takes.

    `precision`: false is YAML's reading of a bare `no`; empty or None: accelerate has none.
    Source: transformers 5.23, training_args.py, `ACCELERATE_MIXED_PRECISION`.
    """
    if precision in (None, "") or settings.get("bf16") is not False or settings.get("fp16"):
        return settings
    own = {name: value for name, value in settings.items() if name not in ("bf16", "fp16")}
    return {**own, "precision": "no" if precision is False else precision}


def load_train_config(
    path: Path,
    defaults: Mapping[str, Value] = FILE_DEFAULTS,
    asked_method: str = "",
    flags: Mapping[str, object] = NO_FLAGS,
) -> TrainConfig:
    """Load a YAML file with TRL's keys; keys that the file leaves out have `defaults`.

    `asked_method`, `flags`: see `ConfigFiles`.

    Raises:
        InputError: the file cannot be read, does not map keys to values, or is another tool's.
    """
    from planner.files.yaml import read_yaml_text

    text = read_yaml_text(path)
    keys = parse_mapping(text, path, "TRL config", "model_name_or_path: Qwen/Qwen2.5-7B")
    facts = exported_facts(text, path)
    method, version = facts.pop("method", ""), facts.pop("trl_version", "")
    refuse_unread(keys, str(path))
    if LAUNCH_KEY in keys:
        raise InputError(
            f"{path} is a file for accelerate launch, which says no model. Use --accelerate-config {path}, with "
            "--config of a training, or --model and --method."
        )
    dialect = dialect_of(keys)
    if dialect is not None:
        return _config_of_tool(dialect, keys, path.parent, defaults)
    refuse_misspelt(keys)
    older = older_keys(keys, asked_method or str(method))
    read = train_config({**with_newer_keys(keys, older), **facts}, path.parent, defaults, flags=flags)
    return replace(read, method=str(method), trl_version=str(version), older=older)


def _config_of_tool(
    dialect: Dialect, keys: Mapping[str, object], folder: Path, defaults: Mapping[str, Value]
) -> TrainConfig:
    """Return the settings of another tool's config. A search decides itself what the file leaves out.

    Raises:
        InputError: a key is not counted, or the tool stops at it.
    """
    reading, tool = read_keys(dialect, keys), TOOLS[dialect.tool]
    read = train_config(reading.settings, folder, {} if defaults == SEARCH_DEFAULTS else dialect.defaults)
    return replace(
        read,
        method=reading.method,
        trl_version=tool.trl,
        ignored=reading.unused,
        unmodelled=(*reading.unmodelled, *read.unmodelled),
        notes=(Note("read_as_tool", {"tool": tool.name, "release": tool.release}),),
    )


def exported_facts(text: str, path: Path) -> dict[str, Value]:
    """Return what the line of an exported train.yaml says that plan reads and TRL does not; empty without the line.

    Raises:
        InputError: the line has no names and values.
        UnknownName: it has a name that no library has.
    """
    lines = [line.removeprefix(FACTS) for line in text.splitlines() if line.startswith(FACTS)]
    words = [word for line in lines for word in line.split()]
    own = dict(word.split("=", 1) for word in words if word.partition("=")[0] in FACTS_OF_FLAGS and "=" in word)
    try:
        return {**own, **parse_assignments(word for word in words if word.partition("=")[0] not in own)}
    except (InputError, UnknownName) as error:
        raise InputError(f"{path}, the line {FACTS!r}: {error}") from error


def train_config(
    keys: Mapping[str, object],
    folder: Path,
    defaults: Mapping[str, Value] = FILE_DEFAULTS,
    chosen: Collection[str] | None = None,
    flags: Mapping[str, object] = NO_FLAGS,
) -> TrainConfig:
    """Return the settings of TRL's keys; files that they name are in the working directory or in `folder`.

    `chosen`: the keys that the user chose, of which those that nothing reads are named; None: all. `flags`: see
    `ConfigFiles`.

    Raises:
        InputError: a DeepSpeed config that the keys name cannot be read.
    """
    counted = {name: value for name, value in keys.items() if not is_implied(name, value)}
    pairs = dict(_flatten(counted, folder))
    launcher, precision = pairs.pop(LAUNCHER, None), pairs.pop(PRECISION, None)
    known = set(setting_names())
    settings = {**defaults} | {name: value for name, value in pairs.items() if name in known and value is not None}
    unknown = sorted(name for name in pairs if name not in known)
    inner = (f"{name}: {kind}" for name, kinds in INNER_UNMODELLED.items() for kind in kinds)
    unmodelled = {*UNMODELLED, *DEEPSPEED_UNMODELLED, *inner}
    if settings.get("fp16") and "bf16" not in pairs:
        settings |= {"bf16": False}  # its default
    on = {switch for switch in DETAILS_OF_SWITCHES if flags.get(switch)}
    if defaults == SEARCH_DEFAULTS and "use_peft" not in pairs:
        on.add("use_peft")  # left to the search, which `lora_r` of a file decides as `--lora-r` does
    settings, unread = _without_unread(settings, pairs, pairs if chosen is None else chosen, on)
    return TrainConfig(
        accelerate=_beside(folder, str(launcher)) if launcher else None,
        settings=_with_launchers_precision(settings, precision),
        notes=unread,
        untruncated="max_length" in pairs and pairs["max_length"] is None,
        ignored=tuple(name for name in unknown if name not in unmodelled),
        unmodelled=tuple(name for name in unknown if name in unmodelled and pairs[name] not in (None, False)),
    )


def plain_assignments(assignments: Iterable[str]) -> Iterator[str]:
    """Yield the texts of `--set`; for a mapping, such as `accelerator_config={...}`, those of the settings in it.

    Raises:
        InputError: a text is no mapping, though it begins as one.
    """
    for assignment in assignments:
        name, _, text = (part.strip() for part in assignment.partition("="))
        if not text.startswith("{") or is_implied(name, text):
            yield assignment
            continue
        mapping = parse_mapping(text, Path(f"--set {name}"), "mapping", "{use_reentrant: false}")
        yield from (settings_text({key: value}) for key, value in _flatten({name: mapping}, Path()))


def _beside(folder: Path, named: str) -> Path:
    """Return the path that a config file names: from the working directory, as in TRL, or from the file's folder."""
    return folder / named if isfile(folder / named) and not isfile(named) else Path(named)


def _flatten(keys: Mapping[str, object], folder: Path) -> Iterator[tuple[str, Value]]:
    """Yield the keys and plain values of a config, those of nested mappings and of DeepSpeed's config included."""
    for key, value in keys.items():
        name = str(key)
        if name in NESTED_KEYS and isinstance(value, Mapping):
            yield from _flatten(value, folder)
        elif name == "deepspeed" and value:
            launch = read_deepspeed_config(value, folder)
            yield from launch.settings.items()
            yield from ((unmodelled, True) for unmodelled in launch.unmodelled)
        elif name in LOADING and isinstance(value, Mapping):
            yield from LOADING[name](value)
        elif name in INNER_UNMODELLED and isinstance(value, Mapping):
            yield from _inner_settings(name, value)
        elif name == "fsdp" and value:
            yield from _fsdp_settings(value)
        elif name == "fsdp_config" and isinstance(value, Mapping):
            yield from _fsdp_config_settings(value)
        else:
            yield name, _plain(value)


def _mesh_settings(mesh: Mapping[object, object]) -> Iterator[tuple[str, Value]]:
    """Yield the settings of a `distributed_config` of Transformers: tensor parallelism, or FSDP2 and divided experts.

    Raises:
        InputError: it has a key that is not planned; the message says why.
    """
    chosen = {str(key): value for key, value in mesh.items() if not _is_default(str(key), value)}
    if chosen.get("tp_plan") == "auto" and "tp_size" in chosen:
        del chosen["tp_plan"]
    if "tp_size" in chosen and "ep_size" not in chosen and mesh.get("tp_plan") != {}:  # an empty plan divides nothing
        yield from _layer_sizes(chosen.pop("tp_size"), chosen.pop("fsdp_size", 1))
    else:
        yield DISTRIBUTED, "fsdp"
    for key, value in chosen.items():
        if key not in MESH_SIZES:
            why = MESH_REFUSED.get(key, MESH_UNKNOWN)
            raise InputError(
                f"distributed_config with {key} {value} is not planned: {why}. "
                "Use tp_size alone, or fsdp_size with ep_size or tp_size."
            )
        yield MESH_SIZES[key], _plain(value)


def _layer_sizes(tp_size: object, fsdp_size: object) -> Iterator[tuple[str, Value]]:
    """Yield the settings of GPUs that share each layer, all of them or those of each of FSDP2's shards.

    Raises:
        InputError: beside FSDP2 a size is no whole number from 1 on.
    """
    if fsdp_size == 1:
        yield "num_processes", _plain(tp_size)
        yield DISTRIBUTED, "tp"
        return
    if not (isinstance(tp_size, int) and isinstance(fsdp_size, int) and tp_size > 0 and fsdp_size > 0):
        sizes = f"tp_size {shortened(repr(tp_size))} and fsdp_size {shortened(repr(fsdp_size))}"
        raise InputError(f"Sizes of a distributed_config must be whole numbers of 1 or more, not {sizes}.")
    yield "num_processes", tp_size * fsdp_size
    yield "tp_size", tp_size
    yield DISTRIBUTED, "fsdp"


def _is_default(key: str, value: object) -> bool:
    """Return whether a key of a `distributed_config` changes nothing."""
    unset = value is None or value is False or (value == 1 and value is not True)
    return unset or value in MESH_DEFAULTS.get(key, ())


def _quantization_settings(config: Mapping[object, object]) -> Iterator[tuple[str, Value]]:
    """Yield the settings of a `BitsAndBytesConfig`."""
    yield from ((QUANTIZATION_KEYS[str(key)], _plain(config[key])) for key in config.keys() & QUANTIZATION_KEYS.keys())


LOADING = {DISTRIBUTED: _mesh_settings, "quantization_config": _quantization_settings}


def _inner_settings(name: str, inner: Mapping[object, object]) -> Iterator[tuple[str, Value]]:
    """Yield the settings of a teacher or of `generate` that a mapping has, and its keys that are not modelled."""
    if name == "teacher_model_init_kwargs" and "dtype" in inner:
        yield "teacher_dtype", _plain(inner["dtype"])
    yield from ((f"{name}: {kind}", True) for kind in inner.keys() & INNER_UNMODELLED[name])


def _plain(value: object) -> Value:
    """Return a value of a config as a setting has it; text for what no setting is."""
    if isinstance(value, (list, tuple)):
        return tuple(map(str, value))
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def _fsdp_settings(value: object) -> Iterator[tuple[str, Value]]:
    """Yield the settings of the trainer's `fsdp`: true, or words such as "full_shard offload"."""
    yield "distributed_type", "FSDP"
    if isinstance(value, str) and "offload" in value.split():
        yield FSDP_OFFLOAD, True


def _fsdp_config_settings(config: Mapping[object, object]) -> Iterator[tuple[str, Value]]:
    """Yield the settings of the trainer's `fsdp_config`; its keys may begin with "fsdp_".

    Source: transformers 5.23, training_args.py, `_process_fsdp_args`.
    """
    for key, value in config.items():
        name = str(key).removeprefix("fsdp_")
        if name in FSDP_KEYS:
            yield FSDP_KEYS[name], _plain(value)
        elif value not in FSDP_DEFAULTS.get(name, (None,)):
            yield name, _plain(value)


# A switch -> the settings that TRL ignores while the switch is off.
DETAILS_OF_SWITCHES = {
    "use_vllm": tuple(name for name in setting_names() if name.startswith("vllm_")),
    "use_peft": ("lora_r", "lora_dropout", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save"),
    "load_in_4bit": ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
}


def _without_unread(
    settings: dict[str, Value], file_keys: Collection[str], chosen: Collection[str], on: Collection[str]
) -> tuple[dict[str, Value], tuple[Note, ...]]:
    """Return the settings without those that TRL would not read, and a note that names those that were chosen.

    These are details of vLLM, LoRA or quantization while `use_vllm`, `use_peft` or `load_in_4bit` is off; `on`: the
    switches that flags or the file's own details turn on for what the file has. A release (`vllm_version`) is what is
    installed: it stays while a search decides about the switch.
    """
    unread = {
        name: Needs(switch)
        for switch, details in DETAILS_OF_SWITCHES.items()
        for name in details
        if name in settings and not settings.get(switch)
        if (name not in RELEASES or switch in settings) and not (switch in on and name in file_keys)
    }
    kept = {name: value for name, value in settings.items() if name not in unread}
    return kept, unread_note({name: needs for name, needs in unread.items() if name in chosen})
