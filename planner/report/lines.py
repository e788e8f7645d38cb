"""Lines of the table: a label on the left, text beside it, wrapped to the width of the terminal."""

from collections.abc import Iterator, Sequence

from rich.text import Text

LABEL_WIDTH = 13


def listed(label: str, items: Sequence[str], width: int, label_width: int = LABEL_WIDTH) -> Iterator[Text]:
    """Yield a line for each item; the first has the label."""
    for number, item in enumerate(items):
        yield from wrapped(label if number == 0 else "", [item], width, hanging=2, label_width=label_width)


def wrapped(
    label: str,
    items: Sequence[str],
    width: int,
    *,
    style: str = "",
    separator: str = " · ",
    hanging: int = 0,
    label_width: int = LABEL_WIDTH,
) -> Iterator[Text]:
    """Yield items side by side, wrapped between items, and between words of an item that is longer than a line."""
    room = width - label_width
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(separator) + len(item) <= room:
            lines[-1] += separator + item
        else:
            lines.extend(_broken(item, room, hanging))
    for number, line in enumerate(lines):
        yield Text.assemble((f"{label if number == 0 else '':<{label_width}}", "dim"), (line, style))


def _broken(item: str, room: int, hanging: int) -> list[str]:
    """Return an item in lines of at most `room` columns; a longer word has a line of its own."""
    lines = [""]
    for word in item.split(" "):
        if lines[-1].strip() and len(lines[-1]) + 1 + len(word) > room:
            lines.append(" " * hanging + word)
        else:
            lines[-1] += (" " if lines[-1].strip() else "") + word
    return lines


def joined(lines: Sequence[Text]) -> Text:
    """Return lines as one text without spaces at their ends."""
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)
