"""What was measured of layers without formulas, kept on disk beside the profiles: by model, recipe, library versions and our own probes' source."""

import dataclasses
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from planner.files.cache import cache_root, installed_versions
from planner.memory.layers.autograd import LiveBytes
from planner.memory.layers.one_layer import LayerMemory, PassPeak
from planner.memory.layers.recipe import Recipe
from planner.models.from_config import Counts
from planner.models.shape import Attention, Experts, Layer, Linear, Mlp, ModelShape, Norm

FOLDER = "layers"
# The modules of ours by which layers are measured.
OURS = Path(__file__).parents[1]
SOURCES = ("layers/*.py", "dryrun/**/*.py", "step/*.py", "substitution.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """One layer of each kind that a model has, the places of each kind, and what is outside them.

    `auto_class` loads the model. `counts`: of all of it, `vision` what text does not pass. `outer_linears`, `vision_linears`: `nn.Linear`
    modules outside the layers but the head, with how many there are of each.
    """

    of_each_kind: tuple[Layer, ...]
    places: tuple[tuple[int, ...], ...]
    auto_class: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    counts: Counts
    embed_norm: Norm | None  # None: the embedding goes straight into the first layer
    outer_linears: tuple[tuple[Linear, int], ...]
    vision_linears: tuple[tuple[Linear, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The memory of one layer of each kind under one recipe, before any gradient exists and after."""

    without_gradients: tuple[LayerMemory, ...]
    with_gradients: tuple[LayerMemory, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """Why the layers cannot be run so."""

    reason: str


def load_layers(model: ModelShape) -> Layers | None:
    """The shapes that were kept, None where there are none or their file is broken."""
    try:
        found = json.loads(_file(model, "shapes").read_text(encoding="utf-8"))
        read = {
            "of_each_kind": tuple(map(_layer, found["of_each_kind"])), "places": tuple(map(tuple, found["places"])), "counts": Counts(**found["counts"]),
            "embed_norm": None if found["embed_norm"] is None else Norm(**found["embed_norm"]),
            "outer_linears": _counted(found["outer_linears"]), "vision_linears": _counted(found["vision_linears"]),
        }  # fmt: skip
        return Layers(**{**found, **read})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save_layers(model: ModelShape, layers: Layers) -> None:
    _write(_file(model, "shapes"), dataclasses.asdict(layers))


def load_measured(model: ModelShape, recipe: Recipe) -> Measured | Refused | None:
    """What was kept for a recipe, None where there is nothing or its file is broken."""
    try:
        found = json.loads(_file(model, _spelled(recipe)).read_text(encoding="utf-8"))
        if "refused" in found:
            return Refused(reason=str(found["refused"]))
        return Measured(
            without_gradients=tuple(map(_memory, found["without_gradients"])),
            with_gradients=tuple(map(_memory, found["with_gradients"])),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save_measured(model: ModelShape, recipe: Recipe, found: Measured | Refused) -> None:
    """Keeps what was measured, and what was refused too: it is refused as long as the libraries are the same."""
    answer: object = {"refused": found.reason} if isinstance(found, Refused) else dataclasses.asdict(found)
    _write(_file(model, _spelled(recipe)), answer)


# -- files ---------------------------------------------------------------------------------------------------------------


def _file(model: ModelShape, of: str) -> Path:
    """The file of one answer, in a folder named after the installed libraries' versions."""
    said = json.dumps([model.config, model.auto_class, of, _own_source()], sort_keys=True)
    return cache_root() / FOLDER / installed_versions() / f"{hashlib.sha256(said.encode()).hexdigest()[:24]}.json"


@lru_cache(maxsize=1)
def _own_source() -> str:
    """Our own code: what it finds changes with it."""
    return hashlib.sha256(
        b"".join(path.read_bytes() for pattern in SOURCES for path in sorted(OURS.glob(pattern)))
    ).hexdigest()


def _spelled(recipe: Recipe) -> str:
    return json.dumps({**dataclasses.asdict(recipe), "lora_targets": sorted(recipe.lora_targets)}, sort_keys=True)


def _write(path: Path, answer: object) -> None:
    """Whoever reads meanwhile sees the whole file or none. Where nothing can be written, it is measured again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            json.dump(answer, file)
        os.replace(file.name, path)
    except OSError:
        return


# -- from JSON -----------------------------------------------------------------------------------------------------------


def _layer(found: dict[str, Any]) -> Layer:
    attention = Attention(**{**found["attention"], "linears": _linears(found["attention"])})
    block = found["feed_forward"]
    feed_forward = (
        Experts(**{**block, "shared": None if block["shared"] is None else _mlp(block["shared"])})
        if "num_experts" in block
        else _mlp(block)
    )
    return Layer(
        **{
            **found,
            "attention": attention,
            "feed_forward": feed_forward,
            "norms": tuple(Norm(**norm) for norm in found["norms"]),
        }
    )


def _mlp(found: dict[str, Any]) -> Mlp:
    return Mlp(**{**found, "linears": _linears(found)})


def _linears(found: dict[str, Any]) -> tuple[Linear, ...]:
    return tuple(Linear(**linear) for linear in found["linears"])


def _counted(found: list[Any]) -> tuple[tuple[Linear, int], ...]:
    return tuple((Linear(**linear), count) for linear, count in found)


def _memory(found: dict[str, Any]) -> LayerMemory:
    return LayerMemory(
        saved=_moment(found["saved"]), checkpoint=_moment(found["checkpoint"]), forward=_peaks(found["forward"]),
        checkpointed_forward=_peaks(found["checkpointed_forward"]), backward=_peaks(found["backward"]),
        checkpointed_backward=_peaks(found["checkpointed_backward"]), inference=_peaks(found["inference"]),
    )  # fmt: skip


def _peaks(found: dict[str, Any]) -> PassPeak:
    return PassPeak(tuple(map(_moment, found["snapshots"])))


def _moment(found: dict[str, Any]) -> LiveBytes:
    (tokens, scores, constant), kinds = found["total"], found["kinds"]
    return LiveBytes((tokens, scores, constant), tuple((kind, (of[0], of[1], of[2])) for kind, of in kinds))
