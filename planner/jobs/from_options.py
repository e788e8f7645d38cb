"""The options of the command -> the job and the cluster they ask about."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from planner.candidate import Candidate
from planner.errors import InputError, UnknownName
from planner.gpus.cluster import Cluster
from planner.gpus.parse import parse_cluster
from planner.jobs.base_candidate import base_candidate
from planner.jobs.job import DEQUANTIZED, Goal, Job, TuningClass, server_gpus
from planner.jobs.rules import LORA_FIELDS, READ_BY, reads, refuse_contradictions, unread_lengths
from planner.jobs.settings import MANY, candidate_fields, fields_named, parse_assignments
from planner.jobs.spellings import Value
from planner.methods import METHODS, NEWEST_TRL, OLDEST_TRL, MethodName, release
from planner.models.catalogue import load_model
from planner.models.shape import ModelShape

# Shorthand flags -> the settings they pin.
SHORTHANDS = {
    "max_length": "max_length",
    "prompt_length": "prompt_length",
    "max_completion_length": "max_completion_length",
    "batch_size": "per_device_train_batch_size",
    "lora_r": "lora_r",
    "padded": "padded",
}
EXAMPLES = {"--model": "Qwen2.5-7B", "--gpus": "2xA100-40G", "--method": "grpo"}
# What a tuning class pins, as Candidate fields.
TUNING_PINS: dict[TuningClass, dict[str, str]] = {
    "auto": {},
    "full": {"tuning": "full"},
    "lora": {"tuning": "lora"},
    "qlora": {"tuning": "lora", "quantization": "nf4"},
}
SMALLEST_RISK, LARGEST_RISK = 1e-6, 0.5  # beyond them the normal distribution of the residuals says nothing
NOT_EMPTY = (
    "model",
    "gpus",
    "method",
    "tuning",
    "risk",
    "trl_version",
    "free_memory",
    "effective_batch_size",
    "optimize",
    "config",
    "out",
    "html",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What a command line asks. `warnings`: what a config file says that the plan does not use."""

    job: Job
    cluster: Cluster
    warnings: tuple[str, ...]


def read_question(options: Mapping[str, Any], with_layers: Callable[[ModelShape], ModelShape]) -> Question:
    """The question in a command's options, by the names of its parameters; `config` and `optimize` are not in all of them.

    `with_layers` completes a model whose layers have no formulas.

    Raises:
        InputError: something is missing, is no number, or contradicts something else.
        UnknownName: a model, GPU, method or setting that nobody knows.
    """
    _complain_if_empty(options)
    ranks = _ranks(options)
    shorthands = [
        f"{setting}={options[flag]}"
        for flag, setting in SHORTHANDS.items()
        if options[flag] is not None and not (ranks and flag == "lora_r")
    ]
    flags = parse_assignments([*shorthands, *(options["set"] or ())])
    in_file, warnings = _config_file(options.get("config"))
    tuning = _one_of("tuning class", options["tuning"], get_args(TuningClass))
    settings = (
        _without(in_file, fields_named(flags) | (set() if tuning == "auto" else {"tuning", "quantization"})) | flags
    )
    name = _model_name(options["model"], flags, in_file)
    _complain_if_missing({"--model": name, "--gpus": options["gpus"], "--method": options["method"]})
    method = _one_of("method", options["method"], tuple(METHODS))
    settings, unread = _read_by(method, settings, in_file.keys() - flags.keys())
    model = with_layers(load_model(name))
    cluster = parse_cluster(options["gpus"], options["free_memory"])
    version, older = _trl_version(options["trl_version"])
    job = Job(
        model=model,
        method=method,
        tuning=tuning,
        pinned=_pins(settings, model, tuning, with_layers, from_file=bool(in_file)),
        optimize=_one_of("goal", options.get("optimize", "throughput"), get_args(Goal)),
        risk=read_risk(options["risk"]),
        effective_batch_size=_count("--effective-batch-size", options["effective_batch_size"]),
        trl_version=version,
        lora_ranks=ranks,
    )
    refuse_contradictions(job, cluster)
    return Question(job=job, cluster=cluster, warnings=(*warnings, *unread, *unread_lengths(job), *older))


def _ranks(options: Mapping[str, Any]) -> tuple[int, ...]:
    """`--lora-r 16,32,64`: ranks to choose from. Only a search chooses; `plan estimate` takes one."""
    text = options["lora_r"]
    if text is None or "," not in text or "optimize" not in options:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"--lora-r {text} is no list of ranks. Write them as 16,32,64.")
    return tuple(int(part) for part in parts)


def single_candidate(question: Question) -> Candidate:
    """The one candidate of a question that is not searched: TRL's defaults, data-parallel on the GPUs that a vLLM server leaves.

    Raises:
        InputError: settings that contradict each other, or an effective batch that is not made of whole micro-batches.
    """
    job, cluster = question.job, question.cluster
    pinned = {**TUNING_PINS[job.tuning], **job.pinned}
    if pinned.get("quantization", job.model.quantization) not in ("none", *DEQUANTIZED):
        pinned.setdefault("tuning", "lora")  # quantized weights do not learn
    if pinned.get("vllm") == "server" and "num_processes" not in pinned:
        pinned["num_processes"] = max(cluster.num_gpus - server_gpus(pinned), 1)
    if pinned.get("num_processes", cluster.num_gpus) != 1:
        pinned.setdefault("sharding", "ddp")
    candidate = base_candidate(replace(job, pinned=pinned), cluster)
    if job.effective_batch_size is None:
        return candidate
    if "gradient_accumulation_steps" in pinned and candidate.effective_batch_size != job.effective_batch_size:
        raise InputError(
            f"--effective-batch-size {job.effective_batch_size} contradicts gradient_accumulation_steps {candidate.gradient_accumulation_steps}, "
            f"which makes {candidate.effective_batch_size}."
        )
    pinned["gradient_accumulation_steps"] = _accumulation(job.effective_batch_size, candidate)
    return base_candidate(replace(job, pinned=pinned), cluster)


def _accumulation(effective_batch_size: int, candidate: Candidate) -> int:
    together = candidate.per_device_train_batch_size * candidate.num_processes
    if effective_batch_size % together:
        raise InputError(
            f"--effective-batch-size {effective_batch_size} is no multiple of {candidate.per_device_train_batch_size} samples on each of "
            f"{candidate.num_processes} GPUs. Give a --batch-size that divides it."
        )
    return effective_batch_size // together


def _config_file(path: str | None) -> tuple[dict[str, Value], tuple[str, ...]]:
    if path is None:
        return {}, ()
    from planner.jobs.train_config import load_train_config  # with its YAML reader, only where there is a file

    config = load_train_config(Path(path))
    return config.settings, config.warnings


def _without(settings: Mapping[str, Value], fields: set[str]) -> dict[str, Value]:
    """What a file says of other fields than those that flags decide."""
    return {name: value for name, value in settings.items() if not fields_named([name]) & fields}


def _read_by(
    method: MethodName, settings: Mapping[str, Value], in_file: Collection[str]
) -> tuple[dict[str, Value], list[str]]:
    """Settings without those of a file that the method does not have: TRL would stop at them, and the plan says so."""
    unread = [
        name
        for name in settings
        if name in in_file and any(field in READ_BY and not reads(method, field) for field in fields_named([name]))
    ]
    said = [f"{method} has no {', '.join(unread)}: TRL stops at a config that sets it"] if unread else []
    return {name: value for name, value in settings.items() if name not in unread}, said


def _model_name(flag: str | None, flags: Mapping[str, Value], in_file: Mapping[str, Value]) -> str:
    """The policy's name, from its flag, from a setting of that name, or from the file."""
    names = [
        name for given in (flags, in_file) for name in (given.get("model_name_or_path"), given.get("model")) if name
    ]
    if flag is None:
        return str(names[0]) if names else ""
    if {"model", "model_name_or_path"} & flags.keys() and names[0] != flag:
        raise InputError(f"--model {flag} contradicts --set model={names[0]}. Drop one of them.")
    return flag


def _pins(
    settings: Mapping[str, Value],
    model: ModelShape,
    tuning: TuningClass,
    with_layers: Callable[[ModelShape], ModelShape],
    from_file: bool,
) -> dict[str, Any]:
    """Settings as Candidate fields with their models loaded; the policy is the job's own."""
    pinned: dict[str, Any] = candidate_fields(settings, model.dtype)
    for role in ("reward_model", "teacher_model"):
        if role in pinned:
            pinned[role] = with_layers(load_model(pinned[role]))
    if tuning == "auto" and not pinned.keys().isdisjoint(LORA_FIELDS):
        pinned.setdefault("tuning", "lora")  # whoever names a rank wants adapters
    adapters = tuning in ("lora", "qlora") or pinned.get("tuning") == "lora"
    if from_file and adapters and "lora_target_modules" not in pinned:
        from planner.jobs.train_config import default_targets

        pinned["lora_target_modules"] = default_targets(model.model_type)
    return {field: value for field, value in pinned.items() if field != "model"}


def _trl_version(text: str | None) -> tuple[str, list[str]]:
    """The release to plan for, and a word where it is older than what is counted."""
    version = NEWEST_TRL if text is None else text
    if release(version) > release(NEWEST_TRL):
        raise InputError(
            f"--trl-version {version} is newer than {NEWEST_TRL}, the newest whose code paths are counted here. Leave it out to plan for that."
        )
    older = release(version) < release(OLDEST_TRL)
    return version, [
        f"trl {version} is taken for {OLDEST_TRL}, the oldest whose code paths are counted"
    ] if older else []


def _complain_if_empty(options: Mapping[str, Any]) -> None:
    """An empty text, such as an unset variable of a script leaves, is not the same as leaving the flag out."""
    for name in NOT_EMPTY:
        if options.get(name) is not None and not options[name].strip():
            raise InputError(f"--{name.replace('_', '-')} is empty.")


def _complain_if_missing(needed: Mapping[str, object]) -> None:
    missing = [flag for flag, value in needed.items() if not value]
    if missing:
        example = " ".join(f"{flag} {value}" for flag, value in EXAMPLES.items())
        raise InputError(
            f"{_listed(missing)} {'is' if len(missing) == 1 else 'are'} missing. For example: plan {example}"
        )


def _listed(words: list[str]) -> str:
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _one_of(kind: str, name: str, known: tuple[str, ...]) -> Any:
    """The known name that was meant: case and underscores are not told apart, since TRL writes both GRPO and online_dpo."""
    plain = name.strip().lower().replace("_", "-")
    if plain not in known:
        raise UnknownName(kind, name, known, hint=f"It can be {', '.join(known)}.")
    return plain


def read_risk(text: str) -> float:
    try:
        risk = float(text)
    except ValueError:
        risk = -1.0
    if not SMALLEST_RISK <= risk < LARGEST_RISK:
        raise InputError(
            f"--risk must be a probability from {SMALLEST_RISK:.6f} to below {LARGEST_RISK}, such as 0.01, not {text}."
        )
    return risk


def _count(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MANY:
        raise InputError(f"{flag} must be a whole number from 1 to {MANY:,}, not {text}.")
    return int(text)
