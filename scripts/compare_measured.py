"""Compare estimates from layers measured on fake tensors with dry runs of the whole model, for models without formulas.

    python scripts/compare_measured.py [MODEL ...]     writes results/measured_architectures.md

Needs the dryrun extra. Errors are those of PyTorch's allocated peak at full depth, without runtime, fragmentation and
communication.
"""

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

from planner.candidate import Candidate
from planner.errors import PlanError
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.models.catalogue import load_model
from planner.models.shape import ModelShape
from planner.quantities import PhaseMemory
from probes.dryrun.simulate import trace_step
from probes.layers.coefficients import complete_by_measuring

TABLE = Path(__file__).resolve().parents[1] / "results" / "measured_architectures.md"
CLUSTER = parse_cluster("1xH200", None)
VERSIONS = ("torch", "transformers", "trl", "peft", "accelerate")
OUTSIDE_THE_TRACE = ("runtime", "fragmentation", "communication")  # a dry run sees what PyTorch allocates
MODELS = (
    "LiquidAI/LFM2-350M", "bigscience/bloom-560m", "Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen3.5-0.8B",
    "baidu/ERNIE-4.5-21B-A3B-PT", "swiss-ai/Apertus-8B-2509", "ibm-granite/granite-4.0-h-micro",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2", "zai-org/GLM-4.5-Air", "microsoft/Phi-3.5-MoE-instruct",
)  # fmt: skip
SETTINGS: dict[str, dict[str, object]] = {
    "LoRA, checkpointed": {"tuning": "lora", "dtype": "bfloat16"},
    "LoRA": {"tuning": "lora", "dtype": "bfloat16", "gradient_checkpointing": False},
    "full, checkpointed": {"tuning": "full", "dtype": "float32"},
}
# PEFT adapts these models only by module names: its all-linear fails at some of their modules (results/dry_runs.md).
TARGETS = {
    "phimoe": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
}
HEAD = """# Architectures without formulas: measured layers against the dry run of the whole model

Made by `python scripts/compare_measured.py`: SFT, 4 rows of 512 tokens with padding, sdpa, at full depth. The
estimate's activations come from one layer of each kind on fake tensors (`probes/layers/coefficients.py`); the dry run
is the trainer's whole step. {versions}.

| model | type | settings | simulated GiB | estimated GiB | error | without weights | seconds to measure | to dry-run |
|---|---|---|---|---|---|---|---|---|
"""
TAIL = """
Known causes of the differences:

- Text does not pass a vision tower, so in one process the tower has no gradients and no optimizer states: 7.5 GiB less
  for Qwen2.5-VL-3B trained in full. DeepSpeed's flat buffers have room for them all the same; the estimate counts them.
- bloom, checkpointed: 9 MiB outside its layers are not counted. A mask of numbers instead of booleans is a part of it.
- Under adapters and without checkpointing the first layer keeps less than the others, since its input needs no
  gradient.
- A chunked kernel (linear attention, state spaces) rounds lengths up; the estimate does not: up to 2 % of the layer.
"""
GIB = 1 << 30


def allocated_bytes(phases: tuple[PhaseMemory, ...]) -> tuple[int, int]:
    """PyTorch's allocated bytes in the heaviest phase, and the weights among them."""
    totals = [
        (
            sum(size for name, size in phase.components.items() if name not in OUTSIDE_THE_TRACE),
            phase.components.get("weights", 0),
        )
        for phase in phases
    ]
    return max(totals)


def compared(model: ModelShape, name: str) -> str:
    candidate = Candidate(
        model=model, method="sft", per_device_train_batch_size=4, max_length=512, padded=True,
        lora_target_modules=TARGETS.get(model.model_type, ("all-linear",)), **SETTINGS[name],
    )  # type: ignore[arg-type]  # fmt: skip
    try:
        start = time.process_time()
        found, weights = allocated_bytes(estimate(candidate, CLUSTER).gpus[0].phases)
        between = time.process_time()
        expected, _ = allocated_bytes(trace_step(candidate).phases)
        end = time.process_time()
    except PlanError as error:
        return f"| {model.id} | {model.model_type} | {name} | {str(error)[:160]} | | | | | |"
    return (
        f"| {model.id} | {model.model_type} | {name} | {expected / GIB:.3f} | {found / GIB:.3f} "
        f"| {found / expected - 1:+.2%} | {(found - expected) / (expected - weights):+.2%} "
        f"| {between - start:.1f} | {end - between:.1f} |"
    )


def rows(names: list[str]) -> Iterator[str]:
    for name in names:
        model = complete_by_measuring(load_model(name), nullcontext)
        for settings in SETTINGS:
            row = compared(model, settings)
            print(row, flush=True)
            yield row
            gc.collect()


def main() -> None:
    """Write the table, after every row because all rows take minutes."""
    versions = ", ".join(f"{name} {version(name)}" for name in VERSIONS)
    found: list[str] = []
    for row in rows(sys.argv[1:] or list(MODELS)):
        found.append(row)
        TABLE.write_text(HEAD.format(versions=versions) + "\n".join(found) + "\n" + TAIL, encoding="utf-8")


if __name__ == "__main__":
    main()
