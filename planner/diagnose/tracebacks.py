"""A traceback -> the phase of the step it stopped in, by the functions of the libraries that it passes through."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.quantities import Phase


class Frame(NamedTuple):
    """One line of a traceback."""

    path: str
    line: str
    function: str

    @property
    def shown(self) -> str:
        return f"{self.path.rpartition('/')[2]}:{self.line} in {self.function}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeLocation:
    """A phase, and the frames that tell it: any whose function is named, in a file whose path matches."""

    phase: Phase
    functions: frozenset[str]
    path: str = ""

    def holds(self, frame: Frame) -> bool:
        return frame.function in self.functions and re.search(self.path, frame.path) is not None


def _named(*functions: str) -> frozenset[str]:
    return frozenset(functions)


# The first that any frame tells is where it was: a rollout is inside of what scores it, a recomputed forward inside a backward.
# Source: trl 1.16, trainer/grpo_trainer.py, generation/vllm_generation.py, experimental/; transformers 5.23, trainer.py, generation/utils.py;
# accelerate 1.15, accelerator.py; torch 2.13, autograd/; deepspeed 0.19.8, runtime/engine.py.
CODE_LOCATIONS: tuple[CodeLocation, ...] = (
    CodeLocation(
        phase="load",
        functions=_named("from_engine_args", "_initialize_kv_caches", "initialize_from_config", "determine_available_memory", "profile_run", "init_device"),
        path=r"vllm",
    ),
    CodeLocation(
        phase="weight_sync",
        functions=_named("sync_weights", "_move_model_to_vllm", "_sync_fsdp1_params_to_vllm", "_sync_fsdp2_params_to_vllm", "merge_adapter"),
    ),
    CodeLocation(
        phase="rollout",
        functions=_named(
            "generate", "_generate", "_generate_single_turn", "_generate_vllm", "_generate_vllm_server", "_generate_vllm_colocate", "wake_up",
            "unwrap_model_for_generation",
        ),
    ),
    CodeLocation(phase="score", functions=_named("_generate_and_score_completions", "compute_ref_log_probs")),
    CodeLocation(phase="backward", functions=_named("backward", "run_backward", "_engine_run_backward"), path=r"torch/|accelerate|deepspeed"),
    CodeLocation(phase="optimizer_step", functions=_named("step", "_init_group", "_take_model_step"), path=r"optim|deepspeed|bitsandbytes"),
    CodeLocation(phase="save", functions=_named("_save_checkpoint", "save_model", "_save_optimizer_and_scheduler", "save_pretrained", "save_16bit_model")),
    CodeLocation(
        phase="loss",
        functions=_named("cross_entropy", "fixed_cross_entropy", "ForCausalLMLoss", "log_softmax", "selective_log_softmax", "entropy_from_logits"),
    ),
    CodeLocation(phase="loss", functions=_named("forward", "backward"), path=r"trl/kernels|liger_kernel"),
    CodeLocation(phase="forward", functions=_named("compute_loss", "_compute_loss", "training_step")),
    CodeLocation(
        phase="load",
        functions=_named(
            "from_pretrained", "create_model_from_path", "_load_pretrained_model", "_prepare_deepspeed", "prepare_model", "_move_model_to_device",
            "get_peft_model", "to",
        ),
    ),
)  # fmt: skip
# Files whose functions only hand a call on.
DULL = (
    r"torch/autograd|torch/_tensor\.py|torch/nn/modules/module\.py|torch/_ops\.py|torch/utils/_contextlib\.py|torch/_dynamo|functools\.py|contextlib\.py|"
    r"peft/tuners/tuners_utils\.py"
)


def phase_of(frames: Sequence[Frame]) -> Phase | None:
    """The phase; None where the traceback passes through no known place."""
    return next((location.phase for location in CODE_LOCATIONS if any(location.holds(frame) for frame in frames)), None)


def gathers(frames: Sequence[Frame]) -> bool:
    """Whether ZeRO-3 was gathering parameters (deepspeed 0.19.8, runtime/zero/partition_parameters.py)."""
    return any("partition_parameters" in frame.path for frame in frames)


def innermost(frames: Sequence[Frame]) -> str:
    """The last place that says something: modules that only hand on a call do not."""
    return next((frame.shown for frame in reversed(frames) if not re.search(DULL, frame.path)), "")
