"""Dry-run every model of the catalogue: which run, which do not and why, and the error of the formulas.

    python -m scripts.dry_run_catalogue [--again MODEL_TYPE ..] [--full]     writes results/dry_runs.jsonl and .md

SFT with LoRA on all linear layers of a bfloat16 base, rows of 512 tokens, with and without checkpointing. Needs the
dryrun extra. A model is cut to a few layers, two of each kind that it has, at their real sizes; with --full the
smallest model of each type runs at its full depth too. Rows that are already in the .jsonl with the same versions are
not run again.
"""

import argparse
import functools
import json
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.errors import PlanError
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.models.catalogue import ModelRow, load_model, model_rows
from planner.models.shape import ModelShape

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROWS, TABLE = RESULTS / "dry_runs.jsonl", RESULTS / "dry_runs.md"
CLUSTER = parse_cluster("1xH200", None)
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")
OUTSIDE_THE_TRACE = ("runtime", "fragmentation", "communication")  # a dry run sees what PyTorch allocates
BATCH, LENGTH, RANK = 4, 512, 16
SECONDS = 120  # longer than any model here takes, unless it hangs
OFF = 0.02  # from this error on, formulas and dry run do not agree on a peak
GIB = 2**30

# The settings with which a model type runs where the usual ones are refused.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ADAPTED: dict[str, tuple[str, ...]] = {
    "phimoe": ATTENTION,  # its router is an nn.Linear that returns three tensors
    # o_a_proj is an nn.Linear with a forward pass of its own.
    "deepseek_v4": ("q_a_proj", "q_b_proj", "kv_proj", "o_b_proj"),
    "nemotron_h": (*ATTENTION, "up_proj", "down_proj"),  # PEFT refuses out_proj and conv1d of Mamba blocks
}
# TRL's load balancing reads num_experts, which the configs of these types lack.
WITHOUT_AUX_LOSS = frozenset({"phimoe", "deepseek_v4", "granitemoehybrid"})

Row = dict[str, Any]


def candidate_of(model: ModelShape, checkpointing: bool) -> Candidate:
    return Candidate(
        model=model, method="sft", tuning="lora", lora_r=RANK, dtype="bfloat16", per_device_train_batch_size=BATCH,
        max_length=LENGTH, gradient_checkpointing=checkpointing,
    )  # fmt: skip


def ran(row: ModelRow) -> Row:
    """The row of a model: the peaks of the cut model; or the error that stops it, and the settings that run instead."""
    from probes.layers.few_layers import depth_of, few_layers

    model = few_layers(load_model(row.id))
    answer: Row = {
        "id": row.id, "model_type": row.model_type, "known": model.known, "auto_class": model.auto_class,
        "layers": depth_of(dict(model.config)),
    }  # fmt: skip
    candidates = [candidate_of(model, checkpointing) for checkpointing in (True, False)]
    try:
        return answer | {"runs": [compared(candidate) for candidate in candidates]}
    except Exception as error:  # any error that stops a model belongs in its row
        answer["error"] = said(error)
    if row.model_type in ADAPTED or row.model_type in WITHOUT_AUX_LOSS:
        with without_aux_loss(row.model_type):
            answer["runs"] = [
                compared(replace(candidate, lora_target_modules=ADAPTED.get(row.model_type, ("all-linear",))))
                for candidate in candidates
            ]
        answer["instead"] = instead(row.model_type)
    return answer


def without_aux_loss(model_type: str) -> Any:
    import trl

    settings = {"router_aux_loss_coef": 0.0} if model_type in WITHOUT_AUX_LOSS else {}
    return mock.patch.object(trl, "SFTConfig", functools.partial(trl.SFTConfig, **settings))


def instead(model_type: str) -> str:
    targets = f"lora_target_modules {' '.join(ADAPTED[model_type])}" if model_type in ADAPTED else ""
    return " and ".join(filter(None, (targets, "router_aux_loss_coef 0" if model_type in WITHOUT_AUX_LOSS else "")))


def ran_in_full(row: ModelRow) -> Row:
    """The row of a model at full depth, checkpointed."""
    return {"id": row.id, "model_type": row.model_type, "full_depth": compared(candidate_of(load_model(row.id), True))}


def compared(candidate: Candidate) -> Row:
    from probes.dryrun.dry_run import dry_run

    started = time.monotonic()
    trace = dry_run(candidate)
    return {
        "checkpointing": candidate.gradient_checkpointing,
        "seconds": round(time.monotonic() - started, 1),
        "simulated_bytes": trace.peak_bytes,
        "simulated_phase": trace.peak_phase,
        "simulated_phases": {phase.name: phase.total_bytes for phase in trace.phases},
        "weight_bytes": sum(item.size_bytes for item in trace.allocations if item.operator == "resident"),
    }


def with_estimates(answer: Row) -> Row:
    """The row with the formulas' estimate of today beside each peak."""
    from probes.layers.few_layers import few_layers

    whole = load_model(answer["id"])
    if not whole.known:
        return answer
    if "full_depth" in answer:
        return answer | {"full_depth": answer["full_depth"] | estimated(candidate_of(whole, True))}
    model = few_layers(whole)
    return answer | {
        "runs": [run | estimated(candidate_of(model, run["checkpointing"])) for run in answer.get("runs", [])]
    }


def estimated(candidate: Candidate) -> Row:
    try:
        gpu = estimate(candidate, CLUSTER).gpus[0]
    except PlanError as error:
        return {"estimate_error": str(error)}
    phases = {
        p.name: sum(size for name, size in p.components.items() if name not in OUTSIDE_THE_TRACE) for p in gpu.phases
    }
    heaviest = max(phases, key=lambda phase: phases[phase])
    return {"estimated_bytes": phases[heaviest], "estimated_phase": heaviest, "estimated_phases": phases}


def said(error: Exception) -> str:
    """The first line of a library's error, and the library's file and line."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages/" in frame.filename and "/torch/" not in frame.filename
    ]
    where = f" ({frames[-1].filename.split('site-packages/')[-1]}:{frames[-1].lineno})" if frames else ""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:180]}{where}"


def in_a_process(work: Callable[[ModelRow], Row], row: ModelRow) -> Row:
    """Run one model in a process of its own, so that nothing of it is left for the next."""
    nothing: Row = {
        "id": row.id,
        "model_type": row.model_type,
        "known": row.known,
        "auto_class": load_model(row.id).auto_class,
    }
    with multiprocessing.get_context("fork").Pool(1) as pool:
        try:
            return pool.apply_async(work, (row,)).get(timeout=SECONDS)
        except multiprocessing.TimeoutError:
            return nothing | {"error": f"took longer than {SECONDS} s"}
        except Exception as error:
            return nothing | {"error": said(error)}


# -- the table ---------------------------------------------------------------------------------------------------------


def versions() -> Row:
    return {package: version(package) for package in PACKAGES}


def error(run: Row) -> float:
    return float(run["estimated_bytes"]) / float(run["simulated_bytes"]) - 1


def above_weights(run: Row) -> float:
    """The error as a share of all memory but weights, for which the formulas of activations are responsible."""
    return float(run["estimated_bytes"] - run["simulated_bytes"]) / float(run["simulated_bytes"] - run["weight_bytes"])


def table(rows: list[Row], full: list[Row]) -> str:
    usual = [row for row in rows if "error" not in row]
    other = [row for row in rows if "error" in row and "runs" in row]
    never = [row for row in rows if "runs" not in row]
    text = sum(row["auto_class"] == "AutoModelForCausalLM" for row in rows)
    lines = [
        "# Every model of the catalogue through the dry run",
        "",
        "Made by `python -m scripts.dry_run_catalogue --full`: SFT, LoRA r 16 on all linear layers of a bfloat16",
        "base, 4 rows of 512 tokens with padding, sdpa, the installed TRL trainer on fake tensors as CUDA runs it.",
        "A model is cut to two layers of each kind that it has, at their real sizes.",
        f"{', '.join(f'{package} {number}' for package, number in versions().items())}.",
        "",
        f"Of {len(rows)} models ({text} text models, {len(rows) - text} image-text models, trained on text), "
        f"**{len(usual)} run as they are, {len(other)} run with another setting, {len(never)} do not run**.",
        "",
        "## Refused as they are",
        "",
        "| model type | models | what the library says | what runs instead |",
        "|---|---|---|---|",
    ]
    for model_type in dict.fromkeys(row["model_type"] for row in (*other, *never)):
        members = [row for row in (*other, *never) if row["model_type"] == model_type]
        for text_said in dict.fromkeys(row["error"] for row in members):
            alike = [row for row in members if row["error"] == text_said]
            lines.append(
                f"| {model_type} | {len(alike)} | {text_said} | {alike[0].get('instead', 'nothing that was tried')} |"
            )
    return "\n".join([*lines, "", *by_type(usual), CAUSES, "", *in_full(full), "", *all_rows(rows)]) + "\n"


def by_type(rows: list[Row]) -> list[str]:
    """Signed errors of the peak by model type, with and without checkpointing."""
    lines = [
        "## Estimated against simulated, by model type",
        "",
        "Peak of what PyTorch allocates, estimated over simulated, of the cut models: with few layers the share of",
        "weights is small and an error is larger than at full depth. The last column is the worst error as a share of",
        "all but weights.",
        "",
        "| model type | models | checkpointed: mean | worst | not checkpointed: mean | worst | of all but weights |",
        "|---|---|---|---|---|---|---|",
    ]
    known = [row for row in rows if row["known"] and all("estimated_bytes" in run for run in row["runs"])]
    groups: dict[str, list[Row]] = {"all with formulas": known}
    for row in known:
        groups.setdefault(row["model_type"], []).append(row)
    for title, members in groups.items():
        cells = []
        for position in (0, 1):
            errors = [error(row["runs"][position]) for row in members]
            cells += [f"{100 * statistics.mean(errors):+.2f} %", f"{100 * max(errors, key=abs):+.2f} %"]
        above = max((above_weights(run) for row in members for run in row["runs"]), key=abs)
        lines.append(f"| {title} | {len(members)} | {' | '.join(cells)} | {100 * above:+.1f} % |")
    off = sum(abs(error(run)) > OFF for row in known for run in row["runs"])
    return [*lines, "", f"{off} of {2 * len(known)} peaks are off by more than {OFF:.0%}."]


def in_full(full: list[Row]) -> list[str]:
    lines = [
        "## At full depth, checkpointed",
        "",
        "| model | seconds | simulated GiB | estimated GiB | error |",
        "|---|---|---|---|---|",
    ]
    for row in full:
        if "full_depth" in row:
            lines.append(f"| {row['id']} | {row['full_depth']['seconds']} | {cells_of(row['full_depth'])} |")
        else:
            lines.append(f"| {row['id']} | | {row['error']} | | |")
    return lines


def all_rows(rows: list[Row]) -> list[str]:
    lines = [
        "## Every model",
        "",
        "| model | type | layers kept | ran | checkpointed: simulated GiB | estimated | error "
        "| not: simulated GiB | estimated | error |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        outcome = "yes" if "error" not in row else "with another setting" if "runs" in row else "no"
        kind = "" if row.get("auto_class") == "AutoModelForCausalLM" else " (image-text)"
        cells = " | ".join(map(cells_of, row["runs"])) if "runs" in row else " | ".join([""] * 6)
        lines.append(f"| {row['id']} | {row['model_type']}{kind} | {row.get('layers', '')} | {outcome} | {cells} |")
    return lines


def cells_of(run: Row) -> str:
    simulated = f"{run['simulated_bytes'] / GIB:.3f}"
    if "estimated_bytes" not in run:
        return f"{simulated} | no formulas | "
    return f"{simulated} | {run['estimated_bytes'] / GIB:.3f} | {100 * error(run):+.2f} %"


CAUSES = """
What is known of the differences:

- Without checkpointing, the first layer under adapters keeps less than the others, since its input needs no gradient;
  the formulas count it as one of the others. It is one layer's inputs at any depth: 1 to 3 % of the peak of two layers.
- gemma3: batches of text leave the adapters on its vision tower without gradients and optimizer states, which the
  formulas count.
- granite with adapters and checkpointing: the embedding's output is a leaf that stays beside its scaled copy, which the
  formulas leave out."""


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--again", nargs="*", default=[], metavar="MODEL_TYPE", help="run the models of these types again"
    )
    parser.add_argument(
        "--full", action="store_true", help="run the smallest model of each type at its full depth (some minutes)"
    )
    args = parser.parse_args()
    rows = model_rows()
    torch.set_num_threads(1)  # after computing with several threads a fork would wait for threads that it lacks
    ran(rows[0])  # imports the libraries once, before the processes fork
    smallest: dict[str, ModelRow] = {}
    for row in rows:
        smallest[row.model_type] = min(smallest.get(row.model_type, row), row, key=lambda each: each.params)
    kept = {key: row for key, row in known_lines().items() if row["model_type"] not in args.again}
    cut = [with_estimates(line(kept, "cut", ran, row)) for row in rows]
    refused = {answer["model_type"] for answer in cut if "error" in answer}
    wanted = [
        row
        for model_type, row in smallest.items()
        if model_type not in refused and (args.full or ("full", row.id) in kept)
    ]
    full = [with_estimates(line(kept, "full", ran_in_full, row)) for row in wanted]
    TABLE.write_text(table(cut, full))


def known_lines() -> dict[tuple[str, str], Row]:
    found = map(json.loads, ROWS.read_text().splitlines()) if ROWS.exists() else ()
    return {(row["run"], row["id"]): row for row in found if row["versions"] == versions()}


def line(kept: dict[tuple[str, str], Row], run: str, work: Callable[[ModelRow], Row], row: ModelRow) -> Row:
    """The row of one run of one model, from the file or new; the file is written after each new row."""
    if (run, row.id) not in kept:
        started = time.monotonic()
        answer = in_a_process(work, row)
        kept[run, row.id] = {"run": run, "versions": versions(), **answer}
        ROWS.write_text("".join(json.dumps(each, sort_keys=True) + "\n" for each in kept.values()))
        print(f"{run} {row.id} {time.monotonic() - started:.1f} s {answer.get('error', '')}", flush=True)
    return kept[run, row.id]


if __name__ == "__main__":
    main()
