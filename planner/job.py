"""A job: what the user wants, before anything is decided; what TRL decides when nobody does; and what contradicts itself."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from planner.candidate import ROWS_OF_MAX_LENGTH, Candidate
from planner.cluster import Cluster
from planner.errors import InputError, UnknownArchitecture, UnknownName
from planner.memory.engine_settings import SERVER_GPU_MEMORY_UTILIZATION
from planner.memory.loss import release
from planner.methods import METHODS, MethodName
from planner.model import ModelShape
from planner.units import format_gib

TuningClass = Literal["auto", "full", "lora", "qlora"]
Goal = Literal["throughput", "max-length", "batch-size"]

# The batch of one process when nothing is said (transformers 5.23, training_args.py:777).
DEFAULT_BATCH_SIZE = 8

# Published so and dequantized for training (transformers 5.23, quantizers/quantizer_mxfp4.py `dequantize`, quantizer_finegrained_fp8.py).
DEQUANTIZED = ("fp8", "mxfp4")

# Samples a process that a trainer asks for at least (trl 1.16, trainer/kto_trainer.py: "Actual (not effective) batch size must be > 1").
SMALLEST_BATCH: dict[MethodName, int] = {"kto": 2}

# What a method's own config sets apart from Candidate's defaults.
# Source: trl 1.16, trainer/grpo_config.py, rloo_config.py, distillation_config.py, experimental/online_dpo/online_dpo_config.py,
# experimental/gkd/gkd_config.py; trl 1.12, experimental/ppo/ppo_config.py (response_length 53). Prompts have no limit in TRL 1.16, so
# their length is a statement about the data: 512 tokens unless --prompt-length says otherwise; where max_length bounds both, the rest of it.
METHOD_DEFAULTS: dict[MethodName, dict[str, object]] = {
    "dpo": {"beta": 0.1},
    "kto": {"beta": 0.1},
    "orpo": {"beta": 0.1},
    "cpo": {"beta": 0.1},
    "rloo": {"num_generations": 2, "beta": 0.05},
    "online-dpo": {"max_length": 512, "max_completion_length": 64, "beta": 0.1},
    "gkd": {"max_completion_length": 128, "beta": 0.5},
    "distillation": {"beta": 1.0},
    "ppo": {"max_completion_length": 53, "beta": 0.05},
}


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
    trl_version: str = "1.16"
    lora_ranks: tuple[int, ...] = ()  # ranks that the search may choose from, the largest that fits; none: lora_r as it is

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UnknownName("method", self.method, METHODS)
        known = {entry.name for entry in fields(Candidate)}
        for name in self.pinned.keys() - known:
            raise UnknownName("setting", name, known)
        for problem in wish_problems(self):
            raise InputError(problem)
        if not self.model.known:
            counted = f"; its {self.model.params:,} parameters are {format_gib(2 * self.model.params)} in bfloat16" if self.model.params else ""
            raise UnknownArchitecture(
                f"The activations of {self.model.id} ({self.model.model_type}) are not known by formula{counted}. "
                "The extra dryrun measures such layers (probes.coefficients.measured)."
            )


def wish_problems(job: Job) -> Iterator[str]:
    """What a job asks that no candidate could be."""
    if not 0.0 < job.risk < 0.5:
        yield f"--risk {job.risk} is no accepted probability. Give one between 0 and 0.5, such as 0.01."
    if job.effective_batch_size is not None and job.effective_batch_size < 1:
        yield f"--effective-batch-size must be at least 1, not {job.effective_batch_size}."
    if job.tuning == "full" and job.pinned.get("quantization", "none") != "none":
        yield "--tuning full cannot be quantized: quantized weights do not learn. Use --tuning qlora."
    if job.tuning == "qlora" and job.pinned.get("quantization") == "none":
        yield "--tuning qlora contradicts an unquantized load. Use --tuning lora."


def base_candidate(job: Job, cluster: Cluster) -> Candidate:
    """The candidate that TRL's defaults and the pins amount to, before anything is searched: one process on each GPU.

    Raises:
        InputError: pins that contradict each other, the method or the cluster.
    """
    settings: dict[str, object] = {**METHOD_DEFAULTS.get(job.method, {}), **job.pinned}
    if job.method in ROWS_OF_MAX_LENGTH and "prompt_length" not in job.pinned:
        whole, completion = settings.get("max_length", 1024), settings.get("max_completion_length", 512)
        assert isinstance(whole, int) and isinstance(completion, int)
        settings["prompt_length"] = max(1, whole - completion)
    if settings.get("vllm") == "server":
        settings.setdefault("vllm_gpu_memory_utilization", SERVER_GPU_MEMORY_UTILIZATION)
        settings.setdefault("num_processes", max(1, cluster.num_gpus - server_gpus(settings)))
    settings.setdefault("num_processes", cluster.num_gpus)
    settings.setdefault("num_nodes", cluster.nodes)
    settings.setdefault("quantization", "none" if job.model.quantization in DEQUANTIZED else job.model.quantization)
    if "gradient_accumulation_steps" in settings:
        settings.setdefault("steps_per_generation", settings["gradient_accumulation_steps"])
    if job.method in ("gkd", "distillation"):
        settings.setdefault("teacher_model", job.model)
    settings.setdefault("precision", "bf16" if cluster.gpu.supports_bf16 else "fp16")
    candidate = Candidate(model=job.model, method=job.method, trl_version=trl_version(job), **settings)  # type: ignore[arg-type]
    check(candidate, job, cluster)
    return candidate


def trl_version(job: Job) -> str:
    """The release in force: a method that has left TRL is planned for the last one that has it."""
    last = METHODS[job.method].last_trl
    return last if last != "current" and release(job.trl_version) > release(last) else job.trl_version


def server_gpus(settings: Mapping[str, object]) -> int:
    """GPUs that a vLLM server takes: tensor parallel x data parallel."""
    tensor, data = settings.get("vllm_tensor_parallel_size", 1), settings.get("vllm_data_parallel_size", 1)
    assert isinstance(tensor, int) and isinstance(data, int)
    return tensor * data


def check(candidate: Candidate, job: Job, cluster: Cluster) -> None:
    """Refuse what cannot run, with the reason and the nearest thing that can.

    Raises:
        InputError: the first contradiction found.
    """
    for problem in (*precision_problems(candidate, cluster), *placement_problems(candidate, cluster), *method_problems(candidate, job)):
        raise InputError(problem)


def precision_problems(candidate: Candidate, cluster: Cluster) -> list[str]:
    """bf16 needs Ampere; quantized weights do not learn."""
    found = []
    if candidate.precision == "bf16" and not cluster.gpu.supports_bf16:
        major, minor = cluster.gpu.compute_capability
        found.append(f"{cluster.gpu.name} has no bfloat16 (compute capability {major}.{minor}; it needs 8.0). Use --set fp16=true --set bf16=false.")
    if candidate.attn_implementation in ("flash_attention_2", "flash_attention_3") and not cluster.gpu.supports_flash_attention_2:
        found.append(f"{candidate.attn_implementation} does not run on {cluster.gpu.name}. Use --set attn_implementation=sdpa.")
    return found


def placement_problems(candidate: Candidate, cluster: Cluster) -> list[str]:
    """Processes, engines and GPUs must add up."""
    server = candidate.vllm_tensor_parallel_size * candidate.vllm_data_parallel_size if candidate.vllm == "server" else 0
    if candidate.num_processes > cluster.num_gpus:
        return [f"num_processes {candidate.num_processes} needs as many GPUs, and there are {cluster.num_gpus}. Use num_processes={cluster.num_gpus}."]
    if server and candidate.num_processes + server > cluster.num_gpus:
        return [
            f"num_processes {candidate.num_processes} and a vLLM server on {server} of the same {cluster.num_gpus} GPUs would share cards: the server keeps "
            f"{candidate.vllm_gpu_memory_utilization:.0%} of its card for itself and the trainer runs out of memory there. "
            f"Use num_processes={max(1, cluster.num_gpus - server)}, or vllm_mode=colocate."
        ]
    if candidate.vllm == "colocate" and candidate.num_processes % candidate.vllm_tensor_parallel_size:
        return [f"vllm_tensor_parallel_size {candidate.vllm_tensor_parallel_size} does not divide num_processes {candidate.num_processes}."]
    return []


def method_problems(candidate: Candidate, job: Job) -> list[str]:
    """What the method itself refuses."""
    row, found = candidate.method_row, []
    smallest = SMALLEST_BATCH.get(candidate.method, 1)
    if candidate.per_device_train_batch_size < smallest:
        found.append(f"{candidate.method} needs a per_device_train_batch_size of at least {smallest}, not {candidate.per_device_train_batch_size}.")
    if candidate.vllm != "off" and not row.supports_vllm:
        found.append(f"{candidate.method} does not generate with vLLM. Drop use_vllm.")
    if candidate.method in ROWS_OF_MAX_LENGTH and candidate.max_completion_length >= candidate.max_length:
        lengths = f"max_new_tokens {candidate.max_completion_length} leaves no room for a prompt in max_length {candidate.max_length}"
        found.append(f"{lengths}. Raise --max-length.")
    pinned_batch = {"per_device_train_batch_size", "gradient_accumulation_steps"} <= job.pinned.keys()
    if candidate.method in ("grpo", "rloo") and pinned_batch and generation_batch(candidate) % candidate.num_generations:
        batch = generation_batch(candidate)
        made_of = f"{candidate.per_device_train_batch_size} x {candidate.num_processes} x {candidate.steps_per_generation}"
        found.append(
            f"A generation batch of {batch} completions (per_device_train_batch_size x num_processes x steps_per_generation = {made_of}) is no "
            f"multiple of num_generations {candidate.num_generations}. Use num_generations={largest_divisor(batch, candidate.num_generations)}, "
            "or a batch that is."
        )
    return found


def generation_batch(candidate: Candidate) -> int:
    """Completions sampled at once over all processes (trl 1.16, grpo_config.py:1100)."""
    return candidate.per_device_train_batch_size * candidate.num_processes * candidate.steps_per_generation


def largest_divisor(number: int, at_most: int) -> int:
    return next(divisor for divisor in range(at_most, 0, -1) if number % divisor == 0)


def effective_batch_size(job: Job, cluster: Cluster) -> int:
    """Samples an optimizer step that the plan keeps: what is asked for, or what TRL's defaults and the pins amount to on the cluster."""
    if job.effective_batch_size is not None:
        return job.effective_batch_size
    batch = job.pinned.get("per_device_train_batch_size", DEFAULT_BATCH_SIZE)
    accumulation = job.pinned.get("gradient_accumulation_steps", 1)
    processes = job.pinned.get("num_processes", cluster.num_gpus)
    assert isinstance(batch, int) and isinstance(accumulation, int) and isinstance(processes, int)
    return batch * accumulation * processes
