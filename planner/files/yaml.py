"""YAML files of a user: plain values only, with bounds on nesting and on what aliases multiply."""

from pathlib import Path
from typing import Any

import yaml

from planner.errors import InputError
from planner.files.read import read_text

MAX_DEPTH = 50  # of nested lists and mappings; configs of TRL, accelerate and DeepSpeed have 4
MAX_VALUES = 100_000  # of a document, each repetition through an alias counted


def read_yaml(path: Path) -> object:
    """Return the value of a YAML file, as `yaml.safe_load` does.

    Raises:
        InputError: the file cannot be read, is no YAML, or is nested too deeply; an alias multiplies its values beyond
            `MAX_VALUES`, or its own value contains it.
    """
    text = read_text(path)
    try:
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


def _count_values(node: Any, depth: int, known: dict[int, int]) -> int:
    """Return the number of values of a node, those behind an alias counted at each of its uses.

    Raises:
        ValueError: there are more than `MAX_VALUES`, or they are nested deeper than `MAX_DEPTH`.
    """
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    if id(node) in known:
        return known[id(node)]
    if isinstance(node, yaml.MappingNode):
        inner = [part for pair in node.value for part in pair]
    else:
        inner = node.value if isinstance(node, yaml.SequenceNode) else []
    count = 1 + sum(_count_values(each, depth + 1, known) for each in inner)
    if count > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES:,} values")
    known[id(node)] = count
    return count
