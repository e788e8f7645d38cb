"""What sees a worker's memory. On `cuda` the allocator's and the driver's counters, on `cpu` every tensor's bytes: two recorders, told the same moments."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, get_args

import torch
from accelerate import PartialState

from planner.measurements.measurement import PhasePeak, Shortage
from planner.quantities import Component, Phase
from probes.step.listener import Told
from probes.step.stage import Stage
from probes.step.tracker import DeviceFull, Tracker, collector_off
from probes.task import PHASE_FILE, Task
from probes.worker.shortage import shortage_of_message
from probes.worker.states import belongings


@dataclass(slots=True)
class Clock:
    """Seconds of each phase, of the last step that had it; and the file that says which one runs."""

    file: Path
    seconds: dict[Phase, float] = field(default_factory=dict)
    steps: list[tuple[float, float]] = field(
        default_factory=list
    )  # seconds of each step, and those of them in rollouts
    _step: dict[Phase, float] = field(default_factory=dict)
    _phase: Phase = "load"
    _since: float = field(default_factory=time.perf_counter)

    def enter(self, phase: Phase) -> None:
        now = time.perf_counter()
        self._step[self._phase] = self._step.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now
        self.file.write_text(phase, encoding="utf-8")

    def step_begins(self) -> None:
        """What came before is no part of a step."""
        self._close()

    def step_ends(self) -> None:
        step = self._close()
        self.steps.append((sum(step.values()), step.get("rollout", 0.0)))

    def _close(self) -> dict[Phase, float]:
        self.enter(self._phase)
        step, self._step = self._step, {}
        self.seconds |= step
        return step


class Watch(Told, Protocol):
    """What the worker asks of a recorder."""

    clock: Clock

    @contextmanager
    def watching(self, stage: Stage) -> Iterator[None]:
        """While inside, a trainer runs."""

    def settle(self) -> None:
        """What was started is waited for."""

    def forget(self) -> None:
        """The trainer is gone; another one comes."""

    @property
    def capacity_bytes(self) -> int: ...
    @property
    def peaks(self) -> tuple[PhasePeak, ...]: ...
    @property
    def allocator(self) -> dict[str, int]: ...
    def shortage(self, error: Exception, rank: int) -> Shortage: ...


def watch_of(task: Task) -> Watch:
    clock = Clock(Path(task.folder) / PHASE_FILE)
    clock.enter("load")
    return CpuWatch(clock, task.capacity_bytes) if task.device == "cpu" else CudaWatch(clock, task.capacity_bytes)


# -- cpu ---------------------------------------------------------------------------------------------------------------


class CpuWatch(Tracker):
    """Counts tensors as the dry run counts them, with which it can be compared to the byte. The host has no limit but the one that is set."""

    def __init__(self, clock: Clock, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes=capacity_bytes)
        PartialState(cpu=True)  # before anybody asks which process this is
        self.clock = clock
        self.capacity_bytes = capacity_bytes
        self._before: dict[Phase, int] = {}  # of the trainer before
        self._saving: dict[
            Phase, int
        ] = {}  # what is held while a checkpoint is written, in which nothing needs to be made

    def enter_phase(self, phase: Phase) -> None:
        if phase != self.phase:
            self.clock.enter(phase)
        if phase == "save":
            self._saving = {phase: self._held_bytes}
        super().enter_phase(phase)

    @contextmanager
    def watching(self, stage: Stage) -> Iterator[None]:
        """Only what the trainer does is seen: models are there when it begins, and batches come from the host."""
        collate = stage.trainer.data_collator

        def collated(examples: Any) -> Any:
            with self.looking_away():
                batch = collate(examples)
            if isinstance(batch, Mapping):
                self.add_batch(batch)
            return batch

        stage.trainer.data_collator = collated
        with collector_off(), self:
            self.phase = "load"
            for component, name, tensor in residents(stage):
                self.add_resident(tensor, component, name)
            yield

    def settle(self) -> None:
        """On the host an operator is done when it returns."""

    def forget(self) -> None:
        self._before = {peak.name: peak.allocated_bytes for peak in self.peaks}

    @property
    def peaks(self) -> tuple[PhasePeak, ...]:
        found = dict(self._before)
        for phase in self.trace().phases:
            found[phase.name] = max(phase.total_bytes, found.get(phase.name, 0))
        found = self._saving | found
        return tuple(
            PhasePeak(
                name=name,
                allocated_bytes=held,
                reserved_bytes=0,
                driver_bytes=0,
                seconds=self.clock.seconds.get(name, 0.0),
            )
            for name, held in sorted(found.items(), key=in_order)
        )

    @property
    def allocator(self) -> dict[str, int]:
        return {}

    def shortage(self, error: Exception, rank: int) -> Shortage:
        assert isinstance(error, DeviceFull)
        return Shortage(
            rank=rank, phase=self.phase, tried_bytes=error.tried_bytes, free_bytes=error.capacity_bytes - error.held_bytes,
            allocated_bytes=error.held_bytes, reserved_bytes=error.held_bytes,
        )  # fmt: skip


def in_order(found: tuple[Phase, Any]) -> int:
    """As the phases follow each other."""
    return get_args(Phase).index(found[0])


def residents(stage: Stage) -> Iterator[tuple[Component, str, torch.Tensor]]:
    """What models are made of, as it lies on the device."""
    for model in stage.models:
        for name, parameter in model.named_parameters():
            yield "adapters" if "lora_" in name else "weights", name, parameter
            yield from (("weights", name, tensor) for tensor in belongings(parameter))
        for name, buffer in model.named_buffers():
            yield "weights", name, buffer


# -- cuda --------------------------------------------------------------------------------------------------------------


class CudaWatch:
    """Reads the counters of PyTorch's allocator and of the driver where a phase ends, and sets the peaks back. Not yet run on a GPU.

    The driver's figure is only there to be read, without a peak. Between two readings it grows by what the allocator takes: the peak is the reading
    and what the allocator had given back by then.
    Source: torch/cuda/memory.py (`memory_stats`, `reset_peak_memory_stats`); pynvml, `nvmlDeviceGetComputeRunningProcesses`.
    """

    def __init__(self, clock: Clock, capacity_bytes: int) -> None:
        self.clock = clock
        self.phase: Phase = "load"
        self.module = ""
        self._found: dict[Phase, tuple[int, int, int]] = {}
        self._driver = Driver()
        PartialState()  # says which GPU is this process'
        self._limit_bytes = capacity_bytes  # 0: all that the card has
        self._total_bytes = torch.cuda.mem_get_info()[1]
        self.capacity_bytes = capacity_bytes or self._total_bytes
        self._keep_to_limit(self._driver.held_bytes() - torch.cuda.memory_stats().get("reserved_bytes.all.current", 0))
        torch.cuda.reset_peak_memory_stats()

    def _keep_to_limit(self, outside_bytes: int) -> None:
        """On a larger card than the plan's the allocator may take what the plan's has left beside what is not the allocator's: the context, kernels, NCCL.

        PyTorch's own limit counts the allocator alone. What lies outside grows as kernels are loaded, so the limit is set anew where a phase ends.
        Source: pytorch 2.13, c10/cuda/CUDACachingAllocator.cpp, `setMemoryFraction`, and `alloc_block`, where `total_allocated_memory` is what is compared.
        """
        if self._limit_bytes:
            allowed = max(self._limit_bytes - outside_bytes, 0)
            torch.cuda.set_per_process_memory_fraction(min(allowed / self._total_bytes, 1.0))

    def enter_phase(self, phase: Phase) -> None:
        if phase == self.phase:
            return
        self._read()
        self.clock.enter(phase)
        self.phase = phase

    def _read(self) -> None:
        torch.cuda.synchronize()
        statistics = torch.cuda.memory_stats()
        reserved = statistics["reserved_bytes.all.peak"]
        outside = self._driver.held_bytes() - statistics["reserved_bytes.all.current"]
        now = (statistics["allocated_bytes.all.peak"], reserved, outside + reserved)
        before = self._found.get(self.phase, (0, 0, 0))
        self._found[self.phase] = tuple(map(max, before, now))
        self._keep_to_limit(outside)
        torch.cuda.reset_peak_memory_stats()

    def mark(self, tensors: Iterable[torch.Tensor], component: Component) -> None:
        """The counters know no components."""

    def mark_saved(self) -> None:
        """Nor what is saved."""

    def mark_accumulated(self, gradient: torch.Tensor) -> None:
        """Nor what a gradient is."""

    @contextmanager
    def watching(self, stage: Stage) -> Iterator[None]:
        yield

    def settle(self) -> None:
        torch.cuda.synchronize()

    def forget(self) -> None:
        torch.cuda.empty_cache()

    @property
    def peaks(self) -> tuple[PhasePeak, ...]:
        self._read()
        return tuple(
            PhasePeak(
                name=name,
                allocated_bytes=allocated,
                reserved_bytes=reserved,
                driver_bytes=driver,
                seconds=self.clock.seconds.get(name, 0.0),
            )
            for name, (allocated, reserved, driver) in sorted(self._found.items(), key=in_order)
        )

    @property
    def allocator(self) -> dict[str, int]:
        return {name: int(value) for name, value in torch.cuda.memory_stats().items()}

    def shortage(self, error: Exception, rank: int) -> Shortage:
        statistics = torch.cuda.memory_stats()
        return shortage_of_message(
            str(error),
            rank,
            self.phase,
            torch.cuda.mem_get_info()[0],
            statistics["allocated_bytes.all.current"],
            statistics["reserved_bytes.all.current"],
        )


class Driver:
    """What the driver counts for this process on its GPU; where it does not tell processes apart (in a container), what the GPU has given since the start."""

    def __init__(self) -> None:
        """Call it before CUDA is touched: the context is memory as well."""
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        self._gpus = {
            str(pynvml.nvmlDeviceGetUUID(gpu)): (gpu, int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used)) for gpu in gpus
        }

    def held_bytes(self) -> int:
        gpu, used_before = self._gpus[f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"]
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        own = next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)
        return int(own) if own else int(self._nvml.nvmlDeviceGetMemoryInfo(gpu).used) - used_before
