"""What operators return on fake tensors: asked of PyTorch's meta device or fake mode once for each shape of the arguments, and made again from then on.

PyTorch's own cache of such answers hashes and checks more than one fake mode of plain tensors on one device needs: it takes half of a dry run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_CPU = torch.device("cpu")
_NUMBERS = (bool, int, float, complex)

aten = torch.ops.aten
# Operators that PyTorch's fake mode does nothing about but run on the meta device, which takes a tenth of the time: tests/test_fake_results.py.
PLAIN = frozenset(
    {aten.add_.Tensor, aten.add.Tensor, aten.addmm.default, aten.bitwise_and.Tensor, aten.bitwise_not.default, aten.bitwise_or.Tensor,
     aten.bmm.default, aten.cat.default, aten.clamp.default, aten.clone.default, aten.copy_.default, aten.detach.default, aten.div.Tensor,
     aten.embedding.default, aten.eq.Scalar, aten.exp.default, aten.expand.default, aten.gather.default, aten.ge.Scalar, aten.gt.Scalar,
     aten.le.Scalar, aten.linalg_vector_norm.default, aten.log.default, aten.logsumexp.default, aten.lt.Scalar, aten.masked_fill_.Scalar,
     aten.masked_fill.Scalar, aten.mean.dim, aten.mm.default, aten.mul.Scalar, aten.mul_.Tensor, aten.mul.Tensor, aten.ne.Scalar, aten.neg.default,
     aten.pow.Tensor_Scalar, aten.rsqrt.default, aten.select.int, aten.silu.default, aten.silu_backward.default, aten.slice.Tensor,
     aten.slice_backward.default, aten.squeeze.dim, aten.sub.Tensor, aten.sub_.Tensor, aten.sum.default, aten.sum.dim_IntList, aten.t.default,
     aten._to_copy.default, aten.transpose.int, aten._unsafe_view.default, aten.unsqueeze.default, aten.view.default, aten.where.ScalarOther,
     aten.where.self, aten.zero_.default}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that an operator makes, or a view of the `base`th tensor of its arguments, or, without a shape, that tensor itself."""

    dtype: torch.dtype
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] = ()
    offset: int = 0
    base: int = -1


Question = tuple[Any, ...]
Answer = tuple[_Made, ...] | _Made


class FakeResults:
    """The results of operators on fake tensors of one mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        # What the constructor sets, one property at a time, on every fake tensor alike.
        self._attributes = dict(vars(FakeTensor(mode, torch.empty(0, device="meta"), _CPU)))
        self._known: dict[Question, Answer | None] = {}
        self.whole: dict[Question, Answer] = {}  # of the questions that are answered by shapes alone (tensors.py)

    def of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func(*args, **kwargs)`. No dispatch mode may be on: call it from within one."""
        tensors: list[torch.Tensor] = []
        key = question(func, args, kwargs, tensors)
        try:
            known = self._known.get(key, self)
        except TypeError:  # an argument that cannot be hashed
            return self._dispatched(func, args, kwargs, tensors)
        if known is None:
            return self._dispatched(func, args, kwargs, tensors)
        if known is self:
            return self._asked(key, func, args, kwargs, tensors)
        return self.made(known, tensors)

    def known(self, key: Question) -> Answer | None:
        """How results of such a question are made; None where it was not asked or they are not alike."""
        return self._known.get(key)

    def made(self, answer: Any, tensors: list[torch.Tensor]) -> Any:
        """A result, from the tensors of the question."""
        return self._make(answer, tensors) if isinstance(answer, _Made) else tuple([self._make(each, tensors) for each in answer])

    def _asked(self, key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        if func in PLAIN and "device" not in kwargs:
            shapes = [_on_meta(tensor) for tensor in tensors]
            given = iter(shapes)
            answer = _answer(func(*_with(args, given), **dict(_with(tuple(kwargs.items()), given))), shapes)
            if answer is not None:
                self._known[key] = answer
                return self.made(answer, tensors)
        result = self._dispatched(func, args, kwargs, tensors)
        self._known[key] = _answer(result, tensors) if key == question(func, args, kwargs, []) else None
        return result

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        """What the fake mode says. Real tensors become fake ones here: PyTorch's own way of that imports its compiler (torch 2.13, meta_utils.py:1048)."""
        fakes = iter([tensor if isinstance(tensor, FakeTensor) else self.empty(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])
        return self._mode.dispatch(func, (), _with(args, fakes), dict(_with(tuple(kwargs.items()), fakes)))

    def _make(self, made: _Made, tensors: list[torch.Tensor]) -> torch.Tensor:
        if made.shape is None:
            return tensors[made.base]
        if made.base < 0 or not isinstance(tensors[made.base], FakeTensor):  # of a real tensor no fake one can be a view
            return self.empty(made.shape, made.stride, made.dtype)
        return self._fake(torch.empty(0, dtype=made.dtype, device="meta").set_(tensors[made.base].untyped_storage(), made.offset, made.shape, made.stride))

    def empty(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor of its own storage."""
        return self._fake(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """`FakeTensor(mode, tensor, cpu)` (torch 2.13, torch/_subclasses/fake_tensor.py `FakeTensor.__new__`)."""
        made: torch.Tensor = torch.Tensor._make_subclass(FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=_CPU)
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
        vars(made).update(self._attributes)
        return made


def question(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Question:
    """An operator (which is there for good) and its arguments as far as results depend on them; their tensors are appended to `tensors`."""
    return (id(func), _described(args, tensors), _described(tuple(kwargs.items()), tensors) if kwargs else ())


def _described(items: Any, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    found: list[Any] = []
    for item in items:
        if type(item) is FakeTensor:
            tensors.append(item)
            found.append((item.shape, item.stride(), item.dtype, item.storage_offset()))
        elif isinstance(item, torch.Tensor):
            tensors.append(item)
            found.append((item.shape, item.stride(), item.dtype, item.storage_offset(), "real"))
        elif isinstance(item, (list, tuple)):
            found.append(_described(item, tensors))
        elif isinstance(item, _NUMBERS):
            found.append((type(item), item))  # 1, 1.0 and True are equal, but not the same to an operator
        else:
            found.append(item)
    return tuple(found)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without numbers; a fake one's shares its storage, so that views of it are known."""
    if not isinstance(tensor, FakeTensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    made = torch.empty(0, dtype=tensor.dtype, device="meta")
    return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _with(items: list[Any] | tuple[Any, ...], tensors: Iterator[torch.Tensor]) -> Any:
    """Arguments with other tensors."""
    return type(items)(next(tensors) if isinstance(item, torch.Tensor) else _with(item, tensors) if isinstance(item, (list, tuple)) else item for item in items)


def _answer(result: Any, tensors: list[torch.Tensor]) -> tuple[_Made, ...] | _Made | None:
    """How to make the result again; None where that is not known."""
    if isinstance(result, torch.Tensor):
        return _made(result, tensors)
    if not isinstance(result, tuple) or not result:
        return None
    each = [_made(item, tensors) if isinstance(item, torch.Tensor) else None for item in result]
    whole = tuple(made for made in each if made is not None)
    return whole if len(whole) == len(result) else None


def _made(result: torch.Tensor, tensors: list[torch.Tensor]) -> _Made | None:
    if (isinstance(result, FakeTensor) and (result.fake_device != _CPU or result.constant is not None)) or result.dtype.is_complex:
        return None
    for index, tensor in enumerate(tensors):
        if tensor is result:
            return _Made(result.dtype, None, base=index)
    if result.layout is not torch.strided or result.is_neg() or result.requires_grad:
        return None
    storage = result.untyped_storage()
    shape, stride, offset = tuple(result.shape), result.stride(), result.storage_offset()
    for index, tensor in enumerate(tensors):
        if tensor.untyped_storage()._cdata == storage._cdata:
            return _Made(result.dtype, shape, stride, offset, index)
    extent = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return _Made(result.dtype, shape, stride) if offset == 0 and storage.nbytes() == extent * result.element_size() else None
