"""Convert the options of a job to the job and the cluster that they describe."""

import shlex
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard, cast, get_args

from msgspec import Struct

from planner.candidate import MODEL_FIELDS, Candidate
from planner.errors import InputError, UnknownName, shortened
from planner.gpus.cluster import Cluster
from planner.gpus.parse import parse_cluster
from planner.jobs.base_candidate import TUNING_PINS
from planner.jobs.dialects.table import planned_targets
from planner.jobs.job import DEFAULT_MAX_LENGTH, Goal, Job, TuningOption, loaded_quantization
from planner.jobs.rules import LORA_FIELDS, unused_lengths
from planner.jobs.setting_values import MAX_DIGITS, typed_value
from planner.jobs.settings import (
    IMPLIED,
    candidate_fields,
    fields_named,
    is_implied,
    refuse_unknown,
    settings_of_fields,
    values_spelled,
)
from planner.jobs.teacher import beside_teacher
from planner.methods import METHODS, NEWEST_TRL, OLDEST_TRL, MethodName, release
from planner.models.catalogue import load_model
from planner.models.lora_targets import default_targets
from planner.models.shape import ModelShape
from planner.quantities import Note
from planner.requests.file_keys import OLDER_KEYS, newest_release_of
from planner.requests.options import JobOptions, SearchOptions, refuse_empty
from planner.requests.read_config import (
    config_files,
    freed,
    with_batch_of_files,
    with_nodes_of_cluster,
    with_server_node,
    without_unread,
)
from planner.schemes import SHARDING_OF_SHARED_ROWS
from planner.settings.setting import Value
from planner.settings.table import LENGTH_SETTINGS, SHORTHANDS, SPELLINGS, has_setting
from planner.settings.unread import WITHOUT_EFFECT

if TYPE_CHECKING:
    from planner.requests.train_config import TrainConfig

# Returns the model of a name (planner/models/catalogue.py).
LoadModel = Callable[[str], ModelShape]
# Completes a model whose layers have no formulas (planner/training_stack.py).
CompleteModel = Callable[[ModelShape], ModelShape]

CHECKPOINTING_DETAILS = {"checkpoint_every_n_layers", "checkpoint_offload"}  # `Method.keeps_checkpointing_details`
WITHOUT_DETAIL: tuple[Value, ...] = (1, False)  # every layer, and nothing is offloaded
EXAMPLES = {"--model": "Qwen2.5-7B", "--gpus": "2xA100-40G", "--method": "grpo"}


class JobRequest(Struct, frozen=True, kw_only=True):
    """The job and the cluster that options describe. `warnings`: settings that the plan does not use.

    `in_files`: Candidate fields that config files set, whatever flags say.
    """

    job: Job
    cluster: Cluster
    warnings: tuple[Note, ...]
    in_files: Mapping[str, Any]


def read_options(
    options: JobOptions, complete: CompleteModel, load: LoadModel = load_model, train: "TrainConfig | None" = None
) -> JobRequest:
    """Return the job and the cluster that options describe.

    `complete` adds the layers of a model that has no formulas; `load` returns the model of a name; `train` is a TRL
    config that was read already, instead of a file.

    Raises:
        InputError: an option is missing, empty, or contradicts another one.
        UnknownName: a model, GPU, method or setting that does not exist.
    """
    refuse_empty(options)
    flags, ranks = _flags(options), _ranks(options)
    tuning = _one_of("tuning class", options.tuning, get_args(TuningOption))
    free, of_tuning = freed(options), set[str]() if tuning == "auto" else {"tuning", "quantization"}
    decided = fields_named(flags) | of_tuning
    files = config_files(options, train, _switches(options, flags, tuning))
    in_file, asked = files.settings, files.method if options.method is None else options.method
    settings = _under_flags(in_file, flags, free | of_tuning) | flags
    name = _model_name(options.model, flags, in_file)
    _refuse_missing({"--model": name, "--gpus": options.gpus, "--method": asked}, options.config)
    assert options.gpus is not None and asked is not None
    method = _one_of("method", asked, tuple(METHODS))
    settings, unread = _read_by(method, settings, in_file.keys() - flags.keys())
    model, cluster = (
        complete(load(name)),
        parse_cluster(options.gpus, options.free_memory, options.host_memory, options.network),
    )
    settings, nodes = _of_cluster(settings, in_file, flags, cluster, files.launch_file)
    pinned = _pins(settings, model, lambda role: complete(load(role)))
    if "tuning" not in free:
        pinned = _with_adapters(pinned, tuning, model, options.config is not None or train is not None)
    if "sharding" not in free:
        pinned = _with_sharding(pinned)
    version, older = _trl_version(options.trl_version or files.trl_version, files.older)
    settled = {
        **METHODS[method].defaults_in(version, isinstance(options, SearchOptions)),
        **TUNING_PINS[tuning],
        **pinned,
    }
    pinned = without_unread(pinned, decided, Candidate(model=model, method=method, **settled))
    job = Job(
        model=model,
        method=method,
        tuning=tuning,
        pinned=pinned,
        optimize=_goal(options),
        risk=options.risk,
        effective_batch_size=options.effective_batch_size,
        trl_version=version,
        lora_ranks=ranks,
        given=_checked(options.set or {}),
    )
    job, cluster = beside_teacher(job, cluster)
    in_file, _ = with_nodes_of_cluster(in_file, cluster, files.launch_file)
    in_files = candidate_fields(with_server_node(in_file, cluster), model.dtype, loaded_quantization(model))
    lengths = (*unused_lengths(job), *(_unknown_length(job) if files.untruncated else ()))
    return JobRequest(
        job=with_batch_of_files(job, cluster, in_files, free),
        cluster=cluster,
        warnings=(*files.warnings, *nodes, *unread, *_without_effect(options.set or {}), *lengths, *older),
        in_files=in_files,
    )


def _of_cluster(
    settings: Mapping[str, Value],
    in_file: Mapping[str, Value],
    flags: Mapping[str, Value],
    cluster: Cluster,
    launch_file: bool,
) -> tuple[dict[str, Value], tuple[Note, ...]]:
    """Return the settings with the nodes of the cluster instead of the files', and a warning about that."""
    kept, warnings = with_nodes_of_cluster(in_file, cluster, launch_file)
    dropped = in_file.keys() - kept.keys() - flags.keys()
    own = {name: value for name, value in settings.items() if name not in dropped}
    return with_server_node(own, cluster, in_file), warnings


def _flags(options: JobOptions) -> dict[str, Value]:
    """Return the settings of `set` and of `SHORTHANDS`; several ranks of `lora_r` are not a setting.

    Raises:
        InputError: a setting is given twice with different values.
        UnknownName: a name that no library has.
    """
    flags = _checked(options.set or {})
    short = {setting: getattr(options, flag) for flag, setting in SHORTHANDS.items()}
    short |= _checked({"vllm_version": options.vllm_version})
    if not _several(options.lora_r):
        short |= _checked({"lora_r": options.lora_r})
    for setting, value in short.items():
        if value is None:
            continue
        if setting in flags and flags[setting] != value:
            raise InputError(f"{setting} is set twice: {value} and {flags[setting]}.")
        flags[setting] = value
    return flags


def _checked(settings: Mapping[str, Value]) -> dict[str, Value]:
    """Return settings by any of their names with values in their types, each checked by itself; None: not given.

    Those without effect are left out.

    Raises:
        InputError: a value has another type, or a setting is an option of its own.
        UnknownName: a name that no library has.
    """
    given = {name: value for name, value in settings.items() if value is not None and not is_implied(name, value)}
    for name in given:
        refuse_unknown(name)
    given = {name: value for name, value in given.items() if name not in WITHOUT_EFFECT}
    return {name: typed_value(name, value) for name, value in given.items()}


def _without_effect(settings: Mapping[str, Value]) -> list[Note]:
    """Return notes that name the given settings without effect, and those that the plan decides itself."""
    without = tuple(name for name in settings if name in WITHOUT_EFFECT)
    decided = tuple(name for name, value in settings.items() if is_implied(name, value) and len(IMPLIED[name]) > 1)
    notes = (Note("keys_without_effect", {"keys": without}), Note("keys_not_used", {"keys": decided}))
    return [note for note in notes if note.values["keys"]]


def _several(lora_r: str | int | None) -> TypeGuard[str]:
    """Return whether an option names several ranks, such as "16,32,64"."""
    return isinstance(lora_r, str) and "," in lora_r


def _ranks(options: JobOptions) -> tuple[int, ...]:
    """Return the ranks of `--lora-r 16,32,64`, from which a search takes the largest that fits.

    Raises:
        InputError: the text is not a list of ranks, or nothing is searched.
    """
    if not _several(options.lora_r):
        return ()
    parts = [part.strip() for part in options.lora_r.split(",")]
    if not all(part.isdecimal() and len(part) <= MAX_DIGITS and int(part) > 0 for part in parts):
        raise InputError(f"--lora-r {shortened(options.lora_r)} is no list of ranks. Write them as 16,32,64.")
    if not isinstance(options, SearchOptions):
        raise InputError(f"--lora-r {shortened(options.lora_r)} needs a search. Give one rank, such as {parts[0]}.")
    return tuple(int(part) for part in parts)


def _switches(options: JobOptions, flags: Mapping[str, Value], tuning: TuningOption) -> dict[str, object]:
    """Return the settings that spell the engine, the tuning and the quantization of flags: `use_vllm=true ...`.

    A flag such as `--lora-r` tells a search that there are adapters.

    Raises:
        InputError: flags contradict each other.
    """
    named = {name: value for name, value in flags.items() if fields_named([name]) & {"vllm", "tuning", "quantization"}}
    adapts = isinstance(options, SearchOptions) and not fields_named(flags).isdisjoint(LORA_FIELDS)
    adapters = TUNING_PINS["lora"] if adapts else {}
    return settings_of_fields({**adapters, **TUNING_PINS[tuning], **candidate_fields(named, "")})


def _under_flags(in_file: Mapping[str, Value], flags: Mapping[str, Value], taken: set[str]) -> dict[str, Value]:
    """Return the settings of a file without those whose Candidate fields are decided by flags, or `taken`.

    Settings that spell a value together with the flags stay: `load_in_4bit` under `use_bnb_nested_quant=false`.
    """
    by_flags = fields_named(flags)
    kept = {name: value for name, value in in_file.items() if not fields_named([name]) & (taken | by_flags)}
    for field in (by_flags - taken) & SPELLINGS.keys():
        beside, given = (
            {name: value for name, value in settings.items() if fields_named([name]) == {field}}
            for settings in (in_file, flags)
        )
        if values_spelled(field, beside | given):
            kept |= beside
    return kept


def _read_by(
    method: MethodName, settings: Mapping[str, Value], in_file: Collection[str]
) -> tuple[dict[str, Value], list[Note]]:
    """Return the settings without those of a file that the method does not have, and a warning about these."""
    fixed = METHODS[method].fixed  # decided by the trainer, whatever else a file may say
    settings = {
        name: value for name, value in settings.items() if name not in in_file or not fields_named([name]) & fixed
    }
    unread = [
        name
        for name in settings
        if name in in_file
        and any(field not in LENGTH_SETTINGS and not has_setting(method, field) for field in fields_named([name]))
    ]
    details = [name for name in unread if fields_named([name]) <= CHECKPOINTING_DETAILS]
    dropped = tuple(name for name in details if settings[name] not in WITHOUT_DETAIL)
    absent = tuple(name for name in unread if name not in details and settings.get("tool", "trl") == "trl")
    warnings = [Note("method_lacks_settings", {"method": method, "settings": absent})] if absent else []
    if dropped:
        warnings.append(Note("checkpointing_details_dropped", {"method": method, "settings": dropped}))
    return {name: value for name, value in settings.items() if name not in unread}, warnings


def _model_name(flag: str | None, flags: Mapping[str, Value], in_file: Mapping[str, Value]) -> str:
    """Return the policy's name from `--model`, `--set model=...` or the file, in this order; empty if none names it.

    Raises:
        InputError: `--model` and `--set` name different models.
    """
    names = [
        name
        for settings in (flags, in_file)
        for name in (settings.get("model_name_or_path"), settings.get("model"))
        if name
    ]
    if flag is None:
        return str(names[0]) if names else ""
    if {"model", "model_name_or_path"} & flags.keys() and names[:1] != [flag]:
        other = shortened(names[0] if names else "")
        raise InputError(f"--model {flag} contradicts --set model={other}. Drop one of them.")
    return flag


def _pins(settings: Mapping[str, Value], model: ModelShape, load: LoadModel) -> dict[str, Any]:
    """Return the settings as Candidate fields, without the policy.

    Names of other models become their shapes, and a regular expression becomes names of modules if it can.
    """
    pinned: dict[str, Any] = candidate_fields(settings, model.dtype, loaded_quantization(model))
    for role in MODEL_FIELDS[1:]:
        if role in pinned:
            pinned[role] = load(pinned[role])
    if "lora_target_modules" in pinned:
        targets = planned_targets(pinned.get("tool"), model, pinned["lora_target_modules"])
        pinned["lora_target_modules"] = targets
    return {field: value for field, value in pinned.items() if field != "model"}


def _with_sharding(pins: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pins with the only sharding under which GPUs share rows, if they do and none is pinned."""
    only = {name: kind for name, kind in SHARDING_OF_SHARED_ROWS.items() if pins.get(name, 1) > 1}
    return {"sharding": next(iter(only.values())), **pins} if only else dict(pins)


def _with_adapters(pins: Mapping[str, Any], tuning: TuningOption, model: ModelShape, config: bool) -> dict[str, Any]:
    """Return the pins with LoRA, if a setting of LoRA implies it.

    `config`: a TRL config is given. Then LoRA without `lora_target_modules` has PEFT's default ones; for an
    architecture without defaults it has none if parameters are named (peft 0.21.2, tuners/lora/model.py,
    `LoraModel._prepare_adapter_config`). LoRA without any given setting is the plan's own choice.
    """
    pinned, given = dict(pins), not pins.keys().isdisjoint(LORA_FIELDS)
    if tuning == "auto" and given:
        pinned.setdefault("tuning", "lora")
    adapters = pinned.get("tuning") == "lora" or (given and tuning in ("lora", "qlora"))
    if config and adapters and "lora_target_modules" not in pinned:
        named = pinned.get("lora_target_parameters") and not model.architecture.lora_targets
        pinned["lora_target_modules"] = () if named else default_targets(model)
    return pinned


def _unknown_length(job: Job) -> list[Note]:
    """Return a warning for a config with `max_length: null`, if neither a flag nor a search decides the length.

    Source: trl 1.16, trainer/sft_trainer.py, `SFTTrainer._prepare_dataset` ("Truncate to max_length").
    """
    if "max_length" in job.pinned or job.optimize == "max-length" or not has_setting(job.method, "max_length"):
        return []
    taken = METHODS[job.method].defaults_in(job.trl_version).get("max_length", DEFAULT_MAX_LENGTH)
    return [Note("rows_not_cut", {"taken": taken})]


def _trl_version(text: str | None, older: Mapping[str, str]) -> tuple[str, list[Note]]:
    """Return the TRL release to plan for, with notes if it comes from a file or is older than the oldest modelled one.

    `text`: the release that was given; None: the newest that has all keys of the config file, whose `older` keys are
    those that only older releases have.

    Raises:
        InputError: the release is newer than the newest that is modelled, or does not have a key.
    """
    version = text or newest_release_of(older) or NEWEST_TRL
    if release(version) > release(NEWEST_TRL):
        raise InputError(
            f"--trl-version {version} is newer than {NEWEST_TRL}, the newest whose code paths are counted here. "
            "Leave it out to plan for that."
        )
    for key, last in older.items():
        if release(version) > release(last):
            raise InputError(
                f"TRL {version} stops at {key}, which only releases until {last} have. "
                f"Leave --trl-version out, or write {OLDER_KEYS[key].replacement}."
            )
    notes = [Note("keys_of_older_releases", {"keys": tuple(older), "trl": version})] if older else []
    if release(version) < release(OLDEST_TRL):
        notes.append(Note("oldest_trl_taken", {"trl": version, "oldest": OLDEST_TRL}))
    return version, notes


def _refuse_missing(needed: Mapping[str, object], config: str | None) -> None:
    """Raise InputError if a needed flag has no value, with an example that keeps the values that were given."""
    missing = [flag for flag, value in needed.items() if not value]
    if missing:
        whole = {flag: str(needed[flag] or example) for flag, example in EXAMPLES.items()}
        if config is not None:
            whole = {
                "--config": config,
                **{flag: whole[flag] for flag in whole if flag != "--model" or flag in missing},
            }
        example = " ".join(f"{flag} {shlex.quote(shortened(value))}" for flag, value in whole.items())
        verb = "is" if len(missing) == 1 else "are"
        methods = f". Methods are {', '.join(METHODS)}." if "--method" in missing else ""
        raise InputError(f"{_listed(missing)} {verb} missing. For example: plan {example}{methods}")


def _listed(words: list[str]) -> str:
    """Join words with commas and a final "and"."""
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _goal(options: JobOptions) -> Goal:
    """Return the goal of a search; that of a single candidate is the throughput.

    Raises:
        UnknownName: it is none of a single cluster.
    """
    if not isinstance(options, SearchOptions):
        return "throughput"
    goals = get_args(Goal)
    plain = options.optimize.strip().lower().replace("_", "-")
    if plain not in goals:
        hint = f"It can be {', '.join(goals)}, or cost where prices are given."
        raise UnknownName("goal", options.optimize, goals, hint=hint)
    return cast(Goal, plain)


def _one_of(kind: str, name: str, known: tuple[str, ...]) -> Any:
    """Return the known name that equals `name`, ignoring case and the difference between `_` and `-`.

    TRL writes both GRPO and online_dpo.

    Raises:
        UnknownName: no known name is equal.
    """
    plain = name.strip().lower().replace("_", "-")
    if plain not in known:
        raise UnknownName(kind, name, known, hint=f"It can be {', '.join(known)}.")
    return plain
