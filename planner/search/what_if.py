"""The best candidate at other lengths and micro-batches: what each would need."""

from msgspec import Struct
from msgspec.structs import replace

from planner.jobs.job import SPLITS
from planner.quantities import Estimate
from planner.search.fit import estimate_or_none
from planner.search.knobs import SearchProblem
from planner.search.sizes import batch_sizes, length_field, length_limit, with_length

MOST_BATCHES = 6  # rows, up to one beyond that of the best candidate where there are more
LENGTH_FACTORS = (0.25, 0.5, 1, 2, 4)


class WhatIf(Struct, frozen=True, kw_only=True):
    """Estimates by micro-batch (rows) and length (columns); None: an engine would not start there."""

    length_name: str
    lengths: tuple[int, ...]
    rows: tuple[tuple[int, tuple[Estimate | None, ...]], ...]


def what_if(best: Estimate, problem: SearchProblem) -> WhatIf:
    """Return the best candidate at lengths around its own, and at every micro-batch with its effective batch size.

    An engine keeps its share of the card.
    """
    candidate = best.candidate
    name = length_field(candidate)
    length = getattr(candidate, name)
    lengths = {min(max(1, int(length * factor)), max(length, length_limit(candidate))) for factor in LENGTH_FACTORS}
    pinned = {key: value for key, value in problem.job.pinned.items() if key not in SPLITS}
    free = replace(problem.job, pinned=pinned, effective_batch_size=candidate.effective_batch_size)
    sizes = batch_sizes(candidate, free)
    values = [value[0] for value in sizes.values]
    chosen = candidate.per_device_train_batch_size
    start = max(0, (values.index(chosen) if chosen in values else 0) + 2 - MOST_BATCHES)
    shown = [sizes[index] for index in range(start, min(len(sizes), start + MOST_BATCHES))] or [candidate]
    return WhatIf(
        length_name=name,
        lengths=tuple(sorted(lengths)),
        rows=tuple(
            (
                at_batch.per_device_train_batch_size,
                tuple(estimate_or_none(with_length(at_batch, tokens, problem), problem) for tokens in sorted(lengths)),
            )
            for at_batch in shown
        ),
    )
