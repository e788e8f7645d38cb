"""What operators return on fake tensors: asked of PyTorch's fake mode once for each shape of the arguments, and made again from then on.

PyTorch's own cache of such answers hashes and checks more than one fake mode of plain tensors on one device needs: it takes half of a dry run.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_CPU = torch.device("cpu")
_NUMBERS = (bool, int, float, complex)

aten = torch.ops.aten
# Besides PyTorch's pointwise operators those that make something of the shape of their tensors, or one number: tests/test_fake_results.py.
ALIKE = frozenset(
    {
        aten._to_copy.default,
        aten.empty_like.default,
        aten.linalg_vector_norm.default,
        aten.native_dropout.default,
        aten.sum.default,
        aten.zeros_like.default,
    }
)


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
        self._of_any_shape: dict[
            Question, tuple[torch.Size, Answer]
        ] = {}  # an answer, and the one shape of all tensors that it was given for
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
        return (
            self._make(answer, tensors)
            if isinstance(answer, _Made)
            else tuple([self._make(each, tensors) for each in answer])
        )

    def _asked(
        self, key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        shape = _shape_of_all(func, kwargs, tensors)
        if shape is None:
            return self._asked_of_pytorch(key, func, args, kwargs, tensors)
        like = _without_shapes(key)
        if like in self._of_any_shape:
            answer = self._known[key] = _reshaped(*self._of_any_shape[like], shape)
            return self.made(answer, tensors)
        result = self._asked_of_pytorch(key, func, args, kwargs, tensors)
        found = self._known[key]
        if found is not None and all(size > 1 for size in shape) and _follows(found, shape):
            self._of_any_shape[like] = shape, found
        return result

    def _asked_of_pytorch(
        self, key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        result = self._dispatched(func, args, kwargs, tensors)
        self._known[key] = _answer(result, tensors) if key == question(func, args, kwargs, []) else None
        return result

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        """What the fake mode says. Real tensors become fake ones here: PyTorch's own way of that imports its compiler (torch 2.13, meta_utils.py:1048)."""
        fakes = iter(
            [
                tensor if isinstance(tensor, FakeTensor) else self.empty(tensor.shape, tensor.stride(), tensor.dtype)
                for tensor in tensors
            ]
        )
        return self._mode.dispatch(func, (), _with(args, fakes), dict(_with(tuple(kwargs.items()), fakes)))

    def _make(self, made: _Made, tensors: list[torch.Tensor]) -> torch.Tensor:
        if made.shape is None:
            return tensors[made.base]
        if made.base < 0 or not isinstance(
            tensors[made.base], FakeTensor
        ):  # of a real tensor no fake one can be a view
            return self.empty(made.shape, made.stride, made.dtype)
        return self._fake(
            torch.empty(0, dtype=made.dtype, device="meta").set_(
                tensors[made.base].untyped_storage(), made.offset, made.shape, made.stride
            )
        )

    def empty(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor of its own storage."""
        return self._fake(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """`FakeTensor(mode, tensor, cpu)` (torch 2.13, torch/_subclasses/fake_tensor.py `FakeTensor.__new__`)."""
        made: torch.Tensor = torch.Tensor._make_subclass(
            FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=_CPU
        )
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


def _shape_of_all(func: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> torch.Size | None:
    """The one shape of all tensors but single numbers, where results follow from it whatever it is: with its elements in order, none left out."""
    if not (func in ALIKE or torch.Tag.pointwise in func.tags) or kwargs.get("memory_format") not in (
        None,
        torch.preserve_format,
        torch.contiguous_format,
    ):
        return None
    shapes = {tensor.shape for tensor in tensors if tensor.dim() > 0}
    if len(shapes) != 1:
        return None
    (shape,) = shapes
    stride = _in_order(shape)
    return (
        shape if 0 not in shape and all(tensor.stride() == stride for tensor in tensors if tensor.dim() > 0) else None
    )


def _in_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor whose elements follow one another."""
    return tuple(accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1] if shape else ()


def _without_shapes(described: tuple[Any, ...]) -> tuple[Any, ...]:
    """A question, of whose tensors only the number of dimensions is known."""
    if described and type(described[0]) is torch.Size:
        shape, _, dtype, _, *real = described
        return (len(shape), dtype, *real)
    return tuple([_without_shapes(item) if type(item) is tuple else item for item in described])


def _follows(answer: Answer, shape: torch.Size) -> bool:
    """Whether all that is made has the shape, or is one number, or is one of the question's tensors."""
    each = answer if isinstance(answer, tuple) else (answer,)
    return all(
        made.shape is None or (made.base < 0 and made.shape in ((), shape) and made.stride == _in_order(made.shape))
        for made in each
    )


def _reshaped(shape: torch.Size, answer: Answer, other: torch.Size) -> Answer:
    """An answer for tensors of a shape as it is for those of another one."""
    if isinstance(answer, tuple):
        return tuple(
            [made if made.shape != shape else _Made(made.dtype, tuple(other), _in_order(other)) for made in answer]
        )
    return answer if answer.shape != shape else _Made(answer.dtype, tuple(other), _in_order(other))


def _with(items: list[Any] | tuple[Any, ...], tensors: Iterator[torch.Tensor]) -> Any:
    """Arguments with other tensors."""
    return type(items)(
        next(tensors)
        if isinstance(item, torch.Tensor)
        else _with(item, tensors)
        if isinstance(item, (list, tuple))
        else item
        for item in items
    )


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
    if (
        isinstance(result, FakeTensor) and (result.fake_device != _CPU or result.constant is not None)
    ) or result.dtype.is_complex:
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
    return (
        _Made(result.dtype, shape, stride)
        if offset == 0 and storage.nbytes() == extent * result.element_size()
        else None
    )
