"""What a vLLM engine gets of adapters on a 4-bit base: PEFT merges them into it, and TRL sends its codes alone."""

import json
import warnings
from typing import Any

import pytest

from planner.commands.main import run

torch = pytest.importorskip("torch")
bitsandbytes = pytest.importorskip("bitsandbytes")
WIDTH, WEIGHTS = 512, 0.02  # of a square projection, and the deviation of its weights, as of a Llama's
UPDATE = 0.005  # of that deviation: an update as of the first hundred steps


def quantized_projection() -> tuple[Any, Any]:
    """A projection of 4-bit weights with adapters whose update is `UPDATE`, and the update."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    weight = bitsandbytes.nn.Params4bit(torch.randn(WIDTH, WIDTH) * WEIGHTS, requires_grad=False, quant_type="nf4")
    model = torch.nn.Sequential(bitsandbytes.nn.Linear4bit(WIDTH, WIDTH, bias=False, quant_type="nf4"))
    model[0].weight = weight
    model.to("cpu")  # quantizes
    model.is_loaded_in_4bit = True
    model = get_peft_model(model, LoraConfig(r=16, target_modules=["0"]))
    layer = model.base_model.model[0]
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_()
        layer.lora_B["default"].weight *= UPDATE * WEIGHTS / layer.get_delta_weight("default").std()
    return model, layer


def test_merged_codes_have_no_update_and_merging_moves_the_base() -> None:
    """TRL's `_iter_named_params` yields `param.data`; the scales of vLLM are those of its first load."""
    model, layer = quantized_projection()
    codes, scales = layer.base_layer.weight.data.clone(), layer.base_layer.weight.quant_state.absmax.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Merge lora module to 4-bit linear may get different generations"
        model.merge_adapter()
        sent = layer.base_layer.weight.data.clone()
        model.unmerge_adapter()
    assert torch.equal(sent, codes)
    assert not torch.equal(layer.base_layer.weight.quant_state.absmax, scales)


@pytest.mark.parametrize(("tuning", "said"), [("qlora", True), ("lora", False)])
def test_a_plan_says_that_the_engine_keeps_the_base(
    tuning: str, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """QLoRA with a colocated engine was planned for Qwen3-8B on an RTX 5090 without a word about it."""
    report = planned(["--tuning", tuning, "--set", "use_vllm=true"], capsys)
    assert report["best"]["settings"]["use_vllm"]
    assert ("engine_keeps_base" in codes_of(report)) is said


def test_no_search_proposes_an_engine_that_keeps_the_base(capsys: pytest.CaptureFixture[str]) -> None:
    """It was the first choice for consumer cards, as 1.5 times as fast as LoRA."""
    report = planned(["--tuning", "qlora"], capsys)
    assert not report["best"]["settings"]["use_vllm"] and "engine_would_keep_base" in codes_of(report)
    with_engine = planned(["--set", "use_vllm=true"], capsys)
    assert not with_engine["best"]["settings"].get("load_in_4bit")


def planned(options: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    run(["--model", "Qwen3-1.7B", "--gpus", "1xRTX-5090", "--method", "grpo", *options, "--json", "--quiet"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def codes_of(report: dict[str, Any]) -> list[str]:
    return [note["code"] for note in report["warnings_data"]]
