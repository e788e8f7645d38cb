"""Measure the layers of every model of the catalogue that has no formulas, and write `planner/data/layers/`.

    python -m scripts.measure_layers                  all models, under the recipes of `planned_recipes`
    python -m scripts.measure_layers MODEL ..         these models only
    python -m scripts.measure_layers --spot-check     one recipe of each model; if all are equal, only release.json

Needs the extra dryrun. Results are kept in the user's cache meanwhile, so that a run that was stopped goes on where it
stopped. Run it when `tests/test_coefficients.py` says that the measuring code has changed: with --spot-check after a
change that moves no number, such as a new name, without it after any other.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from itertools import product

from planner.candidate import Candidate
from planner.errors import InputError, UnknownArchitecture
from planner.files.cache import LIBRARIES
from planner.memory.layers.measured_layers import (
    LayerShapes,
    MeasuringRefused,
    Release,
    ShippedLayers,
    complete_model,
    load_shipped,
    measured_recipe,
    recipe_key,
    save_release,
    save_shipped,
    shipped_path,
)
from planner.memory.layers.recipe import Recipe
from planner.memory.stack_recipe import StackRecipe, frozen_recipe, kernel, stack_recipe, without_adapters
from planner.models.catalogue import load_model, model_rows
from planner.models.shape import ModelShape
from probes.layers.coefficients import load_or_measure, measure_layers, read_shapes
from probes.layers.store import source_hash

METHODS = ("sft", "dpo")  # with and without the model's own dropout; only dpo reads a reference model


def measurable_models() -> list[str]:
    """The models of the catalogue that have no formulas."""
    return [row.id for row in model_rows() if not load_model(row.id).known]


def planned_recipes(model: ModelShape, shapes: LayerShapes) -> list[Recipe]:
    """The recipes that a search asks for with lora_r 16 on all linear layers, sdpa attention and 16-bit autocast.

    Full and LoRA fine-tuning, weights in float32 and bfloat16, with a mask and without one, on cards with and without
    FlashAttention's kernels, with sharded states and without. Not among them: other ranks and targets, LoRA dropout,
    eager attention, and no mixed precision.
    """
    layers = complete_model(model, shapes, lambda _: MeasuringRefused(reason="only shapes are read here"))
    recipes = {
        measured_recipe(replace(stack.recipe, kernel=kernel(stack, layer.attention)), shapes)
        for stack in _stacks(layers)
        for layer, _ in layers.layer_kinds
    }
    return sorted(recipes, key=recipe_key)


def _stacks(model: ModelShape) -> Iterator[StackRecipe]:
    """The stacks of the candidates that a search compares: the policy's, and the reference model's."""
    settings = product(METHODS, ("full", "lora"), ("float32", "bfloat16"), ("none", "zero2"), (True, False))
    for (method, tuning, dtype, sharding, padded), flash in product(settings, (True, False)):
        candidate = Candidate(
            model=model, method=method, tuning=tuning, dtype=dtype, sharding=sharding, padded=padded
        )  # fmt: skip
        with contextlib.suppress(InputError):  # PEFT has no adapters for the model's layers
            stack = stack_recipe(candidate, flash)
            yield stack
            if method == "dpo":
                yield without_adapters(stack) if tuning == "lora" else frozen_recipe(candidate, flash)


def measure_model(name: str) -> str:
    """Measure one model under all recipes and write its file; return a line about it."""
    started, model = time.monotonic(), load_model(name)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
        try:
            shapes = read_shapes(model)
            recipes = planned_recipes(model, shapes)
        except UnknownArchitecture as error:
            return f"{name}: not measured: {error}"
        results = tuple((recipe, load_or_measure(model, recipe, nullcontext)) for recipe in recipes)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--spot-check", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    models = asked.models or measurable_models()
    found = list[str]()
    with ProcessPoolExecutor(asked.jobs) as pool:
        for line in filter(None, pool.map(spot_check if asked.spot_check else measure_model, models)):
            print(line, flush=True)
            found.append(line)
    if asked.spot_check and found:
        sys.exit("Measure these models again.")
    if not asked.models:
        save_release(Release(libraries={name: version(name) for name in LIBRARIES}, source_hash=source_hash()))


if __name__ == "__main__":
    main()
