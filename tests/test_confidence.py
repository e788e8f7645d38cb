"""What published runs carry of a probability."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.candidate import Candidate
from planner.confidence import (
    KINDS,
    Kind,
    comparisons,
    earned_probability,
    fit_probability,
    fit_probability_of,
    interval_bytes,
    kind_of,
    most_earned,
    nvidia_smi_miss,
    quantile,
    reach,
    sigma_bytes,
    worst_miss,
)
from planner.estimate import estimate
from planner.gpus.parse import parse_cluster
from planner.models.catalogue import load_model
from planner.quantities import GpuMemory, PhaseMemory
from planner.units import GIB


@pytest.mark.parametrize("kind", KINDS)
def test_no_claim_exceeds_the_runs(kind: Kind) -> None:
    runs = len(comparisons()[kind])
    assert most_earned(kind) == runs / (runs + 1)
    assert worst_miss(kind) > 0


@given(kind=st.sampled_from(KINDS), score=st.floats(-5, 10), more=st.floats(0, 5))
def test_more_room_never_earns_less(kind: Kind, score: float, more: float) -> None:
    assert earned_probability(kind, score) <= earned_probability(kind, score + more) <= most_earned(kind)


def test_a_job_far_below_the_card_is_no_surer_than_the_runs_allow() -> None:
    small = Candidate(model=load_model("Qwen2.5-0.5B"), method="sft", tuning="lora", dtype="bfloat16")
    assert (
        estimate(small, parse_cluster("1xH100", None)).fit_probability == earned_probability("whole", math.inf) < 0.95
    )


def test_gathered_layers_are_a_kind_of_their_own() -> None:
    job = Candidate(model=load_model("Qwen2.5-7B"), method="sft", sharding="zero3", num_processes=8)
    assert kind_of(job) == "gathered"
    assert kind_of(Candidate(model=job.model, method="sft", sharding="zero2", num_processes=8)) == "whole"


def test_a_lighter_phase_that_is_less_certain_can_set_the_upper_end() -> None:
    rollout = PhaseMemory(name="rollout", components={"engine": 75 * GIB})
    backward = PhaseMemory(name="backward", components={"activations": 70 * GIB})
    alone = interval_bytes([backward], 2.33)
    assert interval_bytes([rollout, backward], 2.33) == (interval_bytes([rollout], 2.33)[0], alone[1])
    assert alone[1] > 75 * GIB


def phase(**components: int) -> PhaseMemory:
    return PhaseMemory(name="backward", components=components)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("components", "sigma"),
    [
        # errors of a pass are one error: 5 % of all of it
        ({"activations": 40 * GIB, "loss": 20 * GIB, "transients": 20 * GIB}, 4 * GIB),
        ({"weights": 40 * GIB, "kv_cache": 30 * GIB}, 0.3 * GIB),
        # independent of each other: 3 and 4 are 5
        ({"activations": 60 * GIB, "runtime": 20 * GIB}, 5 * GIB),
        ({"communication": 40 * GIB, "fragmentation": 3 * GIB}, 5 * GIB),
        ({"weights": 40 * GIB}, 2**20),
    ],
)
def test_independent_errors_add_as_squares(components: dict[str, int], sigma: float) -> None:
    assert sigma_bytes(phase(**components)) == pytest.approx(sigma)


def test_an_interval_reaches_to_both_sides() -> None:
    assert interval_bytes([phase(activations=20 * GIB)], 2.0) == (18 * GIB, 22 * GIB)
    assert interval_bytes([phase(fragmentation=GIB)], 2.0) == (0, 3 * GIB)


def test_a_normal_distribution_has_84_percent_below_one_sigma() -> None:
    assert quantile(0.01) == pytest.approx(2.3263, abs=1e-4)
    assert fit_probability(phase(activations=20 * GIB), 21 * GIB) == pytest.approx(0.8413, abs=1e-4)
    assert fit_probability(phase(activations=20 * GIB), 20 * GIB) == 0.5
    assert fit_probability(phase(activations=20 * GIB), 18 * GIB) == pytest.approx(0.0228, abs=1e-4)


# Published runs of one kind: their scores and misses.
SCORES = (-1.0, 0.5, 1.0, 4.0)
MISSES = tuple(each / 100 for each in range(-5, 15))  # twenty


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put four runs with `SCORES` in place of the published ones of each kind, and `MISSES` of nvidia-smi's figure."""
    path = tmp_path / "comparisons.jsonl"
    rows: list[dict[str, Any]] = [
        {"id": f"{kind} {score}", "source": "", "kind": kind, "figure": "need", "score": score, "miss": score / 10}
        for kind in KINDS
        for score in SCORES
    ] + [
        {"id": f"{kind} {miss}", "source": "", "kind": kind, "figure": "nvidia_smi", "score": 0.0, "miss": miss}
        for kind in KINDS
        for miss in (MISSES if kind == "whole" else (-0.02, -0.01))
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    monkeypatch.setattr("planner.confidence.COMPARISONS", path)
    caches = (comparisons, nvidia_smi_miss, earned_probability, reach)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("runs")
def test_a_probability_is_the_share_of_the_runs_below() -> None:
    """Of four runs three needed at most one sigma more than computed: 3 / (4 + 1)."""
    assert earned_probability("whole", 1.0) == 3 / 5
    assert earned_probability("whole", 0.9) == 2 / 5
    assert (most_earned("whole"), worst_miss("whole")) == (4 / 5, 0.4)


@pytest.mark.usefixtures("runs")
def test_an_interval_reaches_as_far_as_all_runs_but_the_worst() -> None:
    assert reach("whole", 0.01) == quantile(0.01)  # 2.33 is beyond 1.0, the third of four
    assert reach("whole", 0.45) == 1.0  # ceil(0.55 x 5) is the third, beyond 0.13
    assert reach("whole", 0.75) == 0.5  # ceil(0.25 x 5) is the second


@pytest.mark.usefixtures("runs")
def test_a_fit_is_no_surer_than_the_runs() -> None:
    """4 GiB below the card are one sigma: the interval reaches 2.33 sigma, 9.3 GiB, above the peak."""
    high = 70 * GIB + round(quantile(0.01) * 4 * GIB)
    gpu = GpuMemory(
        role="train", count=1, phases=(phase(activations=70 * GIB),), capacity_bytes=74 * GIB, details={},
        interval_bytes=(60 * GIB, high),
    )  # fmt: skip
    assert fit_probability_of(gpu, 0.01, "whole") == pytest.approx(3 / 5)
    nearer = GpuMemory(
        role="train", count=1, phases=(phase(activations=70 * GIB),), capacity_bytes=67 * GIB, details={},
        interval_bytes=(60 * GIB, high),
    )  # fmt: skip
    assert fit_probability_of(nearer, 0.01, "whole") == pytest.approx(1 / 5)
    far = GpuMemory(
        role="train", count=1, phases=(phase(activations=70 * GIB),), capacity_bytes=64 * GIB, details={},
        interval_bytes=(60 * GIB, high),
    )  # fmt: skip
    assert fit_probability_of(far, 0.01, "whole") == 0.0


@pytest.mark.usefixtures("runs")
def test_nine_tenths_of_the_runs_show_less_in_nvidia_smi() -> None:
    """Of twenty misses from -5 to 14 % the ceil(0.9 x 21) = 19th is 13 %; of two below zero none is left."""
    assert nvidia_smi_miss("whole") == 0.13
    assert nvidia_smi_miss("gathered") == 0.0


@pytest.mark.parametrize(
    ("sharding", "processes", "kind"),
    [("zero3", 2, "gathered"), ("fsdp2", 2, "gathered"), ("zero3", 1, "whole"), ("zero1", 2, "whole")],
)
def test_only_several_gpus_gather(sharding: Any, processes: int, kind: Kind) -> None:
    candidate = Candidate(model=load_model("Qwen2.5-0.5B"), method="sft", sharding=sharding, num_processes=processes)
    assert kind_of(candidate) == kind
