"""Memory of tensors on the CPU, phase by phase, from the reports of PyTorch's own allocator.

PyTorch's profiler receives the bytes of every allocation and every release from the CPU allocator (`reportMemoryUsage`,
pytorch 2.13, c10/core/CPUAllocator.cpp). Unlike a dispatch mode it does not change the code that runs: under a dispatch
mode PyTorch avoids operators in place (`isTensorSubclassLike`, ATen/TensorSubclassLikeUtils.h).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from msgspec import Struct, field
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from planner.quantities import Phase

_MARK = "phase: "  # beginning of the profiler's annotations that mark where phases begin


class DeviceFull(torch.OutOfMemoryError):
    """The tensors of a run on the CPU exceeded the bytes that it may use."""

    def __init__(self, phase: Phase, tried_bytes: int, capacity_bytes: int, held_bytes: int) -> None:
        super().__init__(
            f"Tried to allocate {tried_bytes} bytes. Of {capacity_bytes} bytes {held_bytes} are allocated."
        )
        self.phase: Phase = phase
        self.tried_bytes, self.capacity_bytes, self.held_bytes = tried_bytes, capacity_bytes, held_bytes


class AllocatorEvents(Struct):
    """Peak bytes of each phase. `capacity_bytes` is the limit; 0 is none."""

    capacity_bytes: int = 0
    peaks: dict[Phase, int] = field(default_factory=dict)

    def begin(self, phase: Phase) -> None:
        """Count what is allocated from now on in `phase`."""
        with record_function(f"{_MARK}{phase}"):
            pass

    @contextmanager
    def recording(self, resident_bytes: int) -> Iterator[None]:
        """Record inside the block, and add to the peaks when it ends without an exception.

        `resident_bytes`: bytes of the tensors that exist before; the allocator reports no release of them.

        Raises:
            DeviceFull: an allocation exceeded the limit; it is raised when the block ends.
        """
        self._raise_to("load", resident_bytes, resident_bytes)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            yield
        self._replay(profiler.profiler.kineto_results.experimental_event_tree(), resident_bytes)

    def _replay(self, roots: Iterable[Any], held_bytes: int) -> None:
        """Add the peaks of a recording that begins with `held_bytes`. Releases of older blocks do not count."""
        alive: dict[int, int] = {}  # address of a block -> its bytes
        phase: Phase = "load"
        for event in sorted(_with_children(roots), key=lambda event: event.start_time_ns):
            if event.tag == _EventType.Allocation:
                address, size_bytes = event.extra_fields.ptr, event.extra_fields.alloc_size
                if size_bytes > 0:
                    alive[address] = size_bytes
                    held_bytes += size_bytes
                    self._raise_to(phase, held_bytes, size_bytes)
                else:
                    held_bytes -= alive.pop(address, 0)
            elif event.name.startswith(_MARK):
                phase = event.name.removeprefix(_MARK)
                self._raise_to(phase, held_bytes, 0)

    def _raise_to(self, phase: Phase, held_bytes: int, tried_bytes: int) -> None:
        """Raise the peak of a phase to `held_bytes`, of which `tried_bytes` were allocated last.

        Raises:
            DeviceFull: `held_bytes` exceeds the limit.
        """
        self.peaks[phase] = max(held_bytes, self.peaks.get(phase, 0))
        if 0 < self.capacity_bytes < held_bytes:
            raise DeviceFull(phase, tried_bytes, self.capacity_bytes, held_bytes - tried_bytes)


def _with_children(events: Iterable[Any]) -> Iterator[Any]:
    """Yield events of the profiler, each before the events inside it."""
    stack = list(events)
    while stack:
        event = stack.pop()
        yield event
        stack.extend(event.children)
