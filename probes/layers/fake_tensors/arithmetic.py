"""Fake arithmetic: floating-point tensors have shapes but no data, small integer and boolean tensors stay real.

Positions, masks and `if tensor:` tests are therefore computed for real; only the arithmetic of the layer is left out.
"""

from functools import lru_cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
_DEVICE, _CPU = torch.ops.prim.device.default, torch.device("cpu")
# Operators without input tensors that are always run for real.
_PROFILER_OPERATORS = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)

# Integer and boolean tensors larger than this are fake too: nothing reads a value from such a large mask.
REAL_BYTES_LIMIT = 2**26
# Floating-point tensors larger than this that are computed from real masks are fake. The additive attention mask, with
# a number for every pair of tokens, is larger; a weight for every token of a row is smaller.
REAL_NUMBERS_BYTES = 2**20
# An operator whose arguments are all this small is run for real without computing the size of its output first: even
# the outer product of two such masks fits into the host's memory.
SMALL_BYTES = 2**14
# The value that `tensor.item()` returns for a fake tensor.
UNKNOWN_NUMBER = 1


class FakeArithmetic(TorchDispatchMode):
    """Dispatch mode that decides for each operator whether it runs on fake tensors or for real.

    An operator with a fake argument returns fake tensors. All others run for real, unless the output would be large.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mode = _fake_mode()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell PyTorch to call `__torch_dispatch__` without a wrapper: the wrapper would import the compiler."""
        return False

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake CPU tensor with the shape, stride and dtype of `tensor`, which may be on the meta device."""
        empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(self._mode, empty, _CPU)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the output of an operator. The value of a fake tensor is read as `UNKNOWN_NUMBER` or False."""
        kwargs = kwargs or {}
        if func is _DEVICE:
            return _CPU
        tensors = tensors_in((*args, *kwargs.values()))
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._compute_from_real(func, args, kwargs, tensors)
        if func is aten._local_scalar_dense.default:
            return torch.tensor(UNKNOWN_NUMBER, dtype=args[0].dtype).item()
        if func is aten.is_nonzero.default or func is aten.equal.default:
            return False
        if func is aten._grouped_mm.default:
            return self._grouped_matmul(*args, **kwargs)
        args = _expand_boolean_masks(func, args)
        return _with_real_integers(func, args, kwargs, self._shaped(func, args, kwargs))

    def _shaped(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of an operator as fake tensors."""
        args, kwargs = tree_map_only(torch.Tensor, self._as_fake, (args, kwargs))
        return self._mode.dispatch(func, (), args, kwargs)

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.fake(tensor)

    def _compute_from_real(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        """Run an operator without fake arguments for real, unless its output is large or holds random numbers."""
        if tensors and (
            all(_bytes(tensor) <= SMALL_BYTES for tensor in tensors) or _reads_data(func) or _allocates_nothing(func)
        ):
            return func(*args, **kwargs)
        if func in _PROFILER_OPERATORS:
            return func(*args, **kwargs)
        shaped = self._shaped(func, args, kwargs)
        if not isinstance(shaped, torch.Tensor):
            return func(*args, **kwargs)
        fake_number = (
            shaped.is_floating_point() and shaped.numel() > 1 and (not tensors or _bytes(shaped) > REAL_NUMBERS_BYTES)
        )
        return shaped if fake_number or _bytes(shaped) > REAL_BYTES_LIMIT else func(*args, **kwargs)

    def _grouped_matmul(self, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return the fake output of `aten._grouped_mm` (the products of a mixture of experts) in the dtype of `a`.

        PyTorch's own fake kernel accepts bfloat16 only; the real kernels accept every dtype, and autocast does not cast
        their arguments: with float32 weights they compute in float32.
        Source: `create_grouped_gemm_output_tensor` and `_grouped_mm_cuda`, aten/src/ATen/native/GroupedMMUtils.h and
        cuda/GroupedBlas.cpp; `_grouped_mm`, transformers 5.23 integrations/moe.py. Leaves out that CUDA rounds rows up
        to 16 bytes.
        """
        groups = (offs.size(0),) if a.dim() == b.dim() == 2 else ()
        with self._mode:
            return torch.empty((*groups, a.size(-2), b.size(-1)), dtype=a.dtype)


@lru_cache(maxsize=1)
def _fake_mode() -> FakeTensorMode:
    """Return the one fake mode of this process, whose cache of outputs all passes share."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def tensors_in(items: Any) -> list[torch.Tensor]:
    """Return the tensors among an operator's arguments or outputs, those inside lists and tuples included."""
    found: list[torch.Tensor] = []
    for item in items:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found.extend(tensors_in(item))
    return found


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _allocates_nothing(func: Any) -> bool:
    """Return whether an operator writes into its arguments or returns a view of them."""
    return func._schema.is_mutable or any(returned.alias_info is not None for returned in func._schema.returns)


def _reads_data(func: Any) -> bool:
    """Return whether the output's shape depends on the input's data, such as that of `nonzero`."""
    return (
        func in (aten.index.Tensor, aten.index_put_.default)
        or torch.Tag.dynamic_output_shape in func.tags
        or torch.Tag.data_dependent_output in func.tags
    )


def _expand_boolean_masks(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace real boolean masks of an indexing operator by their indices.

    `hidden[mask]` with a fake `hidden` then has as many rows as the real mask has ones.
    """
    if func not in (
        aten.index.Tensor,
        aten.index_put_.default,
        aten.index_put.default,
        aten._index_put_impl_.default,
        aten._unsafe_index.Tensor,
    ):
        return args
    indices: list[torch.Tensor | None] = []
    for index in args[1]:
        if index is not None and index.dtype in (torch.bool, torch.uint8) and not isinstance(index, FakeTensor):
            indices.extend(index.nonzero(as_tuple=True))
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])


def _with_real_integers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shaped: Any) -> Any:
    """Return an operator's fake output with its small integer and boolean tensors replaced by real ones.

    `shaped` itself is returned if no tensor is replaced, and the target if an operator writes into a real tensor.
    """
    if func._schema.is_mutable:
        target = kwargs.get("out", args[0] if args else None)
        return target if isinstance(target, torch.Tensor) and not isinstance(target, FakeTensor) else shaped
    if _allocates_nothing(func) or func is aten.native_dropout.default:  # nobody reads the dropout mask
        return shaped
    if isinstance(shaped, FakeTensor):
        return _real_if_integer(shaped)
    replaced = tree_map_only(FakeTensor, _real_if_integer, shaped)
    return (
        shaped
        if isinstance(shaped, tuple) and all(one is other for one, other in zip(shaped, replaced, strict=True))
        else replaced
    )


def _real_if_integer(tensor: FakeTensor) -> torch.Tensor:
    """Return a real tensor, filled with `UNKNOWN_NUMBER` or False, for a small fake one of integers or booleans."""
    if tensor.is_floating_point() or tensor.is_complex() or _bytes(tensor) > REAL_BYTES_LIMIT:
        return tensor
    return torch.full(tensor.shape, False if tensor.dtype == torch.bool else UNKNOWN_NUMBER, dtype=tensor.dtype)
