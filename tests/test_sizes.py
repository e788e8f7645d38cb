"""Sizes that a search tries: micro-batches of an effective batch, and lengths with their prompts."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.models.catalogue import load_model
from planner.rows.lengths import counted_lengths
from planner.search.knobs import SearchProblem
from planner.search.sizes import (
    LARGEST_BATCH,
    batch_sizes,
    length_limit,
    length_sizes,
    micro_batches,
    sizes_of,
    with_batch,
    with_length,
)

MODEL = load_model("Qwen2.5-0.5B")  # 32,768 positions
CLUSTER = parse_cluster("8xH100", None)
SFT = Candidate(model=MODEL, method="sft")
GRPO = Candidate(model=MODEL, method="grpo")
EIGHT = Candidate(model=MODEL, method="sft", sharding="fsdp2", num_processes=8)


def job(method: str = "sft", **settings: Any) -> Job:
    return Job(model=MODEL, method=method, **settings)  # type: ignore[arg-type]


def problem(method: str = "sft", **settings: Any) -> SearchProblem:
    return SearchProblem(job=job(method, **settings), cluster=CLUSTER, tuning_class="full")


@pytest.mark.parametrize(
    ("candidate", "settings", "expected"),
    [
        (SFT, {}, [(1, 8), (2, 4), (4, 2), (8, 1)]),  # TRL's default of 8 samples
        (SFT, {"effective_batch_size": 9}, [(1, 9), (3, 3), (9, 1)]),
        (EIGHT, {"effective_batch_size": 16}, [(1, 2), (2, 1)]),
        # two groups of four GPUs see 8 samples each
        (replace(EIGHT, cp_size=4), {"effective_batch_size": 16}, [(1, 8), (2, 4), (4, 2), (8, 1)]),
        (EIGHT, {"effective_batch_size": 12}, []),
        (SFT, {"pinned": {"per_device_train_batch_size": 4}}, [(4, 1)]),
        (SFT, {"pinned": {"gradient_accumulation_steps": 3}}, [(8, 3)]),
        (SFT, {"effective_batch_size": 8, "pinned": {"per_device_train_batch_size": 4}}, [(4, 2)]),
        (SFT, {"effective_batch_size": 8, "pinned": {"per_device_train_batch_size": 3}}, []),
        (SFT, {"effective_batch_size": 8, "pinned": {"gradient_accumulation_steps": 4}}, [(2, 4)]),
        (SFT, {"effective_batch_size": 8, "pinned": {"gradient_accumulation_steps": 3}}, []),
        (
            SFT,
            {"pinned": {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 7}},
            [(5, 7)],
        ),
    ],
)
def test_micro_batches_times_accumulation_are_a_process_s_samples(
    candidate: Candidate, settings: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    assert micro_batches(candidate, job(**settings)) == expected


@settings(deadline=None)
@given(samples=st.integers(1, 512), processes=st.sampled_from([1, 2, 4, 8]), shared=st.sampled_from([1, 2, 4, 8]))
def test_every_size_keeps_the_samples_of_a_step(samples: int, processes: int, shared: int) -> None:
    shared = min(shared, processes)
    candidate = replace(SFT, sharding="fsdp2", num_processes=processes, cp_size=shared)
    sizes = batch_sizes(candidate, job(effective_batch_size=samples))
    groups = processes // shared  # of GPUs with rows of their own
    assert bool(len(sizes)) == (samples % groups == 0)
    for size in (sizes[index] for index in range(len(sizes))):
        assert size.per_device_train_batch_size * size.gradient_accumulation_steps * groups == samples
        assert size.effective_batch_size == samples


def test_a_search_for_the_largest_batch_tries_all() -> None:
    sizes = batch_sizes(replace(SFT, gradient_accumulation_steps=4), job(optimize="batch-size"))
    assert len(sizes) == LARGEST_BATCH == 1024
    assert (sizes[0].per_device_train_batch_size, sizes[0].gradient_accumulation_steps) == (1, 4)
    assert sizes[1023].per_device_train_batch_size == 1024


@pytest.mark.parametrize("settings", [{"effective_batch_size": 8}, {"pinned": {"per_device_train_batch_size": 2}}])
def test_a_given_batch_is_not_made_larger(settings: dict[str, Any]) -> None:
    sizes = batch_sizes(SFT, job(optimize="batch-size", **settings))
    assert sizes[len(sizes) - 1].per_device_train_batch_size <= 8


def test_kto_has_two_samples_at_least() -> None:
    assert batch_sizes(Candidate(model=MODEL, method="kto"), job("kto"))[0].per_device_train_batch_size == 2


def test_a_generation_batch_holds_whole_groups() -> None:
    """8 completions of one process, in groups of 8; two GPUs hold 4 each of groups of 8, in steps_per_generation 1."""
    assert [size[0] for size in batch_sizes(GRPO, job("grpo")).values] == [1, 2, 4, 8]
    halves = job("grpo", pinned={"steps_per_generation": 1})
    assert [size[0] for size in batch_sizes(replace(GRPO, num_processes=2), halves).values] == [4, 8]
    assert not batch_sizes(replace(GRPO, num_generations=3), job("grpo")).values


def test_generations_serve_one_optimizer_step_unless_pinned() -> None:
    assert with_batch(GRPO, 2, 4, {}).steps_per_generation == 4
    assert with_batch(GRPO, 2, 4, {"steps_per_generation": 1}).steps_per_generation == 1
    sized = with_batch(GRPO, 2, 4, {})
    assert (sized.per_device_train_batch_size, sized.gradient_accumulation_steps) == (2, 4)


@pytest.mark.parametrize(
    ("method", "limit"),
    [("sft", 32_768), ("gkd", 32_768), ("online-dpo", 32_768), ("grpo", 32_768 - 512), ("ppo", 32_768 - 512)],
)
def test_a_prompt_beside_the_limit_shortens_it(method: Any, limit: int) -> None:
    """Prompt and completion together have the model's positions; `max_length` counts both already."""
    assert length_limit(Candidate(model=MODEL, method=method, prompt_length=512)) == limit


def test_lengths_are_multiples_of_256_up_to_the_model_s() -> None:
    assert list(length_sizes(SFT, problem(optimize="max-length")).values) == list(range(256, 32_769, 256))
    longest = length_sizes(SFT, problem(optimize="max-length"))[127]
    assert (longest.max_length, longest.per_device_train_batch_size) == (32_768, 1)
    completions = length_sizes(replace(GRPO, prompt_length=600), problem("grpo", optimize="max-length")).values
    assert (completions[0], completions[-1]) == (256, 32_000)  # 32,768 - 600 = 32,168
    known = replace(SFT, lengths=counted_lengths((10, 700, 1000)))  # 1,024 cuts none of them
    assert list(length_sizes(known, problem(optimize="max-length")).values) == [256, 512, 768, 1024]
    short = replace(GRPO, prompt_length=40_000)
    assert list(length_sizes(short, problem("grpo", optimize="max-length")).values) == [256]


def test_a_pinned_length_stays() -> None:
    sizes = length_sizes(replace(SFT, max_length=500), problem(optimize="max-length", pinned={"max_length": 500}))
    assert len(sizes) == 1
    assert (sizes[0].max_length, sizes[0].per_device_train_batch_size) == (500, 1)


def test_lengths_are_tried_if_the_job_asks_for_the_longest() -> None:
    assert len(sizes_of(SFT, problem(optimize="max-length"))) == 128
    assert len(sizes_of(SFT, problem())) == 4


@pytest.mark.parametrize(("length", "prompt"), [(1024, 1024 - 128), (129, 1), (100, 1)])
def test_a_bounded_row_leaves_the_prompt_what_the_completion_does_not_take(length: int, prompt: int) -> None:
    candidate = Candidate(model=MODEL, method="gkd", teacher_model=MODEL, max_completion_length=128)
    longer = with_length(candidate, length, problem("gkd"))
    assert (longer.max_length, longer.prompt_length, longer.max_completion_length) == (length, prompt, 128)


def test_a_longer_completion_leaves_the_prompt_as_it_is() -> None:
    longer = with_length(replace(GRPO, prompt_length=300), 2048, problem("grpo"))
    assert (longer.max_completion_length, longer.prompt_length, longer.row_tokens) == (2048, 300, 2348)
