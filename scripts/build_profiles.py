"""The profiles that the package ships: those on which the answers to what people ask most rest.

    python scripts/build_profiles.py [--minutes N] [--part 1/2]     writes planner/data/profiles/*.json.z and README.md

Needs the dryrun extra. Questions are settled one after the other, the most frequent first: what `plan` recommends, and the next larger batch, get
profiles until the answer stays. What is there already is not made again (remove it to have it made anew); what cannot be made is named in the README.
One profile answers for every size of its regime and for every model of its architecture.
"""

import argparse
import json
import time
from importlib.metadata import version
from itertools import product
from pathlib import Path

from planner.candidate import Candidate
from planner.catalogue import load_model
from planner.cluster import Cluster
from planner.gpus import parse_cluster
from planner.job import Job
from planner.knobs import Question
from planner.methods import MethodName
from planner.plan import classes, plan
from planner.search import batches, search
from planner.trace.profile import NoProfile
from planner.trace.recipe import key_of, recipe_of
from planner.trace.store import LIBRARIES, SHIPPED, SUFFIX, cache_root, forget, load_profile, write_profile

NOTES = cache_root() / "made-profiles"  # a line for the index of each that was made or could not be: not shipped

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
METHODS: dict[MethodName, float] = {"sft": 1.0, "grpo": 1.0, "dpo": 0.6, "reward": 0.3, "rloo": 0.15, "orpo": 0.1}  # by use
CLUSTERS: tuple[str, ...] = ("2xA100-40G", "1xH100", "8xH100", "1xRTX-4090")
LENGTHS: tuple[tuple[int, float], ...] = ((0, 1.0), (2048, 0.4))  # of a row (0: TRL's default), by use
LONGER: tuple[MethodName, ...] = ("sft", "dpo")  # whose rows people make longer than TRL's default
ROUNDS = 6  # in which what a question recommends may change under what profiles say


def questions() -> list[tuple[Job, Cluster]]:
    """What people ask, the most frequent first."""
    found: list[tuple[float, Job, Cluster]] = []
    for (rank, name), (method, use), gpus, (length, share) in product(enumerate(MODELS), METHODS.items(), CLUSTERS, LENGTHS):
        if not length or method in LONGER:
            job = Job(model=load_model(name), method=method, pinned={"max_length": length} if length else {})
            found.append((use * share / (rank + 1), job, parse_cluster(gpus, None)))
    return [(job, cluster) for _, job, cluster in sorted(found, key=lambda each: -each[0])]


def open_candidates(job: Job, cluster: Cluster) -> dict[str, Candidate]:
    """What a question's answer rests on and has no profile, by key.

    Each class' best candidate, and the next larger batch, which did not fit; and what else the answer shows.
    """
    shown = (alternative.estimate for alternative in plan(job, cluster).alternatives)
    found = {key: answer.candidate for answer in shown if load_profile(answer.candidate) is None and (key := key_if_any(answer.candidate))}
    for tuning in classes(job):
        best = search(Question(job=job, cluster=cluster, tuning_class=tuning))
        if best is None or not best.fits:
            continue
        choices = batches(best.candidate, job)
        larger = [size for size in choices.values if size[0] > best.candidate.per_device_train_batch_size][:1]
        for candidate in (best.candidate, *map(choices.at, larger)):
            if load_profile(candidate) is None and (key := key_if_any(candidate)):
                found[key] = candidate
    return found


def key_if_any(candidate: Candidate) -> str:
    """The key of a candidate's recipe, empty where no profile stands for it."""
    try:
        return key_of(recipe_of(candidate))
    except NoProfile:
        return ""


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


def readme(rows: list[dict[str, object]]) -> str:
    """What is shipped, from which versions, and how much of what people ask it answers."""
    good, bad = [row for row in rows if "error" not in row], [row for row in rows if "error" in row]
    size = sum(path.stat().st_size for path in SHIPPED.glob(f"*{SUFFIX}"))
    settled = {question for path in NOTES.glob("settled-*.txt") for question in path.read_text().splitlines()}
    lines = [
        "# Shipped profiles",
        "",
        f"{len(good)} profiles, {size / 2**20:.1f} MiB, from {', '.join(f'{name} {version(name)}' for name in LIBRARIES)}.",
        "Made by `python scripts/build_profiles.py`. Each answers for every size of its regime, every depth and every model of its architecture.",
        "",
        f"Of {len(questions())} questions ({len(MODELS)} architectures, {len(METHODS)} methods, {', '.join(CLUSTERS)}; TRL's lengths and 2048)",
        f"{len(settled)} are settled: what `plan` recommends in every class of tuning, and the next larger batch, stand on these profiles.",
        "",
        "| file | first met with | method | tuning | quantization | dtype | states | checkpointing | attention | engine | regime |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *sorted(line(row) for row in good),
    ]
    return "\n".join([*lines, "", "Not made:", "", *sorted(f"- {line(row)} {row['error']}" for row in bad)] if bad else lines) + "\n"


def line(row: dict[str, object]) -> str:
    settings, regime = row["settings"], row["regime"]
    assert isinstance(settings, dict) and isinstance(regime, dict)
    shown = ", ".join(f"{name} {value}" for name, value in regime.items() if value not in (False, "none"))
    names = ("method", "tuning", "quantization", "dtype", "states", "gradient_checkpointing", "attn_implementation", "engine")
    return f"| {' | '.join(map(str, (row['key'], row['model'], *(settings[name] for name in names), shown)))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=600, help="stop after so many")
    parser.add_argument("--part", default="1/1", help="2/3: of three processes this is the second")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    SHIPPED.mkdir(parents=True, exist_ok=True)
    NOTES.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    for job, cluster in questions()[part - 1 :: parts]:
        if time.monotonic() < end and settle(job, cluster, end):
            with (NOTES / f"settled-{part}.txt").open("a") as file:
                file.write(f"{job.model.id} {job.method} {dict(job.pinned)} {cluster.num_gpus} {cluster.gpu.name}\n")
    if part == parts:
        write_index()


def settle(job: Job, cluster: Cluster, end: float) -> bool:
    """Makes what a question's answer rests on, until the answer stays; whether all of it has a profile then."""
    for _ in range(ROUNDS):
        forget()
        found = open_candidates(job, cluster)
        missing = {key: candidate for key, candidate in found.items() if not index_path(key).exists()}
        for key, candidate in missing.items():
            if time.monotonic() > end:
                return False
            began = time.monotonic()
            row = made(candidate)
            index_path(key).write_text(json.dumps(row, sort_keys=True) + "\n")
            print(f"{line(row)} {row.get('error', '')} {time.monotonic() - began:.0f} s", flush=True)
        if not missing:
            return not found
    return False


def index_path(key: str) -> Path:
    """What was made for a key, or why not: notes for the index, not shipped."""
    return NOTES / f"{key}.json"


def write_index() -> None:
    forget()
    rows = [json.loads(path.read_text()) for path in sorted(NOTES.glob("*.json"))]
    (SHIPPED / "README.md").write_text(readme([row for row in rows if "error" in row or (SHIPPED / (str(row["key"]) + SUFFIX)).exists()]))


if __name__ == "__main__":
    main()
