"""The emulated GPU against a Tesla T4: another project's harness and its published figures, emulated with its own code.

    python -m scripts.emulated_against_t4 run SDIST [SESSION ...]    appends lines to results/emulated_gpu_t4.jsonl
    python -m scripts.emulated_against_t4 table                      prints the table of results/emulated_gpu.md

SDIST is the unpacked sdist of fitcheck-llm 0.3.1 (PyPI, MIT): its data/measurements holds what scripts/measure.py
printed on the T4, with the releases of each session in manifest.json. `run` needs scripts/emulated_environment.sh. It
runs the same script, unmodified, once for each row in a process of its own: on a folder with the model's config and a
checkpoint without data, on a T4 with the memory that its driver reported. Repeats and rows without phases are left out,
and so are rows that are in the file with the installed releases, except with `--again`.
"""

import argparse
import json
import os
import platform
import runpy
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any

from msgspec.structs import replace

from planner.gpus.catalogue import load_gpu
from planner.models.catalogue import load_model
from planner.units import MIB
from probes.emulated_gpu.machine import Machine
from probes.emulated_gpu.start import machine_environment

ROWS = Path(__file__).resolve().parents[1] / "results" / "emulated_gpu_t4.jsonl"
ROLES = ("calibration", "holdout")  # of the manifest; the others are repeats and rows without phases
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")
# Transformers 5.0 loads with up to four threads (core_model_loading.py, `GLOBAL_WORKERS`). On the emulated GPU copies
# take no time, so that the threads would run ahead of the quantization and fill the card.
ONE_BY_ONE = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}
LONGEST_SECONDS = 600
FIGURES = {  # by the names in the file: those of the harness, in MiB
    "load": "after_load_allocated_mib",
    "forward": "peak_forward_mib",
    "backward": "peak_backward_mib",
    "optimizer": "peak_optimizer_mib",
    "allocated": "peak_allocated_mib",
    "reserved": "peak_reserved_mib",
}
Row = dict[str, Any]


def published_rows(sdist: Path) -> Iterator[Row]:
    """Yield what the harness measured on the T4, with the row's id, session and the memory of that card."""
    measurements = sdist / "data" / "measurements"
    manifest = json.loads((measurements / "manifest.json").read_text())
    for entry in manifest["rows"]:
        if entry["role"] in ROLES:
            row = json.loads((measurements / entry["file"]).read_text())["runs"][entry["index"]]
            total_mib = manifest["sessions"][entry["session"]]["total_mib"]
            yield row | {"id": entry["run_id"], "session": entry["session"], "total_mib": total_mib}


# -- one row, in a process of its own ----------------------------------------------------------------------------------


def write_checkpoint(fields: Mapping[str, object], folder: Path) -> None:
    """Write the config.json of these fields, and a bfloat16 checkpoint whose data is a hole of the file: zeros."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tied = model._tied_weights_keys or () if config.tie_word_embeddings else ()  # no checkpoint has them
    header, end = dict[str, object](), 0
    for name, weight in model.named_parameters():
        if name in tied:
            continue
        start, end = end, end + weight.numel() * torch.bfloat16.itemsize
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def harness_arguments(run: Row) -> Iterator[str]:
    """Yield the options of measure.py with which a row was measured."""
    names = {"precision": "precision", "quantization": "quant", "lora_rank": "lora-r", "batch_size": "batch-size"}
    names |= {"seq_len": "seq-len", "optimizer": "optimizer", "attn_impl": "attn-impl"}
    for name, option in names.items():
        yield from (f"--{option}", str(run[name]))
    yield from ("--lora-targets", ",".join(run["lora_targets"]), "--gpu", "t4", "--no-predict", "--json")
    for given, flag in (
        (run["grad_checkpoint"], "--grad-checkpoint"),
        (run["double_quant"], "--double-quant"),
        (run["kernel"] == "flash", "--flash-attn"),
    ):
        yield from (flag,) if given else ()


def run_harness(sdist: Path, row: Row, folder: Path) -> None:
    """Run measure.py as a program; it prints JSON. Raises SystemExit, as it does."""
    from probes.emulated_gpu.values import small_values_on_host

    sys.argv[1:] = [str(folder), *harness_arguments(row["run"])]
    sys.path.insert(0, str(sdist))
    write_checkpoint(load_model(row["model_id"], paths=False, hub=False).config, folder)
    with small_values_on_host():
        runpy.run_path(str(sdist / "scripts" / "measure.py"), run_name="__main__")


def emulated(sdist: Path, row: Row) -> Row:
    """Return what the harness prints on the emulated T4, or the end of its error."""
    gpu = replace(load_gpu("T4"), total_bytes=row["total_mib"] * MIB, free_bytes=row["total_mib"] * MIB)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "scripts.emulated_against_t4", "row", str(sdist), row["id"], folder]
        environment = os.environ | ONE_BY_ONE | machine_environment(Machine(gpu=gpu, cards=1), Path(folder))
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST_SECONDS)
    if ran.returncode:
        return {"error": ran.stderr[-2000:]}
    return {"emulated": figures(json.loads(ran.stdout[ran.stdout.index("{") :])["measured"])}


def figures(measured: Row) -> Row:
    return {name: round(measured[key], 1) for name, key in FIGURES.items()}


def run(sdist: Path, sessions: list[str], again: bool) -> None:
    """Run the rows of these sessions (none: of all), those without quantization first; append them to the file."""
    versions = {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}
    known = {row["id"] for row in read_rows() if row["versions"] == versions and not again}
    rows = [row for row in published_rows(sdist) if row["session"] in (sessions or [row["session"]])]
    for row in sorted(rows, key=lambda row: str(row["run"]["quantization"]), reverse=True):
        if row["id"] in known:
            continue
        started, kind = time.monotonic(), f"{row['run']['quantization']}, {row['run']['attn_impl']}"
        found = {"id": row["id"], "session": row["session"], "kind": kind, "versions": versions}
        found |= {"measured": figures(row["measured"])} | emulated(sdist, row)
        with ROWS.open("a") as file:
            file.write(json.dumps(found) + "\n")
        errors = [f"{name} {error(found, name):+.2f} %" for name in FIGURES if "emulated" in found]
        print(f"{time.monotonic() - started:.0f} s", row["id"], *(errors or [found["error"]]), flush=True)


# -- the table ---------------------------------------------------------------------------------------------------------


def read_rows() -> list[Row]:
    return [json.loads(text) for text in ROWS.read_text().splitlines()] if ROWS.exists() else []


def error(row: Row, name: str) -> float:
    """Return by how many percent the emulated figure is off."""
    return 100 * float(row["emulated"][name] / row["measured"][name] - 1)


def table(rows: Iterable[Row]) -> str:
    """Return errors of the emulated figures by kind: median / mean absolute / worst, in percent."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if "emulated" in row:
            groups.setdefault(row["kind"], []).append(row)
    lines = [f"| kind | rows | {' | '.join(FIGURES)} |", "|---" * (2 + len(FIGURES)) + "|"]
    for kind, members in sorted(groups.items(), reverse=True):
        cells = []
        for name in FIGURES:
            errors = [error(row, name) for row in members]
            cells.append(f"{median(errors):+.2f} / {mean(map(abs, errors)):.2f} / {max(errors, key=abs):+.2f}")
        lines.append(f"| {kind} | {len(members)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("run", "table", "row"))  # row: of `run`, for one process
    parser.add_argument("sdist", nargs="?", type=Path)
    parser.add_argument("rest", nargs="*", metavar="SESSION")
    parser.add_argument("--again", action="store_true", help="run rows once more that are in the file")
    args = parser.parse_args()
    if args.mode == "run":
        run(args.sdist.resolve(), args.rest, args.again)
    elif args.mode == "row":
        run_harness(
            args.sdist, next(x for x in published_rows(args.sdist) if x["id"] == args.rest[0]), Path(args.rest[1])
        )
    else:
        print(table(read_rows()))


if __name__ == "__main__":
    main()
