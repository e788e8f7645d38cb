"""GPUs of a teacher's vLLM server: in the plan, its report and its files."""

from typing import Any

import pytest

from planner import plan
from planner.candidate import Candidate
from planner.errors import InputError, NothingFits
from planner.gpus.catalogue import load_gpu
from planner.launch.files import launch_files
from planner.memory.engine.budget import engine_memory
from planner.memory.engine.settings import teacher_settings
from planner.methods import MethodName
from planner.models.catalogue import load_model
from planner.report.words import tightest
from planner.search.search import trainer_peak_bytes
from planner.units import GIB

METHODS_WITH_TEACHERS: tuple[MethodName, ...] = ("server-distillation", "async-distillation")


def planned(gpus: str, method: MethodName, **settings: Any) -> Any:
    return plan("Qwen2.5-1.5B", gpus, method=method, tuning="lora", **settings)


@pytest.mark.parametrize("method", METHODS_WITH_TEACHERS)
def test_a_teacher_s_server_has_a_card_of_its_own(method: MethodName) -> None:
    answer = planned("4xA100-80G", method, teacher_server_model="Qwen2.5-7B")
    roles = {gpu.role: gpu for gpu in answer.best.gpus}
    assert roles["teacher"].count == 1
    assert sum(gpu.count for gpu in answer.best.gpus) == 4
    assert roles["teacher"].details["engine_budget"]["weights"] / GIB == pytest.approx(14.2, rel=0.01)
    assert roles["teacher"].peak_bytes == pytest.approx(0.9 * 79.25 * GIB, rel=0.01)


def test_a_teacher_larger_than_a_card_has_several() -> None:
    answer = planned("8xA100-80G", "async-distillation", teacher_server_model="Qwen2.5-72B")
    assert answer.best.candidate.teacher_server_gpus == 4
    assert answer.best.candidate.num_processes + answer.best.candidate.server_gpus <= 4


def test_on_one_card_the_teacher_is_served_elsewhere() -> None:
    answer = planned("1xA100-80G", "server-distillation")
    assert answer.best.candidate.teacher_server_gpus == 0
    assert "teacher_on_server" in [note.code for note in answer.warnings]
    files = launch_files(answer.best.candidate)
    assert "teacher_model_server_url: http://localhost:8000  # FILL IN" in files["train.yaml"]


@pytest.mark.parametrize(
    ("method", "command"),
    [
        ("server-distillation", "trl vllm-serve --model Qwen/Qwen2.5-7B --port=8000 --tensor_parallel_size=1"),
        ("async-distillation", "vllm serve Qwen/Qwen2.5-7B --port=8001 --tensor-parallel-size=1"),
    ],
)
def test_the_files_start_the_teacher_s_server(method: MethodName, command: str) -> None:
    best = planned("4xA100-80G", method, teacher_server_model="Qwen2.5-7B").best.candidate
    files = launch_files(best)
    assert f"CUDA_VISIBLE_DEVICES=3 {command}" in files["launch.sh"]
    assert "FILL IN" not in next(line for line in files["train.yaml"].splitlines() if "http://localhost" in line)
    assert "teacher_server_model=Qwen/Qwen2.5-7B teacher_server_gpus=1" in files["train.yaml"]


@pytest.mark.parametrize(
    ("gpus", "settings", "expected"),
    [
        # five cards would hold it, and vLLM does not divide its eight heads of keys among five
        ("8xRTX-4090", {"teacher_server_model": "Qwen2.5-32B"}, 4),
        ("2xH100", {"teacher_server_model": "Qwen2.5-7B"}, 0),  # one trains, and one samples
        ("4xH100", {"teacher_server_model": "Qwen2.5-7B", "teacher_server_gpus": 2}, 2),
    ],
)
def test_a_teacher_has_gpus_that_divide_it_and_leaves_those_of_the_others(
    gpus: str, settings: dict[str, Any], expected: int
) -> None:
    assert planned(gpus, "async-distillation", **settings).best.candidate.teacher_server_gpus == expected


@pytest.mark.parametrize(("gpus", "left"), [(4, "3, or 0"), (1, "0: it is served elsewhere")])
def test_a_teacher_cannot_take_all_gpus(gpus: int, left: str) -> None:
    with pytest.raises(InputError, match=rf"leaves too few .* needs 1\. Use teacher_server_gpus={left}"):
        planned(f"{gpus}xA100-80G", "server-distillation", teacher_server_gpus=gpus)


@pytest.mark.parametrize("method", METHODS_WITH_TEACHERS)
def test_the_peak_that_is_shown_is_that_of_the_training_not_the_share_of_the_teacher(method: MethodName) -> None:
    best = planned("4xL4", method, teacher_server_model="Qwen2.5-7B").best
    trained = [gpu for gpu in best.gpus if gpu.role in ("train", "train+vllm")]
    assert tightest(best) in trained
    assert trainer_peak_bytes(best) == trained[0].peak_bytes


@pytest.mark.parametrize(
    ("share", "teacher", "proposed"),
    [
        (0.6, "Qwen2.5-7B", "Try teacher_server_gpu_memory_utilization 0.74"),
        (0.9, "Qwen2.5-14B", "or teacher_server_gpus"),
    ],
)
def test_a_teacher_that_does_not_fit_is_told_its_own_settings(share: float, teacher: str, proposed: str) -> None:
    with pytest.raises(NothingFits, match=proposed):
        planned(
            "2xL4",
            "server-distillation",
            teacher_server_model=teacher,
            teacher_server_gpu_memory_utilization=share,
            use_vllm=False,
        )


@pytest.mark.parametrize("name", ["T4", "L4", "A100-40G", "H100", "B200"])
@pytest.mark.parametrize("teacher", ["Qwen2.5-1.5B", "Llama-3.2-1B", "gemma-3-1b-it", "Qwen3-0.6B"])
def test_logits_of_a_prompt_s_chunk_fit_in_what_the_profile_run_left(name: str, teacher: str) -> None:
    """vLLM 0.31, v1/worker/gpu/sample/prompt_logprob.py: 16-bit logits of 1,024 tokens, beside the hidden states."""
    model, gpu = load_model(teacher), load_gpu(name)
    job = Candidate(model=model, method="server-distillation", teacher_server_model=model, teacher_server_gpus=1)
    settings = teacher_settings(job, model, gpu)
    chunk = 2 * 1024 * model.vocab_size + 2 * settings.max_num_batched_tokens * model.hidden_size
    assert engine_memory(model, gpu, settings).activation_peak_bytes >= chunk
