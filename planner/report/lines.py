"""Lines of the table: what they are about on the left, what is said beside it, broken where a line ends."""

from collections.abc import Iterator, Sequence

from rich.text import Text

LABEL_WIDTH = 13


def listed(label: str, items: Sequence[str], width: int) -> Iterator[Text]:
    """A line an item, the label beside the first."""
    for number, item in enumerate(items):
        yield from wrapped(label if number == 0 else "", [item], width, hanging=2)


def wrapped(
    label: str, items: Sequence[str], width: int, *, style: str = "", separator: str = " · ", hanging: int = 0
) -> Iterator[Text]:
    """Items side by side, broken between items where they are longer than a line, and between words where one item is."""
    room = width - LABEL_WIDTH
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(separator) + len(item) <= room:
            lines[-1] += separator + item
        else:
            lines.extend(_broken(item, room, hanging))
    for number, line in enumerate(lines):
        yield Text.assemble((f"{label if number == 0 else '':<{LABEL_WIDTH}}", "dim"), (line, style))


def _broken(item: str, room: int, hanging: int) -> list[str]:
    """One item in lines of at most `room` columns; a word that is longer keeps its line to itself."""
    lines = [""]
    for word in item.split(" "):
        if lines[-1].strip() and len(lines[-1]) + 1 + len(word) > room:
            lines.append(" " * hanging + word)
        else:
            lines[-1] += (" " if lines[-1].strip() else "") + word
    return lines


def joined(lines: Sequence[Text]) -> Text:
    """Lines as one text, without the spaces at their ends."""
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)
