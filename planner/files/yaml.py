"""YAML files of a user: plain values only, with bounds on nesting and on what aliases multiply."""

from pathlib import Path
from typing import Any

import yaml

from planner.errors import InputError
from planner.files.read import read_text

# Configs of TRL, accelerate and DeepSpeed have a few kB, a hundred values and 4 levels. PyYAML reads about 100 kB a
# second, and takes quadratic time for brackets inside of brackets.
MAX_YAML_BYTES = 256 * 2**10
MAX_DEPTH = 50  # of nested lists and mappings
MAX_VALUES = 20_000  # of a document, each repetition through an alias counted


def read_yaml_text(path: Path) -> str:
    """Return the text of a YAML file.

    Raises:
        InputError: the file cannot be read, or is larger than `MAX_YAML_BYTES`.
    """
    return read_text(path, MAX_YAML_BYTES)


def parse_yaml(text: str, path: str) -> object:
    """Return the value of a YAML text, as `yaml.safe_load` does; an error names `path`.

    Raises:
        InputError: the text is no YAML, or is nested too deeply; an alias multiplies its values beyond `MAX_VALUES`, or
            its own value contains it.
    """
    try:
        _refuse_deep(text)
        loader: Any = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _count_values(node, 1, {})
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError as error:
        raise InputError(f"{path} is not YAML: it is nested too deeply.") from error
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        # A value that is none of its tag, such as `!!int x` or 2001-99-99, raises other errors than YAMLError.
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())[:200]}.") from error


def _refuse_deep(text: str) -> None:
    """Raise ValueError at the first value that is nested deeper than `MAX_DEPTH`, before the rest is read."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")


def _count_values(node: Any, depth: int, known: dict[int, int]) -> int:
    """Return the number of values of a node, those behind an alias counted at each of its uses.

    Raises:
        ValueError: there are more than `MAX_VALUES`, or they are nested deeper than `MAX_DEPTH`; or a text holds half
            of a surrogate pair, such as "\\ud800", which no answer could repeat.
    """
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    if id(node) in known:
        return known[id(node)]
    if isinstance(node, yaml.ScalarNode):
        node.value.encode()
    if isinstance(node, yaml.MappingNode):
        inner = [part for pair in node.value for part in pair]
    else:
        inner = node.value if isinstance(node, yaml.SequenceNode) else []
    count = 1 + sum(_count_values(each, depth + 1, known) for each in inner)
    if count > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES:,} values")
    known[id(node)] = count
    return count
