"""GPUs of a teacher's vLLM server: in the plan, its report and its files."""

from typing import Any

import pytest

from planner import plan
from planner.errors import InputError
from planner.launch.files import launch_files
from planner.methods import MethodName
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
