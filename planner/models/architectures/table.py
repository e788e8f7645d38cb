"""The table of model types (`ARCHITECTURES`): the rows of data/architectures.json.

A row of the file is for each of its `types`. It is `like` another row but for its own columns; `more_defaults` are
added to the defaults of that one. A name with a leading underscore is of no type, only of rows that are like it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from planner.models.architectures import experts, special_layers, states, usual_layers, windows
from planner.models.architectures.architecture import Architecture

TABLE = Path(__file__).resolve().parents[2] / "data" / "architectures.json"
# Columns that name a function -> those that it can name, by name.
_FUNCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "layer": (
        usual_layers.usual_layer, special_layers.gpt2, special_layers.gpt_neox, special_layers.opt,
        special_layers.falcon, special_layers.deepseek,
    ),
    "final_norm": (special_layers.opt_final_norm,),
    "window": (
        windows.no_window, windows.every_layer, windows.if_used, windows.upper_layers, windows.alternating,
        windows.by_pattern, windows.three_of_four, windows.without_rotary,
    ),
    "rotary": (windows.all_rotary, windows.listed_rotary, windows.rotary_in_windows, windows.rotary_unless_hybrid),
    "experts": (
        experts.mixtral, experts.olmoe, experts.qwen3_moe, experts.qwen2_moe, experts.deepseek, experts.gpt_oss,
    ),
    "state": (
        states.gated_delta_net, states.qwen3_5_delta_net, states.short_convolution, states.granite_mamba,
        states.nemotron_mamba,
    ),
}  # fmt: skip
FUNCTIONS = {column: {each.__name__: each for each in rules} for column, rules in _FUNCTIONS.items()}


def _columns(name: str, rows: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return all columns of a row that differ from the usual, its own and those of the row that it is like."""
    row = dict(rows[name])
    base = _columns(row.pop("like"), rows) if "like" in row else {}
    if "more_defaults" in row:
        row["defaults"] = {**base["defaults"], **row.pop("more_defaults")}
    return {**base, **row}


def _architecture(columns: dict[str, Any]) -> Architecture:
    """Return a row in Python's types; raise KeyError for a function that is not there."""
    functions = {column: FUNCTIONS[column][columns[column]] for column in FUNCTIONS.keys() & columns}
    return msgspec.convert({**columns, **functions}, Architecture, dec_hook=lambda kind, value: value)


def _read() -> dict[str, Architecture]:
    """Return the rows of the file by model type."""
    rows = {name: row for row in msgspec.json.decode(TABLE.read_bytes()) for name in row.pop("types")}
    return {name: _architecture(_columns(name, rows)) for name in rows if not name.startswith("_")}


ARCHITECTURES = _read()
KNOWN_MODEL_TYPES = frozenset(name for name, row in ARCHITECTURES.items() if row.has_formulas)
_USUAL = Architecture()


def architecture_of(model_type: str) -> Architecture:
    """Return the row of a model type; without one the type is the usual in everything, and its layers are measured."""
    return ARCHITECTURES.get(model_type, _USUAL)
