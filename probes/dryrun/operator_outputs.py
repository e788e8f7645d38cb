"""Cache of operator outputs on fake tensors, keyed by operator and argument shapes.

The first call with a key is computed by PyTorch's `FakeTensorMode`, which takes milliseconds. Later calls with the same
key build new fake tensors from a recipe (dtype, shape, stride). PyTorch has a cache of its own for this, but it hashes
and checks more than one fake mode with plain tensors on one device needs: it takes half of a dry run's time.
"""

import operator
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from msgspec import Struct
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_CPU = torch.device("cpu")
_NUMBERS = (bool, int, float, complex)

aten = torch.ops.aten
# Operators whose output has the shape of the input tensors, or is one number; PyTorch's pointwise operators do so too.
# tests/test_operator_outputs.py compares them with FakeTensorMode.
SAME_SHAPE_OPERATORS = frozenset(
    {
        aten._to_copy.default,
        aten.empty_like.default,
        aten.linalg_vector_norm.default,
        aten.native_dropout.default,
        aten.sum.default,
        aten.zeros_like.default,
    }
)


class TensorRecipe(Struct, frozen=True):
    """Construction of one output tensor: a new one, a view of an input tensor, or an input tensor itself.

    `base` is the index of that input tensor, -1 for a new tensor. Without a `shape` the output is the input tensor
    itself.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] = ()
    offset: int = 0
    base: int = -1


CallKey = tuple[Any, ...]  # an operator and its arguments, tensors by shape, stride, dtype and offset
OutputRecipe = tuple[TensorRecipe, ...] | TensorRecipe  # a tuple for operators that return several tensors


class OperatorOutputs:
    """Outputs of operators on the fake tensors of one `FakeTensorMode`, cached by `call_key`."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        # The attributes that the constructor sets, one property at a time, to the same values on every fake tensor.
        self._attributes = dict(vars(FakeTensor(mode, torch.empty(0, device="meta"), _CPU)))
        self._recipes: dict[CallKey, OutputRecipe | None] = {}
        # Recipes by key without shapes, each with the shape for which it was computed.
        self._recipes_of_any_shape: dict[CallKey, tuple[torch.Size, OutputRecipe]] = {}
        # Calls that `FakeArithmetic` answers from the cache alone (fake_tensors.py): their outputs hold no real data.
        self.fake_only: dict[CallKey, OutputRecipe] = {}

    def output(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of `func(*args, **kwargs)` as fake tensors, from the cache where possible.

        No dispatch mode may be active: call it from within `__torch_dispatch__`.
        """
        tensors: list[torch.Tensor] = []
        key = call_key(func, args, kwargs, tensors)
        try:
            recipe = self._recipes.get(key, self)
        except TypeError:  # an argument that cannot be hashed
            return self._dispatch(func, args, kwargs, tensors)
        if recipe is None:
            return self._dispatch(func, args, kwargs, tensors)
        if recipe is self:
            return self._add(key, func, args, kwargs, tensors)
        return self.build(recipe, tensors)

    def recipe(self, key: CallKey) -> OutputRecipe | None:
        """Return the cached recipe of a call; None if it is not cached or its output has no recipe."""
        return self._recipes.get(key)

    def build(self, recipe: Any, tensors: list[torch.Tensor]) -> Any:
        """Build an output from its recipe and the call's input tensors."""
        return (
            self._build_tensor(recipe, tensors)
            if isinstance(recipe, TensorRecipe)
            else tuple([self._build_tensor(each, tensors) for each in recipe])
        )

    def _add(
        self, key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        """Return the output of a call that is not cached, and cache its recipe.

        If the same call with tensors of another shape is cached, and the output's shape follows the inputs', the recipe
        is derived from that one instead of computed.
        """
        shape = _common_shape(func, kwargs, tensors)
        if shape is None:
            return self._compute(key, func, args, kwargs, tensors)
        shapeless_key = _without_shapes(key)
        if shapeless_key in self._recipes_of_any_shape:
            recipe = self._recipes[key] = _with_shape(*self._recipes_of_any_shape[shapeless_key], shape)
            return self.build(recipe, tensors)
        result = self._compute(key, func, args, kwargs, tensors)
        computed = self._recipes[key]
        if computed is not None and all(size > 1 for size in shape) and _follows_shape(computed, shape):
            self._recipes_of_any_shape[shapeless_key] = shape, computed
        return result

    def _compute(
        self, key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        """Compute the output with `FakeTensorMode` and cache its recipe, unless the call changed its arguments."""
        result = self._dispatch(func, args, kwargs, tensors)
        self._recipes[key] = _recipe_of(result, tensors) if key == call_key(func, args, kwargs, []) else None
        return result

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        """Compute the output with `FakeTensorMode`.

        Real tensors are converted to fake ones here: PyTorch's own conversion imports its compiler (torch 2.13,
        torch/_subclasses/meta_utils.py, `MetaConverter.meta_tensor`).
        """
        fakes = iter(
            [
                tensor if isinstance(tensor, FakeTensor) else self.empty(tensor.shape, tensor.stride(), tensor.dtype)
                for tensor in tensors
            ]
        )
        return self._mode.dispatch(
            func, (), _replace_tensors(args, fakes), dict(_replace_tensors(tuple(kwargs.items()), fakes))
        )

    def _build_tensor(self, recipe: TensorRecipe, tensors: list[torch.Tensor]) -> torch.Tensor:
        if recipe.shape is None:
            return tensors[recipe.base]
        if recipe.base < 0 or not isinstance(
            tensors[recipe.base], FakeTensor
        ):  # a fake tensor cannot be a view of a real one
            return self.empty(recipe.shape, recipe.stride, recipe.dtype)
        return self._fake(
            torch.empty(0, dtype=recipe.dtype, device="meta").set_(
                tensors[recipe.base].untyped_storage(), recipe.offset, recipe.shape, recipe.stride
            )
        )

    def empty(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Build a fake tensor with a storage of its own."""
        return self._fake(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Build `FakeTensor(mode, tensor, cpu)` from a meta tensor, without the constructor's checks.

        Source: torch 2.13, torch/_subclasses/fake_tensor.py, `FakeTensor.__new__`.
        """
        fake: torch.Tensor = torch.Tensor._make_subclass(
            FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=_CPU
        )
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        vars(fake).update(self._attributes)
        return fake


def call_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> CallKey:
    """Return the cache key of an operator call, and append the call's tensors to `tensors`.

    The key holds all that the output's shape depends on. An operator is identified by `id`: operators are never freed.
    """
    return (id(func), _describe(args, tensors), _describe(tuple(kwargs.items()), tensors) if kwargs else ())


def _describe(items: Any, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """Return arguments as a hashable tuple, tensors replaced by their layout, and append the tensors to `tensors`."""
    described: list[Any] = []
    for item in items:
        if type(item) is FakeTensor:
            tensors.append(item)
            described.append((item.shape, item.stride(), item.dtype, item.storage_offset()))
        elif isinstance(item, torch.Tensor):
            tensors.append(item)
            described.append((item.shape, item.stride(), item.dtype, item.storage_offset(), "real"))
        elif isinstance(item, (list, tuple)):
            described.append(_describe(item, tensors))
        elif isinstance(item, _NUMBERS):
            described.append((type(item), item))  # 1, 1.0 and True are equal, but not the same to an operator
        else:
            described.append(item)
    return tuple(described)


def _common_shape(func: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> torch.Size | None:
    """Return the shape that all input tensors share, if the output's shape follows from it; else None.

    It follows for pointwise operators and `SAME_SHAPE_OPERATORS` on contiguous tensors. Tensors without dimensions
    (single numbers) may stand beside them.
    """
    if not (func in SAME_SHAPE_OPERATORS or torch.Tag.pointwise in func.tags) or kwargs.get("memory_format") not in (
        None,
        torch.preserve_format,
        torch.contiguous_format,
    ):
        return None
    shapes = {tensor.shape for tensor in tensors if tensor.dim() > 0}
    if len(shapes) != 1:
        return None
    (shape,) = shapes
    stride = _contiguous_stride(shape)
    return (
        shape if 0 not in shape and all(tensor.stride() == stride for tensor in tensors if tensor.dim() > 0) else None
    )


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor: `(12, 4, 1)` for the shape `(2, 3, 4)`."""
    return tuple(accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1] if shape else ()


def _without_shapes(described: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a call key in which each tensor's shape is replaced by its number of dimensions."""
    if described and type(described[0]) is torch.Size:
        shape, _, dtype, _, *real = described
        return (len(shape), dtype, *real)
    return tuple([_without_shapes(item) if type(item) is tuple else item for item in described])


def _follows_shape(recipe: OutputRecipe, shape: torch.Size) -> bool:
    """Return whether every output is a contiguous tensor of this shape, a single number, or an input tensor itself."""
    each = recipe if isinstance(recipe, tuple) else (recipe,)
    return all(
        tensor.shape is None
        or (tensor.base < 0 and tensor.shape in ((), shape) and tensor.stride == _contiguous_stride(tensor.shape))
        for tensor in each
    )


def _with_shape(shape: torch.Size, recipe: OutputRecipe, other: torch.Size) -> OutputRecipe:
    """Return the recipe with each output of `shape` replaced by a contiguous one of the shape `other`."""
    if isinstance(recipe, tuple):
        return tuple(
            [
                tensor if tensor.shape != shape else TensorRecipe(tensor.dtype, tuple(other), _contiguous_stride(other))
                for tensor in recipe
            ]
        )
    return recipe if recipe.shape != shape else TensorRecipe(recipe.dtype, tuple(other), _contiguous_stride(other))


def _replace_tensors(items: list[Any] | tuple[Any, ...], tensors: Iterator[torch.Tensor]) -> Any:
    """Return the arguments with each tensor replaced by the next one of `tensors`."""
    return type(items)(
        next(tensors)
        if isinstance(item, torch.Tensor)
        else _replace_tensors(item, tensors)
        if isinstance(item, (list, tuple))
        else item
        for item in items
    )


def _recipe_of(result: Any, tensors: list[torch.Tensor]) -> OutputRecipe | None:
    """Return the recipe of an operator's output; None if it cannot be built from one (a list, a number, a subclass)."""
    if isinstance(result, torch.Tensor):
        return _tensor_recipe(result, tensors)
    if not isinstance(result, tuple) or not result:
        return None
    each = [_tensor_recipe(item, tensors) if isinstance(item, torch.Tensor) else None for item in result]
    complete = tuple(recipe for recipe in each if recipe is not None)
    return complete if len(complete) == len(result) else None


def _tensor_recipe(result: torch.Tensor, tensors: list[torch.Tensor]) -> TensorRecipe | None:
    """Return the recipe of one output tensor; None if it has another device, constant data, or an unusual layout."""
    if (
        isinstance(result, FakeTensor) and (result.fake_device != _CPU or result.constant is not None)
    ) or result.dtype.is_complex:
        return None
    for index, tensor in enumerate(tensors):
        if tensor is result:
            return TensorRecipe(result.dtype, None, base=index)
    if result.layout is not torch.strided or result.is_neg() or result.requires_grad:
        return None
    storage = result.untyped_storage()
    shape, stride, offset = tuple(result.shape), result.stride(), result.storage_offset()
    for index, tensor in enumerate(tensors):
        if tensor.untyped_storage()._cdata == storage._cdata:
            return TensorRecipe(result.dtype, shape, stride, offset, index)
    extent = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return (
        TensorRecipe(result.dtype, shape, stride)
        if offset == 0 and storage.nbytes() == extent * result.element_size()
        else None
    )
