"""The catalogues as text: `plan models` and `plan gpus`."""

from collections.abc import Iterable, Sequence

from planner.gpus.catalogue import GpuRow
from planner.models.catalogue import ModelRow
from planner.units import format_gib

BILLION = 1e9


def models_listing(rows: Iterable[ModelRow]) -> str:
    """Return a line for each model.

    Activations: `formula`, computed; `dry run`, measured on one layer of each kind, which needs the extra dryrun.
    """
    lines = [
        (row.id, f"{row.params / BILLION:.2f} B", row.dtype, row.model_type, "formula" if row.known else "dry run")
        for row in rows
    ]
    return _columns(("model", "parameters", "dtype", "model_type", "activations"), lines)


def gpus_listing(rows: Iterable[GpuRow]) -> str:
    """Return a line for each card. Memory from: `driver`, a driver's log; else how it was derived."""
    lines = [
        (
            row.gpu.name,
            format_gib(row.gpu.total_bytes),
            "yes" if row.gpu.supports_bf16 else "no",
            "driver" if row.reported else row.derived,
            ", ".join(row.aliases),
        )
        for row in rows
    ]
    return _columns(("gpu", "memory", "bf16", "memory from", "also called"), lines)


def _columns(heads: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[column]) for line in (heads, *lines)) for column in range(len(heads))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in (heads, *lines)
    )
