"""Predicted against measured as a table, as JSON and as CSV."""

import csv
import io
from collections.abc import Iterator, Sequence

from rich.text import Text

from planner.jobs.settings import settings_of
from planner.measurements.validate import ALL, UNDER, Row, Summary, Validation, group_of, summaries
from planner.quantities import Evidence
from planner.units import format_count, format_size

SCHEMA = 1
DECIMALS = 6
WORST_SHOWN = 10  # cases, the largest errors first
RUNGS: tuple[Evidence, ...] = ("estimated", "simulated")
QUANTITY_WORDS = {
    "tensors": "tensors: what tensors hold",
    "allocated": "allocated: torch.cuda.max_memory_allocated",
    "reserved": "reserved: torch.cuda.max_memory_reserved, with what the allocator keeps to spare",
    "driver": "driver: the whole process, context and NCCL too",
}
GROUP_WIDTH, COUNT_WIDTH, NUMBER_WIDTH, RUNG_WIDTH = 22, 7, 10, 11


def validation_table(validation: Validation) -> Text:
    """Signed errors, predicted over measured less one, by quantity and group; then the cases with the largest."""
    lines = [Text(_headline(validation), style="bold"), Text()]
    found = summaries(validation)
    for quantity in dict.fromkeys(summary.quantity for summary in found):
        lines += [Text(QUANTITY_WORDS[quantity], style="bold"), Text(_heads(), style="dim")]
        lines += _groups([summary for summary in found if summary.quantity == quantity])
        lines += [Text(), *_worst([row for row in validation.rows if row.quantity == quantity]), Text()]
    lines += _endings(validation)
    lines += _left_out(validation)
    while lines and not lines[-1].plain:
        lines.pop()
    return Text("\n").join(lines)


def validation_report(validation: Validation) -> dict[str, object]:
    """What `plan validate --json` prints: bytes as integers, errors as shares."""
    return {
        "schema": SCHEMA,
        "interrupted": validation.interrupted,
        "under_share": UNDER,
        "summaries": [
            {
                "group": each.group, "quantity": each.quantity, "evidence": each.rung, "count": each.count, "mean": round(each.mean, DECIMALS),
                "mean_absolute": round(each.mean_absolute, DECIMALS), "worst": round(each.worst, DECIMALS), "under": each.under,
            }
            for each in summaries(validation)
        ],
        "rows": [_row(row) for row in validation.rows],
        "out_of_memory": [
            {"line": each.case.line, "label": each.case.label, "settings": settings_of(each.case.candidate), "foreseen": dict(each.foreseen)}
            for each in validation.endings
        ],
        "left_out": [{"line": each.line, "why": each.why} for each in validation.left_out],
    }  # fmt: skip


def validation_csv(validation: Validation) -> str:
    """One line a figure."""
    text = io.StringIO()
    rows = csv_rows(validation)
    writer = csv.DictWriter(text, fieldnames=CSV_FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


CSV_FIELDS = (
    "line",
    "label",
    "group",
    "quantity",
    "measured_bytes",
    *(f"{rung}{part}" for rung in RUNGS for part in ("_bytes", "_error")),
)


def csv_rows(validation: Validation) -> list[dict[str, object]]:
    """The figures as flat rows; a rung that does not speak of a case has empty cells."""
    return [
        {
            "line": row.case.line,
            "label": row.case.label,
            "group": group_of(row.case.candidate),
            "quantity": row.quantity,
            "measured_bytes": row.measured_bytes,
        }
        | {f"{rung}_bytes": row.predicted[rung] for rung in RUNGS if rung in row.predicted}
        | {f"{rung}_error": round(row.error(rung), DECIMALS) for rung in RUNGS if rung in row.predicted}
        for row in validation.rows
    ]


def _row(row: Row) -> dict[str, object]:
    return {
        "line": row.case.line,
        "label": row.case.label,
        "settings": settings_of(row.case.candidate),
        "gpu": row.case.gpu.name if row.case.gpu is not None else None,
        "quantity": row.quantity,
        "measured_bytes": row.measured_bytes,
        "predicted": {
            rung: {"bytes": size, "error": round(row.error(rung), DECIMALS)} for rung, size in row.predicted.items()
        },
    }


def _headline(validation: Validation) -> str:
    cases = len({row.case.line for row in validation.rows} | {each.case.line for each in validation.endings})
    parts = [f"{format_count(cases)} cases measured"]
    parts += [f"{len(validation.endings)} out of memory"] if validation.endings else []
    parts += [f"{len(validation.left_out)} left out"] if validation.left_out else []
    parts += ["interrupted"] if validation.interrupted else []
    return " · ".join(parts)


def _heads() -> str:
    numbers = ("mean", "mean abs", "worst", f"under {UNDER:.0%}")
    return f"{'':<{GROUP_WIDTH}}{'':<{RUNG_WIDTH}}{'cases':>{COUNT_WIDTH}}" + "".join(
        f"{number:>{NUMBER_WIDTH}}" for number in numbers
    )


def _groups(found: Sequence[Summary]) -> Iterator[Text]:
    before = ""
    for each in found:
        name = each.group if each.group != before else ""
        before = each.group
        numbers = (f"{each.mean:+.1%}", f"{each.mean_absolute:.1%}", f"{each.worst:+.1%}", str(each.under))
        line = f"{name:<{GROUP_WIDTH}}{each.rung:<{RUNG_WIDTH}}{each.count:>{COUNT_WIDTH}}" + "".join(
            f"{number:>{NUMBER_WIDTH}}" for number in numbers
        )
        yield Text(line, style="bold" if each.group == ALL else "")


def _worst(rows: Sequence[Row]) -> Iterator[Text]:
    """The cases that the highest rung which speaks of them predicts worst."""
    ranked = sorted(rows, key=lambda row: (-abs(row.error(_highest(row))), row.case.line))
    for row in ranked[:WORST_SHOWN]:
        said = ", ".join(
            f"{format_size(row.predicted[rung])} {rung} ({row.error(rung):+.1%})"
            for rung in RUNGS
            if rung in row.predicted
        )
        yield Text(f"line {row.case.line} {row.case.label}: {format_size(row.measured_bytes)} measured; {said}")


def _highest(row: Row) -> Evidence:
    return "simulated" if "simulated" in row.predicted else "estimated"


def _endings(validation: Validation) -> Iterator[Text]:
    """Who had foreseen that memory would not do."""
    for rung in RUNGS:
        asked = [each for each in validation.endings if rung in each.foreseen]
        missed = [each for each in asked if not each.foreseen[rung]]
        if asked:
            yield Text(f"out of memory: {len(asked) - len(missed)} of {len(asked)} were {rung} not to fit")
            yield from (Text(f"line {each.case.line} {each.case.label}: {rung} to fit") for each in missed)


def _left_out(validation: Validation) -> Iterator[Text]:
    counts: dict[str, list[int]] = {}
    for each in validation.left_out:
        counts.setdefault(each.why, []).append(each.line)
    for why, lines in sorted(counts.items(), key=lambda item: -len(item[1])):
        yield Text(f"left out: {len(lines)} (line {lines[0]}{' ...' if len(lines) > 1 else ''}): {why}", style="dim")
