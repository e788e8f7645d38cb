"""Run one decoder layer of a real model on the CPU; record what autograd saves and every byte that is alive.

The layer is taken out of a tiny random model and gets the arguments that the model gives it. `saved_tensors_hooks` sees
the tensors that autograd keeps; PyTorch's profiler logs every allocation and release of the CPU allocator. (A dispatch
mode would change the memory: under one, autograd adds no gradient in place, `isTensorSubclassLike` in
input_buffer.cpp.)
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from msgspec import Struct
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

# Operators whose memory inside one call exists on the CPU only: packed operands, per-thread buffers, operands cast to
# a common dtype (TensorIterator casts inside the kernel on a GPU).
SCRATCH_OF = (
    "mul",
    "add",
    "sub",
    "div",
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "topk",
    "sort",
    "histc",
    "_grouped_mm",
)
torch.set_num_threads(1)
gc.collect()
gc.freeze()  # the libraries' objects are never garbage; searching them takes longer than a test

SCALAR_BYTES = 8  # numbers that the CPU wraps into tensors, which a GPU passes as kernel arguments


class Change(Struct, frozen=True, kw_only=True):
    """One change of the allocated bytes, with the operators that were running."""

    size: int
    alive: int
    operators: str


class Truth(Struct, frozen=True, kw_only=True):
    """Bytes beyond those alive before the forward pass: parameters, gradients, the layer's input and shared tensors."""

    packed: int  # distinct storages that autograd saved, born in the layer's forward pass
    kept: int  # alive after the forward pass and autocast's end, the output included
    forward_peak: int
    backward_peak: int  # the output is freed, its gradient exists
    forward: list[Change]
    backward: list[Change]


class Begins(torch.autograd.Function):
    """The layer before: returns the input and keeps nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return torch.randn_like(like)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        return None, None


class Forgets(torch.autograd.Function):
    """The layer after: keeps nothing of the output and returns its gradient; its own output is empty."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.dtype = output.shape, output.dtype
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.ones(ctx.shape, dtype=ctx.dtype)


class ArgumentsSeen(Exception):
    """Raised to end a model's forward pass as soon as the layer's arguments are known."""


class Tuning(Struct, frozen=True, kw_only=True):
    """Full fine-tuning, or LoRA on every linear layer; adapters in float32 (PEFT's default) or in the model's dtype."""

    lora_r: int = 0
    float32_adapters: bool = True
    dropout: float = 0.0
    dora: bool = False


@lru_cache(maxsize=64)
def tiny_model(model_type: str, sizes: tuple[tuple[str, Any], ...], dtype: torch.dtype, tuning: Tuning) -> Any:
    """A random model whose decoder layers are trained according to `tuning`."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, **{key: (list(value) if isinstance(value, tuple) else value) for key, value in sizes}
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    model.train()
    if tuning.lora_r:
        lora = LoraConfig(
            r=tuning.lora_r,
            lora_dropout=tuning.dropout,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            use_dora=tuning.dora,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(model, lora, autocast_adapter_dtype=tuning.float32_adapters)
    return model


def decoder_of(model: Any) -> Any:
    """The module that holds the decoder layers."""
    return next(module for name, module in model.named_modules() if name.rpartition(".")[2] in ("layers", "h"))


def adapted_names(model: Any, index: int) -> frozenset[str]:
    """The last names of the modules of one layer that PEFT has wrapped."""
    wrapped = (name for name, module in decoder_of(model)[index].named_modules() if isinstance(module, LoraLayer))
    return frozenset(name.removesuffix(".base_layer").rpartition(".")[2] for name in wrapped)


def arguments(
    model: Any, layer: Any, rows: int, length: int, padded: bool, attention: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that the model passes to `layer`."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.config._attn_implementation = attention  # falcon ignores set_attn_implementation
    seen: list[Any] = []

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        seen.extend((args, kwargs))
        raise ArgumentsSeen

    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
    mask = torch.ones(rows, length, dtype=torch.long)
    if padded:
        mask[0, -3:] = 0
    try:
        base(input_ids=torch.ones(rows, length, dtype=torch.long), attention_mask=mask, use_cache=False)
    except ArgumentsSeen:
        pass
    finally:
        handle.remove()
    return seen[0], seen[1]


@contextmanager
def no_cycles_collected() -> Iterator[None]:
    """Switch off Python's cyclic garbage collector, which frees at unpredictable times."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run_layer(
    model: Any,
    *,
    index: int,
    rows: int,
    length: int,
    padded: bool,
    attention: str,
    autocast: bool,
    checkpointed: bool,
    gradients_exist: bool,
    stream: torch.dtype | None = None,
    reentrant: bool = False,
) -> Truth:
    """Forward and backward pass of decoder layer `index`; `stream`: dtype of its input, None: of the embeddings."""
    layer = decoder_of(model)[index]
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        args, kwargs = arguments(model, layer, rows, length, padded, attention)
    layer.gradient_checkpointing = checkpointed
    # A GPU's random state is kept in host memory, the CPU's would be counted here.
    layer._gradient_checkpointing_func = partial(
        torch.utils.checkpoint.checkpoint, use_reentrant=reentrant, preserve_rng_state=False
    )

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            output = layer(hidden, *args[1:], **kwargs)
        return output[0] if isinstance(output, tuple) else output

    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter) if gradients_exist and parameter.requires_grad else None
    with no_cycles_collected():
        truth = measured(
            forward,
            args[0].detach().to(stream),
            storages_of([*layer.parameters(), *layer.buffers(), *tree_leaves((args, kwargs))]),
        )
    layer.gradient_checkpointing = False  # the model is used again
    return truth


def storages_of(values: list[Any]) -> set[int]:
    return {value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)}


def measured(forward: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor, outside: set[int]) -> Truth:
    """Both passes of `forward` for an input of the size of `like`."""
    packed = packed_bytes(forward, like, outside)
    anchor = torch.zeros(1, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen_forward:
        with torch.profiler.record_function("input"):
            hidden = Begins.apply(anchor, like)
        hidden = forward(hidden)  # as in a model: the input is freed when the layer has returned
    loss = Forgets.apply(hidden)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen_backward:
        del hidden
        torch.autograd.backward([loss], [torch.empty(0)])
    input_bytes = like.untyped_storage().nbytes() if like.is_contiguous() else like.nbytes
    forward_changes = changes(seen_forward, -input_bytes)
    kept = forward_changes[-1].alive
    backward_changes = changes(seen_backward, kept)
    return Truth(
        packed=packed,
        kept=kept,
        forward_peak=max(change.alive for change in forward_changes),
        backward_peak=max(change.alive for change in backward_changes),
        forward=forward_changes[1:],
        backward=backward_changes,
    )


class Event(Struct, frozen=True, kw_only=True):
    """One line of the allocator's log: bytes are negative where memory is freed."""

    time: int
    address: int
    size: int
    operators: str
    call: int  # id of the surrounding call of a kernel with scratch memory; 0: none


def changes(seen: Any, alive: int) -> list[Change]:
    """The allocator's log without the kernels' scratch memory and without scalars."""
    events = sorted(
        allocator_events(seen.profiler.kineto_results.experimental_event_tree(), ()), key=lambda event: event.time
    )
    scratch = scratch_events(events)
    result = []
    for i, event in enumerate(events):
        if i not in scratch and abs(event.size) > SCALAR_BYTES:
            alive += event.size
            result.append(Change(size=event.size, alive=alive, operators=event.operators))
    return result


def allocator_events(tree: Any, path: tuple[tuple[int, str], ...]) -> Iterator[Event]:
    for node in tree:
        if node.tag != _EventType.Allocation:
            yield from allocator_events(node.children, (*path, (node.correlation_id, node.name)))
        elif node.extra_fields.device.type == "cpu":
            yield Event(
                time=node.start_time_ns,
                address=node.extra_fields.ptr,
                size=node.extra_fields.alloc_size,
                operators=" > ".join(name for _, name in path[-3:]),
                call=next((identity for identity, name in path if has_scratch(name)), 0),
            )


def has_scratch(operator: str) -> bool:
    return operator.removeprefix("aten::").removesuffix("_backward") in SCRATCH_OF


def scratch_events(events: list[Event]) -> set[int]:
    """Events of memory that was allocated and freed inside one call."""
    born: dict[int, int] = {}
    scratch: set[int] = set()
    for i, event in enumerate(events):
        if event.size > 0:
            born[event.address] = i
        elif event.call and event.address in born and events[born[event.address]].call == event.call:
            scratch |= {i, born[event.address]}
    return scratch


def packed_bytes(forward: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor, outside: set[int]) -> int:
    """Bytes of the distinct storages that autograd saves, without parameters, shared tensors and the input."""
    packed: dict[int, int] = {}
    hidden = like.detach().clone().requires_grad_()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        packed[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward(hidden)
    del output
    return sum(size for key, size in packed.items() if key not in outside | storages_of([hidden]))
