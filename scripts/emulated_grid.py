"""Run a grid of jobs on emulated GPUs beside their estimates: results/emulated.jsonl, and results/emulated.md.

    DIR/bin/python -m scripts.emulated_grid run [COUNT]    in an environment of scripts/emulated_environment.sh
    python -m scripts.emulated_grid table                  the page, from the rows that there are

A job that has a row is not run again, so that a run can be broken off.
"""

import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from statistics import mean, median, pstdev
from textwrap import wrap
from typing import Any

from msgspec import Struct

from planner.cache_keys import training_settings
from planner.candidate import Candidate
from planner.errors import PlanError
from planner.estimation import estimate
from planner.gpus.cluster import Cluster
from planner.gpus.parse import parse_cluster
from planner.memory.communication import nccl_bytes
from planner.memory.optimizer import unsplit_states_bytes
from planner.memory.passes import passes_of
from planner.memory.runtime import context_bytes
from planner.memory.schemes.tensor import of_one_gpu
from planner.memory.slack import (
    LAST_SEGMENTS_BYTES,
    LOSSES_BY_LOGITS,
    AllocatorKind,
    AllocatorLoss,
    LogitsShares,
    RecordedShares,
    allocator_kind,
    allocator_loss,
    cached_blocks_bytes,
    logits_bytes,
    split_bytes,
)
from planner.methods import NEWEST_TRL
from planner.quantities import RESIDENT
from planner.schemes import SCHEMES
from planner.units import GIB
from probes.runner.command import WORKER, worker_command
from probes.task import Task
from scripts.drawn_jobs import drawn_jobs
from scripts.emulated_jobs import Job, branches, grid

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROWS, PAGE = RESULTS / "emulated.jsonl", RESULTS / "emulated.md"
HELD_OUT = RESULTS / "emulated_branches.jsonl"  # rows that no constant is fitted to
EXPLAINED = 0.02  # rows further off in allocated bytes are listed
EXPLANATION = (
    "They ran on emulated GPUs (docs/emulated.md), everything on the card done at once. Errors are estimated over "
    "emulated, less one. Allocated: `max_memory_allocated` beside the estimate without CUDA context, NCCL and slack. "
    "Need: the most bytes in segments that hold a block, where recorded, beside the estimate with its slack. "
    "Reserved: `max_memory_reserved` beside the estimate's figure for nvidia-smi, without context and NCCL."
)
RECORD = "PLAN_ALLOCATOR_RECORD"  # environment variable of `RECORDED_WORKER`: the folder that it writes to
RECORDED_WORKER = "scripts.recorded_worker"
LEAST_ROWS = 4  # of a kind whose shares of slack and cache are used: medians of fewer are noise
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "bitsandbytes")


def torch_bytes(candidate: Candidate, cluster: Cluster, phase: Any) -> int:
    """Return what an estimated phase allocates through PyTorch: not the CUDA context, NCCL's buffers and the slack."""
    outside = context_bytes(cluster.gpu) + nccl_bytes(candidate)
    return int(phase.total_bytes - phase.components.get("fragmentation", 0) - outside)


def recorded_command(task: Task, task_file: Path) -> list[str]:
    """Return the command of a probe's worker, with one that records the allocator's history."""
    return [RECORDED_WORKER if word == WORKER else word for word in worker_command(task, task_file)]


def row(job: Job) -> dict[str, Any]:
    """Run one job on emulated GPUs and return its row: of the ranks that run, the largest figures of each phase.

    `needed`, `streams` and `requested`: scripts/recorded_worker.py.
    """
    from probes.runner.devices import DeviceOptions, device
    from probes.runner.runner import WorkerLimits

    with tempfile.TemporaryDirectory() as logs, tempfile.TemporaryDirectory() as records:
        os.environ[RECORD] = records
        options = DeviceOptions(
            logs=Path(logs),
            limits=WorkerLimits(host_reserve_share=0.0),
            save=False,
            resume=False,
            command=recorded_command,
        )
        found = device("emulated", parse_cluster(job.gpus, None), options)(job.candidate)
        recorded = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(Path(records).iterdir())]
    phases = [peak for rank in found.ranks for peak in rank.phases]
    return {
        "kind": job.kind,
        "gpus": job.gpus,
        "settings": job.settings,
        "outcome": found.outcome,
        "message": found.message,
        "seconds": round(found.wall_seconds, 1),
        "allocated": most({peak.name: peak.allocated_bytes for peak in rank.phases} for rank in found.ranks),
        "reserved": max((peak.reserved_bytes for peak in phases), default=0),
        "reserved_by_phase": most({peak.name: peak.reserved_bytes for peak in rank.phases} for rank in found.ranks),
        "needed": max((each["needed"] for each in recorded), default=0),
        "streams": max((each["streams"] for each in recorded), key=lambda each: sum(each.values()), default={}),
        "requested": max((each["requested"] for each in recorded), default=0),
    }


def most(ranks: Iterable[dict[str, int]]) -> dict[str, int]:
    """The largest figure of all ranks, phase by phase."""
    found: dict[str, int] = {}
    for rank in ranks:
        found |= {name: max(size, found.get(name, 0)) for name, size in rank.items()}
    return found


def run(count: int) -> None:
    """Run the installed TRL's jobs that have no row yet, at most `count`, and append each row as it is ready."""
    installed = ".".join(importlib.metadata.version("trl").split(".")[:2])
    for file, jobs in ((ROWS, chain(grid(), drawn_jobs())), (HELD_OUT, branches())):
        done = {json.dumps([each["gpus"], each["settings"]], sort_keys=True) for each in load_rows(file)}
        left = [each for each in jobs if each.settings.get("trl_version", NEWEST_TRL) == installed]
        left = [each for each in left if each.key not in done][:count]
        append_rows(left, file)
        count -= len(left)


def append_rows(jobs: Iterable[Job], rows: Path) -> None:
    """Run jobs and append to `rows` the row of each, or the error that refuses it, as it is ready."""
    for job in jobs:
        try:
            text = json.dumps(row(job))
        except PlanError as error:
            text = json.dumps({"kind": job.kind, "gpus": job.gpus, "settings": job.settings, "outcome": str(error)})
        with rows.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        print(text[:300], flush=True)


# -- the page ----------------------------------------------------------------------------------------------------------


class Compared(Struct, frozen=True, kw_only=True):
    """A row beside today's estimate. Bytes that PyTorch allocates, by phase: (estimated, emulated)."""

    job: Job
    candidate: Candidate
    phases: dict[str, tuple[int, int]]
    peaks: tuple[int, int]
    shown: int  # estimated, with the cache of a run with room to spare
    reserved: int
    needed: int  # in segments that hold a block; 0: not recorded
    requested: int  # by tensors, at most; 0: not recorded
    unsplit: int  # of the estimated allocated bytes, what tensors did not ask for (`unsplit_bytes`)
    need: int  # the same, estimated: with the slack
    most: int  # the upper end of the interval of the need
    resident: int  # of that weights, adapters and optimizer states, estimated
    split: int  # of the slack, blocks that are known to be split where most was allocated, estimated
    blocks: int  # of the cache, blocks that are known to be kept, estimated
    in_step: bool  # the optimizer's step allocated most
    by_logits: bool  # slack is estimated as a share of the logits

    @property
    def error(self) -> float:
        return self.peaks[0] / self.peaks[1] - 1

    @property
    def requested_error(self) -> float:
        return (self.peaks[0] - self.unsplit) / self.requested - 1

    @property
    def reserved_error(self) -> float:
        return self.shown / self.reserved - 1

    @property
    def needed_error(self) -> float:
        return self.need / self.needed - 1

    def share(self, held: int) -> float:
        """Bytes beyond the allocated ones, as a share of what comes and goes."""
        return (held - self.peaks[1]) / (self.peaks[1] - self.resident)


def compared(row: dict[str, Any]) -> Compared:
    job = Job(kind=row["kind"], gpus=row["gpus"], settings=row["settings"])
    candidate, cluster = job.candidate, parse_cluster(job.gpus, None)
    gpu = estimate(candidate, cluster).gpus[0]
    settings = training_settings(of_one_gpu(candidate))
    estimated = {phase.name: torch_bytes(candidate, cluster, phase) for phase in gpu.phases}
    step = next(phase for phase in gpu.phases if phase.name == "optimizer_step").components
    heaviest = max(row["allocated"], key=row["allocated"].get)
    outside = context_bytes(cluster.gpu) + nccl_bytes(candidate)
    return Compared(
        job=job,
        candidate=candidate,
        phases={name: (size, row["allocated"][name]) for name, size in estimated.items() if row["allocated"].get(name)},
        peaks=(max(estimated.values()), max(row["allocated"].values())),
        shown=gpu.nvidia_smi_bytes - outside,
        reserved=row["reserved"],
        needed=row.get("needed", 0),
        requested=row.get("requested", 0),
        unsplit=passes_of(settings, cluster.gpu).unsplit + unsplit_states_bytes(settings),
        need=gpu.peak_bytes - outside,
        most=gpu.interval_bytes[1] - outside,
        resident=sum(step.get(component, 0) for component in RESIDENT),
        split=split_bytes(settings, heaviest),
        blocks=cached_blocks_bytes(settings),
        in_step=heaviest == "optimizer_step",
        by_logits=candidate.scheme_row.whole and allocator_loss(candidate) in LOSSES_BY_LOGITS,
    )


@lru_cache(maxsize=2)
def load_rows(file: Path = ROWS) -> tuple[dict[str, Any], ...]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return tuple(json.loads(line) for line in lines)


def ran(**fields: Any) -> tuple[Compared, ...]:
    """The rows of the jobs that ran with these settings, or of this kind, beside today's estimates."""
    rows = enumerate(load_rows())
    return tuple(
        _compared_at(number)
        for number, row in rows
        if row["outcome"] == "fits" and fields.items() <= {"kind": row["kind"], **row["settings"]}.items()
    )


@cache
def _compared_at(number: int) -> Compared:
    return compared(load_rows()[number])


def kept() -> dict[AllocatorKind, list[Compared]]:
    """The recorded rows with the default allocator by kind, at least four, without those of `kept_beside_logits`."""
    members: dict[AllocatorKind, list[Compared]] = {}
    for each in recorded_rows():
        if not each.by_logits:
            members.setdefault(allocator_kind(each.candidate), []).append(each)
    return {kind: rows for kind, rows in members.items() if len(rows) >= LEAST_ROWS}


def kept_beside_logits() -> dict[tuple[AllocatorLoss, bool], list[Compared]]:
    """The recorded rows of whole models with a loss over logits, by loss and full fine-tuning."""
    members: dict[tuple[AllocatorLoss, bool], list[Compared]] = {}
    for each in recorded_rows():
        if each.by_logits:
            kind = allocator_kind(each.candidate)
            members.setdefault((kind.loss, kind.full), []).append(each)
    return members


def recorded_rows() -> list[Compared]:
    """The rows with the default allocator whose need was recorded."""
    return [each for each in ran() if each.needed and not each.candidate.expandable_segments]


def logits_shares(members: list[Compared]) -> LogitsShares:
    """The row of `LOGITS_SHARES` that these rows make."""
    slack, cache = (
        [1000 * (held(each) - each.peaks[1] - LAST_SEGMENTS_BYTES) / logits_bytes(each.candidate) for each in members]
        for held in (lambda each: each.needed, lambda each: each.reserved)
    )
    return LogitsShares(*(round(size) for one in (slack, cache) for size in (median(one), pstdev(one))))


def kept_shares(members: list[Compared]) -> RecordedShares:
    """The row of `RECORDED_SHARES` that these rows make.

    Slack: without the blocks that are known to be split, which in an optimizer's step are all of it; not below 0.
    """
    slack = [
        max(0.0, 1000 * each.share(each.needed - LAST_SEGMENTS_BYTES - each.split))
        for each in members
        if not (each.in_step and each.split)
    ]
    cache = [1000 * each.share(each.reserved - each.blocks) for each in members]
    return RecordedShares(*(round(size) for one in (slack, cache) for size in (median(one), pstdev(one))))


def page() -> str:
    """Return the page, from the rows and today's estimates."""
    kinds: dict[str, list[Compared]] = {}
    for each in ran():
        kinds.setdefault(each.job.kind, []).append(each)
    lines = [
        "# Estimates beside the emulated CUDA stack",
        "",
        *wrap(f"{len(ran())} jobs of `scripts/emulated_jobs.py` and `scripts/drawn_jobs.py`. {EXPLANATION}", 118),
        "",
        "| kind | jobs | allocated: median | mean absolute | worst | need: median | mean absolute | worst "
        "| reserved: median | mean absolute | worst |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, members in {**kinds, "all": list(ran())}.items():
        needs = [each.needed_error for each in members if each.needed]
        figures = (
            _errors([each.error for each in members]),
            _errors(needs) if needs else " |  | ",
            _errors([each.reserved_error for each in members]),
        )
        lines.append(f"| {kind} | {len(members)} | {' | '.join(figures)} |")
    lines += ["", "## What tensors ask for", "", *wrap(REQUESTED, 118), "", *requested()]
    lines += ["", "## Verdicts", "", *wrap(VERDICTS, 118), "", *verdicts()]
    lines += ["", f"## Rows beyond {FAR:.0%}", "", *far_table()]
    lines += ["", f"## Rows beyond {EXPLAINED:.0%}", "", *(line for each in CAUSES for line in wrap(each, 118)), ""]
    lines += BEYOND_HEAD
    lines += [beyond(each) for each in ran() if abs(each.error) > EXPLAINED]
    held_out = [compared(row) for row in load_rows(HELD_OUT) if row["outcome"] == "fits"]
    far = [each for each in held_out if max(abs(one / other - 1) for one, other in each.phases.values()) > EXPLAINED]
    words = (
        f"{len(held_out)} runs of branches that no other job takes, to which no constant is fitted. {HELD_OUT_WORDS}"
    )
    lines += ["", "## Held-out runs", "", *wrap(words, 118), "", *BEYOND_HEAD, *map(beyond, far)]
    lines += ["", "## What the allocator keeps", "", *wrap(KEEPS, 118), "", *KEEPS_HEAD]
    for kind, members in sorted(kept().items()):
        slack, _, cache, _ = kept_shares(members)
        lines.append(
            f"| {SCHEMES[kind.sharding].words} | {kind.loss} | {'full' if kind.full else 'adapters'} | {kind.layers} "
            f"| {len(members)} | {slack / 10:.1f}% | {cache / 10:.1f}% |"
        )
    lines += ["", *wrap(BESIDE_LOGITS, 118), "", *LOGITS_HEAD]
    for (loss, full), members in sorted(kept_beside_logits().items()):
        row = logits_shares(members)
        tuning = "full" if full else "adapters"
        lines.append(
            f"| {loss} | {tuning} | {len(members)} | {row.slack / 10:.0f}% | {row.slack_deviation / 10:.0f}% "
            f"| {row.cache / 10:.0f}% | {row.cache_deviation / 10:.0f}% |"
        )
    failed = [each for each in load_rows() if each["outcome"] != "fits"]
    lines += [
        "",
        *(
            f"- Not run: {each['gpus']} {each['settings']}: {each['outcome']} {each.get('message', '')[:200]}"
            for each in failed
        ),
    ]
    return "\n".join(lines).rstrip() + "\n"


REQUESTED = (
    "PyTorch counts whole blocks as allocated, and leaves up to 1 MiB of a large block unsplit (torch 2.13, "
    "c10/cuda/CUDACachingAllocator.cpp, `should_split`). Estimates count those of saved activations and optimizer "
    "states (planner/memory/parameters/segments.py); others are slack. For the jobs whose requests were recorded: the "
    "estimate without slack and without such bytes over the requested ones, and with them over the allocated ones, "
    "less one."
)


def requested() -> list[str]:
    """A table of the errors in the bytes that tensors asked for, beside those in the allocated ones."""
    lines = [
        "| jobs | number | requested: median | mean absolute | worst | allocated: median | mean absolute | worst |",
        "|---|---|---|---|---|---|---|---|",
    ]
    recorded = [each for each in ran() if each.requested]
    for words, sharded in (("one process, or DDP", False), ("sharded", True)):
        members = [each for each in recorded if each.candidate.scheme_row.whole != sharded]
        if members:
            of_requests = _errors([each.requested_error for each in members])
            allocated = _errors([each.error for each in members])
            lines.append(f"| {words} | {len(members)} | {of_requests} | {allocated} |")
    return lines


VERDICTS = "What the same jobs are called before they run: the cards have the memory of the real ones."
OUTCOMES = {"fits": "ran", "out_of_memory": "out of memory"}


def verdicts() -> list[str]:
    """A table of the answers on the jobs that ran and on those that ran out of the card's memory."""
    lines = ["| outcome | jobs | fits | tight | does not fit |", "|---|---|---|---|---|"]
    for outcome, words in OUTCOMES.items():
        answers = [answer_on(row) for row in load_rows() if row["outcome"] == outcome]
        counts = [answers.count(answer) for answer in ("fits", "tight", "does not fit")]
        lines.append(f"| {words} | {len(answers)} | {' | '.join(map(str, counts))} |")
    return lines


def answer_on(row: dict[str, Any]) -> str:
    """The verdict on a row's job."""
    job = Job(kind=row["kind"], gpus=row["gpus"], settings=row["settings"])
    found = estimate(job.candidate, parse_cluster(job.gpus, None))
    return "fits" if found.fits else "tight" if found.tight else "does not fit"


def _errors(errors: list[float]) -> str:
    return f"{median(errors):+.1%} | {mean(map(abs, errors)):.1%} | {max(errors, key=abs):+.1%}"


KEEPS = (
    "Medians, as shares of what comes and goes: allocated bytes less weights, adapters and optimizer states. Slack: "
    "bytes in segments that hold a block, at most, beyond the allocated ones. Cache: all reserved bytes beyond them. "
    "Cards made smaller say the same. Qwen2.5-0.5B, ORPO, two rows of 1,024 tokens: in full, 12.6 GiB ran out of "
    "memory in the second step and 13.0 ran (12.9 by segments); with LoRA 8.4 ran out (8.3 by segments). In MiB, ran "
    "out, ran, by segments: Qwen2.5-1.5B, LoRA, a row of 32,768 tokens 13,133, 13,200, 13,196; in full, 16 rows of 512 "
    "tokens 13,852, 13,897, 13,894; Qwen2.5-0.5B, LoRA, KTO without checkpointing 4,437, 4,475, 4,468; online DPO "
    "4,100, 4,200, 4,198. The first two with expandable segments 11,604, 11,670 and 13,092, 13,137, as replays say. "
    "Layers that are gathered need more than segments say, up to a tenth: Qwen2.5-1.5B on four GPUs, DPO with LoRA "
    "under ZeRO-3 4,661, 4,770, 4,336; reward in full under FSDP2 7,587, 7,768, 7,226."
)
BESIDE_LOGITS = (
    "Losses over whole logits, as shares of the logits that the trainer gets, beside 22 MiB: medians and standard "
    "deviations."
)
LOGITS_HEAD = (
    "| path | tuning | rows | slack | deviation | cache | deviation |",
    "|---|---|---|---|---|---|---|",
)
KEEPS_HEAD = (
    "| scheme | loss | tuning | layers checkpointed | rows | slack | cache |",
    "|---|---|---|---|---|---|---|",
)
HELD_OUT_WORDS = (
    "Here are those with a phase further off than 2 %; the others are within that in every phase. ZeRO-3 and FSDP2 on "
    "one GPU are not counted well yet: what is whole while a model is created, and what offloading leaves there."
)
CAUSES = (
    "- Unsplit blocks, where the error of what tensors asked for is near 0: most of these rows. Tensors of 1 to 10 MiB "
    "share segments of 20 MiB, whose rests no other tensor gets.",
    "- ZeRO-1 and ZeRO-2 in full: rank 0 was measured, and the rank that needs most is estimated, with the last layers "
    "(of OLMo-2 1B the head's gradient, 392 MiB; of LFM2 350M a part of the embedding's).",
    "- 8-bit weights with several micro-steps: more stays from one to the next than is counted.",
    "- QLoRA under DDP: the buckets in which it sends 4-bit weights are counted a little too large.",
    "- ZeRO-1 and ZeRO-2 make a loaded model flat on the GPU if there is room: left out, as they need none.",
    "- A reference computed before a training under ZeRO-3: DeepSpeed's trace is that of its passes.",
    "- Experts with adapters under ZeRO-3: what is gathered ahead for PEFT's wrappers.",
    "- An embedding for each layer (Gemma 4 E2B) under FSDP2 in full: its gradient is counted a little too large.",
    "- Not explained: a rollout under FSDP2, distillation of Qwen3.5, GKD under ZeRO-3 with offloaded parameters, RLOO "
    "of gpt2 under ZeRO-2 (about a share of the gradients, 119 MiB).",
    "- Without a figure of what tensors asked for, and so not told apart: the rows where it is missing.",
)
FAR = 0.05  # rows further off in allocated bytes have a cause each
OF_ANOTHER_RANK = (
    "rank 0 ran; the estimate is of the rank that needs most, whose partition has larger gradients. With rank 0's "
    "partition the estimate is right"
)
GRADIENTS_COME_LAST = (
    "rank 0 ran, whose partition has the embedding and the first layers: their gradients come last, when its "
    "checkpoints are gone. The rank with the last layers is estimated"
)
# By model, method and way to shard.
FAR_CAUSES = {
    ("Qwen2.5-1.5B", "sft", "zero2"): OF_ANOTHER_RANK,
    ("gpt2", "rloo", "zero2"): OF_ANOTHER_RANK,
    ("OLMo-2-0425-1B", "gmpo", "zero2"): f"{GRADIENTS_COME_LAST}, with a float64 copy of the largest part (393 MiB)",
    ("LFM2-350M", "gmpo", "zero2"): f"{GRADIENTS_COME_LAST} (171 MiB)",
    ("OLMo-1B-hf", "grpo", "zero2"): (
        "DeepSpeed flattens the loaded model on the GPU only where there is room; the estimate leaves it out, as a "
        "smaller card does without"
    ),
    ("Qwen2.5-3B", "dpo", "zero3"): (
        "precomputed log-probabilities: DeepSpeed's trace is that of the reference's passes"
    ),
    ("Qwen3-30B-A3B", "sft", "zero3"): (
        "weights that DeepSpeed gathers ahead for PEFT's wrappers of the experts are not counted"
    ),
    ("gemma-4-E2B", "sft", "fsdp2"): "the gradient of the per-layer embedding is counted too large",
}


def far_rows() -> list[tuple[tuple[str, str, str], Compared]]:
    """The rows far off in allocated bytes, each with its key in `FAR_CAUSES`."""
    return [
        ((each.job.settings["model"].rsplit("/", 1)[-1], each.candidate.method, each.candidate.sharding), each)
        for each in ran()
        if abs(each.error) > FAR
    ]


def far_table() -> list[str]:
    """Lines of a table: the rows far off in allocated bytes, each with its cause."""
    lines = ["| model | method | scheme | GPUs | error | cause |", "|---|---|---|---|---|---|"]
    for key, each in far_rows():
        lines.append(f"| {' | '.join(key)} | {each.job.gpus} | {each.error:+.1%} | {FAR_CAUSES[key]} |")
    return lines


BEYOND_HEAD = (
    "| job | GPUs | estimated GiB | emulated GiB | error | of what tensors asked for | phases |",
    "|---|---|---|---|---|---|---|",
)


def beyond(each: Compared) -> str:
    phases = ", ".join(f"{name.replace('_', ' ')} {one / other - 1:+.1%}" for name, (one, other) in each.phases.items())
    settings = ", ".join(f"{name} {value}" for name, value in each.job.settings.items())
    estimated, emulated = (f"{size / GIB:.2f}" for size in each.peaks)
    of_requests = f"{each.requested_error:+.1%}" if each.requested else ""
    return f"| {settings} | {each.job.gpus} | {estimated} | {emulated} | {each.error:+.1%} | {of_requests} | {phases} |"


if __name__ == "__main__":
    if sys.argv[1] == "run":
        print({name: importlib.metadata.version(name) for name in LIBRARIES})
        run(int(sys.argv[2]) if len(sys.argv) > 2 else sys.maxsize)
    else:
        PAGE.write_text(page(), encoding="utf-8")
