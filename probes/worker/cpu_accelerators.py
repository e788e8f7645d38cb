"""Processes without GPUs that accelerate and DeepSpeed take for as many accelerators: ZeRO and FSDP2 over gloo, each rank's memory the host's."""

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

from planner.candidate import SHARDED, Candidate
from probes.substitution import substituted


def needs_accelerators(candidate: Candidate) -> bool:
    """Whether accelerate would not shard the candidate's model on CPUs: it knows DDP there and nothing else (accelerate 1.15, state.py:922-990)."""
    return candidate.sharding in SHARDED


@contextlib.contextmanager
def cpu_accelerators() -> Iterator[None]:
    """While inside, processes are of distributed type MULTI_GPU on the device "cpu", whether or not they say `use_cpu`.

    Transformers asks a GPU whether it has bfloat16 (5.23, training_args.py:1778), which is answered for it. DeepSpeed's own all-reduce in shared
    memory would be compiled first (0.19.8, comm/torch.py:47); gloo does without.
    """

    def backend(*_: Any, **__: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    made = PartialState.__init__

    def not_on_a_cpu(state: PartialState, cpu: bool = False, **settings: Any) -> None:
        made(state, False, **settings)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment("ACCELERATE_TORCH_DEVICE", "cpu"))
        stack.enter_context(substituted(PartialState, "_prepare_backend", backend))
        stack.enter_context(substituted(PartialState, "__init__", not_on_a_cpu))
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
