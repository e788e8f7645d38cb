"""Does memory grow over the steps of a run? Emulated runs of many steps: results/growth.jsonl, and results/growth.md.

DIR/bin/python -m scripts.growth run [NAME ...]    in an environment of scripts/emulated_environment.sh
DIR/bin/python -m scripts.growth card NAME         the smallest card on which a case's steps run
python -m scripts.growth table                     the page, from the rows that there are
"""

import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.estimation import estimate
from planner.gpus.cluster import Cluster
from planner.gpus.parse import parse_cluster
from planner.measurements.measurement import USUAL_STEPS
from planner.memory.communication import nccl_bytes
from planner.memory.runtime import context_bytes
from planner.rows.lengths import lengths_in_words
from planner.units import GIB, MIB
from probes.runner.command import WORKER, worker_command
from probes.task import Task
from scripts.emulated_grid import RECORD, torch_bytes
from scripts.emulated_jobs import Job
from scripts.mutate import commit

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROWS, PAGE = RESULTS / "growth.jsonl", RESULTS / "growth.md"
STEPS = 50
CARD_WITHIN = 0.01  # of the smallest card, by halving
EMPTIES = "PLAN_EMPTY_CACHE_STEPS"  # environment variable of the worker: `torch_empty_cache_steps`
LENGTHS = ("lengths", "completion_lengths")


class Case(Struct, frozen=True, kw_only=True):
    """A run of many steps: its GPUs, its settings as in `Job`, and how often its trainer empties the cache (0: never).

    `lengths` and `completion_lengths` are quantiles in words.
    """

    gpus: str
    settings: dict[str, Any]
    empties: int = 0
    steps: int = STEPS

    @property
    def equal(self) -> "Case":
        """The same with three steps of the longest rows; of two a worker keeps no figures by step."""
        settings = {name: value for name, value in self.settings.items() if name not in LENGTHS}
        return replace(self, settings=settings, steps=USUAL_STEPS + 1)

    @property
    def candidate(self) -> Candidate:
        words = {name: lengths_in_words(self.settings[name]) for name in LENGTHS if name in self.settings}
        return Job(kind="growth", gpus=self.gpus, settings=self.settings | words).candidate

    @property
    def cluster(self) -> Cluster:
        return parse_cluster(self.gpus)


LONG_ROWS = "rows=52002,p50=3000,p95=12000,max=16384"
SFT = {"model": "Qwen2.5-0.5B", "method": "sft", "max_length": 16384, "lengths": LONG_ROWS, "padded": "either"}
LORA = {"tuning": "lora", "dtype": "bfloat16", "lora_r": 16}
FULL = {"tuning": "full", "dtype": "float32"}
EXPANDABLE = {"expandable_segments": True}
FOUR = {"per_device_train_batch_size": 4, "max_length": 4096, "lengths": "rows=52002,p50=380,p95=1900,max=4096"}
UNCHECKPOINTED = {"gradient_checkpointing": False}
GRPO = {
    "model": "Qwen2.5-0.5B", "method": "grpo", "per_device_train_batch_size": 8, "num_generations": 8,
    "prompt_length": 256, "max_completion_length": 96, "max_length": 352, "padded": "either",
    "completion_lengths": "p50=35,p95=82,max=96",
}  # fmt: skip
AWAKE = {"vllm": "colocate", "vllm_gpu_memory_utilization": 0.2, "vllm_max_model_length": 352}
ASLEEP = AWAKE | {"vllm_enable_sleep_mode": True}
A100 = "1xA100-80G"
CASES: dict[str, Case] = {
    "SFT LoRA": Case(gpus=A100, settings=SFT | LORA),
    "SFT LoRA, expandable": Case(gpus=A100, settings=SFT | LORA | EXPANDABLE),
    "SFT LoRA, empties": Case(gpus=A100, settings=SFT | LORA, empties=1),
    "SFT LoRA, 4 rows": Case(gpus=A100, settings=SFT | LORA | FOUR),
    "SFT LoRA, 4 rows, expandable": Case(gpus=A100, settings=SFT | LORA | FOUR | EXPANDABLE),
    "SFT LoRA, 4 rows, not checkpointed": Case(gpus=A100, settings=SFT | LORA | FOUR | UNCHECKPOINTED),
    "SFT full": Case(gpus=A100, settings=SFT | FULL),
    "SFT full, expandable": Case(gpus=A100, settings=SFT | FULL | EXPANDABLE),
    "SFT full, 4 rows": Case(gpus=A100, settings=SFT | FULL | FOUR),
    "GRPO LoRA": Case(gpus=A100, settings=GRPO | LORA),
    "GRPO LoRA, expandable": Case(gpus=A100, settings=GRPO | LORA | EXPANDABLE),
    "GRPO full": Case(gpus=A100, settings=GRPO | FULL),
    "GRPO LoRA, engine asleep": Case(gpus=A100, settings=GRPO | LORA | ASLEEP),
    "GRPO full, engine asleep": Case(gpus=A100, settings=GRPO | FULL | ASLEEP),
    "GRPO LoRA, engine awake": Case(gpus=A100, settings=GRPO | LORA | AWAKE),
    "GRPO full of 1.5B, engine asleep": Case(
        gpus=A100, settings=GRPO | FULL | ASLEEP | {"model": "Qwen2.5-1.5B"}, steps=USUAL_STEPS + 1
    ),
}


EQUAL = ", equal rows"  # of a name: `Case.equal`


def case_of(name: str) -> Case:
    return CASES[name.removesuffix(EQUAL)].equal if name.endswith(EQUAL) else CASES[name]


def growth_command(task: Task, task_file: Path) -> list[str]:
    """Return the command of a probe's worker, with one that records every step."""
    return ["scripts.growth_worker" if word == WORKER else word for word in worker_command(task, task_file)]


def run(case: Case, cluster: Cluster) -> dict[str, Any]:
    """Run a case on emulated cards of a cluster; return how it ended, and what each step of the first rank took."""
    from probes.runner.devices import DeviceOptions, device
    from probes.runner.runner import WorkerLimits

    with tempfile.TemporaryDirectory() as logs, tempfile.TemporaryDirectory() as records:
        os.environ |= {RECORD: records, EMPTIES: str(case.empties or "")}
        options = DeviceOptions(
            logs=Path(logs), limits=WorkerLimits(seconds=3600.0, host_reserve_share=0.0), steps=case.steps, save=False,
            resume=False, command=growth_command,
        )  # fmt: skip
        found = device("emulated", cluster, options)(case.candidate)
        written = [
            [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            for file in sorted(Path(records).iterdir())
        ]
        if found.outcome not in ("fits", "out_of_memory"):
            print(*(file.read_text(encoding="utf-8")[-3000:] for file in Path(logs).iterdir()), sep="\n")
    each = written[0] if written else []
    figures = {name: [step[name] for step in each] for name in (each[0] if each else ())}
    allocated = {peak.name: peak.allocated_bytes for rank in found.ranks[:1] for peak in rank.phases}
    return {
        "outcome": found.outcome, "message": found.message, "seconds": round(found.wall_seconds, 1),
        "phases": allocated, "steps": figures,
    }  # fmt: skip


def smallest_card(case: Case, low: int, high: int) -> dict[str, int]:
    """Return the bytes of the smallest card on which all steps run, and of the largest on which they do not.

    `low`: a card that is too small; `high`: one on which they run.
    """
    cluster = case.cluster
    while high - low > CARD_WITHIN * high:
        size = (low + high) // 2 // (2 * MIB) * 2 * MIB
        found = run(case, replace(cluster, gpu=replace(cluster.gpu, free_bytes=size)))
        print(
            f"{size / 2**30:.2f} GiB: {found['outcome']} after {len(found['steps'].get('kept', ()))} steps", flush=True
        )
        low, high = (low, size) if found["outcome"] == "fits" else (size, high)
    return {"ran": high, "died": low}


def load_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()] if ROWS.exists() else []


# -- the page ----------------------------------------------------------------------------------------------------------

ABOUT = """
Runs of 50 steps on an emulated A100 of 80 GB (docs/emulated.md): the real trainer and PyTorch's own allocator. Rows
and completions are drawn from a distribution with a fixed seed, in random order, and those of the last step are the
longest: SFT of one row of up to 16,384 tokens (median 3,000, 95 % up to 12,000), or of four padded rows of up to 4,096
(380; 1,900); GRPO of 8 completions of up to 96 tokens (35; 82) of prompts of 256. Bytes of PyTorch, GiB; host: of the
process, with small values of the emulated card. Need: the smallest card on which all steps run, found by halving,
without its CUDA context: it lies between the two figures; on smaller cards the last step runs out of memory, after the
allocator has given back its cache. At most: bytes in segments that hold a block, where no smaller card was tried.
"""
WHY = """
What grows is what the allocator keeps, not the tensors: the step with the longest rows allocates what is estimated,
whatever was before. A longer row than any before needs larger blocks than there are; those that it leaves are split by
later, shorter rows, so that the next longest one takes new segments (pytorch 2.13, c10/cuda/CUDACachingAllocator.cpp,
`get_free_block`, `should_split`). Reserved memory so grows in jumps that become rare, as the records of a random order
do, most where nothing is checkpointed. The plan's figure for nvidia-smi counts it where lengths are given. A full card
is no sign of a shortage: before an error the allocator returns every segment that no tensor is in. Beside a colocated
engine it is, if the trainer does not empty its cache before the engine wakes (verl-project/verl#632); TRL does (trl
1.16, generation/vllm_generation.py, `sync_weights`). Reports of growth: NVIDIA-NeMo/RL#2319, huggingface/trl#1377.

What counts is the need. Beside equal rows, three steps of the longest, it grows by 0.2 to 0.3 GiB for SFT with LoRA,
by 0.6 without checkpoints: tensors of the last step lie in blocks of earlier steps whose rest is too small for others.
`torch_empty_cache_steps=1` gives those blocks back, and the need is that of equal rows again. In full with four rows it
does not grow: the slack of equal rows is as large. Expandable segments give their pages to any tensor; the need is 2 to
5 % more than the tensors.

Host memory of the process grows by 10 to 30 MiB in 48 steps of SFT, most of it in the first ten, in one run by 100 with
a new longest batch, and by 100 in GRPO without an engine.
"""

ENGINES = """
## Beside a colocated engine

GRPO beside a vLLM 0.31 engine with a fifth of the card; bytes of the whole card, GiB, with the context. At most: until
that step. After: at that step's end, with the engine asleep if it sleeps. Where it sleeps nothing grows after the
second step: TRL empties the trainer's cache before the engine wakes for new weights. Beside one that stays awake the
cache grows, by 160 MiB. TRL 1.16 sleeps at level 2 only (generation/vllm_generation.py).

In full the trainer's segments are not empty while the engine is awake: 0.8 GiB of 0.5B are unused, 1.8 of 1.5B. The
first optimizer step puts states of small matrices into rests of segments in which gradients lie, and a segment with one
state cannot be returned when its gradient is gone; and a state of 16.6 MiB leaves 1.4 MiB of its own segment. Both are
counted (planner/memory/parameters/segments.py, `held_by_states_bytes`): 1.5B has 27 gradients of 52.5 MiB beside a
state of 1.5. What is not counted are segments that were made for activations, in which gradients and states lie
in the same way: most of what 0.5B has.
"""
ENGINE_HEAD = ("run", "at most until steps 2, 10, 25, 50", "plan", "after these steps", "host")


def planned(case: Case) -> dict[str, int]:
    """Return the plan's figures of one training GPU, without what is outside PyTorch.

    `allocated`, `need` with the end of its interval, `nvidia_smi` with the ends of its.
    """
    candidate, cluster = case.candidate, case.cluster
    gpu = estimate(candidate, cluster).gpus[0]
    outside = context_bytes(cluster.gpu) + nccl_bytes(candidate)
    return {
        "allocated": max(torch_bytes(candidate, cluster, phase) for phase in gpu.phases),
        "need": gpu.peak_bytes - outside,
        "most": gpu.interval_bytes[1] - outside,
        "shown": gpu.nvidia_smi_bytes - outside,
        "shown_most": gpu.nvidia_smi_interval_bytes[1] - outside,
    }


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page, from the rows and today's plans."""
    commits = " and ".join(dict.fromkeys(row["commit"] for row in rows))
    measured = f"Runs at commits {commits}; a test computes the plan's figures anew."
    head = (
        "run", "allocated", "plan", "need", "plan, with its interval", "reserved after steps 2, 10, 25, 49, 50", "plan",
        "host after step 2 and the last",
    )  # fmt: skip
    lines = ["# Memory over the steps of a run", "", measured, "Made by `python -m scripts.growth`.", "", ABOUT.strip()]
    alone = [row for row in rows if "vllm" not in row["settings"]]
    beside = [row for row in rows if "vllm" in row["settings"]]
    lines += ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|", *map(_line, alone), "", WHY.strip()]
    lines += ["", ENGINES.strip(), "", f"| {' | '.join(ENGINE_HEAD)} |", "|---" * len(ENGINE_HEAD) + "|"]
    lines += map(_engine_line, beside)
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    plan, steps = planned(case_of(row["name"])), row["steps"]
    context = context_bytes(case_of(row["name"]).cluster.gpu)
    last = len(steps["reserved"])
    reserved = [steps["reserved"][step - 1] for step in (2, 10, 25, 49, 50) if step <= last]
    card, needed = row.get("card"), max(steps["needed"])
    most = f"at most {_gib(needed)}" if needed else ""
    cells = [
        row["name"],
        _gib(max(steps["allocated"])),
        _with_error(plan["allocated"], max(steps["allocated"])),
        f"{_gib(card['died'] - context)} to {_gib(card['ran'] - context)}" if card else most,
        f"{_gib(plan['need'])}, up to {_gib(plan['most'])}",
        ", ".join(map(_gib, reserved)),
        f"{_with_error(plan['shown'], max(steps['reserved']))}, up to {_gib(plan['shown_most'])}",
        ", ".join(_gib(steps["host"][step - 1]) for step in (2, last)),
    ]
    return f"| {' | '.join(cells)} |"


def _engine_line(row: dict[str, Any]) -> str:
    case, steps = case_of(row["name"]), row["steps"]
    plan = estimate(case.candidate, case.cluster).gpus[0].peak_bytes
    shown = [step for step in (2, 10, 25, 50) if step <= case.steps]
    figures = [[steps[name][step - 1] for step in shown] for name in ("peak", "held", "host")]
    peak, held, host = (", ".join(map(_gib, each)) for each in figures)
    return f"| {row['name']} | {peak} | {_with_error(plan, max(steps['peak']))} | {held} | {host} |"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _with_error(plan: int, found: int) -> str:
    return f"{_gib(plan)} ({plan / found - 1:+.1%})"


def main(arguments: Sequence[str]) -> None:
    verb, *names = arguments
    if verb == "run":
        for name in names or CASES:
            case = case_of(name)
            row = {"name": name, "gpus": case.gpus, "settings": case.settings, "empties": case.empties}
            row |= {"commit": commit(), "trl": importlib.metadata.version("trl")} | run(case, case.cluster)
            with ROWS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(name, row["outcome"], row["message"], row["seconds"], flush=True)
    if verb == "card":
        rows = load_rows()
        for row in rows:
            if row["name"] in names and row["outcome"] == "fits":
                low, high = (
                    context_bytes(case_of(row["name"]).cluster.gpu) + max(row["steps"][figure])
                    for figure in ("allocated", "reserved")
                )
                row["card"] = smallest_card(case_of(row["name"]), low, high + 2 * MIB)
        ROWS.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    if verb == "table":
        PAGE.write_text(page(load_rows()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
