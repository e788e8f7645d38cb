"""Models by name: from the catalogue in `data/models.jsonl`, a folder or config.json, or the Hub."""

import json
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import InputError, UnknownName, printable, shortened
from planner.files.read import parse_json, read_text
from planner.models.architectures.published import (
    NOT_QUANTIZED,
    PADDED_MLPS,
    Published,
    from_name,
    published_checkpoint,
)
from planner.models.architectures.table import architecture_of
from planner.models.from_config import NOT_COUNTED, Counts, shape_of
from planner.models.hub import hub_config
from planner.models.shape import ModelShape

CATALOGUE = Path(__file__).resolve().parents[1] / "data" / "models.jsonl"
MIRRORS = ("unsloth/",)  # organisations that publish the weights of others unchanged, under the same names
# `max_position_embeddings` of aliases whose config.json has another one than that of their row, by the name without its
# organisation. Source: the published config.json of each (Qwen, microsoft, togethercomputer).
ALIAS_POSITIONS: dict[str, int] = {
    **dict.fromkeys(
        (
            "Qwen2.5-1.5B-Instruct", "Qwen2.5-Coder-1.5B", "Qwen2.5-Coder-1.5B-Instruct", "Qwen2.5-7B-Instruct",
            "Qwen2.5-Coder-7B", "Qwen2.5-Coder-7B-Instruct", "Qwen2.5-14B-Instruct", "Qwen2.5-Coder-14B",
            "Qwen2.5-Coder-14B-Instruct", "Qwen2.5-32B-Instruct", "Qwen2.5-Coder-32B", "Qwen2.5-Coder-32B-Instruct",
            "QwQ-32B-Preview", "Qwen2.5-72B-Instruct", "Qwen2-0.5B-Instruct", "Qwen2-1.5B-Instruct",
            "Qwen2-7B-Instruct", "Qwen2-72B-Instruct", "Qwen2-57B-A14B-Instruct", "Qwen3-0.6B-Base", "Qwen3-1.7B-Base",
            "Qwen3-4B-Base", "Qwen3-8B-Base", "Qwen3-14B-Base", "Qwen3-30B-A3B-Base", "Phi-4-reasoning",
            "Phi-4-reasoning-plus", "LLaMA-2-7B-32K",
        ),
        32_768,
    ),
    **dict.fromkeys(
        (
            "Qwen2.5-Math-1.5B", "Qwen2.5-Math-1.5B-Instruct", "Qwen2.5-Math-7B", "Qwen2.5-Math-7B-Instruct",
            "Qwen2.5-Math-72B",
        ),
        4_096,
    ),
    "QwQ-32B": 40_960,
    "Qwen2.5-7B-Instruct-1M": 1_010_000,
    "Phi-3-medium-128k-instruct": 131_072,
}  # fmt: skip
BY_PATH = "Or give the path of a folder with its config.json: --model ./folder."


class ModelRow(Struct, frozen=True, kw_only=True):
    """One model of the catalogue. `known`: its activations have formulas."""

    id: str
    aliases: tuple[str, ...]
    model_type: str
    params: int
    dtype: str
    known: bool


def load_model(name: str, paths: bool = True, hub: bool = True) -> ModelShape:
    """Return the model that `--model` names: a path, a name of the catalogue, or a name on the Hub.

    `paths`: paths are names, and the file system is asked; `hub`: names on the Hub are, and the Hub is asked.

    A model without formulas (`known` is False) has no layers, and no `params` if the catalogue does not have it;
    `planner.training_stack.complete_models` completes it.

    Names are compared without case, with or without their organisation. `Qwen2.5-7B-Instruct-GPTQ-Int4` is
    Qwen2.5-7B-Instruct with that quantization.

    Raises:
        UnknownName: there is no such path, row of the catalogue or name on the Hub.
        InputError: the file is no model config, or lacks a key that its model type needs.
    """
    if not isinstance(name, str):
        raise InputError(f"A model's name must be text, such as 'Qwen2.5-7B', not {shortened(name)}.")
    if not name.strip():
        raise InputError("--model is empty. Give a name such as Qwen2.5-7B, or a path.")
    if not printable(name):
        raise InputError(f"--model {shortened(name)} has characters that are not printable. Rename the folder.")
    if paths and _is_path(name):
        file = _config_file(Path(name).expanduser())
        return _from_file(file, file.resolve(), read_text(file))
    return _named(name.strip(), hub)


@lru_cache(maxsize=1024)  # shapes are compared by identity, so that this is larger than the catalogue
def _named(name: str, hub: bool) -> ModelShape:
    shape = _from_catalogue(name)
    if shape is None and not hub:
        raise UnknownName("model", name, _names(), "Only the models of the catalogue are known here.")
    return shape or _from_hub(name)


def model_rows() -> tuple[ModelRow, ...]:
    """Every model of the catalogue, in the order of the file."""
    return tuple(_row(json.loads(line)) for line in _lines())


def _row(row: dict[str, Any]) -> ModelRow:
    model_type = row["config"]["model_type"]
    return ModelRow(
        id=row["id"],
        aliases=tuple(row["aliases"]),
        model_type=model_type,
        params=row["params"],
        dtype=row["dtype"],
        known=architecture_of(model_type).has_formulas,
    )


def _is_path(name: str) -> bool:
    if name.endswith(".json") or name.startswith((".", "/", "~")) or "\\" in name:
        return True
    return _is_file(Path(name, "config.json"))


def _is_file(path: Path) -> bool:
    """Return whether the file exists; False for texts that the system does not accept as a path."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _config_file(path: Path) -> Path:
    """Return the config.json of a folder, or the file itself; raise InputError if there is none."""
    file = path if path.suffix == ".json" or _is_file(path) else path / "config.json"
    if not _is_file(file):
        if os.path.exists(file):  # False for what is no path, where Path.exists raises
            raise InputError(f"{file} is no regular file. --model takes a folder with a config.json, or such a file.")
        windows = " In WSL, C:\\models is /mnt/c/models." if "\\" in str(path) else ""
        takes = "--model takes a folder with a config.json, such a file, or a name."
        raise InputError(f"{file} does not exist. {takes}{windows}")
    return file


@lru_cache(maxsize=64)  # the key has the text, so that a changed file is read again
def _from_file(file: Path, resolved: Path, text: str) -> ModelShape:
    config = parse_json(text, file)
    if not isinstance(config, dict):
        raise InputError(f"{file} is no JSON object, so it is not a model's config.json.")
    if not str(resolved).isprintable():
        raise InputError(f"{file} has a line break or another character that cannot be printed in its path. Rename it.")
    if file.name != "config.json":
        return shape_of(config, id=file.stem, counts=NOT_COUNTED)
    folder = resolved.parent
    return replace(shape_of(config, id=folder.name, counts=NOT_COUNTED), path=str(folder))


def _from_catalogue(name: str) -> ModelShape | None:
    """The model of that name, or of that name without its quantization ending; None if the catalogue has neither.

    A name without organisation may lack the ending of a conversion to Transformers' format: glm-4-9b is glm-4-9b-hf.
    """
    row = _find(name)
    if row is None and "/" not in name and (row := _find(f"{name}-hf")) is not None:
        name = f"{name}-hf"
    if row is not None:
        proper = _proper_name(row, name)
        return _shape(_with_positions_of(row, proper), proper, published_checkpoint(proper))
    base, published = from_name(name)
    if published is NOT_QUANTIZED and not name.lower().startswith(MIRRORS):
        return None
    row = _find(base) or _find(base.rsplit("/", 1)[-1])  # an organisation that quantized the original
    if row is None:
        return None
    organisation = row["id"].rpartition("/")[0]
    proper = f"{organisation}/{name}" if organisation in QUANTIZING and "/" not in name else name
    return _shape(_with_padded_mlps(_with_positions_of(row, base), proper), proper, published)


def _with_padded_mlps(row: dict[str, Any], name: str) -> dict[str, Any]:
    """The row with the wider MLPs of a checkpoint that was padded before it was quantized."""
    width, config = PADDED_MLPS.get(name), row["config"]
    if width is None:
        return row
    more = 3 * config["hidden_size"] * (width - config["intermediate_size"]) * config["num_hidden_layers"]
    return {**row, "config": {**config, "intermediate_size": width}, "params": row["params"] + more}


def _with_positions_of(row: dict[str, Any], name: str) -> dict[str, Any]:
    """The row with the positions of one of its aliases."""
    tail = name.lower().rsplit("/", 1)[-1]
    positions = next((count for alias, count in ALIAS_POSITIONS.items() if alias.lower() == tail), None)
    return row if positions is None else {**row, "config": {**row["config"], "max_position_embeddings": positions}}


def _shape(row: dict[str, Any], name: str, published: Published) -> ModelShape:
    detail = row["params_detail"]
    counts = Counts(params=row["params"], embed=detail["embed"], lm_head=detail["lm_head"], vision=detail["vision"])
    shape = shape_of(
        row["config"], id=name, counts=counts, dtype=row["dtype"], auto_class=row["auto_class"], published=published
    )
    return shape if shape.params == row["params"] else replace(shape, params=row["params"])


# Aliases that no repository of the Hub has: names that people use.
COLLOQUIAL = ("meta-llama/llama-3-8b", "tinyllama-1.1b", "llama-33b")
# Organisations that publish GPTQ, AWQ and FP8 checkpoints of their models beside them, under the model's name.
QUANTIZING = ("Qwen",)


def _proper_name(row: dict[str, Any], name: str) -> str:
    """The catalogue's spelling of a name: `qwen2.5-7b` -> `Qwen/Qwen2.5-7B`, `Llama-3-8B` -> the repository's."""
    spellings: list[str] = [row["id"], *sorted(row["aliases"], key=lambda alias: "/" not in alias)]
    tail = name.lower().rsplit("/", 1)[-1]
    exact = [spelling for spelling in spellings if spelling.lower() == name.lower() and "/" in spelling]
    proper = (exact + [spelling for spelling in spellings if spelling.lower().rsplit("/", 1)[-1] == tail])[0]
    return row["id"] if proper.lower() in COLLOQUIAL else proper


def _find(name: str) -> dict[str, Any] | None:
    """The row with this id or alias, whole or without organisation; the best match as `_rank` orders them.

    Only lines that contain the name are parsed, since the file has 200 kB.
    """
    wanted = name.lower()
    found = [json.loads(line) for line in _lines() if f'{wanted}"' in line.lower()]
    ranked = [(rank, row) for row in found if (rank := _rank(row, wanted)) is not None]
    return min(ranked, key=lambda pair: pair[0])[1] if ranked else None


def _rank(row: dict[str, Any], wanted: str) -> int | None:
    """0: the id. 1: an alias. 2: the id without organisation. 3: an alias without organisation. None: no match."""
    names = [row["id"].lower()], [alias.lower() for alias in row["aliases"]]
    for rank, known in enumerate((*names, *([full.rsplit("/", 1)[-1] for full in full_names] for full_names in names))):
        if wanted in known:
            return rank
    return None


@lru_cache(maxsize=1)
def _lines() -> tuple[str, ...]:
    return tuple(CATALOGUE.read_text(encoding="utf-8").splitlines())


def _names() -> Iterator[str]:
    for line in _lines():
        row = json.loads(line)
        yield row["id"]
        yield from row["aliases"]


def _from_hub(name: str) -> ModelShape:
    if name.count("/") != 1:
        raise UnknownName(
            "model",
            name,
            _names(),
            f"`plan models` lists the catalogue; a name on the Hub has an organisation (org/name). {BY_PATH}",
        )
    config = hub_config(name)
    if isinstance(config, str):
        raise UnknownName("model", name, _names(), f"It is not in the catalogue, and {config}. {BY_PATH}")
    return shape_of(config, id=name, counts=NOT_COUNTED)
