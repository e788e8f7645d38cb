"""Fake weights: floating tensors have shapes but no data, small integers and booleans stay real.

So every length, mask, label count and truth test of the trainer is computed for real, and only the arithmetic is left out.
"""

from functools import lru_cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from probes.dryrun.operator_outputs import FakeResults, Question, question

aten = torch.ops.aten
_DEVICE, _CPU = torch.ops.prim.device.default, torch.device("cpu")
_OF_NO_TENSORS = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)

# Integers and booleans above this are fake as well: a trainer reads no value from as large a mask.
REAL_BYTES_LIMIT = 2**26
# Floating numbers above this, computed from whole masks, are fake: an additive mask of every pair of tokens, but no weights of a row's tokens.
REAL_NUMBERS_BYTES = 2**20
# Arguments up to this are not asked what they would grow into: an outer product of two such masks stays within memory.
SMALL_BYTES = 2**14
# What a fake number is read as, and the token that is "sampled" from fake logits. The dry run's tokenizer gives it no meaning.
UNKNOWN_NUMBER = 1


class FakeArithmetic(TorchDispatchMode):
    """Runs operators with a fake argument on fake tensors of one mode, all others for real unless they would make something large."""

    def __init__(self) -> None:
        super().__init__()
        self.fake_mode, self._results = _mode_and_results()
        self._answers = self._results.whole

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper around `__torch_dispatch__`, which would import the compiler."""
        return False

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor on the CPU shaped as `tensor`, which may be on the meta device."""
        return self._results.empty(tuple(tensor.size()), tensor.stride(), tensor.dtype)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _CPU if func is _DEVICE else self.result(func, args, kwargs or {})

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator returns. No dispatch mode may be on: call it from within one."""
        tensors: list[torch.Tensor] = []
        key = question(func, args, kwargs, tensors)
        try:
            answer = self._answers.get(key)
        except TypeError:  # an argument that cannot be hashed
            return self._computed(func, args, kwargs, tensors, None)
        return (
            self._computed(func, args, kwargs, tensors, key) if answer is None else self._results.made(answer, tensors)
        )

    def _computed(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        key: Question | None,
    ) -> Any:
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._without_fakes(func, args, kwargs, tensors)
        if func is aten._local_scalar_dense.default:
            return torch.tensor(UNKNOWN_NUMBER, dtype=args[0].dtype).item()
        if func is aten.is_nonzero.default or func is aten.equal.default:
            return False
        return self._with_fakes(func, args, kwargs, key)

    def _without_fakes(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        if tensors and (
            all(_bytes(tensor) <= SMALL_BYTES for tensor in tensors) or _reads_data(func) or _makes_nothing(func)
        ):
            return func(*args, **kwargs)
        if func in _OF_NO_TENSORS:
            return func(*args, **kwargs)
        shaped = self._results.of(func, args, kwargs)
        if not isinstance(shaped, torch.Tensor):
            return func(*args, **kwargs)
        number = (
            shaped.is_floating_point() and shaped.numel() > 1 and (not tensors or _bytes(shaped) > REAL_NUMBERS_BYTES)
        )
        return shaped if number or _bytes(shaped) > REAL_BYTES_LIMIT else func(*args, **kwargs)

    def _with_fakes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Question | None) -> Any:
        if func is aten._grouped_mm.default:
            return self._grouped_products(*args, **kwargs)
        counted = _with_counted_indices(func, args)
        shaped = self._results.of(func, counted, kwargs)
        result = _with_data(func, args, kwargs, shaped)
        if (
            key is not None
            and result is shaped
            and counted is args
            and (answer := self._results.known(key)) is not None
        ):
            self._answers[key] = answer
        return result

    def _grouped_products(self, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, **_: Any) -> torch.Tensor:
        """Products of groups of rows (experts'): PyTorch's own fake kernel knows them in bfloat16 only, the real ones take what they are given.

        Autocast leaves them as they are: with float32 weights they are in float32.
        Source: `create_grouped_gemm_output_tensor` and `_grouped_mm_cuda`, aten/src/ATen/native/GroupedMMUtils.h and cuda/GroupedBlas.cpp;
        `_grouped_mm`, transformers 5.23 integrations/moe.py. Leaves out that CUDA rounds rows up to 16 bytes.
        """
        groups = (offs.size(0),) if a.dim() == b.dim() == 2 else ()
        with self.fake_mode:
            return torch.empty((*groups, a.size(-2), b.size(-1)), dtype=a.dtype)


@lru_cache(maxsize=1)
def _mode_and_results() -> tuple[FakeTensorMode, FakeResults]:
    """One mode for all dry runs of a process, so that what one has asked the next one knows. PyTorch's own cache of answers would be asked in vain."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode, FakeResults(mode)


def tensors_in(items: Any) -> list[torch.Tensor]:
    """The tensors of an operator's arguments or results: bare, in lists and in tuples."""
    found: list[torch.Tensor] = []
    for item in items:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found.extend(tensors_in(item))
    return found


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _makes_nothing(func: Any) -> bool:
    """Whether an operator writes into what it is given or returns a view of it."""
    return func._schema.is_mutable or any(returned.alias_info is not None for returned in func._schema.returns)


def _reads_data(func: Any) -> bool:
    """Whether the shape of the result depends on the data, so that it cannot be asked for without computing it."""
    return (
        func in (aten.index.Tensor, aten.index_put_.default)
        or torch.Tag.dynamic_output_shape in func.tags
        or torch.Tag.data_dependent_output in func.tags
    )


def _with_counted_indices(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Boolean masks as the indices they stand for: `hidden[mask]` has as many rows as the real mask has ones."""
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


def _with_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shaped: Any) -> Any:
    """A result, of which what is counted and tested has data: `shaped` itself where it is all fake, or written into what is."""
    if func._schema.is_mutable:
        target = kwargs.get("out", args[0] if args else None)
        return target if isinstance(target, torch.Tensor) and not isinstance(target, FakeTensor) else shaped
    if _makes_nothing(func) or func is aten.native_dropout.default:  # nobody counts what was dropped
        return shaped
    if isinstance(shaped, FakeTensor):
        return _with_data_if_whole(shaped)
    whole = tree_map_only(FakeTensor, _with_data_if_whole, shaped)
    return (
        shaped
        if isinstance(shaped, tuple) and all(one is other for one, other in zip(shaped, whole, strict=True))
        else whole
    )


def _with_data_if_whole(tensor: FakeTensor) -> torch.Tensor:
    """Integers and booleans computed from fake numbers become real ones, so that they can be counted and tested."""
    if tensor.is_floating_point() or tensor.is_complex() or _bytes(tensor) > REAL_BYTES_LIMIT:
        return tensor
    return torch.full(tensor.shape, False if tensor.dtype == torch.bool else UNKNOWN_NUMBER, dtype=tensor.dtype)
