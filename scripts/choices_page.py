"""Write docs/choices.md from scripts/choices.jsonl and the plans of today: `python -m scripts.choices_page`.

The jobs, what an expert would run and who is right are written by hand; what the plan says is asked anew. Read a
verdict again when its plan has changed.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planner
from planner.candidate import Candidate
from planner.report.words import describe_candidate
from planner.units import format_count, format_gib

ROOT = Path(__file__).resolve().parents[1]
JOBS, PAGE = ROOT / "scripts" / "choices.jsonl", ROOT / "docs" / "choices.md"
HEAD = """# Jobs, an expert's answer, and the plan's

The expert's answer to the first ten jobs was written down before the plan was asked (2026-11-23). The next ten are
published recipes, and jobs for which an earlier plan was wrong; their answers come from the sources named, but were
written with that plan known. The last seven split the GPUs of rollouts as others published (2026-11-27). The third
column is written by `python -m scripts.choices_page`: what `plan --model M --gpus G --method X` answers, with the
settings of the first column pinned; a test holds it to that.
Where the two differ, the last column says which of them we would follow. Liger's kernels, which TRL's guide to
[speeding up training](https://huggingface.co/docs/trl/speeding_up_training) recommends, are in every plan whose layers
have them; they are not repeated below.

| job | an expert would | the plan says | |
|---|---|---|---|
"""
KERNELS = {
    "sdpa": "sdpa",
    "eager": "eager attention",
    "flash_attention_2": "FlashAttention 2",
    "flash_attention_3": "FlashAttention 3",
}


def jobs() -> list[dict[str, Any]]:
    """Return the rows of the page without their plans."""
    return [json.loads(line) for line in JOBS.read_text(encoding="utf-8").splitlines()]


def page() -> str:
    """Return the page; each row asks for a plan."""
    rows = (f"| {_question(job)} | {job['expert']} | {answer(job)} | {job['verdict']} |\n" for job in jobs())
    return HEAD + "".join(rows)


def _question(job: dict[str, Any]) -> str:
    pinned = (f"`{name}={value}`" for name, value in job["pinned"].items())
    return ", ".join((job["model"], job["method"], job["gpus"], *pinned))


def answer(job: dict[str, Any]) -> str:
    """Return what `plan` answers to a job, in words."""
    plan = planner.plan(job["model"], job["gpus"], method=job["method"], **job["pinned"])
    peak = max(gpu.peak_bytes for gpu in plan.best.gpus)
    if not plan.best.fits:
        host = plan.best.host_over_bytes > 0
        needed = f"{format_gib(plan.best.host_peak_bytes)} of host memory" if host else format_gib(peak)
        return f"does not fit: {describe_candidate(plan.best.candidate)} needs {needed}"
    speed = format_count(round(plan.best.throughput.tokens_per_second, -2))
    return ", ".join((*_words(plan.best.candidate), format_gib(peak, 1), f"{speed} tokens/s"))


def _words(candidate: Candidate) -> Iterator[str]:
    """Yield the settings of a candidate that an expert would name."""
    yield describe_candidate(candidate)
    if candidate.vllm != "off":
        yield f"tensor parallel {candidate.vllm_tensor_parallel_size}"
    if candidate.vllm == "colocate":
        yield f"{candidate.vllm_gpu_memory_utilization:g} of the card"
    if candidate.row_gpus > 1:
        yield f"{candidate.row_gpus} GPUs share each row"
    yield f"micro-batch {candidate.per_device_train_batch_size}"
    if not candidate.gradient_checkpointing:
        yield "no checkpointing"
    elif candidate.checkpoint_every_n_layers > 1:
        yield f"one of {candidate.checkpoint_every_n_layers} layers checkpointed"
    yield KERNELS[candidate.attn_implementation]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
