"""Run cells of docs/coverage.md, drawn at random, on an emulated card beside their plans: results/emulated_cells.md.

    DIR/bin/python -m scripts.emulated_cells run [COUNT]    in an environment of scripts/emulated_environment.sh
    python -m scripts.emulated_cells table                  the page, from the rows that there are

A cell is planned as there, on one H200 and with everything that the search decides, but attention, which is sdpa where
the model has it (no FlashAttention 3 is installed), and GRPO's generation, without vLLM. Cells that are refused or too
large are not drawn. The draw depends on SEED alone; a cell that has a row is not run again.
"""

import json
import random
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any

from planner.errors import PlanError
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job as PlannedJob
from planner.methods import METHODS
from planner.models.catalogue import load_model
from planner.planning import plan
from scripts.coverage import CARD, JOBS, MODELS, complete
from scripts.emulated_grid import BEYOND_HEAD, EXPLAINED, Compared, append_rows, beyond, compared
from scripts.emulated_jobs import Job, settings_of

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROWS, PAGE = RESULTS / "emulated_cells.jsonl", RESULTS / "emulated_cells.md"
SEED, COUNT = 34, 41  # one of the first 40 needs more memory of the host than ours has
# What the draw found, by model and job.
FOUND = {
    (
        "google/gemma-3-1b-pt",
        "grpo full",
    ): "3.3 % below the emulated peak in a first run: of tied weights, one gradient "
    "was counted beside the accumulated ones where the head and the embedding have one each.",
}


def cell(model: str, label: str) -> Job | None:
    """Return a cell's plan as a job; None if it is refused or does not fit the card."""
    method, tuning, pins = JOBS[label]
    shape, pinned = complete(load_model(model)), dict(pins)
    if METHODS[method].generates:  # type: ignore[index]
        pinned["vllm"] = "off"
    if shape.supports_sdpa:
        pinned["attn_implementation"] = "sdpa"
    try:
        job = PlannedJob(model=shape, method=method, tuning=tuning, pinned=pinned)  # type: ignore[arg-type]
        found = plan(job, parse_cluster(CARD, None))
    except PlanError:
        return None
    return Job(kind=label, gpus=CARD, settings=settings_of(found.best.candidate)) if found.best.fits else None


def cells() -> Iterator[Job]:
    """Yield cells in the order of the draw."""
    drawn = list(product(MODELS, JOBS))
    random.Random(SEED).shuffle(drawn)
    for model, label in drawn:
        found = cell(model, label)
        if found is not None:
            yield found


def load_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()] if ROWS.exists() else []


def run(count: int) -> None:
    """Run the first `count` cells of the draw that have no row yet, and append each row as it is ready."""
    done = {(each["settings"]["model"], each["kind"]) for each in load_rows()}
    drawn = (job for _, job in zip(range(count), cells(), strict=False))
    append_rows((job for job in drawn if (job.settings["model"], job.kind) not in done), ROWS)


def page() -> str:
    """Return the page, from the rows and today's estimates."""
    rows = load_rows()
    ran = [(each, compared(each)) for each in rows if each["outcome"] == "fits"]
    off = [found for _, found in ran if abs(found.error) > EXPLAINED]
    text = (
        f"{len(rows)} of the first {COUNT} cells of a draw from docs/coverage.md with the seed {SEED}, as `plan` plans "
        f"them on {CARD} (attention by sdpa, GRPO without vLLM), each run as a probe on an emulated card "
        "(docs/emulated.md). Errors are estimated over emulated, less one: of the bytes that PyTorch allocated at "
        f"most, beside the estimate without CUDA context and slack. **{len(ran) - len(off)} of {len(ran)} that ran are "
        f"within {EXPLAINED:.0%}**; the median is {median(found.error for _, found in ran):+.2%}."
    )
    lines = [
        "# Cells of the coverage on the emulated CUDA stack",
        "",
        "Made by `python -m scripts.emulated_cells`.",
        "",
        *wrap(text, 118),
        "",
        "| model | job | estimated GiB | emulated GiB | error | reserved |",
        "|---|---|---|---|---|---|",
        *(_line(each, found) for each, found in sorted(ran, key=lambda one: -abs(one[1].error))),
        "",
        f"## Cells beyond {EXPLAINED:.0%}",
        "",
        *(BEYOND_HEAD if off else ["None."]),
        *map(beyond, off),
        "",
        *(f"- {model}, {label}: {what}" for (model, label), what in FOUND.items()),
        *(
            f"- Not run: {each['settings']['model']}, {each['kind']}: {each['outcome']} {each.get('message', '')[:300]}"
            for each in rows
            if each["outcome"] != "fits"
        ),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _line(each: dict[str, Any], found: Compared) -> str:
    estimated, emulated = (f"{size / 2**30:.2f}" for size in found.peaks)
    return (
        f"| {each['settings']['model']} | {each['kind']} | {estimated} | {emulated} | {found.error:+.2%} "
        f"| {found.reserved_error:+.1%} |"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(int(sys.argv[2]) if len(sys.argv) > 2 else COUNT)
    else:
        PAGE.write_text(page(), encoding="utf-8")
