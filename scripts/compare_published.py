"""Compare estimated memory with figures that others published (tests/data/published.jsonl).

python scripts/compare_published.py            writes results/published.md and published.jsonl
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
from msgspec import Struct, convert, field
from msgspec.structs import replace

import planner
from planner.candidate import Candidate
from planner.confidence import (
    COMPARISONS,
    KINDS,
    NVIDIA_SMI_LEVEL,
    Comparison,
    Figure,
    JobKind,
    kind_of,
)
from planner.errors import PlanError
from planner.estimation import estimate
from planner.gpus.cluster import Cluster
from planner.gpus.parse import parse_cluster
from planner.measurements.cases import PublishedFigure, published_candidate
from planner.memory.communication import nccl_bytes
from planner.memory.dtypes import DTYPE_BYTES, SIXTEEN_BIT_BYTES
from planner.memory.generation import kv_cache_bytes
from planner.memory.runtime import context_bytes
from planner.quantities import Component, GpuMemory, PhaseMemory
from planner.units import GIB
from scripts import earlier_experts
from scripts.emulated_grid import load_rows

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "tests" / "data" / "published.jsonl"
OUTCOMES = ROOT / "tests" / "data" / "outcomes.jsonl"  # more runs: those of which the outcome is known
# Runs that came after the formulas and the fit of the verdict: neither rests on them.
HELD_OUT = ROOT / "tests" / "data" / "held_out.jsonl"
REPORT = ROOT / "results" / "published.md"
RECORD = ROOT / "results" / "published.jsonl"
CASE_KEYS = ("model", "gpu", "settings", "config", "config_changes")  # with those of `_record` a case of plan validate

Kept = Literal["", "logits", "gradients of layers"]  # by the program that ran: a field of tests/data/outcomes.jsonl
Quantity = Literal[
    "allocated",  # torch.cuda.max_memory_allocated: tensors and cuBLAS workspaces
    "reserved",  # torch.cuda.max_memory_reserved: with what the allocator keeps besides
    "process",  # nvidia-smi: with the CUDA context and NCCL
    "after step",  # torch.cuda.memory_allocated after an optimizer step, gradients and the model's output still there
    "over",  # the run did not fit its card
]
DRIVER: tuple[Quantity, ...] = ("reserved", "process")
RESIDENT: tuple[Component, ...] = ("weights", "adapters", "gradients", "optimizer_states")
MORE = """The figures of `tests/data/outcomes.jsonl` whose settings describe the run, without those of a vLLM engine."""
LATER = """The figures of `tests/data/held_out.jsonl`: runs that no formula, unit or interval rests on. Liger's fused
loss is taken as the loss in chunks of TRL 1.16, which keeps no logits either; under FSDP 1 the gradients of layers are
added that its units of frozen weights keep where checkpoints are reentrant (`layer_gradients`), as they were then; fms
fuses the adapters of 4-bit bases."""
INTERVALS = """nvidia-smi's figure: held is how many runs of a source stay below the bound that the runs of all other
sources give (`planner/confidence.py`, `nvidia_smi_miss`). Verdicts: `verdict.md`."""
# Groups of tests/data/published.jsonl whose settings do not describe the programs that ran (causes: results/
# published.md). The rows of outcomes.jsonl have their own reasons.
DIFFERS = {
    "litgpt QLoRA": "bitsandbytes 0.42 kept the input of every 4-bit layer",
    "Qwen Q-LoRA (GPTQ, ZeRO-2 on one GPU)": "the GPTQ kernel unpacks weights, and the loss stays in float16",
    "fsdp_qlora, FSDP": "a loader of its own, adapters in bfloat16",
    "LLaMA-Factory": "rows, packing and remote code are not published",
}
FAR = 0.05  # allocated figures further off are listed, with the cause of their group
SHIFTED = (
    "transformers 4.48 (loss/loss_utils.py, `ForCausalLMLoss`) copies shifted float32 logits beside 16-bit ones: rows "
    "lack 2 bytes a logit and 2 to 4 a feature; PowerLM's, of the same file, lack none, as up to 4.46"
)
FAR_CAUSES = {
    "litgpt QLoRA": DIFFERS["litgpt QLoRA"],
    "litgpt LoRA, mixed precision": "autocast copies the frozen float32 head for each of nine chunks",
    "fms LoRA one GPU": SHIFTED,
    "fms QLoRA one GPU": SHIFTED,
}
# Beginning of the groups of outcomes.jsonl whose rows showed mistakes that were mended since: their errors say little
# about those of other runs.
MENDED = "fitcheck T4"
HEAD = """# Memory, computed against published

Written by `python scripts/compare_published.py` from `tests/data/published.jsonl`: figures that others
printed, the settings of their runs, and our assumptions about the rest. Nothing in the estimator was set to meet them.
Error: computed over published, less one.

Quantities: *allocated* is tensors and cuBLAS workspaces; *reserved* has the allocator's slack on top; *process*
(nvidia-smi) also the CUDA context and NCCL; *after step* is the memory between two steps; *over* must not fit the card.

Causes of the larger errors, read in the sources of the programs that were run:

- Reserved and process figures are compared with the allocator's cache of a run with room to spare
  (`replay_slack.md`), which counts no memory that loading left reserved: TRL's notebooks, fsdp_qlora.
- litgpt QLoRA, LLaMA-Factory's QLoRA of June 2024: bitsandbytes before 0.43.3 kept the input of every 4-bit layer for a
  gradient that nobody asks for (its pull request 1270, July 2024; litgpt had 0.42). Counted as well, the twelve litgpt
  rows come to -9 % in the median (-3 to -17 %, the gated feed-forwards lowest, unexplained), LLaMA-Factory's Qwen2-7B
  to -12 %. The estimator counts what installed releases do.
- litgpt in mixed precision: its head runs 128 tokens at a time, and autocast copies the frozen float32 head for each of
  the nine chunks (8 x 0.39 GiB more than once).
- Qwen Q-LoRA: too little at short rows (buckets of 2e8 elements, twice; the old GPTQ kernel) and
  too much at long ones (their loss stays in float16, 6 bytes a logit where autocast makes 12).
- TRL's GRPO notebooks: lengths are assumed, and at the cap.
- LLaMA-Factory: rows of the dataset, packing and the remote code of GLM-4 are not published with the figures.
"""


class Row(Struct, frozen=True, kw_only=True):
    """One published figure and its candidate.

    `held_tokens`: tokens whose model output stays after a step. `keeps`: what stays through the backward pass, `LATER`.
    `case`: its keys that `plan validate` reads.
    """

    id: str
    source: str
    group: str
    quantity: Quantity
    measured_bytes: int
    candidate: Candidate
    cluster: Cluster
    assumptions: tuple[str, ...]
    held_tokens: int = 0
    case: Mapping[str, Any] = field(default_factory=dict)
    keeps: Kept = ""


class Compared(Struct, frozen=True, kw_only=True):
    """A row and the bytes that are computed for it."""

    row: Row
    computed_bytes: int
    phase: PhaseMemory

    @property
    def error(self) -> float:
        return self.computed_bytes / self.row.measured_bytes - 1


def published() -> Iterator[dict[str, Any]]:
    for line in ROWS.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def left_out() -> Counter[str]:
    """The reasons why rows of the same sources are left out, with their counts."""
    return Counter(row["left_out"] for row in published() if "left_out" in row)


def rows() -> list[Row]:
    return [_row(row) for row in published() if "left_out" not in row]


def _row(row: dict[str, Any]) -> Row:
    candidate = published_candidate(convert(row, PublishedFigure))
    nodes = candidate.num_nodes
    return Row(
        id=row["id"],
        source=row["source"],
        group=row["group"],
        quantity=row["quantity"],
        measured_bytes=round(row["measured_gib"] * GIB),
        candidate=candidate,
        cluster=parse_cluster(f"{nodes}x{candidate.num_processes // nodes}x{row['gpu']}", None),
        assumptions=tuple(row["assumptions"]),
        held_tokens=row.get("held_tokens", 0),
        case={key: row[key] for key in CASE_KEYS if key in row},
    )


def compared(row: Row) -> Compared:
    gpu = estimate(row.candidate, row.cluster).gpus[0]
    gpu = with_kept(gpu, row.candidate, row.keeps)
    phases = gpu.phases
    phase = max(phases, key=lambda phase: phase.total_bytes)
    if row.quantity == "after step":
        phase = next(phase for phase in phases if phase.name == "optimizer_step")
        kept = sum(phase.components.get(component, 0) for component in RESIDENT)
        return Compared(row=row, computed_bytes=kept + _workspaces_bytes(row, phase) + _held_bytes(row), phase=phase)
    outside = context_bytes(row.cluster.gpu) + nccl_bytes(row.candidate)
    computed_bytes = {
        "allocated": phase.total_bytes - outside - phase.components.get("fragmentation", 0),
        "reserved": gpu.nvidia_smi_bytes - outside,
        "process": gpu.nvidia_smi_bytes,
        "over": phase.total_bytes,
    }[row.quantity]
    return Compared(row=row, computed_bytes=computed_bytes, phase=phase)


def with_kept(gpu: GpuMemory, candidate: Candidate, keeps: Kept) -> GpuMemory:
    """Return a GPU with what the program that ran keeps through the backward pass."""
    if not keeps:
        return gpu
    component: Component = "loss" if keeps == "logits" else "activations"
    kept = logits_bytes(candidate) if keeps == "logits" else layer_gradients(candidate)
    phases = [
        replace(phase, components={**phase.components, component: phase.components.get(component, 0) + kept})
        if phase.name == "backward"
        else phase
        for phase in gpu.phases
    ]
    return replace(gpu, phases=tuple(phases))


def logits_bytes(candidate: Candidate) -> int:
    """The model's logits, which a variable of the program holds.

    Their dtype is that of the head's product; under autocast accelerate returns float32 copies.
    """
    wide = candidate.precision != "no" or candidate.prepare_model_for_kbit_training
    return candidate.tokens * candidate.model.vocab_size * (4 if wide else DTYPE_BYTES[candidate.dtype])


def layer_gradients(candidate: Candidate) -> int:
    """Hidden states that FSDP 1 keeps to the end of the backward pass, of reentrant checkpoints and frozen weights.

        bytes = (layers - 2) x tokens x hidden_size x 2

    A unit of frozen weights reshards by a hook on the gradients of its inputs. The hook refers to the inputs'
    AccumulateGrad nodes, thereby to the detached inputs of the checkpoint and their gradients. At the first layer there
    are all checkpoints and a gradient of each layer but one; FSDP2 has all checkpoints and one gradient at the last.

    Source: torch 2.13 (as 2.4), distributed/fsdp/_runtime_utils.py, `_register_post_backward_reshard_only_hook`;
    autograd/graph.py, `register_multi_grad_hook`. The published runs on two GPUs take exactly 30 hidden states a token
    more than on one, of 32 layers.
    """
    return (candidate.model.num_layers - 2) * candidate.tokens * candidate.model.hidden_size * SIXTEEN_BIT_BYTES


def _workspaces_bytes(row: Row, phase: PhaseMemory) -> int:
    return phase.components["runtime"] - context_bytes(row.cluster.gpu)


def _held_bytes(row: Row) -> int:
    """The model's output in a script that keeps it: logits, and with `use_cache` the keys and values of every token."""
    model, width = row.candidate.model, DTYPE_BYTES[row.candidate.dtype]
    return row.held_tokens * model.vocab_size * width + kv_cache_bytes(model, 1, row.held_tokens, width)


def all_compared() -> tuple[list[Compared], Counter[str]]:
    """The compared rows, and the estimator's reasons for refusing the others."""
    done: list[Compared] = []
    refused: Counter[str] = Counter()
    for row in rows():
        try:
            done.append(compared(row))
        except PlanError as error:
            refused[str(error)] += 1
    return done, refused


def groups(done: list[Compared]) -> dict[str, list[Compared]]:
    found: dict[str, list[Compared]] = {}
    for one in done:
        if one.row.quantity != "over":
            found.setdefault(one.row.group, []).append(one)
    return found


def more_groups(path: Path = OUTCOMES) -> dict[tuple[str, str], list[Compared]]:
    """The figures of outcomes.jsonl, or of a file like it, by group and quantity."""
    found: dict[tuple[str, str], list[Compared]] = {}
    for one in outcomes_compared(path):
        found.setdefault((one.row.group, one.row.quantity), []).append(one)
    return found


def _summary(members: list[Compared]) -> str:
    group = members[0].row.group
    errors = [one.error for one in members]
    mean = sum(abs(error) for error in errors) / len(errors)
    under = sum(error < 0 for error in errors) / len(errors)
    quantity = members[0].row.quantity
    middle, worst = median(errors), max(errors, key=abs)
    return f"| {group} | {quantity} | {len(errors)} | {middle:+.1%} | {mean:.1%} | {worst:+.1%} | {under:.0%} |"


def far_rows(done: list[Compared]) -> list[Compared]:
    """The allocated figures that are far off."""
    everything = chain(done, outcomes_compared(), outcomes_compared(HELD_OUT))
    return [one for one in everything if one.row.quantity == "allocated" and abs(one.error) > FAR]


def far_table(done: list[Compared]) -> list[str]:
    """Lines of a table: the figures of `far_rows`, each with the cause of its group."""
    lines = ["| row | computed | published | error | cause |", "|---|---|---|---|---|"]
    for one in far_rows(done):
        sizes = f"{one.computed_bytes / GIB:.2f} | {one.row.measured_bytes / GIB:.2f} | {one.error:+.1%}"
        lines.append(f"| {one.row.id} | {sizes} | {FAR_CAUSES[one.row.group]} |")
    return lines


def _line(one: Compared) -> str:
    head = f"| {one.row.id} | {one.computed_bytes / GIB:.2f} "
    if one.row.quantity == "over":
        capacity = one.row.cluster.gpu.total_bytes
        said = "does not fit" if one.computed_bytes > capacity else "fits"
        return f"{head}| more than {capacity / GIB:.2f} | {said} | {one.phase.name} |"
    return f"{head}| {one.row.measured_bytes / GIB:.2f} | {one.error:+.1%} | {one.phase.name} |"


def _assumptions(done: list[Compared]) -> list[str]:
    """The assumptions of each group, without repetition."""
    found: dict[str, dict[str, None]] = {}
    for one in done:
        found.setdefault(one.row.group, {}).update(dict.fromkeys(one.row.assumptions))
    return [f"- **{group}**: {'; '.join(assumed)}." for group, assumed in found.items()]


OF_TRL = "One figure of memory a run, without a word whether it is allocated or the driver's."
OF_EXPERTS = (
    "huggingface/trl#6869 (2026-08-22), H100, rows of at most 2,048 tokens, experts divided by "
    "`DistributedConfig(tp_size=E, fsdp_size=D, enable_expert_parallel=True)`. Its document asks for "
    "huggingface/transformers#48516, which 5.18.0 (2026-09-30) is the first release to have: a group of E GPUs "
    "divides the experts, and each of its GPUs has all else and the group's one batch; FSDP2 shards over D "
    "groups. From 5.19 on tokens are exchanged, and 5.23 stops at that setting. The runs were started here with "
    "Transformers 5.18.0, TRL 1.16.0 and torch 2.13.0 on emulated H100s, the first rank alone "
    "(results/earlier_experts.jsonl), and planned as a GPU's share of the experts on one GPU of each group "
    "(scripts/earlier_experts.py). Three of the published figures are what PyTorch allocates, in GiB. GLM-5.2's "
    "is reached while it loads: 5.18 allocates at once what FSDP2 will shard. Qwen3-30B-A3B's is not explained: "
    "in that layout its weights, gradients and states alone take 38.5 GiB. Steps are not compared: a group "
    "computes one row, without packing, and the document says that chat samples are short. In the layout of today "
    "the thread has one run, of a model that is not public: LoRA on 64 H100, `fsdp_size=64, ep_size=8`, packed "
    "rows of 2,048 tokens, 40 GB and 14.1 s; the same job of GLM-5.2 is planned at {need:.1f} GB and "
    "{seconds:.1f} s."
)
ROWS_OF_TRL = {"dtype": "bfloat16", "per_device_train_batch_size": 1}
LONG_RING = {**ROWS_OF_TRL, "max_length": 1_048_576, "cp_size": 8}
# Runs that TRL published with a figure of memory and the seconds of a step: (source, settings, GB, seconds). GB: "a
# GPU", decimal or binary, allocated or the driver's, which they do not say.
RUNS_OF_TRL: tuple[tuple[str, tuple[str, str, str, dict[str, Any]], float, float], ...] = (
    ("huggingface/trl#6846", ("Qwen3-8B", "8xH100", "full", {**LONG_RING, "checkpoint_offload": True}), 56.2, 376),
    ("huggingface/trl#6845", ("Qwen3-0.6B", "8xH100", "full", {**LONG_RING, "checkpoint_offload": True}), 27.9, 137),
)


def runs_of_trl() -> list[str]:
    """Return the table of `RUNS_OF_TRL`."""
    lines = ["| run | tuning | published GB | need GB | nvidia-smi GB | published s | planned s |", "|" + "---|" * 7]
    for source, (model, gpus, tuning, settings), gigabytes, seconds in RUNS_OF_TRL:
        answer = planner.estimate(model, gpus, method="sft", tuning=tuning, **settings)
        gpu = max(answer.gpus, key=lambda each: each.peak_bytes)
        need, shown = (f"{size / 1e9:.1f}" for size in (gpu.peak_bytes, gpu.nvidia_smi_bytes))
        planned = f"{answer.throughput.step_seconds:.3g}"
        lines.append(
            f"| {source}, {model}, {gpus} | {tuning} | {gigabytes:g} | {need} | {shown} | {seconds:g} | {planned} |"
        )
    return lines


def experts_of_today() -> str:
    """Return `OF_EXPERTS` with the figures of GLM-5.2 in the layout of today."""
    answer = planner.estimate(
        "GLM-5.2", "8x8xH100", method="sft", tuning="lora", max_length=2048, packing=True, **ROWS_OF_TRL,
        lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], distributed_config="fsdp", ep_size=8,
    )  # fmt: skip
    need = max(gpu.peak_bytes for gpu in answer.gpus) / 1e9
    return OF_EXPERTS.format(need=need, seconds=answer.throughput.step_seconds)


def runs_of_experts() -> list[str]:
    """Return the table of the runs of huggingface/trl#6869: planned, emulated and published."""
    emulated = {row["settings"]["model"]: row for row in load_rows(earlier_experts.ROWS)}
    lines = ["| run | groups | tuning | published GB | emulated GiB | planned GiB | need GiB |", "|" + "---|" * 7]
    for run, gigabytes in earlier_experts.RUNS.items():
        allocated = max(emulated[run.model]["allocated"].values()) / GIB
        planned, need = (f"{size / GIB:.1f}" for size in run.planned())
        lines.append(
            f"| {run.model}, {run.job.gpus} | {run.groups} of {run.group} | {run.settings['tuning']} | {gigabytes} "
            f"| {allocated:.1f} | {planned} | {need} |"
        )
    return lines


def report(done: list[Compared], refused: Counter[str]) -> str:
    lines = [
        HEAD,
        "| group | quantity | rows | median error | mean absolute | worst | under-predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_summary(members) for members in groups(done).values()]
    lines += ["", "## Runs of which the outcome is known", "", MORE, "", *lines[1:3]]
    lines += [_summary(members) for members in more_groups().values()]
    lines += ["", "## Held out", "", LATER, "", *lines[1:3]]
    lines += [_summary(members) for members in more_groups(HELD_OUT).values()]
    lines += ["", "## Runs of TRL's own threads", "", OF_TRL, "", *runs_of_trl()]
    lines += ["", "### Experts divided as Transformers 5.18 does", "", experts_of_today(), "", *runs_of_experts()]
    lines += ["", f"## Allocated figures beyond {FAR:.0%}", "", *far_table(done), ""]
    lines += [
        "## Row by row (GiB on one GPU)",
        "",
        "| row | computed | published | error | heaviest phase |",
        "|---|---|---|---|---|",
    ]
    lines += [_line(one) for one in done]
    lines += ["", "## Intervals", "", INTERVALS, "", *coverage(evidence(done))]
    lines += ["", "## Assumed", "", *_assumptions(done), "", "## Left out", "", "| rows | why |", "|---|---|"]
    lines += [f"| {count} | {why} |" for why, count in (left_out() + refused).most_common()]
    return "\n".join(lines) + "\n"


def comparison(one: Compared, figure: Figure = "need") -> Comparison:
    """A row as evidence: its error as a share of the estimate."""
    return Comparison(
        id=one.row.id,
        source=one.row.source.partition(":")[0],
        kind=kind_of(one.row.candidate),
        figure=figure,
        miss=round(one.row.measured_bytes / one.computed_bytes - 1, 4),
    )


def evidence(done: list[Compared]) -> list[Comparison]:
    """The rows that certainty rests on: those whose settings describe the run.

    The need: allocated bytes where a kind of job has them; the driver's, which are never less than the need, where it
    has none. nvidia-smi's figure: the driver's. Published rows of quantized bases are left out, since bitsandbytes of
    that time kept more, and so are rows that showed mistakes which were mended since (`MENDED`).
    """
    found: list[Comparison] = []
    rests: tuple[tuple[JobKind, Figure, tuple[Quantity, ...]], ...] = (
        ("whole", "need", ("allocated",)),
        ("gathered", "need", DRIVER),
        ("whole", "nvidia_smi", DRIVER),
        ("gathered", "nvidia_smi", DRIVER),
    )
    more = [one for one in outcomes_compared() if not one.row.group.startswith(MENDED)]
    for kind, figure, quantities in rests:
        found += [
            comparison(one, figure)
            for one in done
            if one.row.quantity in quantities
            and one.row.candidate.quantization == "none"
            and kind_of(one.row.candidate) == kind
            and one.row.group not in DIFFERS
        ]
        found += [
            comparison(one, figure)
            for one in more
            if one.row.quantity in quantities and kind_of(one.row.candidate) == kind
        ]
    return found


def outcome_rows(path: Path = OUTCOMES) -> Iterator[dict[str, Any]]:
    """Yield the rows of tests/data/outcomes.jsonl, or of a file like it."""
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def outcome_job(row: dict[str, Any]) -> tuple[Candidate, Cluster]:
    """Return the candidate of a row of outcomes.jsonl, and its GPUs with those of a vLLM server."""
    candidate = published_candidate(convert(row, PublishedFigure))
    gpus = (candidate.num_processes + candidate.server_gpus) // candidate.num_nodes
    return candidate, parse_cluster(f"{candidate.num_nodes}x{gpus}x{row['gpu']}", None)


def outcomes_compared(path: Path = OUTCOMES) -> Iterator[Compared]:
    """Yield the figures of outcomes.jsonl whose settings describe the run, without those of a vLLM engine."""
    for row in outcome_rows(path):
        candidate, cluster = outcome_job(row)
        figures = {} if "differs" in row or candidate.vllm != "off" else row["figures_gib"]
        for quantity, size in figures.items():
            yield compared(
                Row(
                    id=row["id"],
                    source=row["source"],
                    group=row["group"],
                    quantity=quantity,
                    measured_bytes=round(size * GIB),
                    candidate=candidate,
                    cluster=cluster,
                    assumptions=tuple(row["assumptions"]),
                    keeps=row.get("keeps", ""),
                )
            )


def coverage(found: list[Comparison]) -> list[str]:
    """How often a claim holds for runs of a source that it does not rest on (leave one source out)."""
    lines = ["| kind of job | runs | sources | claimed | held |", "|---|---|---|---|---|"]
    for kind in KINDS:
        runs = [one for one in found if one.kind == kind and one.figure == "nvidia_smi"]
        sources, held = {one.source for one in runs}, list[bool]()
        for source in sources:
            others = sorted(one.miss for one in runs if one.source != source)
            rank = ceil(NVIDIA_SMI_LEVEL * (len(others) + 1))
            if rank <= len(others):
                held += [one.miss <= others[rank - 1] for one in runs if one.source == source]
        said = f"{sum(held) / len(held):.0%} of {len(held)}" if held else "too few runs to claim it"
        lines.append(f"| {kind} | {len(runs)} | {len(sources)} | {NVIDIA_SMI_LEVEL:.0%} | {said} |")
    return lines


def record(row: Row) -> str:
    """Return a line of results/published.jsonl: settings, what was measured and its source, and no estimate."""
    return json.dumps({
        "id": row.id, "source": row.source, "group": row.group, "quantity": row.quantity, **row.case,
        "measured_bytes": row.measured_bytes or None,
    })  # fmt: skip


if __name__ == "__main__":
    answered, not_answered = all_compared()
    REPORT.write_text(report(answered, not_answered), encoding="utf-8")
    COMPARISONS.write_text("".join(msgspec.json.encode(one).decode() + "\n" for one in evidence(answered)))
    RECORD.write_text("".join(record(one.row) + "\n" for one in answered), encoding="utf-8")
    print(report(answered, not_answered))
