"""The tracker records the birth and the death of every tensor storage, in order, while code runs under it.

Tensors may be real or fake.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from planner.quantities import Component, Phase

aten = torch.ops.aten
# Autograd reads a tensor's device twice for each operator; the tracker returns it without running an operator.
_DEVICE, _CPU = torch.ops.prim.device.default, torch.device("cpu")
_ADD, _TO_COPY = aten.add.Tensor, aten._to_copy.default
# Operators that a backward formula calls in place on a tensor of its own, but out of place where a dispatch mode is on
# (`isTensorSubclassLike`, ATen/TensorSubclassLikeUtils.h): operator -> the one in place, and the nodes of autograd.
# Found by running 150 operators with and without the tracker; those of `cumprod`, `prod` and of
# `binary_cross_entropy_with_logits` with `pos_weight` take another formula under a mode, which is not corrected: no
# trainer calls them on large tensors.
# Source: pytorch 2.13, ATen/native/TensorAdvancedIndexing.cpp, `gather_backward`, `index_select_backward_symint` and
# `masked_select_backward`; ATen/native/ReduceOps.cpp, `value_selecting_reduction_backward_symint` and
# `cummaxmin_backward`; torch/csrc/autograd/FunctionsManual.cpp, `index_backward`.
_IN_PLACE_WITHOUT_MODE: dict[Any, tuple[Any, frozenset[str]]] = {
    aten.scatter_add.default: (aten.scatter_add_.default, frozenset({"GatherBackward0", "CummaxBackward0"})),
    aten.index_put.default: (aten.index_put_.default, frozenset({"IndexBackward0"})),
    aten.index_add.default: (aten.index_add_.default, frozenset({"IndexSelectBackward0"})),
    aten.masked_scatter.default: (aten.masked_scatter_.default, frozenset({"MaskedSelectBackward0"})),
    aten.scatter.src: (
        aten.scatter_.src,
        frozenset({"SortBackward0", "SortBackward1", "TopkBackward0", "MaxBackward0", "MinBackward0"}),
    ),
}
# Name of the Python frame below an operator that autograd's engine itself calls (torch/autograd/graph.py).
_ENGINE_FRAME = "_engine_run_backward"
STAYS = 2**62  # the value of `died` for an allocation that is not freed within the trace


class Allocation(Struct, kw_only=True):
    """One storage of a tensor.

    `born` and `died` are the indices of the trace's events that allocate and free it; all events are counted, from 0.
    `accumulated` is the event from which a gradient is complete.
    """

    size_bytes: int
    born: int
    died: int
    phase: Phase
    component: Component = "transients"
    accumulated: int = STAYS


class Trace(Struct, frozen=True, kw_only=True):
    """All allocations of a pass, ordered by `born`. `phase_starts`: the events at which phases began, in order."""

    allocations: tuple[Allocation, ...]
    phase_starts: tuple[tuple[int, Phase], ...]


class Tracker(TorchDispatchMode):
    """Records allocations inside its `with` block.

    Enter it after all other modes, so that it sees operators before they are split up.

    With any dispatch mode on, autograd's engine adds gradients out of place (`can_accumulate_inplace` and
    `accumulateGrad` refuse subclass-like tensors: torch/csrc/autograd/input_buffer.cpp and
    functions/accumulate_grad.h). The tracker adds them in place where the engine would do so without it.
    """

    def __init__(self, workspaces: Mapping[Any, Callable[..., int]] | None = None) -> None:
        """Create a tracker that holds no allocation.

        `workspaces`: bytes that an operator allocates inside itself while it runs, from its arguments.
        """
        super().__init__()
        # Keyed by `id`, which is safe because operators are never freed.
        self._workspaces = {id(func): size for func, size in (workspaces or {}).items()}
        self.records: list[Allocation] = []
        self.phase: Phase = "load"
        self.phase_starts: list[tuple[int, Phase]] = [(0, "load")]
        self._clock = 0
        self._alive: dict[int, int] = {}  # address of a storage -> index of its record
        self._deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # index -> weak reference that calls `_died`
        self._weights: set[int] = set()
        # Use counts of a gradient that only the engine holds, measured on entering: of the tensor, of its storage, of
        # its Python object.
        self._sole_owner = (0, 0, 0)
        self._calibrating = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep PyTorch from wrapping `__torch_dispatch__`.

        The wrapper imports the compiler and hides the frame of autograd's engine.
        """
        return False

    def enter_phase(self, phase: Phase) -> None:
        """Count what is allocated from now on in `phase`."""
        if phase == self.phase:
            return
        self.phase = phase
        self.phase_starts.append((self._clock, phase))

    def add_resident(self, tensor: torch.Tensor, component: Component) -> None:
        """Record a tensor that exists before the trace begins."""
        self._record(tensor, component)
        if component == "weights":
            self._weights.add(tensor.untyped_storage()._cdata)

    def mark(self, tensors: Iterable[torch.Tensor], component: Component) -> None:
        """Set the component of tensors that were allocated during the trace."""
        for tensor in tensors:
            index = self._alive.get(tensor.untyped_storage()._cdata)
            if index is not None:
                self.records[index].component = component

    def mark_accumulated(self, gradient: torch.Tensor) -> None:
        """Note that a parameter's gradient is complete: from here on a sharded run keeps only its own part."""
        index = self._alive.get(gradient.untyped_storage()._cdata)
        if index is not None and self.records[index].accumulated == STAYS:
            self.records[index].accumulated = self._clock

    def trace(self) -> Trace:
        """Return copies of what is recorded until now: tensors that are alive still die."""
        return Trace(allocations=tuple(map(replace, self.records)), phase_starts=tuple(self.phase_starts))

    def __enter__(self) -> "Tracker":
        super().__enter__()
        self._calibrate()
        return self

    def _calibrate(self) -> None:
        """Measure the use counts of a gradient that only autograd's engine holds, in a backward pass of two numbers."""
        self._calibrating = True
        leaf = torch.ones(2, requires_grad=True)
        inner = leaf * 1.0
        (inner * 2.0 + inner * 3.0).sum().backward()
        self._calibrating = False
        self.records.clear()
        self._alive.clear()
        self._deaths.clear()
        self._clock = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:
            return _CPU
        func = self._without_mode(func, args)
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor):
                self._record(item, self._copied(func, args))
        workspace = self._workspaces.get(id(func))
        if workspace is not None and (size_bytes := workspace(*args, **(kwargs or {}))):
            self._record_moment(size_bytes)
        return result

    def _copied(self, operator: Any, args: tuple[Any, ...]) -> Component:
        """Return the component of a result: autocast's copy of a weight has its own."""
        copies = operator is _TO_COPY and args[0].untyped_storage()._cdata in self._weights
        return "autocast_copies" if copies else "transients"

    def _without_mode(self, operator: Any, args: tuple[Any, ...]) -> Any:
        """Return the operator that autograd runs in place of `operator` where no dispatch mode is on.

        Only `__torch_dispatch__` may call it: `_is_accumulation` looks at frames.
        """
        if operator is _ADD:
            return aten.add_.Tensor if self._is_accumulation(args) else operator
        if operator not in _IN_PLACE_WITHOUT_MODE:
            return operator
        in_place, nodes = _IN_PLACE_WITHOUT_MODE[operator]
        node = torch._C._current_autograd_node()
        return in_place if node is not None and node.name() in nodes else operator

    def _record_moment(self, size_bytes: int) -> None:
        """Record a workspace: memory that an operator holds only while it runs, besides its results."""
        born, self._clock = self._clock, self._clock + 2
        self.records.append(Allocation(size_bytes=size_bytes, born=born, died=born + 1, phase=self.phase))

    def _is_accumulation(self, args: tuple[Any, ...]) -> bool:
        """Return True if autograd's engine would add two gradients in place: it alone holds the first.

        Only `_without_mode` may call it: it looks at the frame three calls up.
        """
        first, second = args[0], args[1]
        if (
            torch.is_grad_enabled()
            or not isinstance(first, torch.Tensor)
            or not isinstance(second, torch.Tensor)
            or first.shape != second.shape
        ):
            return False
        if sys._getframe(3).f_code.co_name != _ENGINE_FRAME:
            return False
        owners = (
            first._use_count(),
            torch._C._storage_Use_Count(first.untyped_storage()._cdata),
            sys.getrefcount(first),
        )
        if self._calibrating:
            self._sole_owner = owners
            return False
        node = torch._C._current_autograd_node()
        if node is not None and node.name().endswith("AccumulateGrad"):
            return True
        return owners == self._sole_owner and _dense(first)

    def _record(self, tensor: torch.Tensor, component: Component) -> None:
        storage = tensor.untyped_storage()
        key, size_bytes = storage._cdata, storage.nbytes()
        if key in self._alive or size_bytes == 0:
            return
        if type(tensor) is torch.Tensor and tensor.device.type == "meta":
            return  # the type first: the device of a fake tensor is an operator, which would come back to this mode
        index = len(self.records)
        self._alive[key] = index
        self.records.append(
            Allocation(size_bytes=size_bytes, born=self._clock, died=STAYS, phase=self.phase, component=component)
        )
        self._clock += 1
        self._deaths[index] = weakref.ref(storage, lambda _: self._died(key, index))

    def _died(self, key: int, index: int) -> None:
        self._deaths.pop(index, None)
        if self._alive.get(key) == index:
            del self._alive[key]
            self.records[index].died = self._clock
            self._clock += 1


def _dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements fill their storage without overlap.

    Source: `compute_non_overlapping_and_dense`, c10/core/TensorImpl.cpp.
    """
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
