"""Simulation of ZeRO-3's coordinator: the parameters that it gathers, prefetches and releases at each call of a module.

Source: deepspeed 0.19.8, zero/partitioned_param_coordinator.py, `PartitionedParameterCoordinator`;
zero/partition_parameters.py, `AllGatherCoalescedHandle`. tests/test_zero3_coordinator.py compares every call of real
training steps: the same parameters are gathered and awaited.
"""

from bisect import bisect_left
from collections.abc import Sequence

from msgspec import Struct


class Modules(Struct, frozen=True):
    """A model's modules and its partitioned parameters, each identified by its index.

    Parameters that every GPU keeps whole are left out.
    """

    params_of: tuple[tuple[int, ...], ...]  # by module: its own parameters, and those it reads from others
    elements: tuple[int, ...]  # by parameter, as the next two
    size_bytes: tuple[int, ...]
    frozen: tuple[bool, ...]
    viewed: frozenset[int] = frozenset()  # parameters of which the graph saves a view, in layers without a checkpoint
    # parameters that the graph keeps as an attribute, unless checkpoints are reentrant
    attributes: frozenset[int] = frozenset()
    leaves: frozenset[int] = frozenset()  # modules gathered together with their submodules, which have no hooks
    within: tuple[tuple[int, ...], ...] = ()  # by module: all parameters inside it; empty without leaves


class Limits(Struct, frozen=True, kw_only=True):
    """DeepSpeed's settings, in elements: `stage3_prefetch_bucket_size` and so on."""

    prefetch_bucket_size: int
    max_reuse_distance: int
    max_live_parameters: int


# Kinds of events, as plain numbers, since a step of a large model has 20,000 of them. The first three gather a module's
# parameters, the others release them.
FORWARD, RECOMPUTED, BACKWARD, FORWARD_DONE, BACKWARD_DONE = range(5)  # recomputed: forward inside the backward pass
Event = tuple[int, int]  # kind, module


class _Gather:
    """One all-gather. Several parameters share a flat buffer, which lives until all of them have been waited for.

    When the first of them is needed, all are copied out of the buffer.
    """

    __slots__ = ("arrived", "flat_bytes", "left", "params")

    def __init__(self, params: list[int], size_bytes: int) -> None:
        self.params = params
        self.flat_bytes = size_bytes if len(params) > 1 else 0
        self.left = len(params)
        self.arrived = False


class Coordinator:
    """State of DeepSpeed's coordinator while `run` processes the events of a training step or of generation one by one.

    `recorded`: the trace of an earlier pass. With a trace the coordinator prefetches parameters and keeps those that
    are needed again soon; without one it gathers a module's parameters for one call only.

    `in_graph`: parameters whose memory the autograd graph keeps after DeepSpeed releases them: a view until its
    module's backward pass is done, an attribute to the end.

    `gathered_bytes`: gathered now. `graph_bytes`: released by DeepSpeed and kept by the graph. `peak_bytes`: the
    maximum of their sum since the last `reset_peak`.
    """

    def __init__(
        self, modules: Modules, limits: Limits, recorded: list[Event], in_graph: frozenset[int] = frozenset()
    ) -> None:
        self.modules, self.limits, self.traced = modules, limits, bool(recorded)
        params = len(modules.elements)
        self.gathers: list[_Gather | None] = [None] * params  # all-gathers that no module has waited for yet
        self.whole = [False] * params
        self.users: list[set[int]] = [set() for _ in range(params)]  # modules that use it now
        self.fetched_for = [-1] * params  # the last step for which the parameter was gathered
        self.available_elements = 0
        self.in_graph, self.kept_by_graph = in_graph, set[int]()
        self.gathered_bytes = self.graph_bytes = self.peak_bytes = 0
        self.backward: dict[int, None] = {}  # modules whose backward pass runs, in order
        self.recomputed: dict[int, set[int]] = {}  # by such a module: parameters that are released at its end
        self.step = self.queued = 0
        self.queue: list[tuple[int, int]] = []  # (parameter, step that uses it)
        self.uses: list[list[int]] = [[] for _ in range(params)]
        self.elements_before = [0]  # before each step of the trace
        self.leaf_uses: dict[int, list[int]] = {}  # by parameter of a leaf: steps of all modules that contain it
        self.elements_within_before = [0]
        self.order = [module for call, module in recorded if call <= BACKWARD]
        self._record()

    def _record(self) -> None:
        """Record the order in which modules use parameters.

        DeepSpeed looks for a parameter's next use among each module's own parameters, of which a leaf has none. But
        when it releases a leaf, it looks among all parameters anywhere inside each module. Source:
        `__params_to_release` (`iter_params(module, recurse=z3_leaf_module(submodule_to_release))`).
        """
        params_of, elements, leaves = self.modules.params_of, self.modules.elements, self.modules.leaves
        self.leaf_uses = {param: [] for leaf in leaves for param in params_of[leaf]}
        traversed = within = 0
        for step, module in enumerate(self.order):
            for param in params_of[module]:
                self.queue.append((param, step))
                if module not in leaves:
                    self.uses[param].append(step)
                    traversed += elements[param]
            self.elements_before.append(traversed)
            for param in self.modules.within[module] if leaves else ():
                within += elements[param]
                if param in self.leaf_uses:
                    self.leaf_uses[param].append(step)
            self.elements_within_before.append(within)

    @property
    def held_bytes(self) -> int:
        return self.gathered_bytes + self.graph_bytes

    @property
    def in_graph_bytes(self) -> int:
        """Bytes gathered now that a graph without checkpoints keeps as well."""
        kept = self.modules.viewed | self.modules.attributes
        return sum(self.modules.size_bytes[param] for param in kept if self.whole[param])

    def reset_peak(self) -> int:
        """Return the peak of `gathered_bytes` since the last `reset_peak`, and start a new one at the present value."""
        peak, self.peak_bytes = self.peak_bytes, self.held_bytes
        return peak

    def _forget(self) -> None:
        """Drop the trace and free what was gathered ahead; while one buffer is copied, all the others are still held.

        Source: `_invalidate_trace`.
        """
        self.traced = False
        self._drop_in_flight()

    def _drop_in_flight(self) -> None:
        """Wait for what was gathered ahead and free it. Source: `_clean_inflight_param_registry`."""
        copies = max((started.flat_bytes for started in self.gathers if started and not started.arrived), default=0)
        self._allocate(copies)
        self.gathered_bytes -= copies
        for param, started in enumerate(self.gathers):
            if started is not None:
                self._wait(param, started)
                self._free(param)

    def run(self, event: Event) -> None:
        """Gather the parameters of a module before its forward or backward pass, or release them after it.

        A module that was not recorded for this call ends the trace. Source: `trace_prologue`.
        """
        call, module = event
        params = self.modules.params_of[module]
        if call <= BACKWARD:
            if self.traced and (self.step >= len(self.order) or self.order[self.step] != module):
                self._forget()
            if call == BACKWARD:
                self.backward[module] = None
            if params:
                self._fetch(module, params, call)
            if self.traced and self.queued < len(self.queue):
                self._prefetch(params)
            self.step += 1
        elif params or call == BACKWARD_DONE:
            self._release(module, params, call)

    def _fetch(self, module: int, params: tuple[int, ...], call: int) -> None:
        """Gather the module's parameters and wait for them. Source: `_fetch_sub_module_impl`."""
        whole, gathers = self.whole, self.gathers
        missing = [param for param in params if not whole[param] and gathers[param] is None]
        if missing:
            self._gather(missing)
        owner = next(reversed(self.backward)) if call == RECOMPUTED and self.backward else None
        for param in params:
            self.users[param].add(module)
            if owner is not None and self.modules.frozen[param]:
                self.recomputed.setdefault(owner, set()).add(param)
                self.users[param].add(owner)
            started = gathers[param]
            if started is not None:
                self._wait(param, started)

    def _gather(self, params: list[int]) -> None:
        """Start to gather parameters, in one buffer."""
        size_bytes, elements = self.modules.size_bytes, self.modules.elements
        if len(params) == 1:
            total, count = size_bytes[params[0]], elements[params[0]]
        else:
            total, count = sum(size_bytes[param] for param in params), sum(elements[param] for param in params)
        self.available_elements += count
        started = _Gather(params, total)
        for param in params:
            self.gathers[param] = started
        self._allocate(total)

    def _allocate(self, size_bytes: int) -> None:
        self.gathered_bytes += size_bytes
        if self.gathered_bytes + self.graph_bytes > self.peak_bytes:
            self.peak_bytes = self.gathered_bytes + self.graph_bytes

    def _wait(self, param: int, started: _Gather) -> None:
        """Wait for the all-gather of `param`. Source: `AllGatherCoalescedHandle.wait`."""
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
        queue, fetched_for, queued = self.queue, self.fetched_for, self.queued
        for _ in [param for param in needed if fetched_for[param] < self.step]:
            param, step = queue[queued]
            queued += 1
            fetched_for[param] = step
        most = min(self.limits.prefetch_bucket_size, self.limits.max_live_parameters - self.available_elements)
        ahead: list[int] = []
        elements = 0
        while elements < most and queued < len(queue):
            param, step = queue[queued]
            queued += 1
            if fetched_for[param] < step:
                fetched_for[param] = step
            if not self.whole[param] and self.gathers[param] is None and param not in ahead:
                ahead.append(param)
                elements += self.modules.elements[param]
        self.queued = queued
        if ahead:
            self._gather(ahead)

    def _release(self, module: int, params: tuple[int, ...], call: int) -> None:
        """Free the module's parameters that nothing needs soon. Source: `release_sub_module`, `__params_to_release`."""
        if call == BACKWARD_DONE:
            self._drop_views(params)
        kept = self._kept(module, params) if self.traced else ()
        for param in params:
            self.users[param].discard(module)
            if param not in kept:
                self._free(param)
        if call == BACKWARD_DONE:
            self.backward.pop(module, None)
            for param in self.recomputed.pop(module, ()):
                self.users[param].discard(module)
                self._free(param)

    def _kept(self, module: int, params: tuple[int, ...]) -> Sequence[int]:
        """Return those of the module's parameters that are not freed after its call."""
        return [param for param in params if self._needed_soon(param)]

    def _needed_soon(self, param: int) -> bool:
        """Return whether the parameter was fetched for a later call, or is used again within `max_reuse_distance`."""
        if self.fetched_for[param] > self.step:
            return True
        of_leaf = self.leaf_uses.get(param)
        uses, before = (self.uses[param], self.elements_before)
        if of_leaf is not None:
            uses, before = of_leaf, self.elements_within_before
        later = bisect_left(uses, self.step)
        if later == len(uses):
            return False
        return before[uses[later]] - before[self.step] < self.limits.max_reuse_distance

    def _free(self, param: int) -> None:
        if self.whole[param] and not self.users[param]:
            self.whole[param] = False
            self.available_elements -= self.modules.elements[param]
            self.gathered_bytes -= self.modules.size_bytes[param]
            if param in self.in_graph and param not in self.kept_by_graph:
                self.kept_by_graph.add(param)
                self.graph_bytes += self.modules.size_bytes[param]

    def _drop_views(self, params: tuple[int, ...]) -> None:
        """Drop the views that the graph saved of a module's parameters, after its backward pass."""
        for param in params:
            if param in self.in_graph and param in self.modules.viewed:
                self.graph_bytes -= self.modules.size_bytes[param] if param in self.kept_by_graph else 0
                self.kept_by_graph.add(param)  # whose view DeepSpeed's own release finds gone


class CachingCoordinator(Coordinator):
    """The coordinator of a model that ran forward passes without a backward pass (`alone`) before it trains.

    After a forward call it keeps the same parameters as in those passes: DeepSpeed caches what to release by module and
    step, and keeps the cache when it drops its trace. Source: `__params_to_release` (`functools.lru_cache`).
    """

    def __init__(
        self, modules: Modules, limits: Limits, recorded: list[Event], alone: list[Event], in_graph: frozenset[int]
    ) -> None:
        super().__init__(modules, limits, recorded, in_graph)
        before = Coordinator(modules, limits, alone)
        self.answers: dict[tuple[int, int], list[int]] = {}
        for event in alone:
            before.run(event)
            if event[0] == FORWARD_DONE:
                module = event[1]
                self.answers[before.step, module] = [
                    param for param in modules.params_of[module] if before.whole[param]
                ]

    def _kept(self, module: int, params: tuple[int, ...]) -> Sequence[int]:
        found = self.answers.get((self.step, module))
        return super()._kept(module, params) if found is None else found


class FirstCoordinator(CachingCoordinator):
    """The coordinator of an engine with which TRL precomputes a reference, and whose hooks stay while the model trains.

    It records its calls in backward passes twice (`SecondCoordinator`). `alone`: the passes of the reference.
    """

    def __init__(
        self, modules: Modules, limits: Limits, recorded: list[Event], alone: list[Event], in_graph: frozenset[int]
    ) -> None:
        doubled = [event for event in recorded for _ in range(2 if event[0] == BACKWARD else 1)]
        super().__init__(modules, limits, doubled, alone, in_graph)


class SecondCoordinator(Coordinator):
    """The trainer's coordinator of a model that TRL wrapped before.

    Forward passes call both, the first one first, so that a parameter stays only if both keep it. Both take the same
    parameters for gathered; each counts only those that it gathered or freed itself. In backward passes the first one's
    hooks run alone, twice before a module and once after it, since DeepSpeed makes a module's functions for them once.
    The second one begins a step after the first one's first call.

    Source: trl 1.16, trainer/dpo_trainer.py and kto_trainer.py, `_precompute_ref_logps`; deepspeed 0.19.8,
    zero/parameter_offload.py, `_register_deepspeed_module` (`pre_bwd_fn`, `post_bwd_fn`, hooks), `DeepSpeedZeRoOffload`
    (the module's `ds_inflight_param_registry`).
    """

    def __init__(self, modules: Modules, limits: Limits, recorded: list[Event], first: Coordinator) -> None:
        super().__init__(modules, limits, [event for event in recorded if event[0] != BACKWARD], first.in_graph)
        self.first = first
        self.gathers, self.whole, self.users = first.gathers, first.whole, first.users
        self.kept_by_graph = first.kept_by_graph

    def run(self, event: Event) -> None:
        call, first = event[0], self.first
        first.peak_bytes = self.peak_bytes
        for _ in range(2 if call == BACKWARD else 1):
            first.run(event)
        self.gathered_bytes, self.graph_bytes, self.peak_bytes = (
            first.gathered_bytes, first.graph_bytes, first.peak_bytes,
        )  # fmt: skip
        if call in (BACKWARD, BACKWARD_DONE):
            return
        if not self.step:
            self._drop_in_flight()
            self.available_elements = 0
        super().run(event)
        first.gathered_bytes, first.graph_bytes = self.gathered_bytes, self.graph_bytes
