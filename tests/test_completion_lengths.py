"""Lengths of sampled completions: what the time of a step makes of them, and that memory keeps the longest."""

import heapq
import json
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import pytest

from planner import plan
from planner.candidate import Candidate
from planner.commands.main import run
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.models.catalogue import load_model
from planner.report.sentences import sentence
from planner.rows.lengths import RowLengths, counted_lengths, lengths_in_words
from planner.throughput.generation import decoding_rows
from planner.throughput.rows import completions, mean_micro_batch

VARIED = lengths_in_words("p50=700,p95=3000,max=4096")
NODE = parse_cluster("4xH100")
WAYS: tuple[dict[str, Any], ...] = (
    {"vllm": "off"},
    {"vllm": "colocate", "vllm_gpu_memory_utilization": 0.4},
    {"vllm": "server", "num_processes": 3, "vllm_gpu_memory_utilization": 0.9},
)


def candidate(lengths: RowLengths | None, **settings: Any) -> Candidate:
    """A GRPO job of 128 rows a rollout on each of four GPUs."""
    return Candidate(
        **{
            "model": load_model("Qwen2.5-1.5B"), "method": "grpo", "sharding": "ddp", "num_processes": 4,
            "per_device_train_batch_size": 8, "gradient_accumulation_steps": 16, "steps_per_generation": 16,
            "prompt_length": 256, "max_completion_length": 4096, "completion_lengths": lengths, **settings,
        }
    )  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=[way["vllm"] for way in WAYS])
def test_completions_of_one_length_take_the_time_of_full_ones(way: dict[str, Any]) -> None:
    full, equal = (estimate(candidate(lengths, **way), NODE) for lengths in (None, counted_lengths((4096,) * 100)))
    assert equal.throughput.seconds.pop("waiting") == 0
    assert full.throughput.seconds.pop("waiting", 0) == 0
    assert equal.throughput.seconds == pytest.approx(full.throughput.seconds, rel=1e-12)
    assert equal.throughput.tokens_per_second == pytest.approx(full.throughput.tokens_per_second, rel=1e-12)


@pytest.mark.parametrize("way", WAYS, ids=[way["vllm"] for way in WAYS])
def test_shorter_completions_take_less_time_and_the_same_memory(way: dict[str, Any]) -> None:
    full, varied = (estimate(candidate(lengths, **way), NODE) for lengths in (None, VARIED))
    assert [gpu.phases for gpu in varied.gpus] == [gpu.phases for gpu in full.gpus]
    assert [gpu.interval_bytes for gpu in varied.gpus] == [gpu.interval_bytes for gpu in full.gpus]
    assert varied.gpus[0].reserved_bytes > full.gpus[0].reserved_bytes  # blocks of other lengths stay in the cache
    assert varied.throughput.step_seconds < full.throughput.step_seconds


def scheduled(lengths: list[int], slots: int) -> tuple[int, float]:
    """(Decode steps until the last completion ends, rows that decode in the mean) of an engine with so many slots."""
    running: list[int] = []
    last = 0
    for tokens in lengths:
        start = heapq.heappop(running) if len(running) == slots else 0
        heapq.heappush(running, start + tokens)
        last = max(last, start + tokens)
    return last, sum(lengths) / last


@pytest.mark.parametrize(
    ("rows", "slots"), [(64, 64), (128, 64), (512, 64), (512, 256), (64, 256), (1000, 16), (96, 64)]
)
def test_an_engine_refills_its_slots_as_a_simulated_one(rows: int, slots: int) -> None:
    random = Random(1)
    runs = [scheduled(random.choices(VARIED.tokens, k=rows), min(slots, rows)) for _ in range(100)]
    steps, busy = mean(steps for steps, _ in runs), mean(busy for _, busy in runs)
    job = candidate(VARIED)
    ours = decoding_rows(job, rows, min(slots, rows), 1)
    assert ours == pytest.approx(busy, rel=0.05)
    assert rows * completions(job).mean / ours == pytest.approx(steps, rel=0.05)


def test_a_micro_batch_is_padded_to_the_longest_completion_of_its_rollout() -> None:
    job = candidate(VARIED)
    batch = mean_micro_batch(job)
    assert batch is not None
    random = Random(2)
    drawn = [random.choices(VARIED.tokens, k=job.generation_rows) for _ in range(400)]
    assert batch.computed == pytest.approx(8 * (256 + mean(map(max, drawn))), rel=0.02)
    assert batch.tokens == pytest.approx(8 * (256 + mean(map(mean, drawn))), rel=0.02)
    four = [max(map(max, drawn[start : start + 4])) for start in range(0, 400, 4)]
    assert batch.slowest == pytest.approx(8 * (256 + mean(four)), rel=0.02)


def test_the_longest_completion_is_the_limit_unless_one_is_given() -> None:
    job = {"method": "grpo", "completion_lengths": "p50=700,p95=3500,max=6000"}
    own, cut = plan("Qwen2.5-7B", "8xH100", **job), plan("Qwen2.5-7B", "8xH100", **job, max_completion_length=2048)
    assert own.best.candidate.max_completion_length == 6000
    assert "completions_cut" not in [note.code for note in own.warnings]
    assert cut.best.candidate.max_completion_length == 2048
    said = [sentence(note) for note in cut.warnings if note.code == "completions_cut"]
    assert said == ["max_completion_length 2,048 cuts 14 % of the completions (14 % of the tokens)"]


def test_a_plan_without_them_says_so_once() -> None:
    answer = plan("Qwen2.5-1.5B", "1xL4", method="grpo")
    assert [note.code for note in answer.warnings].count("completions_taken_full") == 1


def test_exported_files_have_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "Qwen2.5-1.5B", "--gpus", "1xL4", "--method", "rloo", "--completion-lengths", "p50=90,max=600"]
    assert run([*flags, "--export", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert run(["estimate", "--config", str(tmp_path / "run" / "train.yaml"), "--gpus", "1xL4", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["completion_lengths"], settings["max_completion_length"]) == ("p50=90,max=600", 600)


def test_methods_that_sample_nothing_have_none(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "Qwen2.5-1.5B", "--gpus", "1xL4", "--method", "sft", "--completion-lengths", "p50=90,max=600"]
    assert run(flags) == 2
    assert "completion_lengths" in capsys.readouterr().err
