"""Quantization of a published checkpoint, from its `quantization_config`, or from its name without a config."""

import re
from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from planner.errors import InputError

Quantization = Literal["none", "gptq", "awq", "nf4", "nf4-double", "int8", "fp8", "mxfp4"]


class Published(Struct, frozen=True, kw_only=True):
    """Quantization of a checkpoint. `group_size`: weights that share a scale. `note`: where this is read from."""

    quantization: Quantization
    group_size: int = 128
    note: str = ""


NOT_QUANTIZED = Published(quantization="none")
SUPPORTED = "GPTQ and AWQ with 4 bits, bitsandbytes with 4 (nf4) or 8 bits, FP8 and MXFP4"

# bitsandbytes/nn/modules.py, `Params4bit.__new__` quantizes 4-bit weights in blocks of 64; OCP MX v1.0, table 1: blocks
# of 32.
NF4_BLOCK_SIZE = 64
MXFP4_BLOCK_SIZE = 32


def from_config(config: dict[str, object], model_id: str) -> Published:
    """Read `quantization_config` as transformers writes it (utils/quantization_config.py).

    Raises:
        InputError: the method, its bits or its group size have no formula.
    """
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return NOT_QUANTIZED
    method = str(settings.get("quant_method", "bitsandbytes" if "load_in_4bit" in settings else ""))
    if method not in _METHODS:
        raise InputError(
            f"{model_id} is quantized with {method or 'an unnamed method'}, which has no formula here; "
            f"known are {SUPPORTED}."
        )
    return _METHODS[method](settings, model_id)


def _four_bit_groups(kind: Literal["gptq", "awq"]) -> Callable[[dict[str, object], str], Published]:
    def read(settings: dict[str, object], model_id: str) -> Published:
        bits = settings.get("bits", settings.get("w_bit", 4))
        if bits != 4:
            raise InputError(
                f"{model_id} is quantized with {kind} to {bits} bits, which has no formula here; known are {SUPPORTED}."
            )
        group_size = settings.get("group_size", settings.get("q_group_size", 128))
        if not isinstance(group_size, int):
            raise InputError(
                f"The quantization_config of {model_id} has group_size {group_size!r}, which is not a whole number."
            )
        return Published(quantization=kind, group_size=group_size)

    return read


def _bitsandbytes(settings: dict[str, object], model_id: str) -> Published:
    if settings.get("load_in_8bit"):
        return Published(quantization="int8")
    double = bool(settings.get("bnb_4bit_use_double_quant"))
    return Published(quantization="nf4-double" if double else "nf4", group_size=NF4_BLOCK_SIZE)


def _fp8(settings: dict[str, object], model_id: str) -> Published:
    return Published(quantization="fp8")


def _mxfp4(settings: dict[str, object], model_id: str) -> Published:
    return Published(quantization="mxfp4", group_size=MXFP4_BLOCK_SIZE)


_METHODS: dict[str, Callable[[dict[str, object], str], Published]] = {
    "gptq": _four_bit_groups("gptq"),
    "awq": _four_bit_groups("awq"),
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
}

# Endings of checkpoint names on the Hub, longest first, as Qwen, unsloth, neuralmagic and TheBloke write them.
# None: 8-bit GPTQ, which has no formula.
_GROUPS_NOTE = "taken from the name: 4 bits, 128 weights a scale, as its publishers make them"
_SUFFIXES: tuple[tuple[str, Published | None], ...] = (
    (r"-gptq-int8", None),
    (r"-gptq(-int4|-4bit)?(-128g)?", Published(quantization="gptq", note=_GROUPS_NOTE)),
    (r"-awq(-int4|-4bit)?", Published(quantization="awq", note=_GROUPS_NOTE)),
    (
        r"(-unsloth)?-bnb-4bit",
        Published(
            quantization="nf4",
            group_size=NF4_BLOCK_SIZE,
            note="taken from the name: nf4 without double quantization, the larger of the two",
        ),
    ),
    (r"-bnb-8bit", Published(quantization="int8", note="taken from the name")),
    (r"-fp8(-dynamic|-static)?", Published(quantization="fp8", note="taken from the name")),
)


def from_name(name: str) -> tuple[str, Published]:
    """Split a name into the original's name and the quantization of its ending.

    Example: `Qwen2.5-7B-Instruct-GPTQ-Int4` -> `Qwen2.5-7B-Instruct`, gptq.

    Raises:
        InputError: the ending means 8-bit GPTQ, which has no formula.
    """
    for ending, published in _SUFFIXES:
        match = re.search(ending + r"$", name, flags=re.IGNORECASE)
        if match and match.start() > 0:
            if published is None:
                raise InputError(
                    f"{name} is quantized to 8 bits with GPTQ, which has no formula here; known are {SUPPORTED}."
                )
            return name[: match.start()], published
    return name, NOT_QUANTIZED


# Checkpoints whose official weights are quantized; the catalogue's rows hold only their sizes. Source: the model cards
# of gpt-oss ("MoE weights post-trained with MXFP4"), DeepSeek-V3 and R1 ("FP8 weights", README 6).
_OFFICIAL_WEIGHTS: dict[str, Published] = {
    "openai/gpt-oss-20b": Published(quantization="mxfp4", group_size=MXFP4_BLOCK_SIZE),
    "openai/gpt-oss-120b": Published(quantization="mxfp4", group_size=MXFP4_BLOCK_SIZE),
    "deepseek-ai/DeepSeek-V3": Published(quantization="fp8"),
    "deepseek-ai/DeepSeek-V3-Base": Published(quantization="fp8"),
    "deepseek-ai/DeepSeek-V3-0324": Published(quantization="fp8"),
    "deepseek-ai/DeepSeek-V3.1": Published(quantization="fp8"),
    "deepseek-ai/DeepSeek-R1": Published(quantization="fp8"),
    "deepseek-ai/DeepSeek-R1-0528": Published(quantization="fp8"),
}


def published_checkpoint(name: str) -> Published:
    """Quantization of the official checkpoint of exactly this name."""
    return _OFFICIAL_WEIGHTS.get(name, NOT_QUANTIZED)
