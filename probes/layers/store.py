"""The user's cache of measured layers: one file for a model's shapes and one for each recipe.

The key of a file is the model's config, the recipe, the library versions and our own measuring code, so that a release
of any of them measures anew.
"""

import ast
import hashlib
import json
import os
import tempfile
from functools import lru_cache
from pathlib import Path

import msgspec

from planner.files.cache import cache_root, installed_versions, make_folder
from planner.memory.layers.measured_layers import LayerResult, LayerShapes, recipe_key
from planner.memory.layers.recipe import Recipe
from planner.models.shape import ModelShape

FOLDER = "layers"
SHAPES_KEY = "shapes"
PROBES = Path(__file__).parents[1]
RESULT_DECODER: msgspec.json.Decoder[LayerResult] = msgspec.json.Decoder(LayerResult)
UNREADABLE = (OSError, msgspec.MsgspecError, RecursionError)  # no file, or a damaged one
MEASURING_CODE = (
    "layers/**/*.py",
    "step/built_trainer.py",
    "step/collector.py",
    "substitution.py",
)  # patterns below `probes/`


def load_shapes(model: ModelShape) -> LayerShapes | None:
    """Read the shapes of a model's layers; None if there is no file or it is damaged."""
    try:
        return msgspec.json.decode(_path(model, SHAPES_KEY).read_bytes(), type=LayerShapes)
    except UNREADABLE:
        return None


def save_shapes(model: ModelShape, shapes: LayerShapes) -> None:
    _write(_path(model, SHAPES_KEY), msgspec.json.encode(shapes))


def load_result(model: ModelShape, recipe: Recipe) -> LayerResult | None:
    """Read the result under one recipe; None if there is no file or it is damaged."""
    try:
        return RESULT_DECODER.decode(_path(model, recipe_key(recipe)).read_bytes())
    except UNREADABLE:
        return None


def save_layer_result(model: ModelShape, recipe: Recipe, result: LayerResult) -> None:
    """Keep a result. A refusal is kept too: the same libraries refuse again."""
    _write(_path(model, recipe_key(recipe)), msgspec.json.encode(result))


# -- files -------------------------------------------------------------------------------------------------------------


def _path(model: ModelShape, key: str) -> Path:
    content = json.dumps([model.config, model.auto_class, key, source_hash()], sort_keys=True)
    return cache_root() / FOLDER / installed_versions() / f"{hashlib.sha256(content.encode()).hexdigest()[:24]}.json"


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Hash of our measuring code without comments, docstrings and layout; the same for every version of Python."""
    paths = sorted(path for pattern in MEASURING_CODE for path in PROBES.glob(pattern))
    sources = [_syntax(ast.parse(path.read_text(encoding="utf-8"))) for path in paths]
    return hashlib.sha256(repr(sources).encode()).hexdigest()


def _syntax(value: object) -> object:
    """A syntax tree as nested tuples, without docstrings and without empty fields, which differ by Python version."""
    if isinstance(value, list):
        return tuple(_syntax(item) for item in value if not _is_docstring(item))
    if not isinstance(value, ast.AST):
        return value
    fields = ((name, content) for name, content in ast.iter_fields(value) if content is not None and content != [])
    return (type(value).__name__, *((name, _syntax(content)) for name, content in fields))


def _is_docstring(item: object) -> bool:
    """Return whether a statement is a string alone."""
    return isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str)


def _write(path: Path, content: bytes) -> None:
    """Write a whole file or none: other processes read the folder. Without a writable folder nothing is kept."""
    try:
        make_folder(path.parent)
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, delete=False) as file:
            name = file.name
        try:
            Path(name).write_bytes(content)
            os.replace(name, path)  # Windows replaces by no file that is open
        except OSError:
            os.unlink(name)
    except OSError:
        return
