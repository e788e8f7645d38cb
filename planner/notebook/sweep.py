"""Plans of every combination of settings, as a frame: `sweep("Qwen2.5-7B", ["1xL4", "2xA100-40G"], method="sft")`."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from planner.errors import InputError, PlanError
from planner.notebook.answer import plan

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

LIST_SETTINGS = frozenset({"lora_target_modules"})


def sweep(model: str | Sequence[str], gpus: str | Sequence[str], **asked: Any) -> "pd.DataFrame":
    """Plan every combination: a list, tuple or range as an argument of `plan` is an axis, a column of the frame.

    A setting that is a list itself (lora_target_modules) is no axis, but for a list of such lists. A combination that
    the command refuses, or that does not fit, is a row with the reason.

    Example: `sweep("Qwen2.5-7B", ["1xL4", "2xA100-40G"], method="sft", max_length=[1024, 4096, 16384])`.

    Raises:
        PlanError: pandas is not installed, or the command refuses every combination for the same reason.
    """
    from planner.report.frame import frame_of

    given = {"model": model, "gpus": gpus, **asked}
    axes = {name: value for name, value in given.items() if _is_axis(name, value)}
    fixed = {name: value for name, value in given.items() if name not in axes}
    rows = [_row(fixed, dict(zip(axes, values, strict=True))) for values in product(*axes.values())]
    refusals = {row["reason"] for row in rows if "peak_bytes" not in row}
    if len(refusals) == 1 and not any("peak_bytes" in row for row in rows):
        raise InputError(refusals.pop())
    return frame_of(rows)


def plot_cards(frame: "pd.DataFrame", value: str = "tokens_per_second", by: str = "") -> "Figure":
    """Return a plot with a bar for each cluster of a sweep, or one for each value of another axis of it.

    Args:
        frame: what `sweep` returned, with `gpus` as an axis.
        value: the column to compare, such as tokens_per_second, max_length or one that you added.
        by: another column that was an axis of the sweep, such as max_length.

    Example: `plot_cards(sweep("Qwen2.5-7B", ["1xL4", "1xT4"], method="sft", max_length=[512, 2048]), by="max_length")`

    Raises:
        PlanError: plotly is not installed, or the frame has several rows for a bar, or no such column.
    """
    from planner.notebook.figures import cards_figure

    return cards_figure(frame, value, by)


def _is_axis(name: str, value: object) -> bool:
    values = list(value) if isinstance(value, (list, tuple, range)) else []
    return bool(values) and (name not in LIST_SETTINGS or isinstance(values[0], (list, tuple)))


def _row(fixed: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    from planner.report.frame import estimate_figures
    from planner.report.table import nearest_refusal

    asked = {**fixed, **point}
    try:
        answer = plan(asked.pop("model"), asked.pop("gpus"), **asked)
    except PlanError as error:
        return {**point, "fits": False, "reason": str(error)}
    return {**point, **estimate_figures(answer.best), "reason": "" if answer.best.fits else nearest_refusal(answer)}
