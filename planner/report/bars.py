"""Bars of the memory of each GPU and phase: each group of components has a glyph and a colour."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from rich.text import Text

from planner.gpus.cluster import HostMemory
from planner.quantities import Component, Estimate, GpuMemory, PhaseMemory
from planner.report.lines import LABEL_WIDTH, wrapped
from planner.report.words import bare_gib, describe_host, readable
from planner.units import GIB, format_count, format_gib

# Groups of components that a bar shows together, each with a glyph (a pipe has no colours) and a colour.
GROUPS: tuple[tuple[str, str, str, tuple[Component, ...]], ...] = (
    ("weights", "█", "blue", ("weights", "autocast_copies")),
    ("states", "▓", "magenta", ("adapters", "gradients", "optimizer_states")),
    ("activations", "▒", "green", ("activations", "attention_scores", "transients")),
    ("loss", "▚", "yellow", ("loss",)),
    ("generation", "░", "cyan", ("engine", "kv_cache")),
    ("runtime", "·", "bright_black", ("communication", "fragmentation", "runtime", "unexplained")),
)
PHASE_WIDTH, NUMBER_WIDTH = 16, 8
SMALLEST_BYTES = GIB // 20 + 1  # the smallest size that prints as 0.1 GiB, not as 0.0
# Endings of the names of details that are counts; the others are bytes.
COUNTS = ("tokens", "sequences")


def bars(estimate: Estimate, host: HostMemory, width: int) -> Iterator[Text]:
    """Yield a row for each phase of each GPU role, a bar and the total; the components of the peak; the node."""
    bar_width = width - LABEL_WIDTH - PHASE_WIDTH - NUMBER_WIDTH
    first = 0
    yield from _legend(estimate, width)
    for gpu in estimate.gpus:
        last = f"-{first + gpu.count - 1}" if gpu.count > 1 else ""
        labels = [f"GPU {first}{last}", gpu.role, format_gib(gpu.capacity_bytes, 1)]
        first += gpu.count
        rows = list(gpu.phases)
        for row in range(max(len(rows), len(labels))):
            label = Text(
                f"{labels[row] if row < len(labels) else '':<{LABEL_WIDTH}}", style="bold" if row == 0 else "dim"
            )
            yield label + _bar_row(rows[row], gpu, bar_width) if row < len(rows) else label
        yield from wrapped(
            "", [f"peak: the {readable(gpu.peak.name)} = " + " + ".join(_parts(gpu.peak))], width, separator=" + "
        )
        for component, parts in gpu.details.items():
            if len(parts) > 1:
                total = bare_gib(sum(value for name, value in parts.items() if not name.endswith(COUNTS)))
                yield from wrapped("", [f"{readable(component)} {total} = {_detail(parts)}"], width)
        yield Text()
    yield from wrapped("host", describe_host(estimate, host), width)


def _bar_row(phase: PhaseMemory, gpu: GpuMemory, bar_width: int) -> Text:
    is_peak = phase.name == gpu.peak_phase
    over = phase.total_bytes > gpu.capacity_bytes
    number = f"{bare_gib(phase.total_bytes):>{NUMBER_WIDTH - 2}}" + (" ◂" if is_peak else "")
    style = ("bold " if is_peak else "") + ("red" if over else "")
    return Text.assemble(
        (f"{readable(phase.name):<{PHASE_WIDTH}}", "bold" if is_peak else ""),
        bar(phase, gpu, bar_width),
        (number, style.strip()),
    )


def bar(phase: PhaseMemory, gpu: GpuMemory, bar_width: int) -> Text:
    """Return the groups of a phase side by side; `▏` marks the card's end, which a bar that does not fit crosses."""
    inside = bar_width - 1
    scale_bytes = max(gpu.capacity_bytes, gpu.peak_bytes)
    groups = list(group_sizes(phase))
    ends = [0, *(round(end * inside / scale_bytes) for end in accumulate(size for _, _, _, size in groups))]
    text = Text()
    for (_, glyph, colour, _), start, end in zip(groups, ends, ends[1:], strict=False):
        text.append(glyph * (end - start), style=colour)
    text.append(" " * (inside - len(text.plain)))
    card_end = round(gpu.capacity_bytes * inside / scale_bytes)
    return text[:card_end] + Text("▏", style="bold") + text[card_end:]


def group_sizes(phase: PhaseMemory) -> Iterator[tuple[str, str, str, int]]:
    """Yield the name, glyph and colour of each group of components that a phase has, and its bytes."""
    for name, glyph, colour, components in GROUPS:
        if size := sum(phase.components.get(component, 0) for component in components):
            yield name, glyph, colour, size


def _legend(estimate: Estimate, width: int) -> Iterator[Text]:
    present = {component for gpu in estimate.gpus for phase in gpu.phases for component in phase.components}
    line = Text(f"{'GiB':<{LABEL_WIDTH}}", style="dim")
    for name, glyph, colour, components in GROUPS:
        entry = Text.assemble((glyph, colour), f" {name}  ")
        if not present.intersection(components):
            continue
        if len(line.plain) + len(entry.plain.rstrip()) > width:
            yield line
            line = Text(" " * LABEL_WIDTH)
        line += entry
    yield line


def _parts(phase: PhaseMemory) -> list[str]:
    """Return the components of a phase, the largest first; the last is the sum of those too small to print."""
    return _sized(sorted(phase.components.items(), key=lambda item: -item[1]))


def _sized(parts: Sequence[tuple[str, int]]) -> list[str]:
    """Return names with sizes in GiB; sizes that would print as 0.0 are added up as `rest`."""
    large = [(name, size) for name, size in parts if size >= SMALLEST_BYTES]
    rest_bytes = sum(size for _, size in parts if size < SMALLEST_BYTES)
    return [
        f"{readable(name)} {bare_gib(size)}" for name, size in [*large, ("rest", rest_bytes)] if size >= SMALLEST_BYTES
    ]


def _detail(parts: Mapping[str, int]) -> str:
    """Return the parts of a component: sizes as a sum, then counts in brackets."""
    sizes = _sized([(name, value) for name, value in parts.items() if not name.endswith(COUNTS)])
    counts = [f"{format_count(value)} {readable(name)}" for name, value in parts.items() if name.endswith(COUNTS)]
    return " + ".join(sizes) + (f" ({', '.join(counts)})" if counts else "")
