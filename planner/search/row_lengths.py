"""Notes about the lengths of a dataset's rows: what `max_length` cuts, what another one would cost, and packing."""

from collections.abc import Iterator

from planner.candidate import Candidate
from planner.quantities import Estimate, Note
from planner.rows.batches import lost_to
from planner.search.knobs import SearchProblem
from planner.search.search import best_of_structure
from planner.search.sizes import LENGTH_STEP, with_length

MOST_CUT_SHARE = 0.1  # of the rows: beyond it a length is no choice that anybody would make
MOST_LENGTHS = 3  # that are compared


def about_rows(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note that rows are assumed to be full, or what `max_length` cuts and packing changes."""
    candidate, epoch = best.candidate, best.throughput.epoch
    if candidate.method_row.generates:
        yield from _about_completions(candidate)
        return
    if epoch is None:
        yield Note("rows_taken_full", {"max_length": candidate.max_length})
        return
    if epoch.cut_rows:
        values = {"rows": epoch.cut_row_share, "tokens": epoch.cut_token_share}
        dropped = candidate.method_row.drops_long_rows
        yield Note("rows_cut", {"max_length": candidate.max_length, **values, "dropped": dropped})
    if candidate.packing and "packing" not in problem.job.pinned:
        samples = candidate.effective_batch_size
        together = round(samples * epoch.drawn_rows / epoch.trained_rows)
        yield Note("rows_packed", {"packed_rows": samples, "rows": together})


def _about_completions(candidate: Candidate) -> Iterator[Note]:
    """Note that completions are assumed to be full, or how many `max_completion_length` cuts."""
    most, lengths = candidate.max_completion_length, candidate.completion_lengths
    if lengths is None:
        yield Note("completions_taken_full")
        return
    longer, beyond = lost_to(lengths, most)
    if longer:
        shares = {"completions": longer / len(lengths.tokens), "tokens": beyond / sum(lengths.tokens)}
        yield Note("completions_cut", {"max_completion_length": most, **shares})


def costs_of_lengths(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note for other values of `max_length` what they cut, and how long an epoch takes beside that of the best."""
    candidate = best.candidate
    if candidate.lengths is None or candidate.padding_free or problem.job.optimize == "max-length":
        return
    for length in other_lengths(candidate):
        answer = best_of_structure(with_length(candidate, length, problem), problem)
        if answer is None or answer.throughput.epoch is None:
            continue
        rows, beyond = lost_to(candidate.lengths, length)
        values = {"rows": rows / len(candidate.lengths.tokens), "tokens": beyond / sum(candidate.lengths.tokens)}
        cost = {"speed": epoch_seconds(best) / epoch_seconds(answer)} if answer.fits else {}
        yield Note("length_costs", {"max_length": length, **values, **cost})


def other_lengths(candidate: Candidate) -> tuple[int, ...]:
    """Return lengths worth comparing: powers of two that cut at most a tenth of the rows, and one that cuts none."""
    assert candidate.lengths is not None
    longest = candidate.lengths.longest
    room = candidate.model.max_position_embeddings or longest
    whole = -(-longest // LENGTH_STEP) * LENGTH_STEP
    powers = [2**power for power in range(longest.bit_length() - 1, 6, -1)]
    kept = [length for length in dict.fromkeys((whole, *powers)) if 0 < length <= max(room, LENGTH_STEP)]
    count = len(candidate.lengths.tokens)
    usual = [length for length in kept if lost_to(candidate.lengths, length)[0] <= MOST_CUT_SHARE * count]
    return tuple(length for length in usual if length != candidate.max_length)[:MOST_LENGTHS]


def epoch_seconds(answer: Estimate) -> float:
    """Return the seconds of one pass over the dataset."""
    assert answer.throughput.epoch is not None
    return answer.throughput.epoch.steps * answer.throughput.step_seconds
