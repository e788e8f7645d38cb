"""Ask other packages of PyPI the questions that `plan` answers; write peers.md.

    python -m benchmarks.peers [--environments DIR] [--out results]

Needs the dryrun extra and a package index. Every peer is installed, in the version below, in an environment of its own.
Peers that need PyTorch or Transformers (`borrows`) see those of the calling environment behind their own packages. No
model hub is asked: a peer gets the model's config, its number of parameters, and the settings of a run.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeVar

from msgspec import Struct

from benchmarks.peer_packages import HARNESS, NOT_ASKED, PEERS, Peer
from planner.candidate import Candidate
from planner.estimation import estimate
from planner.gpus.cluster import Cluster
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.models.catalogue import load_model
from planner.planning import plan
from planner.units import GIB
from scripts import compare_published, compare_simulated

ROOT = Path(__file__).resolve().parents[1]
OURS = "plan"
PUBLISHED_OF_A_GROUP = 3
DRY_RUNS = {"sft": 10, "dpo": 3, "grpo": 3, "reward": 2}  # rows of each method

T = TypeVar("T")
Kind = Literal["published", "dry run", "situation"]


class Question(Struct, frozen=True, kw_only=True):
    """One run: its settings, and the measured or simulated bytes. `true_bytes` 0: no figure to hold an answer to."""

    kind: Kind
    name: str
    quantity: str
    true_bytes: int
    candidate: Candidate
    cluster: Cluster
    ours_bytes: int
    ours_seconds: float


Answer = Mapping[str, object]  # of a peer: "bytes" or "cannot", and "seconds"


# -- questions ---------------------------------------------------------------------------------------------------------


def timed(compute: Callable[[], int]) -> dict[str, Any]:
    """Our own answer and the time it takes, as fields of `Question`."""
    start = perf_counter()
    return {"ours_bytes": compute(), "ours_seconds": perf_counter() - start}


def published_questions() -> Iterator[Question]:
    """Up to `PUBLISHED_OF_A_GROUP` rows of each group of results/published.md, evenly spread over the group."""
    groups: dict[str, list[compare_published.Row]] = {}
    for row in compare_published.rows():
        if row.quantity in ("allocated", "reserved", "process"):
            groups.setdefault(row.group, []).append(row)
    for row in (row for members in groups.values() for row in spread(members, PUBLISHED_OF_A_GROUP)):
        yield Question(
            kind="published",
            name=row.id,
            quantity=row.quantity,
            true_bytes=row.measured_bytes,
            candidate=row.candidate,
            cluster=row.cluster,
            **timed(partial(lambda row: compare_published.compared(row).computed_bytes, row)),
        )


def dry_run_questions() -> Iterator[Question]:
    """Rows of results/estimated_vs_simulated.jsonl, evenly spread over each method of `DRY_RUNS`."""
    lines = compare_simulated.ROWS.read_text(encoding="utf-8").splitlines()
    simulated = {row["key"]: row["simulated_bytes"] for row in map(json.loads, lines) if "simulated_bytes" in row}
    grid = {compare_simulated.key(name, candidate): candidate for name, candidate in compare_simulated.candidates()}
    for method, count in DRY_RUNS.items():
        keys = [key for key, candidate in grid.items() if candidate.method == method and key in simulated]
        for key in spread(keys, count):
            yield Question(
                kind="dry run",
                name=key,
                quantity="allocated",
                true_bytes=simulated[key],
                candidate=grid[key],
                cluster=compare_simulated.CLUSTER,
                **timed(partial(lambda c: int(str(compare_simulated.estimated({}, c)["estimated_bytes"])), grid[key])),
            )


def situations() -> dict[str, tuple[Job, str]]:
    """The five situations of the README."""
    gptq, gemma = load_model("Qwen2.5-7B-Instruct-GPTQ-Int4"), load_model("gemma-3-4b-it")
    engine = {"vllm": "colocate", "vllm_gpu_memory_utilization": 0.2, "vllm_max_model_length": 2500}
    reward = {"lora_r": 8, "lora_target_modules": ("q_proj", "k_proj", "v_proj", "o_proj")}
    served = {"sharding": "zero3", "vllm": "server"}
    small = Job(model=load_model("Qwen2.5-0.5B"), method="sft", tuning="qlora", effective_batch_size=8)
    large = Job(model=load_model("Qwen2.5-32B"), method="online-dpo", pinned={"sharding": "zero3"})
    beside = Job(model=gptq, method="grpo", tuning="lora", pinned={**engine, "num_generations": 2})
    long = Job(model=gemma, method="reward", tuning="lora", pinned=reward, optimize="max-length")
    server = Job(model=load_model("Qwen2.5-7B"), method="grpo", tuning="lora", pinned=served)
    return {
        "QLoRA on a 4 GB card": (small, "1xRTX-3050-4G"),
        "GRPO beside a vLLM engine": (beside, "2xA100-40G"),
        "long rows of a reward model": (long, "1xA100-80G"),
        "LoRA, ZeRO-3, a vLLM server": (server, "8xH100"),
        "a policy larger than a GPU": (large, "4xRTX-3090"),
    }


def situation_questions() -> Iterator[Question]:
    """The candidates that `plan` recommends in the five situations. Nobody measured them."""
    for name, (job, gpus) in situations().items():
        cluster = parse_cluster(gpus)
        best = plan(job, cluster).best
        if best is None:
            raise RuntimeError(f"{name}: nothing fits")
        yield Question(
            kind="situation",
            name=name,
            quantity="process",
            true_bytes=0,
            candidate=best.candidate,
            cluster=cluster,
            **timed(partial(lambda c, gpus: estimate(c, gpus).gpus[0].nvidia_smi_bytes, best.candidate, cluster)),
        )


def spread(items: Sequence[T], count: int) -> list[T]:
    """Up to `count` items at even distances, the first one among them."""
    chosen = min(count, len(items))
    return [items[index * len(items) // chosen] for index in range(chosen)]


def document(question: Question) -> dict[str, object]:
    """A question as the JSON object that peers read."""
    candidate, gpu = question.candidate, question.cluster.gpu
    model = candidate.model
    config: Mapping[str, Any] = dict(model.config)
    config = config.get("text_config", config)
    linears = [linear.weight_params for layer in model.layers for linear in layer.linears]
    return {
        "model": model.id, "config": model.config, "params": model.params, "layers": model.num_layers,
        "hidden_size": model.hidden_size, "vocab_size": model.vocab_size, "longest": model.max_position_embeddings,
        "heads": config.get("num_attention_heads", 0), "intermediate_size": config.get("intermediate_size", 0),
        "kv_heads": config.get("num_key_value_heads", config.get("num_attention_heads", 0)),
        "experts": next((config[key] for key in compare_simulated.EXPERT_KEYS if config.get(key)), 0),
        "experts_per_token": config.get("num_experts_per_tok", 0),
        "largest_module_params": max([model.embed_params, *linears]),
        "method": candidate.method, "tuning": candidate.tuning, "quantization": candidate.quantization,
        "dtype": candidate.dtype, "precision": candidate.precision, "lora_r": candidate.lora_r,
        "lora_dropout": candidate.lora_dropout, "lora_targets": candidate.lora_target_modules,
        "all_linear": candidate.lora_target_modules == ("all-linear",), "beta": candidate.beta,
        "batch": candidate.per_device_train_batch_size, "tokens": candidate.row_tokens,
        "num_generations": candidate.num_generations, "checkpointing": candidate.gradient_checkpointing,
        "attn": candidate.attn_implementation, "sharding": candidate.sharding, "offload": candidate.offload_optimizer,
        "vllm": candidate.vllm, "gpus": candidate.num_processes, "gpu": gpu.name, "gpu_bytes": gpu.total_bytes,
    }  # fmt: skip


# -- answers -----------------------------------------------------------------------------------------------------------


def installed(peer: Peer, folder: Path) -> tuple[Path, str]:
    """The Python of the peer's environment, and why it could not be installed (empty if it was)."""
    home = folder / peer.package
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
    site = next(home.glob("lib/python3*/site-packages"))
    if peer.borrows:  # after the environment's own packages on sys.path
        (site / "calling_environment.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    if list(site.glob(f"{peer.package.replace('-', '_')}-{peer.version}.dist-info")):
        return python, ""
    alone = [] if peer.dependencies else ["--no-deps", "--no-build-isolation", "--ignore-installed"]
    command = [str(python), "-m", "pip", "install", "--quiet", *alone, f"{peer.package}=={peer.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return python, "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def answers(peer: Peer, python: Path, questions: Iterable[Question]) -> list[Answer]:
    """The peer's answers, from one process of its environment."""
    asked = "".join(json.dumps(document(question)) + "\n" for question in questions)
    command = [str(python), "-c", HARNESS % peer.code]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{peer.package} does not start: {done.stderr[-500:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def comparable_bytes(answer: Answer, quantity: str) -> float:
    """The part of a peer's total that a quantity measures.

    Allocated bytes hold neither fragmentation nor the CUDA context, reserved bytes only fragmentation, and the bytes of
    the process (nvidia-smi) both.
    """
    total = float(str(answer["bytes"]))
    if quantity == "process":
        return total
    total -= float(str(answer["context_bytes"]))
    return total - float(str(answer["slack_bytes"])) if quantity == "allocated" else total


def score(errors: Sequence[float]) -> str:
    """Median error, mean absolute error, worst error and the share of answers below the truth by more than 3 %."""
    if not errors:
        return "| | | |"
    mean = statistics.mean(map(abs, errors))
    return f"{statistics.median(errors):+.1%} | {mean:.1%} | {max(errors, key=abs):+.1%} | {too_low(errors):.0%}"


def too_low(errors: Sequence[float]) -> float:
    """The share of answers below the truth by more than 3 %."""
    return sum(error < -0.03 for error in errors) / len(errors)


TABLES: tuple[tuple[str, Kind, tuple[str, ...]], ...] = (
    ("Measured by others, all figures", "published", ("allocated", "reserved", "process")),
    ("Measured by others: allocated by PyTorch", "published", ("allocated",)),
    ("Measured by others: reserved, or shown by nvidia-smi", "published", ("reserved", "process")),
    ("Our own dry run", "dry run", ("allocated",)),
)

# -- the report --------------------------------------------------------------------------------------------------------

HEAD = """# Memory estimators side by side

Written by `python -m benchmarks.peers` on {date}, with torch {torch}, transformers {transformers} and trl {trl} on our
side. Each peer is the release that the table names, in an environment of its own, without a model hub and without a
GPU. {count} questions: {published} figures that others measured (a sample of each group of
[published.md](published.md)), {simulated} of **our own dry run** (a sample of
[estimated_vs_simulated.md](estimated_vs_simulated.md)), and the README's five situations.

The dry runs favour us: our formulas were written with the dry run at hand. They are of TRL 1.16, which builds no logits
(`trl/kernels/chunked_logprob.py`), and of models cut to a few layers; a peer that knows an older trainer counts logits
and, on so small a model, is far above. agilerl-arena describes another trainer than TRL's in all rows.

An answer is compared with the kind of figure that was measured: allocated bytes without the peer's shares for
fragmentation and CUDA context, reserved bytes without the context, nvidia-smi with both. A peer that gives both shares
as one figure keeps it in reserved bytes. A peer is scored only on questions that it can express; settings that it has
no word for take its nearest (adapters on attention only, for instance). *ours there*: our mean absolute error on the
same questions. Under: the share of answers that are too low by more than 3 %.
"""


def report(questions: Sequence[Question], found: Mapping[str, Sequence[Answer]], skipped: Mapping[str, str]) -> str:
    counts = Counter(question.kind for question in questions)
    versions = {name: version(name) for name in ("torch", "transformers", "trl")}
    lines = [
        HEAD.format(
            date=datetime.now(timezone.utc).date(),
            count=len(questions),
            published=counts["published"],
            simulated=counts["dry run"],
            **versions,
        )
    ]
    for title, kind, quantities in TABLES:
        asked = [n for n, q in enumerate(questions) if q.kind == kind and q.quantity in quantities]
        lines += [f"## {title}", "", *score_table(asked, questions, found), ""]
    lines += ["## What was asked, and what a peer cannot express", "", *expression_table(questions, found, skipped), ""]
    lines += ["Not asked: " + "; ".join(NOT_ASKED) + ".", ""]
    lines += ["## The five situations (GiB on a trainer's GPU, as nvidia-smi would show; nobody measured them)", ""]
    lines += [*matrix("situation", questions, found), ""]
    for kind, title in (("published", "published figures"), ("dry run", "dry runs")):
        lines += [f"## Row by row: {title} (error; empty: cannot express)", "", *matrix(kind, questions, found), ""]
    return "\n".join(lines)


def error(question: Question, answer: Answer) -> float:
    return comparable_bytes(answer, question.quantity) / question.true_bytes - 1


def our_error(question: Question) -> float:
    return question.ours_bytes / question.true_bytes - 1


def score_table(
    numbers: Sequence[int], questions: Sequence[Question], found: Mapping[str, Sequence[Answer]]
) -> list[str]:
    asked = [(number, questions[number]) for number in numbers]
    milliseconds = 1000 * statistics.median(question.ours_seconds for _, question in asked)
    lines = [
        "| | answered | median error | mean absolute | worst | under | ours there | ms an answer |",
        "|---|---|---|---|---|---|---|---|",
        f"| **{OURS}** | all {len(asked)} | {score([our_error(q) for _, q in asked])} | | {milliseconds:.1f} |",
    ]
    for name, said in found.items():
        answered = [(question, said[number]) for number, question in asked if "bytes" in said[number]]
        ours = [our_error(question) for question, _ in answered]
        there = f"{statistics.mean(map(abs, ours)):.1%}, {too_low(ours):.0%} under" if ours else ""
        spent = 1000 * statistics.median(float(str(a["seconds"])) for _, a in answered) if answered else None
        lines.append(
            f"| {name} | {len(answered)} of {len(asked)} | {score([error(*pair) for pair in answered])} "
            f"| {there} | {'' if spent is None else f'{spent:.1f}'} |"
        )
    return lines


def expression_table(
    questions: Sequence[Question], found: Mapping[str, Sequence[Answer]], skipped: Mapping[str, str]
) -> list[str]:
    lines = ["| package | asked | cannot express (questions) |", "|---|---|---|"]
    for peer in PEERS:
        name = f"{peer.package} {peer.version}"
        reasons = Counter(str(answer["cannot"]) for answer in found.get(name, ()) if "cannot" in answer)
        said = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
        lines.append(f"| {name} | {peer.asked} | {skipped.get(name) or said.replace('|', '/')} |")
    return lines


def matrix(kind: Kind, questions: Sequence[Question], found: Mapping[str, Sequence[Answer]]) -> list[str]:
    names = [
        name
        for name in found
        if any("bytes" in a for q, a in zip(questions, found[name], strict=True) if q.kind == kind)
    ]
    lines = [f"| | kind | GiB | {OURS} | {' | '.join(names)} |", "|---" * (4 + len(names)) + "|"]
    for number, question in enumerate(questions):
        if question.kind != kind:
            continue
        true = f"{question.true_bytes / GIB:.2f}" if question.true_bytes else "unknown"
        ours = f"{our_error(question):+.1%}" if question.true_bytes else f"{question.ours_bytes / GIB:.1f}"
        cells = [cell(question, found[name][number]) for name in names]
        lines.append(f"| {question.name} | {question.quantity} | {true} | {ours} | {' | '.join(cells)} |")
    return lines


def cell(question: Question, answer: Answer) -> str:
    if "cannot" in answer:
        return ""
    if not question.true_bytes:
        return f"{comparable_bytes(answer, question.quantity) / GIB:.1f}"
    return f"{error(question, answer):+.1%}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--environments", type=Path, help="keep the peers' environments here (else: a temporary folder)"
    )
    options.add_argument("--out", type=Path, default=ROOT / "results")
    given = options.parse_args()
    questions = [*published_questions(), *dry_run_questions(), *situation_questions()]
    found: dict[str, list[Answer]] = {}
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for peer in PEERS:
            name = f"{peer.package} {peer.version}"
            python, problem = installed(peer, given.environments or Path(temporary))
            if problem:
                skipped[name] = f"not installed: {problem}"
                print(f"{name}: {skipped[name]}", file=sys.stderr)
                continue
            found[name] = answers(peer, python, questions)
            print(f"{name}: {sum('bytes' in a for a in found[name])} of {len(questions)}", file=sys.stderr)
    (given.out / "peers.md").write_text(report(questions, found, skipped), encoding="utf-8")


if __name__ == "__main__":
    main()
