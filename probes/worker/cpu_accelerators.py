"""Make accelerate and DeepSpeed treat CPU processes as GPUs.

ZeRO and FSDP2 then run over gloo, with each rank's tensors on the host.
"""

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from probes.substitution import substituted
from probes.task import Task


def needs_accelerators(task: Task) -> bool:
    """Return True for FSDP2 on the CPU: accelerate 1.15 knows DDP and DeepSpeed there only.

    Source: state.py, `AcceleratorState.__init__`.
    """
    return task.device == "cpu" and task.candidate.scheme_row.section == "fsdp_config"


@contextlib.contextmanager
def cpu_accelerators() -> Iterator[None]:
    """Give processes the distributed type MULTI_GPU on the device "cpu" inside the block, with and without `use_cpu`.

    Transformers asks whether the GPU has bfloat16 (5.23, training_args.py, `TrainingArguments._validate_args`): the
    answer is True. DeepSpeed would first compile its own all-reduce in shared memory (0.19.8, comm/torch.py,
    `build_shm_op`): it uses gloo instead.
    """

    def backend(*_: Any, **__: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    initialize = PartialState.__init__

    def initialize_without_cpu(state: PartialState, cpu: bool = False, **settings: Any) -> None:
        initialize(state, False, **settings)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment("ACCELERATE_TORCH_DEVICE", "cpu"))
        stack.enter_context(substituted(PartialState, "_prepare_backend", backend))
        stack.enter_context(substituted(PartialState, "__init__", initialize_without_cpu))
        stack.enter_context(substituted(transformers.training_args, "is_torch_bf16_gpu_available", lambda: True))
        stack.enter_context(substituted(torch.cuda, "is_bf16_supported", lambda *_, **__: True))
        if importlib.util.find_spec("deepspeed") is not None:
            stack.enter_context(
                substituted(importlib.import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None)
            )
        yield


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
