"""Job -> candidates: the knobs as a table, the monotone ones bisected, the rules of the method kept.

What the job pins stays; the rest is searched. Nothing here changes what is learned but the class of tuning, which has its name, and
16-bit weights in full fine-tuning, which the plan says when it comes to them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isqrt
from typing import Any, Literal

from planner.candidate import ROWS_OF_MAX_LENGTH, Candidate
from planner.cluster import Cluster
from planner.estimate import estimate
from planner.job import DEFAULT_BATCH_SIZE, DEQUANTIZED, Job, base_candidate
from planner.memory.engine import EngineDoesNotFit, EngineRefusal, engine_or_refusal
from planner.memory.engine_settings import engine_settings
from planner.methods import METHODS
from planner.quantities import Estimate

TuningClass = Literal["full", "lora", "qlora"]
CLASSES: tuple[TuningClass, ...] = ("full", "lora", "qlora")  # in the order in which they are recommended
Change = Mapping[str, object]  # Candidate fields and values, chosen together
Changes = tuple[Change, ...]

FLASH_HEAD_DIM = 256  # flash-attn's largest head dimension
LARGEST_UTILIZATION = 95  # hundredths; vLLM's own default is 0.92, and a colocated trainer needs room besides
LENGTH_STEP = 256  # tokens
LARGEST_BATCH = 1024  # samples a process
SMALLER_BATCHES = 2  # tried besides the largest that fits


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Question:
    """One class of tuning for a job on a cluster. `offload`: whether the host may hold what the GPUs cannot. Compared by identity."""

    job: Job
    cluster: Cluster
    tuning_class: TuningClass
    offload: bool = False

    @property
    def processes(self) -> int:
        pinned = self.job.pinned.get("num_processes", self.cluster.num_gpus)
        assert isinstance(pinned, int)
        return pinned


# -- the knobs ---------------------------------------------------------------------------------------------------------


def tuning(question: Question) -> Changes:
    """A checkpoint that is quantized already keeps its quantization; QLoRA is nf4 otherwise."""
    published = "none" if question.job.model.quantization in DEQUANTIZED else question.job.model.quantization
    if question.tuning_class == "full":
        return ({"tuning": "full", "quantization": "none"},)
    if question.tuning_class == "qlora" and published == "none":
        return ({"tuning": "lora", "quantization": "nf4"},)
    return ({"tuning": "lora", "quantization": published},)


def load_dtype(question: Question) -> Changes:
    """Full fine-tuning keeps TRL's float32 weights while they fit; a frozen base is loaded in 16 bits.

    Weights in float16 cannot be trained in full: torch/amp/grad_scaler.py refuses to unscale float16 gradients.
    """
    half = "bfloat16" if question.cluster.gpu.supports_bf16 else "float16"
    if question.tuning_class != "full":
        return ({"dtype": half},)
    return ({"dtype": "float32"}, {"dtype": half}) if half == "bfloat16" else ({"dtype": "float32"},)


# Ways to let the host help, the least first: adapters have states too small to be worth it.
OFFLOADED: dict[TuningClass, Changes] = {
    "full": (
        {"sharding": "zero2", "offload_optimizer": True},
        {"sharding": "zero3", "offload_optimizer": True},
        {"sharding": "zero3", "offload_optimizer": True, "offload_param": True},
    ),
    "lora": ({"sharding": "zero3", "offload_optimizer": True, "offload_param": True},),
    "qlora": (),
}


def sharding(question: Question) -> Changes:
    """bitsandbytes weights stay whole under ZeRO and FSDP2 (accelerate 1.15, utils/fsdp_utils.py:799-811): data parallel only."""
    if question.offload:
        return OFFLOADED[question.tuning_class]
    if question.processes == 1:
        return ({"sharding": "none"},)
    if question.tuning_class == "qlora":
        return ({"sharding": "ddp"},)
    return tuple({"sharding": name} for name in ("ddp", "zero2", "zero3", "fsdp2"))


def checkpointing(question: Question) -> Changes:
    return ({"gradient_checkpointing": False}, {"gradient_checkpointing": True})


def attention(question: Question) -> Changes:
    """FlashAttention 2 where the card and the heads allow it: sdpa needs a mask of rows x length squared for padded batches."""
    layers = [layer.attention for layer, _ in question.job.model.layer_kinds]
    if any(layer.softcap or layer.sink_params for layer in layers):
        return ({"attn_implementation": "eager"},)
    flash = question.cluster.gpu.supports_flash_attention_2 and all(layer.head_dim == layer.v_head_dim <= FLASH_HEAD_DIM for layer in layers)
    return ({"attn_implementation": "sdpa"}, {"attn_implementation": "flash_attention_2"}) if flash else ({"attn_implementation": "sdpa"},)


def generation(question: Question) -> Changes:
    """Who samples: `generate` in the trainer, a colocated vLLM engine (asleep in between or not), or a server on GPUs of its own."""
    row, cluster = METHODS[question.job.method], question.cluster
    segments = {"expandable_segments": True}
    if not row.generates:
        return (segments,)
    found: list[Change] = [{"vllm": "off", **segments}]
    if question.cluster.num_gpus > 1:
        found.append({"vllm": "off", "ds3_gather_for_generation": False, **segments})
    if not row.supports_vllm:
        return tuple(found)
    if any(name.startswith("vllm_") for name in question.job.pinned):
        found.clear()  # who sets up an engine wants one
    for size in dict.fromkeys((1, cluster.gpus_per_node)):
        awake = {"vllm": "colocate", "vllm_tensor_parallel_size": size}
        found.append({**awake, "vllm_enable_sleep_mode": False, **segments})
        found.append({**awake, "vllm_enable_sleep_mode": True, "expandable_segments": False})  # vLLM's cumem allocator refuses expandable segments
    found += [
        {"vllm": "server", "vllm_tensor_parallel_size": size, "num_processes": cluster.num_gpus - size, "vllm_gpu_memory_utilization": 0.9, **segments}
        for size in server_sizes(question)
    ]
    return tuple(found)


def server_sizes(question: Question) -> list[int]:
    """GPUs of a vLLM server: powers of two up to half the cluster, within one node; what a pinned num_processes leaves."""
    pinned = question.job.pinned.get("num_processes")
    sizes = [size for size in (1, 2, 4, 8) if size <= question.cluster.num_gpus // 2 and size <= question.cluster.gpus_per_node]
    if isinstance(pinned, int):
        return [size for size in sizes if pinned + size <= question.cluster.num_gpus]
    return sizes


KNOBS: dict[str, Callable[[Question], Changes]] = {
    "tuning": tuning,
    "load dtype": load_dtype,
    "sharding": sharding,
    "checkpointing": checkpointing,
    "attention": attention,
    "generation": generation,
}


def allowed(changes: Changes, pinned: Mapping[str, object]) -> Changes:
    """The choices that agree with every pin, each without the pinned fields; a pin outside the table is a choice of its own."""
    agreeing = [change for change in changes if all(pinned.get(name, value) == value for name, value in change.items())]
    unpinned = [{name: value for name, value in change.items() if name not in pinned} for change in agreeing]
    return tuple(unpinned) or ({},)


def structures(question: Question) -> Iterator[Candidate]:
    """Every combination of the knobs that is consistent, with the batch and the engine's share still at their defaults."""
    base = base_candidate(question.job, question.cluster)
    choices = [allowed(knob(question), question.job.pinned) for knob in KNOBS.values()]
    seen = set()
    for combination in product(*choices):
        fields: dict[str, object] = {}
        for change in combination:
            fields.update(change)
        candidate = completed(replace(base, **fields), question)  # type: ignore[arg-type]
        if consistent(candidate, question) and candidate not in seen:
            seen.add(candidate)
            yield candidate


def completed(candidate: Candidate, question: Question) -> Candidate:
    """Settings that follow from others: one process is not sharded; the engine's longest sequence is the row."""
    changes: dict[str, object] = {}
    if candidate.num_processes == 1 and candidate.sharding != "none" and not candidate.offload_optimizer and "sharding" not in question.job.pinned:
        changes["sharding"] = "none"
    if candidate.vllm != "off" and "vllm_max_model_length" not in question.job.pinned:
        changes["vllm_max_model_length"] = candidate.row_tokens
    return replace(candidate, **changes) if changes else candidate  # type: ignore[arg-type]


def consistent(candidate: Candidate, question: Question) -> bool:
    """Whether the libraries would run it, and whether it says anything that its simpler twin does not."""
    quantized = candidate.quantization not in ("none", "mxfp4")
    of_class = {"full": candidate.tuning == "full", "lora": candidate.tuning == "lora", "qlora": candidate.tuning == "lora" and quantized}
    sharded_dtype_twin = candidate.tuning == "full" and candidate.dtype != "float32" and candidate.sharding.startswith(("zero", "fsdp"))
    ungathered_twin = not candidate.ds3_gather_for_generation and (candidate.sharding != "zero3" or candidate.vllm != "off")
    server = candidate.vllm_tensor_parallel_size * candidate.vllm_data_parallel_size if candidate.vllm == "server" else 0
    # DeepSpeed would cast a frozen float32 base to 16 bits, and nothing would remember what was asked for
    broken_pin = candidate.tuning == "lora" and question.job.pinned.get("dtype") == "float32" and candidate.sharding.startswith("zero")
    return (
        of_class[question.tuning_class]
        and not broken_pin
        and not (sharded_dtype_twin and "dtype" not in question.job.pinned)
        and not (ungathered_twin and "ds3_gather_for_generation" not in question.job.pinned)
        and candidate.num_processes + server <= question.cluster.num_gpus
        and not (candidate.vllm == "colocate" and candidate.num_processes % candidate.vllm_tensor_parallel_size)
    )


# -- the batch ---------------------------------------------------------------------------------------------------------


def with_batch(candidate: Candidate, batch: int, accumulation: int, pinned: Mapping[str, object]) -> Candidate:
    """A generation batch is one optimizer step's (steps_per_generation defaults to the accumulation, trl 1.16, grpo_config.py:1098)."""
    steps = candidate.steps_per_generation if "steps_per_generation" in pinned else accumulation
    return replace(candidate, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, steps_per_generation=steps)


@dataclass(frozen=True, slots=True)
class Choices:
    """What a monotone knob can be, smallest first: built only when asked for."""

    values: Sequence[Any]
    at: Callable[[Any], Candidate]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Candidate:
        return self.at(self.values[index])


def batches(candidate: Candidate, job: Job) -> Choices:
    """The candidate with every micro-batch that keeps the effective batch and RL's groups."""
    if job.optimize == "batch-size" and job.effective_batch_size is None and "per_device_train_batch_size" not in job.pinned:
        sizes = [(batch, candidate.gradient_accumulation_steps) for batch in range(1, LARGEST_BATCH + 1)]
    else:
        sizes = splits(candidate, job)

    def whole_groups(batch: int, accumulation: int) -> bool:
        steps = candidate.steps_per_generation if "steps_per_generation" in job.pinned else accumulation
        return candidate.method not in ("grpo", "rloo") or batch * candidate.num_processes * steps % candidate.num_generations == 0

    kept = [size for size in sizes if whole_groups(*size)]
    return Choices(kept, lambda size: with_batch(candidate, size[0], size[1], job.pinned))


def splits(candidate: Candidate, job: Job) -> list[tuple[int, int]]:
    """(micro-batch, accumulation) whose product is one process's part of the effective batch; pins decide where there are any.

    Not given, the effective batch is what TRL's default of 8 a process amounts to on the processes there are.
    """
    batch, accumulation = job.pinned.get("per_device_train_batch_size"), job.pinned.get("gradient_accumulation_steps")
    if isinstance(batch, int) and isinstance(accumulation, int):
        return [(batch, accumulation)]
    share = (batch if isinstance(batch, int) else DEFAULT_BATCH_SIZE) * (accumulation if isinstance(accumulation, int) else 1)
    if job.effective_batch_size is not None:
        share, rest = divmod(job.effective_batch_size, candidate.num_processes)
        if rest:
            return []
    if isinstance(batch, int):
        return [(batch, share // batch)] if share % batch == 0 else []
    if isinstance(accumulation, int):
        return [(share // accumulation, accumulation)] if share % accumulation == 0 else []
    small = [size for size in range(1, isqrt(share) + 1) if share % size == 0]
    return [(size, share // size) for size in sorted({*small, *(share // size for size in small)})]


# -- what fits ---------------------------------------------------------------------------------------------------------


def attempt(candidate: Candidate, question: Question) -> Estimate | None:
    """The candidate's estimate, None where its engine would not start."""
    try:
        return estimate(candidate, question.cluster, question.job.risk)
    except EngineDoesNotFit:
        return None


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest of low..high that fits, by halving; low - 1 when none does. Memory grows with each number that is asked about."""
    if low > high or not fits(low):
        return low - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def utilizations(candidate: Candidate, question: Question) -> tuple[int, int]:
    """The hundredths of the card that a colocated engine can be given: from what it needs to start, to what there is."""
    if "vllm_gpu_memory_utilization" in question.job.pinned:
        pinned = round(100 * candidate.vllm_gpu_memory_utilization)
        return pinned, pinned
    smallest = replace(candidate, vllm_gpu_memory_utilization=0.01)
    answer = engine_or_refusal(smallest.model, question.cluster.gpu, engine_settings(smallest, question.cluster.gpu))
    if isinstance(answer, EngineRefusal):
        return (round(100 * answer.utilization_that_fits) or LARGEST_UTILIZATION + 1), LARGEST_UTILIZATION
    return 1, LARGEST_UTILIZATION


def with_utilization(candidate: Candidate, hundredths: int, question: Question) -> Candidate:
    if "vllm_gpu_memory_utilization" in question.job.pinned:
        return candidate
    return replace(candidate, vllm_gpu_memory_utilization=hundredths / 100)


def placed(candidate: Candidate, question: Question) -> Estimate | None:
    """A candidate with its batch: with a colocated engine at the largest share that fits; None where none starts."""
    if candidate.vllm != "colocate":
        return attempt(candidate, question)
    low, high = utilizations(candidate, question)
    best = largest(low, high, lambda share: fitting(with_utilization(candidate, share, question), question))
    return attempt(with_utilization(candidate, max(best, low), question), question) if low <= high else None


def leanest(candidate: Candidate, question: Question) -> Candidate:
    """The candidate with the smallest share that its colocated engine starts with: if that does not fit, none does."""
    if candidate.vllm != "colocate":
        return candidate
    return with_utilization(candidate, min(utilizations(candidate, question)[0], LARGEST_UTILIZATION), question)


def fitting(candidate: Candidate, question: Question) -> bool:
    answer = attempt(candidate, question)
    return answer is not None and answer.fits


def fitted(candidate: Candidate, question: Question) -> Estimate | None:
    """The best batch of one structure: the largest that fits, or the smallest there is when none does.

    A colocated engine takes from the batch what it is given: the next smaller batches, with more of the card for it, are tried too.
    """
    choices = longest(candidate, question) if question.job.optimize == "max-length" else batches(candidate, question.job)
    if not choices:
        return None
    top = max(largest(0, len(choices) - 1, lambda index: fitting(leanest(choices[index], question), question)), 0)
    tried = range(max(0, top - SMALLER_BATCHES), top + 1) if candidate.vllm == "colocate" else (top,)
    answers = [answer for answer in (placed(choices[index], question) for index in tried) if answer is not None]
    return max(answers, key=lambda answer: (answer.fits, merit(answer, question.job)), default=None)


def longest(candidate: Candidate, question: Question) -> Choices:
    """The candidate at its smallest micro-batch with every length up to the model's."""
    smallest = batches(candidate, question.job)
    if not smallest or length_field(candidate) in question.job.pinned:
        return Choices(smallest.values[:1], smallest.at)
    lengths = range(LENGTH_STEP, max(longest_length(candidate), LENGTH_STEP) + 1, LENGTH_STEP)
    return Choices(lengths, lambda length: with_length(smallest[0], length, question))


def length_field(candidate: Candidate) -> str:
    """The length that is asked for when rows are to be longer."""
    return "max_completion_length" if candidate.method_row.generates and candidate.method not in ROWS_OF_MAX_LENGTH else "max_length"


def longest_length(candidate: Candidate) -> int:
    """How far the model's positions let that length go."""
    return candidate.model.max_position_embeddings - (candidate.prompt_length if length_field(candidate) == "max_completion_length" else 0)


def with_length(candidate: Candidate, length: int, question: Question) -> Candidate:
    """Longer rows; where max_length bounds prompt and completion together, the prompt takes what it gains."""
    changes = {length_field(candidate): length}
    if candidate.method in ROWS_OF_MAX_LENGTH:
        changes["prompt_length"] = max(1, length - candidate.max_completion_length)
    return completed(replace(candidate, **changes), question)  # type: ignore[arg-type]


# -- the best ----------------------------------------------------------------------------------------------------------


def merit(answer: Estimate, job: Job) -> tuple[float, ...]:
    """What the job asks for, then speed; larger is better."""
    candidate, speed = answer.candidate, answer.throughput.tokens_per_second
    if job.optimize == "max-length":
        return (float(candidate.row_tokens), speed)
    if job.optimize == "batch-size":
        return (float(candidate.per_device_train_batch_size), speed)
    return (speed,)


def search(question: Question) -> Estimate | None:
    """The best candidate of one class; where the job lets the rank be chosen, at the largest rank that fits.

    None: no candidate of the class could even start.
    """
    job, answer = question.job, None
    if not job.lora_ranks or question.tuning_class == "full":
        return best_of(question)
    for rank in sorted(job.lora_ranks, reverse=True):
        answer = best_of(replace(question, job=replace(job, pinned={**job.pinned, "lora_r": rank}, lora_ranks=())))
        if answer is not None and answer.fits:
            break
    return answer


def best_of(question: Question) -> Estimate | None:
    """The best candidate that fits; where none does, the one that misses by least.

    Full fine-tuning takes 16-bit weights only where float32 ones fit in no way: they round what is learned.
    """
    answers = [answer for answer in (fitted(structure, question) for structure in structures(question)) if answer is not None]
    fitting = [answer for answer in answers if answer.fits]
    if not fitting:
        return min(answers, key=lambda answer: (answer.over_bytes, sum(phase.total_bytes for phase in answer.gpus[0].phases)), default=None)
    precise = [answer for answer in fitting if answer.candidate.tuning == "lora" or answer.candidate.dtype == "float32"]
    return max(precise or fitting, key=lambda answer: merit(answer, question.job))
