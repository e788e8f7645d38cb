"""Predictions compared with measurements, as a table, as JSON and as CSV."""

import csv
import io
from collections.abc import Iterator, Sequence

from rich.text import Text

from planner.measurements.validate import ALL, UNDER, ComparedFigure, GroupErrors, Validation, group_name, summaries
from planner.quantities import Evidence
from planner.report.documents.commands import (
    ComparedFigureReport,
    LeftOutReport,
    OutOfMemoryCaseReport,
    Prediction,
    SummaryReport,
    ValidationReport,
)
from planner.report.documents.fields import SCHEMA
from planner.report.json import DECIMALS, settings_report
from planner.units import format_count, format_size

WORST_SHOWN = 10  # figures, the largest errors first
PREDICTIONS: tuple[Evidence, ...] = ("estimated", "emulated")
QUANTITY_WORDS = {
    "tensors": "tensors: what tensors hold",
    "allocated": "allocated: torch.cuda.max_memory_allocated",
    "reserved": "reserved: torch.cuda.max_memory_reserved, with what the allocator caches",
    "driver": "driver: the whole process, context and NCCL too",
}
GROUP_WIDTH, COUNT_WIDTH, NUMBER_WIDTH, EVIDENCE_WIDTH = 22, 7, 10, 11
CSV_FIELDS = (
    "line",
    "label",
    "group",
    "quantity",
    "measured_bytes",
    *(f"{evidence}{part}" for evidence in PREDICTIONS for part in ("_bytes", "_error")),
)


def validation_table(validation: Validation) -> Text:
    """Return signed errors (predicted / measured - 1) by quantity and group, then the figures with the largest."""
    lines = [Text(_headline(validation), style="bold"), Text()]
    every = summaries(validation)
    for quantity in dict.fromkeys(summary.quantity for summary in every):
        lines += [Text(QUANTITY_WORDS[quantity], style="bold"), Text(_heads(), style="dim")]
        lines += _groups([summary for summary in every if summary.quantity == quantity])
        figures = [figure for figure in validation.figures if figure.quantity == quantity]
        lines += [Text(), *_worst(figures), Text()]
    lines += _out_of_memory(validation)
    lines += _left_out(validation)
    while lines and not lines[-1].plain:
        lines.pop()
    return Text("\n").join(lines)


def validation_report(validation: Validation) -> ValidationReport:
    """Return the document of `plan validate --json`."""
    return ValidationReport(
        schema=SCHEMA,
        interrupted=validation.interrupted,
        under_share=UNDER,
        summaries=tuple(
            SummaryReport(
                group=each.group,
                quantity=each.quantity,
                evidence=each.evidence,
                count=each.count,
                mean=round(each.mean, DECIMALS),
                mean_absolute=round(each.mean_absolute, DECIMALS),
                worst=round(each.worst, DECIMALS),
                under=each.under,
            )
            for each in summaries(validation)
        ),
        rows=tuple(_compared_figure(figure) for figure in validation.figures),
        out_of_memory=tuple(
            OutOfMemoryCaseReport(
                line=each.case.line,
                label=each.case.label,
                settings=settings_report(each.case.candidate),
                foreseen=dict(each.foreseen),
            )
            for each in validation.out_of_memory
        ),
        left_out=tuple(LeftOutReport(line=each.line, why=each.why) for each in validation.left_out),
    )


def validation_csv(validation: Validation) -> str:
    """Return one CSV line for each figure."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=CSV_FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(_csv_row, validation.figures))
    return text.getvalue()


def _csv_row(figure: ComparedFigure) -> dict[str, object]:
    """Return a figure as a flat row; a prediction that it lacks has no cells."""
    row: dict[str, object] = {
        "line": figure.case.line,
        "label": figure.case.label,
        "group": group_name(figure.case.candidate),
        "quantity": figure.quantity,
        "measured_bytes": figure.measured_bytes,
    }
    for evidence, predicted_bytes in figure.predicted.items():
        row[f"{evidence}_bytes"] = predicted_bytes
        row[f"{evidence}_error"] = round(figure.error(evidence), DECIMALS)
    return row


def _headline(validation: Validation) -> str:
    lines = {figure.case.line for figure in validation.figures} | {each.case.line for each in validation.out_of_memory}
    emulated = {figure.case.line for figure in validation.figures if figure.case.evidence == "emulated"}
    parts = [f"{_cases(len(lines))} measured"] if lines != emulated else []
    parts += [f"{_cases(len(emulated))} emulated, on no GPU"] if emulated else []
    parts += [f"{len(validation.out_of_memory)} out of memory"] if validation.out_of_memory else []
    parts += [f"{len(validation.left_out)} left out"] if validation.left_out else []
    parts += ["interrupted"] if validation.interrupted else []
    return " · ".join(parts)


def _cases(count: int) -> str:
    return f"{format_count(count)} {'case' if count == 1 else 'cases'}"


def _heads() -> str:
    heads = ("mean", "mean abs", "worst", f"under {UNDER:.0%}")
    return f"{'':<{GROUP_WIDTH}}{'':<{EVIDENCE_WIDTH}}{'cases':>{COUNT_WIDTH}}" + "".join(
        f"{head:>{NUMBER_WIDTH}}" for head in heads
    )


def _groups(found: Sequence[GroupErrors]) -> Iterator[Text]:
    """One row for each summary; a group's name is in its first row."""
    before = ""
    for each in found:
        name = each.group if each.group != before else ""
        before = each.group
        numbers = (f"{each.mean:+.1%}", f"{each.mean_absolute:.1%}", f"{each.worst:+.1%}", str(each.under))
        line = f"{name:<{GROUP_WIDTH}}{each.evidence:<{EVIDENCE_WIDTH}}{each.count:>{COUNT_WIDTH}}" + "".join(
            f"{number:>{NUMBER_WIDTH}}" for number in numbers
        )
        yield Text(line, style="bold" if each.group == ALL else "")


def _worst(figures: Sequence[ComparedFigure]) -> Iterator[Text]:
    """The figures with the largest errors of the dry run, or of the estimate where there is no dry run."""
    ranked = sorted(figures, key=lambda figure: (-abs(figure.error(_best_prediction(figure))), figure.case.line))
    for figure in ranked[:WORST_SHOWN]:
        predictions = ", ".join(
            f"{format_size(predicted_bytes)} {evidence} ({figure.error(evidence):+.1%})"
            for evidence, predicted_bytes in figure.predicted.items()
        )
        measured = format_size(figure.measured_bytes)
        yield Text(f"line {figure.case.line} {figure.case.label}: {measured} {figure.case.evidence}; {predictions}")


def _best_prediction(figure: ComparedFigure) -> Evidence:
    return "emulated" if "emulated" in figure.predicted else "estimated"


def _out_of_memory(validation: Validation) -> Iterator[Text]:
    """Count the cases that ran out of memory and were predicted not to fit; then name those predicted to fit."""
    for evidence in PREDICTIONS:
        predicted = [each for each in validation.out_of_memory if evidence in each.foreseen]
        missed = [each for each in predicted if not each.foreseen[evidence]]
        if predicted:
            foreseen = len(predicted) - len(missed)
            yield Text(f"out of memory: {foreseen} of {len(predicted)} were {evidence} not to fit")
            yield from (Text(f"line {each.case.line} {each.case.label}: {evidence} to fit") for each in missed)


def _left_out(validation: Validation) -> Iterator[Text]:
    """The reasons for leaving lines out, the most frequent first."""
    lines_by_reason: dict[str, list[int]] = {}
    for each in validation.left_out:
        lines_by_reason.setdefault(each.why, []).append(each.line)
    for why, lines in sorted(lines_by_reason.items(), key=lambda item: -len(item[1])):
        yield Text(f"left out: {len(lines)} (line {lines[0]}{' ...' if len(lines) > 1 else ''}): {why}", style="dim")


def _compared_figure(figure: ComparedFigure) -> ComparedFigureReport:
    return ComparedFigureReport(
        line=figure.case.line,
        label=figure.case.label,
        settings=settings_report(figure.case.candidate),
        gpu=figure.case.gpu.name if figure.case.gpu is not None else None,
        quantity=figure.quantity,
        measured_bytes=figure.measured_bytes,
        evidence=figure.case.evidence,
        predicted={
            evidence: Prediction(bytes=size, error=round(figure.error(evidence), DECIMALS))
            for evidence, size in figure.predicted.items()
        },
    )
