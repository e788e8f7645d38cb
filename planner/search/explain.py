"""What a plan says beside its numbers: why it chose so, what limits more, and what would surprise the user."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from planner.binary_search import largest
from planner.candidate import BITSANDBYTES, Candidate
from planner.estimate import estimate
from planner.jobs.job import effective_batch_size
from planner.quantities import Estimate
from planner.search.knobs import SearchProblem, attention
from planner.search.search import LENGTH_STEP, attempt, batches, length_field, longest_length, with_length
from planner.units import GIB, format_count, format_gib

WORTH_SAYING_BYTES = GIB // 4
WORTH_SAYING_SPEED = 1.05

# Settings whose effect is shown by trying the other value: field -> (other values, of which the first that differs is tried).
TRIED_THE_OTHER_WAY: dict[str, tuple[object, ...]] = {
    "dtype": ("float32",),
    "attn_implementation": ("sdpa",),
    "gradient_checkpointing": (True, False),
    "sharding": ("ddp",),
    "vllm_enable_sleep_mode": (False, True),
    "ds3_gather_for_generation": (True, False),
}


# -- why ---------------------------------------------------------------------------------------------------------------


def reasons(best: Estimate, problem: SearchProblem) -> tuple[str, ...]:
    """What each setting that was searched does to memory and speed, found by trying the other way."""
    found = []
    for name, others in TRIED_THE_OTHER_WAY.items():
        value = getattr(best.candidate, name)
        other = next((each for each in others if each != value), None)
        if other is None or name in problem.job.pinned or not matters(name, best.candidate, problem):
            continue
        answer = attempt(replace(best.candidate, **{name: other}), problem)  # type: ignore[arg-type]
        if answer is not None and (said := difference(best, answer, problem)):
            found.append(f"{name} {text(value)} instead of {text(other)}: {said}{gathered(name, answer)}")
    return tuple(found)


def gathered(name: str, other: Estimate) -> str:
    """The copy that ZeRO-3 gathers on every GPU to generate, in the words of the phase table."""
    if name != "ds3_gather_for_generation" or not other.candidate.ds3_gather_for_generation:
        return ""
    rollout = next(phase for phase in other.gpus[0].phases if phase.name == "rollout")
    return f"; gathering the whole model on every GPU takes {format_gib(rollout.components['communication'], 1)} there"


def matters(name: str, candidate: Candidate, problem: SearchProblem) -> bool:
    """Whether the other way is one that the model and the cluster have."""
    needs: dict[str, bool] = {
        "attn_implementation": len(attention(problem)) > 1,
        "sharding": candidate.num_processes > 1 and not candidate.offload_optimizer,
        "vllm_enable_sleep_mode": candidate.vllm == "colocate",
        "ds3_gather_for_generation": candidate.sharding == "zero3"
        and candidate.method_row.generates
        and candidate.vllm == "off",
    }
    return needs.get(name, True)


def difference(best: Estimate, other: Estimate, problem: SearchProblem) -> str:
    """What the best has over the other, in memory and speed; empty where neither is worth a line."""
    parts = []
    saved = saved_bytes(best, other, problem)
    if abs(saved) >= WORTH_SAYING_BYTES:
        parts.append(f"{'saves' if saved > 0 else 'takes'} {format_gib(abs(saved), 1)}")
    faster = best.throughput.tokens_per_second / other.throughput.tokens_per_second
    if max(faster, 1 / faster) >= WORTH_SAYING_SPEED:
        parts.append(f"{faster:.2f} times the speed")
    if parts and best.fits and not other.fits:
        parts.append("and does not fit without")
    return ", ".join(parts)


def saved_bytes(best: Estimate, other: Estimate, problem: SearchProblem) -> int:
    """By how much the other peaks higher, both on one rung: what lies between rungs is no difference between candidates."""
    if best.evidence != other.evidence:
        best, other = (estimate(answer.candidate, problem.cluster, problem.job.risk) for answer in (best, other))
    return max(gpu.peak_bytes for gpu in other.gpus) - max(gpu.peak_bytes for gpu in best.gpus)


def text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- more --------------------------------------------------------------------------------------------------------------


def limits(best: Estimate, problem: SearchProblem) -> tuple[str, ...]:
    """How far the batch and the length could go, and what stops them."""
    return tuple(line for line in (longest_line(best, problem), batch_line(best, problem)) if line)


def longest_line(best: Estimate, problem: SearchProblem) -> str:
    candidate, name = best.candidate, length_field(best.candidate)
    length, room = getattr(candidate, name), longest_length(candidate)

    def at(steps: int) -> Estimate | None:
        return attempt(with_length(candidate, steps * LENGTH_STEP, problem), problem)

    def fits(steps: int) -> bool:
        answer = at(steps)
        return answer is not None and answer.fits

    steps = largest(-(-length // LENGTH_STEP), room // LENGTH_STEP, fits)
    if steps * LENGTH_STEP <= length:
        return f"{name} {format_count(length)} is as long as this batch allows; beyond that {stop(at(-(-length // LENGTH_STEP) + 1))}"
    reached = f"{name} up to {format_count(steps * LENGTH_STEP)} at this batch{rung(at(steps), best)}"
    return (
        f"{reached}, which is as far as the model goes"
        if (steps + 1) * LENGTH_STEP > room
        else f"{reached}; beyond that {stop(at(steps + 1))}"
    )


def batch_line(best: Estimate, problem: SearchProblem) -> str:
    candidate = best.candidate
    choices = batches(candidate, problem.job)
    larger = [size for size in choices.values if size[0] > candidate.per_device_train_batch_size]
    if not larger:
        return ""
    following = choices.at(larger[0])
    answer = attempt(following, problem)
    if answer is not None and answer.fits:
        return f"per_device_train_batch_size {following.per_device_train_batch_size} fits too and is no faster{rung(answer, best)}"
    return f"per_device_train_batch_size {following.per_device_train_batch_size} does not fit: {stop(answer)}{rung(answer, best)}"


def rung(answer: Estimate | None, best: Estimate) -> str:
    """What an answer stands on, where that is not what the recommended one stands on."""
    return "" if answer is None or answer.evidence == best.evidence else f" ({answer.evidence})"


def stop(answer: Estimate | None) -> str:
    """What stops an answer from fitting: the phase and by how much."""
    if answer is None:
        return "the vLLM engine would not start"
    tightest = max(answer.gpus, key=lambda gpu: gpu.interval_bytes[1] - gpu.capacity_bytes)
    bound = (
        f", up to {format_gib(tightest.interval_bytes[1], 1)}" if tightest.peak_bytes <= tightest.capacity_bytes else ""
    )
    return f"the {tightest.peak_phase.replace('_', ' ')} peaks at {format_gib(tightest.peak_bytes, 1)}{bound}"


# -- notes -------------------------------------------------------------------------------------------------------------


def notes(best: Estimate, problem: SearchProblem) -> tuple[str, ...]:
    return tuple(line for note in NOTES for line in note(best, problem))


def about_dtype(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    """TRL's default surprises: float32."""
    candidate = best.candidate
    if candidate.dtype == "float32" or "dtype" in problem.job.pinned:
        return
    other = attempt(replace(candidate, dtype="float32"), problem)
    more = saved_bytes(best, other, problem) if other is not None else 0
    if more >= WORTH_SAYING_BYTES:
        yield f"TRL loads in float32 unless dtype is set: that would need {format_gib(more, 1)} more; the plan sets {candidate.dtype}"
    if candidate.tuning == "full":
        yield "16-bit weights without a float32 copy round small updates away: float32 ones would not fit here"


def about_precision(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    gpu = problem.cluster.gpu
    if not gpu.supports_bf16:
        yield f"{gpu.name} has no bfloat16: the plan trains in fp16 (bf16 false, fp16 true)"


def about_attention(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    candidate = best.candidate
    if candidate.attn_implementation == "flash_attention_2" and "attn_implementation" not in problem.job.pinned:
        yield "attn_implementation flash_attention_2 needs the flash-attn package; kernels-community/flash-attn2 does the same through the kernels package"
    masked = candidate.attn_implementation == "sdpa" and candidate.pads
    if (
        masked
        and estimate(candidate, problem.cluster).gpus[0].peak.components.get("attention_scores", 0)
        >= WORTH_SAYING_BYTES
    ):
        yield "batches with padding make sdpa build a mask of rows x length squared in every layer; --no-padded if yours have none"


def about_adapters(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    """What TRL and PEFT do, and in which order: getting it wrong is what stops people."""
    candidate = best.candidate
    if candidate.tuning != "lora":
        return
    steps = [
        f"load the model ({candidate.quantization})" if candidate.quantization != "none" else "load the model",
        "get_peft_model",
    ]
    steps += ["adapters cast to bfloat16"] if candidate.quantization in BITSANDBYTES else []
    steps += ["enable_input_require_grads"] if candidate.gradient_checkpointing else []
    reentrant = "reentrant, which PEFT under ZeRO-3 needs" if candidate.sharding == "zero3" else "non-reentrant"
    steps += [
        f"checkpointing at train(), {reentrant}"
        if candidate.gradient_checkpointing
        else f"train() (checkpointing off; were it on, {reentrant})"
    ]
    yield f"TRL prepares the model itself, in this order: {', '.join(steps[:-1])}, {steps[-1]}"
    if candidate.quantization in BITSANDBYTES:
        yield "so pass peft_config and an untouched model; one wrapped by hand needs enable_input_require_grads before checkpointing, or no gradient arrives"
    if candidate.quantization in ("nf4", "nf4-double") and candidate.vllm != "off":
        yield "vLLM dropped bitsandbytes after 0.22, and TRL asks for it with QLoRA: install a vLLM that still has it"


def about_rank(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    ranks = problem.job.lora_ranks
    if ranks and best.candidate.tuning == "lora":
        yield f"lora_r {best.candidate.lora_r} is the largest of {', '.join(map(str, sorted(ranks)))} that fits"


def about_versions(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    row = best.candidate.method_row
    if row.last_trl != "current":
        yield f"{row.name} left TRL after {row.last_trl}: the plan is for trl {row.last_trl}; install trl<={row.last_trl}.*"
    elif row.experimental:
        yield f"{row.trainer} is in trl.experimental: it may change without notice"


def about_data(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    candidate = best.candidate
    if (
        candidate.method_row.generates
        and "prompt_length" not in problem.job.pinned
        and not candidate.method_row.bounded_rows
    ):
        yield f"prompts are taken to be up to {format_count(candidate.prompt_length)} tokens; TRL does not cut them: give --prompt-length for yours"
    if candidate.vllm == "colocate" and candidate.vllm_max_model_length == 0:
        yield f"vLLM takes the model's whole context of {format_count(candidate.model.max_position_embeddings)} tokens: vllm_max_model_length is not set"
    elif candidate.vllm == "colocate" and "vllm_max_model_length" not in problem.job.pinned:
        yield (
            f"vllm_max_model_length {format_count(candidate.vllm_max_model_length)} is prompt and completion; "
            f"TRL's default is the model's whole context, {format_count(candidate.model.max_position_embeddings)}"
        )


def about_batch(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    """A server takes GPUs from the trainer, and TRL's default batch counts the trainer's."""
    candidate, usual = best.candidate, effective_batch_size(problem.job, problem.cluster)
    share = candidate.effective_batch_size // candidate.num_processes
    if problem.job.optimize == "throughput" and candidate.effective_batch_size != usual:
        yield (
            f"an optimizer step sees {format_count(candidate.effective_batch_size)} samples, {share} for each of {candidate.num_processes} processes; on all "
            f"{problem.cluster.num_gpus} GPUs it would be {format_count(usual)}: say --effective-batch-size to keep one"
        )


def about_sources(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    """Doubts that the catalogues carry."""
    yield from (f"{problem.job.model.id}: {note}" for note in problem.job.model.notes)


NOTES: tuple[Callable[[Estimate, SearchProblem], Iterator[str]], ...] = (
    about_dtype, about_precision, about_attention, about_adapters, about_rank, about_versions, about_data, about_batch, about_sources,
)  # fmt: skip
