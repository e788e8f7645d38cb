"""requirements.txt: the packages of a run, in the releases whose sources the formulas follow."""

from planner.candidate import BITSANDBYTES, DEEPSPEED, AttentionImplementation, Candidate, Optimizer, Quantization
from planner.methods import NEWEST_TRL

FILE = "requirements.txt"

# Releases whose sources the formulas cite. Not used with vLLM, which has its own bounds on transformers (vllm 0.33:
# <5.21).
RELEASES: dict[str, str] = {
    "transformers": "5.23.*",
    "peft": "0.21.*",
    "accelerate": "1.15.*",
    "bitsandbytes": "0.50.*",
    "deepspeed": "0.19.*",
}

# Optimizers that need their own package. adamw_anyprecision is missing: its package torchdistx is on no index.
# Source: transformers 5.23, trainer_optimizer.py.
OPTIMIZER_PACKAGES: dict[Optimizer, str] = {
    "galore_adamw": "galore-torch",
    "apollo_adamw": "apollo-torch",
    "lomo": "lomo-optim",
    "adalomo": "lomo-optim",
    "grokadamw": "grokadamw",
    "schedule_free_adamw": "schedulefree",
    "schedule_free_sgd": "schedulefree",
    "adamw_torch_8bit": "torchao",
    "adamw_torch_4bit": "torchao",
    "stable_adamw": "torch-optimi",
}
# Without flash-attn, which is built against an installed torch, Transformers takes the same kernels from the Hub
# through this package. Source: transformers 5.23, modeling_utils.py:1793, `FLASH_ATTN_KERNEL_FALLBACK`.
ATTENTION_PACKAGES: dict[AttentionImplementation, str] = {
    "flash_attention_2": "kernels",
    "flash_attention_3": "kernels",
}
# Source: transformers 5.23, quantizers/quantizer_gptq.py:53-71, quantizer_awq.py:47, quantizer_mxfp4.py.
QUANTIZATION_PACKAGES: dict[Quantization, tuple[str, ...]] = {
    "gptq": ("optimum", "gptqmodel"),
    "awq": ("gptqmodel",),
    "mxfp4": ("kernels",),
}
BITSANDBYTES_OPTIMIZERS = ("bnb", "8bit", "32bit", "ademamix")  # substrings of the names of bitsandbytes' optimizers


def requirements(candidate: Candidate) -> str:
    """The text of requirements.txt, one package per line."""
    # The extra trl[vllm] has TRL's bounds on vLLM.
    lines = [f"trl{'' if candidate.vllm == 'off' else '[vllm]'}=={candidate.trl_version}.*"]
    pinned = candidate.vllm == "off" and candidate.trl_version == NEWEST_TRL  # an older TRL has its own bounds
    lines += [f"{package}=={RELEASES[package]}" if pinned else package for package in _packages(candidate)]
    lines += QUANTIZATION_PACKAGES.get(candidate.quantization, ())
    if candidate.optim in OPTIMIZER_PACKAGES:
        lines.append(OPTIMIZER_PACKAGES[candidate.optim])
    if candidate.attn_implementation in ATTENTION_PACKAGES:
        lines.append(ATTENTION_PACKAGES[candidate.attn_implementation])
    if candidate.use_liger_kernel:
        lines.append("liger-kernel")
    return "\n".join(lines) + "\n"


def _packages(candidate: Candidate) -> list[str]:
    """The packages of RELEASES that the candidate needs."""
    bitsandbytes_optimizer = candidate.optim not in OPTIMIZER_PACKAGES and any(
        part in candidate.optim for part in BITSANDBYTES_OPTIMIZERS
    )
    required = {
        "transformers": True,
        "accelerate": True,
        "peft": candidate.tuning == "lora",
        "bitsandbytes": candidate.quantization in BITSANDBYTES or bitsandbytes_optimizer,
        "deepspeed": candidate.sharding in DEEPSPEED,
    }
    return [package for package, needed in required.items() if needed]
