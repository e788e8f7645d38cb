"""Watch the memory of a worker, phase by phase.

On `cuda` the counters of the allocator and the driver are read; on `cpu` the reports of the allocator.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, get_args

import torch
from accelerate import PartialState
from msgspec import Struct, field
from msgspec.structs import replace

from planner.measurements.measurement import PhasePeak, Shortage
from planner.quantities import Phase
from probes.step.built_trainer import BuiltTrainer
from probes.step.collector import collector_off
from probes.step.phases import PhaseListener
from probes.task import PHASE_FILE, Task
from probes.worker.allocator_events import AllocatorEvents, DeviceFull
from probes.worker.shortage import shortage_of_message
from probes.worker.states import attached_tensors


class Clock(Struct):
    """Seconds of each phase in the last step that had it. The running phase is also written to a file."""

    file: Path
    seconds: dict[Phase, float] = field(default_factory=dict)
    steps: list[tuple[float, float]] = field(default_factory=list)  # seconds of each step, and of its rollouts
    _step: dict[Phase, float] = field(default_factory=dict)
    _phase: Phase = "load"
    _since: float = field(default_factory=time.perf_counter)

    def enter(self, phase: Phase) -> None:
        """End the running phase and begin another."""
        now = time.perf_counter()
        self._step[self._phase] = self._step.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now
        self.file.write_text(phase, encoding="utf-8")

    def step_begins(self) -> None:
        """Begin a step: the seconds before belong to none."""
        self._close()

    def step_ends(self) -> None:
        """End a step and keep its seconds."""
        step = self._close()
        self.steps.append((sum(step.values()), step.get("rollout", 0.0)))

    def _close(self) -> dict[Phase, float]:
        self.enter(self._phase)
        step, self._step = self._step, {}
        self.seconds |= step
        return step


class Discarded(Struct, frozen=True):
    """Memory that PyTorch's allocator counts and the device does not hold, as an engine has discarded it to sleep."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0


class MemoryWatch(PhaseListener, Protocol):
    """Watches the memory of one process: `CpuWatch` or `CudaWatch`."""

    clock: Clock

    @contextmanager
    def watching(self, built: BuiltTrainer) -> Iterator[None]:
        """Watch a trainer that runs inside the block."""

    def settle(self) -> None:
        """Wait until the device has done what was started."""

    def before_engine_turns(self) -> None:
        """Count what the device holds before a colocated engine falls asleep or wakes up."""

    def engine_turned(self, discarded: "Discarded") -> None:
        """Take from now on what the engine has discarded in its sleep for memory that the device does not hold."""

    @property
    def capacity_bytes(self) -> int:
        """Memory of the device that may be used."""

    @property
    def peaks(self) -> tuple[PhasePeak, ...]:
        """The peak of each phase, in the order of a step."""

    @property
    def allocator(self) -> dict[str, int]:
        """The counters of PyTorch's CUDA allocator; empty on a CPU."""

    def shortage(self, error: Exception, rank: int) -> Shortage:
        """The figures of an out-of-memory error."""


def memory_watch(task: Task) -> MemoryWatch:
    """Return the watch for the task's device."""
    clock = Clock(Path(task.folder) / PHASE_FILE)
    clock.enter("load")
    return CpuWatch(clock, task.capacity_bytes) if task.device == "cpu" else CudaWatch(clock, task.capacity_bytes)


# -- cpu ---------------------------------------------------------------------------------------------------------------


class CpuWatch:
    """Reads the reports of PyTorch's CPU allocator: every tensor on the host counts, batches included.

    The host has no limit but the task's capacity; a run that exceeds it is found when it ends.
    """

    def __init__(self, clock: Clock, capacity_bytes: int) -> None:
        PartialState(cpu=True)  # before anything else creates the process group
        self.clock = clock
        self.phase: Phase = "load"
        self.capacity_bytes = capacity_bytes
        self._events = AllocatorEvents(capacity_bytes)

    def enter_phase(self, phase: Phase) -> None:
        if phase == self.phase:
            return
        self.clock.enter(phase)
        self.phase = phase
        self._events.begin(phase)

    @contextmanager
    def watching(self, built: BuiltTrainer) -> Iterator[None]:
        """Record the trainer's allocations inside the block. The models exist already."""
        self.phase = "load"
        with collector_off(), self._events.recording(resident_bytes(built)):
            yield

    def settle(self) -> None:
        """Do nothing: on the host an operator is done when it returns."""

    def before_engine_turns(self) -> None:
        """Do nothing: no engine runs on the host."""

    def engine_turned(self, discarded: Discarded) -> None:
        """Do nothing: no engine runs on the host."""

    @property
    def peaks(self) -> tuple[PhasePeak, ...]:
        """The peak of each phase, in the order of a step."""
        return tuple(
            PhasePeak(
                name=name,
                allocated_bytes=size_bytes,
                reserved_bytes=0,
                driver_bytes=0,
                seconds=self.clock.seconds.get(name, 0.0),
            )
            for name, size_bytes in sorted(self._events.peaks.items(), key=phase_position)
        )

    @property
    def allocator(self) -> dict[str, int]:
        return {}

    def shortage(self, error: Exception, rank: int) -> Shortage:
        assert isinstance(error, DeviceFull)
        return Shortage(
            rank=rank,
            phase=error.phase,
            tried_bytes=error.tried_bytes,
            free_bytes=error.capacity_bytes - error.held_bytes,
            allocated_bytes=error.held_bytes,
            reserved_bytes=error.held_bytes,
        )


def phase_position(item: tuple[Phase, Any]) -> int:
    """Sort key for (phase, value): the position of the phase in a step."""
    return get_args(Phase).index(item[0])


def resident_bytes(built: BuiltTrainer) -> int:
    """Return the bytes of the models' parameters and buffers, with what quantized weights carry, each storage once."""
    tensors = [tensor for model in built.models for tensor in (*model.parameters(), *model.buffers())]
    tensors += [attached for tensor in tensors for attached in attached_tensors(tensor)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


# -- cuda --------------------------------------------------------------------------------------------------------------


class CudaWatch:
    """Reads the counters of PyTorch's allocator and of the driver at the end of each phase, and resets the peaks.

    Not yet run on a GPU.

    The driver counts no peak. Between two readings its figure grows by what the allocator reserves:

        driver's peak = driver's reading - reserved now + peak of reserved

    A sleeping vLLM engine has unmapped the pages of its weights and KV cache, which the allocator still counts. Peaks
    are read before it falls asleep and before it wakes up: asleep, they are without what it has discarded.

    Source: torch/cuda/memory.py (`memory_stats`, `reset_peak_memory_stats`); pynvml,
    `nvmlDeviceGetComputeRunningProcesses`.
    """

    def __init__(self, clock: Clock, capacity_bytes: int) -> None:
        self.clock = clock
        self.phase: Phase = "load"
        self._peaks: dict[Phase, tuple[int, int, int]] = {}  # bytes allocated, reserved, of the driver
        self._discarded = Discarded()
        self._driver = Driver()
        PartialState()  # selects this process' GPU
        self._limit_bytes = capacity_bytes  # 0: all that the card has
        self._total_bytes = torch.cuda.mem_get_info()[1]
        self.capacity_bytes = capacity_bytes or self._total_bytes
        self._keep_to_limit(self._driver.held_bytes() - torch.cuda.memory_stats().get("reserved_bytes.all.current", 0))
        torch.cuda.reset_peak_memory_stats()

    def _keep_to_limit(self, outside_bytes: int) -> None:
        """Limit the allocator on a GPU that is larger than the planned one.

            limit = planned capacity - outside_bytes

        `outside_bytes`: the CUDA context, kernels, NCCL. PyTorch's limit counts the allocator alone. What lies outside
        grows as kernels are loaded, so the limit is set again at the end of each phase.
        Source: pytorch 2.13, c10/cuda/CUDACachingAllocator.cpp, `setMemoryFraction`, and `alloc_block`, which compares
        `total_allocated_memory` with it.
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
        """Add the counters to the peaks of the running phase, and reset them."""
        torch.cuda.synchronize()
        statistics = torch.cuda.memory_stats()
        reserved = statistics["reserved_bytes.all.peak"]
        outside = self._driver.held_bytes() - statistics["reserved_bytes.all.current"]
        now = (
            statistics["allocated_bytes.all.peak"] - self._discarded.allocated_bytes,
            reserved - self._discarded.reserved_bytes,
            outside + reserved,
        )
        before = self._peaks.get(self.phase, (0, 0, 0))
        self._peaks[self.phase] = tuple(map(max, before, now))
        self._keep_to_limit(outside)
        torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def watching(self, built: BuiltTrainer) -> Iterator[None]:
        yield

    def settle(self) -> None:
        torch.cuda.synchronize()

    def before_engine_turns(self) -> None:
        self._read()

    def engine_turned(self, discarded: Discarded) -> None:
        self._discarded = discarded
        torch.cuda.reset_peak_memory_stats()  # a peak from before must not meet what is held from now on

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
            for name, (allocated, reserved, driver) in sorted(self._peaks.items(), key=phase_position)
        )

    @property
    def allocator(self) -> dict[str, int]:
        return {name: int(value) for name, value in torch.cuda.memory_stats().items()}

    def shortage(self, error: Exception, rank: int) -> Shortage:
        statistics = torch.cuda.memory_stats()
        found = shortage_of_message(
            str(error),
            rank,
            self.phase,
            torch.cuda.mem_get_info()[0],
            statistics["allocated_bytes.all.current"],
            statistics["reserved_bytes.all.current"],
        )
        return replace(
            found,
            allocated_bytes=found.allocated_bytes - self._discarded.allocated_bytes,
            reserved_bytes=found.reserved_bytes - self._discarded.reserved_bytes,
        )


class Driver:
    """Reads from the driver how much memory of its GPU this process has.

    In a container the driver may not know the process: then it is the growth of the GPU's used memory since the start.
    """

    def __init__(self) -> None:
        """Read the used memory of all GPUs. Create it before CUDA is initialized: the context is memory as well."""
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        self._gpus = {
            str(pynvml.nvmlDeviceGetUUID(gpu)): (gpu, int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used)) for gpu in gpus
        }

    def held_bytes(self) -> int:
        """Return the bytes of this process on its GPU, as the driver counts them."""
        gpu, used_before = self._gpus[f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"]
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        own = next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)
        return int(own) if own else int(self._nvml.nvmlDeviceGetMemoryInfo(gpu).used) - used_before
