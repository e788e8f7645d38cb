"""A measurement goes to another process and back unchanged."""

import json

import pytest
from msgspec.structs import fields, replace

from planner.candidate import Candidate
from planner.errors import InputError
from planner.measurements.documents import candidate_of_report, candidate_report, measurement_line, measurement_of
from planner.measurements.measurement import Measurement, PhasePeak, RankMemory, Shortage
from planner.models.catalogue import load_model
from planner.models.shape import ModelShape

MODEL = load_model("Qwen2.5-0.5B")
MEASUREMENT = Measurement(
    candidate=Candidate(model=MODEL, method="sft", lora_target_modules=("q_proj", "v_proj")),
    device="cuda",
    outcome="out_of_memory",
    ranks=(
        RankMemory(
            rank=0,
            phases=(PhasePeak(name="backward", allocated_bytes=5, reserved_bytes=7, driver_bytes=9, seconds=0.5),),
            state_bytes={"weights": 4},
            capacity_bytes=10,
            allocator={"num_alloc_retries": 1},
        ),
    ),
    shortage=Shortage(rank=0, phase="backward", tried_bytes=4, free_bytes=1, allocated_bytes=5, reserved_bytes=7),
    step_seconds=0.0,
    tokens_per_second=0.0,
    wall_seconds=3.0,
    message="CUDA out of memory.",
    log="",
    versions={"trl": "1.16"},
)


def test_a_measurement_is_read_back_as_it_was() -> None:
    read = measurement_of(json.loads(measurement_line(MEASUREMENT)))
    assert replace(read, candidate=replace(read.candidate, model=MODEL)) == MEASUREMENT


@pytest.mark.parametrize(
    "name", ["Qwen2.5-7B", "gemma-3-4b-it", "Qwen2.5-7B-Instruct-GPTQ-Int4", "gpt-oss-20b", "Mixtral-8x7B-v0.1"]
)
def test_a_model_goes_with_its_candidate(name: str) -> None:
    model = load_model(name)
    report = json.loads(json.dumps(candidate_report(Candidate(model=model, method="grpo", reward_model=model))))
    read = candidate_of_report(report).model
    assert [field.name for field in fields(ModelShape) if getattr(read, field.name) != getattr(model, field.name)] in (
        [],
        ["notes"],
    )


def test_the_peak_is_the_most_inclusive_figure_there_is() -> None:
    assert MEASUREMENT.peak_bytes == 9
    assert MEASUREMENT.ranks[0].peak_phase == "backward"


@pytest.mark.parametrize("text", ['{"schema": 2}', "{}", '{"schema": 1}', '{"schema": 1, "ranks": 3}'])
def test_something_else_is_no_measurement(text: str) -> None:
    with pytest.raises(InputError, match="measurement"):
        measurement_of(json.loads(text))
