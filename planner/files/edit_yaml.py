"""Edit the keys of a YAML text in place: comments, order, quotes and all other keys stay as they are.

The places are those that PyYAML's events name. What a change replaces stays in the text, as a comment.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct, field

from planner.errors import InputError, shortened
from planner.files.yaml import parse_yaml

WIDEST_OLD_VALUE = 80  # characters of what a comment says that a line had


class KeyChange(Struct, frozen=True, kw_only=True):
    """The new name and the new value of a key."""

    name: str
    value: object


class Edits(Struct, frozen=True, kw_only=True):
    """The edits of a text by key: keys that change, keys that become comments (with the reason), and new lines.

    `added` and `to_complete` are new keys, of which the latter are marked with `fill_in`.
    """

    changed: dict[str, KeyChange] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    added: dict[str, object] = field(default_factory=dict)
    to_complete: dict[str, object] = field(default_factory=dict)
    fill_in: str = ""

    def result(self, keys: Mapping[str, object]) -> dict[str, object]:
        """Return the keys and values after the edits."""
        kept = {key: value for key, value in keys.items() if key not in self.changed and key not in self.dropped}
        new = {change.name: change.value for change in self.changed.values()}
        return {**kept, **new, **self.added, **self.to_complete}


def edit_yaml(text: str, keys: Mapping[str, object], edits: Edits, name: str) -> str:
    """Return a YAML text with the edits. `keys`: its keys and values; `name`: of the file, for errors.

    Raises:
        InputError: the edits are not possible in place.
    """
    entries = list(_entries(text))
    if keys and not entries:
        raise _refusal(edits, name)
    edited = _edited(text, keys, edits, entries)
    try:
        result = parse_yaml(edited, name)
    except InputError as error:
        raise _refusal(edits, name) from error
    if (result or {}) != edits.result(keys):
        raise _refusal(edits, name)
    return edited


def _refusal(edits: Edits, name: str) -> InputError:
    names = shortened(", ".join([*edits.changed, *edits.dropped, *edits.added]))
    return InputError(
        f"{name} cannot be changed in place ({names}): it uses anchors, or is one mapping in braces. Write one key a "
        "line."
    )


class Entry(Struct, frozen=True, kw_only=True):
    """A key and its value at the top level: the places where each begins and ends in the text."""

    key: str
    key_start: int
    key_end: int
    start: int
    end: int


def _edited(text: str, keys: Mapping[str, object], edits: Edits, entries: list[Entry]) -> str:
    """Return the text with the edits, whatever it means then."""
    last = {entry.key: entry for entry in entries}  # of a key that is given twice, the last one counts
    # A key that comes from a merged mapping is overridden by an own one.
    added = edits.added | {each.name: each.value for key, each in edits.changed.items() if key not in last}
    column = min((entry.key_start - _line_start(text, entry.key_start) for entry in entries), default=0)
    place = _end_of_document(text)
    lines = [(name, value, edits.fill_in) for name, value in edits.to_complete.items()]
    lines += [(name, value, "plan: added") for name, value in added.items()]
    block = "".join(f"{' ' * column}{name}: {_literal(value)}  # {mark}\n" for name, value, mark in lines)
    gap = "\n" if block and place and text[place - 1] != "\n" else ""
    new = [
        (place, place, gap + block),
        *(_replaced(text, last[key], each, keys[key]) for key, each in edits.changed.items() if key in last),
        *(_commented_out(text, each, edits.dropped[each.key]) for each in entries if each.key in edits.dropped),
    ]
    for start, end, replacement in sorted(new, reverse=True):
        text = text[:start] + replacement + text[end:]
    return text


def _replaced(text: str, entry: Entry, change: KeyChange, old: object) -> tuple[int, int, str]:
    """Return the place of a key with its value and the rest of its line, and what stands there instead."""
    name, value = change.name, _literal(change.value)
    line_end = _line_end(text, entry.key_end)
    before = text[entry.key_end : max(entry.start, entry.key_end)]
    if entry.end <= line_end:  # key and value are on one line
        was = _literal(old) if name == entry.key else f"{entry.key}: {_literal(old)}"
        gap = before if entry.start < entry.end else f"{before.rstrip()} "
        rest = text[entry.end : line_end].rstrip()
        mark = f"  # plan: was {_short(was)}"
        return entry.key_start, line_end, f"{name}{gap}{value}{rest}{mark}"
    comment = before.partition("#")[2].partition("\n")[0].strip() if "\n" in before else ""
    kept = f"  # {comment}" if comment else ""
    last = _line_end(text, entry.end)
    first = line_end + 1 if "\n" in before else entry.start
    lines = "".join(f"\n# {line}" for line in text[first:last].split("\n"))
    return entry.key_start, last, f"{name}: {value}{kept}  # plan: instead of the lines below{lines}"


def _commented_out(text: str, entry: Entry, reason: str) -> tuple[int, int, str]:
    """Return the lines of an entry, and the same as comments below the reason."""
    start, end = _line_start(text, entry.key_start), _line_end(text, max(entry.end, entry.key_end))
    lines = "\n".join(f"# {line}" for line in text[start:end].split("\n"))
    return start, end, f"# plan: {reason}:\n{lines}"


def _literal(value: object) -> str:
    """Return a value as YAML writes it on one line."""
    import yaml

    text = yaml.safe_dump([value], default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    return str(text).strip()[1:-1]


def _short(text: str) -> str:
    return text if len(text) <= WIDEST_OLD_VALUE else f"{text[:WIDEST_OLD_VALUE]}..."


def _line_start(text: str, place: int) -> int:
    return text.rfind("\n", 0, place) + 1


def _line_end(text: str, place: int) -> int:
    """Return the end of a line, before its line feed and a carriage return."""
    end = text.find("\n", place)
    end = len(text) if end < 0 else end
    return end - 1 if end > place and text[end - 1] == "\r" else end


def _entries(text: str) -> Iterator[Entry]:
    """Yield the keys of the document's mapping with their places; none if it is written in braces."""
    import yaml

    events = list(yaml.parse(text, yaml.SafeLoader))
    if len(events) < 3 or not isinstance(events[2], yaml.MappingStartEvent) or events[2].flow_style:
        return
    index = 3
    while not isinstance(events[index], yaml.MappingEndEvent):
        value = _after(events, index)
        after = _after(events, value)
        key = events[index]
        if isinstance(key, yaml.ScalarEvent):
            start, end = _places(text, events[value:after])
            yield Entry(key=key.value, key_start=key.start_mark.index, key_end=key.end_mark.index, start=start, end=end)
        index = after


def _after(events: list[Any], index: int) -> int:
    """Return the index after the value that begins with an event."""
    import yaml

    depth = 0
    while True:
        depth += isinstance(events[index], yaml.CollectionStartEvent) - isinstance(
            events[index], yaml.CollectionEndEvent
        )
        index += 1
        if depth == 0:
            return index


def _places(text: str, events: list[Any]) -> tuple[int, int]:
    """Return where a value begins and ends.

    The end of a block is that of its last value: the mark of the block's end stands behind blank lines and comments.
    """
    import yaml

    start = events[0].start_mark.index
    if len(events) > 1 and not events[0].flow_style:
        events = [event for event in events if not (isinstance(event, yaml.CollectionEndEvent) and _is_block(event))]
    end = max(event.end_mark.index for event in events)
    return start, start + len(text[start:end].rstrip())


def _is_block(event: Any) -> bool:
    """Return whether the end of a collection has no bracket."""
    return bool(event.start_mark.index == event.end_mark.index)


def _end_of_document(text: str) -> int:
    """Return the place behind the last key: before the mark `...`, or the end of the text."""
    import yaml

    end = next(
        event
        for event in yaml.parse(text, yaml.SafeLoader)
        if isinstance(event, yaml.StreamEndEvent | yaml.DocumentEndEvent)
    )
    if isinstance(end, yaml.DocumentEndEvent) and end.explicit:
        return int(end.start_mark.index)
    return len(text)
