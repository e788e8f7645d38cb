"""The heavier of a batch with padding and a batch of rows of one length, on every card and attention kernel."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.estimation import estimate, training_estimate, worst_batch
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.measurements.measurement import Measurement, without_memory
from planner.models.catalogue import load_model
from planner.planning import plan
from planner.rows.lengths import RowLengths
from planner.units import GIB

SMALL = load_model("Qwen2.5-0.5B")  # 14 query heads share 2 key heads
T4 = parse_cluster("1xT4", None)
QLORA = Candidate(
    model=SMALL, method="sft", tuning="lora", quantization="nf4", dtype="float16", precision="fp16", max_length=2048,
    per_device_train_batch_size=2, gradient_checkpointing=False,
)  # fmt: skip
MODELS = (
    "Qwen2.5-0.5B",
    "Llama-3.2-1B",
    "gpt2",
    "gemma-2-2b",
    "Qwen3-0.6B",
    "gemma-3-1b-it",
    "DeepSeek-V2-Lite",
    "opt-350m",
)
CARDS = ("1xT4", "1xV100-32G", "1xRTX-3090", "1xH100")
WAYS: tuple[dict[str, Any], ...] = (
    {"tuning": "full", "dtype": "float32", "precision": "no"},
    {"tuning": "full", "dtype": "float32", "precision": "fp16", "gradient_checkpointing": False},
    {"tuning": "lora", "dtype": "float16", "precision": "fp16", "gradient_checkpointing": False},
    {"tuning": "lora", "dtype": "float32", "precision": "fp16"},
    {"tuning": "lora", "dtype": "float16", "precision": "fp16", "attn_implementation": "eager"},
    {"tuning": "lora", "dtype": "float16", "precision": "fp16", "torch_version": "2.14"},
)


def peak_bytes(candidate: Candidate, gpus: str) -> int:
    cluster = parse_cluster(gpus, None)
    return max(gpu.peak_bytes for gpu in estimate(candidate, cluster).gpus)


def drawn_lengths(*tokens: int) -> RowLengths:
    return RowLengths(tokens=tokens, rows=len(tokens), counted=True, words="")


class TestT4:
    def test_rows_cut_at_max_length_make_the_plan_of_6_7_gib_one_of_22(self) -> None:
        answer = estimate(QLORA, T4)
        assert answer.gpus[0].peak_bytes > 18 * GIB
        assert not answer.fits
        assert answer.gpus[0].phases == estimate(replace(QLORA, padded=False), T4).gpus[0].phases

    def test_pinned_padding_is_planned_as_said(self) -> None:
        padded = estimate(replace(QLORA, padded=True), T4)
        assert padded.fits
        assert padded.gpus[0].peak_bytes < 7 * GIB

    def test_the_plan_fits_with_full_and_with_padded_batches(self) -> None:
        best = plan(Job(model=SMALL, method="sft", tuning="qlora", pinned={"max_length": 2048}), T4).best
        assert best.candidate.padded == "either"
        assert estimate(replace(best.candidate, padded=True), T4).fits
        assert estimate(replace(best.candidate, padded=False), T4).fits

    def test_the_speed_is_that_of_padded_batches(self) -> None:
        either, padded = (estimate(each, T4) for each in (QLORA, replace(QLORA, padded=True)))
        assert either.throughput == padded.throughput

    def test_a_release_of_torch_with_a_kernel_leaves_the_padded_batch_the_heavier(self) -> None:
        assert worst_batch(replace(QLORA, torch_version="2.14"), T4).padded == "either"


class TestProbes:
    def test_a_probe_of_the_cards_runs_the_full_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The measurement is of the candidate that was asked for, so that it corrects that one's plan."""
        devices = pytest.importorskip("probes.runner.devices")
        from probes.emulated_gpu import build

        tasks: list[Any] = []

        def run(task: Any, *_: object) -> Measurement:
            tasks.append(task)
            return without_memory(task.candidate, task.device, "crashed", "")

        total = T4.gpu.total_bytes
        card = devices.Card(index=0, total_bytes=total, free_bytes=total, holders=())
        monkeypatch.setattr(devices, "run_probe", run)
        monkeypatch.setattr(devices, "visible_cards", lambda count: (card,) * count)
        monkeypatch.setattr(build, "built_libraries", lambda: None)
        for name in ("cuda", "emulated"):
            found = devices.device(name, T4, devices.DeviceOptions(logs=Path("logs")))(QLORA)
            assert tasks.pop().candidate == replace(QLORA, padded=False)
            assert found.candidate == QLORA


class TestLengths:
    def test_the_longest_rows_of_one_length_make_the_full_batch(self) -> None:
        candidate = replace(QLORA, lengths=drawn_lengths(2000, 1500, 1500, 300, 300, 300))
        assert worst_batch(candidate, T4) == replace(candidate, padded=False, max_length=1500)

    def test_rows_that_are_cut_have_one_length(self) -> None:
        candidate = replace(QLORA, lengths=drawn_lengths(5000, 4000, 1500, 300))
        assert worst_batch(candidate, T4) == replace(candidate, padded=False)

    def test_rows_of_different_lengths_make_no_full_batch(self) -> None:
        candidate = replace(QLORA, lengths=drawn_lengths(2000, 1500, 300))
        assert worst_batch(candidate, T4) is candidate


class TestEveryCard:
    @pytest.mark.parametrize("model", MODELS)
    @pytest.mark.parametrize("gpus", CARDS)
    def test_the_heavier_batch_is_planned(self, gpus: str, model: str) -> None:
        shape = load_model(model)
        for method, way in product(("sft", "dpo", "grpo"), WAYS):
            candidate = Candidate(
                model=shape, method=method, max_length=1024, per_device_train_batch_size=4, num_generations=2, **way
            )  # type: ignore[arg-type]
            training_estimate.cache_clear()
            either, padded, full = (
                peak_bytes(replace(candidate, padded=padded), gpus) for padded in ("either", True, False)
            )
            assert either == max(padded, full), (method, way)
