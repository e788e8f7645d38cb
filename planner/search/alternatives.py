"""Alternatives of a plan: other tuning classes, larger sizes, and the job without its pins."""

from collections.abc import Iterator

from msgspec.structs import replace

from planner.candidate import Candidate
from planner.estimation import lacks_unmasked_kernel
from planner.jobs.job import Job
from planner.jobs.settings import is_read, settings_of_fields
from planner.quantities import Estimate, Note
from planner.search.choice import BestByProblem, allowed_on
from planner.search.knobs import SearchProblem
from planner.search.search import merit, search
from planner.search.shared_rows import longest_shared_rows
from planner.search.sizes import length_field
from planner.search.variations import Variation, offloading_notes
from planner.settings.table import with_role

NOTABLY_FASTER = 1.3  # an alternative that the plan points at
MIN_SPEEDUP = 1.05  # of an alternative without pinned settings, to be shown


def alternatives(found: BestByProblem, chosen: SearchProblem) -> tuple[Variation, ...]:
    """Return the best candidates of the tuning classes that were not chosen.

    One that does not fit is followed by the same class with offloading, if that fits.
    """
    rest: list[Variation] = []
    for problem, answer in found.items():
        if answer is None or problem.tuning_class == chosen.tuning_class:
            continue
        tuning = {"tuning": problem.tuning_class}
        longest = (length_note(answer),) if problem.job.optimize == "max-length" and answer.fits else ()
        rest.append(Variation(change=Note("tuning_class", tuning), estimate=answer, takes=longest))
        if answer.fits or chosen.offload:
            continue
        offloaded = search(replace(problem, offload=True))
        if offloaded is not None and offloaded.fits:
            takes = offloading_notes(offloaded)
            label = Note("tuning_class_offloading" if takes else "tuning_class_sharded", tuning)
            rest.append(Variation(change=label, estimate=offloaded, takes=takes))
    return tuple(rest)


def larger_sizes(best: Estimate, problem: SearchProblem) -> tuple[Variation, ...]:
    """Return what has longer rows or a larger batch than the recommended candidate, where the job asks for that.

    They are of the recommended tuning class: with offloading, with rows that several GPUs share, on one GPU, whose
    process needs no buffers of NCCL, with 16-bit weights, or with eager attention; the last three also with offloading,
    where that has more than every other way that offloads.
    """
    job = problem.job
    if job.optimize == "throughput" or not best.fits or best.candidate.row_gpus > 1:
        return ()
    found: list[Variation] = []
    for change, answer in with_more(best, problem):
        if answer is None or not answer.fits or merit(answer, job)[0] <= merit(best, job)[0]:
            continue
        takes = notes_of_larger(answer, job)
        offloaded = [each for each in found if offloading_notes(each.estimate)] if offloading_notes(answer) else []
        if all(merit(answer, job)[0] > merit(each.estimate, job)[0] for each in offloaded):
            found.append(Variation(change=change, estimate=answer, takes=takes))
    return tuple(found)


def with_more(best: Estimate, problem: SearchProblem) -> Iterator[tuple[Note, Estimate | None]]:
    """Yield the best candidate of each other way to have longer rows or a larger batch (see `larger_sizes`)."""
    job = problem.job
    tiers = (problem,) if problem.offload else (problem, replace(problem, offload=True))
    if len(tiers) > 1:
        yield Note("with_offloading"), search(tiers[1])
    if job.optimize == "max-length" and not problem.offload:
        yield Note("with_shared_rows"), longest_shared_rows(problem)
    if problem.cluster.num_gpus > 1 and allowed_on(job, alone := replace(problem.cluster, nodes=1, gpus_per_node=1)):
        for tier in tiers:
            yield Note("on_one_gpu"), search(replace(tier, cluster=alone))
    for change, pins in pins_of_more(best.candidate, problem):
        pinned = replace(job, pinned={**job.pinned, **pins})
        for tier in tiers:
            yield change, search(replace(tier, job=pinned))


def pins_of_more(best: Candidate, problem: SearchProblem) -> Iterator[tuple[Note, dict[str, object]]]:
    """Yield the settings that no plan recommends, for the length or batch that they give, each with its label.

    Where sdpa has no kernel for rows without padding, it computes them by plain products with float32 copies, which
    eager attention does not make: the two runs on a T4 in results/emulated_branches.jsonl. Padded rows, for which
    sdpa has a kernel, take longer with it (`ATTENTION_FRACTION`). Layers without formulas would have to be measured
    with it.
    """
    pinned, gpu = problem.job.pinned, problem.cluster.gpu
    if problem.tuning_class == "full" and "dtype" not in pinned and gpu.supports_bf16:
        yield Note("with_16_bit_weights"), {"dtype": "bfloat16"}
    if lacks_unmasked_kernel(best, gpu) and "attn_implementation" not in pinned and not best.model.has_measured_layers:
        yield Note("with_eager_attention"), {"attn_implementation": "eager"}


def notes_of_larger(answer: Estimate, job: Job) -> tuple[Note, ...]:
    """Return the length or the batch of an alternative that has more of it, and what it takes."""
    candidate = answer.candidate
    shares = (Note("gpus_share_rows", {"gpus": candidate.row_gpus}),) if candidate.row_gpus > 1 else ()
    batch = Note("micro_batch", {"per_device_train_batch_size": candidate.per_device_train_batch_size})
    size = length_note(answer) if job.optimize == "max-length" else batch
    return (size, *(offloading_notes(answer) or shares))


def length_note(answer: Estimate) -> Note:
    """Return the setting for the length of a candidate's rows and its value."""
    field = length_field(answer.candidate)
    return Note("row_length", {"setting": field, "length": getattr(answer.candidate, field)})


def faster_alternative(best: Estimate, others: tuple[Variation, ...]) -> tuple[Note, ...]:
    """Note the fastest alternative if it fits and is 1.3 times as fast as the recommendation."""
    fitting = [each for each in others if each.estimate.fits]
    if not best.fits or not fitting:
        return ()
    fastest = max(fitting, key=lambda each: each.estimate.throughput.tokens_per_second)
    factor = fastest.estimate.throughput.tokens_per_second / best.throughput.tokens_per_second
    note = Note("alternative_faster", {"alternative": fastest.change, "factor": factor})
    return (note,) if factor >= NOTABLY_FASTER else ()


def alternative_without_pins(best: Estimate, problem: SearchProblem) -> tuple[Variation, ...]:
    """Return the best candidate without the pinned settings about how to run, if it is 5 % faster or alone fits."""
    job_settings = with_role("question", "data", "learning")  # without them the answer would be about another training
    kept = {name: value for name, value in problem.job.pinned.items() if name in job_settings}
    if "teacher_server_gpus" in problem.job.pinned:  # decided before the search (planner/jobs/teacher.py)
        kept["teacher_server_gpus"] = problem.job.pinned["teacher_server_gpus"]
    dropped = sorted(problem.job.pinned.keys() - kept.keys())
    if not dropped or best.candidate.tool != "trl":  # another tool's pins are also what it cannot change
        return ()
    free = search(replace(problem, job=replace(problem.job, pinned=kept)))
    if free is None or not free.fits:
        return ()
    if best.fits and free.throughput.tokens_per_second < MIN_SPEEDUP * best.throughput.tokens_per_second:
        return ()
    both = (best.candidate, free.candidate)
    changed = [
        name
        for name in dropped
        if getattr(both[0], name) != getattr(both[1], name) and any(is_read(each, name) for each in both)
    ]
    if not changed:
        return ()
    settings: dict[str, object] = {}
    for name in changed:
        own, spelled = (settings_of_fields({name: getattr(each, name)}) for each in both)
        named = (own.keys() | spelled.keys()) & problem.job.given.keys()  # the winner may be spelled by others
        settings |= {each: spelled.get(each, own.get(each)) for each in named} or spelled
    instead = Note("pins_instead", {"settings": settings})
    return (Variation(change=Note("without_pins"), estimate=free, takes=(instead,)),)
