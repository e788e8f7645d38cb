"""Models without formulas on 4-bit bases and with Liger's kernels, planned from the layers that are shipped."""

import pytest

from planner.errors import InputError, PlanError
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.memory.layers.measured_layers import MeasuringRefused, complete_shipped
from planner.models.catalogue import load_model
from planner.models.shape import ModelShape
from planner.planning import Plan, plan

NOT_SHIPPED = "these settings do not ship"
MODELS = (
    "Qwen3.5-9B", "Qwen3.5-35B-A3B", "gemma-4-E4B", "gemma-4-31B", "Qwen3-VL-8B-Instruct",
    "Qwen3-Next-80B-A3B-Instruct", "Ministral-3-8B-Base-2512", "LFM2-1.2B", "granite-4.0-h-small",
)  # fmt: skip


def shipped(name: str) -> ModelShape:
    model = complete_shipped(load_model(name), lambda _: MeasuringRefused(reason=NOT_SHIPPED))
    assert model is not None
    return model


def answer_of(name: str, gpus: str, method: str = "sft", tuning: str = "qlora", **pins: object) -> Plan:
    job = Job(model=shipped(name), method=method, tuning=tuning, pinned=pins)  # type: ignore[arg-type]
    return plan(job, parse_cluster(gpus, None))


@pytest.mark.parametrize("name", MODELS)
def test_qlora_is_planned_without_measuring(name: str) -> None:
    answer = answer_of(name, "8xB300")  # whole on each GPU while it loads, its experts in 16 bits
    assert answer.verdict == "fits"
    assert answer.best.candidate.quantization == "nf4"


@pytest.mark.parametrize(("gpus", "method"), [("1xT4", "sft"), ("1xRTX-4090", "dpo"), ("2xA100-40G", "dpo")])
def test_qlora_is_planned_on_cards_with_and_without_bfloat16(gpus: str, method: str) -> None:
    assert answer_of("Qwen3.5-4B", gpus, method).verdict == "fits"


@pytest.mark.parametrize("tuning", ["full", "lora", "qlora"])
@pytest.mark.parametrize("name", ["Qwen3.5-4B", "gemma-4-E2B"])
def test_liger_saves_memory_in_layers_without_formulas(name: str, tuning: str) -> None:
    pins = {"per_device_train_batch_size": 4, "gradient_checkpointing": False, "sharding": "zero2", "num_processes": 8}
    plain, liger = (
        answer_of(name, "8xH200", tuning=tuning, use_liger_kernel=use, **pins).best.gpus[0].peak_bytes
        for use in (False, True)
    )
    assert liger < plain


def test_liger_is_refused_where_the_library_stops() -> None:
    message = r"liger-kernel 0\.8\.5 stops at Qwen/Qwen3-VL-8B-Instruct, as transformers 5\.23 has no Qwen3VLCausalLM"
    with pytest.raises(InputError, match=message):
        answer_of("Qwen3-VL-8B-Instruct", "1xH100", use_liger_kernel=True)


def test_a_sliding_window_of_the_measured_length_is_planned_without_padding() -> None:
    """gemma 4 has windows of 1,024 tokens: rows that long have a mask, and shorter ones have none."""
    answer = answer_of("gemma-4-31B", "1xH100", tuning="lora", per_device_train_batch_size=1)
    assert answer.verdict == "fits"


def test_no_text_of_the_fit_is_left_in_the_notes() -> None:
    answer = answer_of("Qwen3.5-9B", "8xH200", tuning="auto")
    assert not [note for note in answer.warnings if note.code == "class_not_planned"]


def test_flash_attention_is_not_chosen_where_heads_are_too_wide() -> None:
    assert answer_of("gemma-4-31B", "8xH100").best.candidate.attn_implementation == "sdpa"


def test_settings_that_are_not_measured_are_named_in_the_refusal() -> None:
    with pytest.raises(PlanError, match=NOT_SHIPPED):
        answer_of("Qwen3.5-4B", "1xH100", lora_r=24)


def test_rollouts_of_layers_with_other_states_are_refused_in_one_line() -> None:
    with pytest.raises(PlanError, match="keep no keys and values"):
        answer_of("DeepSeek-V4-Flash", "1xH200", "grpo", tuning="full")


@pytest.mark.parametrize("vllm", ["off", "colocate"])
@pytest.mark.parametrize("model", ["Qwen3.5-9B", "LFM2-1.2B"])
def test_rollouts_of_linear_attention_are_planned(model: str, vllm: str) -> None:
    assert answer_of(model, "1xH200", "grpo", tuning="lora", vllm=vllm).verdict == "fits"


def test_mamba_2_is_trained_with_newer_transformers_than_vllm_takes() -> None:
    assert answer_of("granite-4.0-h-micro", "1xH200", "grpo", tuning="lora").best.candidate.vllm == "off"
    with pytest.raises(PlanError, match=r"whose Mamba 2 layers take many times the memory.* Try use_vllm=false\."):
        answer_of("granite-4.0-h-micro", "1xH200", "grpo", tuning="lora", vllm="colocate")
