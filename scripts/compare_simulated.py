"""Compare the formulas with the dry run on the same candidates: signed errors of the peak.

    python -m scripts.compare_simulated [--limit N] [--fresh]     writes results/estimated_vs_simulated.jsonl and .md

Needs the dryrun extra. Models are cut to a few layers, whose shapes are the real ones: memory that depends on depth is
linear in it, and both sides see the same depth. Experts are cut to `EXPERTS`, so that activations outweigh weights. Dry
runs that are already in the .jsonl are not run again (`--fresh` does); estimates always are.
"""

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from importlib.metadata import version
from itertools import product
from pathlib import Path

from planner.candidate import Candidate
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.methods import METHODS
from planner.models.catalogue import load_model
from planner.models.from_config import shape_of
from planner.models.shape import ModelShape
from probes.layers.few_layers import few_layers

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROWS, TABLE = RESULTS / "estimated_vs_simulated.jsonl", RESULTS / "estimated_vs_simulated.md"
CLUSTER = parse_cluster("1xH200", None)
SEED = 20261123
# One model of every architecture with formulas; a second one where its config changes the layer.
MODELS = (
    "Qwen2.5-0.5B", "Qwen3-0.6B", "SmolLM2-360M", "Llama-3.2-1B", "Mistral-7B-v0.1", "gemma-2b", "gemma-2-2b",
    "gemma-3-1b-it", "gemma-3-4b-pt", "Phi-3.5-mini-instruct", "phi-2", "gpt2", "pythia-410m", "opt-125m", "opt-350m",
    "falcon-7b", "falcon-40b", "OLMo-1B-hf", "OLMo-2-0425-1B", "Olmo-3-1025-7B", "OLMoE-1B-7B-0924",
    "Mixtral-8x7B-v0.1", "Qwen1.5-MoE-A2.7B", "Qwen3-30B-A3B", "gpt-oss-20b", "DeepSeek-V2-Lite", "DeepSeek-V2",
    "Moonlight-16B-A3B", "SmolLM3-3B", "granite-3.3-2b-instruct", "aya-expanse-8b", "c4ai-command-r7b-12-2024",
    "starcoder2-3b", "stablelm-2-1_6b", "glm-4-9b-chat-hf", "GLM-4-9B-0414", "EXAONE-4.0-1.2B", "EXAONE-4.0-32B",
    "Seed-OSS-36B-Base", "ERNIE-4.5-0.3B-PT",
)  # fmt: skip
LAYERS_OF_A_KIND = 2
EXPERTS = 16
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
TUNINGS = ("full", "lora", "qlora")
LENGTHS = (512, 1024, 2048, 4096, 8192)
AS_ANOTHER = ("gmpo",)  # methods whose passes are those of another one (GRPO)
MOST_TOKENS = 8192  # samples x tokens of a sample
ROUNDS = 3  # times that each method meets each model, with other settings
VERSIONS = ("torch", "transformers", "trl", "peft", "accelerate")
SHOWN_ERROR = 0.01  # rows beyond it stand in the table with their cause
# Causes of rows beyond `SHOWN_ERROR`: words of a row's key, all of which it has, and the cause. The first one counts.
MASK = "sdpa's math kernel has one causal mask, which the formula counts for every row of the batch"
DROPOUT = "dropout inside sdpa's math kernel takes 5 bytes a score on CUDA, 8 in the dry run, which runs the CPU's"
LAYOUT = (
    "flash-attn's output: the formulas give it the layout of the rotated queries, which the model then copies; "
    "the dry run makes it contiguous"
)
CAUSES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("falcon-7b", "eager"), "a variable of Falcon's loop holds the scores of the layer before"),
    (("falcon-40b", "eager"), "a variable of Falcon's loop holds the scores of the layer before"),
    (("falcon-7b", "sdpa"), MASK),
    (("ERNIE-4.5-0.3B-PT", "float32", "sdpa"), MASK),
    (("SmolLM3-3B", "float32", "sdpa"), MASK),
    (("Seed-OSS-36B-Base", "float32", "sdpa"), DROPOUT),
    *(((name, "flash_attention_2"), LAYOUT) for name in ("glm-4-9b-chat-hf", "GLM-4-9B-0414", "phi-2", "pythia-410m")),
    (("opt-350m",), "opt-350m has projections around its layers, which the formulas leave out"),
)
Row = dict[str, object]
OUTSIDE_THE_TRACE = ("runtime", "fragmentation", "communication")  # a dry run sees what PyTorch allocates


def cut(name: str) -> ModelShape:
    """The model with its first layers of each kind, and with few experts."""
    model = few_layers(load_model(name), LAYERS_OF_A_KIND)
    fewer = {key: EXPERTS for key in EXPERT_KEYS if int(str(model.config.get(key, 0))) > EXPERTS}
    return shape_of({**model.config, **fewer}, id=model.id) if fewer else model


def candidates() -> Iterator[tuple[str, Candidate]]:
    """Every model with every method, `ROUNDS` times; tuning, checkpointing and padding in turn, the rest at random."""
    draw = random.Random(SEED)
    methods = [name for name, row in METHODS.items() if row.last_trl == "current" and name not in AS_ANOTHER]
    models = {name: cut(name) for name in MODELS}
    deck: list[tuple[str, bool, bool]] = []
    for _, name, method in product(range(ROUNDS), MODELS, methods):
        if not deck:
            deck = list(product(TUNINGS, (False, True), (False, True)))
            draw.shuffle(deck)
        tuning, checkpointing, padded = deck.pop()
        model, row = models[name], METHODS[method]
        longest = model.max_position_embeddings if model.position_params else max(LENGTHS)
        length = draw.choice([length for length in LENGTHS if length <= longest])
        samples = [count for count in (1, 2, 4) if count * length <= MOST_TOKENS and count >= row.smallest_batch]
        completion = length // draw.choice((2, 4, 8))
        settings: dict[str, object] = {
            **row.defaults,
            "tuning": "full" if tuning == "full" else "lora",
            "quantization": "nf4" if tuning == "qlora" else "none",
            "dtype": draw.choice(("float32", "bfloat16")),
            "per_device_train_batch_size": draw.choice(samples or [row.smallest_batch]),
            "max_length": length,
            "prompt_length": length - completion,
            "max_completion_length": completion,
            "num_generations": 2,
            "gradient_checkpointing": checkpointing,
            "padded": padded,
            "attn_implementation": draw.choice(("sdpa", "sdpa", "sdpa", "flash_attention_2", "eager")),
            "lora_r": draw.choice((8, 32)),
        }
        if row.grouped_completions:
            settings["per_device_train_batch_size"] = 2
        if row.teacher:
            settings["teacher_model"] = model
        yield name, Candidate(model=model, method=method, **settings)  # type: ignore[arg-type]


def simulated(name: str, candidate: Candidate) -> Row:
    """The dry run's side of a row, or the error that stopped it."""
    from probes.dryrun.simulate import dry_run

    try:
        trace = dry_run(candidate, steps=1)
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
    """The settings of a row as one text; its place in the .jsonl and its line in the table."""
    base = "qlora" if candidate.quantization != "none" else candidate.tuning
    shown = (
        f"{candidate.dtype} {candidate.per_device_train_batch_size}x{candidate.row_tokens}",
        f"completion {candidate.max_completion_length}" if candidate.method_row.generates else "",
        "checkpointed" if candidate.gradient_checkpointing else "",
        "padded" if candidate.padded else "",
        candidate.attn_implementation,
        f"r{candidate.lora_r}" if candidate.tuning == "lora" else "",
    )
    return " ".join([name, candidate.method, base, *filter(None, shown)])


def table(rows: list[Row]) -> str:
    """Signed errors by group, every row beyond `SHOWN_ERROR` with its cause, and the rows that libraries refused."""
    good = [row for row in rows if "error" not in row]
    beyond = sorted((row for row in good if abs(error(row)) > SHOWN_ERROR), key=lambda row: -abs(error(row)))
    lines = [
        "# Estimated against simulated",
        "",
        f"The same {len(good)} candidates through the formulas and through the dry run (the installed trainers on",
        "fake tensors): peak of what PyTorch allocates, estimated over simulated.",
        f"{', '.join(f'{package} {version(package)}' for package in VERSIONS)}.",
        f"Made by `python -m scripts.compare_simulated`: {len(MODELS)} models of every architecture with formulas,",
        f"each with every method; tuning, checkpointing and padding in turn; rows of {min(LENGTHS)} to {max(LENGTHS)}",
        f"tokens. Models are cut to {LAYERS_OF_A_KIND} layers of each kind and {EXPERTS} experts.",
        f"{len(rows) - len(good)} combinations were refused by the libraries; they stand at the end.",
        "",
        "| group | candidates | mean error | mean absolute | worst | most under | beyond 1 % |",
        "|---|---|---|---|---|---|---|",
    ]
    groups = {"all": good}
    for position, title in enumerate(("model", "method", "tuning", "dtype")):
        for row in good:
            groups.setdefault(f"{title} {str(row['key']).split()[position]}", []).append(row)
    lines += [line(title, members) for title, members in groups.items()]
    lines += ["", f"## The {len(beyond)} candidates beyond {100 * SHOWN_ERROR:.0f} %", ""]
    lines += [
        "| candidate | estimated GiB | simulated GiB | error | heaviest phase | cause |",
        "|---|---|---|---|---|---|",
    ]
    for row in beyond:
        gib = [float(str(row[side])) / 2**30 for side in ("estimated_bytes", "simulated_bytes")]
        lines.append(
            f"| {row['key']} | {gib[0]:.3f} | {gib[1]:.3f} | {100 * error(row):+.2f} % | {row['estimated_phase']} "
            f"| {cause(str(row['key']))} |"
        )
    lines += ["", "## Refused", ""] + [f"- {row['key']}: {row['error']}" for row in rows if "error" in row]
    return "\n".join(lines) + "\n"


def cause(key: str) -> str:
    """The known cause of a row's error, else "unexplained"."""
    words = key.split()
    return next((text for needed, text in CAUSES if all(word in words for word in needed)), "unexplained")


def line(title: str, members: list[Row]) -> str:
    errors = [error(row) for row in members]
    return (
        f"| {title} | {len(errors)} | {100 * statistics.mean(errors):+.2f} % "
        f"| {100 * statistics.mean(map(abs, errors)):.2f} % | {100 * max(errors, key=abs):+.2f} % "
        f"| {100 * min(0.0, *errors):+.2f} % | {sum(abs(each) > SHOWN_ERROR for each in errors)} |"
    )


def error(row: Row) -> float:
    return float(str(row["estimated_bytes"])) / float(str(row["simulated_bytes"])) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=10**6, help="candidates at most")
    parser.add_argument("--fresh", action="store_true", help="run every row again")
    args = parser.parse_args()
    wanted = {key(*each): each for each in list(candidates())[: args.limit]}
    if args.fresh:
        ROWS.unlink(missing_ok=True)
    known: dict[str, Row] = (
        {row["key"]: row for row in map(json.loads, ROWS.read_text().splitlines())} if ROWS.exists() else {}
    )
    with ROWS.open("a") as file:
        for number, (name, each) in enumerate(wanted.items()):
            if name not in known:
                known[name] = row = simulated(*each)
                file.write(json.dumps(row, sort_keys=True) + "\n")
                file.flush()
                print(f"{number + 1}/{len(wanted)} {name} {row.get('error') or ''}", flush=True)
    rows = [estimated(known[name], each[1]) for name, each in wanted.items()]
    ROWS.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))
    TABLE.write_text(table(rows))
    print(table(rows).partition("\n## ")[0])


if __name__ == "__main__":
    main()
