"""Quantization of a published checkpoint, from its `quantization_config`, or from its name without a config."""

import re

from msgspec import Struct

from planner.errors import InputError
from planner.quantizations import QUANTIZATIONS, Quantization, QuantizationRow


class Published(Struct, frozen=True, kw_only=True):
    """Quantization of a checkpoint. `group_size`: weights that share a scale. `note`: where this is read from."""

    quantization: Quantization
    group_size: int = 128
    note: str = ""


NOT_QUANTIZED = Published(quantization="none")
SUPPORTED = ", ".join(row.words for row in QUANTIZATIONS.values() if row.quantized)


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
            return name[: match.start()], Published(
                quantization=quantization, group_size=row.group_size, note=row.name_note
            )
    return name, NOT_QUANTIZED


def published_checkpoint(name: str) -> Published:
    """Quantization of the official checkpoint of exactly this name; the catalogue's rows hold only sizes."""
    rows = ((quantization, row) for quantization, row in QUANTIZATIONS.items() if name in row.official)
    return next((Published(quantization=found, group_size=row.group_size) for found, row in rows), NOT_QUANTIZED)
