"""The table of stops: each row has a source, an example, remedies that remove it, and a line in docs/limits.md."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from planner.candidate import MODEL_FIELDS, Candidate
from planner.errors import InputError
from planner.gpus.cluster import Cluster
from planner.gpus.parse import parse_cluster
from planner.jobs.base_candidate import single_candidate
from planner.jobs.candidate_rules import stop_problems
from planner.jobs.job import Job, PinnedJob
from planner.jobs.stop import Stop
from planner.jobs.stops import STOPS
from planner.models.catalogue import load_model, model_rows
from planner.planning import plan
from planner.training_stack import complete_models
from scripts.citations import citations
from scripts.emulated_jobs import Job as EmulatedJob

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "results" / "emulated.jsonl"
LIMITS = ROOT / "docs" / "limits.md"
BEGINS, ENDS = "<!-- stops -->\n", "<!-- end of stops -->\n"
USUAL = {"model": "SmolLM2-135M", "method": "sft", "num_processes": 2, "sharding": "ddp"}
LORA, NF4 = {"tuning": "lora", "dtype": "bfloat16"}, {"tuning": "lora", "dtype": "bfloat16", "quantization": "nf4"}
STORED = {**NF4, "sharding": "fsdp2", "bnb_4bit_quant_storage": "bfloat16"}
MESH = {"sharding": "distributed", "dtype": "bfloat16", "model": "OLMoE-1B-7B-0924", "ep_size": 2}
BESIDE = {"method": "async-grpo", "num_processes": 1, "sharding": "none", "token_budget": 2048}
QUANTIZED_EXPERTS = {
    **NF4, "quantization": "nf4-experts", "tool": "axolotl", "model": "OLMoE-1B-7B-0924",
    "lora_target_modules": ("q_proj", "v_proj"),
}  # fmt: skip
HALF = {"precision": "fp16", "dtype": "float16"}
# By the beginning of a row's name: GPUs and the settings of a candidate that meets it.
EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "A vLLM without bitsandbytes": (
        "2xA100-80G", {**NF4, "method": "grpo", "model": "Qwen2.5-7B", "vllm": "colocate", "vllm_version": "0.31"},
    ),
    "A torch newer": (
        "2xA100-80G", {
            **LORA, "method": "grpo", "model": "Qwen2.5-7B", "vllm": "colocate", "vllm_version": "0.31",
            "torch_version": "2.14",
        },
    ),
    "A server of vLLM 0.28": (
        "8xA100-80G", {
            **LORA, "method": "grpo", "model": "Qwen2.5-7B", "trl_version": "1.12", "vllm": "server",
            "vllm_version": "0.28",
        },
    ),
    "TF32": ("2xT4", {**HALF, "tf32": True, "sharding": "zero2"}),
    "Weights in bfloat16": ("2xT4", {**LORA, "precision": "fp16"}),
    "bf16 on": ("2xT4", {}),
    "A teacher in bfloat16": ("2xT4", {"method": "distillation", "precision": "fp16", "teacher_dtype": "bfloat16"}),
    "FlashAttention on GPUs": ("2xT4", {**LORA, **HALF, "attn_implementation": "flash_attention_2"}),
    "A reward model": ("2xA100-40G", {"method": "reward", "model": "granite-3.3-2b-instruct"}),
    "A teacher with another vocabulary": (
        "1xA100-80G", {"model": "Qwen2.5-1.5B", "method": "distillation", "teacher_model": "Qwen2.5-7B"},
    ),
    "A teacher of GKD": ("2xA100-40G", {"method": "gkd", "model": "Qwen2.5-VL-3B-Instruct", "sharding": "zero2"}),
    "Liger's kernels for Qwen2": (
        "2xA100-40G", {"model": "Qwen2.5-VL-3B-Instruct", "use_liger_kernel": True, "sharding": "zero2"},
    ),
    "Liger's kernels for reward": (
        "2xA100-40G", {"model": "google/gemma-3-270m", "method": "reward", "use_liger_kernel": True},
    ),
    "The Hub's kernels": (
        "2xA100-80G", {**LORA, "model": "openai/gpt-oss-20b", "attn_implementation": "eager", "use_kernels": True},
    ),
    "LLaMA-Factory's full fine-tuning in": (
        "2xA100-40G", {"tool": "llamafactory", "sharding": "zero3", "dtype": "float32"},
    ),
    "LLaMA-Factory's full fine-tuning of": (
        "2xA100-80G", {"tool": "llamafactory", "sharding": "zero2", "model": "gemma-3-4b-it"},
    ),
    "Cut cross entropy": ("2xA100-40G", {**LORA, "cut_cross_entropy": True}),
    "Axolotl's fused kernels of LoRA (": ("2xA100-40G", {**LORA, "lora_kernels": ("mlp", "qkv", "o")}),
    "Axolotl's fused kernels of LoRA for": (
        "2xA100-40G",
        {**LORA, "tool": "axolotl", "model": "microsoft/Phi-3-mini-4k-instruct", "lora_kernels": ("mlp", "qkv", "o")},
    ),
    "Experts that are quantized at load": (
        "1xA100-80G", {**QUANTIZED_EXPERTS, "tool": "trl", "gradient_checkpointing": True},
    ),
    "Axolotl's `quantize_moe_experts` beside": (
        "1xA100-80G", {**QUANTIZED_EXPERTS, "lora_target_modules": ("all-linear",)},
    ),
    "Axolotl's `quantize_moe_experts` where": ("2xA100-80G", {**QUANTIZED_EXPERTS, "sharding": "fsdp2"}),
    "sdpa for": ("2xA100-40G", {"model": "gemma-2-2b"}),
    "FlashAttention for models": (
        "2xA100-40G", {**LORA, "model": "gemma-4-E2B", "attn_implementation": "flash_attention_2"},
    ),
    "FlashAttention of float32": (
        "2xA100-40G", {"precision": "no", "attn_implementation": "flash_attention_2"},
    ),
    "PPO's adapters": ("2xA100-40G", {**LORA, "method": "ppo", "sharding": "ddp"}),
    "ZeRO-3 in an": ("2xA100-80G", {**BESIDE, "sharding": "zero3"}),
    "ZeRO-1 and ZeRO-2 in an": ("2xA100-80G", {**BESIDE, "sharding": "zero2"}),
    "An asynchronous trainer on": ("2xB200", BESIDE),
    "Packed trees": ("2xA100-80G", {**BESIDE, "model": "Qwen3-Next-80B-A3B-Instruct"}),
    "Rows that GPUs share": ("2xA100-40G", {"sharding": "fsdp2", "cp_size": 2, "attn_implementation": "eager"}),
    "fp16 without": ("2xA100-40G", HALF),
    "16-bit weights": ("2xA100-40G", {"dtype": "bfloat16", "precision": "no", "sharding": "zero3"}),
    "`rmsprop_bnb`": ("2xA100-40G", {"optim": "rmsprop_bnb", "dtype": "bfloat16"}),
    "bitsandbytes' optimizers": ("2xA100-40G", {"optim": "adamw_8bit", "sharding": "fsdp2"}),
    "Adagrad": ("2xA100-40G", {"optim": "adagrad", "sharding": "zero2"}),
    "`activation_offloading` in full": ("2xA100-40G", {"activation_offloading": True, "sharding": "zero3"}),
    "`activation_offloading` and": (
        "2xA100-40G", {**NF4, "quantization": "int8", "activation_offloading": True, "checkpoint_offload": True},
    ),
    "`activation_offloading` where": ("2xA100-40G", {"activation_offloading": True, "checkpoint_every_n_layers": 2}),
    "GRPO, RLOO": (
        "2xA100-40G",
        {"model": "Qwen2.5-1.5B", "method": "grpo", "sharding": "zero3", "ds3_gather_for_generation": False},
    ),
    "Rollouts of Qwen3.5": (
        "2xA100-40G",
        {
            **LORA, "model": "Qwen3.5-0.8B", "method": "grpo", "sharding": "zero3", "ds3_gather_for_generation": False,
        },
    ),
    "Vision-language": ("2xA100-40G", {"model": "gemma-3-4b-it"}),
    "bitsandbytes' weights of": ("2xA100-80G", {**NF4, "model": "openai/gpt-oss-20b", "attn_implementation": "eager"}),
    "Methods that generate under FSDP 1": ("2xA100-40G", {"method": "grpo", "sharding": "fsdp1"}),
    "Parameters offloaded by FSDP 1": ("2xA100-40G", {"sharding": "fsdp1", "offload_param": True}),
    "A reference of its own under FSDP 1": ("2xA100-40G", {"method": "dpo", "sharding": "fsdp1"}),
    "Adapters under FSDP 1": ("2xA100-40G", {**LORA, "method": "dpo", "sharding": "fsdp1"}),
    "Quantized bases under FSDP 1": ("2xA100-40G", {**STORED, "sharding": "fsdp1", "dtype": "float32"}),
    "A2PO under ZeRO-3": ("2xA100-40G", {"method": "a2po", "sharding": "zero3"}),
    "Adapters in A2PO": ("2xA100-40G", {**LORA, "method": "a2po"}),
    "GKD, GOLD": ("2xA100-40G", {"method": "gkd", "sharding": "fsdp2"}),
    "`precompute_ref_log_probs` of": (
        "2xA100-40G", {**LORA, "method": "dpo", "sharding": "fsdp2", "precompute_ref_log_probs": True},
    ),
    "SDPO with adapters": ("2xA100-40G", {**LORA, "method": "sdpo", "sharding": "zero3"}),
    "8-bit weights under FSDP2": ("2xA100-40G", {**NF4, "quantization": "int8", "sharding": "fsdp2"}),
    "8-bit weights under ZeRO-3": ("2xA100-40G", {**NF4, "quantization": "int8", "sharding": "zero3"}),
    "4-bit weights under FSDP2 in": ("2xA100-40G", {**STORED, "precision": "fp16"}),
    "4-bit weights that FSDP2 shards but": ("2xA100-40G", {**STORED, "method": "orpo"}),
    "4-bit weights under ZeRO-3": ("2xA100-40G", {**NF4, "method": "orpo", "sharding": "zero3"}),
    "4-bit weights that FSDP2 shards and": ("2xA100-40G", {**STORED, "offload_param": True}),
    "DoRA, `lora": ("2xA100-40G", {**LORA, "use_dora": True, "sharding": "zero3"}),
    "Adapters on all-linear layers of GPTQ": (
        "2xA100-40G", {**NF4, "model": "Qwen2.5-7B-Instruct-GPTQ-Int4", "quantization": "gptq"},
    ),
    "Adapters on all-linear layers of Llama": ("2xA100-40G", {**LORA, "model": "Phi-3.5-MoE-instruct"}),
    "DoRA on GPTQ": (
        "2xA100-40G",
        {
            **NF4, "model": "Qwen2.5-7B-Instruct-GPTQ-Int4", "quantization": "gptq", "use_dora": True,
            "lora_target_modules": ("q_proj",),
        },
    ),
    "A vLLM engine or server beside": (
        "2xA100-40G", {**LORA, "sharding": "tensor", "method": "grpo", "vllm": "server"},
    ),
    "Transformers' own FSDP2": ("2xA100-40G", {**LORA, **MESH, "method": "dpo"}),
    "Quantized weights and": ("2xA100-40G", {**NF4, **MESH, "lora_target_modules": ("q_proj",)}),
    "`distributed_config` with `fsdp_size` and": ("2xA100-40G", {**MESH, "ep_size": 1}),
    "Adapters on experts under `dist": (
        "2xA100-40G", {**LORA, **MESH, "lora_target_modules": ("all-linear",)},
    ),
    "Tensor parallelism (": ("2xA100-40G", {"sharding": "tensor", "model": "SmolLM2-135M"}),
    "Tensor parallelism across": (
        "2xA100-40G", {"sharding": "tensor", "model": "Qwen2.5-0.5B", "use_liger_kernel": True},
    ),
    "Adapters under `dist": (
        "4xA100-80G",
        {
            **LORA, "sharding": "distributed", "tp_size": 2, "num_processes": 4, "model": "Llama-3.1-8B",
            "lora_target_modules": ("q_proj",),
        },
    ),
    "Adapters on `o_proj`": (
        "2xA100-40G", {**LORA, "sharding": "tensor", "model": "Qwen2.5-0.5B", "lora_target_modules": ("all-linear",)},
    ),
    "`precompute_ref_log_probs` in": (
        "1xA100-40G", {**LORA, "tool": "llamafactory", "method": "dpo", "precompute_ref_log_probs": True},
    ),
    "LLaMA-Factory under FSDP": ("2xA100-40G", {**LORA, "tool": "llamafactory", "sharding": "fsdp2"}),
    "DoRA on 8-bit": ("2xA100-40G", {**NF4, "quantization": "int8", "use_dora": True}),
    "Rows with images": (
        "2xA100-40G",
        {**LORA, "model": "gemma-3-4b-it", "method": "grpo", "images_per_row": 1, "vllm": "colocate"},
    ),
    "`expandable_segments`": (
        "2xA100-40G",
        {
            **LORA, "method": "grpo", "vllm": "colocate", "vllm_tensor_parallel_size": 2, "expandable_segments": True,
        },
    ),
    "Several replicas of a dense": (
        "4xA100-40G",
        {
            **LORA, "method": "grpo", "vllm": "server", "vllm_data_parallel_size": 2, "num_processes": 2,
            "trl_version": "1.10", "model": "Qwen2.5-0.5B",
        },
    ),
    "vLLM beside an 8-bit": ("2xA100-40G", {**NF4, "method": "grpo", "quantization": "int8", "vllm": "colocate"}),
    "vLLM beside a GPTQ": (
        "2xA100-40G",
        {
            **NF4, "model": "Qwen2.5-7B-Instruct-GPTQ-Int4", "method": "grpo", "quantization": "gptq",
            "vllm": "colocate", "lora_target_modules": ("q_proj",),
        },
    ),
    "GPTQ and AWQ checkpoints in a vLLM": (
        "3xA100-40G",
        {
            **NF4, **BESIDE, "model": "Qwen2.5-0.5B-Instruct-GPTQ-Int4", "quantization": "gptq", "vllm": "server",
            "vllm_tensor_parallel_size": 2, "lora_target_modules": ("q_proj",),
        },
    ),
    "FP8 checkpoints with scales": (
        "2x8xH100",
        {**BESIDE, "model": "Qwen/Qwen3-4B-FP8", "vllm": "server", "vllm_tensor_parallel_size": 8},
    ),
    "A vLLM server": ("4xA100-40G", {**NF4, "method": "grpo", "vllm": "server"}),
}  # fmt: skip


def example(stop: Stop) -> tuple[Candidate, str]:
    """The candidate of a stop's example, and its GPUs."""
    gpus, settings = next(each for name, each in EXAMPLES.items() if stop.what.startswith(name))
    changed = {**USUAL, **settings}
    models = {name: changed[name] for name in MODEL_FIELDS if isinstance(changed.get(name), str)}
    loaded = {name: complete_models(print)(load_model(value)) for name, value in models.items()}
    return Candidate(**{**changed, **loaded}), gpus  # type: ignore[arg-type]


def pins_of(candidate: Candidate, cluster: Cluster) -> PinnedJob:
    return PinnedJob(job=Job(model=candidate.model, method=candidate.method), cluster=cluster)


def named(stop: Stop) -> str:
    return stop.what


def test_every_stop_has_one_example() -> None:
    for name in EXAMPLES:
        assert [stop.what for stop in STOPS if stop.what.startswith(name)] != [], name
    found = [[name for name in EXAMPLES if stop.what.startswith(name)] for stop in STOPS]
    assert [len(names) for names in found] == [1] * len(STOPS)


@pytest.mark.parametrize("stop", STOPS, ids=named)
def test_an_example_meets_the_stop_and_each_remedy_removes_it(stop: Stop) -> None:
    candidate, gpus = example(stop)
    cluster = parse_cluster(gpus)
    assert stop.when(candidate, cluster)
    changes = stop.changes(candidate)
    assert changes or stop.otherwise
    for change in changes:
        assert not stop.when(replace(candidate, **change), cluster), change


@pytest.mark.parametrize("stop", STOPS, ids=named)
def test_a_stop_is_the_answer_to_its_example(stop: Stop) -> None:
    """No other row hides it, and its sentence has all values."""
    candidate, gpus = example(stop)
    cluster = parse_cluster(gpus)
    sentence = stop.sentence(candidate, cluster, {})
    assert re.fullmatch(r"[^{}]+\. Use [^{}]+\.", sentence), sentence
    assert next(stop_problems(candidate, pins_of(candidate, cluster)), "") == ("" if stop.estimated else sentence)


@pytest.mark.parametrize("settings", [{"sharding": "ddp"}, {"sharding": "tensor"}], ids=["ddp", "tensor"])
@pytest.mark.parametrize("name", {row.model_type: row.id for row in model_rows()}.values())
def test_every_stop_is_asked_of_every_type_of_model(name: str, settings: dict[str, Any]) -> None:
    """A layer of Nemotron-H has attention or an MLP: every plan of it ended with an IndexError."""
    cluster = parse_cluster("2xH200")
    model = complete_models(print)(load_model(name))
    held = Candidate(model=model, method="sft", num_processes=2, tuning="lora", **settings)
    for candidate in (held, replace(held, tuning="full")):
        met = [stop for stop in STOPS if stop.when(candidate, cluster) and not stop.estimated]
        sentences = [*stop_problems(candidate, pins_of(candidate, cluster))]
        assert sentences == [stop.sentence(candidate, cluster, {}) for stop in met]


@pytest.mark.parametrize("stop", STOPS, ids=named)
def test_every_stop_has_a_source(stop: Stop) -> None:
    """tests/test_citations.py looks up the symbols of these sources."""
    assert [*citations(stop.source)] or re.search(r"[\w/]+\.cpp|flash-attention|liger-kernel|vllm#\d+", stop.source)


def test_the_text_of_a_stop_stands_in_one_place() -> None:
    for stop in STOPS:
        part = max(re.split(r"\{[^}]*\}", stop.cause), key=len).strip()[:40]
        found = subprocess.run(
            ["git", "grep", "-lF", part, "--", "planner"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert found.stdout.split() in ([], ["planner/jobs/stops.py"]), (part, found.stdout)


def test_limits_lists_the_stops() -> None:
    lines = BEGINS + "".join(f"- {stop.what}\n" for stop in STOPS) + ENDS
    page = LIMITS.read_text(encoding="utf-8")
    before, rest = page.split(BEGINS)
    _, after = rest.split(ENDS)
    if os.environ.get("PLAN_REWRITE_GOLDEN"):
        LIMITS.write_text(before + lines + after, encoding="utf-8")
    else:
        assert page == before + lines + after


def test_what_crashed_on_emulated_gpus_is_refused() -> None:
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    crashed = [row for row in rows if row["outcome"] == "crashed"]
    assert len(crashed) >= 16
    for row in crashed:
        cluster = parse_cluster(row["gpus"])
        candidate = EmulatedJob(kind=row["kind"], gpus=row["gpus"], settings=row["settings"]).candidate
        assert [*stop_problems(candidate, pins_of(candidate, cluster))] or candidate.script_casts_to_float32, row


def test_a_job_is_refused_for_the_stop_that_all_its_candidates_meet() -> None:
    pinned = {"optim": "adamw_8bit", "sharding": "fsdp2"}
    job, cluster = Job(model=load_model("Qwen2.5-0.5B"), method="sft", pinned=pinned), parse_cluster("2xA100-40G")
    for judge in (plan, single_candidate):
        with pytest.raises(InputError, match=r"^optim=adamw_8bit stops under FSDP2.*Use --set optim=adamw_torch_fused"):
            judge(job, cluster)  # type: ignore[operator]
    assert plan(replace(job, pinned={"optim": "adamw_8bit"}), cluster).best.candidate.sharding != "fsdp2"
