"""Variations of the recommended candidate: one change, when it applies, and what it takes.

Levers are faster at a price that no plan pays silently: they change what is learned, or need more than the launch of a
training. Each is tried alone, after the search.
"""

from collections.abc import Callable, Iterator, Mapping
from math import gcd

from msgspec import Struct
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.gpus.cluster import Cluster
from planner.jobs.settings import settings_of_fields
from planner.jobs.stop import can_precompute
from planner.models.layers import Experts
from planner.quantities import Estimate, Note
from planner.search.fit import estimate_or_none
from planner.search.knobs import SearchProblem
from planner.search.search import search
from planner.search.structures import meets_a_stop
from planner.settings.setting import Value

WORTH_A_LINE = 1.1  # times the speed of the recommended candidate
USUAL_EPOCHS = 3  # num_train_epochs by default (transformers 5.23, training_args.py)
EIGHT_BIT: dict[str, Value] = {"optim": "adamw_8bit"}
# Share of AdamW's two 32-bit states that 8-bit ones with their scales save (planner/memory/optimizer.py).
SAVED_STATES = 0.74


class Variation(Struct, frozen=True, kw_only=True):
    """The best candidate with a change of the job, the cluster or the recommended candidate.

    `change`: in words; `takes`: what it needs, costs or gives up.
    """

    change: Note
    estimate: Estimate
    takes: tuple[Note, ...] = ()

    def factor(self, best: Estimate) -> float:
        """Return its speed as a multiple of the recommended candidate's.

        The pass that precomputes a reference's log-probabilities is divided among the usual epochs.
        """
        before, after = best.throughput, self.estimate.throughput
        if self.estimate.candidate == replace(best.candidate, precompute_ref_log_probs=True) != best.candidate:
            saved_seconds = before.step_seconds - after.step_seconds
            return before.step_seconds / (after.step_seconds + saved_seconds / USUAL_EPOCHS)
        return after.tokens_per_second / before.tokens_per_second

    def saved_bytes(self, nearest: Estimate) -> int:
        """Return by how much the peak of the heaviest GPU falls; 0 if it does not."""
        peaks = [max(gpu.peak_bytes for gpu in answer.gpus) for answer in (nearest, self.estimate)]
        return max(0, peaks[0] - peaks[1])


def offloading_notes(answer: Estimate) -> tuple[Note, ...]:
    """Note the host memory of a candidate that offloads to the host; empty for others."""
    candidate = answer.candidate
    offloads = candidate.offload_optimizer or candidate.offload_param or candidate.offloads_checkpoints
    return (Note("host_memory_needed", {"needed_bytes": answer.host_peak_bytes}),) if offloads else ()


class Lever(Struct, frozen=True, kw_only=True):
    """Settings of the recommended candidate that may make it faster, where they apply, and their price.

    `searched`: they free memory, which a search may turn into speed.
    """

    settings: Callable[[Candidate], dict[str, Value]]
    applies: Callable[[Candidate, Cluster], bool]
    price: Note
    searched: bool = False
    base: Callable[[Candidate], Candidate] = lambda candidate: candidate  # what the settings are changed of


def attention_modules(candidate: Candidate) -> tuple[str, ...]:
    """Return the names of the projections in attention."""
    layers = [layer for layer, _ in candidate.model.layer_kinds]
    return tuple(dict.fromkeys(linear.name for layer in layers for linear in layer.attention.linears))


def adapts_experts(candidate: Candidate) -> bool:
    """Return whether adapters are on all modules of a mixture of experts, so mostly on its experts.

    False for layers without formulas: their shipped measurements have adapters on all modules, and the
    lever would depend on whether the extra `training` is installed.
    """
    layers = [layer for layer, _ in candidate.model.layer_kinds]
    everywhere = candidate.tuning == "lora" and candidate.lora_target_modules == ("all-linear",)
    mixture = any(isinstance(layer.feed_forward, Experts) for layer in layers)
    return everywhere and mixture and not candidate.model.has_measured_layers


def dividing_experts(candidate: Candidate) -> dict[str, Value]:
    """Return the settings with which the most GPUs divide the experts of a layer evenly; {} for a model without.

    Adapters are then on attention alone, nothing is offloaded, and one copy of the model is sharded among all.
    """
    blocks = [layer.feed_forward for layer, _ in candidate.model.layer_kinds]
    counts = [block.num_experts for block in blocks if isinstance(block, Experts)]
    divided: dict[str, Value] = {"sharding": "distributed", "ep_size": gcd(candidate.num_processes, *counts)}
    if adapts_experts(candidate):
        divided["lora_target_modules"] = attention_modules(candidate)
    if candidate.dp_replicate_size > 1:
        divided["dp_replicate_size"] = 1
    offloaded = (name for name in ("offload_optimizer", "offload_param") if getattr(candidate, name))
    return {**divided, **dict.fromkeys(offloaded, False)} if counts else {}


def copied_in_16_bits(candidate: Candidate) -> Candidate:
    """Return the candidate with a copy of the checkpoint in 16 bits, of one that is published quantized."""
    return replace(candidate, model=replace(candidate.model, quantization="none"))


def may_divide_experts(candidate: Candidate, cluster: Cluster) -> bool:
    """Return whether Transformers could divide the experts among GPUs each of which now computes all of them."""
    divided = dividing_experts(candidate)
    begun = not divided or candidate.scheme_row.loads_divided or candidate.row_gpus > 1
    return not begun and not meets_a_stop(replace(candidate, **divided), cluster)


LEVERS = (
    # On one node it is part of the plan (planner/search/structures.py, `with_derived_settings`).
    Lever(
        settings=lambda candidate: {"precompute_ref_log_probs": True},
        applies=lambda candidate, cluster: (
            not candidate.precompute_ref_log_probs and can_precompute(candidate, cluster)
        ),
        price=Note("price_of_precomputing", {"epochs": USUAL_EPOCHS}),
    ),
    # Autocast casts float32 adapters in every forward pass (peft 0.21, tuners/tuners_utils.py, `cast_adapter_dtype`).
    Lever(
        settings=lambda candidate: {"autocast_adapter_dtype": False},
        applies=lambda candidate, _: (
            candidate.tuning == "lora"
            and candidate.dtype == "bfloat16"
            and not candidate.quantization_row.quantized
            and candidate.tool == "trl"
        ),
        price=Note("price_of_16_bit_adapters"),
    ),
    Lever(
        settings=lambda candidate: {"lora_target_modules": attention_modules(candidate)},
        applies=lambda candidate, _: adapts_experts(candidate),
        price=Note("price_of_attention_adapters"),
        searched=True,
    ),
    # No layer's experts are gathered: their tokens go to them.
    Lever(settings=dividing_experts, applies=may_divide_experts, price=Note("price_of_divided_experts")),
    Lever(
        settings=dividing_experts,
        applies=lambda candidate, cluster: (
            candidate.model.quantization_row.quantized
            and not candidate.quantization_row.quantized
            and may_divide_experts(copied_in_16_bits(candidate), cluster)
        ),
        price=Note("price_of_16_bit_copy"),
        base=copied_in_16_bits,
    ),
    # Rollouts for two optimizer steps fill an engine better and sync its weights half as often.
    Lever(
        settings=lambda candidate: {"steps_per_generation": 2 * candidate.steps_per_generation},
        applies=lambda candidate, _: candidate.method_row.grouped_completions,
        price=Note("price_of_longer_rollouts"),
    ),
    # Batches of rows of similar lengths hold less padding.
    Lever(
        settings=lambda candidate: {"train_sampling_strategy": "group_by_length"},
        applies=lambda candidate, _: (
            candidate.lengths is not None and candidate.layout == "padded" and candidate.method_row.packs
        ),
        price=Note("price_of_grouped_lengths"),
    ),
)


def levers(
    best: Estimate, problem: SearchProblem, full: tuple[SearchProblem, Estimate] | None
) -> tuple[Variation, ...]:
    """Return the levers that are worth a line, the fastest first.

    `full`: full fine-tuning without offloading, if the job allows it: it fits, or is the nearest that does not.
    """
    if not best.fits or problem.job.optimize != "throughput":
        return ()
    found = [*(eight_bit_states(best, *full) if full is not None else ()), *applied_levers(best, problem)]
    worth = [each for each in found if each.estimate.fits and each.factor(best) >= WORTH_A_LINE]
    return tuple(sorted(worth, key=lambda each: -each.factor(best)))


def applied_levers(best: Estimate, problem: SearchProblem) -> Iterator[Variation]:
    """Yield the best candidate with each lever that applies and whose settings the job does not pin."""
    candidate = best.candidate
    for lever in LEVERS:
        settings = lever.settings(candidate) if lever.applies(candidate, problem.cluster) else {}
        if not settings or problem.job.pinned.keys() & settings.keys():
            continue
        answer = (
            search_with(problem, settings, best)
            if lever.searched
            else estimate_or_none(replace(lever.base(candidate), **settings), problem)
        )
        if answer is not None:
            change = Note("with_settings", {"settings": settings_of_fields(settings)})
            yield Variation(change=change, estimate=answer, takes=(lever.price,))


def eight_bit_states(best: Estimate, problem: SearchProblem, answer: Estimate) -> Iterator[Variation]:
    """Yield full fine-tuning with 8-bit states, which may be faster with the memory that they free.

    They are searched without offloading, also where full fine-tuning is recommended with it. The search is left out
    where the states are too few to matter.
    """
    candidate = answer.candidate
    states = answer.gpus[0].peak.components.get("optimizer_states", 0)
    room = candidate.gradient_checkpointing or candidate.method_row.generates  # that more memory may turn into speed
    wanted = room if answer.fits else answer.over_bytes <= SAVED_STATES * states
    if "optim" in problem.job.pinned or not wanted:
        return
    found = search_with(problem, EIGHT_BIT, best)
    if found is not None:
        change = Note("full_with_settings", {"settings": EIGHT_BIT})
        yield Variation(change=change, estimate=found, takes=(Note("price_of_8_bit_states"),))


def search_with(problem: SearchProblem, pins: Mapping[str, Value], best: Estimate) -> Estimate | None:
    """Search a problem with more pinned settings for what is worth a line beside the recommended candidate."""
    floor = WORTH_A_LINE * best.throughput.tokens_per_second
    job = replace(problem.job, pinned={**problem.job.pinned, **pins})
    return search(replace(problem, job=job, faster_than=floor))
