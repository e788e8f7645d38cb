"""Simulated cards that need other bytes than the estimate says; a search has to find the truth by probing.

The true memory of a candidate is its estimate with offsets that no sampler knows:

    phase = estimate + context + slack x allocated
          + (activations + structure) x training pass + kernel x (activations and attention scores)

Each card draws its offsets once, uniformly: context -300..+300 MB; slack 0..6 % of the allocated bytes; activations
-6..+6 % of the components of a training pass (planner/quantities.py, `PASS`); 0..+5 % for each attention
implementation; -0.5..+0.5 % of the training pass for each structure (checkpointing, attention, sharding, dtype), which
no constant of a device explains; speed -20..+20 %. Everything here is simulated; nothing ran on a GPU.
"""

import random
from collections.abc import Callable

from msgspec import Struct

from planner.candidate import Candidate
from planner.estimation import estimate
from planner.measurements.measurement import Measurement, PhasePeak, RankMemory, Shortage
from planner.memory.communication import nccl_bytes
from planner.memory.engine.budget import EngineDoesNotFit
from planner.quantities import PASS, Estimate, GpuMemory, PhaseMemory
from planner.search.knobs import SearchProblem
from planner.search.sizes import largest
from planner.units import MIB
from probes.study.space import FEW_SIZES, NO_SHARE, GridPoint, Space

CONTEXT_BYTES = 300_000_000
SLACK = 0.06
ACTIVATIONS = 0.06
KERNEL = 0.05
STRUCTURE = 0.005
SPEED = 0.20
# Cache that the allocator keeps while there is room, as a share of the allocated bytes: reserved is typically 3 to 15 %
# above allocated.
CACHE = 0.10
OUTSIDE_TORCH = ("runtime", "engine", "fragmentation")
ATTEMPT_SECONDS = 60.0  # wall time of a probe; nothing here reads it


def formulas_alone(candidate: Candidate, problem: SearchProblem) -> Estimate | None:
    """Estimate by formulas only, which is quick and the same in every release of the libraries."""
    try:
        return estimate(candidate, problem.cluster, problem.job.risk)
    except EngineDoesNotFit:
        return None


class HiddenCard(Struct, frozen=True, kw_only=True):
    """The hidden offsets of one card."""

    seed: int
    context_bytes: float
    slack: float
    activations: float
    speed: float

    def kernel(self, name: str) -> float:
        return random.Random(f"{self.seed} kernel {name}").uniform(0, KERNEL)

    def structure(self, name: str) -> float:
        return random.Random(f"{self.seed} structure {name}").uniform(-STRUCTURE, STRUCTURE)


def hidden_card(seed: int) -> HiddenCard:
    draw = random.Random(f"card {seed}")
    return HiddenCard(
        seed=seed,
        context_bytes=draw.uniform(-CONTEXT_BYTES, CONTEXT_BYTES),
        slack=draw.uniform(0, SLACK),
        activations=draw.uniform(-ACTIVATIONS, ACTIVATIONS),
        speed=draw.uniform(1 - SPEED, 1 + SPEED),
    )


class TruePhase(Struct, frozen=True, kw_only=True):
    """The true bytes of one phase on the card."""

    memory: PhaseMemory
    allocated: float  # the trainer's tensors
    kept: float  # by the allocator, where no tensor fits
    outside: float  # memory that torch does not count: CUDA context and NCCL
    engine: float
    capacity: int

    @property
    def total(self) -> float:
        return self.allocated + self.kept + self.outside + self.engine


def true_phase(
    card: HiddenCard, phase: PhaseMemory, gpu: GpuMemory, structure: str, kernel: str, nccl: int, states: bool = True
) -> TruePhase:
    """Add the card's offsets to an estimated phase; `states`: the optimizer states exist already."""
    parts = phase.components
    allocated = sum(size for name, size in parts.items() if name not in OUTSIDE_TORCH) - nccl
    allocated += (card.activations + card.structure(structure)) * sum(parts.get(name, 0) for name in PASS)
    allocated += card.kernel(kernel) * (parts.get("activations", 0) + parts.get("attention_scores", 0))
    if not states:
        allocated -= parts.get("optimizer_states", 0)
    return TruePhase(
        memory=phase,
        allocated=allocated,
        kept=parts.get("fragmentation", 0) + card.slack * allocated,
        outside=max(parts.get("runtime", 0) + card.context_bytes, 0) + nccl,
        engine=parts.get("engine", 0),
        capacity=gpu.capacity_bytes,
    )


def true_phases(card: HiddenCard, space: Space, point: GridPoint, states: bool = True) -> list[list[TruePhase]]:
    """The true phases of each role's GPUs."""
    answer = space.estimate(point)
    assert answer is not None
    nccl, kernel, structure = (
        nccl_bytes(answer.candidate),
        answer.candidate.attn_implementation,
        space.lines[point.line].name,
    )
    return [
        [
            true_phase(
                card,
                phase,
                gpu,
                structure,
                kernel,
                nccl if gpu.role != "vllm" else 0,
                states or phase.name == "optimizer_step",
            )
            for phase in gpu.phases
        ]
        for gpu in answer.gpus
    ]


def truly_fits(card: HiddenCard, space: Space, point: GridPoint) -> bool:
    return space.starts(point) and all(
        phase.total <= phase.capacity for gpu in true_phases(card, space, point) for phase in gpu
    )


def exhaustive_best(space: Space, fits: Callable[[GridPoint], bool]) -> GridPoint | None:
    """The fitting candidate of most merit, by exhaustive search.

    Exact: looks at every structure, and at every size where they are few. Skips only candidates beyond a size or a
    share that does not fit; memory and merit grow with both.
    """
    best: GridPoint | None = None
    for line in range(len(space.lines)):
        for point in best_of_line(space, line, fits):
            if best is None or space.merit(point) > space.merit(best):
                best = point
    return best


def best_of_line(space: Space, line: int, fits: Callable[[GridPoint], bool]) -> list[GridPoint]:
    count = len(space.lines[line].sizes)
    sizes: list[int] = list(range(count))
    if count > FEW_SIZES:
        top = largest(0, count - 1, lambda size: fits(space.with_smallest_share(line, size)))
        sizes = [top] if top >= 0 else []
    found = []
    for size in sizes:
        low, high = space.shares(line, size)
        share = largest(low, high, lambda share: fits(GridPoint(line, size, share)))  # noqa: B023
        found += [GridPoint(line, size, share)] if share >= low else []
    return found


# -- the probe ---------------------------------------------------------------------------------------------------------


class HiddenProbe(Struct, frozen=True, kw_only=True, eq=False):
    """Runs candidates on a hidden card; a measurement has the fields that a real probe fills, and no others."""

    card: HiddenCard
    space: Space

    def __call__(self, candidate: Candidate) -> Measurement:
        return self.at(place_of(self.space, candidate))

    def at(self, point: GridPoint) -> Measurement:
        """Fill a vLLM server's cards, then run the first step, without optimizer states, then the second."""
        answer = self.space.estimate(point)
        assert answer is not None
        first, second = (true_phases(self.card, self.space, point, states) for states in (False, True))
        failed = next(
            (phase for step in (*second[1:], first[0], second[0]) for phase in step if phase.total > phase.capacity),
            None,
        )
        if failed is None:
            return self._measurement(answer, point, second[0], None)
        of_trainer = failed in (*first[0], *second[0])
        seen = first[0][: first[0].index(failed)] if failed in first[0] else first[0]
        draw = random.Random(f"{self.card.seed} {point} short")
        return self._measurement(
            answer,
            point,
            seen,
            _shortage(failed, 0 if of_trainer else answer.candidate.num_processes, self.card.slack, draw),
        )

    def _measurement(
        self, answer: Estimate, point: GridPoint, seen: list[TruePhase], shortage: Shortage | None
    ) -> Measurement:
        candidate, draw = answer.candidate, random.Random(f"{self.card.seed} {point}")
        peaks = tuple(_peak(phase, candidate.vllm == "colocate", draw) for phase in seen)
        rank = RankMemory(
            rank=0, phases=peaks, state_bytes={}, capacity_bytes=answer.gpus[0].capacity_bytes, allocator={}
        )
        speed = self.card.speed if shortage is None else 0.0
        return Measurement(
            candidate=candidate,
            device="cuda",
            outcome="fits" if shortage is None else "out_of_memory",
            ranks=(rank,),
            shortage=shortage,
            step_seconds=answer.throughput.step_seconds / speed if speed else 0.0,
            tokens_per_second=answer.throughput.tokens_per_second * speed,
            wall_seconds=ATTEMPT_SECONDS,
            message="",
            log="",
            versions={"device": "hidden card, simulated"},
        )


def place_of(space: Space, candidate: Candidate) -> GridPoint:
    share = round(100 * candidate.vllm_gpu_memory_utilization) if candidate.vllm == "colocate" else NO_SHARE
    return next(
        GridPoint(line, size, share)
        for line, each in enumerate(space.lines)
        if all(getattr(each.structure, name) == getattr(candidate, name) for name in space.structure_knobs)
        for size in range(len(each.sizes))
        if space.candidate(GridPoint(line, size, share)) == candidate
    )


def _peak(phase: TruePhase, colocated: bool, draw: random.Random) -> PhasePeak:
    """Peak of a phase with a random allocator cache. Torch counts an engine's tensors, the driver counts all."""
    room = max(phase.capacity - phase.total, 0)
    cache = min(draw.uniform(0, CACHE) * phase.allocated, room)
    engine = phase.engine if colocated else 0
    reserved = phase.allocated + phase.kept + cache
    return PhasePeak(
        name=phase.memory.name,
        allocated_bytes=int(phase.allocated + engine),
        reserved_bytes=int(reserved + engine),
        driver_bytes=int(reserved + phase.outside + phase.engine),
        seconds=1.0,
    )


def _shortage(phase: TruePhase, rank: int, slack: float, draw: random.Random) -> Shortage:
    """Figures of an out-of-memory message: the card is full, and the failed allocation is a part of the shortage."""
    reserved = phase.capacity - phase.outside - phase.engine - draw.uniform(0, 20 * MIB)
    fixed = phase.kept - slack * phase.allocated
    allocated = (reserved - fixed) / (1 + slack)
    tried = draw.uniform(0.3, 1.0) * (phase.allocated - allocated)
    free = min(phase.capacity - phase.outside - phase.engine - reserved, tried / 2)
    return Shortage(
        rank=rank,
        phase=phase.memory.name,
        tried_bytes=int(tried) + 1,
        free_bytes=int(free),
        allocated_bytes=int(allocated),
        reserved_bytes=int(reserved),
    )
