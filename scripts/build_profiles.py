"""The profiles that the package ships: those of the most used recipes.

    python scripts/build_profiles.py [--minutes N] [--fresh]     writes planner/data/profiles/*.json.z and README.md

Needs the dryrun extra. What is there already, from the same versions, is not made again; what cannot be made is named in the README.
One profile answers for every size of its regime and for every model of its architecture; the most used regimes come first.
"""

import argparse
import json
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from typing import Literal

from planner.candidate import Candidate, Dtype
from planner.catalogue import load_model
from planner.methods import MethodName
from planner.trace.profile import NoProfile, profile_from_json
from planner.trace.recipe import key_of, recipe_of
from planner.trace.store import LIBRARIES, SHIPPED, SUFFIX, write_profile

# Models of every architecture, in order of use; what is in brackets shares the profiles of the one before it.
MODELS: tuple[str, ...] = (
    "Qwen2.5-7B",  # (14B, 32B, 72B, Coder, Math)
    "Llama-3.1-8B",  # (70B, 3.3-70B, Llama-3)
    "Qwen2.5-0.5B",  # (1.5B, 3B)
    "Llama-3.2-1B",  # (3B)
    "Qwen3-8B",  # (14B, 32B)
    "Qwen3-0.6B",  # (1.7B, 4B)
    "Mistral-7B-v0.3",  # (Instruct v0.2, Small 2409)
    "Mistral-7B-v0.1", "Mistral-Nemo-Base-2407", "Phi-3.5-mini-instruct", "phi-4", "Phi-4-mini-instruct", "SmolLM3-3B", "gemma-3-1b-pt", "gemma-3-270m",
)  # fmt: skip
METHODS: tuple[MethodName, ...] = ("sft", "dpo", "reward", "grpo")
TUNINGS: tuple[tuple[Literal["full", "lora"], Dtype], ...] = (("lora", "bfloat16"), ("full", "float32"))
# (rows, tokens, accumulation): one of each regime that a search over an effective batch of 8 meets, lengths as people set them.
SIZES: tuple[tuple[int, int, int], ...] = (
    (4, 512, 1), (8, 512, 1), (2, 512, 4), (1, 512, 8), (8, 2048, 1), (4, 1024, 2), (4, 2048, 2), (1, 512, 1), (1, 4096, 8), (2, 4096, 4), (1, 8192, 8)
)  # fmt: skip
PROMPT = 512
BEGINNING = 4  # so many models and sizes come before the next so many


def candidates() -> Iterator[Candidate]:
    """The most used first: the first models' recipes at the sizes that a search begins with, then further models, methods and sizes."""
    sizes = [(size, number // BEGINNING) for number, size in enumerate(SIZES)]
    models = [(name, number // BEGINNING) for number, name in enumerate(MODELS)]
    methods = [(method, number // 2) for number, method in enumerate(METHODS)]
    choices = product(((True, 0), (False, 2)), sizes, models, methods, ((tuning, 0) for tuning in TUNINGS))
    for ranked in sorted(choices, key=lambda choice: sum(rank for _, rank in choice)):
        (checkpointing, _), (size, _), (name, _), (method, _), ((tuning, dtype), _) = ranked
        candidate = Candidate(model=load_model(name), method=method, tuning=tuning, dtype=dtype, gradient_checkpointing=checkpointing)
        yield sized(candidate, size)


def sized(candidate: Candidate, size: tuple[int, int, int]) -> Candidate:
    rows, tokens, accumulation = size
    batch = replace(candidate, per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation, max_length=tokens)
    if candidate.method != "grpo":
        return batch
    return replace(batch, prompt_length=PROMPT, max_completion_length=tokens, steps_per_generation=accumulation, num_generations=rows * accumulation)


def current(path_text: bytes) -> bool:
    """Whether a profile comes from the versions that are installed."""
    profile = profile_from_json(zlib.decompress(path_text).decode())
    return dict(profile.versions) == {name: version(name) for name in LIBRARIES}


def made(candidate: Candidate) -> dict[str, object]:
    """One row of the index: the recipe, and what is wrong with it if there is no profile."""
    from probes.profiles import profile_of

    recipe = recipe_of(candidate)
    row: dict[str, object] = {"key": key_of(recipe), "model": candidate.model.id, **recipe}
    try:
        profile = profile_of(candidate)
    except NoProfile as error:
        return row | {"error": str(error)}
    except Exception as error:  # what the libraries refuse is a row too
        return row | {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"}
    write_profile(profile, SHIPPED / (key_of(recipe) + SUFFIX))
    return row


def readme(rows: list[dict[str, object]], planned: int) -> str:
    """What is shipped, from which versions."""
    good, bad = [row for row in rows if "error" not in row], [row for row in rows if "error" in row]
    size = sum(path.stat().st_size for path in SHIPPED.glob(f"*{SUFFIX}"))
    lines = [
        "# Shipped profiles",
        "",
        f"{len(good)} profiles of {planned} recipes, {size / 2**20:.1f} MiB, from {', '.join(f'{name} {version(name)}' for name in LIBRARIES)}.",
        "Made by `python scripts/build_profiles.py`. Each answers for every size of its regime, every depth and every model of its architecture.",
        "",
        "| file | model | method | tuning | dtype | checkpointing | regime |",
        "|---|---|---|---|---|---|---|",
        *sorted(line(row) for row in good),
    ]
    return "\n".join([*lines, "", "Not made:", "", *sorted(f"- {line(row)} {row['error']}" for row in bad)] if bad else lines) + "\n"


def line(row: dict[str, object]) -> str:
    settings, regime = row["settings"], row["regime"]
    assert isinstance(settings, dict) and isinstance(regime, dict)
    shown = ", ".join(f"{name} {value}" for name, value in regime.items() if value not in (False, "none"))
    cells = (row["key"], row["model"], settings["method"], settings["tuning"], settings["dtype"], settings["gradient_checkpointing"], shown)
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=600, help="stop after so many")
    parser.add_argument("--part", default="1/1", help="2/3: of three processes this is the second")
    parser.add_argument("--fresh", action="store_true", help="make all of them again")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    SHIPPED.mkdir(parents=True, exist_ok=True)
    wanted: dict[str, Candidate] = {}
    refused: set[str] = set()
    for candidate in candidates():
        try:
            wanted.setdefault(key_of(recipe_of(candidate)), candidate)
        except NoProfile as error:
            refused.add(f"{candidate.model.id} {candidate.method}: {error}")
    print("\n".join(sorted(refused)), flush=True)
    end = time.monotonic() + 60 * args.minutes
    for number, (key, candidate) in enumerate(wanted.items()):
        path, failed = SHIPPED / (key + SUFFIX), SHIPPED / (key + ".failed.json")
        known = not args.fresh and (failed.exists() or (path.exists() and current(path.read_bytes())))
        if time.monotonic() > end or known or number % parts != part - 1:
            continue
        began = time.monotonic()
        row = made(candidate)
        if "error" in row:
            failed.write_text(json.dumps(row, sort_keys=True) + "\n")
        print(f"{number + 1}/{len(wanted)} {line(row)} {row.get('error', '')} {time.monotonic() - began:.0f} s", flush=True)
    write_index(wanted)


def write_index(wanted: dict[str, Candidate]) -> None:
    rows: list[dict[str, object]] = []
    for key, candidate in wanted.items():
        failed = SHIPPED / (key + ".failed.json")
        if (SHIPPED / (key + SUFFIX)).exists():
            rows.append({"key": key, "model": candidate.model.id, **recipe_of(candidate)})
        elif failed.exists():
            rows.append(json.loads(failed.read_text()))
    (SHIPPED / "README.md").write_text(readme(rows, len(wanted)))


if __name__ == "__main__":
    main()
