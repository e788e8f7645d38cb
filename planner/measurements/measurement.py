"""A measurement: the memory and speed that a probe of one candidate measured. Its JSON is in documents.py.

A probe runs on a device: `cuda`, the GPUs; `cpu`, which counts the bytes of tensors; `emulated`, the CUDA stack on a
driver that counts memory and runs no kernel.
"""

from typing import Literal

from msgspec import Struct

from planner.candidate import Candidate
from planner.quantities import Component, Evidence, Phase

SCHEMA = 1
USUAL_STEPS = 2  # optimizer steps of a probe: the first one creates the optimizer's states, the second runs beside them
DeviceName = Literal["cuda", "cpu", "emulated"]
# Ends of a probe. Only the first two decide whether the candidate fits; the others are no measurement of memory.
Outcome = Literal[
    "fits",
    "out_of_memory",  # of the device
    "host_out_of_memory",  # ended by our watch of the host's memory or by the kernel
    "hung",  # over the time limit
    "killed",  # by a signal that we did not send
    "crashed",  # an exception or an exit code
    "disk_full",
    "garbage",  # exit code 0 without a measurement
    "gpu_in_use",  # other processes hold memory of the GPU; no probe was started
]
# Quantities of memory that a measurement may have.
Quantity = Literal[
    "tensors",  # the bytes of tensors without cuBLAS workspaces, as measured on a CPU
    "allocated",  # torch.cuda.max_memory_allocated: with workspaces
    "reserved",  # torch.cuda.max_memory_reserved: with the allocator's cache
    "driver",  # memory of the process as the driver counts it: with the CUDA context and NCCL
]
EVIDENCE: dict[DeviceName, Evidence] = {
    "cuda": "measured",
    "cpu": "measured",
    "emulated": "emulated",
}


class PhasePeak(Struct, frozen=True, kw_only=True):
    """The peaks of one phase of the heaviest step on one device.

    A figure that the device does not have is 0: `cpu` has no allocator and no driver.
    """

    name: Phase
    allocated_bytes: int  # of tensors
    reserved_bytes: int  # taken from the driver by PyTorch's allocator
    driver_bytes: int  # of the process, as the driver counts it: with the CUDA context and libraries
    seconds: float


class StepMemory(Struct, frozen=True, kw_only=True):
    """Memory after an optimizer step: what PyTorch holds and has reserved on the device, and the process on the host.

    `cpu` has the host's only.
    """

    allocated_bytes: int
    reserved_bytes: int
    host_bytes: int


class RankMemory(Struct, frozen=True, kw_only=True):
    """The device of one process. `state_bytes`: bytes of the tensors that stay between steps, by component.

    `steps`: the memory after each step of a probe of more than `USUAL_STEPS`; else empty.
    """

    rank: int
    phases: tuple[PhasePeak, ...]
    state_bytes: dict[Component, int]
    capacity_bytes: int  # memory that the process may use; 0: no limit
    allocator: dict[str, int]  # of torch.cuda.memory_stats, under its names
    steps: tuple[StepMemory, ...] = ()

    @property
    def allocated_bytes(self) -> int:
        return max((phase.allocated_bytes for phase in self.phases), default=0)

    @property
    def reserved_bytes(self) -> int:
        return max((phase.reserved_bytes for phase in self.phases), default=0)

    @property
    def driver_bytes(self) -> int:
        return max((phase.driver_bytes for phase in self.phases), default=0)

    @property
    def peak_bytes(self) -> int:
        """Return the driver's peak; without a driver the allocator's, without an allocator the tensors'."""
        return self.driver_bytes or self.reserved_bytes or self.allocated_bytes

    @property
    def peak_phase(self) -> Phase:
        return max(
            self.phases,
            key=lambda phase: (
                phase.driver_bytes or phase.reserved_bytes or phase.allocated_bytes,
                phase.allocated_bytes,
            ),
        ).name


class Shortage(Struct, frozen=True, kw_only=True):
    """The allocation that found no memory, with the figures of PyTorch's message."""

    rank: int
    phase: Phase
    tried_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int

    @property
    def over_bytes(self) -> int:
        """Return a lower bound of the missing bytes."""
        return max(self.tried_bytes - self.free_bytes, 1)


class Measurement(Struct, frozen=True, kw_only=True):
    """The result of one probe. Speed is that of the steps after the first, of all processes together."""

    candidate: Candidate
    device: DeviceName
    outcome: Outcome
    ranks: tuple[RankMemory, ...]
    shortage: Shortage | None  # None: the probe did not run out of memory, or its message is lost
    step_seconds: float  # of an optimizer step; 0: no step was finished
    tokens_per_second: float
    wall_seconds: float  # of the whole probe, loading included
    message: str  # the last line of the error; empty: no error
    log: str  # path of the worker's log; empty: no log
    versions: dict[str, str]  # of the libraries, the driver and the device

    @property
    def evidence(self) -> Evidence:
        return EVIDENCE[self.device]

    @property
    def decided(self) -> bool:
        """Return whether the probe decides if the candidate fits."""
        return self.outcome in ("fits", "out_of_memory")

    @property
    def peak_bytes(self) -> int:
        """Return the peak of the heaviest rank."""
        return max((rank.peak_bytes for rank in self.ranks), default=0)


def without_memory(candidate: Candidate, device: DeviceName, outcome: Outcome, message: str) -> Measurement:
    """Return the measurement of a probe that measured no memory: an outcome and a message only."""
    return Measurement(
        candidate=candidate,
        device=device,
        outcome=outcome,
        ranks=(),
        shortage=None,
        step_seconds=0.0,
        tokens_per_second=0.0,
        wall_seconds=0.0,
        message=message,
        log="",
        versions={},
    )
