"""The table of model types: the one place that names them, held to what Transformers says of its classes."""

import ast
from pathlib import Path
from typing import get_args

from planner.models.architectures.table import ARCHITECTURES
from planner.models.catalogue import model_rows
from planner.models.layers import LayerProgram

PLANNER = Path(__file__).parent.parent / "planner"
HOME = PLANNER / "models" / "architectures"
TYPES = {*ARCHITECTURES, *(row.model_type for row in model_rows())}
# Programs of layers have the name of the first type that is written so.
OF_PROGRAMS = {"models/layers.py", "models/image_tower.py", "memory/layers/decoder.py"}


def types_named_in(path: Path) -> set[str]:
    """The model types among the text literals of a file."""
    names = {
        node.value
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in TYPES
    }
    return names - set(get_args(LayerProgram)) if str(path.relative_to(PLANNER)) in OF_PROGRAMS else names


def test_no_file_outside_the_table_names_a_model_type() -> None:
    outside = [path for path in PLANNER.rglob("*.py") if HOME not in path.parents]
    assert {str(path.relative_to(PLANNER)): names for path in outside if (names := types_named_in(path))} == {}


def test_every_row_stands_in_one_file() -> None:
    rows = [name for path in HOME.glob("*.py") for name in _keys_of_rows(path)]
    assert sorted(rows) == sorted(ARCHITECTURES)


def _keys_of_rows(path: Path) -> list[str]:
    """Keys of the dicts at the top of a file that are annotated as rows."""
    return [
        str(ast.literal_eval(key))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "dict[str, Architecture]"
        if isinstance(node.value, ast.Dict)
        for key in node.value.keys
        if key is not None
    ]
