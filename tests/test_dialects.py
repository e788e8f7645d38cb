"""Configs of other tools: each is recognized by its keys, and read as its tool runs it or refused by name."""

from pathlib import Path

import pytest

from planner.commands.main import run

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
    "Axolotl": (
        "base_model: NousResearch/Llama-3.2-1B\nadapter: qlora\nload_in_4bit: true\nsequence_len: 2048\nlora_r: 32\n"
        "micro_batch_size: 2\nrl: dpo\n",
        "--model NousResearch/Llama-3.2-1B --max-length 2048 --batch-size 2 --lora-r 32 --method dpo",
    ),
    "LLaMA-Factory": (
        "model_name_or_path: Qwen/Qwen3-4B-Instruct-2507\nstage: sft\nfinetuning_type: lora\nlora_rank: 8\n"
        "cutoff_len: 2048\nper_device_train_batch_size: 1\n",
        "--model Qwen/Qwen3-4B-Instruct-2507 --max-length 2048 --batch-size 1 --lora-r 8 --method sft",
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
    assert f"is a config of {name}, which plan does not read. Say it in flags: plan {flags}, or in" in said


@pytest.mark.parametrize("tool", UNREAD)
def test_the_flags_of_that_refusal_are_planned(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*UNREAD[tool][1].split(), "--gpus", "8xH100", "--quiet"]) in (0, 3)
