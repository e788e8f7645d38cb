"""Lists: the catalogues of `plan models` and `plan gpus`; one job on several clusters, or under two releases."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import wrap

from msgspec import Struct
from rich.table import Table
from rich.text import Text

from planner.errors import InputError, shortened
from planner.gpus.catalogue import GpuRow, gpu_rows
from planner.gpus.cluster import Gpu
from planner.gpus.prices import MILLION
from planner.jobs.releases import Change, changes
from planner.jobs.settings import trl_arguments
from planner.measurements.own_results import OwnResult
from planner.models.catalogue import ModelRow, model_rows
from planner.planning import Plan
from planner.quantities import Component, Estimate, Phase
from planner.report.documents.commands import (
    ChangeReport,
    ClusterReport,
    ComparisonReport,
    DiffReport,
    GpusReport,
    KnownGpu,
    KnownModel,
    ModelsReport,
)
from planner.report.documents.fields import SCHEMA
from planner.report.json import estimate_report, plan_report
from planner.report.sentences import CLASS_LABELS
from planner.report.table import nearest_refusal
from planner.report.words import (
    bare_gib,
    describe_candidate,
    describe_excess,
    describe_fit,
    describe_probability,
    readable,
    tightest,
    tokens_per_second,
    verdict_style,
)
from planner.rows.lengths import RowLengths
from planner.search.fit import impractical
from planner.search.knobs import tuning_class_of
from planner.settings.vllm_releases import TORCH_OF_VLLM, required
from planner.units import GIB, format_count, format_gib

BILLION = 1e9
GAP = "  "


def models_named(word: str | None) -> list[ModelRow]:
    """Return the models of the catalogue that have a word in a name or their type; None: all.

    Raises:
        InputError: none has.
    """
    rows = [row for row in model_rows() if _named(word, row.id, *row.aliases, row.model_type)]
    _refuse_none(rows, word, "model", "plan models lists all; another model is given as a path or org/name.")
    return rows


def gpus_named(word: str | None) -> list[GpuRow]:
    """Return the cards of the catalogue that have a word in a name; None: all.

    Raises:
        InputError: none has.
    """
    rows = [row for row in gpu_rows() if _named(word, row.gpu.name, *row.aliases)]
    _refuse_none(rows, word, "GPU", "plan gpus lists all; --gpus takes a capacity too, such as 1x24GiB.")
    return rows


def _named(word: str | None, *names: str) -> bool:
    """Return whether one of the names has the word in it; case, spaces, hyphens and underscores make no difference."""
    return word is None or any(_plain(word) in _plain(name) for name in names)


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character not in " -_")


def _refuse_none(rows: Sequence[object], word: str | None, kind: str, hint: str) -> None:
    """Refuse a word that no entry has in a name."""
    if not rows:
        raise InputError(f"No {kind} has {shortened(word)!r} in its name: {hint}")


def models_listing(rows: Iterable[ModelRow]) -> str:
    """Return a line for each model.

    Activations: `formula`, computed; `measured layers`, on one layer of each kind, which needs the extra training.
    """
    lines = [
        (
            row.id,
            f"{row.params / BILLION:.2f} B",
            row.dtype,
            row.model_type,
            "formula" if row.known else "measured layers",
        )
        for row in rows
    ]
    return _columns(("model", "parameters", "dtype", "model_type", "activations"), lines)


def models_report(rows: Iterable[ModelRow]) -> ModelsReport:
    """Return the document of `plan models --json`."""
    return ModelsReport(
        schema=SCHEMA,
        models=tuple(
            KnownModel(
                id=row.id,
                aliases=row.aliases,
                params=row.params,
                dtype=row.dtype,
                model_type=row.model_type,
                activations="formula" if row.known else "measured layers",
            )
            for row in rows
        ),
    )


def gpus_report(rows: Iterable[GpuRow]) -> GpusReport:
    """Return the document of `plan gpus --json`."""
    return GpusReport(
        schema=SCHEMA,
        gpus=tuple(
            KnownGpu(
                name=row.gpu.name,
                aliases=row.aliases,
                total_bytes=row.gpu.total_bytes,
                bf16=row.gpu.supports_bf16,
                memory_from="driver" if row.reported else "derived",
            )
            for row in rows
        ),
    )


def measurements_listing(results: Iterable[tuple[str, OwnResult | None]]) -> str:
    """Return a line for each of the user's own measurements, with its id."""
    lines = [(digest, *_measurement_columns(result)) for digest, result in results]
    return _columns(("id", "gpu", "source", "outcome", "candidate"), lines)


def _measurement_columns(result: OwnResult | None) -> tuple[str, str, str, str]:
    measurement = None if result is None else result.decode()
    if result is None or measurement is None:
        return "", "", "unreadable", ""
    return shortened(result.gpu), result.source, measurement.outcome, describe_candidate(measurement.candidate)


def gpus_listing(rows: Iterable[GpuRow]) -> str:
    """Return a line for each card. Memory from: `driver`, a driver's log; `derived`, as data/gpus.jsonl says."""
    lines = [
        (
            row.gpu.name,
            format_gib(row.gpu.total_bytes),
            "yes" if row.gpu.supports_bf16 else "no",
            "driver" if row.reported else "derived",
            ", ".join(row.aliases),
        )
        for row in rows
    ]
    return _columns(("gpu", "memory", "bf16", "memory from", "also called"), lines)


LISTING_WIDTH = 100  # columns, beyond which the last one is folded
LEAST_ROOM = 12  # of the last column


def _columns(heads: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[column]) for line in (heads, *lines)) for column in range(len(heads) - 1)]
    room = LISTING_WIDTH - sum(widths) - len(GAP) * len(widths)
    found = []
    for *first, last in (heads, *lines):
        start = "".join(text.ljust(width) + GAP for text, width in zip(first, widths, strict=True))
        found.append(start + ("\n" + " " * len(start)).join(wrap(last, max(room, LEAST_ROOM)) or [""]))
    return "\n".join(line.rstrip() for line in found)


HOUR = 3600


class Compared(Struct, frozen=True, kw_only=True):
    """A job on one cluster. `plan` is None where the job contradicts the cluster, as `why_none` says.

    `tokens`: to train on, a million if they were not given.
    """

    gpus: str
    plan: Plan | None = None
    why_none: str = ""
    price_per_hour: float | None = None  # of all GPUs; None: not given
    tokens: int = MILLION

    @property
    def fits(self) -> bool:
        """Return whether there is a plan, and its best candidate fits."""
        return self.plan is not None and self.plan.best.fits

    @property
    def price_per_million_tokens(self) -> float | None:
        """Price of a million trained tokens; None: unknown."""
        return None if self.cost is None else self.cost * MILLION / self.tokens

    @property
    def hours(self) -> float | None:
        """Hours to train on `tokens`: tokens / (tokens a second x 3600); None: it does not fit."""
        if self.plan is None or not self.fits:
            return None
        return self.tokens / (self.plan.best.throughput.tokens_per_second * HOUR)

    @property
    def cost(self) -> float | None:
        """Price of `tokens`: hours x price an hour; None: unknown."""
        return None if self.hours is None or self.price_per_hour is None else self.hours * self.price_per_hour


def trainable_table(methods: Sequence[str], rows: Mapping[str, Sequence[Compared]]) -> Table:
    """Return how models are trained and at which speed, by model and method."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("model", *methods):
        table.add_column(heading)
    for model, plans in rows.items():
        table.add_row(model, *(_way(found.plan) for found in plans))
    return table


def _way(found: Plan | None) -> str:
    """Return how a plan trains and how many tokens a second: `LoRA, 5,600`."""
    if found is None or not found.best.fits or impractical(found.best):
        return "no"
    best = found.best
    words = _tuned(found)
    offloaded = " offloaded" if best.candidate.offload_optimizer or best.candidate.offload_param else ""
    speed = tokens_per_second(best.throughput.tokens_per_second).removeprefix("about ").removesuffix(" tokens/s")
    return f"{words}{offloaded}, {speed}"


def _tuned(found: Plan) -> str:
    """Return the kind of tuning of a plan in a word: `full`, `LoRA`, `QLoRA`."""
    return CLASS_LABELS[tuning_class_of(found.best.candidate, found.job)].replace("full fine-tuning", "full")


MANY = 10  # rows of a comparison, from which on each has one short line, without the column `STEP`
STEP = 4


def comparison_table(rows: Sequence[Compared], prices: str = "") -> Table:
    """Return a row for each cluster, in the given order, below a line about the job. `prices`: where they are from."""
    asked, short = _columns_of(rows), len(rows) >= MANY
    heads = ["GPUs", "fits", "peak GiB" if short else "peak of", "tokens/s", "s a step", *asked, "with"]
    lines = [list(_cells(row, asked, short)) for row in rows]
    if short:
        for line in (heads, *lines):
            del line[STEP]
    table = Table(
        box=None, pad_edge=False, header_style="bold", title=_job_line(rows, prices), title_justify="left",
        title_style="",
    )  # fmt: skip
    for column, heading in enumerate(heads):
        kept = short and column < len(heads) - 1
        least = max(len(line[column]) for line in (heads, *lines)) if kept else None
        table.add_column(heading, overflow="fold", no_wrap=kept, min_width=least)
    for row, (*cells, last) in zip(rows, lines, strict=True):
        words = Text(last, no_wrap=True, overflow="ellipsis") if short else last  # the column that gives way
        table.add_row(*cells, words, style="" if row.fits else "dim")
    return table


def nearest_of(rows: Sequence[Compared]) -> str:
    """Return one line: by how much the job does not fit on the nearest of clusters without one on which it fits."""
    plans = [row.plan for row in rows if row.plan is not None]
    nearest = min(plans, key=lambda plan: plan.best.distance, default=None)
    return rows[0].why_none if nearest is None else nearest_refusal(nearest)


def _job_line(rows: Sequence[Compared], prices: str) -> str | None:
    """Return the line above a comparison: the model, the method and the release; None: nothing is planned."""
    job = next((row.plan.job for row in rows if row.plan is not None), None)
    if job is None:
        return None
    return " · ".join(filter(None, (job.model.id, job.method, f"trl {job.trl_version}", prices)))


def _columns_of(rows: Sequence[Compared]) -> tuple[str, ...]:
    """Return the headings of hours and cost, where they were asked for."""
    tokens = rows[0].tokens if rows else MILLION
    name = "a million tokens" if tokens == MILLION else "cost"
    priced = any(row.price_per_hour is not None for row in rows)
    return (*(("hours",) if tokens != MILLION else ()), *((name,) if priced else ()))


def _cells(row: Compared, columns: tuple[str, ...], short: bool = False) -> tuple[str, ...]:
    """Return a row of a comparison. `short`: without how far it is from fitting and what the weights are."""
    cost = ["no price" if row.price_per_hour is None else "" if row.cost is None else f"{row.cost:,.2f}"]
    hours = ["" if row.hours is None else f"{row.hours:,.1f}"]
    asked = tuple(hours[0] if name == "hours" else cost[0] for name in columns)
    if row.plan is None:
        return (row.gpus, "no", "", "", "", *asked, row.why_none)
    best = row.plan.best
    gpu = tightest(best)
    peak = f"{bare_gib(gpu.peak_bytes)} of {format_gib(gpu.capacity_bytes, 1)}"
    peak = peak.removesuffix(" GiB") if short else peak
    words = describe_candidate(best.candidate)
    if short:
        _, *others = words.split(" · ")
        words = " · ".join([_tuned(row.plan), *others])
    if not best.fits:
        host = ", host" if best.over_bytes <= 0 else ""  # whose memory is too small, not the GPU's
        return (row.gpus, f"no{host}" if short else f"no, {describe_excess(best)}", peak, "", "", *asked, words)
    speed = f"{float(f'{best.throughput.tokens_per_second:.2g}'):,.0f}"
    step = f"{float(f'{best.throughput.step_seconds:.2g}'):,g}"
    batch = best.candidate.per_device_train_batch_size
    return (row.gpus, describe_probability(best), peak, speed, step, *asked, f"{words} · batch {batch}")


def comparison_report(rows: Sequence[Compared]) -> ComparisonReport:
    """Return the document of `plan --gpus A,B --json`."""
    return ComparisonReport(
        schema=SCHEMA,
        clusters=tuple(
            ClusterReport(
                gpus=row.gpus,
                plan=plan_report(row.plan) if row.plan is not None else None,
                why_none=row.why_none,
                price_per_hour=row.price_per_hour,
                price_per_million_tokens=row.price_per_million_tokens,
                tokens=row.tokens,
                hours=row.hours,
                cost=row.cost,
            )
            for row in rows
        ),
    )


def lengths_listing(lengths: RowLengths, file: str) -> str:
    """Return the rows of a dataset in two lines: how many and how long, and their quantiles for `--lengths`."""
    tokens = sum(lengths.tokens)
    mean, longest = format_count(round(tokens / lengths.rows)), format_count(lengths.longest)
    return (
        f"{format_count(lengths.rows)} rows, {format_count(tokens)} tokens, {mean} a row, the longest {longest}\n"
        f"--lengths {file}, or --lengths {lengths.words}"
    )


class Diff(Struct, frozen=True, kw_only=True):
    """The estimates of one job under two sets of releases."""

    old: Estimate
    new: Estimate
    gpu: Gpu
    pinned_torch: tuple[str | None, str | None] = (None, None)

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes that concern the job."""
        return tuple(each for each, concerns in self._changes() if concerns)

    @property
    def others(self) -> tuple[Change, ...]:
        """The changes of other cards, and of defaults that the job sets."""
        return tuple(each for each, concerns in self._changes() if not concerns)

    def _changes(self) -> Iterator[tuple[Change, bool]]:
        one, other = self.old.candidate, self.new.candidate
        yield from ((each, each.concerns(one, other, self.gpu)) for each in changes(one, other))

    @property
    def pairs(self) -> tuple[Estimate, Estimate]:
        return self.old, self.new


def diff_report(found: Diff) -> DiffReport:
    """Return the document of `plan diff --json`."""
    return DiffReport(
        schema=SCHEMA,
        estimates=(estimate_report(found.old), estimate_report(found.new)),
        settings=dict(_settings(found)),
        changes=tuple(ChangeReport(library=each.library, since=each.since, text=each.words) for each in found.changes),
    )


def diff_table(found: Diff, verbose: bool) -> Text:
    """Return the verdicts, a table of the figures, and the settings and library facts that differ.

    `verbose`: also facts that do not concern the job.
    """
    lines = [Text(f"{_releases(each)}: {describe_fit(each)}", style=verdict_style(each)) for each in found.pairs]
    for each, pinned in zip(found.pairs, found.pinned_torch, strict=True):
        at = each.candidate
        wheel = required(at.vllm_release, TORCH_OF_VLLM) if at.vllm == "colocate" else None
        if (pinned or wheel) not in (None, at.torch_release):
            which = f", which vllm {at.vllm_release} requires," if pinned is None else ""
            lines.append(Text(f"torch {pinned or wheel}{which} is counted as torch {at.torch_release}."))
    before, after = (each.candidate for each in found.pairs)
    if before.vllm == after.vllm == "off" and before.vllm_version != after.vllm_version:
        way = ": --set use_vllm=true adds one" if after.method_row.supports_vllm else ""
        lines.append(Text(f"The job has no vLLM engine, whose releases change nothing then{way}."))
    heads = [_releases(each) for each in found.pairs]
    lines += [Text(), Text(_diff_line(heads, "GiB", *heads, "change"), style="bold")]
    for name, (old, new), digits in _figures(found):
        change = round(new - old, digits)
        shown = f"{change:+,.{digits}f}" if change else "="
        style = "" if change else "dim"
        lines.append(Text(_diff_line(heads, name, f"{old:,.{digits}f}", f"{new:,.{digits}f}", shown), style=style))
    facts = [f"{name}: {before} -> {after}" for name, (before, after) in _settings(found)]
    facts += map(_since, found.changes)
    lines += [Text(), *map(Text, facts or ["No known change applies to this job."])]
    if found.others and verbose:
        others = map(_since, found.others)
        lines += [Text(), Text("Of other cards, or of defaults that the job sets:"), *map(Text, others)]
    elif found.others:
        lines.append(Text(f"add -v: {len(found.others)} more, of other cards or of defaults that the job sets", "dim"))
    return Text("\n").join(lines)


def _since(change: Change) -> str:
    return f"since {change.library} {change.since}: {change.words}"


def _diff_line(heads: Sequence[str], name: str, *cells: str) -> str:
    wide = max(24, *(len(head) + 2 for head in heads))
    return f"{name:<26}{''.join(f'{cell:>{wide}}' for cell in cells[:2])}{cells[2]:>10}"


def _releases(answer: Estimate) -> str:
    at = answer.candidate
    engine = f", vllm {at.vllm_release}" if at.vllm != "off" else ""
    return f"trl {at.trl_version}, torch {at.torch_release}{engine}"


def _figures(found: Diff) -> Iterator[tuple[str, list[float], int]]:
    """Yield name, both figures and their digits: of the fullest GPU, the host, and speed."""
    gpus = [tightest(each) for each in found.pairs]
    phases: dict[Phase, None] = dict.fromkeys(phase.name for gpu in gpus for phase in gpu.phases)
    for name in phases:
        yield readable(name), [sum(p.total_bytes for p in gpu.phases if p.name == name) / GIB for gpu in gpus], 2
    yield "peak", [gpu.peak_bytes / GIB for gpu in gpus], 2
    peaks = [gpu.peak.components for gpu in gpus]
    components: dict[Component, None] = dict.fromkeys(name for peak in peaks for name in peak)
    for component in components:
        sizes = [peak.get(component, 0) / GIB for peak in peaks]
        if round(sizes[0] - sizes[1], 2):
            yield f"  of it {readable(component)}", sizes, 2
    yield "nvidia-smi", [gpu.nvidia_smi_bytes / GIB for gpu in gpus], 2
    yield "host memory of a node", [each.host_peak_bytes / GIB for each in found.pairs], 2
    yield "tokens/s", [each.throughput.tokens_per_second for each in found.pairs], 0


def _settings(found: Diff) -> Iterator[tuple[str, tuple[object, object]]]:
    """Yield the arguments of TRL that the two runs are given with other values; None: not given."""
    old, new = (trl_arguments(each.candidate) for each in found.pairs)
    for name in old | new:
        if old.get(name) != new.get(name):
            yield name, (old.get(name), new.get(name))
