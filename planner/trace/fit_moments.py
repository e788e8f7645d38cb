"""What is alive after each birth of a step, as straight lines in the number of layers: traces of three depths laid beside each other."""

from operator import ge

from planner.quantities import Component, Phase
from planner.trace.fit_sizes import Key, Traces
from planner.trace.profile import Moment, NoProfile
from planner.trace.timeline import Trace

# Two sequences that agree on so many births are in step again after an inserted layer; more than a layer has of equal ones in a row.
AGREEING_BIRTHS = 256
BATCH = "batch"  # probes/step/tracker.py, `add_batch`

_Birth = tuple[Phase, Component, int]
_Entry = tuple[dict[Key, int], dict[Key, int], dict[Key, int]]  # counts, those of a further period, those of a further micro-step


def moments_of(traces: Traces, keys: list[list[Key]], accumulation: int) -> list[Moment]:
    """Every birth beside the same birth with more layers, the dominated left out. Only a birth can be a peak.

    What is no straight line over the three depths is another moment each time, and is left to those that are.
    """
    births = [_birth_keys(trace, of_trace) for trace, of_trace in zip(traces, keys, strict=True)]
    counts = [_after_births(trace, of_trace) for trace, of_trace in zip(traces, keys, strict=True)]
    batches = _batches(traces[0], keys[0], accumulation)
    by_phase: dict[Phase, list[_Entry]] = {}
    for i, j, k in sorted(_from_left(births) | _from_right(births)):
        further, furthest = _difference(counts[1][j], counts[0][i]), _difference(counts[2][k], counts[1][j])
        if further == furthest:
            by_phase.setdefault(births[0][i][0], []).append((counts[0][i], further, batches[i]))
    return [_moment(phase, entry) for phase, entries in by_phase.items() for entry in _frontier(entries)]


def _batches(trace: Trace, keys: list[Key], accumulation: int) -> list[dict[Key, int]]:
    """What a further micro-step has alive after each birth of the first depth: its batch.

    All batches of an optimizer step are on the device from its start, and the next step's first (transformers 5.23, trainer.py `get_batch_samples`;
    accelerate 1.15, data_loader.py, `DataLoaderShard.__iter__`). One that accumulates not at all has no further one.
    """
    held: dict[Key, int] = {}
    found: list[dict[Key, int]] = []
    for index, size_bytes in trace.events:
        if accumulation > 1 and trace.allocations[index].operator == BATCH:
            held[keys[index]] = held.get(keys[index], 0) + (1 if size_bytes > 0 else -1)
        if size_bytes > 0:
            found.append({key: count // (accumulation + 1) for key, count in held.items() if count > accumulation})
    return found


def _from_left(births: list[list[_Birth]]) -> set[tuple[int, int, int]]:
    """Births in step, first layers with first layers."""
    deeper, deepest = dict(_in_step(births[0], births[1])), dict(_in_step(births[1], births[2]))
    return {(i, j, deepest[j]) for i, j in deeper.items()}


def _from_right(births: list[list[_Birth]]) -> set[tuple[int, int, int]]:
    """Births in step, last layers with last layers."""
    last = [len(found) - 1 for found in births]
    return {(last[0] - i, last[1] - j, last[2] - k) for i, j, k in _from_left([found[::-1] for found in births])}


def _difference(one: dict[Key, int], other: dict[Key, int]) -> dict[Key, int]:
    return {key: count for key in {*one, *other} if (count := one.get(key, 0) - other.get(key, 0))}


def _birth_keys(trace: Trace, keys: list[Key]) -> list[_Birth]:
    return [(trace.allocations[index].phase, *keys[index]) for index, size_bytes in trace.events if size_bytes > 0]


def _after_births(trace: Trace, keys: list[Key]) -> list[dict[Key, int]]:
    """What is alive after each birth, in counts."""
    counts: dict[Key, int] = {}
    found: list[dict[Key, int]] = []
    for index, size_bytes in trace.events:
        key = keys[index]
        counts[key] = counts.get(key, 0) + (1 if size_bytes > 0 else -1)
        if size_bytes > 0:
            found.append({key: count for key, count in counts.items() if count})
    return found


def _in_step(low: list[_Birth], high: list[_Birth]) -> list[tuple[int, int]]:
    """Pairs of equal births, where `high` is `low` with runs (a layer's) put in. From the left: first layers meet first layers."""
    pairs: list[tuple[int, int]] = []
    j = 0
    for i in range(len(low)):
        while j < len(high) and low[i] != high[j]:
            j = _resumption(low, high, i, j)
        if j == len(high):
            raise NoProfile("The deeper trace is not the shallower one with a layer put in.")
        pairs.append((i, j))
        j += 1
    return pairs


def _resumption(low: list[_Birth], high: list[_Birth], i: int, j: int) -> int:
    """The place in `high` after `j` from which it goes on for longest as `low` does from `i`."""
    best, longest = len(high), 0
    for start in range(j + 1, len(high)):
        if high[start] != low[i]:
            continue
        length = _common_length(low, high, i, start)
        if length > longest:
            best, longest = start, length
        if longest >= AGREEING_BIRTHS:
            break
    return best


def _common_length(low: list[_Birth], high: list[_Birth], i: int, j: int) -> int:
    length = 0
    while length < AGREEING_BIRTHS and i + length < len(low) and j + length < len(high) and low[i + length] == high[j + length]:
        length += 1
    return length


def _frontier(entries: list[_Entry]) -> list[_Entry]:
    """The entries that no other dominates, in counts of every expression and in what a period and a micro-step add."""
    expressions = 1 + max((expression for entry in entries for side in entry for _, expression in side), default=0)
    unique: dict[tuple[int, ...], _Entry] = {}
    for entry in entries:
        unique.setdefault(_summed(entry, expressions), entry)
    frontier: list[tuple[int, ...]] = []
    for counts in sorted(unique, key=lambda each: (-sum(map(abs, each)), each)):
        if not any(_dominates(other, counts) for other in frontier):
            frontier = [other for other in frontier if not _dominates(counts, other)] + [counts]
    return [unique[counts] for counts in frontier]


def _summed(entry: _Entry, expressions: int) -> tuple[int, ...]:
    """An entry's counts of every expression, the components taken together."""
    totals = [0] * (len(entry) * expressions)
    for index, side in enumerate(entry):
        for (_, expression), count in side.items():
            totals[index * expressions + expression] += count
    return tuple(totals)


def _dominates(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(map(ge, one, other))


def _moment(phase: Phase, entry: _Entry) -> Moment:
    keys = {key for side in entry for key, count in side.items() if count}
    counts, further, batches = entry
    return Moment(phase=phase, alive=tuple((*key, counts.get(key, 0), further.get(key, 0), batches.get(key, 0)) for key in sorted(keys)))
