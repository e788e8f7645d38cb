"""Predict jobs in a process of its own: the side of scripts/compare_commits.py that runs with a commit's `planner`.

    python -m scripts.predict_jobs JOBS PREDICTIONS

Imports nothing else of a repository. JOBS has a job a line: `model`, `gpus` and other arguments of `planner.estimate`;
PREDICTIONS gets a line for each: what it is, and its figures by name, or why `plan` refuses it.
"""

import json
import sys
from pathlib import Path
from typing import Any

from planner import Estimate, PlanError, estimate


def prediction(job: dict[str, Any]) -> dict[str, Any]:
    """Return `kinds` (method, tuning, scheme, quantization, model type), `answer` and `figures` of a job.

    The figures are the bytes of each phase of each kind of GPU, what nvidia-smi and the host hold, and tokens a second.
    """
    asked = dict(job)
    try:
        found = estimate(asked.pop("model"), asked.pop("gpus"), **asked)
    except PlanError as error:
        return {"kinds": [], "answer": "refused", "figures": {}, "why": str(error)}
    return {"kinds": kinds(found), "answer": answer(found), "figures": figures(found)}


def kinds(found: Estimate) -> list[str]:
    row = found.candidate
    words = [row.method, row.tuning, str(row.model.config.get("model_type"))]
    words.append("unsharded" if row.sharding == "none" else row.sharding)
    return words if row.quantization == "none" else [*words, row.quantization]


def answer(found: Estimate) -> str:
    return "fits" if found.fits else "tight" if found.tight else "does not fit"


def figures(found: Estimate) -> dict[str, float]:
    """Return the figures by name; of GPUs of several roles the larger one."""
    sizes: dict[str, float] = {"host": found.host_peak_bytes, "speed": found.throughput.tokens_per_second}
    for gpu in found.gpus:
        for phase in gpu.phases:
            sizes[phase.name] = max(phase.total_bytes, sizes.get(phase.name, 0))
        sizes["nvidia-smi"] = max(gpu.nvidia_smi_bytes, sizes.get("nvidia-smi", 0))
    return sizes


if __name__ == "__main__":
    jobs, predictions = map(Path, sys.argv[1:])
    lines = [prediction(json.loads(line)) for line in jobs.read_text(encoding="utf-8").splitlines()]
    predictions.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
