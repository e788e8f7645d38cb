"""The settings of a candidate that the table shows: the important ones, and those that differ from TRL's defaults."""

from msgspec.structs import replace

from planner.candidate import ZERO_SIZES, Candidate
from planner.jobs.settings import settings_of
from planner.jobs.spellings import SPELLINGS
from planner.units import format_count

# Lines of settings: a label, settings that are always shown, and settings that are shown if they differ from TRL's.
LINES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "batch",
        ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"),
        ("steps_per_generation", "num_iterations"),
    ),
    (
        "lengths",
        ("max_length", "prompt_length", "max_completion_length", "max_new_tokens", "response_length"),
        ("images_per_row", "image_size", "packing", "padding_free", "padded"),
    ),
    ("model", ("dtype", "gradient_checkpointing", "attn_implementation"), ()),
    ("adapters", ("lora_r", "lora_target_modules", "lora_dropout"), ("use_peft", "autocast_adapter_dtype")),
    (
        "GPUs",
        ("num_processes",),
        (
            "num_machines",
            "dp_replicate_size",
            "cp_size",
            "sp_size",
            "sync_each_batch",
            "zero_stage",
            "ds3_gather_for_generation",
            "fsdp_version",
            "offload_optimizer_device",
            "offload_param_device",
            "fsdp_offload_params",
            *ZERO_SIZES,
        ),
    ),
    ("vLLM", ("vllm_mode", "vllm_gpu_memory_utilization"), ()),
)
ALWAYS_SHOWN = frozenset(name for _, always, _ in LINES for name in always)
LINE_OF = {name: label for label, always, sometimes in LINES for name in (*always, *sometimes)}
SHOWN_ELSEWHERE = ("model_name_or_path", "method", "trl_version", "environment", "distributed_type", "use_vllm")

# Fields whose values have settings of their own; the defaults of those settings are not shown.
STRUCTURE = ("tuning", "quantization", "precision", "sharding", "vllm")


def shown_settings(candidate: Candidate) -> dict[str, list[str]]:
    """Return lines of settings by label, written as `--set` takes them."""
    settings = settings_of(candidate)
    plain = Candidate(model=candidate.model, method=candidate.method, trl_version=candidate.trl_version)
    usual = settings_of(plain) | {
        "steps_per_generation": candidate.gradient_accumulation_steps
    }  # trl 1.16, grpo_config.py:1098
    chosen = {name for field in STRUCTURE for name in SPELLINGS[field][getattr(candidate, field)]}
    implied = settings_of(replace(plain, **{field: getattr(candidate, field) for field in STRUCTURE}))
    lines: dict[str, list[str]] = {label: [] for label, _, _ in LINES}
    for name in (*(name for name in LINE_OF if name in settings), *(name for name in settings if name not in LINE_OF)):
        differs = settings[name] != usual.get(name) and (name in chosen or settings[name] != implied.get(name))
        if (name in ALWAYS_SHOWN or differs) and name not in SHOWN_ELSEWHERE:
            lines[LINE_OF.get(name, "vLLM" if name.startswith("vllm_") else "model")].append(
                f"{name} {_value(settings[name])}"
            )
    lines["batch"].append(f"{format_count(candidate.effective_batch_size)} samples a step")
    return {label: items for label, items in lines.items() if items}


def _value(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "default" if value is None else str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_value(inner)}" for name, inner in value.items()) + "}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def launch_environment(candidate: Candidate) -> list[tuple[str, object]]:
    """Return the environment variables to launch the run with."""
    environment = settings_of(candidate)["environment"]
    return list(environment.items()) if isinstance(environment, dict) else []
