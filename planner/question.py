"""The options of the command -> the job and the cluster they ask about."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from planner.candidate import Candidate
from planner.catalogue import load_model
from planner.cluster import Cluster
from planner.errors import InputError, UnknownName
from planner.gpus import parse_cluster
from planner.job import Goal, Job, TuningClass, base_candidate
from planner.methods import METHODS
from planner.model import ModelShape
from planner.settings import Value, candidate_fields, parse_assignments

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
NEWEST_TRL = "1.16"  # whose defaults and code paths are counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What a command line asks. `warnings`: what a config file says that the plan does not use."""

    job: Job
    cluster: Cluster
    warnings: tuple[str, ...]


def read_question(options: Mapping[str, Any]) -> Question:
    """The question in a command's options, by the names of its parameters; `config` and `optimize` are not in all of them.

    Raises:
        InputError: something is missing, is no number, or contradicts something else.
        UnknownName: a model, GPU, method or setting that nobody knows.
    """
    shorthands = [f"{setting}={options[flag]}" for flag, setting in SHORTHANDS.items() if options[flag] is not None]
    settings: dict[str, Value] = parse_assignments([*shorthands, *(options["set"] or ())])
    in_file, warnings = _config_file(options.get("config"))
    settings = in_file | settings
    name = options["model"] or settings.get("model_name_or_path") or settings.get("model")
    _complain_if_missing({"--model": name, "--gpus": options["gpus"], "--method": options["method"]})
    model = load_model(str(name))
    pinned = _pins(settings, model, from_file=bool(in_file))
    job = Job(
        model=model,
        method=_one_of("method", options["method"], tuple(METHODS)),
        tuning=_one_of("tuning class", options["tuning"], get_args(TuningClass)),
        pinned=pinned,
        optimize=_one_of("goal", options.get("optimize", "throughput"), get_args(Goal)),
        risk=_probability(options["risk"]),
        effective_batch_size=_count("--effective-batch-size", options["effective_batch_size"]),
        trl_version=options["trl_version"] or NEWEST_TRL,
    )
    return Question(job=job, cluster=parse_cluster(options["gpus"], options["free_memory"]), warnings=warnings)


def single_candidate(question: Question) -> Candidate:
    """The one candidate of a question that is not searched: TRL's defaults, data-parallel on the GPUs that a vLLM server leaves.

    Raises:
        InputError: settings that contradict each other, or an effective batch that is not made of whole micro-batches.
    """
    job, cluster = question.job, question.cluster
    pinned = {**TUNING_PINS[job.tuning], **job.pinned}
    if pinned.get("vllm") == "server" and "num_processes" not in pinned:
        pinned["num_processes"] = max(cluster.num_gpus - _server_gpus(pinned), 1)
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


def _server_gpus(pinned: Mapping[str, Any]) -> int:
    gpus: int = pinned.get("vllm_tensor_parallel_size", 1) * pinned.get("vllm_data_parallel_size", 1)
    return gpus


def _accumulation(effective_batch_size: int, candidate: Candidate) -> int:
    together = candidate.per_device_train_batch_size * candidate.num_processes
    if effective_batch_size % together:
        raise InputError(
            f"--effective-batch-size {effective_batch_size} is no multiple of {candidate.per_device_train_batch_size} samples on each of "
            f"{candidate.num_processes} GPUs. Give a --batch-size that divides it."
        )
    return effective_batch_size // together


def _config_file(path: Path | None) -> tuple[dict[str, Value], tuple[str, ...]]:
    if path is None:
        return {}, ()
    from planner.train_config import load_train_config  # with its YAML reader, only where there is a file

    config = load_train_config(path)
    return config.settings, config.warnings


def _pins(settings: Mapping[str, Value], model: ModelShape, from_file: bool) -> dict[str, Any]:
    """Settings as Candidate fields with their models loaded; the policy is the job's own."""
    pinned: dict[str, Any] = candidate_fields(settings, model.dtype)
    for role in ("reward_model", "teacher_model"):
        if role in pinned:
            pinned[role] = load_model(pinned[role])
    if from_file and pinned.get("tuning") == "lora" and "lora_target_modules" not in pinned:
        from planner.train_config import default_targets

        pinned["lora_target_modules"] = default_targets(model.model_type)
    return {field: value for field, value in pinned.items() if field != "model"}


def _complain_if_missing(needed: Mapping[str, object]) -> None:
    missing = [flag for flag, value in needed.items() if not value]
    if missing:
        example = " ".join(f"{flag} {value}" for flag, value in EXAMPLES.items())
        raise InputError(f"{_listed(missing)} {'is' if len(missing) == 1 else 'are'} missing. For example: plan {example}")


def _listed(words: list[str]) -> str:
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _one_of(kind: str, name: str, known: tuple[str, ...]) -> Any:
    if name not in known:
        raise UnknownName(kind, name, known, hint=f"It can be {', '.join(known)}.")
    return name


def _probability(text: str) -> float:
    try:
        risk = float(text)
    except ValueError:
        risk = -1.0
    if not 0 < risk < 1:
        raise InputError(f"--risk must be a probability between 0 and 1, not {text}.")
    return risk


def _count(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"{flag} must be a whole number, at least 1, not {text}.")
    return int(text)
