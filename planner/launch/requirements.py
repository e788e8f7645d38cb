"""requirements.txt: the packages of a run, in the releases whose sources the formulas follow."""

import re

from planner.candidate import FLASH, Candidate
from planner.methods import NEWEST_TRL
from planner.models.recurrent import fast_kernels
from planner.quantizations import GPTQMODEL

FILE = "requirements.txt"

# Releases whose sources the formulas cite. Not used with vLLM, which has its own bounds on transformers (vllm 0.33:
# <5.21).
# torch and datasets: the releases of constraints.txt, with which the tests run.
RELEASES: dict[str, str] = {
    "torch": "2.13.*",
    "datasets": "5.2.*",
    "transformers": "5.23.*",
    "peft": "0.21.*",
    "accelerate": "1.15.*",
    "bitsandbytes": "0.50.*",
    "deepspeed": "0.19.*",
    "liger-kernel": "0.8.*",
}

# The same releases with the extra for FlashAttention, whose bounds on `kernels` a registry may not meet on the day that
# a release appears: pip then takes the one before. Source: transformers 5.22 and 5.23, setup.py (kernels>=0.17.2,<0.18
# and kernels>=0.18.2,<0.19).
TRANSFORMERS_WITH_KERNELS = "transformers[kernels]>=5.22,<5.24"

# Packages of every run with TRL.
COMMON = ("trl", "torch", "datasets", "transformers", "accelerate")


def special_packages(candidate: Candidate) -> list[str]:
    """Packages and extras beyond those of every run with TRL, with releases only where pip would choose a wrong one.

    For another tool the tool alone, which brings its dependencies.
    """
    if candidate.tool != "trl":
        return [candidate.tool_row.requirement]
    lines = requirements(candidate).splitlines()
    exact = ("vllm==", GPTQMODEL)
    names = [line if line.startswith(exact) else re.split("[=>]", line)[0] for line in lines]
    return [name for name in names if name not in COMMON]


def pins_releases(candidate: Candidate) -> bool:
    """True if the releases are those of RELEASES: vLLM and an older TRL have bounds of their own."""
    return not candidate.imports_vllm and candidate.trl_version == NEWEST_TRL


# Read images, and make a processor's tensors of them; pip takes the torchvision that fits torch. Source: transformers
# 5.23, processing_utils.py (a processor of the Qwen families has one of videos, too, which needs torchvision).
IMAGE_PACKAGES = ("pillow", "torchvision")


def requirements(candidate: Candidate) -> str:
    """The text of requirements.txt, one package per line.

    Where the flash-attn package, which is built against an installed torch, is missing, Transformers takes the kernel
    kernels-community/flash-attn2 or vllm-flash-attn3 from the Hub for flash_attention_2 and 3, with the package
    `kernels` (transformers 5.23, modeling_utils.py, `PreTrainedModel._check_and_adjust_attn_implementation`,
    modeling_flash_attention_utils.py, `FLASH_ATTN_KERNEL_FALLBACK`).
    """
    # The extra trl[vllm] has TRL's bounds on vLLM, at which pip stops with another release.
    bounded = candidate.imports_vllm and candidate.vllm_taken
    lines = [f"trl{'[vllm]' if bounded else ''}=={candidate.trl_version}.*"]
    if candidate.imports_vllm and (candidate.vllm_version != "newest" or candidate.engine_needs_bitsandbytes):
        lines.append(f"vllm=={candidate.vllm_release}.*")
    pinned = pins_releases(candidate)
    releases = RELEASES | {"torch": f"{candidate.torch_version}.*"}
    lines += [f"{package}=={releases[package]}" if pinned else package for package in _packages(candidate)]
    if candidate.attn_implementation in FLASH or candidate.use_kernels:
        named = lines.index(f"transformers=={releases['transformers']}" if pinned else "transformers")
        lines[named] = TRANSFORMERS_WITH_KERNELS if pinned else "transformers[kernels]"
    lines += [package for package in candidate.quantization_row.packages if package not in RELEASES]
    optimizer_package = candidate.optimizer_row.package
    if optimizer_package and optimizer_package not in RELEASES:
        lines.append(optimizer_package)
    # Without them Transformers stops at packed rows (5.23, integrations/hub_kernels.py,
    # `use_kernel_func_from_hub_with_fallback`, "can't keep packed sequences apart").
    lines += fast_kernels(candidate.model) if candidate.flattened else ()
    lines += IMAGE_PACKAGES if candidate.images_per_row else ()
    return "\n".join(lines) + "\n"


def _packages(candidate: Candidate) -> list[str]:
    """The packages of RELEASES that the candidate needs."""
    required = {
        "torch": True,
        "datasets": True,
        "transformers": True,
        "accelerate": True,
        "peft": candidate.tuning == "lora",
        "bitsandbytes": candidate.quantization_row.bitsandbytes or candidate.optimizer_row.package == "bitsandbytes",
        "deepspeed": candidate.scheme_row.stage > 0,
        "liger-kernel": candidate.use_liger_kernel,
    }
    return [package for package, needed in required.items() if needed]
