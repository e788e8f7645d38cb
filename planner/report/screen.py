"""The answer on one screen: the verdict, flags to paste, memory, speed, other ways, and the notes to act on.

Everything else, such as the memory of each phase, is in the full table (planner/report/table.py), which -v prints.
"""

import shlex
from collections.abc import Iterator, Sequence

from msgspec import Struct
from rich.text import Text

from planner.confidence import SPEED_RATIOS
from planner.gpus.cluster import Cluster
from planner.launch.command import server_command, teacher_command
from planner.launch.requirements import special_packages
from planner.planning import Plan
from planner.quantities import ASKED, BACKGROUND, URGENT, Estimate, GpuMemory, Note, NoteCode, Phase
from planner.report.bars import SMALLEST_BYTES, bar, group_sizes
from planner.report.lines import joined, wrapped
from planner.report.sentences import proof_lines, sentence
from planner.report.shown_settings import flags, launch_settings, sizes_at_defaults
from planner.report.table import header
from planner.report.words import (
    about_seconds,
    bare_gib,
    certainty,
    describe_candidate,
    describe_epoch,
    describe_excess,
    readable,
    tightest,
    tokens_per_second,
    verdict_style,
)
from planner.search.fit import impractical
from planner.search.variations import Variation
from planner.units import format_count, format_gib

MIN_WIDTH, USUAL_WIDTH, MAX_WIDTH, MIN_LINES = 62, 80, 100, 24
LABEL_WIDTH = 10
PROMPT_LINES = 1  # of the shell, below the answer
MOST_WAYS, MOST_NOTES = 3, 3
IN_THE_VERDICT: frozenset[NoteCode] = frozenset({"step_too_long", "generates_large_model"})
PASSES: tuple[Phase, ...] = ("forward", "backward")
# Order in which blocks give way on a small screen: the largest number first.
ALWAYS, URGENT_NOTES, OTHERS, ROOM, PICTURE = range(5)


class Block(Struct, frozen=True, kw_only=True):
    """Lines that are shown together or not at all. `order`: the block with the highest one gives way first."""

    lines: tuple[Text, ...]
    order: tuple[int, int, int] = (ALWAYS, 0, 0)
    notes: int = 0  # that the lines say


class Screen(Struct, frozen=True, kw_only=True):
    """Columns and lines of a terminal, and what the command writes besides: the folder of --out (empty: none)."""

    width: int
    lines: int = MIN_LINES
    out: str = ""
    exported: bool = False  # --export writes the launch files

    @property
    def most_lines(self) -> int:
        """Return the lines that the answer may take: as much text on a narrow terminal as on one of 80 columns."""
        return max(self.lines, MIN_LINES * max(USUAL_WIDTH, self.room) // self.room)

    @property
    def room(self) -> int:
        """Return the columns that the answer takes: longer lines are hard to follow back."""
        return min(max(self.width, MIN_WIDTH), MAX_WIDTH)


def plan_screen(plan: Plan, screen: Screen) -> Text:
    """Return the short answer to a job."""
    fits = plan.best.fits
    blocks = [
        *_answer("train" if fits else "nearest", plan.best, plan.cluster, plan.warnings, screen),
        *_listed("probes", proof_lines(plan.proof)[:MOST_WAYS] if plan.proof is not None else (), screen, (ALWAYS, 0)),
        *_listed("also" if fits else "to fit", _ways(plan)[:MOST_WAYS], screen, (OTHERS, 0)),
        *_notes(plan.warnings, screen),
    ]
    more = len(plan.warnings) + len(plan.best.reasons) + len(plan.more)
    return _on_one_screen(blocks, more, screen, _next(plan.best, screen), _check(plan.best, plan.warnings))


def estimate_screen(estimate: Estimate, cluster: Cluster, warnings: Sequence[Note], screen: Screen) -> Text:
    """Return the short answer about one candidate."""
    blocks = [*_answer("given", estimate, cluster, warnings, screen), *_notes(warnings, screen)]
    search = ["plan without `estimate` searches for a better one"] if estimate.evidence == "estimated" else []
    steps = [*search, *_next(estimate, screen)]
    more = len(warnings) + len(estimate.reasons)
    return _on_one_screen(blocks, more, screen, steps, _check(estimate, warnings))


def _on_one_screen(blocks: Sequence[Block], remarks: int, screen: Screen, steps: Sequence[str], check: str) -> Text:
    """Join blocks and the next steps; leave out those that give way until the rest fits the lines of the screen.

    `remarks`: all notes and reasons, of which -v shows those that are not here.
    """
    shown = list(blocks)
    while True:
        left = remarks - sum(block.notes for block in shown)
        more = f", {left} more remark{'s' if left != 1 else ''}" if left else ""
        verbose = f"add -v: memory by phase{more}{check}"
        ending = list(_next_lines([*steps, verbose], screen))
        taken = sum(len(block.lines) for block in shown) + len(ending) + PROMPT_LINES
        last = max(shown, key=lambda block: block.order)
        if taken <= screen.most_lines or last.order[0] == ALWAYS:
            return joined([line for block in shown for line in block.lines] + ending)
        shown.remove(last)


def _next_lines(steps: Sequence[str], screen: Screen) -> Iterator[Text]:
    for number, step in enumerate(steps):
        yield from wrapped("next" if number == 0 else "", [step], screen.room, label_width=LABEL_WIDTH)


def _next(estimate: Estimate, screen: Screen) -> list[str]:
    """Return how to get the launch files of a candidate that fits."""
    if not estimate.fits or screen.exported:
        return []
    export = f"plan export {screen.out} {screen.out}/files" if screen.out else "add --export run"
    return [f"{export}: the files that start it"]


def _check(estimate: Estimate, notes: Sequence[Note]) -> str:
    """Return how an estimate is checked, if nothing has checked it."""
    checked = estimate.evidence != "estimated" or any(note.rank == ASKED for note in notes)
    row = estimate.candidate.quantization_row
    refused = row.published and not row.made_up  # a run without the published weights cannot make them up
    return "" if checked or refused or not estimate.fits else " · --dry-run: check it"


# -- the answer --------------------------------------------------------------------------------------------------------


def _answer(label: str, estimate: Estimate, cluster: Cluster, notes: Sequence[Note], screen: Screen) -> Iterator[Block]:
    """Yield the job, the verdict, the candidate, its memory, its speed and its flags."""
    width = screen.room
    gap = Block(lines=(Text(),), order=(ROOM, 0, 0))
    yield Block(lines=tuple(header(estimate, cluster, width)))
    yield gap
    style = f"bold {verdict_style(estimate)}"
    yield Block(lines=tuple(wrapped("", [verdict_line(estimate)], width, style=style, separator=" ", label_width=0)))
    yield _block(label, [describe_candidate(estimate.candidate)], screen)
    gpu = tightest(estimate)
    yield _block("memory", [peak_line(gpu)], screen)
    yield Block(lines=tuple(_picture(gpu, width)), order=(PICTURE, 0, 0))
    if estimate.fits:
        yield _block("speed", [speed_line(estimate)], screen)
        if rows := describe_epoch(estimate.throughput):
            yield _block("rows", rows, screen)
        yield gap
        yield from _settings(estimate, notes, screen)
    yield gap


def verdict_line(estimate: Estimate) -> str:
    """Return a line such as `Fits, 98 % likely to run: 4.3 GiB (11 %) to spare.`

    An impractical plan says so first: `Impractical: an optimizer step of 64 samples takes 65 minutes. It fits, 60.7 GiB
    (43 %) to spare.`
    """
    if not estimate.fits and not estimate.tight:
        return f"Does not fit: {describe_excess(estimate)}."
    gpu = tightest(estimate)
    spare = max(gpu.capacity_bytes - gpu.peak_bytes, 0)
    room = f"{format_gib(spare, 1)} ({100 * spare / gpu.capacity_bytes:.0f} %) to spare"
    if estimate.host_tight:
        host = f"{bare_gib(estimate.host_peak_bytes)} of {format_gib(estimate.host_capacity_bytes, 1)}"
        room = f"a node uses {host} of host memory; a GPU has {room}"
    verdict = "tight" if estimate.tight else "fits"
    if reasons := impractical(estimate):
        reason = sentence(reasons[0])
        return f"{reason[0].upper()}{reason[1:]}. It {'is tight' if estimate.tight else 'fits'}, {room}."
    if estimate.host_tight:
        return f"Tight: {room}."
    if estimate.device == "cuda":
        return f"Fits, as a probe showed, {room}."
    return f"{verdict.capitalize()}{certainty(estimate)}: {room}."


def peak_line(gpu: GpuMemory) -> str:
    """Return the peak with its interval: `peak 35.2 of 39.5 GiB, between 32.9 and 38.2, in the backward pass`."""
    low, high = gpu.interval_bytes
    peak = f"peak {bare_gib(gpu.peak_bytes)} of {format_gib(gpu.capacity_bytes, 1)}"
    return f"{peak}, between {bare_gib(low)} and {bare_gib(high)}, in the {_phase(gpu.peak_phase)}"


def _phase(name: Phase) -> str:
    return f"{readable(name)} pass" if name in PASSES else readable(name)


def _picture(gpu: GpuMemory, width: int) -> Iterator[Text]:
    """Yield a bar of the heaviest phase, and what its parts are."""
    indent = " " * LABEL_WIDTH
    yield Text(indent) + bar(gpu.peak, gpu, width - LABEL_WIDTH)
    line = Text(indent)
    for name, glyph, colour, size in group_sizes(gpu.peak):
        if size < SMALLEST_BYTES:
            continue
        entry = Text.assemble((glyph, colour), f" {name} {bare_gib(size)}  ")
        if len(line.plain) + len(entry.plain.rstrip()) > width:
            yield line
            line = Text(indent)
        line += entry
    yield line


def speed_line(estimate: Estimate) -> str:
    """Return the speed with the error of published ones.

    Example: `about 2,200 tokens/s (typically -31 to +14 %), 16 samples in 7.5 s`.
    """
    samples, seconds = estimate.candidate.effective_batch_size, estimate.throughput.step_seconds
    low, high = (f"{round(100 * ratio - 100):+d}" for ratio in SPEED_RATIOS)
    error = "" if estimate.throughput.evidence == "measured" else f" (typically {low} to {high} %)"
    rate = tokens_per_second(estimate.throughput.tokens_per_second)
    words = f"{format_count(samples)} sample{'s' if samples != 1 else ''}"
    return f"about {rate}{error}, {words} in {about_seconds(seconds)}"


# Notes on the user's own config, whose other settings stay.
OWN_FILE = "your file, with what flags change: add -v for every setting"
CHANGES: tuple[NoteCode, ...] = ("config_change", "config_unchanged")


def _settings(estimate: Estimate, notes: Sequence[Note], screen: Screen) -> Iterator[Block]:
    """Yield the changes to the user's config, else the settings as flags of `trl <method>`; what else a run needs."""
    candidate = estimate.candidate
    changes = [sentence(note).removeprefix("config ") for note in notes if note.code in CHANGES]
    if changes:
        yield _block("config", changes, screen, notes=len(changes))
    elif candidate.tool != "trl":  # TRL's flags would be no settings of its file
        yield _block("config", [OWN_FILE], screen)
    else:
        yield Block(lines=tuple(_pasted("settings", flags(candidate), screen)))
        yield _block("defaults", sizes_at_defaults(candidate), screen)
    yield _block("launch", launch_settings(candidate), screen)
    for label, command in (("server", server_command(candidate)), ("teacher", teacher_command(candidate))):
        if command:
            yield Block(lines=tuple(_pasted(label, _words(command), screen)))
    if packages := special_packages(candidate):
        yield Block(lines=tuple(wrapped("install", packages, screen.room, separator=" ", label_width=LABEL_WIDTH)))


def _words(command: Sequence[str]) -> list[str]:
    """Return a command with each option beside its value."""
    words: list[str] = []
    for word in map(shlex.quote, command):
        if words and words[-1].startswith("--") and " " not in words[-1] and not word.startswith("--"):
            words[-1] += f" {word}"
        else:
            words.append(word)
    return words


def _pasted(label: str, parts: Sequence[str], screen: Screen) -> Iterator[Text]:
    r"""Yield parts of a command in as few lines as they fill, with ` \` at the end of each line but the last."""
    ending = " \\"
    room = screen.room - LABEL_WIDTH - len(ending)
    lines: list[str] = []
    for part in (part for part in parts if len(part) <= room):
        place = next((row for row, line in enumerate(lines) if len(line) + 1 + len(part) <= room), None)
        if place is None:
            lines.append(part)
        else:
            lines[place] += f" {part}"
    # A flag that is longer than a line comes last, its value in the line behind it.
    lines += [piece for part in parts if len(part) > room for piece in part.split(" ", 1)]
    for number, line in enumerate(lines):
        head = (f"{label if number == 0 else '':<{LABEL_WIDTH}}", "dim")
        yield Text.assemble(head, line, (ending if number < len(lines) - 1 else "", "dim"))


# -- other ways and notes ----------------------------------------------------------------------------------------------


def _ways(plan: Plan) -> list[str]:
    """Return other ways in a line each: those that fit, then changes at a price, then those that do not fit."""
    fitting = [f"{variation_line(other)}{_why_not(other, plan)}" for other in plan.alternatives if other.estimate.fits]
    others = [variation_line(other) for other in plan.alternatives if not other.estimate.fits]
    return [*map(variation_line, plan.remedies), *fitting, *map(_lever, plan.levers), *others]


# The drawback of a faster tuning class that the plan passed over, since it takes the first class that fits.
COSTS_OF_TUNING = {"lora": "; it trains adapters only", "qlora": "; it rounds the base to 4 bits"}


def _why_not(other: Variation, plan: Plan) -> str:
    """Return why another tuning class that is faster was not taken; empty for any other change."""
    faster = other.estimate.throughput.tokens_per_second > plan.best.throughput.tokens_per_second
    return COSTS_OF_TUNING.get(str(other.change.values.get("tuning", "")), "") if faster else ""


def variation_line(other: Variation) -> str:
    """Return a change and its outcome, and what it takes: `8 GPUs: fits, about 1,200 tokens/s`."""
    return "; ".join([f"{sentence(other.change)}: {_outcome(other.estimate)}", *map(sentence, other.takes)])


def _lever(lever: Variation) -> str:
    rate = tokens_per_second(lever.estimate.throughput.tokens_per_second)
    return f"{sentence(lever.change)}: about {rate}, at a price (-v)"


def _outcome(estimate: Estimate) -> str:
    if not estimate.fits and not estimate.tight:
        return f"does not fit, {describe_excess(estimate)}"
    word = "tight" if estimate.tight else "fits"
    return f"{word}, about {tokens_per_second(estimate.throughput.tokens_per_second)}"


def urgent_notes(notes: Sequence[Note]) -> list[Note]:
    """Return the notes that change what the user does, at most `MOST_NOTES`, the most urgent first."""
    urgent = (note for note in notes if note.rank < BACKGROUND and note.code not in IN_THE_VERDICT)
    return sorted(urgent, key=lambda note: note.rank)[:MOST_NOTES]


def _notes(notes: Sequence[Note], screen: Screen) -> Iterator[Block]:
    for number, note in enumerate(urgent_notes(notes)):
        order = URGENT_NOTES if note.rank <= URGENT else OTHERS
        yield _block("note" if number == 0 else "", [sentence(note)], screen, (order, number, 1), 1)


def _listed(label: str, items: Sequence[str], screen: Screen, order: tuple[int, int]) -> Iterator[Block]:
    for number, item in enumerate(items):
        yield _block(label if number == 0 else "", [item], screen, (order[0], number, order[1]))


def _block(
    label: str, items: Sequence[str], screen: Screen, order: tuple[int, int, int] = (ALWAYS, 0, 0), notes: int = 0
) -> Block:
    lines = wrapped(label, items, screen.room, hanging=2, label_width=LABEL_WIDTH)
    return Block(lines=tuple(lines), order=order, notes=notes)
