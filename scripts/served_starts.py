"""Start exported folders beside vLLM servers: results/served_starts.jsonl, results/served_starts.md.

    DIR/bin/python -m scripts.served_starts run [NAME ...]   in scripts/emulated_environment.sh's with vLLM
    python -m scripts.served_starts table                    the page, from the rows that there are

NAME: a start of `SERVED_STARTS`. One of a GPTQ base needs gptqmodel and optimum in the environment, too.
"""

import importlib.metadata
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from textwrap import wrap
from typing import Any

from planner.launch import deepspeed
from planner.launch.trl_config import ACCELERATE_FILE, FILE
from planner.units import GIB, MIB
from scripts.drawn_starts import SERVED_STARTS
from scripts.emulated_starts import ENGINES, estimated_engine
from scripts.emulated_starts import row as started_row
from scripts.user_start import Files, estimate_of, gpus_of

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROWS, PAGE = RESULTS / "served_starts.jsonl", RESULTS / "served_starts.md"
PACKAGES = ("torch", "vllm", "trl", "transformers", "peft", "accelerate", "bitsandbytes", "gptqmodel", "optimum")
HERE = "{folder}"  # in the place of the folder of a start
ALLOCATED_WITHIN, ENGINE_WITHIN = 0.02, 0.01
# What was further off, or did not start, with what is known of it, for the page.
CAUSES = {
    "GPTQ base, FSDP2, TP 1": "At first it stopped: accelerate takes packed weights for DTensors; mended. Then "
    "estimated 55 MiB too high, as if FSDP2 gathered the packed weights, which are buffers; mended, and started "
    "again at 244bb30. It does not resume: \"KeyError: 'base_model.model.model.layers.0.self_attn.k_proj."
    "quant_linear_module.qweight'\", the second name that PEFT gives packed weights; the plan says so since.",
    "GPTQ base, ZeRO-2, TP 2": 'Refused by vLLM: "MarlinLinearKernel cannot implement due to: in_features per '
    'partition 448 is not divisible by group_size = 128", o_proj of 896 inputs on two GPUs; no other kernel takes it '
    "either (vllm 0.31, model_executor/kernels/linear). Planned then, refused since (planner/jobs/stops.py).",
}

# Figures of starts that passed and are further off than `ENGINE_WITHIN`: (start, figure), with what is known of it.
TOO_LOW = (
    "the teacher's weights are estimated 25 MiB too low: 0.9 MiB are a block of the embedding that the allocator does "
    "not split, the rest is not found yet (vLLM's figure is what is allocated at that moment, no peak)."
)
FURTHER_OFF = {
    (name, "teacher_weights"): TOO_LOW for name in ("distillation from a server, LoRA", "async-distillation, full")
}


def run(name: str, work: Path) -> dict[str, Any]:
    """Start one folder, and return its row with the texts from which its estimate is computed anew."""
    found = started_row((SERVED_STARTS[name],), work)
    folder, versions = work / "plan-0" / "run", {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    read = {name: folder / name for name in (FILE, ACCELERATE_FILE, deepspeed.FILE) if (folder / name).exists()}
    read |= {str(config.relative_to(work)): config for config in work.glob("models/*/config.json")}
    kept = (
        "options", "commit", "sharding", "tuning", "quantization", "num_processes", "seconds", "allocated",
        "resumed_allocated", "engine", "teacher", "outcome", "message",
    )  # fmt: skip
    return {
        "name": name, "date": time.strftime("%Y-%m-%d"), "versions": versions, "gpus": gpus_of(folder),
        **{key: found[key] for key in kept if key in found},
        "texts": {key: path.read_text(encoding="utf-8").replace(str(work), HERE) for key, path in read.items()},
    }  # fmt: skip


def files_of(row: dict[str, Any], folder: Path) -> Files:
    """Write the files of a row into a folder, and return them with today's estimate."""
    for name, text in row["texts"].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(HERE, str(folder)), encoding="utf-8")
    return Files(folder=folder, gpus=row["gpus"], estimate=estimate_of(folder, row["gpus"]))


def planned(row: dict[str, Any]) -> dict[str, int]:
    """Return today's estimates of what a row measured, by the same names; those of the engine begin with `engine_`."""
    with tempfile.TemporaryDirectory() as folder:
        files = files_of(row, Path(folder))
        found = {name: of(files.candidate, files.cluster.gpu) for name, of in ENGINES.items()}
        said = {
            f"{name}_{part}": size
            for name, engine in found.items()
            if engine is not None
            for part, size in estimated_engine(engine).items()
        }
        return {"allocated": files.allocated_bytes, "resumed_allocated": files.resumed_bytes, **said}


def measured(row: dict[str, Any]) -> dict[str, int]:
    """Return what a row measured, by the names of `planned`."""
    own = {name: row[name] for name in ("allocated", "resumed_allocated") if row.get(name)}
    servers = {name: row.get(name, {}) for name in ("engine", "teacher")}
    return own | {f"{name}_{part}": size for name, parts in servers.items() for part, size in parts.items() if size}


def load_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()] if ROWS.exists() else []


# -- the page ----------------------------------------------------------------------------------------------------------

ABOUT = """
The folder that `plan --export` writes for AsyncGRPO, or for distillation from a server, started by `bash launch.sh`
on emulated A100-40G (docs/emulated.md): its own `vllm serve` with torch.compile and CUDA graphs, the trainer, two
steps with weight syncs, a checkpoint, and a third step from it. Models are cut to two layers with weights of zeros;
the rest is as exported. Tokens of completions, all 0 there, are replaced by random words, and the Hub's
FlashAttention 3 by one that allocates as much. Allocated: at most by PyTorch on a training GPU, in the first start
and in the resumed one. Engine: what vLLM counts as weights, with the slots of adapters, and as KV cache, with its
estimate of CUDA graphs, on each of its GPUs; teacher: the same of the server of a teacher.
"""
SIZES = {
    "allocated": "allocated",
    "resumed_allocated": "resumed",
    **{
        f"{server}_{part}": f"{server}'s {words}"
        for server in ENGINES
        for part, words in (("weights", "weights"), ("kv_cache_and_graphs", "KV cache"))
    },
}
SERVED_BY = "vllm_tensor_parallel_size="


def page(rows: Iterable[dict[str, Any]]) -> str:
    """Return the page, from the rows and today's estimates."""
    rows = list(rows)
    head = ("start", "scheme, GPUs", "engine's GPUs", *SIZES.values(), "s")
    lines = ["# Folders beside their vLLM servers", "", "Made by `python -m scripts.served_starts`.", ""]
    lines += [*wrap(" ".join(ABOUT.split()), 118), "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [_line(row) for row in rows]
    causes = {**CAUSES, **{name: cause for (name, _), cause in FURTHER_OFF.items()}}
    lines += ["", *(f"- {name}: {cause}" for name, cause in causes.items())]
    versions = {tuple(f"{name} {version}" for name, version in row["versions"].items()) for row in rows}
    said = "; ".join(", ".join(each) for each in sorted(versions, key=len))
    about = f"Started {', '.join(sorted({row['date'] for row in rows}))} with {said}."
    lines += ["", *wrap(about, 118), "", "Commands, as `plan ... --export`:", ""]
    return "\n".join([*lines, *(f"- {row['name']}: `{' '.join(row['options'])}`" for row in rows)]) + "\n"


def _line(row: dict[str, Any]) -> str:
    found = measured(row)
    plan = planned(row) if found else {}  # one that vLLM refused is not planned any more
    sizes = [_size(name, plan, found) for name in SIZES] if found else ["not started", *[""] * (len(SIZES) - 1)]
    served = next((f"TP {each.removeprefix(SERVED_BY)}" for each in row["options"] if each.startswith(SERVED_BY)), "")
    cells = [row["name"], f"{row['sharding']}, {row['num_processes']}", served, *sizes, f"{row['seconds']:.0f}"]
    return f"| {' | '.join(cells)} |"


def _size(name: str, plan: dict[str, int], found: dict[str, int]) -> str:
    if name not in found:
        return ""
    size = f"{found[name] / GIB:.2f} GiB" if found[name] > 10 * GIB else f"{found[name] / MIB:.1f} MiB"
    return f"{size} ({plan[name] / found[name] - 1:+.2%})"


if __name__ == "__main__":
    if sys.argv[1] == "run":
        for each in sys.argv[2:] or SERVED_STARTS:
            with tempfile.TemporaryDirectory(prefix="plan-start-", ignore_cleanup_errors=True) as place:
                text = json.dumps(run(each, Path(place)))
            with ROWS.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
            print(text[:400], flush=True)
    else:
        PAGE.write_text(page(load_rows()), encoding="utf-8")
