"""Write tests/golden/estimates.jsonl: `plan estimate` of 60 candidates, chosen of 800 random ones by what they have.

The 60 together have every method, tuning, way to shard, quantization, mode of the engine, every setting below with each
of its values, images, evaluation and older TRL releases, and as many pairs of these as 60 lines can have. A line has
the command's arguments and, of its report, what fits, the peak in bytes, the peak's phase, the bytes of that phase's
components from the largest down, the MiB of all phases of each kind of GPU, the interval, the host's peak, and the
tokens per second.

    python -m scripts.freeze_estimates

A refactoring must not change the file. A formula that changes it is named in the commit that rewrites it.
"""

import contextlib
import io
import json
import random
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path

from planner.commands.main import run
from planner.methods import METHODS
from planner.models.catalogue import load_model
from planner.units import MIB

FILE = Path(__file__).resolve().parents[1] / "tests" / "golden" / "estimates.jsonl"
CATALOGUE = Path(__file__).resolve().parents[1] / "planner" / "data" / "models.jsonl"
SEED, DRAWN, COUNT = 20261127, 800, 60
OLDER_SHARE = 15  # of the candidates, in per cent
OLDER = ("1.0", "1.4", "1.5", "1.9", "1.12", "1.14", "1.15")  # releases of each loss among them
QUANTIZED = ("Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen2.5-7B-Instruct-AWQ", "Qwen3-8B-FP8", "gpt-oss-20b")
QUANTIZED_SHARE = 8
WITH_IMAGES = ("gemma-3-4b-it", "Qwen2.5-VL-3B-Instruct", "Qwen3-VL-8B-Instruct")
IMAGES_SHARE = 8
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
    "eval_strategy": (10, ("steps",)),
    "load_in_8bit": (4, ("true",)),
    "use_bnb_nested_quant": (8, ("true",)),
    "use_dora": (5, ("true",)),
}
VLLM = (
    ("vllm_gpu_memory_utilization", ("0.2", "0.3", "0.5")),
    ("vllm_tensor_parallel_size", ("1", "2")),
    ("vllm_enable_sleep_mode", ("true", "false")),
)


NAMED = ("--method", "--tuning", "--images-per-row", "--trl-version")


def arguments(draw: random.Random, models: list[str]) -> list[str]:
    """One random command line of `plan estimate`; its settings may contradict each other."""
    method = draw.choice(tuple(METHODS))
    kind = draw.random() * 100
    images = kind < IMAGES_SHARE
    model = draw.choice(WITH_IMAGES if images else QUANTIZED if kind < IMAGES_SHARE + QUANTIZED_SHARE else models)
    tuning = draw.choice(("full", "lora", "lora", "qlora"))
    found = ["--model", model, "--gpus", draw.choice(GPUS), "--method", method, "--tuning", tuning]
    found += ["--images-per-row", "1", "--image-size", "448x448"] if images else []
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
    return found if draw.random() * 100 >= OLDER_SHARE else [*found, "--trl-version", draw.choice(OLDER)]


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


def features(argv: list[str]) -> frozenset[str]:
    """What a command line has: flags and settings with their values, but lengths and cards; the architecture."""
    said = {value for flag, value in pairwise(argv) if flag == "--set"}
    said |= {f"{flag} {value}" for flag, value in pairwise(argv) if flag in NAMED}
    model = load_model(argv[argv.index("--model") + 1])
    return frozenset({*said, f"type {model.config.get('model_type')}", f"weights {model.quantization_row.words}"})


def lines() -> Iterator[dict[str, object]]:
    """Yield the lines of the file: each time the candidate with most features that none before has, then most pairs."""
    draw = random.Random(SEED)
    models = [row["id"] for row in map(json.loads, CATALOGUE.read_text().splitlines()) if row.get("params")]
    known = [name for name in models if load_model(name).known]
    drawn: dict[str, tuple[frozenset[str], dict[str, object]]] = {}
    while len(drawn) < DRAWN:
        argv = arguments(draw, known)
        line = estimated(argv)
        if line is not None:
            drawn[" ".join(argv)] = (features(argv), line)
    seen: set[str] = set()
    pairs: set[tuple[str, ...]] = set()
    for _ in range(COUNT):
        best = max(drawn, key=lambda each: (len(drawn[each][0] - seen), len(_pairs(drawn[each][0]) - pairs)))
        had, line = drawn.pop(best)
        seen |= had
        pairs |= _pairs(had)
        yield line
    every = frozenset[str]().union(*(had for had, _ in drawn.values()))
    assert every <= seen, f"{COUNT} lines leave out {sorted(every - seen)}"


def _pairs(had: frozenset[str]) -> set[tuple[str, ...]]:
    return set(combinations(sorted(had), 2))


if __name__ == "__main__":
    FILE.write_text("".join(json.dumps(line) + "\n" for line in lines()))
