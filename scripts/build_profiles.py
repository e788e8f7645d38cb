"""The profiles that the package ships: those of the most used recipes.

    python scripts/build_profiles.py [--minutes N] [--fresh]     writes planner/data/profiles/*.json.z and README.md

Needs the dryrun extra. What is there already, from the same versions, is not made again; what cannot be made is named in the README.
One profile answers for every size of its regime and for every model of its architecture; the most used regimes come first.
"""

import argparse
import json
import time
import zlib
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from unittest import mock

from planner import search
from planner.candidate import Candidate
from planner.catalogue import load_model
from planner.cluster import Cluster
from planner.estimate import estimate
from planner.gpus import parse_cluster
from planner.job import Job
from planner.knobs import Question
from planner.methods import MethodName
from planner.plan import classes
from planner.quantities import Estimate
from planner.trace.profile import NoProfile, profile_from_json
from planner.trace.recipe import key_of, period, recipe_of
from planner.trace.store import LIBRARIES, SHIPPED, SUFFIX, write_profile

# Models of every architecture, in order of use; what is in brackets shares the profiles of the one before it.
MODELS: tuple[str, ...] = (
    "Qwen2.5-7B",  # (14B, 32B, 72B, Coder, Math)
    "Llama-3.1-8B",  # (70B, 3.3-70B, Llama-3)
    "Qwen3-8B",  # (14B, 32B)
    "Qwen2.5-0.5B",  # (1.5B, 3B)
    "Llama-3.2-1B",  # (3B)
    "Qwen3-0.6B",  # (1.7B, 4B)
    "Mistral-7B-v0.3",  # (Instruct v0.2, Small 2409)
    "Mistral-7B-v0.1", "Mistral-Nemo-Base-2407", "phi-4", "Phi-4-mini-instruct", "Phi-3.5-mini-instruct", "SmolLM3-3B", "gemma-3-1b-pt", "gemma-3-270m",
)  # fmt: skip
METHODS: dict[MethodName, float] = {"sft": 1.0, "grpo": 0.8, "dpo": 0.6, "reward": 0.3, "rloo": 0.2, "orpo": 0.1}  # by use
CLUSTERS: tuple[str, ...] = ("1xRTX-4090", "1xA100-80G", "8xH100", "2xA100-40G")
LENGTHS: tuple[tuple[int, float], ...] = ((0, 1.0), (2048, 0.4))  # of a row (0: TRL's default), by use
LONGER: tuple[MethodName, ...] = ("sft", "dpo")  # whose rows people make longer than TRL's default
RECOMMENDED = 20  # a recommended candidate is worth so many that a search only passes by
SECONDS_A_STEP = 3  # of a profile of one micro-step; what accumulates or generates takes longer


def wanted() -> dict[str, Candidate]:
    """A candidate of every recipe that `plan` meets on the questions above, by key: the most worth for its time first."""
    worth: dict[str, float] = {}
    of_key: dict[str, Candidate] = {}
    for (rank, name), (method, use), gpus, (length, share) in product(enumerate(MODELS), METHODS.items(), CLUSTERS, LENGTHS):
        if length and method not in LONGER:
            continue
        for candidate, times in met(name, method, gpus, length).items():
            try:
                key = key_of(recipe_of(candidate))
            except NoProfile:
                continue
            worth[key] = worth.get(key, 0.0) + use * share * times / (rank + 1) / cost(candidate)
            of_key.setdefault(key, candidate)
    return {key: of_key[key] for key in sorted(worth, key=lambda each: (-worth[each], each))}


def met(name: str, method: MethodName, gpus: str, length: int) -> dict[Candidate, float]:
    """The candidates that a search asks about, each size of them once, and how much they are worth to its answer."""
    asked: dict[Candidate, float] = {}

    def noted(candidate: Candidate, cluster: Cluster, risk: float) -> Estimate:
        asked[replace(candidate, vllm_gpu_memory_utilization=0.3, lora_r=16)] = 1.0
        return estimate(candidate, cluster, risk)

    job = Job(model=load_model(name), method=method, pinned={"max_length": length} if length else {})
    with mock.patch.object(search, "answer_of", noted):
        found = [search.search(Question(job=job, cluster=parse_cluster(gpus, None), tuning_class=tuning)) for tuning in classes(job)]
    for best in found:
        if best is not None and best.fits:
            asked[replace(best.candidate, vllm_gpu_memory_utilization=0.3, lora_r=16)] = RECOMMENDED
    return asked


def cost(candidate: Candidate) -> float:
    """Seconds to make a profile, about: small sizes are traced, but as many micro-steps as there are."""
    steps = candidate.gradient_accumulation_steps if candidate.method_row.generates else min(candidate.gradient_accumulation_steps, 2)
    return SECONDS_A_STEP * (steps + (candidate.method_row.generates and candidate.vllm == "off")) * period(candidate.model)


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
    recipes = wanted()
    end = time.monotonic() + 60 * args.minutes
    for number, (key, candidate) in enumerate(recipes.items()):
        path, failed = SHIPPED / (key + SUFFIX), SHIPPED / (key + ".failed.json")
        known = not args.fresh and (failed.exists() or (path.exists() and current(path.read_bytes())))
        if time.monotonic() > end or known or number % parts != part - 1:
            continue
        began = time.monotonic()
        row = made(candidate)
        if "error" in row:
            failed.write_text(json.dumps(row, sort_keys=True) + "\n")
        print(f"{number + 1}/{len(recipes)} {line(row)} {row.get('error', '')} {time.monotonic() - began:.0f} s", flush=True)
    write_index(recipes)


def write_index(recipes: dict[str, Candidate]) -> None:
    rows: list[dict[str, object]] = []
    for key, candidate in recipes.items():
        failed = SHIPPED / (key + ".failed.json")
        if (SHIPPED / (key + SUFFIX)).exists():
            rows.append({"key": key, "model": candidate.model.id, **recipe_of(candidate)})
        elif failed.exists():
            rows.append(json.loads(failed.read_text()))
    (SHIPPED / "README.md").write_text(readme(rows, len(recipes)))


if __name__ == "__main__":
    main()
