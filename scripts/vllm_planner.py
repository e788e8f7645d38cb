"""Compare our KV-cache blocks and weights with those that vLLM's own code computed without a GPU.

    python -m scripts.vllm_planner

writes results/vllm_planner.md from tests/data/vllm_planner.jsonl. These rows are of vLLM 0.31's config classes, model
classes on the meta device and KV-cache planner, with a platform, kernels and process groups that were stood in for
(2026-11-24; the code that did so is gone). results/emulated_engine.md has engines that ran unmodified.
"""

import json
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import fields

from planner.memory.engine.blocks import block_layout
from planner.memory.engine.budget import BATCHES_IN_FLIGHT
from planner.memory.engine.weights import engine_weight_bytes
from planner.memory.layers.measured_layers import LayerResult, MeasuringRefused, complete_shipped
from planner.memory.layers.recipe import Recipe
from planner.models.catalogue import load_model
from planner.models.recurrent import cache_is_known
from planner.quantizations import EngineQuantization
from planner.units import GIB

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "tests" / "data" / "vllm_planner.jsonl"
REPORT = ROOT / "results" / "vllm_planner.md"

AVAILABLE_BYTES = 20 * GIB  # what `determine_available_memory` returned, if there were a GPU
MAX_MODEL_LEN = 8192
# Of TRL's colocated engine (trl 1.16, generation/vllm_generation.py) with a batch of 8.
MAX_NUM_BATCHED_TOKENS = 4096
KV_BYTES = {"auto": 2, "fp8": 1}

# Model of the catalogue and the tensor-parallel sizes to ask for.
MODELS: dict[str, tuple[int, ...]] = {
    "Qwen/Qwen2.5-0.5B": (1, 2),
    "Qwen/Qwen2.5-7B": (1, 2, 4),
    "Qwen/Qwen2.5-72B": (1, 2, 4, 8),
    "Qwen/Qwen3-0.6B": (1, 8),
    "Qwen/Qwen3-8B": (1, 2, 8),
    "Qwen/Qwen3-30B-A3B": (1, 4, 8),
    "Qwen/Qwen3-235B-A22B": (4, 8),
    "Qwen/Qwen1.5-MoE-A2.7B": (1, 2),
    "meta-llama/Llama-3.1-8B": (1, 2, 4, 8),
    "meta-llama/Llama-3.2-1B": (1, 8),
    "meta-llama/Llama-3.1-70B": (1, 8),
    "meta-llama/Llama-2-7b-hf": (1, 4),
    "mistralai/Mistral-7B-v0.1": (1, 2, 8),
    "mistralai/Mistral-7B-v0.3": (1,),
    "mistralai/Mistral-Nemo-Base-2407": (1, 4),
    "mistralai/Mixtral-8x7B-v0.1": (1, 8),
    "mistralai/Ministral-8B-Instruct-2410": (1, 2),
    "google/gemma-2b": (1, 2),
    "google/gemma-2-2b": (1, 2),
    "google/gemma-2-9b": (1, 4),
    "google/gemma-3-270m": (1,),
    "google/gemma-3-1b-pt": (1, 2),
    "google/gemma-3-4b-pt": (1, 2, 4),
    "google/gemma-3-27b-pt": (1, 8),
    "google/gemma-4-E2B": (1,),
    "google/gemma-4-12B": (1, 2),
    "google/gemma-4-26B-A4B": (1, 2),
    "google/gemma-4-31B": (1, 4),
    "openai/gpt-oss-20b": (1, 2, 8),
    "openai/gpt-oss-120b": (1, 8),
    "microsoft/phi-4": (1, 2),
    "microsoft/Phi-3-mini-4k-instruct": (1, 4),
    "microsoft/Phi-4-mini-instruct": (1,),
    "microsoft/phi-2": (1,),
    "allenai/OLMo-2-1124-7B": (1, 2),
    "allenai/Olmo-3-1025-7B": (1, 2),
    "allenai/OLMoE-1B-7B-0924": (1,),
    "HuggingFaceTB/SmolLM3-3B": (1, 4),
    "ibm-granite/granite-3.3-8b-instruct": (1, 2),
    "CohereForAI/c4ai-command-r7b-12-2024": (1, 2),
    "CohereForAI/aya-expanse-8b": (1,),
    "zai-org/GLM-4-9B-0414": (1, 2),
    "zai-org/GLM-4.5-Air": (1, 8),
    "LGAI-EXAONE/EXAONE-4.0-32B": (1, 4),
    "baidu/ERNIE-4.5-0.3B-PT": (1,),
    "ByteDance-Seed/Seed-OSS-36B-Base": (1,),
    "EleutherAI/pythia-1b": (1,),
    "openai-community/gpt2": (1,),
    "facebook/opt-1.3b": (1,),
    "tiiuae/falcon-7b": (1,),
    "stabilityai/stablelm-2-1_6b": (1,),
    "bigcode/starcoder2-3b": (1,),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (1, 8),
    "deepseek-ai/DeepSeek-V2-Lite": (1, 4),
    "deepseek-ai/DeepSeek-V3": (1, 8),
    "moonshotai/Moonlight-16B-A3B": (1, 2),
    "Qwen/Qwen3-VL-8B-Instruct": (1,),
    "Qwen/Qwen3.5-4B": (1, 2),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (1, 2),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": (1, 2),
    "ibm-granite/granite-4.0-h-micro": (1,),
    "LiquidAI/LFM2-1.2B": (1, 2),
}
# Models to ask again with an fp8 KV cache, and with each quantization of the checkpoint.
FP8_CACHE = ("Qwen/Qwen2.5-7B", "google/gemma-3-4b-pt", "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V2-Lite")
QUANTIZED = ("Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B")
QUANTIZATION_CONFIGS: dict[EngineQuantization, dict[str, Any]] = {
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "modules_in_block_to_quantize": [["self_attn", "mlp"]],
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
# Causes of the differences that remain.
CAUSES = {
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "chunked attention is counted as full attention here",
    "HuggingFaceTB/SmolLM3-3B": "runs through Transformers, without a rotary table",
    "allenai/Olmo-3-1025-7B": "runs through Transformers, without a rotary table",
    "google/gemma-4-31B": "vLLM keeps a value projection that equals the key projection",
    "google/gemma-3-27b-pt": "the vision encoder's norms and biases are whole on every GPU",
    "google/gemma-3-4b-pt": "the vision encoder's norms and biases are whole on every GPU",
}


class Case(Struct, frozen=True, kw_only=True):
    """One engine. `quantization` is the checkpoint's."""

    model: str
    tensor_parallel_size: int = 1
    kv_cache_dtype: str = "auto"
    quantization: EngineQuantization = "none"
    max_model_len: int = MAX_MODEL_LEN


class Answer(Struct, frozen=True, kw_only=True):
    """The figures of one engine on one GPU. `tokens` and `concurrency` are those that vLLM logs at start-up."""

    num_blocks: int
    tokens: int
    concurrency: float
    weights_bytes: int  # parameters and buffers


def cases() -> list[Case]:
    found = [Case(model=model, tensor_parallel_size=size) for model, sizes in MODELS.items() for size in sizes]
    found += [Case(model=model, kv_cache_dtype="fp8") for model in FP8_CACHE]
    found += [Case(model=model, quantization=kind) for model in QUANTIZED for kind in QUANTIZATION_CONFIGS]
    return found


class Comparison(Struct, frozen=True, kw_only=True):
    """vLLM's answer for one case, ours, and the reason if there is none of ours."""

    case: Case
    vllm: Answer
    kinds: tuple[str, ...]  # of vLLM's KV-cache specs
    ours: Answer | None
    why_not: str = ""


def our_answer(case: Case) -> Answer | str:
    """Our figures for one engine, or the reason why we have none."""
    model = load_model(case.model)
    if not model.known:
        model = complete_shipped(model, _no_recipe) or model
    if not model.known or not cache_is_known(model):
        return "state space or linear attention: refused"
    layout = block_layout(model, case.tensor_parallel_size, KV_BYTES[case.kv_cache_dtype])
    in_flight_tokens = BATCHES_IN_FLIGHT * MAX_NUM_BATCHED_TOKENS
    max_model_len = min(case.max_model_len, model.max_position_embeddings)
    tokens, concurrency = layout.tokens_and_concurrency(AVAILABLE_BYTES, max_model_len, in_flight_tokens)
    return Answer(
        num_blocks=AVAILABLE_BYTES // layout.bytes_per_block,
        tokens=tokens,
        concurrency=concurrency,
        weights_bytes=engine_weight_bytes(model, case.tensor_parallel_size, case.quantization),
    )


def _no_recipe(recipe: Recipe) -> LayerResult:
    return MeasuringRefused(reason="no training here")


def comparisons() -> list[Comparison]:
    """Every row of the file of vLLM's figures, beside ours."""
    found = []
    for line in ROWS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        case, vllm = (kind(**{field.name: row[field.name] for field in fields(kind)}) for kind in (Case, Answer))
        ours = our_answer(case)
        found.append(
            Comparison(
                case=case,
                vllm=vllm,
                kinds=tuple(row["specs"]),
                ours=ours if isinstance(ours, Answer) else None,
                why_not=ours if isinstance(ours, str) else CAUSES.get(case.model, ""),
            )
        )
    return found


def _line(row: Comparison) -> str:
    case, vllm, ours = row.case, row.vllm, row.ours
    kinds = " + ".join(kind.removesuffix("Spec") for kind in row.kinds)
    head = f"| {case.model} | {case.tensor_parallel_size} | {case.quantization} | {case.kv_cache_dtype} | {kinds} "
    theirs = f"| {vllm.num_blocks:,} | {vllm.tokens:,} | {vllm.concurrency:.2f} | {vllm.weights_bytes / GIB:.3f} "
    if ours is None:
        return f"{head}{theirs}| | | | {row.why_not} |"
    kv = "equal" if (vllm.num_blocks, vllm.tokens) == (ours.num_blocks, ours.tokens) else "differs"
    error = ours.weights_bytes / vllm.weights_bytes - 1
    return f"{head}{theirs}| {ours.num_blocks:,} | {ours.tokens:,} ({kv}) | {error:+.2%} | {row.why_not} |"


def report() -> str:
    rows = comparisons()
    answered = [row for row in rows if row.ours is not None]
    equal = [row for row in answered if row.ours and row.ours.num_blocks == row.vllm.num_blocks]
    errors = [abs(row.ours.weights_bytes / row.vllm.weights_bytes - 1) for row in answered if row.ours]
    lines = [
        "# KV-cache blocks and weights: vLLM 0.31's own code against ours",
        "",
        "Written by `python -m scripts.vllm_planner` from `tests/data/vllm_planner.jsonl`, which holds what",
        "vLLM computed without a GPU (its docstring says how). Each engine has 20 GiB for its KV cache, max_model_len",
        "8,192 (or the model's positions, if those are fewer), 8 sequences, 4,096 tokens a batch, on an H100.",
        "Models are vLLM's real classes on the meta device; the bytes of weights are their parameters and buffers.",
        "",
        f"- {len(rows)} engines of {len({row.case.model for row in rows})} models; {len(answered)} have formulas here.",
        f"- Blocks: {len(equal)} of {len(answered)} equal, and with them tokens and concurrency.",
        f"- Weights: mean of the absolute errors {sum(errors) / len(errors):.2%}, worst {max(errors):.2%}.",
        "",
        "| model | tp | weights | cache | vLLM's specs | blocks | tokens | sequences | weights GiB "
        "| our blocks | our tokens | our weights | note |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *map(_line, rows),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    REPORT.write_text(report(), encoding="utf-8")
