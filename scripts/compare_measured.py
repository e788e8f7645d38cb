"""Compare estimates from layers measured on fake tensors with dry runs of the whole model, for models without formulas.

    python -m scripts.compare_measured [MODEL ...]            writes results/measured_architectures.md
    python -m scripts.compare_measured --kernels [MODEL ...]  4-bit bases, Liger's kernels and FlashAttention, on two
                                                              layers of each kind: results/measured_kernels.md

Needs the dryrun extra. Errors are those of PyTorch's allocated peak, without runtime, fragmentation and communication.
"""

import argparse
import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

from planner.candidate import Candidate
from planner.errors import PlanError
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.jobs.rules import refuse_contradictions
from planner.jobs.stops import refuse_stopped
from planner.memory.layers.measured_layers import complete_model, load_shipped
from planner.models.catalogue import load_model
from planner.models.from_config import NOT_COUNTED, shape_of
from planner.models.shape import ModelShape
from planner.quantities import PhaseMemory
from probes.dryrun.simulate import trace_step
from probes.layers.coefficients import complete_by_measuring, load_or_measure, read_shapes
from probes.layers.few_layers import few_layers

RESULTS = Path(__file__).resolve().parents[1] / "results"
TABLE, KERNELS_TABLE = RESULTS / "measured_architectures.md", RESULTS / "measured_kernels.md"
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
QLORA = {"tuning": "lora", "dtype": "bfloat16", "quantization": "nf4"}
KERNELS: dict[str, dict[str, object]] = {
    "QLoRA, checkpointed": QLORA,
    "QLoRA": {**QLORA, "gradient_checkpointing": False},
    "QLoRA, no padding": {**QLORA, "gradient_checkpointing": False, "padded": False},
    "QLoRA, DPO": {**QLORA, "method": "dpo", "per_device_train_batch_size": 2},
    "QLoRA, FlashAttention": {**QLORA, "attn_implementation": "flash_attention_2"},
    "QLoRA, Liger": {**QLORA, "use_liger_kernel": True, "gradient_checkpointing": False},
    "LoRA, Liger": {
        "tuning": "lora", "dtype": "bfloat16", "use_liger_kernel": True, "gradient_checkpointing": False,
    },
    "full, Liger, checkpointed": {"tuning": "full", "dtype": "float32", "use_liger_kernel": True},
}  # fmt: skip
MODELS_OF_KERNELS = (
    "Qwen/Qwen3.5-0.8B", "google/gemma-4-31B", "Qwen/Qwen3-VL-8B-Instruct", "zai-org/GLM-4.5-Air",
    "mistralai/Ministral-3-8B-Instruct-2512", "ibm-granite/granite-4.0-h-small", "LiquidAI/LFM2-350M",
    "Qwen/Qwen3.5-35B-A3B", "google/gemma-4-26B-A4B", "Qwen/Qwen3-Next-80B-A3B-Instruct",
)  # fmt: skip
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
KERNELS_HEAD = """# Measured layers with 4-bit weights, Liger's kernels and FlashAttention, against the dry run

Made by `python -m scripts.compare_measured --kernels`: SFT (or DPO), 4 rows of 512 tokens with padding, sdpa unless
named, on models cut to two layers of each kind. The estimate's activations are the shipped ones
(`planner/data/layers`), measured on one layer of each kind; the dry run is the trainer's whole step of the cut model.
A cell names the settings that are not planned, with the reason. {versions}.

| model | type | settings | simulated GiB | estimated GiB | error | without weights | seconds to measure | to dry-run |
|---|---|---|---|---|---|---|---|---|
"""
KERNELS_TAIL = """
Known causes of the differences: without checkpointing the first layer keeps less than the others, since its input needs
no gradient below the adapters, which weighs more the fewer layers there are; FlashAttention on rows without padding is
taken from sdpa's flash kernel, whose output some layers copy once more.

The same kinds of jobs on emulated GPUs, with the real kernels' own allocations, are in
[emulated.md](emulated.md), "measured layers".
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


def compared(model: ModelShape, name: str, settings: dict[str, object]) -> str:
    settings = dict(settings)
    method = settings.pop("method", "sft")
    usual = {"method": method, "per_device_train_batch_size": 4, "max_length": 512, "padded": True}
    targets = {"lora_target_modules": TARGETS.get(model.model_type, ("all-linear",))}
    try:
        refuse_contradictions(Job(model=model, method=method, pinned=settings), CLUSTER)  # type: ignore[arg-type]
        candidate = Candidate(model=model, **(usual | targets | settings))  # type: ignore[arg-type]
        start = time.process_time()
        refuse_stopped(candidate, CLUSTER)
        found, weights = allocated_bytes(estimate(candidate, CLUSTER).gpus[0].phases)
        between = time.process_time()
        expected, _ = allocated_bytes(trace_step(candidate).phases)
        end = time.process_time()
    except PlanError as error:
        return f"| {model.id} | {model.model_type} | {name} | {str(error)[:200]} | | | | | |"
    return (
        f"| {model.id} | {model.model_type} | {name} | {expected / GIB:.3f} | {found / GIB:.3f} "
        f"| {found / expected - 1:+.2%} | {(found - expected) / (expected - weights):+.2%} "
        f"| {between - start:.1f} | {end - between:.1f} |"
    )


def cut_to_few_layers(name: str) -> ModelShape:
    """The model with two layers of each kind, counted anew, and the layers' memory that ships with the package."""
    model = load_model(name)
    shipped, config = load_shipped(model), dict(few_layers(model).config)
    assert shipped is not None
    cut = shape_of(config, id=model.id, auto_class=model.auto_class, counts=NOT_COUNTED)
    results = dict(shipped.results)
    return complete_model(
        cut, read_shapes(cut), lambda recipe: results.get(recipe) or load_or_measure(model, recipe, nullcontext)
    )


def rows(models: Iterable[ModelShape], all_settings: dict[str, dict[str, object]]) -> Iterator[str]:
    for model in models:
        for name, settings in all_settings.items():
            row = compared(model, name, settings)
            print(row, flush=True)
            yield row
            gc.collect()


def main() -> None:
    """Write the table, after every row because all rows take minutes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--kernels", action="store_true")
    asked = parser.parse_args()
    if asked.kernels:
        models = map(cut_to_few_layers, asked.models or MODELS_OF_KERNELS)
        page, head, tail, settings = KERNELS_TABLE, KERNELS_HEAD, KERNELS_TAIL, KERNELS
    else:
        models = (complete_by_measuring(load_model(name), nullcontext) for name in asked.models or MODELS)
        page, head, tail, settings = TABLE, HEAD, TAIL, SETTINGS
    versions = ", ".join(f"{name} {version(name)}" for name in VERSIONS)
    found: list[str] = []
    for row in rows(models, settings):
        found.append(row)
        page.write_text(head.format(versions=versions) + "\n".join(found) + "\n" + tail, encoding="utf-8")


if __name__ == "__main__":
    main()
