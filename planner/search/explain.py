"""The reasons for a plan's settings and the limits of its batch and length, as data.

planner/report/sentences.py has their sentences.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from planner.candidate import Candidate
from planner.estimation import estimate
from planner.quantities import Estimate, Note, Reason
from planner.search.fit import estimate_or_none
from planner.search.knobs import SearchProblem, attention, packing
from planner.search.sizes import LENGTH_STEP, batch_sizes, largest, length_field, length_limit, with_length
from planner.settings.setting import Value
from planner.units import GIB

# Smaller differences are left out of reasons and notes.
MIN_REPORTED_BYTES = GIB // 4
MIN_REPORTED_SPEEDUP = 1.05

# Settings that a reason is given for, each with its other values. The best candidate is compared with the first of
# these values that it does not have.
OTHER_VALUES: dict[str, tuple[Value, ...]] = {
    "dtype": ("float32",),
    "attn_implementation": (),  # those of the model and the GPU
    "use_liger_kernel": (False,),
    "precompute_ref_log_probs": (False,),
    "packing": (True, False),
    "gradient_checkpointing": (True, False),
    "sharding": ("ddp",),
    "vllm_enable_sleep_mode": (False, True),
    "ds3_gather_for_generation": (True, False),
}


# -- reasons -----------------------------------------------------------------------------------------------------------


def reasons(best: Estimate, problem: SearchProblem) -> tuple[Reason, ...]:
    """Return a reason for each searched setting that matters: the memory and speed it gains over its other value."""
    found = []
    for name, others in OTHER_VALUES.items():
        value = getattr(best.candidate, name)
        if name == "attn_implementation":
            others = tuple(str(change[name]) for change in attention(problem))
        other = next((each for each in others if each != value), None)
        if other is None or name in problem.job.pinned or not is_applicable(name, best.candidate, problem):
            continue
        answer = estimate_or_none(replace(best.candidate, **{name: other}), problem)
        if answer is None:
            continue
        saved = saved_bytes(best, answer, problem)
        speed = best.throughput.tokens_per_second / answer.throughput.tokens_per_second
        if abs(saved) >= MIN_REPORTED_BYTES or max(speed, 1 / speed) >= MIN_REPORTED_SPEEDUP:
            reason = Reason(
                setting=name,
                value=value,
                other=other,
                saved_bytes=saved,
                speed=speed,
                fits_alone=best.fits and not answer.fits,
                gathered_bytes=gathered_to_generate_bytes(name, answer),
            )
            found.append(reason)
    return tuple(found)


def gathered_to_generate_bytes(name: str, other: Estimate) -> int:
    """Return the bytes of the whole model that ZeRO-3 gathers on each GPU to generate; 0 for other settings."""
    if name != "ds3_gather_for_generation" or not other.candidate.ds3_gather_for_generation:
        return 0
    rollout = next(phase for phase in other.gpus[0].phases if phase.name == "rollout")
    return rollout.components["communication"]


def is_applicable(name: str, candidate: Candidate, problem: SearchProblem) -> bool:
    """Return whether the setting has an effect and another value that the model and the cluster support."""
    needs: dict[str, bool] = {
        "attn_implementation": len(attention(problem)) > 1,
        "dtype": not would_measure_float32(candidate),
        "packing": len(packing(problem)) > 1,
        "sharding": candidate.num_processes > 1 and not candidate.offload_optimizer,
        "vllm_enable_sleep_mode": candidate.vllm == "colocate",
        "ds3_gather_for_generation": candidate.scheme_row.gathers_to_generate
        and candidate.method_row.generates
        and candidate.vllm == "off",
    }
    return needs.get(name, True)


def would_measure_float32(candidate: Candidate) -> bool:
    """Return whether the layers of the same candidate in float32 would have to be measured, just for a note.

    Of layers without formulas, the measurements that ship have 4-bit weights in 16-bit models only.
    """
    return candidate.quantization_row.bitsandbytes and candidate.model.has_measured_layers


def saved_bytes(best: Estimate, other: Estimate, problem: SearchProblem) -> int:
    """Return by how many bytes the other's peak exceeds that of the best, on the GPUs where they differ most.

    A server's GPUs are as full in both. If their evidence differs (one estimated, one measured), the estimates of both
    are compared instead.
    """
    if best.evidence != other.evidence:
        best, other = (estimate(answer.candidate, problem.cluster, problem.job.risk) for answer in (best, other))
    more = [two.peak_bytes - one.peak_bytes for one, two in zip(best.gpus, other.gpus, strict=True)]
    return max(more, key=abs)


# -- limits ------------------------------------------------------------------------------------------------------------


def limits(best: Estimate, problem: SearchProblem) -> tuple[Note, ...]:
    """Return up to two notes: the largest length and batch that fit, and the phase that does not fit beyond them."""
    return (limit_of_length(best, problem), *limit_of_batch(best, problem))


def limit_of_length(best: Estimate, problem: SearchProblem) -> Note:
    """Return a note about the largest length that fits at the best candidate's batch, in steps of 256 tokens."""
    candidate, name = best.candidate, length_field(best.candidate)
    length, room = getattr(candidate, name), length_limit(candidate)

    def at(steps: int) -> Estimate | None:
        return estimate_or_none(with_length(candidate, steps * LENGTH_STEP, problem), problem)

    def fits(steps: int) -> bool:
        answer = at(steps)
        return answer is not None and answer.fits

    steps = largest(-(-length // LENGTH_STEP), room // LENGTH_STEP, fits)
    if steps * LENGTH_STEP <= length:
        beyond = shortage(at(-(-length // LENGTH_STEP) + 1), best.candidate)
        return Note("length_is_longest", {"setting": name, "length": length, "beyond": beyond})
    reached = {"setting": name, "length": steps * LENGTH_STEP, **other_evidence(at(steps), best)}
    if (steps + 1) * LENGTH_STEP > room:
        return Note("length_up_to_model", reached)
    return Note("length_up_to", {**reached, "beyond": shortage(at(steps + 1), best.candidate)})


def limit_of_batch(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note the next larger batch, if the job allows one: it fits, or which phase does not."""
    candidate = best.candidate
    sizes = batch_sizes(candidate, problem.job)
    larger = [size for size in sizes.values if size[0] > candidate.per_device_train_batch_size]
    if not larger:
        return
    following = sizes.build(larger[0])
    answer = estimate_or_none(following, problem)
    batch = {"batch": following.per_device_train_batch_size}
    evidence = other_evidence(answer, best)
    if answer is not None and answer.fits:
        yield Note("batch_fits_no_faster", {**batch, **evidence})
    elif answer is None and following.vllm == "off":
        yield Note("batch_not_estimated", {**batch, "because": NOT_MEASURED})
    else:
        yield Note("batch_does_not_fit", {**batch, "because": shortage(answer, following), **evidence})


def other_evidence(answer: Estimate | None, best: Estimate) -> dict[str, object]:
    """Return the evidence of an answer as a value of a note, if the best has another one; empty otherwise."""
    return {} if answer is None or answer.evidence == best.evidence else {"evidence": answer.evidence}


NOT_MEASURED = Note("layers_not_measured")


def shortage(answer: Estimate | None, candidate: Candidate) -> Note:
    """Return why an answer does not fit: the heaviest phase of the fullest GPU, the node, or the engine."""
    if answer is None:
        return NOT_MEASURED if candidate.vllm == "off" else Note("engine_does_not_start")
    if answer.over_bytes <= 0 < answer.host_over_bytes:
        return Note("host_memory_short", {"needed_bytes": answer.host_peak_bytes})
    tightest = max(answer.gpus, key=lambda gpu: gpu.interval_bytes[1] - gpu.capacity_bytes)
    peak = {"phase": tightest.peak_phase, "peak_bytes": tightest.peak_bytes}
    only_bound = tightest.peak_bytes <= tightest.capacity_bytes  # the peak fits, its upper bound does not
    return Note("phase_peaks", {**peak, "most_bytes": tightest.interval_bytes[1]} if only_bound else peak)
