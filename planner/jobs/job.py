"""A job: the model, the method and the settings that the user asks for, before a search decides the others."""

from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, Literal, get_args

from msgspec import Struct, field
from msgspec.structs import force_setattr

from planner.errors import InputError, UnknownArchitecture, UnknownName, shortened
from planner.gpus.cluster import Cluster
from planner.jobs.remedy import remedy
from planner.jobs.setting_values import field_types, typed_value
from planner.jobs.settings import candidate_fields, setting_names, settings_of_fields, settings_text
from planner.methods import METHODS, NEWEST_TRL, MethodName
from planner.models.shape import ModelShape
from planner.quantities import DEFAULT_RISK
from planner.quantizations import Quantization
from planner.schemes import batches_of
from planner.settings.setting import MAX_BATCH_SIZE, Value
from planner.units import format_gib

TuningOption = Literal["auto", "full", "lora", "qlora"]  # "auto": the search takes the first class that fits
Goal = Literal["throughput", "max-length", "batch-size"]

# Smallest and largest accepted probability of running out of memory: beyond them the distribution of the residuals has
# no data (planner/confidence.py).
SMALLEST_RISK, LARGEST_RISK = 1e-6, 0.499999
# per_device_train_batch_size by default (transformers 5.23, training_args.py,
# `TrainingArguments.per_device_train_batch_size`).
DEFAULT_BATCH_SIZE = 8
SPLITS = ("per_device_train_batch_size", "gradient_accumulation_steps")  # of one process's part of the effective batch
DEFAULT_MAX_LENGTH = 1024  # trl 1.16, trainer/sft_config.py

# Field of a Job -> its types, and their name in a message.
FIELD_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "method": (str, "text"),
    "tuning": (str, "text"),
    "pinned": (Mapping, "settings by name, such as {'zero_stage': 3}"),
    "optimize": (str, "text"),
    "risk": ((int, float), "a number"),
    "effective_batch_size": ((int, NoneType), "a whole number or None"),
    "trl_version": (str, "text, such as '1.16.0'"),
    "lora_ranks": (tuple, "a tuple of ranks"),
}


def loaded_quantization(model: ModelShape) -> Quantization:
    """Return the quantization that a model's weights have for training if nothing is quantized at load."""
    return "none" if model.quantization_row.dequantized else model.quantization


class Job(Struct, frozen=True, kw_only=True):
    """A model, a method, and pinned settings that the search keeps.

    `pinned` has the libraries' names, such as zero_stage, or Candidate's fields, and is kept by field.

    Raises:
        InputError: the job contradicts itself.
        UnknownName: a method or a setting that does not exist.
        UnknownArchitecture: the model's layers have no formulas.
    """

    model: ModelShape
    method: MethodName = ""  # type: ignore[assignment]  # refused in one line, where Python would raise TypeError
    tuning: TuningOption = "auto"
    pinned: Mapping[str, object] = field(default_factory=dict)
    optimize: Goal = "throughput"
    risk: float = DEFAULT_RISK  # accepted probability of running out of memory
    effective_batch_size: int | None = None  # samples per optimizer step; None: TRL's defaults on the cluster
    trl_version: str = NEWEST_TRL
    lora_ranks: tuple[int, ...] = ()  # the search takes the largest that fits; empty: lora_r is not searched
    given: Mapping[str, Value] = field(default_factory=dict)  # settings of `--set` by the user's names, for remedies

    def __post_init__(self) -> None:
        self._refuse_wrong_types()
        if not self.method:
            raise InputError(f"A Job needs a method: {', '.join(METHODS)}.")
        if self.method not in METHODS:
            raise UnknownName("method", self.method, METHODS)
        if not isinstance(self.model, ModelShape):
            name = shortened(self.model)
            raise InputError(
                f"A Job takes a model's shape, not {name}: write planner.plan({name!r}, '2xA100-40G', "
                f"method={self.method!r}), or Job(model=load_model({name!r}), ...)."
            )
        force_setattr(self, "pinned", self._pinned_fields())
        for problem in job_problems(self):
            raise InputError(problem)
        if not self.model.known:
            counted = (
                f"; its {self.model.params:,} parameters are {format_gib(2 * self.model.params)} in bfloat16"
                if self.model.params
                else ""
            )
            raise UnknownArchitecture(
                f"The activations of {self.model.id} ({self.model.model_type}) are not known by formula{counted}. "
                "The extra training measures such layers (planner.training_stack.complete_models)."
            )

    def _refuse_wrong_types(self) -> None:
        """Refuse a value of another type than its field has; `model` has a message of its own.

        Raises:
            InputError: names the field.
        """
        for name, (kind, wanted) in FIELD_TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise InputError(f"{name} of a Job must be {wanted}, not {shortened(value)}.")
        for name, choices in (("tuning", get_args(TuningOption)), ("optimize", get_args(Goal))):
            if getattr(self, name) not in choices:
                raise UnknownName(name, getattr(self, name), choices)
        if not all(isinstance(rank, int) and rank > 0 for rank in self.lora_ranks):
            raise InputError(f"lora_ranks of a Job must be ranks, such as (16, 32), not {shortened(self.lora_ranks)}.")

    def _pinned_fields(self) -> Mapping[str, object]:
        """Return `pinned` by Candidate field; names of the libraries, such as zero_stage, are converted."""
        known = field_types().keys()
        for name in self.pinned.keys() - known - set(setting_names()):
            raise UnknownName("setting", name, [*known, *setting_names()])
        values: dict[str, Value] = {name: typed_value(name, value) for name, value in self.pinned.items()}  # type: ignore[arg-type]
        spelled = {name: value for name, value in values.items() if name not in known}
        converted = candidate_fields(spelled, self.model.dtype, loaded_quantization(self.model)) if spelled else {}
        row, pinned = METHODS[self.method], {**{name: values[name] for name in values if name in known}, **converted}
        for name in sorted(row.fixed):
            if pinned.get(name, row.defaults[name]) != row.defaults[name]:
                own, asked = (
                    settings_text(settings_of_fields({name: value})) for value in (row.defaults[name], pinned[name])
                )
                raise InputError(f"{self.method} runs with {own} only. Leave out {asked}.")
        return pinned | {name: row.defaults[name] for name in row.fixed}


def job_problems(job: Job) -> Iterator[str]:
    """Yield an error message for each contradiction inside the job, whatever the cluster."""
    if not SMALLEST_RISK <= job.risk <= LARGEST_RISK:
        yield f"--risk {shortened(job.risk)} is not between {SMALLEST_RISK:f} and 0.5. Give a probability such as 0.05."
    if job.effective_batch_size is not None and not 1 <= job.effective_batch_size <= MAX_BATCH_SIZE:
        yield (
            f"--effective-batch-size must be from 1 to {MAX_BATCH_SIZE:,}, not {shortened(job.effective_batch_size)}."
        )
    if job.tuning == "full" and job.pinned.get("quantization", "none") != "none":
        qlora = remedy({"tuning": "qlora"}, job.given)
        yield f"--tuning full cannot be quantized: quantized weights do not learn. Use {qlora}."
    if job.tuning == "qlora" and job.pinned.get("quantization") == "none":
        lora = remedy({"tuning": "lora"}, job.given)
        yield f"--tuning qlora contradicts an unquantized load. Use {lora}."


def server_gpus(settings: Mapping[str, object]) -> int:
    """Return the GPUs of a vLLM server from settings by Candidate field: tensor parallel x data parallel size."""
    tensor, data = settings.get("vllm_tensor_parallel_size", 1), settings.get("vllm_data_parallel_size", 1)
    assert isinstance(tensor, int) and isinstance(data, int)
    return tensor * data


def effective_batch_size(job: Job, cluster: Cluster) -> int:
    """Return the samples of one optimizer step that a plan keeps.

    It is the job's effective batch size or, if that is not given, batch x accumulation x batches from the pinned
    settings and TRL's defaults. Example: no pinned settings on 2 GPUs: 8 x 1 x 2 = 16 samples.
    """
    if job.effective_batch_size is not None:
        return job.effective_batch_size
    batch = job.pinned.get("per_device_train_batch_size", DEFAULT_BATCH_SIZE)
    accumulation = job.pinned.get("gradient_accumulation_steps", 1)
    processes = job.pinned.get("num_processes", cluster.num_gpus)
    assert isinstance(batch, int) and isinstance(accumulation, int) and isinstance(processes, int)
    return batch * accumulation * PinnedJob(job=job, cluster=cluster).batches(processes)


class PinnedJob(Struct, frozen=True, kw_only=True):
    """A job and its cluster: the argument of the rules about pinned settings."""

    job: Job
    cluster: Cluster

    @property
    def pinned(self) -> Mapping[str, Any]:
        """The pinned settings, by Candidate field."""
        return self.job.pinned

    @property
    def full(self) -> bool:
        """True if the job pins full fine-tuning."""
        return self.job.tuning == "full" or self.pinned.get("tuning") == "full"

    def batches(self, processes: int) -> int:
        """Return the batches of one micro-step; without a pinned sharding, GPUs share rows only."""
        pinned = self.pinned
        row_gpus = pinned.get("cp_size", 1) * pinned.get("sp_size", 1)
        return batches_of(pinned.get("sharding", "ddp"), processes, row_gpus, pinned.get("tp_size", 1))

    def way(self, **change: object) -> str:
        """Return changed Candidate fields as flags that work beside those of the user."""
        return str(remedy(change, self.job.given))
