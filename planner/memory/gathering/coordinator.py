"""The coordinator of ZeRO-3: which parameters are gathered before, during and after each call of a module.

Source: deepspeed 0.19.8, zero/partitioned_param_coordinator.py, `PartitionedParameterCoordinator`;
zero/partition_parameters.py, `AllGatherCoalescedHandle`. tests/test_zero3_coordinator.py compares every call of real
training steps: the gathered and the awaited parameters are equal to the number.
"""

from bisect import bisect_left
from enum import Enum, auto

from msgspec import Struct


class Modules(Struct, frozen=True):
    """The modules of a model, numbered, and its partitioned parameters (without those that stay whole), numbered."""

    params_of: tuple[tuple[int, ...], ...]  # of each module: its own parameters, and those it reads from others
    elements: tuple[int, ...]  # of each parameter, as the next
    size_bytes: tuple[int, ...]
    frozen: tuple[bool, ...]


class Limits(Struct, frozen=True, kw_only=True):
    """DeepSpeed's settings, in elements: `stage3_prefetch_bucket_size` and so on."""

    prefetch_bucket_size: int
    max_reuse_distance: int
    max_live_parameters: int


class Call(Enum):
    """What happens to a module. Every call but a release gathers its parameters."""

    FORWARD = auto()
    RECOMPUTED = auto()  # a forward pass inside the backward pass
    BACKWARD = auto()
    FORWARD_DONE = auto()
    BACKWARD_DONE = auto()


Event = tuple[Call, int]  # with the module's number


class _Gather:
    """One all-gather. Several parameters share a flat buffer, out of which each is copied when the first is needed.

    The buffer lives until all of them have been waited for.
    """

    __slots__ = ("arrived", "flat_bytes", "left", "params")

    def __init__(self, params: list[int], size_bytes: int) -> None:
        self.params = params
        self.flat_bytes = size_bytes if len(params) > 1 else 0
        self.left = len(params)
        self.arrived = False


class Coordinator:
    """One training step, or another sequence of calls, event by event.

    `recorded`: calls that DeepSpeed knows from before. It then gathers ahead, and keeps what is needed again soon.
    Without them a module's parameters are gathered for its call alone.

    `gathered_bytes` are alive now, `peak_bytes` since `reset_peak`.
    """

    def __init__(self, modules: Modules, limits: Limits, recorded: list[Event]) -> None:
        self.modules, self.limits, self.traced = modules, limits, bool(recorded)
        params = len(modules.elements)
        self.gathers: list[_Gather | None] = [None] * params  # that a module has still to wait for
        self.whole = [False] * params
        self.users: list[set[int]] = [set() for _ in range(params)]  # modules that use it now
        self.fetched_for = [-1] * params  # the last step for which it has been gathered
        self.available_elements = 0
        self.gathered_bytes = self.peak_bytes = 0
        self.backward: dict[int, None] = {}  # modules whose backward pass runs, in order
        self.recomputed: dict[int, set[int]] = {}  # parameters that wait for such a module's end
        self.step = self.queued = 0
        self.queue: list[tuple[int, int]] = []  # (parameter, step that uses it)
        self.uses: list[list[int]] = [[] for _ in range(params)]
        self.elements_before = [0]  # of each step
        self._record([module for call, module in recorded if call in _GATHERING])

    def _record(self, order: list[int]) -> None:
        """Remember the order of modules, and of the parameters that they use."""
        params_of, elements = self.modules.params_of, self.modules.elements
        traversed = 0
        for step, module in enumerate(order):
            for param in params_of[module]:
                self.uses[param].append(step)
                self.queue.append((param, step))
                traversed += elements[param]
            self.elements_before.append(traversed)

    def reset_peak(self) -> int:
        """Return the most bytes since the last call."""
        peak, self.peak_bytes = self.peak_bytes, self.gathered_bytes
        return peak

    def forget(self) -> None:
        """Drop the recorded calls and what was gathered ahead. Source: `_invalidate_trace`."""
        self.traced = False
        for param, started in enumerate(self.gathers):
            if started is not None:
                self._wait(param)
                self._free(param)

    def run(self, event: Event) -> None:
        """Gather for a call, or release after it."""
        call, module = event
        if call in _GATHERING:
            self._fetch(module, call)
        else:
            self._release(module, forward=call is Call.FORWARD_DONE)

    def _fetch(self, module: int, call: Call) -> None:
        """Gather and wait for what the module needs, then gather ahead. Source: `_fetch_sub_module_impl`."""
        params = self.modules.params_of[module]
        if call is Call.BACKWARD:
            self.backward[module] = None
        if params:
            self._gather([param for param in params if self._absent(param)])
            owner = next(reversed(self.backward)) if call is Call.RECOMPUTED and self.backward else None
            for param in params:
                self.users[param].add(module)
                if owner is not None and self.modules.frozen[param]:
                    self.recomputed.setdefault(owner, set()).add(param)
                    self.users[param].add(owner)
                if self.gathers[param] is not None:
                    self._wait(param)
        if self.traced:
            self._prefetch(params)
        self.step += 1

    def _absent(self, param: int) -> bool:
        return not self.whole[param] and self.gathers[param] is None

    def _gather(self, params: list[int]) -> None:
        if not params:
            return
        total = sum(self.modules.size_bytes[param] for param in params)
        self.available_elements += sum(self.modules.elements[param] for param in params)
        started = _Gather(params, total)
        for param in params:
            self.gathers[param] = started
        self._allocate(total)

    def _allocate(self, size_bytes: int) -> None:
        self.gathered_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.gathered_bytes)

    def _wait(self, param: int) -> None:
        """Wait for the all-gather of `param`. Source: `AllGatherCoalescedHandle.wait`."""
        started = self.gathers[param]
        assert started is not None
        if not started.arrived:
            started.arrived = True
            for each in started.params:
                self.whole[each] = True
            self._allocate(started.flat_bytes)
        self.gathers[param] = None
        started.left -= 1
        if not started.left:
            self.gathered_bytes -= started.flat_bytes

    def _prefetch(self, needed: tuple[int, ...]) -> None:
        """Take the module's parameters off the queue, then gather the next ones."""
        queue, fetched_for = self.queue, self.fetched_for
        left = sum(fetched_for[param] < self.step for param in needed)
        while left:
            param, step = queue[self.queued]
            self.queued += 1
            fetched_for[param] = step
            left -= 1
        most = min(self.limits.prefetch_bucket_size, self.limits.max_live_parameters - self.available_elements)
        ahead: list[int] = []
        elements = 0
        while elements < most and self.queued < len(queue):
            param, step = queue[self.queued]
            self.queued += 1
            fetched_for[param] = max(fetched_for[param], step)
            if self._absent(param) and param not in ahead:
                ahead.append(param)
                elements += self.modules.elements[param]
        self._gather(ahead)

    def _release(self, module: int, *, forward: bool) -> None:
        """Free the module's parameters that nothing needs soon. Source: `release_sub_module`, `__params_to_release`."""
        params = self.modules.params_of[module]
        kept = [param for param in params if self.traced and self._needed_soon(param)] if params else []
        for param in params:
            self.users[param].discard(module)
            if param not in kept:
                self._free(param)
        if not forward:
            self.backward.pop(module, None)
            for param in self.recomputed.pop(module, ()):
                self.users[param].discard(module)
                self._free(param)

    def _needed_soon(self, param: int) -> bool:
        """Return whether a prefetch has passed a later use of it, or the reuse distance reaches one."""
        if self.fetched_for[param] > self.step:
            return True
        later = bisect_left(self.uses[param], self.step)
        if later == len(self.uses[param]):
            return False
        distance = self.elements_before[self.uses[param][later]] - self.elements_before[self.step]
        return distance < self.limits.max_reuse_distance

    def _free(self, param: int) -> None:
        if self.whole[param] and not self.users[param]:
            self.whole[param] = False
            self.available_elements -= self.modules.elements[param]
            self.gathered_bytes -= self.modules.size_bytes[param]


_GATHERING = frozenset({Call.FORWARD, Call.RECOMPUTED, Call.BACKWARD})
