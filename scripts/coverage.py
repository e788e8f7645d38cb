"""Plan every job of a matrix of models and settings, and write which are planned: docs/coverage.md.

    python -m scripts.coverage

Runs `plan` in this process on one H200, without the extra training: layers without formulas are those that ship with
the package. A plan that fits no card is an answer. A cell without a plan has the reason, in the words of `plan`.
"""

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from planner.errors import PlanError
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.memory.layers.measured_layers import MeasuringRefused, complete_shipped
from planner.models.catalogue import load_model
from planner.models.shape import ModelShape
from planner.planning import plan
from scripts.mutate import commit

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coverage.md"
CARD = "1xH200"
MODELS = (
    "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-72B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B",
    "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-Coder-480B-A35B-Instruct", "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-27B", "Qwen/Qwen3.5-35B-A3B",
    "Qwen/Qwen3.5-122B-A10B", "Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct",
    "Qwen/Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "google/gemma-2-9b", "google/gemma-3-1b-pt", "google/gemma-3-4b-pt", "google/gemma-3-27b-pt", "google/gemma-4-E2B",
    "google/gemma-4-E4B", "google/gemma-4-12B", "google/gemma-4-26B-A4B", "google/gemma-4-31B",
    "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct", "meta-llama/Llama-3.2-11B-Vision-Instruct",
    "mistralai/Mistral-7B-v0.1", "mistralai/Mixtral-8x7B-v0.1", "mistralai/Mistral-Small-3.1-24B-Base-2503",
    "mistralai/Ministral-3-3B-Instruct-2512", "mistralai/Ministral-3-8B-Instruct-2512",
    "mistralai/Ministral-3-14B-Instruct-2512", "openai/gpt-oss-20b", "openai/gpt-oss-120b", "zai-org/GLM-4-9B-0414",
    "zai-org/GLM-4.5-Air", "zai-org/GLM-5", "deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V3.2",
    "MiniMaxAI/MiniMax-M2.5", "moonshotai/Moonlight-16B-A3B", "microsoft/phi-4", "microsoft/Phi-3.5-MoE-instruct",
    "LiquidAI/LFM2-1.2B", "LiquidAI/LFM2-8B-A1B", "ibm-granite/granite-3.3-8b-instruct",
    "ibm-granite/granite-4.0-h-micro", "ibm-granite/granite-4.0-h-small", "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
    "allenai/Olmo-3-1025-7B", "HuggingFaceTB/SmolLM3-3B", "LGAI-EXAONE/EXAONE-4.0-32B", "swiss-ai/Apertus-8B-2509",
    "baidu/ERNIE-4.5-21B-A3B-PT",
)  # fmt: skip
LIGER: dict[str, Any] = {"use_liger_kernel": True}
JOBS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"{method} {tuning}": (method, tuning, {}) for method, tuning in product(
        ("sft", "dpo", "grpo", "reward"), ("lora", "qlora", "full")
    )},
    **{f"sft {tuning} Liger": ("sft", tuning, LIGER) for tuning in ("lora", "qlora")},
}  # fmt: skip
FITS, DOES_NOT_FIT = "yes", "too large"
OURS = ("no formula here", "keep no keys and values", "not measured with these settings")  # reasons of this package


def complete(model: ModelShape) -> ModelShape:
    """The model with its layers; those without formulas have the memory that ships with the package."""
    if model.known:
        return model
    refused = MeasuringRefused(reason=f"The layers of {model.id} are not measured with these settings in the package.")
    return complete_shipped(model, lambda _: refused) or model


def answer(model: ModelShape, method: str, tuning: str, pins: dict[str, Any]) -> str:
    """`FITS`, `DOES_NOT_FIT`, or the reason why the job is not planned."""
    try:
        job = Job(model=model, method=method, tuning=tuning, pinned=pins)  # type: ignore[arg-type]
        return FITS if plan(job, parse_cluster(CARD, None)).best.fits else DOES_NOT_FIT
    except PlanError as error:
        return first_sentence(str(error).replace(model.id, "the model"))


def first_sentence(text: str) -> str:
    """The text without the remedies after it."""
    return re.split(r"[.;](?: |$)", text)[0]


def page(answers: dict[str, dict[str, str]]) -> Iterator[str]:
    """The lines of the page."""
    cells = [cell for row in answers.values() for cell in row.values()]
    planned = sum(cell in (FITS, DOES_NOT_FIT) for cell in cells)
    refused = sum(cell not in (FITS, DOES_NOT_FIT) and not any(text in cell for text in OURS) for cell in cells)
    reasons = list(dict.fromkeys(cell for cell in cells if cell not in (FITS, DOES_NOT_FIT)))
    yield "# Coverage"
    yield ""
    yield (
        f"Made by `python -m scripts.coverage` at commit {commit()}: {len(answers)} models and {len(JOBS)} jobs on "
        f"{CARD}, with the package alone. "
        f"**{planned} of {len(cells)} cells are planned ({planned / len(cells):.0%}); {refused} are refused for "
        f"what the libraries do, and of the rest {planned / (len(cells) - refused):.0%} are planned.** "
        f"`{DOES_NOT_FIT}`: planned, and no configuration fits this card. A number: not planned, for the reason below. "
        "Cells drawn at random that ran on an emulated card: [results/emulated_cells.md](../results/emulated_cells.md)."
    )
    yield ""
    yield f"| model | {' | '.join(JOBS)} |"
    yield f"|---{'|---' * len(JOBS)}|"
    for name, row in answers.items():
        shown = [cell if cell in (FITS, DOES_NOT_FIT) else f"[{reasons.index(cell) + 1}]" for cell in row.values()]
        yield f"| {name} | {' | '.join(shown)} |"
    yield ""
    yield from (f"{number}. {reason}" for number, reason in enumerate(reasons, 1))


def main() -> None:
    """Write the page, after every model because all models take minutes."""
    answers: dict[str, dict[str, str]] = {}
    for name in MODELS:
        model = complete(load_model(name))
        answers[name] = {label: answer(model, *job) for label, job in JOBS.items()}
        PAGE.write_text("\n".join(page(answers)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
