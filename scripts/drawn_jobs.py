"""Jobs of the emulated grid drawn at random: settings that memory depends on, in combinations nobody picked.

Two draws: the usual settings on models with formulas, and those that few people set on many kinds of models.
"""

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
from planner.settings.table import has_setting
from planner.units import GIB
from scripts.emulated_jobs import Job, complete, settings_of

# Seeds and their draws, half of which are refused by a rule or too large.
USUAL_DRAWS, RARE_DRAWS = (32, 1250), (33, 700)
MODELS = (
    "SmolLM2-135M", "SmolLM2-360M", "Qwen2.5-0.5B", "Qwen3-0.6B", "gemma-3-270m", "Llama-3.2-1B", "OLMo-2-0425-1B",
    "TinyLlama-1.1B", "Qwen2.5-1.5B", "pythia-410m", "LFM2-350M", "Qwen3.5-0.8B",
)  # fmt: skip
MANY_MODELS = (
    "ibm-granite/granite-4.0-350m", "LFM2-350M", "ERNIE-4.5-0.3B-PT", "bloom-560m", "gpt-neo-125m", "opt-350m", "gpt2",
    "pythia-410m", "Qwen3.5-0.8B", "gemma-3-1b-pt", "OLMo-1B-hf", "Llama-3.2-1B", "EXAONE-4.0-1.2B", "phi-1_5",
    "stablelm-2-1_6b", "Falcon3-1B-Base", "granite-4.0-1b", "Qwen3-VL-2B-Instruct", "Qwen2-VL-2B-Instruct", "gemma-2b",
    "granite-3.1-2b-instruct", "gemma-2-2b", "starcoder2-3b", "SmolLM3-3B", "granite-4.0-h-micro", "Qwen2.5-3B",
    "Phi-3-mini-4k-instruct", "Phi-4-mini-instruct", "gemma-3-4b-pt", "paligemma-3b-pt-224",
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
# Settings that few people set, by the setting and its value that they are details of; None: of none.
RARE: dict[tuple[str, Any] | None, dict[str, tuple[float, tuple[Any, ...]]]] = {
    None: {
        "precompute_ref_log_probs": (0.4, (True,)),
        "reward_model": (0.4, ("Qwen2.5-0.5B", "SmolLM2-360M", "gemma-3-270m")),
        "teacher_dtype": (0.3, ("bfloat16", "float32")),
    },
    ("tuning", "lora"): {"lora_modules_to_save": (0.15, (("lm_head",), ("embed_tokens", "lm_head")))},
    ("dtype", "float32"): {"tf32": (0.5, (True,))},
    ("quantization", "nf4"): {"float32_adapters": (0.3, (True,)), "bnb_4bit_quant_storage": (0.3, ("bfloat16",))},
    ("quantization", "int8"): {"float32_adapters": (0.3, (True,))},
    ("eval_strategy", "steps"): {
        "num_generations_eval": (0.5, (1, 4)),
        "compute_metrics": (0.5, (True,)),
        "prediction_loss_only": (0.1, (True,)),
        "eval_accumulation_steps": (0.3, (1, 2)),
        "eval_rows": (1.0, (8, 16)),
    },
    ("sharding", "fsdp2"): {
        "dp_replicate_size": (0.3, (2,)),
        "cp_size": (0.2, (2,)),
        "sync_each_batch": (0.2, (True,)),
        "offload_param": (0.1, (True,)),
    },
    ("sharding", "zero2"): {"reduce_bucket_size": (0.5, (50_000_000, 200_000_000))},
    ("sharding", "zero3"): {
        "sp_size": (0.2, (2,)),
        "reduce_bucket_size": (0.3, (50_000_000, 200_000_000)),
        "stage3_prefetch_bucket_size": (0.3, (0, 20_000_000)),
        "stage3_param_persistence_threshold": (0.3, (0, 1_000_000)),
        "stage3_max_live_parameters": (0.2, (100_000_000,)),
        "stage3_max_reuse_distance": (0.2, (0, 100_000_000)),
        "sub_group_size": (0.2, (100_000_000,)),
    },
}


def drawn_jobs() -> Iterator[Job]:
    """Yield the drawn jobs that no rule of `plan` refuses and that are small enough; each has a seed of its own."""
    for (seed, count), models, rare in ((USUAL_DRAWS, MODELS, False), (RARE_DRAWS, MANY_MODELS, True)):
        for number in range(count):
            job = _job(Draw(f"{seed} {number}"), models, rare)
            if job is not None:
                yield job


def _job(draw: Draw, models: tuple[str, ...], rare: bool) -> Job | None:
    method: MethodName = draw.one(*(name for name in get_args(MethodName) if METHODS[name].last_trl == "current"))
    sharding = draw.one(*SHARDINGS) if draw.happens(0.4) else "none"
    tuning = draw.one(*TUNINGS)
    pinned = tuning | {"sharding": sharding} | _settings(draw, method, tuning["tuning"], sharding)
    gpus = f"{draw.one(2, 4, 8)}x{draw.one(*SHARDED_CARDS)}" if sharding != "none" else f"1x{draw.one(*CARDS)}"
    model, cluster = complete(load_model(draw.one(*models))), parse_cluster(gpus, None)
    if rare:
        sixteen = {} if cluster.gpu.supports_bf16 or pinned["dtype"] != "bfloat16" else {"dtype": "float16"}
        pinned = {name: value for name, value in pinned.items() if has_setting(method, name)} | sixteen
        pinned |= _rare(draw, method, pinned)
    try:
        candidate = single_candidate(PlannedJob(model=model, method=method, pinned=pinned), cluster)
        peak = estimate(candidate, cluster).gpus[0].peak_bytes
    except (PlanError, AssertionError):
        return None  # refused, or a layer whose measurements do not ship
    if peak > LARGEST_GIB * GIB:
        return None
    kind = "QLoRA" if "quantization" in tuning else "LoRA" if tuning["tuning"] == "lora" else "full"
    draw_name = "drawn of many models" if rare else "drawn"
    return Job(kind=f"{draw_name}, {sharding} {kind}", gpus=gpus, settings=settings_of(candidate))


def _rare(draw: Draw, method: MethodName, pinned: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for owner, chances in RARE.items():
        if owner is None or pinned.get(owner[0]) == owner[1]:
            found |= draw.some({name: chance for name, chance in chances.items() if has_setting(method, name)})
    return {name: load_model(value) if name == "reward_model" else value for name, value in found.items()}


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
