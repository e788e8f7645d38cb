"""What published runs carry of a probability."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.candidate import Candidate
from planner.confidence import (
    KINDS,
    Kind,
    comparisons,
    earned_probability,
    interval_bytes,
    kind_of,
    most_earned,
    worst_miss,
)
from planner.estimate import estimate
from planner.gpus.parse import parse_cluster
from planner.models.catalogue import load_model
from planner.quantities import PhaseMemory
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
