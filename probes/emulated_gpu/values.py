"""Values on an emulated card: no kernel runs there, so the few numbers that steer a program are computed on the host.

Memory of the emulated card is memory of this process, so a tensor on the CPU can be a view of it. Every operator runs
on the card first, with its real allocations; then, if its results and operands are small and a result is of integers or
has few numbers, the CPU computes the same into the same memory. So masks, counts, lengths and token ids mean something;
weights, activations and gradients do not. Results of large operands are zeros, and what is not finite in a small one
is 0, so that nothing left over from an earlier tensor steers the program: losses and norms are 0, and DeepSpeed finds
no overflow, with which it skips a step.

The operators are the kernels of PyTorch's dispatcher for CUDA (`torch.library`), below autograd: no dispatch mode is
active, under which autograd would add gradients out of place (ATen/TensorSubclassLikeUtils.h).
"""

import ctypes
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch

SMALL_ELEMENTS = 1 << 20  # of a tensor that is computed on the host
OBJECT_BYTES = 64 << 20  # of a pickled object, such as images that TRL gathers: as OBJECT_BYTES in driver/core.h
FEW_ELEMENTS = 16  # of floating point numbers that are computed: losses, norms, scales
# Kernels that stay as they are: no numbers come of them, or only random ones.
# fmt: off
LEFT_OUT = (
    "empty", "new_empty", "resize", "set_", "record_stream", "pin_memory", "is_pinned", "lift", "detach", "alias",
    "view", "as_strided", "unfold", "_local_scalar_dense", "_flash", "_efficient", "_scaled_dot", "_fused", "_cudnn",
    "cudnn", "_amp", "convolution", "_convolution", "_transformer", "rand", "normal", "bernoulli", "uniform",
    "exponential", "geometric", "cauchy", "log_normal", "multinomial", "dropout", "native_dropout", "nonzero",
    "copy_", "equal",
)
# fmt: on
# `pow` of a number hands it to this one as a tensor on the card that Python cannot take (native/Pow.cpp).
INTERNAL = frozenset({"aten::pow.Tensor_Tensor_out"})
FAILS_ON_HOST = (RuntimeError, TypeError, IndexError, ValueError)  # operators that the CPU does not have


@contextmanager
def small_values_on_host() -> Iterator[None]:
    """Compute the small results of CUDA's kernels on the host inside the block.

    cuDNN's attention is off, which PyTorch prefers on Hopper: its graphs are built by the library that is replaced.
    """
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each kernel stands for one that is registered already
        for name in _kernels():
            original = torch.library.get_kernel(name, "CUDA")
            library.impl(name, _with_values(_operator(name), original), "CUDA", with_keyset=True)
        library.impl("copy_", _copy(torch.library.get_kernel("aten::copy_", "CUDA")), "CUDA", with_keyset=True)
        library.impl("resize_", _resize(torch.library.get_kernel("aten::resize_", "CUDA")), "CUDA", with_keyset=True)
        for name in ("empty.memory_format", "empty_strided"):
            original = torch.library.get_kernel(f"aten::{name}", "CUDA")
            library.impl(name, _with_zeros(original), "CUDA", with_keyset=True)
        library.impl("nonzero", _nonzero, "CUDA")
        library.impl("equal", _equal, "CUDA")
    try:
        yield
    finally:
        library._destroy()
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


@lru_cache(maxsize=1)
def keep_small_values_on_host() -> ExitStack:
    """Compute small results on the host until the process ends; vLLM calls it in each of its processes (start.py)."""
    kept = ExitStack()
    kept.enter_context(small_values_on_host())
    return kept


def _kernels() -> list[str]:
    """Return the full names of the operators with a kernel of their own for CUDA, but for those left out."""
    left_out = tuple(f"aten::{beginning}" for beginning in LEFT_OUT)
    return [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and not name.startswith(left_out)
        and name not in INTERNAL
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    ]


def _operator(name: str) -> Any:
    """Return the overload of a full name such as `aten::add.Tensor`."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU over the memory of one on an emulated card."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    numbers = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
        numbers, tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= SMALL_ELEMENTS and type(tensor) is torch.Tensor


def _is_object(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may be a pickled object, which torch.distributed sends as bytes in one dimension."""
    return tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.numel() <= OBJECT_BYTES


def _steers(tensor: torch.Tensor) -> bool:
    """Return whether a program may read the tensor to decide what it does."""
    return not tensor.is_floating_point() or tensor.numel() <= FEW_ELEMENTS


def _means_nothing(value: Any) -> bool:
    """Return whether a value is a tensor of floating point numbers that no kernel may have filled, as a gradient."""
    several = isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1
    return several and value.dtype.itemsize > 1  # float8 has no `nan_to_num`


def _with_values(operator: Any, original: Any) -> Callable[..., Any]:
    """Return a kernel that runs the original one, and computes its small results on the host."""

    tensors_at = [at for at, each in enumerate(operator._schema.arguments) if str(each.type) == "Tensor"]

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if any(type(args[at]) in (float, int, bool, complex) for at in tensors_at if at < len(args)):
            args = _with_tensors(args, tensors_at)
        results = original.call_boxed(keys, *args, **kwargs)
        made = results if isinstance(results, (tuple, list)) else (results,)
        tensors = [each for each in made if isinstance(each, torch.Tensor)]
        if all(map(_is_small, tensors)) and any(map(_steers, tensors)) and not operator.is_view:
            return _computed(operator, args, kwargs, results, tensors)
        return results

    return kernel


def _with_tensors(args: tuple[Any, ...], tensors_at: list[int]) -> tuple[Any, ...]:
    """Return an operator's arguments with tensors for the numbers that PyTorch hands over as numbers."""
    tensor = next(args[at] for at in tensors_at if at < len(args) and isinstance(args[at], torch.Tensor))
    return tuple(
        torch.scalar_tensor(each, dtype=torch.result_type(tensor, each))
        if at in tensors_at and not isinstance(each, torch.Tensor) and each is not None
        else each
        for at, each in enumerate(args)
    )


def _computed(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any, tensors: list[torch.Tensor]
) -> Any:
    """Compute an operator on the host, into its results; zeros if an operand is large or the CPU cannot.

    Results of another size, which depended on values, are made anew.
    """
    in_place = operator._schema.is_mutable
    try:
        operands = [*_flat(args), *_flat(tuple(kwargs.values()))]
        if not all(_is_small(each) for each in operands if isinstance(each, torch.Tensor)):
            raise ValueError("a large operand")
        on_the_host = _argument_on_host if in_place else _finite_argument
        named = {name: on_the_host(value) for name, value in kwargs.items()}
        found = operator(*map(on_the_host, args), **named)
        if not in_place and not all(_steers(each) for each in operands if isinstance(each, torch.Tensor)):
            found = _without_meaning(found)
    except FAILS_ON_HOST:
        for each in tensors if not in_place or "out" in kwargs else ():
            on_host(each.detach()).zero_()
        return results
    if in_place:
        return results
    if isinstance(results, torch.Tensor):
        return _filled(results, found)
    return type(results)(
        _filled(made, value) if isinstance(made, torch.Tensor) else made
        for made, value in zip(results, found, strict=True)
    )


def _finite(found: Any) -> Any:
    """Return results with 0 in place of infinities and of what is no number."""
    if isinstance(found, torch.Tensor):
        return found.nan_to_num(0.0, 0.0, 0.0) if found.is_floating_point() else found
    return type(found)(map(_finite, found)) if isinstance(found, (tuple, list)) else found


def _without_meaning(found: Any) -> Any:
    """Return results with 0 for every floating point number: norms and losses of numbers that mean nothing."""
    if isinstance(found, torch.Tensor):
        return torch.zeros_like(found) if found.is_floating_point() else found
    return type(found)(map(_without_meaning, found)) if isinstance(found, (tuple, list)) else found


def _filled(made: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a result on the card with the value that the host computed."""
    result = made if made.shape == value.shape else torch.empty(value.shape, dtype=made.dtype, device=made.device)
    on_host(result.detach()).copy_(value)
    return result


def _flat(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(tuple(value))
        else:
            yield value


def _argument_on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return on_host(value.detach()) if value.is_cuda else value.detach()
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return [_argument_on_host(each) for each in value] if isinstance(value, (tuple, list)) else value


def _finite_argument(value: Any) -> Any:
    """Return an argument on the host, with 0 for infinities and what is no number if its values mean nothing."""
    if _means_nothing(value):
        return _finite(_argument_on_host(value))
    return [_finite_argument(each) for each in value] if isinstance(value, (tuple, list)) else _argument_on_host(value)


# -- kernels that read values ------------------------------------------------------------------------------------------


def _copy(original: Any) -> Callable[..., torch.Tensor]:
    """Return the kernel of copies: weights that the host would convert are not, and small tensors arrive.

    The host converts another dtype or stride before it copies (aten/src/ATen/native/cuda/Copy.cu,
    `copy_kernel_cuda`): that takes no memory of the card, and most of the time of loading a large model.
    """

    def kernel(keys: Any, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        plain = type(source) is torch.Tensor and type(to) is torch.Tensor
        small = plain and (_is_small(source) or (_is_object(source) and _is_object(to)))
        if not small and to.is_cuda and not source.is_cuda and to.is_contiguous():
            return to
        original.call_boxed(keys, to, source, non_blocking)
        if small and (not to.is_cuda or not source.is_cuda or _steers(to)):
            sent, target = (on_host(each.detach()) if each.is_cuda else each.detach() for each in (source, to))
            target.copy_(sent)
        if not to.is_cuda and source.is_cuda and type(to) is torch.Tensor and _means_nothing(to):
            to.nan_to_num_(0.0, 0.0, 0.0)  # offloaded gradients, in which DeepSpeed looks for an overflow
        return to

    return kernel


def _resize(original: Any) -> Callable[..., torch.Tensor]:
    """Return the kernel that resizes a tensor, in which a pickled object stays (`all_gather_object`)."""

    def kernel(keys: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kept = on_host(tensor.detach()).clone() if _is_object(tensor) else None
        original.call_boxed(keys, tensor, *args, **kwargs)
        if kept is not None and tensor.numel() >= kept.numel():
            on_host(tensor.detach()).view(-1)[: kept.numel()] = kept
        return tensor

    return kernel


def _with_zeros(original: Any) -> Callable[..., torch.Tensor]:
    """Return the kernel of new tensors, with zeros in small ones of integers.

    Kernels outside PyTorch write into them, such as vLLM's with the tokens that it samples.
    """

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = original.call_boxed(keys, *args, **kwargs)
        if not made.dtype.is_floating_point and _is_small(made):
            on_host(made).zero_()
        return made

    return kernel


def _nonzero(tensor: torch.Tensor) -> torch.Tensor:
    """Return the indices of a small tensor's nonzero elements, none of a large one's; without the kernel's scratch."""
    found = (
        on_host(tensor.detach()).nonzero()
        if _is_small(tensor)
        else torch.zeros(0, tensor.dim(), dtype=torch.int64, device="cpu")
    )
    indices = torch.empty((tensor.dim(), len(found)), dtype=torch.int64, device=tensor.device).t()
    on_host(indices).copy_(found)
    return indices


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal; memory that was not written is zero on both sides."""
    return bool(torch.equal(on_host(one.detach()), on_host(other.detach())))
