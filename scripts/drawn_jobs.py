"""Jobs of the emulated grid drawn at random: most settings that memory depends on, in combinations nobody picked."""

import random
from collections.abc import Iterator
from typing import Any, get_args

from planner.errors import PlanError
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.jobs.base_candidate import single_candidate
from planner.jobs.job import Job as PlannedJob
from planner.methods import METHODS, MethodName
from planner.models.catalogue import load_model
from planner.units import GIB
from scripts.emulated_jobs import Job, complete, settings_of

SEED, DRAWS = 32, 1250  # half of them are refused by a rule or too large
MODELS = (
    "SmolLM2-135M", "SmolLM2-360M", "Qwen2.5-0.5B", "Qwen3-0.6B", "gemma-3-270m", "Llama-3.2-1B", "OLMo-2-0425-1B",
    "TinyLlama-1.1B", "Qwen2.5-1.5B", "pythia-410m", "LFM2-350M", "Qwen3.5-0.8B",
)  # fmt: skip
CARDS = ("T4", "L4", "RTX-4090", "A100-40G", "A100-80G", "H100", "B200")
SHARDED_CARDS = ("A100-40G", "A100-80G", "H100", "L4")
TUNINGS: tuple[dict[str, Any], ...] = (
    {"tuning": "lora", "dtype": "bfloat16"},
    {"tuning": "lora", "dtype": "float32"},
    {"tuning": "full", "dtype": "bfloat16"},
    {"tuning": "full", "dtype": "float32"},
    {"tuning": "lora", "dtype": "bfloat16", "quantization": "nf4"},
    {"tuning": "lora", "dtype": "bfloat16", "quantization": "nf4-double"},
    {"tuning": "lora", "dtype": "bfloat16", "quantization": "int8"},
)
SHARDINGS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
LARGEST_GIB = 30  # estimated; the machine that runs the jobs holds the tensors of the CPU and little else


class Draw:
    """A seeded draw: most settings keep TRL's defaults most of the time."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def one(self, *values: Any) -> Any:
        return self.random.choice(values)

    def happens(self, chance: float) -> bool:
        return self.random.random() < chance

    def some(self, chances: dict[str, tuple[float, tuple[Any, ...]]]) -> dict[str, Any]:
        """Include each setting with its chance, at one of its values."""
        return {name: self.one(*values) for name, (chance, values) in chances.items() if self.happens(chance)}


USUAL: dict[str, tuple[float, tuple[Any, ...]]] = {
    "attn_implementation": (0.2, ("eager",)),
    "use_liger_kernel": (0.15, (True,)),
    "expandable_segments": (0.3, (True,)),
    "gradient_checkpointing": (0.3, (False,)),
    "checkpoint_every_n_layers": (0.1, (2, 4)),
    "activation_offloading": (0.08, (True,)),
    "checkpoint_offload": (0.08, (True,)),
    "gradient_accumulation_steps": (0.4, (2, 4)),
    "eval_strategy": (0.15, ("steps",)),
    "per_device_eval_batch_size": (0.1, (1, 4)),
    "precision": (0.1, ("no", "fp16")),
}
ADAPTERS: dict[str, tuple[float, tuple[Any, ...]]] = {
    "lora_r": (0.4, (8, 64, 128)),
    "lora_dropout": (0.2, (0.05,)),
    "use_dora": (0.1, (True,)),
    "lora_target_modules": (0.2, (("q_proj", "v_proj"),)),
}
OPTIMIZERS = ("adafactor", "sgd", "adamw_8bit", "paged_adamw_8bit", "adamw_torch", "lion_32bit", "adagrad", "rmsprop")
ROWS: dict[str, tuple[float, tuple[Any, ...]]] = {
    "padded": (0.5, (False,)),
    "packing": (0.1, (True,)),
    "padding_free": (0.1, (True,)),
}
ROLLOUTS: dict[str, tuple[float, tuple[Any, ...]]] = {
    "beta": (0.3, (0.04,)),
    "num_iterations": (0.2, (2,)),
}


def drawn_jobs() -> Iterator[Job]:
    """Yield the drawn jobs that no rule of `plan` refuses and that are small enough; each has a seed of its own."""
    for number in range(DRAWS):
        job = _job(Draw(f"{SEED} {number}"))
        if job is not None:
            yield job


def _job(draw: Draw) -> Job | None:
    method: MethodName = draw.one(*(name for name in get_args(MethodName) if METHODS[name].last_trl == "current"))
    sharding = draw.one(*SHARDINGS) if draw.happens(0.4) else "none"
    tuning = draw.one(*TUNINGS)
    pinned = tuning | {"sharding": sharding} | _settings(draw, method, tuning["tuning"], sharding)
    gpus = f"{draw.one(2, 4, 8)}x{draw.one(*SHARDED_CARDS)}" if sharding != "none" else f"1x{draw.one(*CARDS)}"
    model, cluster = complete(load_model(draw.one(*MODELS))), parse_cluster(gpus, None)
    try:
        candidate = single_candidate(PlannedJob(model=model, method=method, pinned=pinned), cluster)
        peak = estimate(candidate, cluster).gpus[0].peak_bytes
    except (PlanError, AssertionError):
        return None  # refused, or a layer whose measurements do not ship
    if peak > LARGEST_GIB * GIB:
        return None
    kind = "QLoRA" if "quantization" in tuning else "LoRA" if tuning["tuning"] == "lora" else "full"
    return Job(kind=f"drawn, {sharding} {kind}", gpus=gpus, settings=settings_of(candidate))


def _settings(draw: Draw, method: MethodName, tuning: str, sharding: str) -> dict[str, Any]:
    row = METHODS[method]
    found = draw.some(USUAL) | {"max_length": draw.one(256, 512, 1024, 2048, 4096)}
    found["per_device_train_batch_size"] = draw.one(1, 2, 4, 8)
    found |= draw.some(ADAPTERS) if tuning == "lora" else {}
    if tuning == "full" and draw.happens(0.4):
        found["optim"] = draw.one(*OPTIMIZERS)
    if method == "sft":
        found |= draw.some(ROWS)
    if row.generates:
        found |= draw.some(ROLLOUTS) | {"vllm": "off", "prompt_length": found["max_length"] // 2}
        found["max_completion_length"] = draw.one(8, 16, 32)
    if row.grouped_completions:
        found["num_generations"] = draw.one(2, 4)
    if sharding.startswith("zero"):
        found |= draw.some({"offload_optimizer": (0.2, (True,))})
    if sharding == "zero3":
        found |= draw.some({"offload_param": (0.15, (True,)), "ds3_gather_for_generation": (0.3, (False,))})
    return found
