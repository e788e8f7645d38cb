"""Compare the computed memory of the vLLM engine with vLLM's start-up logs (tests/data/vllm.jsonl).

python scripts/engine_report.py            writes results/engine.md
"""

import json
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from planner.gpus.catalogue import bare_gpu
from planner.memory.engine.blocks import block_layout
from planner.memory.engine.budget import (
    EngineMemory,
    EngineRefusal,
    EngineSettings,
    engine_or_refusal,
)
from planner.memory.engine.weights import engine_weight_bytes, lora_slot_bytes
from planner.models.catalogue import load_model
from planner.models.shape import ModelShape
from planner.quantizations import EngineQuantization
from planner.units import GIB

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "tests" / "data" / "vllm.jsonl"
REPORT = ROOT / "results" / "engine.md"

# The catalogue's name of a row's model, or of the model that is its language model.
MODELS = {
    "vllm-uns-llama32-3b-a100": "Llama-3.2-3B",
    "vllm-uns-llama32-3b-t4": "Llama-3.2-3B",
    "vllm-synth-llama32-3b-t4": "Llama-3.2-3B",
    "vllm-uns-llama32-1b-fp8-l4": "Llama-3.2-1B",
    "vllm-uns-mistral7b-bnb-4090": "Mistral-7B-v0.3",
    "vllm-uns-qwen25-3b-bnb-t4": "Qwen2.5-3B",
    "vllm-uns-qwen3-4b-t4": "Qwen3-4B",
    "vllm-uns-qwen3-8b-fp8-l4": "Qwen3-8B",
    "vllm-uns-phi4-bnb-a100": "microsoft/phi-4",
    "vllm-qwen25-7b-24g": "Qwen2.5-7B",
    "vllm-qwen25-7b-v084": "Qwen2.5-7B",
    "vllm-qwen25-15b-t4-a": "Qwen2.5-1.5B",
    "vllm-qwen25-15b-t4-b": "Qwen2.5-1.5B",
    "vllm-r1-qwen3-8b-tp4": "Qwen3-8B",
    "vllm-llama31-8b-a10g-oom": "Llama-3.1-8B",
    "vllm-qwen25-7b-awq-4060-fail": "Qwen2.5-7B",
    "vllm-llama2-7b-h100-gie": "meta-llama/Llama-2-7b-hf",
    "vllm-llama31-70b-w8a8-80g": "Llama-3.1-70B",
    "vllm-moe-gptq-16x3090": "deepseek-ai/DeepSeek-V3",
    "vllm-qwen25-15b-spark": "Qwen2.5-1.5B",
    "vllm-qwen3vl-235b-8a100": "Qwen/Qwen3-235B-A22B",  # the language model of Qwen3-VL-235B-A22B
}
NO_MODEL = {
    "vllm-kimi-linear-tp2": "linear attention has no formula here",
    "vllm-qwen3-30b-240k": "the log does not say which model takes 55.22 GiB",
    "vllm-lingshu32b-tp1": "Qwen2.5-VL has no formula here",
    "vllm-lingshu32b-tp2": "Qwen2.5-VL has no formula here",
}
# A checkpoint with more positions than the catalogue's row of its shape (deepseek-ai/DeepSeek-R1-0528-Qwen3-8B,
# config.json).
MAX_POSITION_EMBEDDINGS = {"vllm-r1-qwen3-8b-tp4": 131072}
# The engine's settings where the log's command does not name them: the defaults of vLLM 0.7 to 0.11
# (engine/arg_utils.py).
DEFAULT_MAX_NUM_SEQS = 256
# max_model_len where that is longer, unless the prompt is chunked, which began above 32,768.
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
CHUNKED_FROM = 32768
DEFAULT_LORA_RANK = 16


class Row(Struct, frozen=True, kw_only=True):
    """One start-up log and the settings of its engine. Printed figures are in GiB; None: not printed."""

    id: str
    model: ModelShape | None
    config: dict[str, Any]
    measured: dict[str, Any]
    why_not: str  # why nothing can be computed end to end

    @property
    def tensor_parallel_size(self) -> int:
        return int(self.config["tensor_parallel"])

    @property
    def max_model_len(self) -> int:
        assert self.model is not None
        # The size of the KV cache does not depend on it.
        return self.config["max_model_len"] or DEFAULT_MAX_NUM_BATCHED_TOKENS

    @property
    def quantization(self) -> EngineQuantization:
        text = f"{self.config.get('quantization', '')} {self.id}".lower()
        if "bnb" in text or "bitsandbytes" in text:
            return "bitsandbytes-nested" if self.config.get("unsloth_patched") else "bitsandbytes"
        kinds: dict[str, EngineQuantization] = {"awq": "awq", "gptq": "gptq", "w8a8": "w8a8", "fp8": "fp8"}
        return next((kind for word, kind in kinds.items() if word in text), "none")

    def settings(self) -> EngineSettings:
        lora = bool(self.config.get("lora_enabled"))
        unset = self.max_model_len if self.max_model_len <= CHUNKED_FROM else 0
        return EngineSettings(
            gpu_memory_utilization=self.config["gpu_memory_utilization"],
            max_model_len=self.max_model_len,
            max_num_seqs=self.config.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS),
            max_num_batched_tokens=self.config.get(
                "max_num_batched_tokens", max(unset, DEFAULT_MAX_NUM_BATCHED_TOKENS)
            ),
            tensor_parallel_size=self.tensor_parallel_size,
            quantization=self.quantization,
            enforce_eager=self.config.get("enforce_eager", False),
            max_lora_rank=self.config.get("max_lora_rank", DEFAULT_LORA_RANK) if lora else 0,
            max_loras=int(lora),
            version="0.11",  # every row is of 0.7 to 0.11
        )

    def weights_bytes(self) -> int:
        assert self.model is not None
        lora = bool(self.config.get("lora_enabled"))
        rank = self.config.get("max_lora_rank", DEFAULT_LORA_RANK)
        slots = lora_slot_bytes(self.model, self.tensor_parallel_size, rank, int(lora))
        return engine_weight_bytes(self.model, self.tensor_parallel_size, self.quantization) + slots

    def computed(self) -> EngineMemory | EngineRefusal:
        assert self.model is not None and not self.why_not
        return engine_or_refusal(
            self.model, bare_gpu(round(self.measured["total_gpu_memory_gib"] * GIB)), self.settings()
        )

    def tokens_of(self, kv_cache_gib: float) -> int:
        """KV tokens from the printed size of the KV cache."""
        assert self.model is not None
        layout = block_layout(self.model, self.tensor_parallel_size, 2)
        in_flight_tokens = DEFAULT_MAX_NUM_BATCHED_TOKENS
        return layout.tokens_and_concurrency(round(kv_cache_gib * GIB), self.max_model_len, in_flight_tokens)[0]


def rows() -> list[Row]:
    found = []
    for line in ROWS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        model = load_model(MODELS[row["id"]]) if row["id"] in MODELS else None
        if model is not None and row["id"] in MAX_POSITION_EMBEDDINGS:
            model = replace(model, max_position_embeddings=MAX_POSITION_EMBEDDINGS[row["id"]])
        why_not = NO_MODEL.get(row["id"], "")
        if not why_not and row["config"]["gpu_memory_utilization"] is None:
            why_not = "the log does not print the utilization"
        if not why_not and row["measured"]["total_gpu_memory_gib"] is None:
            why_not = "the log does not print the GPU's memory"
        found.append(Row(id=row["id"], model=model, config=row["config"], measured=row["measured"], why_not=why_not))
    return found


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _line(row: Row) -> str:
    printed = row.measured
    if row.model is None:
        head = f"| {row.id} | | {_cell(printed['model_weights_gib'])} "
        return f"{head}| | | | {_cell(printed['kv_cache_gib'])} | {row.why_not} |"
    weights = row.weights_bytes() / GIB
    head = f"| {row.id} | {_cell(weights)} | {_cell(printed['model_weights_gib'])} "
    printed_peak, printed_kv = _cell(printed["activation_peak_gib"]), _cell(printed["kv_cache_gib"])
    if row.why_not:
        return f"{head}| | {printed_peak} | | {printed_kv} | {row.why_not} |"
    answer = row.computed()
    if isinstance(answer, EngineRefusal):
        return f"{head}| | {printed_peak} | refused | {printed_kv} | the engine {printed['outcome']} |"
    kv = answer.kv_cache_bytes / GIB
    activation = answer.activation_peak_bytes / GIB
    note = f"{kv - printed['kv_cache_gib']:+.2f} GiB, {kv / printed['kv_cache_gib'] - 1:+.1%}"
    return f"{head}| {_cell(activation)} | {printed_peak} | {_cell(kv)} | {printed_kv} | {note} |"


def kv_errors(printed_sequences: bool) -> dict[str, float]:
    """Computed less printed KV cache in GiB, of the rows that print enough and whose engine starts in both.

    `printed_sequences`: only rows whose log gives max_num_seqs, which sizes the sampler; False: only the other rows.
    """
    errors = {}
    for row in rows():
        answer = row.computed() if row.model is not None and not row.why_not else None
        if isinstance(answer, EngineMemory) and ("max_num_seqs" in row.config) == printed_sequences:
            errors[row.id] = answer.kv_cache_bytes / GIB - row.measured["kv_cache_gib"]
    return errors


def budget_shares(errors: dict[str, float]) -> list[float]:
    """Errors in GiB as shares of the engine's budget, sorted."""
    by_id = {row.id: row for row in rows()}
    return sorted(
        error / (by_id[id].measured["total_gpu_memory_gib"] * by_id[id].config["gpu_memory_utilization"])
        for id, error in errors.items()
    )


def _summary(printed_sequences: bool) -> str:
    errors = kv_errors(printed_sequences)
    shares = budget_shares(errors)
    mean = sum(abs(share) for share in shares) / len(shares)
    which = (
        "print the number of sequences"
        if printed_sequences
        else f"do not ({DEFAULT_MAX_NUM_SEQS}, the default, is taken)"
    )
    return (
        f"- {len(errors)} rows {which}: KV cache computed less printed, of the engine's budget: "
        f"median {median(shares):+.1%}, "
        f"mean of the absolute errors {mean:.1%}, from {shares[0]:+.1%} to {shares[-1]:+.1%}."
    )


def report() -> str:
    lines = [
        "# The vLLM engine, computed against printed",
        "",
        "Written by `python scripts/engine_report.py` from the 25 start-up logs in `tests/data/vllm.jsonl`",
        "(vLLM 0.7 to 0.11; GiB). Weights, activations, memory outside torch and so the KV cache are computed from the",
        "model's config and the engine's settings alone. Three constants are medians over these same rows",
        "(`planner/memory/engine/profile_run.py`); none is set for a row.",
        "",
        "| row | weights | printed | activation peak | printed | KV cache | printed | error of the KV cache |",
        "|---|---|---|---|---|---|---|---|",
        *(_line(row) for row in rows()),
        "",
        _summary(True),
        _summary(False),
        "",
        "The logs are of vLLM's older model runner, whose sampler sorts. The formulas for the runner that trl 1.16",
        "starts (vLLM 0.22 to 0.31) were read from its source; no published log of it is here.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    REPORT.write_text(report(), encoding="utf-8")
    print(report())
