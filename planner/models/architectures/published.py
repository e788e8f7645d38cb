"""Quantization of a published checkpoint, from its `quantization_config`, or from its name without a config."""

import re

from msgspec import Struct

from planner.errors import InputError
from planner.quantizations import QUANTIZATIONS, Quantization, QuantizationRow


class Published(Struct, frozen=True, kw_only=True):
    """Quantization of a checkpoint. `note`: where this is read from.

    `group_size`: weights of a row that share a scale, -1 if all do.
    """

    quantization: Quantization
    group_size: int = 128
    note: str = ""


NOT_QUANTIZED = Published(quantization="none")
# A scale for each block of 128 x 128 weights, or one for a tensor: transformers 5.23, utils/quantization_config.py,
# `FineGrainedFP8Config`.
BLOCKS: dict[str, object] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
TENSORS: dict[str, object] = {"quant_method": "fp8", "weight_block_size": None}
MXFP4: dict[str, object] = {"quant_method": "mxfp4"}
# `quantization_config` of official weights that are published quantized, by the exact name: copies may be not.
# Source: the published config.json, copied in ai-dynamo/aiconfigurator, model_configs (2026-08), unless said otherwise.
OFFICIAL: dict[str, dict[str, object]] = {
    **dict.fromkeys(
        (
            "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3.2",
            "deepseek-ai/DeepSeek-V4-Flash",  # its experts in 4 bits (`expert_dtype`)
            "moonshotai/Kimi-K2-Instruct", "MiniMaxAI/MiniMax-M2.5", "MiniMaxAI/MiniMax-M2.7",
            # The model cards of DeepSeek-V3 and R1 ("FP8 weights", README 6).
            "deepseek-ai/DeepSeek-V3-Base", "deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-V3.1",
            "deepseek-ai/DeepSeek-R1-0528",
            "moonshotai/Kimi-K2-Base",  # the model card ("checkpoints are stored in the block-fp8 format")
            "MiniMaxAI/MiniMax-M2",  # MiniMax-AI/MiniMax-M2#48: PEFT finds QuantizationMethod.FP8
        ),
        BLOCKS,
    ),
    # vllm-project/recipes, Mistral/Ministral-3-Instruct.md ("comes with FP8 weights"); huggingface/transformers#42715
    # (static scales, one for a tensor; vision tower and head are not converted).
    **{f"mistralai/Ministral-3-{size}-Instruct-2512": TENSORS for size in ("3B", "8B", "14B")},
    "openai/gpt-oss-20b": MXFP4,
    "openai/gpt-oss-120b": MXFP4,
    # INT4 experts: the model card ("native INT4 quantization"); AI-Hypercomputer/maxtext#3768 (compressed-tensors).
    "moonshotai/Kimi-K2-Thinking": {"quant_method": "compressed-tensors"},
}  # fmt: skip
# `intermediate_size` of official checkpoints that were padded with zeros before they were quantized, so that each of 8
# GPUs gets whole groups. Source: QwenLM/Qwen3#258 and #578, QwenLM/Qwen3-VL#231.
PADDED_MLPS: dict[str, int] = {
    **{
        f"Qwen/{name}-Instruct-{ending}": 29696
        for name in ("Qwen2-72B", "Qwen2.5-72B")
        for ending in ("GPTQ-Int4", "GPTQ-Int8", "AWQ")
    },
    "Qwen/Qwen1.5-14B-Chat-GPTQ-Int4": 14336,
}
SUPPORTED = ", ".join(dict.fromkeys(row.words for row in QUANTIZATIONS.values() if row.quantized))


def from_config(config: dict[str, object], model_id: str) -> Published:
    """Read `quantization_config` as transformers writes it (utils/quantization_config.py).

    Raises:
        InputError: the method, its bits or its group size have no formula.
    """
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return NOT_QUANTIZED
    method = str(settings.get("quant_method", "bitsandbytes" if "load_in_4bit" in settings else ""))
    rows = {name: row for name, row in QUANTIZATIONS.items() if method in row.quant_methods}
    if not rows:
        raise InputError(
            f"{model_id} is quantized with {method or 'an unnamed method'}, which has no formula here; "
            f"known are {SUPPORTED}."
        )
    found = next((name for name, row in rows.items() if _agrees(row, settings)), None)
    if found is None:
        raise InputError(
            f"{model_id} is quantized with {method} to {settings.get('bits', settings.get('w_bit'))} bits, which has "
            f"no formula here; known are {SUPPORTED}."
        )
    return Published(quantization=found, group_size=_group_size(settings, rows[found], model_id))


def _agrees(row: QuantizationRow, settings: dict[str, object]) -> bool:
    """Return whether the settings of a method are those of the row; one that is not set agrees."""
    if row.bitsandbytes:
        nested = bool(settings.get("bnb_4bit_use_double_quant")) == bool(row.spelling.get("use_bnb_nested_quant"))
        return row.eight_bit if settings.get("load_in_8bit") else row.four_bit and nested
    return settings.get("bits", settings.get("w_bit", row.bits)) == row.bits


def _group_size(settings: dict[str, object], row: QuantizationRow, model_id: str) -> int:
    if row.scales_blocks:  # vllm 0.31, model_executor/layers/quantization/fp8.py, `Fp8Config.from_config`
        block = settings.get("weight_block_size")
        return row.group_size if block == [row.group_size, row.group_size] else -1
    if not row.own_groups:
        return row.group_size
    group_size = settings.get("group_size", settings.get("q_group_size", row.group_size))
    if not isinstance(group_size, int):
        raise InputError(
            f"The quantization_config of {model_id} has group_size {group_size!r}, which is not a whole number."
        )
    return group_size


def from_name(name: str) -> tuple[str, Published]:
    """Split a name into the original's name and the quantization of its ending.

    Example: `Qwen2.5-7B-Instruct-GPTQ-Int4` -> `Qwen2.5-7B-Instruct`, gptq.
    """
    for quantization, row in QUANTIZATIONS.items():
        match = re.search(row.name_ending + r"$", name, flags=re.IGNORECASE) if row.name_ending else None
        if match and match.start() > 0:
            rows_share = row.scales_blocks and match[0].lower().endswith(("-dynamic", "-static"))
            group_size = -1 if rows_share else row.group_size
            return name[: match.start()], Published(
                quantization=quantization, group_size=group_size, note=row.name_note
            )
    return name, NOT_QUANTIZED


def published_checkpoint(name: str) -> Published:
    """Quantization of the official checkpoint of exactly this name; the catalogue's rows hold only sizes.

    Raises:
        InputError: it has no formula.
    """
    found = OFFICIAL.get(name)
    return NOT_QUANTIZED if found is None else from_config({"quantization_config": found}, name)
