"""A job: what the user wants, before anything is decided; what TRL decides when nobody does; and what contradicts itself."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from planner.candidate import Candidate
from planner.errors import InputError, UnknownArchitecture, UnknownName
from planner.gpus.cluster import Cluster
from planner.methods import METHODS, NEWEST_TRL, MethodName
from planner.models.shape import ModelShape
from planner.units import format_gib

TuningClass = Literal["auto", "full", "lora", "qlora"]
Goal = Literal["throughput", "max-length", "batch-size"]

# Accepted probabilities: outside of these the distribution of the residuals has no data (planner/confidence.py).
SMALLEST_RISK, LARGEST_RISK = 1e-6, 0.499999
# The batch of one process when nothing is said (transformers 5.23, training_args.py:777).
DEFAULT_BATCH_SIZE = 8

# Published so and dequantized for training (transformers 5.23, quantizers/quantizer_mxfp4.py `dequantize`, quantizer_finegrained_fp8.py).
DEQUANTIZED = ("fp8", "mxfp4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What to train and what is already decided. `pinned`: Candidate fields with the values that the search keeps."""

    model: ModelShape
    method: MethodName
    tuning: TuningClass = "auto"
    pinned: Mapping[str, object] = field(default_factory=dict)
    optimize: Goal = "throughput"
    risk: float = 0.01  # accepted probability of running out of memory
    effective_batch_size: int | None = None  # None: what TRL's defaults amount to on the cluster
    trl_version: str = NEWEST_TRL
    lora_ranks: tuple[
        int, ...
    ] = ()  # ranks that the search may choose from, the largest that fits; none: lora_r as it is

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UnknownName("method", self.method, METHODS)
        known = {entry.name for entry in fields(Candidate)}
        for name in self.pinned.keys() - known:
            raise UnknownName("setting", name, known)
        for problem in wish_problems(self):
            raise InputError(problem)
        if not self.model.known:
            counted = (
                f"; its {self.model.params:,} parameters are {format_gib(2 * self.model.params)} in bfloat16"
                if self.model.params
                else ""
            )
            raise UnknownArchitecture(
                f"The activations of {self.model.id} ({self.model.model_type}) are not known by formula{counted}. "
                "The extra dryrun measures such layers (probes.layers.coefficients.measured)."
            )


def wish_problems(job: Job) -> Iterator[str]:
    """What a job asks that no candidate could be."""
    if not SMALLEST_RISK <= job.risk <= LARGEST_RISK:
        yield f"--risk {job.risk} is not between {SMALLEST_RISK:f} and 0.5. Give a probability such as 0.01."
    if job.effective_batch_size is not None and job.effective_batch_size < 1:
        yield f"--effective-batch-size must be at least 1, not {job.effective_batch_size}."
    if job.tuning == "full" and job.pinned.get("quantization", "none") != "none":
        yield "--tuning full cannot be quantized: quantized weights do not learn. Use --tuning qlora."
    if job.tuning == "qlora" and job.pinned.get("quantization") == "none":
        yield "--tuning qlora contradicts an unquantized load. Use --tuning lora."


def server_gpus(settings: Mapping[str, object]) -> int:
    """GPUs that a vLLM server takes: tensor parallel x data parallel."""
    tensor, data = settings.get("vllm_tensor_parallel_size", 1), settings.get("vllm_data_parallel_size", 1)
    assert isinstance(tensor, int) and isinstance(data, int)
    return tensor * data


def effective_batch_size(job: Job, cluster: Cluster) -> int:
    """Samples an optimizer step that the plan keeps: what is asked for, or what TRL's defaults and the pins amount to on the cluster."""
    if job.effective_batch_size is not None:
        return job.effective_batch_size
    batch = job.pinned.get("per_device_train_batch_size", DEFAULT_BATCH_SIZE)
    accumulation = job.pinned.get("gradient_accumulation_steps", 1)
    processes = job.pinned.get("num_processes", cluster.num_gpus)
    assert isinstance(batch, int) and isinstance(accumulation, int) and isinstance(processes, int)
    return batch * accumulation * processes
