"""`planner.estimate` from TRL's own configs: the answer of `plan estimate --config` with the same keys in a file."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("trl", reason="the extra training has trl")

import torch
from peft import IA3Config, LoraConfig
from transformers import AutoConfig, BitsAndBytesConfig, TrainingArguments
from trl import DPOConfig, GRPOConfig, KTOConfig, ModelConfig, RewardConfig, RLOOConfig, SFTConfig

from planner import Job, estimate, load_model, parse_cluster
from planner.commands.main import run
from planner.errors import PlanError
from planner.estimation import estimate as estimate_candidate
from planner.jobs.base_candidate import single_candidate
from planner.notebook.estimate import EstimateAnswer
from planner.quantities import Note
from planner.report.json import estimate_report, json_text
from planner.report.sentences import sentences

# TRL's classes set `gradient_checkpointing`, which transformers 5.23 calls `activation_checkpointing`.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")


class GKDConfig(SFTConfig):
    """A config as TRL's of that name: it inherits `packing`, which GKD's trainer does not read."""


CPU: dict[str, Any] = {"use_cpu": True, "report_to": "none"}
ZERO_3 = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
CASES: dict[str, tuple[type, str, dict[str, Any]]] = {
    "defaults": (SFTConfig, "sft", {}),
    "sizes": (SFTConfig, "sft", {"max_length": 4096, "per_device_train_batch_size": 2, "packing": True}),
    "checkpointing": (SFTConfig, "sft", {"gradient_checkpointing": False, "optim": "adamw_8bit"}),
    "every second layer": (SFTConfig, "sft", {"gradient_checkpointing_kwargs": {"every_n_layers": 2}}),
    "fp16": (SFTConfig, "sft", {"fp16": True, "bf16": False}),
    "DeepSpeed": (DPOConfig, "dpo", {"deepspeed": ZERO_3, "precompute_ref_log_probs": True}),
    "FSDP": (KTOConfig, "kto", {"fsdp": True, "fsdp_config": {"version": 2, "cpu_offload": True}}),
    "vLLM": (GRPOConfig, "grpo", {"use_vllm": True, "vllm_gpu_memory_utilization": 0.4, "beta": 0.04}),
    "reward": (RewardConfig, "reward", {"model_init_kwargs": {"dtype": "bfloat16"}}),
    "rloo": (RLOOConfig, "rloo", {"max_completion_length": 128}),
}


# What the command adds: the cluster and a line with it, launch files that keep the user's own, what they are rented as.
OF_COMMAND = ("cluster", "summary", "launch", "why_no_launch", "resources")


def of_function(found: EstimateAnswer) -> dict[str, Any]:
    report = json.loads(json_text(estimate_report(found, found.warnings)))
    return {name: value for name, value in report.items() if name not in OF_COMMAND}


def of_command(
    keys: dict[str, Any],
    method: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    model: str = "Qwen2.5-7B",
    gpus: str = "2xA100-80G",
) -> dict[str, Any]:
    """The report of `plan estimate` with a config file, without its warning about keys that it does not use."""
    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump(keys))
    arguments = ["--model", model, "--gpus", gpus, "--method", method, "--json", "--quiet"]
    assert run(["estimate", f"--config={file}", *arguments]) in (0, 3)
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    report["warnings"] = [line for line in report["warnings"] if not line.startswith("not used by the plan")]
    report["warnings_data"] = [note for note in report["warnings_data"] if note["code"] != "keys_not_used"]
    return {name: value for name, value in report.items() if name not in OF_COMMAND}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_answer_of_the_command_with_the_same_keys_in_a_file(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, method, keys = CASES[case]
    args = config(output_dir=str(tmp_path), **CPU, **keys)
    found = estimate(args, "Qwen2.5-7B", "2xA100-80G")
    assert of_function(found) == of_command(keys, method, tmp_path, capsys)


def test_lora_and_4_bit_weights_are_read_from_their_own_configs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    args = SFTConfig(
        output_dir=str(tmp_path), **CPU, model_init_kwargs={"dtype": torch.bfloat16, "quantization_config": quantized}
    )
    lora = LoraConfig(
        r=32, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], use_dora=True, modules_to_save=["lm_head"]
    )
    found = estimate(args, "Qwen2.5-7B", "2xA100-80G", peft_config=lora)
    keys = {
        "dtype": "bfloat16", "load_in_4bit": True, "use_bnb_nested_quant": True, "use_peft": True, "lora_r": 32,
        "lora_dropout": 0.1, "lora_target_modules": ["q_proj", "v_proj"], "use_dora": True,
        "lora_modules_to_save": ["lm_head"],
    }  # fmt: skip
    assert of_function(found) == of_command(keys, "sft", tmp_path, capsys)
    assert args.model_init_kwargs["quantization_config"] is quantized  # the caller's object is left as it is


def test_experts_named_in_a_lora_config_have_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = SFTConfig(output_dir=str(tmp_path), **CPU)
    named = ["7.mlp.experts.gate_up_proj", "7.mlp.experts.down_proj"]
    found = estimate(args, "Qwen3-30B-A3B", "1xH200", peft_config=LoraConfig(r=8, target_parameters=named))
    keys = {"use_peft": True, "lora_r": 8, "lora_dropout": 0.0, "lora_target_parameters": named}
    assert found.candidate.lora_target_modules == ()  # PEFT has no default for qwen3_moe
    assert of_function(found) == of_command(keys, "sft", tmp_path, capsys, "Qwen3-30B-A3B", "1xH200")


def test_the_default_of_bitsandbytes_is_refused_by_its_name(tmp_path: Path) -> None:
    unset = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}
    with pytest.raises(PlanError, match=r"bnb_4bit_quant_type=fp4 is not supported\. bnb_4bit_quant_type can be nf4"):
        estimate(SFTConfig(output_dir=str(tmp_path), **CPU, model_init_kwargs=unset), "Qwen2.5-7B", "1xH100")


def test_a_models_own_config_and_trls_model_config_say_the_same_as_a_name(tmp_path: Path) -> None:
    args = SFTConfig(output_dir=str(tmp_path), **CPU)
    published = dict(load_model("Qwen2.5-7B").config)
    of_class = AutoConfig.for_model(published.pop("model_type"), **published)
    of_trl = ModelConfig(model_name_or_path="Qwen/Qwen2.5-7B", use_peft=True, lora_target_modules=["all-linear"])
    lora = LoraConfig(r=16, lora_dropout=0.05, target_modules="all-linear")
    first, *others = (
        estimate(args, of_class, "1xH100", peft_config=lora),
        estimate(args, "Qwen2.5-7B", "1xH100", peft_config=lora),
        estimate(args, of_trl, "1xH100"),
    )
    assert all((other.gpus, other.throughput) == (first.gpus, first.throughput) for other in others)


def test_arguments_win_over_the_config_and_launchers_files_count(tmp_path: Path) -> None:
    args = SFTConfig(output_dir=str(tmp_path), **CPU, max_length=512)
    found = estimate(args, "Qwen2.5-7B", "2xH100", max_length=2048, accelerate_config="zero3", risk=0.1)
    assert (found.candidate.max_length, found.candidate.sharding) == (2048, "zero3")


def test_what_is_not_counted_is_named_and_nothing_else(tmp_path: Path) -> None:
    args = SFTConfig(output_dir=str(tmp_path), **CPU, neftune_noise_alpha=5.0, learning_rate=1e-4)
    lora = LoraConfig(target_modules="all-linear", rank_pattern={"q_proj": 4})
    found = estimate(args, "Qwen2.5-7B", "1xH100", peft_config=lora)
    assert found.warnings[0] == Note("keys_not_counted", {"keys": ("neftune_noise_alpha", "rank_pattern")})
    assert not any("learning_rate" in line for line in sentences(found.warnings))
    inherited = estimate(GKDConfig(output_dir=str(tmp_path), **CPU), "Qwen2.5-7B", "1xH100")
    assert not any("packing" in line for line in sentences(inherited.warnings))


def test_a_candidate_and_a_cluster_are_taken_as_they_are_and_shown_as_the_table() -> None:
    cluster = parse_cluster("1xL4")
    candidate = single_candidate(Job(model=load_model("Qwen2.5-0.5B"), method="sft"), cluster)
    found = estimate(candidate, cluster, risk=0.1)
    assert found.gpus == estimate_candidate(candidate, cluster, 0.1).gpus
    with pytest.raises(PlanError, match="no setting but risk"):
        estimate(candidate, cluster, 0.1)  # type: ignore[arg-type]
    assert repr(found).splitlines()[0].startswith("Qwen/Qwen2.5-0.5B · sft · 1 x L4")
    assert found._repr_html_().startswith("<pre") and "per_device_train_batch_size" in found._repr_html_()


@pytest.mark.parametrize(
    ("arguments", "asked", "message"),
    [
        ((TrainingArguments, "Qwen2.5-7B", "1xL4"), {}, "TrainingArguments is no config of a TRL method.*SFTConfig"),
        ((SFTConfig, 7, "1xL4"), {}, "takes a model's config, TRL's ModelConfig or a name, not int"),
        ((SFTConfig, "Qwen2.5-7B", None), {}, "gpus is missing"),
        ((SFTConfig, "Qwen2.5-7B", "1xL4"), {"config": "a.yaml"}, "config=a.yaml contradicts the SFTConfig"),
        ((SFTConfig, "Qwen2.5-7B", "1xL4"), {"zerostage": 3}, "Did you mean zero_stage"),
        ((SFTConfig, "Qwen2.5-7B", "1xL4"), {"peft_config": IA3Config()}, "Adapters of IA3Config are not counted"),
    ],
    ids=["no method", "no model", "no GPUs", "two configs", "setting", "other adapters"],
)
def test_what_cannot_be_is_refused_in_one_line(
    arguments: tuple[type, Any, str], asked: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config, model, gpus = arguments
    with pytest.raises(PlanError, match=message):
        estimate(config(output_dir=str(tmp_path), **CPU), model, gpus, **asked)
