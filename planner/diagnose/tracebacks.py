"""Find what a traceback shows beside its phase: sharding, checkpoints, and what ran."""

import re
from collections.abc import Sequence
from itertools import pairwise

from planner.diagnose.code_phases import (
    CALIBRATES,
    CALIBRATING_FILES,
    CAPTURES_ENGINE,
    ENCODER_FILES,
    ENCODES_ENGINE,
    FLOAT_LOGITS,
    JOINS_LOGITS,
    LOADS_ENGINE,
    MERGES,
    PROFILES_ENGINE,
    RUNS_ENGINE,
    SAMPLES_ENGINE,
    STARTS_ENGINE,
    TRAINING,
    VLLM,
    VLLM_WEIGHTS,
    phase_of,
)
from planner.diagnose.frames import Frame
from planner.diagnose.incident import Activity
from planner.diagnose.phase_words import purpose_of

# Source: bitsandbytes 0.50, nn/modules.py and functional.py; transformers 5.23, quantizers/ (older releases too).
QUANTIZES = frozenset({"_quantize", "quantize_4bit", "create_quantized_param", "int8_vectorwise_quant"})
# Functions of torch/cuda/__init__.py that make a process's CUDA context.
FIRST_CALLS = frozenset({"_lazy_init", "_cuda_init", "set_device", "mem_get_info", "current_device", "cb"})
# Functions that take page-locked host memory, from which CUDA copies to a GPU.
PINS = frozenset({"pin_memory", "_create_param_groups_fp16_flat_cpu_memory"})
# Functions of Megatron and of Transformer Engine that make a layer.
BUILDS = frozenset({"__init__", "build_module", "_initialize_affine_weight_gpu"})
BUILDING_FILES = r"megatron/core/(?:tensor_parallel|transformer|models|extensions)/|transformer_engine/pytorch/module/"
ZERO_2 = "deepspeed/runtime/zero/stage_1_and_2"
PINNING = r"pin_memory ?= ?True|\.pin_memory\("
# Functions of torch/nn/parallel/ that run several GPUs from one process.
REPLICAS = frozenset({"_worker", "parallel_apply", "replicate", "scatter", "gather"})
# Functions of TRL's SyncRefModelCallback, which under ZeRO-3 gathers the policy and the reference.
SYNCS_REFERENCE = frozenset({"sync_target_model", "_sync_target_model"})
# Functions of Trainer, accelerate and DeepSpeed's engine that read a checkpoint to go on from it.
RESUMES = frozenset({"_load_from_checkpoint", "load_state", "load_checkpoint", "_load_checkpoint"})
JOINS = r"\bnested_concat\("
# Code of eager attention. Source: transformers 5.23, models/*/modeling_*.py, and its releases since 4.0.
EAGER = (
    r"\battn_weights = |\battention_(?:scores|probs) = |softmax\((?:attn_weights|attention_scores)|matmul\(query|"
    r"\bbaddbmm\("
)
# Functions and files of programs that only infer. torch 2.13, utils/_contextlib.py: no_grad and inference_mode.
INFERRING_FUNCTIONS = r"infer(?:ence)?(?:_\w+)?|predict(?:_\w+)?|encode_\w+|embed_\w+|chat|demo\w*"
INFERRING_FILES = (
    r"(?:^|/)(?:pipelines?|comfy|ComfyUI|gradio|webui|extern)/|web_?demo|cli_?demo|/infer\w*\.py|/demo\w*\.py"
)
# Libraries with functions under no_grad that a training calls, such as a gather of weights and a rotary embedding.
OWN_NO_GRAD = r"(?:^|/)(?:torch|deepspeed|accelerate|transformers|transformers_modules|peft|bitsandbytes)/|modeling_"
# Functions of transformers that make a mask of length by length. Source: 4.30, models/*/modeling_*.py; 4.40,
# modeling_attn_mask_utils.py; 5.23, masking_utils.py.
MASKS = frozenset(
    {
        "_prepare_attention_mask",
        "_expand_mask",
        "_make_causal_mask",
        "_prepare_decoder_attention_mask",
        "_update_causal_mask",
    }
    | {"_prepare_4d_causal_attention_mask", "create_causal_mask", "create_bidirectional_mask", "eager_mask"}
)
OF_ENGINE = (None, "load", "rollout")  # phases that an engine has without a trainer
# Files of a data loader and its workers; of libraries that read and prepare datasets.
LOADER_FILES = r"torch/utils/data/(?:_utils/(?:worker|fetch|signal_handling)|dataloader\.py)|torchdata/"
DATA_FILES = r"(?:^|/)(?:datasets/|pandas/|pyarrow/|polars/|json/(?:__init__|decoder))"
# Files whose functions only forward a call.
FORWARDING_FILES = (
    r"torch/autograd|torch/_tensor\.py|torch/nn/modules/module\.py|torch/_ops\.py|torch/utils/_contextlib\.py|"
    r"torch/_dynamo|functools\.py|contextlib\.py|peft/tuners/tuners_utils\.py|torch/utils/_device\.py|"
    r"torch/distributed/(?:elastic|launcher|run)|bin/torchrun"
)


def sharding_of(frames: Sequence[Frame]) -> str:
    """The library that shards the model, by files that only run with it: "zero3", "zero2", "fsdp"; empty if unknown.

    Source: deepspeed 0.19.8, runtime/zero/stage3.py, partition_parameters.py, partitioned_param_coordinator.py,
    stage_1_and_2.py; torch 2.13, distributed/fsdp/.
    """
    paths = " ".join(frame.path for frame in frames)
    if re.search(r"deepspeed/runtime/zero/(?:stage3|partition|parameter_offload)", paths):
        return "zero3"
    if re.search(r"deepspeed/runtime/zero/stage_1_and_2", paths):
        return "zero2"
    return "fsdp" if "torch/distributed/fsdp/" in paths else ""


def activity_of(frames: Sequence[Frame]) -> Activity:
    """Return what ran, if the advice depends on it more than on the phase; empty otherwise.

    Source: deepspeed 0.19.8, runtime/zero/partition_parameters.py, stage3.py, accelerator/; transformers 5.23,
    trainer_pt_utils.py; trl 1.16, trainer/callbacks.py; vllm 0.33, device_allocator/cumem.py; torch 2.13,
    cuda/__init__.py.
    """
    if not frames:
        return ""
    functions = {frame.function for frame in frames}
    vllm = {frame.function for frame in frames if re.search(VLLM, frame.path)}
    signs: tuple[tuple[Activity, bool], ...] = (
        ("pins", _pins(frames[-1])),
        ("forks", frames[-1].function == "_launch" and "popen_fork" in frames[-1].path),
        ("spawns", frames[-1].function == "_main" and "multiprocessing/spawn" in frames[-1].path),
        ("masks", bool(functions & MASKS)),
        ("attends", bool(re.search(EAGER, frames[-1].source)) or "eager_attention_forward" in functions),
        ("fills_bucket", "reduce_bucket_size" in frames[-1].source),
        ("syncs_reference", bool(functions & SYNCS_REFERENCE)),
        ("gathers", any("partition_parameters" in frame.path for frame in frames)),
        ("predicts", _predicts(frames)),
        ("joins_logits", bool(functions & JOINS_LOGITS) or any(re.search(JOINS, frame.source) for frame in frames)),
        ("loads_data", any(re.search(LOADER_FILES, frame.path) for frame in frames)),
        ("prepares", any(re.search(DATA_FILES, frame.path) for frame in frames)),
        ("engine_captures", bool(vllm & CAPTURES_ENGINE) or any(_captures(frame) for frame in frames)),
        ("engine_loads", bool(vllm & LOADS_ENGINE) or any(re.search(VLLM_WEIGHTS, frame.source) for frame in frames)),
        (
            "engine_encodes",
            bool(vllm & ENCODES_ENGINE) or any(re.search(ENCODER_FILES, frame.path) for frame in frames),
        ),
        ("engine_profiles", bool(vllm & PROFILES_ENGINE)),
        ("engine_starts", bool(vllm & STARTS_ENGINE)),
        ("engine_wakes", bool(functions & {"wake_up", "create_and_map"})),
        ("engine_runs", bool(vllm & RUNS_ENGINE)),
        ("engine_samples", bool(vllm & SAMPLES_ENGINE)),
        ("wraps_ddp", "_ddp_init_helper" in functions or _wraps_ddp(frames[-1])),
        ("loads_best", "_load_best_model" in functions),
        ("resumes", bool(functions & RESUMES) and phase_of(frames) == "load"),
        ("merges", _merges(frames)),
        ("builds", frames[-1].function in BUILDS and re.search(BUILDING_FILES, frames[-1].path) is not None),
        ("makes_master", any(ZERO_2 in frame.path and frame.function == "__init__" for frame in frames)),
        ("reorders", "undo_layout" in functions or any("undo_layout(" in frame.source for frame in frames)),
        ("sglang_loads", any("sglang/" in frame.path and frame.function in LOADS_ENGINE for frame in frames)),
        ("sglang", any("sglang/" in frame.path for frame in frames)),
        ("data_parallel", any("torch/nn/parallel/" in frame.path and frame.function in REPLICAS for frame in frames)),
        (
            "calibrates",
            any(frame.function in CALIBRATES and re.search(CALIBRATING_FILES, frame.path) for frame in frames),
        ),
        ("quantizes", bool(functions & QUANTIZES) or any("bitsandbytes/nn/" in frame.path for frame in frames)),
        ("infers", _infers(frames)),
        ("first_call", frames[-1].function in FIRST_CALLS),
        ("engine", phase_of(frames) in OF_ENGINE and re.search(VLLM, _library(frames)) is not None),
        ("converts_logits", frames[-1].function in FLOAT_LOGITS),
        ("makes_logits", any(_makes_logits(frame) for frame in frames)),
        ("trains", phase_of(frames) is None and purpose_of(frames) == "trains"),
    )
    return next((activity for activity, seen in signs if seen), "")


def _library(frames: Sequence[Frame]) -> str:
    """The file of the innermost frame that is none of PyTorch's; empty if there is none."""
    return next((frame.path for frame in reversed(frames) if "torch/" not in frame.path), "")


def _predicts(frames: Sequence[Frame]) -> bool:
    """True if the Trainer runs on rows whose outputs it returns."""
    return any(
        (frame.function == "predict" and "transformers/trainer" in frame.path) or ".predict(" in frame.source
        for frame in frames
    ) and (phase_of(frames) == "evaluation")


def _merges(frames: Sequence[Frame]) -> bool:
    """True if adapters merge into their base model, for good and not to send it to an engine."""
    functions = {"merge_and_unload", "get_delta_weight", *MERGES}
    seen = any(
        frame.function in functions
        or "merge_and_unload(" in frame.source
        or (frame.function == "merge" and "peft/tuners/" in frame.path)
        for frame in frames
    )
    return seen and phase_of(frames) != "weight_sync"


def _infers(frames: Sequence[Frame]) -> bool:
    """True if a forward pass runs without gradients, or in a program that only infers, and no trainer is seen."""
    if phase_of(frames) != "forward" or not TRAINING.isdisjoint(frame.function for frame in frames):
        return False
    without_gradients = any(
        frame.function == "decorate_context" and not re.search(OWN_NO_GRAD, inner.path)
        for frame, inner in pairwise(frames)
    )
    return without_gradients or any(
        re.fullmatch(INFERRING_FUNCTIONS, frame.function) or re.search(INFERRING_FILES, frame.path) for frame in frames
    )


def _wraps_ddp(frame: Frame) -> bool:
    """True if this innermost frame wraps a model with DistributedDataParallel."""
    return re.search(r"DistributedDataParallel\(|_ddp_init_helper\(", frame.source) is not None or (
        frame.function == "__init__" and "mmengine/model/wrappers/" in frame.path
    )


def _makes_logits(frame: Frame) -> bool:
    """True if this frame makes the logits of all tokens."""
    return re.search(r"\blm_head\(", frame.source) is not None


def _captures(frame: Frame) -> bool:
    """True if this frame of vLLM captures a CUDA graph."""
    return "vllm/" in frame.path and re.search(r"torch\.cuda\.graph\(|\.capture_model\(", frame.source) is not None


def checkpoints(frames: Sequence[Frame]) -> bool:
    """True if the frames show gradient checkpointing.

    Source: torch 2.13, utils/checkpoint.py; transformers 5.23, modeling_layers.py, `_gradient_checkpointing_func`.
    """
    return any(
        frame.path.endswith("torch/utils/checkpoint.py") or "_gradient_checkpointing_func(" in frame.source
        for frame in frames
    )


def _pins(frame: Frame) -> bool:
    """True if this innermost frame takes page-locked memory, itself or in a comprehension of DataLoader's thread."""
    in_thread = "torch/utils/data/_utils/pin_memory" in frame.path
    return in_thread or frame.function in PINS or re.search(PINNING, frame.source) is not None


def innermost(frames: Sequence[Frame]) -> str:
    """The innermost frame outside FORWARDING_FILES, as printed; empty if there is none."""
    return next((frame.shown for frame in reversed(frames) if not re.search(FORWARDING_FILES, frame.path)), "")


def old_python(frames: Sequence[Frame]) -> bool:
    """True if the frames are of a Python that is older than 3.8, the oldest that PyTorch 2.1 runs in."""
    return any(re.search(r"python3\.[4-7]/", frame.path) for frame in frames)
