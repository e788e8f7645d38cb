"""Axolotl's `quantize_moe_experts`: its bytes as bitsandbytes has them, and estimates beside runs of Axolotl itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.ask import estimated, silent
from planner.commands.main import run
from planner.errors import InputError
from planner.gpus.parse import parse_cluster
from planner.jobs.dialects.axolotl import AXOLOTL
from planner.jobs.dialects.dialect import read_keys
from planner.measurements.validate import counted_bytes
from planner.memory.parameters.tensors import rounded_bytes
from planner.models.catalogue import load_model
from planner.quantizations import Quantization, tensor_sizes
from planner.requests.options import CandidateOptions
from planner.requests.read_options import read_options
from planner.training_stack import complete_models

ROWS = Path(__file__).parents[1] / "results" / "axolotl_experts.jsonl"
RUNS = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
CLOSE = 0.003  # of allocated bytes: remainders of blocks that the allocator does not split are left out
SPARSE: dict[str, Any] = {
    "base_model": "Qwen/Qwen3-30B-A3B", "adapter": "qlora", "load_in_4bit": True, "quantize_moe_experts": True,
    "lora_target_modules": ["q_proj", "v_proj"], "attn_implementation": "flash_attention_2", "micro_batch_size": 1,
    "gradient_checkpointing": True, "sequence_len": 2048,
}  # fmt: skip


def written(folder: Path, keys: dict[str, Any]) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(keys))
    return str(path)


@pytest.mark.parametrize("row", RUNS, ids=[row["job"] for row in RUNS])
def test_a_run_of_axolotl_allocates_what_is_estimated(row: dict[str, Any], tmp_path: Path) -> None:
    cut = load_model(row["model"]).config | {"num_hidden_layers": row["layers"]}
    (tmp_path / "config.json").write_text(json.dumps(cut))
    config = written(tmp_path, row["config"] | {"base_model": str(tmp_path)})
    options = CandidateOptions(config=config, gpus=f"1x{row['gpu']}", padded=False)
    found = estimated(read_options(options, complete_models(silent)))[0]
    gpu = parse_cluster(f"1x{row['gpu']}").gpu
    most = max(counted_bytes(phase, "allocated", found.candidate, gpu) for phase in found.gpus[0].phases)
    assert abs(most / row["emulated_bytes"] - 1) < CLOSE


@pytest.mark.parametrize(("quantization", "nested"), [("nf4-experts", False), ("nf4-double-experts", True)])
def test_four_bits_of_experts_take_what_bitsandbytes_keeps(quantization: Quantization, nested: bool) -> None:
    torch = pytest.importorskip("torch")
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    module = torch.nn.Module()
    module.gate_up_proj = torch.nn.Parameter(torch.randn(8, 96, 64), requires_grad=False)
    parametrize.replace_parameter_4bit(module, "gate_up_proj", compress_statistics=nested, quant_type="nf4")
    (kept,) = module.parametrizations["gate_up_proj"]
    state, packed = kept.quant_state, module.parametrizations["gate_up_proj"].original
    tensors = [packed, state.absmax, state.code]
    tensors += [state.offset, state.state2.absmax, state.state2.code] if nested else []
    sizes = tensor_sizes((8, 96, 64), quantization, 64)
    assert sum(map(rounded_bytes, sizes)) == sum(rounded_bytes(tensor.nbytes) for tensor in tensors)


def test_eight_bits_of_experts_have_a_scale_for_each_output_of_each_expert() -> None:
    """`int8_vectorwise_quant` of [8 x 96, 64]: axolotl 0.21, monkeypatch/moe_quant.py, `replace_parameter_8bit`."""
    assert tensor_sizes((8, 96, 64), "int8-experts", 64) == (8 * 96 * 64, 8 * 96 * 4)


@pytest.mark.parametrize("quantized", [True, False])
def test_quantized_experts_fit_a_card_that_16_bit_experts_do_not(
    quantized: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen3-30B-A3B: 29.0 of 30.5 billion parameters are experts: 54.0 GiB in 16 bits, 13.9 GiB in 4."""
    config = written(tmp_path, SPARSE | {"quantize_moe_experts": quantized})
    run(["estimate", "--config", config, "--gpus", "1xA100-40G", "--json", "--quiet"])
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] is quantized
    assert ("experts_in_16_bits" in [note["code"] for note in report["warnings_data"]]) is not quantized


@pytest.mark.parametrize(
    ("model", "said"), [("Qwen/Qwen3-30B-A3B", "nf4 base, experts too ·"), ("Qwen/Qwen3-8B", "nf4 base ·")]
)
def test_the_experts_of_a_dense_model_are_not_named(
    model: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line of Qwen3-8B said "double-quantized nf4 (experts too)"."""
    run(["estimate", "--config", written(tmp_path, SPARSE | {"base_model": model}), "--gpus", "1xA100-40G"])
    assert f"on a double-quantized {said}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"lora_target_linear": True}, "Axolotl stops at lora_target_linear beside it. Name lora_target_modules."),
        ({"adapter": "lora", "load_in_4bit": False}, "Axolotl stops without load_in_4bit or load_in_8bit. Add one."),
    ],
)
def test_what_axolotl_stops_at_beside_quantized_experts_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        read_keys(AXOLOTL, SPARSE | keys)
    assert str(refused.value) == f"Axolotl's quantize_moe_experts: true: {said}"


def test_a_file_with_quantized_experts_comes_back_as_it_was(tmp_path: Path) -> None:
    config = written(tmp_path, SPARSE)
    export = ["--export", str(tmp_path / "run"), "--quiet"]
    assert run(["estimate", "--config", config, "--gpus", "1xA100-40G", *export]) == 0
    assert yaml.safe_load((tmp_path / "run" / "train.yaml").read_text()) == SPARSE


def test_the_end_of_a_path_reaches_modules_and_no_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PEFT takes up_proj alone as the experts of Qwen3-Next, and shared_expert.up_proj as the module: 32 GiB less.

    Axolotl's README says "~47 GiB (no target experts)" of its example, of which these are the targets.
    """
    shared = [f"shared_expert.{name}_proj" for name in ("up", "down", "gate")]
    attention = ["linear_attn.in_proj_ba", "linear_attn.in_proj_qkvz", "linear_attn.out_proj", "self_attn.q_proj"]
    targets = {"lora_target_modules": [*attention, *shared, "k_proj", "v_proj", "o_proj"]}
    config = written(tmp_path, SPARSE | targets | {"base_model": "Qwen/Qwen3-Next-80B-A3B-Instruct"})
    assert run(["estimate", "--config", config, "--gpus", "1xH100", "--json", "--quiet"]) == 0
    peak = json.loads(capsys.readouterr().out)["gpus"][0]["peak_bytes"]
    assert 45 * 2**30 < peak < 52 * 2**30


@pytest.mark.parametrize("target", ["mlp.up_proj", "linear_attn.q_proj", "shared_expert.q_proj"])
def test_a_path_that_leaves_out_modules_of_its_name_is_refused(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"base_model": "Qwen/Qwen3-Next-80B-A3B-Instruct", "lora_target_modules": [target, "o_proj"]}
    config = written(tmp_path, SPARSE | model)
    assert run(["estimate", "--config", config, "--gpus", "1xH100", "--quiet"]) == 2
    assert f"lora_target_modules {target} does not reach every" in capsys.readouterr().err
