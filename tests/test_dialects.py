"""Configs of other tools: each is recognized by its keys, and read as its tool runs it or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from planner.commands.main import run
from planner.errors import InputError
from planner.gpus.parse import parse_cluster
from planner.jobs.base_candidate import single_candidate
from planner.jobs.dialects.axolotl import AXOLOTL
from planner.jobs.dialects.dialect import Dialect, read_keys
from planner.jobs.dialects.llama_factory import LLAMA_FACTORY
from planner.jobs.dialects.table import dialect_of
from planner.jobs.job import Job
from planner.launch.files import launch_files
from planner.methods import MethodName
from planner.models.catalogue import load_model
from planner.models.lora_targets import text_targets
from planner.requests.train_config import load_train_config

# Keys and values of a published config of each tool that is not read, and the flags that say the same.
# Source: torchtune recipes/configs/llama3_1/8B_lora.yaml; verl verl/trainer/config/sft_trainer.yaml, ppo_trainer.yaml;
# unsloth skills/unsloth/assets/lora-text-train.yaml; ms-swift examples/yaml/deepspeed/sft.yaml; LLaMA-Factory
# examples/v1/train_full/train_full_fsdp2.yaml.
UNREAD = {
    "torchtune": (
        "model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_rank: 8}\n"
        "checkpointer: {checkpoint_dir: Meta-Llama-3.1-8B-Instruct}\nbatch_size: 2\ngradient_accumulation_steps: 32\n",
        "--model Meta-Llama-3.1-8B-Instruct --batch-size 2 --lora-r 8 --set gradient_accumulation_steps=32 "
        "--method sft",
    ),
    "verl": (
        "model: {partial_pretrain: google/gemma-2-2b}\ndata: {train_batch_size: 256, micro_batch_size_per_gpu: 4, "
        "max_length: 1024}\n",
        "--model google/gemma-2-2b --max-length 1024 --batch-size 4 --effective-batch-size 256 --method sft",
    ),
    "verl, RL": (
        "algorithm: {adv_estimator: grpo}\ndata: {max_prompt_length: 512, max_response_length: 1024}\n"
        "actor_rollout_ref: {model: {path: Qwen/Qwen3-8B}, rollout: {n: 5}}\n",
        "--model Qwen/Qwen3-8B --prompt-length 512 --max-completion-length 1024 --set num_generations=5 --method grpo",
    ),
    "Unsloth": (
        "model: unsloth/Qwen2.5-0.5B\ntraining: {max_seq_length: 2048, batch_size: 2, gradient_accumulation_steps: 4, "
        "gradient_checkpointing: unsloth}\nlora: {lora_r: 64}\n",
        "--model unsloth/Qwen2.5-0.5B --max-length 2048 --batch-size 2 --lora-r 64 --set gradient_accumulation_steps=4 "
        "--method sft",
    ),
    "ms-swift": (
        "model: Qwen/Qwen2.5-7B-Instruct\ntorch_dtype: bfloat16\ntuner_type: lora\nlora_rank: 8\nmax_length: 2048\n"
        "per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\ndeepspeed: zero2\n",
        "--model Qwen/Qwen2.5-7B-Instruct --max-length 2048 --batch-size 1 --lora-r 8 "
        "--set gradient_accumulation_steps=8 --method sft",
    ),
    "LLaMA-Factory v1": (
        "model: Qwen/Qwen3-0.6B\nmodel_class: llm\ndist_config: {name: fsdp2}\nmicro_batch_size: 1\ncutoff_len: 2048\n",
        "--model Qwen/Qwen3-0.6B --max-length 2048 --batch-size 1 --method sft",
    ),
}


def written(folder: Path, text: str) -> str:
    """A config of this text, as a flag."""
    path = folder / "config.yaml"
    path.write_text(text)
    return f"--config={path}"


@pytest.mark.parametrize("tool", UNREAD)
def test_a_config_of_a_tool_that_is_not_read_is_refused_by_name(
    tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, flags = UNREAD[tool]
    assert run([written(tmp_path, text), "--gpus", "1xH100"]) == 2
    said = capsys.readouterr().err
    name = tool.partition(",")[0]
    told = f"is a config of {name}, which plan does not read. Say it in flags, with your GPUs: plan {flags} --gpus "
    assert told in said


@pytest.mark.parametrize("tool", UNREAD)
def test_the_flags_of_that_refusal_are_planned(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*UNREAD[tool][1].split(), "--gpus", "8xH100", "--quiet"]) in (0, 3)


def test_all_keys_that_are_refused_are_named_at_once() -> None:
    keys = {"base_model": "m", "adapter": "lora", "fp8": True, "tiled_mlp": True, "activation_offloading": True}
    with pytest.raises(InputError) as refused:
        read_keys(AXOLOTL, {**keys, "lora_target_linear": True})
    assert all(f"Axolotl's {name}" in str(refused.value) for name in ("fp8", "tiled_mlp", "activation_offloading"))


DATA = Path(__file__).parent / "data"
# 80 of axolotl's examples, drawn with the seeds 52 and 2052 from the 250 of its repository at 067b021, and 45 of
# LLaMA-Factory's from the 66 of ff6d4d1, with its one of KTO (both Apache 2.0): the keys that change what is planned,
# and what the tool does with them.
EXAMPLES = [
    (dialect, json.loads(line))
    for dialect, file in ((AXOLOTL, "axolotl_configs.jsonl"), (LLAMA_FACTORY, "llama_factory_configs.jsonl"))
    for line in (DATA / file).read_text(encoding="utf-8").splitlines()
]


@pytest.mark.parametrize(
    ("dialect", "example"), EXAMPLES, ids=[f"{dialect.tool}-{example['file']}" for dialect, example in EXAMPLES]
)
def test_an_example_of_a_tool_is_read_as_the_tool_runs_it_or_refused(dialect: Dialect, example: dict[str, Any]) -> None:
    if "refused" in example:
        with pytest.raises(InputError) as refused:
            read_keys(dialect, example["settings"])
        assert str(refused.value) == example["refused"]
        return
    found = read_keys(dialect, example["settings"])
    assert dialect_of(example["settings"]) is dialect
    assert found.method == example["method"]
    assert found.settings == {**example["read"], "tool": dialect.tool}
    assert [*found.unmodelled] == example["unmodelled"]


def test_a_reported_job_that_ran_out_of_memory_is_tight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """hiyouga/LlamaFactory#4133: Qwen1.5-7B under ZeRO-2 in fp16 on eight A100 of 40 GB, by its own config."""
    zero = {"stage": 2, "allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8, "round_robin_gradients": True}
    (tmp_path / "ds_z2_config.json").write_text(json.dumps({"fp16": {"enabled": "auto"}, "zero_optimization": zero}))
    text = (
        "model_name_or_path: Qwen/Qwen1.5-7B\nstage: sft\ndo_train: true\nfinetuning_type: full\ncutoff_len: 512\n"
        "deepspeed: ds_z2_config.json\ntemplate: qwen\nper_device_train_batch_size: 1\nfp16: true\n"
        "gradient_accumulation_steps: 1\nper_device_eval_batch_size: 1\n"
    )
    assert run(["estimate", written(tmp_path, text), "--gpus", "8xA100-40G", "--json", "--quiet"]) == 0
    best = json.loads(capsys.readouterr().out)
    assert best["tight"] and best["gpus"][0]["interval_bytes"][1] > best["gpus"][0]["capacity_bytes"]


QLORA = """
base_model: NousResearch/Llama-3.2-1B
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_target_linear: true
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
attn_implementation: flash_attention_2
optimizer: paged_adamw_8bit
wandb_project: mine
"""


def test_axolotls_config_is_planned_with_its_method_and_its_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["estimate", written(tmp_path, QLORA), "--gpus", "1xA100-40G", "--json", "--quiet"]) == 0
    report = json.loads(capsys.readouterr().out)
    wanted = {
        "tool": "axolotl", "trl_version": "1.14", "method": "sft", "max_length": 2048, "packing": True,
        "gradient_checkpointing": False, "optim": "paged_adamw_8bit", "load_in_4bit": True, "dtype": "bfloat16",
    }  # fmt: skip
    assert {name: report["settings"].get(name) for name in wanted} == wanted
    assert "the config is read as Axolotl's: planned as Axolotl 0.21 runs it" in report["warnings"]
    assert report["settings"]["lora_kernels"] == ["mlp", "qkv", "o"]
    assert "not used by the plan: wandb_project" in report["warnings"]


AS_PEFT = "Axolotl's fused kernels of LoRA are counted as PEFT's own layers, which need more memory"


@pytest.mark.parametrize(
    ("keys", "kernels", "said"),
    [
        ("", ["mlp", "qkv", "o"], False),
        ("lora_mlp_kernel: true", ["mlp"], False),
        ("lora_embedding_kernel: false", None, False),
        ("trust_remote_code: true", None, False),
        ("peft_use_dora: true", ["mlp", "qkv", "o"], True),
    ],
)
def test_axolotls_kernels_of_lora_are_on_unless_one_is_named(
    keys: str, kernels: list[str] | None, said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = written(tmp_path, f"{QLORA}{keys}\n")
    assert run(["estimate", given, "--gpus", "1xA100-40G", "--json", "--quiet"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["settings"].get("lora_kernels") == kernels
    assert (AS_PEFT in report["warnings"]) is said


def test_axolotls_kernels_of_lora_need_less_memory_and_are_written_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On an emulated L4 the kernels saved 0.600 GiB of a model of 8 layers (results/tool_trainers.md)."""
    peaks = []
    for name, settings in (("on", []), ("off", ["--set", "lora_kernels="])):
        export = ["--export", str(tmp_path / name)]
        assert run(["estimate", written(tmp_path, LORA), "--gpus", "1xH100", "--json", *settings, *export]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["gpus"][0]["peak_bytes"])
    assert peaks[0] < peaks[1]
    back = yaml.safe_load((tmp_path / "off" / "train.yaml").read_text())
    assert [back[f"lora_{part}_kernel"] for part in ("mlp", "qkv", "o")] == [False] * 3


def test_axolotl_stops_at_its_kernels_for_an_attention_that_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = QLORA.replace("NousResearch/Llama-3.2-1B", "microsoft/Phi-3-mini-4k-instruct")
    assert run(["estimate", written(tmp_path, text), "--gpus", "1xH100", "--quiet"]) == 2
    assert "set lora_qkv_kernel and lora_o_kernel to false" in capsys.readouterr().err
    named = f"{text}lora_mlp_kernel: false\nlora_qkv_kernel: false\nlora_o_kernel: false\n"
    assert run(["estimate", written(tmp_path, named), "--gpus", "1xH100", "--quiet"]) == 0


def test_a_trainer_of_transformers_keeps_adapters_in_float32_and_builds_all_logits() -> None:
    model = load_model("Llama-3.2-1B")
    shared = {"tuning": "lora", "quantization": "nf4-double", "dtype": "bfloat16"}
    by_trl = Job(model=model, method="sft", pinned=shared)
    by_axolotl = Job(model=model, method="sft", pinned={**shared, "tool": "axolotl"})
    trl, axolotl = (single_candidate(job, parse_cluster("1xA100-40G")) for job in (by_trl, by_axolotl))
    assert (trl.trainer_casts_to_bfloat16, trl.loss) == (True, "fused")
    assert (axolotl.trainer_casts_to_bfloat16, axolotl.loss) == (False, "causal_lm")
    assert replace(axolotl, use_liger_kernel=True).loss == "liger"
    assert replace(axolotl, use_liger_kernel=True, cut_cross_entropy=True).loss == "cut"
    assert replace(trl, cut_cross_entropy=True).loss == "fused"


def test_a_search_keeps_what_axolotls_file_says_and_decides_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([written(tmp_path, QLORA), "--gpus", "1xA100-40G", "--json", "--quiet"]) == 0
    settings = json.loads(capsys.readouterr().out)["best"]["settings"]
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 8
    assert (settings["lora_r"], settings["max_length"], settings["tool"]) == (32, 2048, "axolotl")


@pytest.mark.parametrize(
    ("named", "settings"),
    [
        ("zero2.json", {"zero_stage": 2, "offload_optimizer_device": "cpu", "reduce_bucket_size": 500_000_000}),
        ("zero3_bf16.json", {"zero_stage": 3, "stage3_max_live_parameters": 0, "sub_group_size": 1}),
    ],
)
def test_the_deepspeed_configs_that_axolotl_fetches_are_known_by_name(
    named: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"{QLORA}deepspeed: deepspeed_configs/{named}\n")
    read = load_train_config(path).settings
    assert {name: read[name] for name in settings} == settings


LORA = """# my own run
base_model: NousResearch/Llama-3.2-1B  # the small one
adapter: lora
lora_r: 8
lora_target_linear: true
sequence_len: 1024
micro_batch_size: 8
gradient_checkpointing: false
flash_attention: true
datasets:
  - path: mine
"""


def test_axolotls_file_comes_back_with_the_plans_values_and_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(LORA)
    read = load_train_config(path)
    pinned = {name: value for name, value in read.settings.items() if name != "model_name_or_path"}
    job = Job(model=load_model("Llama-3.2-1B"), method="sft", pinned=pinned)
    own = single_candidate(job, parse_cluster("2xA100-40G"))
    assert launch_files(own, config=LORA)["train.yaml"] == LORA
    changed = replace(own, per_device_train_batch_size=4, gradient_accumulation_steps=2, attn_implementation="sdpa")
    files = launch_files(replace(changed, gradient_checkpointing=True, sharding="zero2"), config=LORA)
    assert files["train.yaml"] == LORA.replace("micro_batch_size: 8", "micro_batch_size: 4  # plan: was 8").replace(
        "gradient_checkpointing: false", "gradient_checkpointing: true  # plan: was false"
    ).replace("flash_attention: true", "flash_attention: null  # plan: was true") + (
        "gradient_accumulation_steps: 2  # plan: added\nattn_implementation: sdpa  # plan: added\n"
        "deepspeed: deepspeed.json  # plan: added\n"
    )
    assert files["launch.sh"].splitlines()[-1] == "axolotl train train.yaml -- --num_processes 2"
    assert files["requirements.txt"] == "axolotl==0.21.*\n"
    assert json.loads(files["deepspeed.json"])["zero_optimization"]["stage"] == 2


def test_what_axolotls_file_cannot_say_is_not_written() -> None:
    job = Job(model=load_model("Llama-3.2-1B"), method="sft", pinned={"tool": "axolotl", "tuning": "lora"})
    candidate = single_candidate(job, parse_cluster("1xA100-40G"))
    with pytest.raises(InputError, match="The files of a plan for Axolotl are its own config with the plan's values"):
        launch_files(candidate)
    with pytest.raises(InputError, match=r"Axolotl.s config cannot say .*every_n_layers=2"):
        launch_files(replace(candidate, gradient_checkpointing=True, checkpoint_every_n_layers=2), config=LORA)


@pytest.mark.parametrize(
    "engine", ["{num_generations: 8}", "{num_generations: 8, use_vllm: true, vllm_mode: colocate}"]
)
def test_axolotls_file_says_the_engine_that_a_search_chose(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its train.yaml had no engine, or one with the whole context, 131,072 tokens, for whose KV cache was no room."""
    text = f"""base_model: meta-llama/Llama-3.1-8B-Instruct
rl: grpo
adapter: lora
lora_r: 32
lora_target_linear: true
micro_batch_size: 8
gradient_accumulation_steps: 2
bf16: true
gradient_checkpointing: true
vllm: {{port: 8001}}
trl: {engine}
"""
    out = tmp_path / "run"
    assert run([written(tmp_path, text), "--gpus", "4xA100-80G", "--json", "--quiet", "--export", str(out)]) == 0
    chosen = json.loads(capsys.readouterr().out)["best"]["settings"]
    assert chosen["use_vllm"]
    back = f"--config={out / 'train.yaml'}"
    assert run(["estimate", back, "--gpus", "4xA100-80G", "--json", "--quiet"]) == 0
    read = json.loads(capsys.readouterr().out)["settings"]
    assert {name: read[name] for name in chosen if "vllm" in name} == {
        name: value for name, value in chosen.items() if "vllm" in name
    }
    assert yaml.safe_load((out / "train.yaml").read_text())["vllm"]["port"] == 8001


def test_a_refusal_of_axolotls_offloading_names_the_key_of_the_file() -> None:
    """It named activation_offloading: true, which the file did not have."""
    keys = {"base_model": "Qwen/Qwen3-14B", "adapter": "lora", "lora_target_linear": True}
    with pytest.raises(
        InputError, match=r"^Axolotl's gradient_checkpointing: offload: with an adapter it offloads all"
    ):
        read_keys(AXOLOTL, {**keys, "gradient_checkpointing": "offload"})
    with pytest.raises(InputError, match=r"^Axolotl's activation_offloading: true: with an adapter it offloads all"):
        read_keys(AXOLOTL, {**keys, "gradient_checkpointing": True, "activation_offloading": True})


def test_another_trainer_is_no_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ "without tool=llamafactory: fits" stood among the changes with which a job of LLaMA-Factory fits."""
    text = FACTORY.replace("Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B-Instruct").replace("stage: sft", "stage: kto")
    text = text.replace("per_device_train_batch_size: 2", "per_device_train_batch_size: 8")
    assert run([written(tmp_path, text), "--gpus", "2xA100-40G", "--quiet"]) == 3
    said = capsys.readouterr().out
    assert "to fit" in said
    assert "tool=" not in said


FACTORY = """### model
model_name_or_path: Qwen/Qwen3-4B
### method
stage: sft
finetuning_type: lora
lora_rank: 8
cutoff_len: 2048  # tokens
template: qwen3
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
bf16: true
"""


def test_llama_factorys_config_is_no_full_fine_tuning_at_1024_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["estimate", written(tmp_path, FACTORY), "--gpus", "1xA100-80G", "--json", "--quiet"]) == 0
    report = json.loads(capsys.readouterr().out)
    wanted = {
        "tool": "llamafactory", "method": "sft", "use_peft": True, "lora_r": 8, "max_length": 2048, "dtype": "bfloat16",
        "gradient_checkpointing": True, "lora_dropout": 0.0,
    }  # fmt: skip
    assert {name: report["settings"].get(name) for name in wanted} == wanted
    assert "the config is read as LLaMA-Factory's: planned as LLaMA-Factory 0.9.5 runs it" in report["warnings"]
    files = report["launch"]["files"]
    assert files["train.yaml"] == FACTORY
    assert files["launch.sh"].splitlines()[-1] == "FORCE_TORCHRUN=1 NPROC_PER_NODE=1 llamafactory-cli train train.yaml"


def test_another_tools_screen_shows_nothing_that_the_tool_does_not_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It showed flags of `trl sft`, packages of TRL, and a change of PEFT that LLaMA-Factory has no key for."""
    assert run(["estimate", written(tmp_path, FACTORY), "--gpus", "1xA100-80G", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "\nconfig    your file" in said and "--lora_r" not in said and "install   llamafactory==0.9.5.*\n" in said
    assert run(["estimate", written(tmp_path, QLORA), "--gpus", "1xA100-80G", "--quiet"]) == 0
    assert "lora_kernels" not in capsys.readouterr().out  # it was named as a setting of the launch
    assert run([written(tmp_path, FACTORY), "--gpus", "1xA100-80G", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "autocast_adapter_dtype" not in said and "install   llamafactory==0.9.5.*\n" in said


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        ({"finetuning_type": "full", "bf16": True}, {"dtype": "float32", "bf16": True}),  # trained weights are cast
        ({"finetuning_type": "full", "pure_bf16": True}, {"dtype": "auto", "bf16": False, "fp16": False}),
        ({"neat_packing": True, "flash_attn": "fa2"}, {"packing": True, "attn_implementation": "flash_attention_2"}),
        ({"packing": True}, {"packing": True, "packing_strategy": "wrapped"}),
        ({"use_unsloth_gc": True}, {"offload": True}),
        ({"enable_liger_kernel": True}, {"use_liger_kernel": True}),
        ({"val_size": 0.1, "eval_strategy": "steps"}, {"eval_strategy": "steps", "per_device_eval_batch_size": 8}),
        ({"quantization_bit": 8}, {"load_in_8bit": True}),
        ({"lora_target": "q_proj, v_proj"}, {"lora_target_modules": ["q_proj", "v_proj"]}),
    ],
)
def test_keys_of_llama_factory_mean_what_its_source_does(keys: dict[str, Any], settings: dict[str, Any]) -> None:
    found = read_keys(LLAMA_FACTORY, {"model_name_or_path": "Qwen/Qwen3-4B", **keys}).settings
    assert {name: found[name] for name in settings} == settings


@pytest.mark.parametrize(("given", "steps"), [({}, 1), ({"gradient_accumulation_steps": None}, 4)])
def test_axolotl_accumulates_to_its_batch_size_only_where_the_steps_are_null(
    given: dict[str, None], steps: int
) -> None:
    """Its schema's default, 1, is there before `normalize_config` divides `batch_size`, unless the file says null."""
    keys = {"base_model": "Qwen/Qwen3-4B", "batch_size": 8, "micro_batch_size": 2, "flash_attention": True, **given}
    assert read_keys(AXOLOTL, keys).settings.get("gradient_accumulation_steps", 1) == steps


def test_llama_factorys_kto_trains_one_row_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TRL's KTOTrainer wants two rows; LLaMA-Factory's takes the KL batch from the data, after the rows."""
    text = FACTORY.replace("stage: sft", "stage: kto").replace("batch_size: 2", "batch_size: 1")
    assert run(["estimate", written(tmp_path, text), "--gpus", "1xA100-80G", "--json", "--quiet"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["method"], settings["per_device_train_batch_size"], settings["beta"]) == ("kto", 1, 0.1)
    job = Job(model=load_model("Qwen3-4B"), method="kto", pinned={"tool": "llamafactory", "tuning": "lora"})
    candidate = single_candidate(job, parse_cluster("1xA100-80G"))
    assert candidate.loss == "unpaired"
    assert replace(candidate, sharding="zero3", num_processes=2).repeated_calls == "nothing"


def test_llama_factory_freezes_a_vision_tower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`patch_target_modules` and `get_forbidden_modules`: no adapter in it, and no weight of it in full."""
    path = written(tmp_path, FACTORY.replace("Qwen/Qwen3-4B", "google/gemma-3-4b-it") + "image_max_pixels: 262144\n")
    assert run(["estimate", path, "--gpus", "1xA100-80G", "--json", "--quiet"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["lora_target_modules"] == [*text_targets(load_model("gemma-3-4b-it"))]
    assert run(["estimate", path, "--gpus", "1xA100-80G", "--tuning", "full", "--quiet"]) == 2
    assert "LLaMA-Factory freezes the vision tower" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        (QLORA, "lora_target_modules=q_proj,v_proj", {"lora_target_modules": ["q_proj", "v_proj"]}),
        (
            QLORA,
            "load_in_4bit=true use_bnb_nested_quant=false",
            {"bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}},
        ),
        (FACTORY, "lora_target_modules=q_proj,v_proj", {"lora_target": "q_proj,v_proj"}),
        (FACTORY, "attn_implementation=flash_attention_2", {"flash_attn": "fa2"}),
        (
            FACTORY.replace("Qwen/Qwen3-4B", "google/gemma-3-4b-it") + "lora_target: q_proj\n",
            "lora_target_modules=all-linear",
            {"lora_target": "all"},
        ),
        (
            QLORA.replace("NousResearch/Llama-3.2-1B", "google/gemma-3-4b-it"),
            r"lora_target_modules=.*language_model.*\.(q_proj|v_proj)",
            {"lora_target_modules": r".*language_model.*\.(q_proj|v_proj)"},
        ),
        (
            FACTORY,
            "load_in_4bit=true use_bnb_nested_quant=false",
            {"quantization_bit": 4, "double_quantization": False},
        ),
    ],
)
def test_a_file_that_is_given_back_says_what_was_set(
    config: str, settings: str, said: dict[str, object], tmp_path: Path
) -> None:
    given = [word for setting in settings.split() for word in ("--set", setting)]
    export = ["--export", str(tmp_path / "run"), "--quiet"]
    assert run(["estimate", written(tmp_path, config), "--gpus", "1xH100", *given, *export]) == 0
    (path,) = [file for file in (tmp_path / "run").glob("*.y*ml") if "accelerate" not in file.name]
    back = yaml.safe_load(path.read_text())
    assert {name: back.get(name) for name in said} == said


def test_a_kernel_that_llama_factory_has_not_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--gpus", "1xH100", "--set", "attn_implementation=flash_attention_3", "--export", str(tmp_path / "run")]
    assert run(["estimate", written(tmp_path, FACTORY), *given]) == 2
    assert "LLaMA-Factory's flash_attn: flash_attention_3" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ds_z3_config.json", "mine.json"])
def test_the_stage_of_zero_is_read_from_the_config_and_not_its_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    keys = {"stage": "sft", "finetuning_type": "full", "bf16": True}
    for config in (str(path), {"zero_optimization": {"stage": 3}}):
        assert read_keys(LLAMA_FACTORY, {**keys, "deepspeed": config}).settings["dtype"] == "auto"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    assert read_keys(LLAMA_FACTORY, {**keys, "deepspeed": str(path)}).settings["dtype"] == "float32"


def test_llama_factory_puts_adapters_on_the_layers_of_a_quantized_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its all finds them by name; it was refused, as PEFT's all-linear finds none."""
    text = FACTORY.replace("Qwen/Qwen3-4B", "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4")
    assert run(["estimate", written(tmp_path, text), "--gpus", "1xA100-80G", "--json", "--quiet"]) == 0
    targets = json.loads(capsys.readouterr().out)["settings"]["lora_target_modules"]
    assert {"q_proj", "o_proj", "down_proj"} <= {*targets}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"quantization_bit": 4, "bf16": True, "deepspeed": "ds_z3_config.json"}, "bfloat16"),
        ({"quantization_bit": 4, "fp16": True, "deepspeed": "ds_z3_config.json"}, "float16"),
        ({"quantization_bit": 4, "bf16": True, "deepspeed": "ds_z2_config.json"}, None),
    ],
)
def test_llama_factory_stores_4_bit_weights_in_the_dtype_that_zero_3_shards(
    keys: dict[str, Any], expected: str | None
) -> None:
    """Source: llamafactory 0.9.5, model_utils/quantization.py (`bnb_4bit_quant_storage`)."""
    assert read_keys(LLAMA_FACTORY, {"stage": "sft", **keys}).settings.get("bnb_4bit_quant_storage") == expected
    with pytest.raises(InputError, match="quantization_bit: 8 under ZeRO-3: LLaMA-Factory stops at it"):
        read_keys(LLAMA_FACTORY, {"stage": "sft", "quantization_bit": 8, "deepspeed": "ds_z3_config.json"})


def test_axolotls_own_optimizers_and_default_checkpoints_are_known() -> None:
    keys = {"base_model": "Qwen/Qwen2.5-0.5B", "attn_implementation": "flash_attention_2"}
    with pytest.raises(InputError, match="optimizer: muon: its states are not counted"):
        read_keys(AXOLOTL, {**keys, "optimizer": "muon"})
    for reentrant, said in ((False, ()), (True, ("gradient_checkpointing_kwargs",))):
        kwargs = {"use_reentrant": reentrant}
        assert read_keys(AXOLOTL, {**keys, "gradient_checkpointing_kwargs": kwargs}).unmodelled == said


def test_notes_of_another_tools_job_say_nothing_of_trl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`sample_packing: false` was a key at which TRL stops, and TRL prepared the model of Axolotl's trainer."""
    text = f"{LORA}rl: dpo\nsample_packing: false\ngradient_checkpointing_kwargs:\n  use_reentrant: false\n"
    assert run(["estimate", written(tmp_path, text), "--gpus", "1xH100", "--json", "--quiet"]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert not [each for each in warnings if "TRL" in each or "not count" in each or "every_n_layers" in each]


def test_targets_of_llama_factory_may_be_a_list() -> None:
    found = read_keys(LLAMA_FACTORY, {"stage": "sft", "lora_target": ["q_proj", "v_proj"]}).settings
    assert found["lora_target_modules"] == ["q_proj", "v_proj"]


def test_llama_factorys_zero_3_is_not_estimated_in_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file without DeepSpeed trains float32 weights; ZeRO-3 keeps the checkpoint's dtype."""
    text = "model_name_or_path: Qwen/Qwen2.5-0.5B\nstage: sft\nfinetuning_type: full\ncutoff_len: 1024\nbf16: true\n"
    command = ["estimate", written(tmp_path, text), "--gpus=2xA100-40G", "--set=zero_stage=3", "--quiet"]
    assert run(command) == 2
    assert "trains in the checkpoint's dtype under ZeRO-3" in capsys.readouterr().err
    assert run([*command, "--set=dtype=bfloat16"]) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model_name_or_path: Qwen/Qwen2.5-0.5B\nstage: sft\nfinetuning_type: []\n", "finetuning_type: []"),
        ("model_name_or_path: Qwen/Qwen2.5-0.5B\nstage: sft\nfinetuning_type: lora\nlora_rank: {}\n", "lora_r"),
        ("model_name_or_path: Qwen/Qwen2.5-0.5B\nstage: sft\nfinetuning_type: lora\ncutoff_len: {}\n", "max_length"),
        ("base_model: Qwen/Qwen2.5-0.5B\nadapter: []\nmicro_batch_size: 1\nsequence_len: 1024\n", "adapter: []"),
    ],
)
def test_an_empty_list_or_mapping_is_no_value_that_was_left_out(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([written(tmp_path, text), "--gpus", "1xH100"]) == 2
    assert said in capsys.readouterr().err


def test_a_file_for_accelerate_launch_is_told_from_a_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """LLaMA-Factory has ten of them among its examples: "--model and --method are missing" was no help."""
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\n"
    assert run([written(tmp_path, text), "--gpus", "8xH100"]) == 2
    assert "is a file for accelerate launch, which says no model. Use --accelerate-config " in capsys.readouterr().err


def test_towers_that_axolotl_freezes_change_nothing_where_adapters_are_on_the_language_model() -> None:
    """Source: axolotl 0.21, utils/freeze.py, `freeze_mm_modules`."""
    keys = {"base_model": "google/gemma-4-E2B-it", "freeze_mm_modules": True, "attn_implementation": "sdpa"}
    expression = r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"
    adapters = {"adapter": "lora", "lora_r": 16, "lora_target_modules": expression}
    assert read_keys(AXOLOTL, {**keys, **adapters}).settings["lora_target_modules"] == [expression]
    for refused in ({}, {**adapters, "lora_target_modules": ["q_proj"]}):
        with pytest.raises(InputError, match="freeze_mm_modules: true: what is trained then is not counted"):
            read_keys(AXOLOTL, {**keys, **refused})


def test_experts_as_linear_layers_are_refused_with_what_is_planned() -> None:
    keys = {"base_model": "axolotl-quants/Llama-4-Scout-17B-16E-Linearized-bnb-nf4-bf16"}
    with pytest.raises(InputError, match="Llama-4-Scout-17B-16E-Instruct with quantize_moe_experts: true"):
        read_keys(AXOLOTL, {**keys, "llama4_linearized_experts": True})


@pytest.mark.parametrize(
    ("pinned", "reentrant"),
    [
        ({"tool": "llamafactory", "sharding": "ddp"}, True),
        ({"tool": "llamafactory", "sharding": "fsdp2"}, False),
        ({"tool": "axolotl", "sharding": "zero3"}, True),
        ({"tool": "axolotl", "sharding": "zero2"}, False),
        ({"sharding": "zero3"}, True),
        ({"sharding": "zero3", "tuning": "full"}, False),
        ({"sharding": "zero2"}, False),
    ],
)
def test_checkpoints_are_reentrant_where_a_trainer_makes_them_so(pinned: dict[str, Any], reentrant: bool) -> None:
    """LLaMA-Factory's 8-bit base with adapters was planned with inputs that only other checkpoints keep."""
    settings = {"tuning": "lora", "dtype": "bfloat16", **pinned}
    job = Job(model=load_model("Qwen2.5-0.5B"), method="sft", pinned=settings)
    assert single_candidate(job, parse_cluster("2xA100-40G")).reentrant == reentrant


@pytest.mark.parametrize("stage", ["dpo", "kto"])
@pytest.mark.parametrize(("more", "policy"), [("", "float32"), ("deepspeed: ds_z3_config.json\n", "bfloat16")])
def test_llama_factorys_full_preferences_have_a_reference_in_16_bits(
    stage: MethodName, more: str, policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were refused: the policy is float32 but under ZeRO-3, the reference has the dtype of autocast."""
    text = (
        f"model_name_or_path: Qwen/Qwen2.5-0.5B\nstage: {stage}\nfinetuning_type: full\ncutoff_len: 512\nbf16: true\n"
    )
    assert run(["estimate", written(tmp_path, text + more), "--gpus", "2xA100-80G", "--json", "--quiet"]) == 0
    dtype = json.loads(capsys.readouterr().out)["settings"]["dtype"]
    assert dtype == policy
    pinned = {"tool": "llamafactory", "tuning": "full", "dtype": dtype}
    job = Job(model=load_model("Qwen2.5-0.5B"), method=stage, pinned=pinned)
    assert single_candidate(job, parse_cluster("1xA100-80G")).reference_load_dtype == "bfloat16"
