"""The search space of a study: a line for each structure, with its sizes and a colocated engine's GPU shares."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct, field

from planner.candidate import FIELDS, Candidate
from planner.errors import InputError
from planner.jobs.settings import settings_of_fields, settings_text
from planner.measurements.measurement import DeviceName
from planner.memory.communication import nccl_bytes
from planner.quantities import Estimate
from planner.search.fit import estimate_or_none, utilization_range, with_utilization
from planner.search.knobs import SearchProblem
from planner.search.search import merit
from planner.search.sizes import CandidateSizes, batch_sizes, length_field, length_sizes
from planner.search.structures import structures
from planner.settings.table import searched_as
from probes.study.posterior import PhaseModel, heavy_phases, phase_models

Estimator = Callable[[Candidate, SearchProblem], Estimate | None]
Knobs = Mapping[str, bool | int | float | str]  # the searched settings of a candidate, by name
NO_SHARE = 0
# Up to this many sizes of a line are examined one by one; more are bisected, since memory then grows with the size.
FEW_SIZES = 16

# Parameters of every study, even those with a single value.
ALWAYS_KNOBS = ("gradient_checkpointing", "attn_implementation", "sharding")
SIZE_KNOBS = ("per_device_train_batch_size", "gradient_accumulation_steps")
SHARE_KNOB = "vllm_gpu_memory_utilization"
# Settings, by their beginnings, on which the memory of a training pass does not depend.
IRRELEVANT_TO_PASS = ("vllm", "num_processes", "expandable_segments", "ds3_gather")
# Settings that are sizes or follow from them.
DERIVED = searched_as("size", "length", "derived")
# Values that a device cannot run, by field of a candidate (probes/runner/devices.py, probes/worker/workload.py).
UNSUPPORTED: dict[DeviceName, dict[str, frozenset[str]]] = {
    "cuda": {},
    "emulated": {},
    "cpu": {
        "attn_implementation": frozenset({"flash_attention_2", "flash_attention_3"}),
        "sharding": frozenset({"fsdp2", "fsdp1"}),
        "vllm": frozenset({"colocate", "server"}),
    },
}


class GridPoint(NamedTuple):
    """A candidate as a point of the grid: indices of its line and of its size, and the engine's share of the GPU.

    The share is in percent, `NO_SHARE` if no vLLM engine is colocated.
    """

    line: int
    size: int
    share: int


class SizeLine(Struct, frozen=True, kw_only=True, eq=False):
    """One structure (all settings but the sizes) with every size it can have, smallest first."""

    name: str  # of its training pass: structures that differ in generation only share it
    structure: Candidate
    sizes: CandidateSizes


class Space(Struct, frozen=True, kw_only=True, eq=False):
    """All candidates of one tuning class. Estimates and points of settings are cached."""

    problem: SearchProblem
    device: DeviceName
    estimator: Estimator
    lines: tuple[SizeLine, ...]
    structure_knobs: tuple[str, ...]  # settings in which structures differ, and `ALWAYS_KNOBS`
    estimates: dict[GridPoint, Estimate | None] = field(default_factory=dict)
    models: dict[GridPoint, tuple[PhaseModel, ...]] = field(default_factory=dict)
    ranges: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    points: dict[frozenset[tuple[str, bool | int | float | str]], GridPoint | None] = field(default_factory=dict)

    def candidate(self, point: GridPoint) -> Candidate:
        """Return the candidate at a point."""
        candidate = self.lines[point.line].sizes[point.size]
        return candidate if point.share == NO_SHARE else with_utilization(candidate, point.share, self.problem)

    def estimate(self, point: GridPoint) -> Estimate | None:
        """Return the estimate of a point; None if the vLLM engine would refuse to start."""
        if point not in self.estimates:
            self.estimates[point] = self.estimator(self.candidate(point), self.problem)
        return self.estimates[point]

    def phase_models(self, point: GridPoint) -> tuple[PhaseModel, ...]:
        """Return the models of all phases of a point whose engine starts."""
        if point not in self.models:
            answer = self.estimate(point)
            assert answer is not None
            nccl = nccl_bytes(answer.candidate)
            self.models[point] = phase_models(answer, self.lines[point.line].name, nccl, self.device)
        return self.models[point]

    def heavy_phases(self, point: GridPoint) -> list[PhaseModel]:
        """Return the models of the phases that could need the most memory at a point."""
        return heavy_phases(self.phase_models(point))

    def merit(self, point: GridPoint) -> tuple[float, ...]:
        """Return the rank of a point by the job's goal, as a tuple to compare: more is better.

        Full fine-tuning in float32 comes before any in 16 bits, whose weight updates are rounded
        (planner/search/search.py).
        """
        answer = self.estimate(point)
        assert answer is not None
        precise = answer.candidate.tuning == "lora" or answer.candidate.dtype == "float32"
        return (float(precise), *merit(answer, self.problem.job))

    def shares(self, line: int, size: int) -> tuple[int, int]:
        """Return the smallest and the largest share of the GPU for the engine, in percent.

        The smallest is what the engine needs to start; if it is above the largest, the engine cannot start.
        """
        if self.lines[line].structure.vllm != "colocate":
            return NO_SHARE, NO_SHARE
        if (line, size) not in self.ranges:
            self.ranges[line, size] = utilization_range(self.lines[line].sizes[size], self.problem)
        return self.ranges[line, size]

    def with_smallest_share(self, line: int, size: int) -> GridPoint:
        """Return the point of a size with the smallest share for the engine."""
        return GridPoint(line, size, self.shares(line, size)[0])

    def starts(self, point: GridPoint) -> bool:
        """Return whether the vLLM engine starts at a point, if it has one, and a node has enough host memory for it."""
        low, high = self.shares(point.line, point.size)
        answer = self.estimate(point)
        return low <= point.share <= high and answer is not None and answer.host_over_bytes <= 0

    def needs_no_more(self, small: GridPoint, large: GridPoint) -> bool:
        """Return whether `small` is known to need no more memory than `large`, whatever the device.

        It is on the same line, with the same share for the engine or less, and the same size, or a smaller one of many.
        Few sizes are micro-batches: a larger one may need less, since with fewer micro-batches no gradients are
        accumulated.
        """
        if small.line != large.line or small.share > large.share:
            return False
        return small.size == large.size or (small.size < large.size and len(self.lines[small.line].sizes) > FEW_SIZES)

    def knobs(self, point: GridPoint) -> dict[str, bool | int | float | str]:
        """Return the searched settings of a point."""
        candidate = self.candidate(point)
        settings = {
            name: getattr(candidate, name) for name in (*self.structure_knobs, *SIZE_KNOBS, length_field(candidate))
        }
        return {**settings, SHARE_KNOB: candidate.vllm_gpu_memory_utilization} if point.share else settings

    def describe(self, point: GridPoint, reference: GridPoint | None = None) -> str:
        """Return as text the settings of a point that differ between candidates; with `reference`, from that point."""
        knobs, other = self.knobs(point), {} if reference is None else self.knobs(reference)
        off = () if knobs.get("vllm", "off") != "off" else ("vllm_", "ds3_")
        differing = {
            name: value
            for name, value in knobs.items()
            if name in self.varying and not name.startswith((*off, "expandable_segments"))
        }
        return settings_text(
            settings_of_fields(
                {name: value for name, value in differing.items() if name not in other or other[name] != value}
            )
        )

    @property
    def varying(self) -> frozenset[str]:
        """Names of the settings that are not the same in every candidate."""
        of_structure = {
            name for name in self.structure_knobs if len({getattr(line.structure, name) for line in self.lines}) > 1
        }
        return frozenset({*of_structure, *SIZE_KNOBS, length_field(self.lines[0].structure), SHARE_KNOB})

    def point(self, knobs: Knobs) -> GridPoint | None:
        """Return the point with these settings; None if there is none."""
        key = frozenset(knobs.items())
        if key not in self.points:
            self.points[key] = self._point(knobs)
        return self.points[key]

    def _point(self, knobs: Knobs) -> GridPoint | None:
        for line, each in enumerate(self.lines):
            if all(getattr(each.structure, name) == knobs.get(name) for name in self.structure_knobs):
                return next(
                    (
                        GridPoint(line, size, round(100 * float(knobs.get(SHARE_KNOB, 0))))
                        for size in self._sizes(line, knobs)
                    ),
                    None,
                )
        return None

    def _sizes(self, line: int, knobs: Knobs) -> Iterator[int]:
        for size in range(len(self.lines[line].sizes)):
            candidate = self.lines[line].sizes[size]
            if all(getattr(candidate, name) == knobs.get(name) for name in (*SIZE_KNOBS, length_field(candidate))):
                yield size


def space_of(problem: SearchProblem, device: DeviceName, estimator: Estimator = estimate_or_none) -> Space:
    """Build the space of a problem for a device.

    Raises:
        InputError: the job's pinned settings leave no candidate that the device can run.
    """
    found = [
        each
        for each in structures(problem)
        if not any(getattr(each, name) in values for name, values in UNSUPPORTED[device].items())
    ]
    if not found:
        raise InputError(
            f"Nothing that this asks for runs on the {device} device. Remove a --set, or give another --device."
        )
    differing = [name for name in FIELDS if any(getattr(each, name) != getattr(found[0], name) for each in found[1:])]
    structure_knobs = tuple(dict.fromkeys((*ALWAYS_KNOBS, *(name for name in differing if name not in DERIVED))))
    sized = (
        (each, length_sizes(each, problem) if problem.job.optimize == "max-length" else batch_sizes(each, problem.job))
        for each in found
    )
    lines = tuple(
        SizeLine(name=_pass_name(each, structure_knobs), structure=each, sizes=sizes) for each, sizes in sized if sizes
    )
    return Space(problem=problem, device=device, estimator=estimator, lines=lines, structure_knobs=structure_knobs)


def _pass_name(structure: Candidate, structure_knobs: tuple[str, ...]) -> str:
    """Return a name for a structure's training pass: all its settings on which the pass depends."""
    return " ".join(
        f"{name}={getattr(structure, name)}" for name in structure_knobs if not name.startswith(IRRELEVANT_TO_PASS)
    )
