"""Compare the formulas with the dry run on the same random candidates: signed errors of the peak.

    python scripts/compare_simulated.py [--workers 2] [--limit N]     writes results/estimated_vs_simulated.jsonl and
    .md

Needs the dryrun extra. Models are cut to a few layers, whose shapes are the real ones: what depends on depth is linear
in it, and both sides see the same depth. Dry runs that are already in the .jsonl are not run again (`--fresh` does);
estimates always are.
"""

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

from planner.candidate import Candidate
from planner.estimate import estimate
from planner.gpus.parse import parse_cluster
from planner.methods import METHODS
from planner.models.catalogue import load_model
from planner.models.from_config import shape_of
from planner.models.shape import ModelShape
from probes.layers.few_layers import keep_layers

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROWS, TABLE = RESULTS / "estimated_vs_simulated.jsonl", RESULTS / "estimated_vs_simulated.md"
CLUSTER = parse_cluster("1xH200", None)
LAYERS = 4
SEED = 20261120
MODELS = (
    "Qwen2.5-0.5B", "Qwen2.5-7B", "Llama-3.2-1B", "Llama-3.1-8B", "Qwen3-1.7B", "gemma-3-1b-it", "gemma-2-2b",
    "Mistral-7B-v0.1", "Phi-3.5-mini-instruct", "OLMo-2-0425-1B", "pythia-1b", "SmolLM3-3B",
    "granite-3.3-2b-instruct", "Mixtral-8x7B-v0.1",
)  # fmt: skip
VERSIONS = ("torch", "transformers", "trl", "peft", "accelerate")
COUNT = 440
Row = dict[str, object]
OUTSIDE_THE_TRACE = ("runtime", "fragmentation", "communication")  # a dry run sees what PyTorch allocates


def cut(name: str) -> ModelShape:
    """The model with its first layers only."""
    model = load_model(name)
    return shape_of(keep_layers(dict(model.config), list(range(LAYERS))), id=model.id)


def candidates() -> Iterator[tuple[str, Candidate]]:
    """A stratified random sample with a fixed seed, of all models, methods, tunings, dtypes and lengths."""
    draw = random.Random(SEED)
    methods = [name for name, row in METHODS.items() if row.last_trl == "current"]
    for number in range(COUNT):
        name, method = MODELS[number % len(MODELS)], methods[number // len(MODELS) % len(methods)]
        model = cut(name)
        tuning = draw.choice(("full", "lora"))
        settings: dict[str, object] = {
            **METHODS[method].defaults,
            "tuning": tuning,
            "dtype": draw.choice(("float32", "bfloat16")),
            "per_device_train_batch_size": draw.choice((1, 2, 4)),
            "max_length": draw.choice((256, 512, 1024, 2048)),
            "prompt_length": draw.choice((128, 256, 512)),
            "max_completion_length": draw.choice((64, 128, 256)),
            "num_generations": 2,
            "gradient_checkpointing": draw.random() < 0.5,
            "padded": draw.random() < 0.5,
            "attn_implementation": draw.choice(("sdpa", "sdpa", "eager")),
            "lora_r": draw.choice((8, 32)),
        }
        if method in ("online-dpo", "gkd"):
            settings["max_length"] = settings["prompt_length"] + settings["max_completion_length"]  # type: ignore[operator]
        if method in ("grpo", "rloo"):
            settings["per_device_train_batch_size"] = draw.choice((2, 4))
        if method == "kto" and settings["per_device_train_batch_size"] == 1:
            settings["per_device_train_batch_size"] = 2  # KTO refuses single rows
        if METHODS[method].teacher:
            settings["teacher_model"] = model
        yield name, Candidate(model=model, method=method, **settings)  # type: ignore[arg-type]


def simulated(name: str, candidate: Candidate) -> Row:
    """The dry run's side of a row, or the error that stopped it."""
    from probes.dryrun.simulate import dry_run

    try:
        trace = dry_run(candidate)
    except Exception as error:  # a combination that a library refuses is a row too
        return {
            "key": key(name, candidate),
            "error": f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}",
        }
    phases = {phase.name: phase.total_bytes for phase in trace.phases}
    return {"key": key(name, candidate), "simulated_bytes": trace.peak_bytes, "simulated_phases": phases}


def estimated(row: Row, candidate: Candidate) -> Row:
    """The row with the formulas' side, which is computed again each time because it costs little."""
    if "error" in row:
        return row
    gpu = estimate(candidate, CLUSTER).gpus[0]
    phases = {p.name: {k: v for k, v in p.components.items() if k not in OUTSIDE_THE_TRACE} for p in gpu.phases}
    heaviest = max(phases, key=lambda phase: sum(phases[phase].values()))
    return {
        **row,
        "estimated_bytes": sum(phases[heaviest].values()),
        "estimated_phase": heaviest,
        "estimated_phases": {phase: sum(components.values()) for phase, components in phases.items()},
        "estimated_components": phases[heaviest],
    }


def key(name: str, candidate: Candidate) -> str:
    shown = (
        "method",
        "tuning",
        "dtype",
        "per_device_train_batch_size",
        "row_tokens",
        "gradient_checkpointing",
        "padded",
        "attn_implementation",
        "lora_r",
    )
    return " ".join([name, *(str(getattr(candidate, field)) for field in shown)])


def table(rows: list[Row]) -> str:
    """Signed errors by group, and every row."""
    good = [row for row in rows if "error" not in row]
    lines = [
        "# Estimated against simulated",
        "",
        f"The same {len(good)} candidates through the formulas and through the dry run (the installed trainers on",
        "fake tensors): peak of what PyTorch allocates, estimated over simulated.",
        f"{', '.join(f'{package} {version(package)}' for package in VERSIONS)}.",
        f"Made by `python scripts/compare_simulated.py`; models are cut to {LAYERS} layers of their real shapes.",
        f"{len(rows) - len(good)} combinations were refused by the libraries; they stand at the end.",
        "",
        "| group | candidates | mean error | mean absolute | worst | under by more than 3 % |",
        "|---|---|---|---|---|---|",
    ]
    groups = {"all": good}
    for position, title in enumerate(("model", "method", "tuning", "dtype")):
        for row in good:
            groups.setdefault(f"{title} {str(row['key']).split()[position]}", []).append(row)
    lines += [line(title, members) for title, members in groups.items()]
    lines += ["", "| candidate | estimated GiB | simulated GiB | error | heaviest phase |", "|---|---|---|---|---|"]
    for row in sorted(good, key=lambda row: -abs(error(row))):
        gib = [float(str(row[side])) / 2**30 for side in ("estimated_bytes", "simulated_bytes")]
        lines.append(
            f"| {row['key']} | {gib[0]:.3f} | {gib[1]:.3f} | {100 * error(row):+.2f} % | {row['estimated_phase']} |"
        )
    lines += ["", "Refused:", ""] + [f"- {row['key']}: {row['error']}" for row in rows if "error" in row]
    return "\n".join(lines) + "\n"


def line(title: str, members: list[Row]) -> str:
    errors = [error(row) for row in members]
    worst = max(errors, key=abs)
    under = sum(each < -0.03 for each in errors)
    return (
        f"| {title} | {len(errors)} | {100 * statistics.mean(errors):+.2f} % "
        f"| {100 * statistics.mean(map(abs, errors)):.2f} % | {100 * worst:+.2f} % | {under} |"
    )


def error(row: Row) -> float:
    return float(str(row["estimated_bytes"])) / float(str(row["simulated_bytes"])) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=int, default=COUNT)
    parser.add_argument("--fresh", action="store_true", help="run every row again")
    args = parser.parse_args()
    wanted = {key(*each): each for each in list(candidates())[: args.limit]}
    known: dict[str, Row] = (
        {}
        if args.fresh or not ROWS.exists()
        else {row["key"]: row for row in map(json.loads, ROWS.read_text().splitlines())}
    )
    missing = [each for name, each in wanted.items() if name not in known]
    with ProcessPoolExecutor(args.workers) as pool:
        for number, row in enumerate(pool.map(simulated, *zip(*missing, strict=True)) if missing else []):
            known[str(row["key"])] = row
            print(f"{number + 1}/{len(missing)} {row['key']} {row.get('error') or ''}", flush=True)
    rows = [estimated(known[name], each[1]) for name, each in wanted.items()]
    ROWS.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))
    TABLE.write_text(table(rows))
    print(table(rows).split("| candidate |")[0])


if __name__ == "__main__":
    main()
