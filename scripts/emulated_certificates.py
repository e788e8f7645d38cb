"""Prove what `plan` recommends for whole models, drawn at random, by probes on emulated GPUs.

    DIR/bin/python -m scripts.emulated_certificates run SEED [COUNT]   in an environment of emulated_environment.sh
    DIR/bin/python -m scripts.emulated_certificates again NAME ...     draws that have a row, which stays
    python -m scripts.emulated_certificates table                      the page, from the rows that there are

Rows: results/emulated_certificates.jsonl; the page is results/emulated_certificates.md. NAME: SEED-NUMBER. A draw that
was decided is not proven again by `run`, so that a run can be broken off.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any, Literal, get_args
from unittest.mock import patch

from planner.commands.exit_codes import EXIT_NOTHING_FITS, EXIT_PROBE_CONTRADICTS
from planner.commands.main import run as plan_command
from planner.models.catalogue import load_model
from planner.units import GIB
from probes.runner.host import available_bytes
from scripts.drawn_starts import CLUSTERS, Drawn, drawn_certificate
from scripts.mutate import commit

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROWS, PAGE = RESULTS / "emulated_certificates.jsonl", RESULTS / "emulated_certificates.md"
COMMAND = "from planner.commands.main import main; main()"
LIMITS = ("--time-limit", "20m", "--budget", "20m")  # of one probe, and of all probes of a draw
SECONDS = 1260.0  # of the command
FREE_BYTES, LEAST_FREE_BYTES = 6 * GIB, 2 * GIB  # of main memory before a draw begins, and while it runs
WAIT_SECONDS = 1200.0  # for free memory
# `later`: certified after more than one probe. `denied`: a probe contradicts the plan. `refused`: nothing is planned
# on any cluster. `open`: a probe or all of them took too long. `failed`: the probes said nothing about memory.
Outcome = Literal["certified", "later", "denied", "refused", "too large", "open", "failed"]
PROVEN: tuple[Outcome, ...] = ("certified", "later")
UNDECIDED: tuple[Outcome, ...] = ("open", "too large")  # by this machine: a later `run` tries them again
TOO_SLOW = re.compile(r": hung:|ended with the budget")
# Causes that were found, by the row's draw and commit.
CAUSES: dict[str, str] = {
    "1-0 at 53b3cc5": "The plan ran; a better one (FSDP2) took too long to load. Its need is 3.6 GiB below what was "
    "needed: DPO in full that precomputes its reference under ZeRO-3. TRL 1.16 wraps the policy in a second engine of "
    "DeepSpeed (trainer/dpo_trainer.py, `_precompute_ref_logps`; models/utils.py, `prepare_deepspeed`), whose hooks "
    "stay on the model while it trains. Counted since 1cc8483.",
    "1-12 at aaee601": "Both probes ran, with 75.7 and 78.5 of 79.1 GiB; then the time was over, and the answer said "
    "that nothing fits (exit code 3) of what had run, as emulation does not see all. It is tight since.",
    "1-0 at 2830b45": "As 1-12: what ran, with 79.01 of 79.1 GiB, was no answer.",
    "1-35 at 2830b45": "As 1-12.",
    "1-4 at 2830b45": "The probe gave a device map under ZeRO-3 in one process; mended by 7627ba2.",
    "1-15 at 2830b45": "Called failed by this script: the probe ran, for 15.6 minutes beside other work, and time was "
    "over.",
    "1-31 at 2830b45": "The environment has no FlashAttention, so that a probe keeps sdpa, with which nothing fits.",
}


def row(seed: int, number: int, work: Path) -> dict[str, Any]:
    """Prove the plan of the first of one draw's clusters that has one, and return its row."""
    with patch.dict(os.environ, {"PLAN_CACHE": str(work / "cache")}):  # no measurements of this machine
        drawn, refused = _first_planned([drawn_certificate(seed, number, cluster) for cluster in range(CLUSTERS)])
        model = load_model(drawn.options[1])
        found: dict[str, Any] = {"seed": seed, "number": number, "options": list(drawn.options), "refused": refused}
        found |= {"model_type": model.model_type, "params": model.params, "commit": commit()}
        return found | ({"outcome": "refused"} if refused == CLUSTERS else _proven(drawn, work))


def _first_planned(draws: Iterable[Drawn]) -> tuple[Drawn, int]:
    """Return the first draw with a plan, or the last one, and how many draws had none."""
    for refused, drawn in enumerate(draws):
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
            saved = ["--quiet", "--out", folder]
            with patch.object(sys, "stdout", nowhere), patch.object(sys, "stderr", nowhere):
                if plan_command([*drawn.options, *saved]) == 0:
                    return drawn, refused
    return drawn, refused + 1


def _proven(drawn: Drawn, work: Path) -> dict[str, Any]:
    """Run the probes of a draw; return its outcome, and the need and the estimate of what they proved."""
    begun = time.monotonic()
    while available_bytes() < FREE_BYTES:
        if time.monotonic() - begun > WAIT_SECONDS:
            return {"outcome": "too large", "message": "other programs held the main memory"}
        time.sleep(5)
    begun, out, err = time.monotonic(), work / "plan.json", work / "err"
    arguments = [*drawn.options, "--probe", "--device", "emulated", "--json", "--logs", str(work / "logs"), *LIMITS]
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments], stdout=stdout, stderr=stderr, start_new_session=True
        )
        short = _ended_for(process)
    found: dict[str, Any] = {"seconds": round(time.monotonic() - begun, 1)}
    said = err.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in re.split(r"[\r\n]+", said) if line.strip()]
    last = [line for line in lines if line.startswith("probe")][-1:] + lines[-1:]
    if short:
        return found | {"outcome": short, "message": " / ".join(last)[:600]}
    report = json.loads(out.read_text(encoding="utf-8") or "{}")
    found |= _figures(report)
    code = process.returncode
    if code == 0 and report["proof"]["report"]["holds"]:
        return found | {"outcome": "certified" if found["probes"] == 1 else "later"}
    outcome: Outcome = "denied" if code in (EXIT_PROBE_CONTRADICTS, EXIT_NOTHING_FITS) else "failed"
    if outcome == "failed":
        slow = found["ending"] == "budget" or TOO_SLOW.search(said)  # a probe may have run, but not of the best
        outcome = "too large" if "host out of memory" in said else "open" if slow else "failed"
    return found | {"outcome": outcome, "message": " / ".join(last)[:600]}


def _ended_for(process: "subprocess.Popen[bytes]") -> Outcome | Literal[""]:
    """Wait for a command; return why it was ended, empty if it ended by itself."""
    begun, reason = time.monotonic(), ""
    while process.poll() is None:
        if time.monotonic() - begun > SECONDS:
            reason = "open"
        elif available_bytes() < LEAST_FREE_BYTES:
            reason = "too large"
        if reason:
            process.send_signal(signal.SIGINT)  # the study ends its workers
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return reason
        time.sleep(0.5)
    return ""


def _figures(report: dict[str, Any]) -> dict[str, Any]:
    """Return what a row says of a plan's report: its candidate, the probes and the bytes."""
    proof, settings = report["proof"], report["best"]["settings"]
    wholes = {"probes": proof["report"]["probes"], "ending": proof["report"]["ending"]}
    wholes["tuning"] = "full" if not settings["use_peft"] else "qlora" if settings["load_in_4bit"] else "lora"
    wholes["sharding"] = settings.get("distributed_type", "one GPU")
    wholes["sharding"] += f" {settings['zero_stage']}" if "zero_stage" in settings else ""
    phases = proof["differences"]
    if phases:
        wholes["estimated"] = max(each["expected_bytes"] for each in phases)
        heaviest = max(phases, key=lambda each: each["needed_bytes"])
        wholes |= {"needed": heaviest["needed_bytes"], "phase": heaviest["name"]}
    return wholes


def error_of(row: dict[str, Any]) -> float:
    """Return estimated / needed - 1 of what the probes proved."""
    return float(row["estimated"] / row["needed"] - 1)


def load_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()] if ROWS.exists() else []


def append_rows(draws: Iterable[tuple[int, int]]) -> None:
    for seed, number in draws:
        with tempfile.TemporaryDirectory(prefix="plan-certificate-", ignore_cleanup_errors=True) as work:
            text = json.dumps(row(seed, number, Path(work)))
        with ROWS.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        print(text, flush=True)


# -- the page ----------------------------------------------------------------------------------------------------------


def page(rows: Iterable[dict[str, Any]]) -> str:
    """Return the page, from the rows."""
    rows = list(rows)
    newest = {(each["seed"], each["number"]): each for each in rows}
    counts = Counter(each["outcome"] for each in newest.values())
    ran = [each for each in newest.values() if "needed" in each]
    about = (
        "Command lines of `plan --probe --device emulated` drawn at random (scripts/drawn_starts.py, "
        "`drawn_certificate`): a method, a model of 0.5B to 70B, a tuning, a cluster of 4 to 180 GB cards, and what a "
        "user sets, a length or a batch; the search decides the rest. Whole models, one process: of more than two "
        "GPUs the first rank. A draw has "
        f"{CLUSTERS} clusters, of which the first with a plan is used. `later`: the certificate needed more than one "
        "probe. `denied`: a probe contradicts the plan. `too large`: for the main memory of this machine, 24 GB that "
        "other programs share. `open`: the probes took more than 20 minutes (9 until commit aaee601). "
        "`failed`: they said nothing about memory. "
        "Of a draw that was proven again the newest row counts."
    )
    lines = ["# Certificates of recommendations", ""]
    lines += [f"Measured at commit {rows[-1]['commit']}; nothing computes these figures anew."]
    lines += ["Made by `python -m scripts.emulated_certificates`.", "", *wrap(about, 118), ""]
    lines += [
        f"| draws | {' | '.join(get_args(Outcome))} | median seconds |",
        "|---" * (len(get_args(Outcome)) + 2) + "|",
    ]
    seconds = median(each["seconds"] for each in newest.values() if "seconds" in each)
    figures = [str(counts[outcome]) for outcome in get_args(Outcome)]
    lines += [f"| {len(newest)} | {' | '.join(figures)} | {seconds:.0f} |"]
    lines += ["", "## Error of the need", "", "Estimated over needed - 1, of the best candidate that ran.", ""]
    lines += ["| of | measured | median | worst | median of sizes |", "|---|---|---|---|---|"]
    lines += [_error_line("all", ran)]
    for name in ("sharding", "tuning"):
        for value in sorted({each[name] for each in ran}):
            lines += [_error_line(value, [each for each in ran if each[name] == value])]
    lines += ["", "## Draws without a certificate", "", "| seed, number | what | outcome | error | cause or message |"]
    lines += ["|---" * 5 + "|"]
    lines += [_miss_line(each) for each in newest.values() if each["outcome"] not in (*PROVEN, "refused", "too large")]
    return "\n".join(lines).rstrip() + "\n"


def _error_line(name: str, rows: list[dict[str, Any]]) -> str:
    errors = [error_of(each) for each in rows]
    size = median(each["params"] for each in rows) / 1e9
    return f"| {name} | {len(rows)} | {median(errors):+.2%} | {max(errors, key=abs):+.2%} | {size:.1f}B |"


def _miss_line(row: dict[str, Any]) -> str:
    cause = CAUSES.get(f"{row['seed']}-{row['number']} at {row['commit']}", row.get("message", ""))
    error = f"{error_of(row):+.1%}, {row['needed'] / GIB:.2f} GiB needed" if "needed" in row else ""
    cells = [f"{row['seed']}, {row['number']}", " ".join(row["options"]), row["outcome"], error]
    return f"| {' | '.join([*cells, cause.replace('|', '/')])} |"


if __name__ == "__main__":
    if sys.argv[1] == "run":
        wanted, rows = int(sys.argv[2]), load_rows()
        done = {(each["seed"], each["number"]) for each in rows if each["outcome"] not in UNDECIDED}
        numbers = range(int(sys.argv[3]) if len(sys.argv) > 3 else 60)
        append_rows((wanted, number) for number in numbers if (wanted, number) not in done)
    elif sys.argv[1] == "again":
        append_rows((int(seed), int(number)) for seed, _, number in (name.partition("-") for name in sys.argv[2:]))
    else:
        PAGE.write_text(page(load_rows()), encoding="utf-8")
