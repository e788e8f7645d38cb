"""Write tests/golden/estimates.jsonl: `plan estimate` of 360 random candidates, 60 of them for older TRL releases.

A line has the command's arguments and, of its report, what fits, the peak in bytes, the peak's phase, the bytes of that
phase's components from the largest down, the MiB of all phases of each kind of GPU, the interval, the host's peak, and
the tokens per second.

    python -m scripts.freeze_estimates

A refactoring must not change the file. A formula that changes it is named in the commit that rewrites it.
"""

import contextlib
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path

from planner.commands.main import run
from planner.units import MIB

FILE = Path(__file__).resolve().parents[1] / "tests" / "golden" / "estimates.jsonl"
CATALOGUE = Path(__file__).resolve().parents[1] / "planner" / "data" / "models.jsonl"
SEED, COUNT = 20261122, 300
SEED_OF_OLDER, COUNT_OF_OLDER = 20261125, 60
OLDER = ("1.0", "1.4", "1.5", "1.9", "1.12", "1.14", "1.15")  # the last and first releases of a loss among them
METHODS = ("sft", "dpo", "kto", "orpo", "cpo", "reward", "grpo", "rloo", "online-dpo", "gkd", "distillation", "ppo")
GENERATES = ("grpo", "rloo", "online-dpo", "gkd", "distillation", "ppo")
WITH_VLLM = ("grpo", "rloo", "online-dpo", "distillation")
GPUS = (
    "1xT4",
    "1xRTX-4090",
    "1xA100-40G",
    "1xH100",
    "2xA100-40G",
    "4xL40S",
    "8xH100",
    "8xA100-80G",
    "2x8xH100",
    "8xH200",
    "1xRTX-3050-4G",
)
# Settings and the share of candidates that pin them, in per cent.
SETTINGS: dict[str, tuple[int, tuple[str, ...]]] = {
    "gradient_checkpointing": (40, ("true", "false")),
    "attn_implementation": (40, ("sdpa", "eager", "flash_attention_2")),
    "dtype": (30, ("float32", "bfloat16")),
    "optim": (30, ("adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "sgd", "adafactor")),
    "use_liger_kernel": (10, ("true",)),
    "PYTORCH_CUDA_ALLOC_CONF": (20, ("expandable_segments:True",)),
    "lora_target_modules": (15, ("q_proj,v_proj", "all-linear")),
    "activation_offloading": (5, ("true",)),
    "packing": (5, ("true",)),
    "padding_free": (5, ("true",)),
    "precompute_ref_log_probs": (5, ("true",)),
    "beta": (15, ("0.0", "0.1")),
    "num_generations": (15, ("2", "4")),
    "zero_stage": (30, ("1", "2", "3")),
    "offload_optimizer_device": (6, ("cpu",)),
    "fsdp_version": (8, ("2",)),
}
VLLM = (
    ("vllm_gpu_memory_utilization", ("0.2", "0.3", "0.5")),
    ("vllm_tensor_parallel_size", ("1", "2")),
    ("vllm_enable_sleep_mode", ("true", "false")),
)


def arguments(draw: random.Random, models: list[str]) -> list[str]:
    """One random command line of `plan estimate`; its settings may contradict each other."""
    method = draw.choice(METHODS)
    found = [
        "--model",
        draw.choice(models),
        "--gpus",
        draw.choice(GPUS),
        "--method",
        method,
        "--tuning",
        draw.choice(("full", "lora", "lora", "qlora")),
    ]
    found += ["--batch-size", draw.choice(("1", "2", "4", "8"))]
    lengths = ("--prompt-length", "--max-completion-length") if method in GENERATES else ("--max-length",)
    for flag in lengths:
        found += [flag, draw.choice(("128", "512", "1024", "4096"))]
    found += draw.choice(([], ["--padded"], ["--no-padded"]))
    for name, (share, values) in SETTINGS.items():
        value = draw.choice(values)
        if draw.random() * 100 < share:
            found += ["--set", f"{name}={value}"]
    if method in WITH_VLLM and draw.random() < 0.5:
        mode = "colocate" if found[3].startswith("1x") else draw.choice(("colocate", "server"))
        found += ["--set", "use_vllm=true", "--set", f"vllm_mode={mode}"]
        for name, values in VLLM:
            found += ["--set", f"{name}={draw.choice(values)}"] if draw.random() < 0.6 else []
    return found


def estimated(argv: list[str]) -> dict[str, object] | None:
    """Arguments and figures of the report; None if the command refuses the arguments."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        code = run(["estimate", *argv, "--json", "--quiet"])
    if code not in (0, 3) or not printed.getvalue():
        return None
    report = json.loads(printed.getvalue())
    if "error" in report:
        return None
    gpu = max(report["gpus"], key=lambda each: each["peak_bytes"])
    peak = next(phase for phase in gpu["phases"] if phase["name"] == gpu["peak_phase"])
    return {
        "arguments": " ".join(argv),
        "fits": report["fits"],
        "fit_probability": report["fit_probability"],
        "peak_bytes": gpu["peak_bytes"],
        "peak_phase": gpu["peak_phase"],
        "components": dict(sorted(peak["components"].items(), key=lambda each: -each[1])),
        "phases_mib": [
            {phase["name"]: round(phase["total_bytes"] / MIB) for phase in each["phases"]} for each in report["gpus"]
        ],
        "interval_bytes": gpu["interval_bytes"],
        "nvidia_smi_bytes": gpu["nvidia_smi_bytes"],
        "host_bytes": report["host"]["peak_bytes"],
        "tokens_per_second": round(report["throughput"]["tokens_per_second"], 3),
    }


def lines() -> Iterator[dict[str, object]]:
    models = [
        row["id"]
        for row in map(json.loads, CATALOGUE.read_text().splitlines())
        if row.get("params") and _known(row["id"])
    ]
    yield from _drawn(random.Random(SEED), COUNT, models, ())
    yield from _drawn(random.Random(SEED_OF_OLDER), COUNT_OF_OLDER, models, OLDER)


def _drawn(
    draw: random.Random, count: int, models: list[str], releases: tuple[str, ...]
) -> Iterator[dict[str, object]]:
    while count:
        argv = arguments(draw, models)
        line = estimated([*argv, "--trl-version", draw.choice(releases)] if releases else argv)
        if line is not None:
            count -= 1
            yield line


def _known(name: str) -> bool:
    from planner.models.catalogue import load_model

    return load_model(name).known


if __name__ == "__main__":
    FILE.write_text("".join(json.dumps(line) + "\n" for line in lines()))
