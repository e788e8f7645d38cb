"""Measure the layers of every model of the catalogue that has no formulas, and write `planner/data/layers/`.

    python -m scripts.measure_layers                  all models, under the recipes of `planned_recipes`
    python -m scripts.measure_layers MODEL ..         these models only
    python -m scripts.measure_layers --missing        all models, only under recipes that their files lack or refuse
    python -m scripts.measure_layers --spot-check     one recipe of each model; if all are equal, only release.json

Needs the extra training. Results are kept in the user's cache meanwhile, so that a run that was stopped goes on
where it stopped. Run it when `tests/test_coefficients.py` says that the measuring code has changed: with --spot-check
after a change that moves no number, such as a new name, without it after any other.
"""

import argparse
import contextlib
import json
import lzma
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from itertools import chain, product
from typing import Any

import msgspec
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.errors import InputError, UnknownArchitecture
from planner.files.cache import LIBRARIES
from planner.memory.layers.measured_layers import (
    SHIPPED_FOLDER,
    LayerShapes,
    MeasuringRefused,
    ShippedLayers,
    complete_model,
    load_shipped,
    measured_recipe,
    recipe_key,
    shipped_path,
)
from planner.memory.layers.recipe import Recipe
from planner.memory.stack_recipe import (
    StackRecipe,
    frozen_recipe,
    generation_stack,
    kernel,
    stack_recipe,
    without_adapters,
)
from planner.methods import MethodName
from planner.models.catalogue import load_model, model_rows
from planner.models.lora_targets import widest_targets
from planner.models.shape import ModelShape
from probes.layers.coefficients import load_or_measure, measure_layers, read_shapes
from probes.layers.store import source_hash

RELEASE_FILE = SHIPPED_FOLDER / "release.json"  # the environment of the measurements
METHODS: tuple[MethodName, ...] = ("sft", "dpo")  # with and without dropout; only dpo reads a reference model
FULL_OR_LORA: tuple[dict[str, Any], ...] = (
    {"tuning": "full", "dtype": "float32"},
    {"tuning": "full", "dtype": "bfloat16"},
    {"tuning": "lora", "dtype": "bfloat16"},
    {"tuning": "lora", "dtype": "bfloat16", "autocast_adapter_dtype": False},
)
QLORA: dict[str, Any] = {"tuning": "lora", "dtype": "bfloat16", "quantization": "nf4"}
# Cards with FlashAttention's kernels have bfloat16, and cards without them have not.
QLORA_IN_FLOAT16: dict[str, Any] = {
    "tuning": "lora", "dtype": "float16", "quantization": "nf4", "precision": "fp16",
}  # fmt: skip
# Whether rows are padded, whether the card has FlashAttention's kernels. Rows without padding need the same memory with
# flash_attention_2 and with sdpa, which then runs the same kernel.
Attention = tuple[bool, bool]
ON_NEW_CARDS: tuple[Attention, ...] = ((True, True), (False, True))
ON_OLD_CARDS: tuple[Attention, ...] = ((True, False), (False, False))
# Tuning, attention, whether Liger's kernels run.
PLANNED: tuple[tuple[dict[str, Any], Attention, bool], ...] = (
    *product((*FULL_OR_LORA, {"tuning": "lora", "dtype": "float32"}), (*ON_NEW_CARDS, *ON_OLD_CARDS), (False,)),
    *product((QLORA,), ON_NEW_CARDS, (False,)),
    *product((QLORA_IN_FLOAT16,), ON_OLD_CARDS, (False,)),
    *product((*FULL_OR_LORA, QLORA), ON_NEW_CARDS, (True,)),
)


def measurable_models() -> list[str]:
    """The models of the catalogue that have no formulas."""
    return [row.id for row in model_rows() if not load_model(row.id).known]


def planned_recipes(model: ModelShape, shapes: LayerShapes) -> list[Recipe]:
    """The recipes that a search asks for with lora_r 16 on all linear layers and 16-bit numbers.

    They are autocast's, or where states are sharded, the weights' own. Full and LoRA fine-tuning, weights in float32
    and bfloat16, adapters in float32 and in the base's 16 bits, LoRA on a 4-bit base, sdpa with a mask and
    without one, on cards with and without FlashAttention's kernels, with sharded states and without, with Liger's
    kernels and without. Not among them: other ranks and targets, LoRA dropout, an 8-bit base, FlashAttention on padded
    rows, eager attention, and no mixed precision.
    """
    layers = complete_model(model, shapes, lambda _: MeasuringRefused(reason="only shapes are read here"))
    recipes = {
        measured_recipe(replace(stack.recipe, kernel=kernel(stack, layer.attention)), shapes)
        for stack in _stacks(layers)
        for layer, _ in layers.layer_kinds
    }
    return sorted(recipes, key=recipe_key)


def _stacks(model: ModelShape) -> Iterator[StackRecipe]:
    """The stacks of the candidates that a search compares: the policy's, also in `generate`, and the reference's."""
    with_float32_adapters = (("ppo", (QLORA, attention, False), "none") for attention in ON_NEW_CARDS)
    planned = chain(product(METHODS, PLANNED, ("none", "zero2")), with_float32_adapters)
    for method, (tuning, (padded, flash), liger), sharding in planned:
        if liger and not model.architecture.liger_blocks:
            continue
        candidate = Candidate(
            model=model,
            method=method,
            **tuning,
            lora_target_modules=widest_targets(model),
            use_liger_kernel=liger,
            sharding=sharding,
            padded=padded,
        )
        with contextlib.suppress(InputError):  # PEFT has no adapters for the model's layers
            stack = stack_recipe(candidate, flash)
            yield stack
            if method == "dpo":
                yield without_adapters(stack) if candidate.tuning == "lora" else frozen_recipe(candidate, flash)
            elif candidate.tuning == "lora":
                yield generation_stack(stack, candidate)


def measure_model(name: str, only_missing: bool = False) -> str:
    """Measure one model under all recipes and write its file; return a line about it.

    `only_missing`: keep what its file has, unless that is a refusal.
    """
    started, model = time.monotonic(), load_model(name)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
        try:
            shapes = read_shapes(model)
            recipes = planned_recipes(model, shapes)
        except UnknownArchitecture as error:
            return f"{name}: not measured: {error}"
        shipped = load_shipped(model) if only_missing else None
        kept = {
            recipe: result
            for recipe, result in (shipped.results if shipped and shipped.shapes == shapes else ())
            if not isinstance(result, MeasuringRefused)
        }
        results = tuple((recipe, kept.get(recipe) or load_or_measure(model, recipe, nullcontext)) for recipe in recipes)
    save_shipped(model, ShippedLayers(shapes=shapes, results=results))
    refused = sorted({result.reason for _, result in results if isinstance(result, MeasuringRefused)})
    size, seconds = shipped_path(model).stat().st_size, time.monotonic() - started
    return "\n  ".join([f"{name}: {len(recipes)} recipes, {size:,} bytes, {seconds:.0f} s", *refused])


def spot_check(name: str) -> str:
    """Measure one model again under one of its recipes; return "" if its file has the same."""
    model = load_model(name)
    shipped = load_shipped(model)
    if shipped is None:
        return f"{name}: no file"
    recipe, result = shipped.results[len(name) % len(shipped.results)]  # not the same recipe for all models
    with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
        if read_shapes(model) != shipped.shapes:
            return f"{name}: other shapes"
        again = measure_layers(model, recipe)
    refused = isinstance(again, MeasuringRefused) and isinstance(
        result, MeasuringRefused
    )  # texts list sets in any order
    return "" if refused or again == result else f"{name}: another result under {recipe_key(recipe)}"


def save_shipped(model: ModelShape, layers: ShippedLayers) -> None:
    """Write a model's file. The same layers give the same bytes."""
    ordered = sorted(layers.results, key=lambda entry: recipe_key(entry[0]))
    content = msgspec.json.encode(replace(layers, results=tuple(ordered)), order="sorted")
    SHIPPED_FOLDER.mkdir(parents=True, exist_ok=True)
    shipped_path(model).write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--spot-check", action="store_true")
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    models = asked.models or measurable_models()
    found = list[str]()
    with ProcessPoolExecutor(asked.jobs) as pool:
        work = spot_check if asked.spot_check else partial(measure_model, only_missing=asked.missing)
        for line in filter(None, pool.map(work, models)):
            print(line, flush=True)
            found.append(line)
    if asked.spot_check and found:
        sys.exit("Measure these models again.")
    if not asked.models and not asked.missing:
        release = {"libraries": {name: version(name) for name in LIBRARIES}, "source_hash": source_hash()}
        RELEASE_FILE.write_text(json.dumps(release, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
