"""Settings that would make the recommended candidate faster and that no plan takes silently: each has its price.

They change what is learned, or need more than the launch of a training. Each is tried alone, after the search.
"""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from planner.jobs.settings import settings_of_fields
from planner.jobs.stop import can_precompute
from planner.models.layers import Experts
from planner.quantities import Estimate, Note
from planner.search.fit import estimate_or_none
from planner.search.knobs import SearchProblem
from planner.search.search import search
from planner.settings.setting import Value

WORTH_A_LINE = 1.1  # times the speed of the recommended candidate
EIGHT_BIT = "adamw_8bit"
USUAL_EPOCHS = 3  # num_train_epochs by default (transformers 5.23, training_args.py)
# Share of AdamW's two 32-bit states that 8-bit ones with their scales save (planner/memory/optimizer.py).
SAVED_STATES = 0.74


class Lever(Struct, frozen=True, kw_only=True):
    """A change of the recommended candidate that is faster.

    `factor`: its speed as a multiple of the recommended one; `price`: what it changes or needs.
    """

    change: Note
    estimate: Estimate
    factor: float
    price: Note


def levers(best: Estimate, problem: SearchProblem, full: tuple[SearchProblem, Estimate] | None) -> tuple[Lever, ...]:
    """Return the levers that are worth a line, the fastest first.

    `full`: full fine-tuning without offloading, if the job allows it: it fits, or is the nearest that does not.
    """
    if not best.fits or problem.job.optimize != "throughput":
        return ()
    found = [
        *(eight_bit_states(best, *full) if full is not None else ()),
        *precomputed_reference(best, problem),
        *sixteen_bit_adapters(best, problem),
        *attention_adapters(best, problem),
        *longer_rollouts(best, problem),
        *grouped_lengths(best, problem),
    ]
    return tuple(sorted(found, key=lambda lever: -lever.factor))


def eight_bit_states(best: Estimate, problem: SearchProblem, answer: Estimate) -> Iterator[Lever]:
    """Yield full fine-tuning with 8-bit states where it is faster with the memory that they free.

    They are searched without offloading, also where full fine-tuning is recommended with it. The search is left out
    where the states are too few to matter.
    """
    candidate = answer.candidate
    states = answer.gpus[0].peak.components.get("optimizer_states", 0)
    room = candidate.gradient_checkpointing or candidate.method_row.generates  # that more memory may turn into speed
    wanted = room if answer.fits else answer.over_bytes <= SAVED_STATES * states
    if "optim" in problem.job.pinned or not wanted:
        return
    floor = WORTH_A_LINE * best.throughput.tokens_per_second
    found = search_with(replace(problem, faster_than=floor), {"optim": EIGHT_BIT})
    if found is None or not found.fits or not is_worth_a_line(found, best):
        return
    change = Note("full_with_settings", {"settings": {"optim": EIGHT_BIT}})
    yield lever_of(found, best, change, Note("price_of_8_bit_states"))


def precomputed_reference(best: Estimate, problem: SearchProblem) -> Iterator[Lever]:
    """Yield precompute_ref_log_probs on several nodes, with its pass over the data divided among the usual epochs.

    On one node it is part of the plan (planner/search/knobs.py, `with_derived_settings`).
    """
    candidate = best.candidate
    decided = "precompute_ref_log_probs" in problem.job.pinned or candidate.precompute_ref_log_probs
    if decided or not can_precompute(candidate, problem.cluster):
        return
    found = estimate_or_none(replace(candidate, precompute_ref_log_probs=True), problem)
    if found is None or not found.fits:
        return
    before, after = best.throughput.step_seconds, found.throughput.step_seconds
    factor = before / (after + (before - after) / USUAL_EPOCHS)
    if factor >= WORTH_A_LINE:
        yield Lever(
            change=Note("with_settings", {"settings": {"precompute_ref_log_probs": True}}),
            estimate=found,
            factor=factor,
            price=Note("price_of_precomputing", {"epochs": USUAL_EPOCHS}),
        )


def sixteen_bit_adapters(best: Estimate, problem: SearchProblem) -> Iterator[Lever]:
    """Yield adapters in the base's 16 bits: autocast casts float32 ones in every forward pass.

    Source: peft 0.21, tuners/tuners_utils.py, `cast_adapter_dtype`.
    """
    candidate = best.candidate
    wide = candidate.tuning == "lora" and candidate.dtype == "bfloat16" and not candidate.quantization_row.quantized
    if not wide or "autocast_adapter_dtype" in problem.job.pinned:
        return
    found = estimate_or_none(replace(candidate, autocast_adapter_dtype=False), problem)
    if found is not None and found.fits and is_worth_a_line(found, best):
        change = Note("with_settings", {"settings": {"autocast_adapter_dtype": False}})
        yield lever_of(found, best, change, Note("price_of_16_bit_adapters"))


def attention_adapters(best: Estimate, problem: SearchProblem) -> Iterator[Lever]:
    """Yield adapters on the attention alone for a mixture of experts, whose experts are most of its modules.

    Not where layers have no formulas: their measurements that ship are of adapters on all modules, so that the line
    would stand only where the extra training measures others.
    """
    candidate = best.candidate
    layers = [layer for layer, _ in candidate.model.layer_kinds]
    mixture = any(isinstance(layer.feed_forward, Experts) for layer in layers)
    everywhere = candidate.tuning == "lora" and candidate.lora_target_modules == ("all-linear",)
    measured = any(layer.program == "measured" for layer in layers)
    if not mixture or measured or not everywhere or "lora_target_modules" in problem.job.pinned:
        return
    names = tuple(dict.fromkeys(linear.name for layer in layers for linear in layer.attention.linears))
    floor = WORTH_A_LINE * best.throughput.tokens_per_second
    found = search_with(replace(problem, faster_than=floor), {"lora_target_modules": names})
    if found is not None and found.fits and is_worth_a_line(found, best):
        change = Note("with_settings", {"settings": settings_of_fields({"lora_target_modules": names})})
        yield lever_of(found, best, change, Note("price_of_attention_adapters"))


def longer_rollouts(best: Estimate, problem: SearchProblem) -> Iterator[Lever]:
    """Yield rollouts for two optimizer steps, which fill an engine better and sync its weights half as often."""
    candidate = best.candidate
    if not candidate.method_row.grouped_completions or "steps_per_generation" in problem.job.pinned:
        return
    steps = 2 * candidate.steps_per_generation
    found = estimate_or_none(replace(candidate, steps_per_generation=steps), problem)
    if found is not None and found.fits and is_worth_a_line(found, best):
        change = Note("with_settings", {"settings": {"steps_per_generation": steps}})
        yield lever_of(found, best, change, Note("price_of_longer_rollouts"))


def grouped_lengths(best: Estimate, problem: SearchProblem) -> Iterator[Lever]:
    """Yield batches of rows of similar lengths, which hold less padding."""
    candidate = best.candidate
    unknown = candidate.lengths is None or candidate.layout != "padded"
    if unknown or not candidate.method_row.packs or "train_sampling_strategy" in problem.job.pinned:
        return
    found = estimate_or_none(replace(candidate, train_sampling_strategy="group_by_length"), problem)
    if found is not None and found.fits and is_worth_a_line(found, best):
        change = Note("with_settings", {"settings": {"train_sampling_strategy": "group_by_length"}})
        yield lever_of(found, best, change, Note("price_of_grouped_lengths"))


def search_with(problem: SearchProblem, pins: dict[str, Value]) -> Estimate | None:
    """Search a problem with more pinned settings."""
    return search(replace(problem, job=replace(problem.job, pinned={**problem.job.pinned, **pins})))


def is_worth_a_line(found: Estimate, best: Estimate) -> bool:
    """Return whether a candidate is so much faster than the recommended one that the report names it."""
    return found.throughput.tokens_per_second >= WORTH_A_LINE * best.throughput.tokens_per_second


def lever_of(found: Estimate, best: Estimate, change: Note, price: Note) -> Lever:
    """Return a lever whose factor is that of the tokens per second."""
    factor = found.throughput.tokens_per_second / best.throughput.tokens_per_second
    return Lever(change=change, estimate=found, factor=factor, price=price)
