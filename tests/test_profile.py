"""A profile made of small traces gives the peak of sizes and depths that were never traced, to the byte."""

from dataclasses import replace

import pytest

from planner.trace.fit import Sample, fit_profile
from planner.trace.profile import NoProfile, Profile, profile_from_json, profile_to_json
from planner.trace.timeline import STAYS, Allocation, Trace

BLOCK_BYTES = 512
SIZES = ((7, 203), (3, 325), (5, 141))


def step(rows: int, tokens: int, layers: int, odd: int = 0) -> Trace:
    """A toy step: a weight and a saved activation a layer, a mask, and a gradient a layer while the activations go."""
    events: list[tuple[int, int]] = []
    births: list[tuple[int, str, str]] = []

    def born(size_bytes: int, phase: str, component: str) -> int:
        births.append((size_bytes, phase, component))
        events.append((len(births) - 1, 1))
        return len(births) - 1

    for _ in range(layers):
        born(4096, "load", "weights")
    born(rows * tokens * tokens + odd * tokens**3, "forward", "transients")
    saved = [born(2 * 64 * rows * tokens, "forward", "activations") for _ in range(layers)]
    logits = born(4 * 100 * rows * (tokens - 1), "loss", "loss")
    events.append((logits, -1))
    for activation in reversed(saved):
        moment = born(4 * 64 * rows * tokens, "backward", "transients")
        born(8192, "backward", "gradients")
        events += [(moment, -1), (activation, -1)]
    born(4 * layers, "optimizer_step", "transients")
    times: dict[int, list[int]] = {index: [0, STAYS] for index in range(len(births))}
    for time, (index, sign) in enumerate(events):
        times[index][0 if sign > 0 else 1] = time
    return Trace(
        allocations=tuple(
            Allocation(size_bytes=size, born=times[index][0], died=times[index][1], phase=phase, component=component, operator=component, module="")  # type: ignore[arg-type]
            for index, (size, phase, component) in enumerate(births)
        ),
        phase_starts=((0, "load"),),
    )


def sample(rows: int, tokens: int, layers: int, odd: int = 0) -> Sample:
    return Sample(values=(("rows", rows), ("tokens", tokens)), layers=layers, trace=step(rows, tokens, layers, odd))


def toy(odd: int = 0) -> Profile:
    deeper = (sample(7, 203, 4, odd), sample(7, 203, 5, odd))
    return fit_profile(tuple(sample(*size, 3, odd) for size in SIZES), deeper, (sample(4, 250, 7, odd),), BLOCK_BYTES)


def rounded(trace: Trace) -> Trace:
    blocks = tuple(replace(allocation, size_bytes=-(-allocation.size_bytes // BLOCK_BYTES) * BLOCK_BYTES) for allocation in trace.allocations)
    return replace(trace, allocations=blocks)


@pytest.mark.parametrize(("rows", "tokens", "layers"), [(2, 77, 3), (16, 300, 30), (3, 1001, 80), (64, 9, 12)])
def test_a_profile_peaks_where_a_trace_of_any_size_and_depth_does(rows: int, tokens: int, layers: int) -> None:
    trace = rounded(step(rows, tokens, layers))
    values = {"rows": rows, "tokens": tokens}
    assert toy().peak_bytes(values, layers) == trace.peak_bytes
    assert toy().phases(values, layers) == trace.phases


def test_moments_that_never_have_the_most_are_dropped() -> None:
    assert len(toy().moments) < len(step(7, 203, 3).events) // 2


def test_a_size_that_is_no_sum_of_terms_makes_no_profile() -> None:
    with pytest.raises(NoProfile, match=r"^Sizes \(.*\) are no product of terms nor the sum of two\. They are of transients in no module, forward\.$"):
        toy(odd=1)


def test_another_order_at_another_size_makes_no_profile() -> None:
    shorter = Sample(values=(("rows", 3), ("tokens", 325)), layers=3, trace=step(3, 325, 2))
    with pytest.raises(NoProfile, match=r"^The order of allocations differs between sizes, first before .* in no module, forward\.$"):
        fit_profile((sample(7, 203, 3), shorter), (sample(7, 203, 4), sample(7, 203, 5)), (), BLOCK_BYTES)


def test_a_profile_survives_its_file() -> None:
    assert profile_from_json(profile_to_json(toy())) == toy()
