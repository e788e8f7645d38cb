"""The candidates of a problem in order: a line for each structure, with its sizes and, where an engine is colocated, its shares of the card."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from planner.candidate import Candidate
from planner.errors import InputError
from planner.jobs.settings import settings_of_fields, settings_text
from planner.measurements.measurement import DeviceName
from planner.memory.communication import nccl_bytes
from planner.quantities import Estimate
from planner.search.knobs import SearchProblem, structures
from planner.search.search import (
    Choices,
    attempt,
    batches,
    length_field,
    longest,
    merit,
    utilizations,
    with_utilization,
)
from probes.study.posterior import Row, heavy, rows_of

Attempt = Callable[[Candidate, SearchProblem], Estimate | None]
Knobs = Mapping[str, bool | int | float | str]  # settings by their names, those that are searched
NO_SHARE = 0
FEW_SIZES = 16  # so many are looked at one by one; more are halved, since memory grows with each

# Named in every study, whether or not there is a choice.
ALWAYS_NAMED = ("gradient_checkpointing", "attn_implementation", "sharding")
SIZE_KNOBS = ("per_device_train_batch_size", "gradient_accumulation_steps")
SHARE_KNOB = "vllm_gpu_memory_utilization"
# What a training pass does not depend on; and what follows from sizes (planner/search: knobs.py `completed`, search.py `with_batch`) or is one of them.
NOT_THE_PASS = ("vllm", "num_processes", "expandable_segments", "ds3_gather")
DERIVED = frozenset(
    {
        *SIZE_KNOBS,
        SHARE_KNOB,
        "max_length",
        "prompt_length",
        "max_completion_length",
        "steps_per_generation",
        "vllm_max_model_length",
    }
)


# What runs on no CPU (probes/runner/devices.py, probes/worker/workload.py), by field of a candidate.
NOT_ON: dict[DeviceName, dict[str, frozenset[str]]] = {
    "cuda": {},
    "simulated": {},
    "cpu": {
        "attn_implementation": frozenset({"flash_attention_2", "flash_attention_3"}),
        "sharding": frozenset({"fsdp2"}),
        "vllm": frozenset({"colocate", "server"}),
    },
}


class Place(NamedTuple):
    """Where a candidate stands: its line, its size's index, its engine's share in hundredths (0: nothing is colocated)."""

    line: int
    size: int
    share: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Line:
    """One structure with every size it can have, smallest first."""

    name: str  # its training pass: structures that only generate differently share it
    structure: Candidate
    sizes: Choices


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Space:
    """All candidates of one class of tuning, each estimated when it is first asked for."""

    problem: SearchProblem
    device: DeviceName
    attempt: Attempt
    lines: tuple[Line, ...]
    named: tuple[str, ...]  # knobs that tell structures apart
    estimates: dict[Place, Estimate | None] = field(default_factory=dict)
    rows: dict[Place, tuple[Row, ...]] = field(default_factory=dict)
    ranges: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def candidate(self, place: Place) -> Candidate:
        candidate = self.lines[place.line].sizes[place.size]
        return candidate if place.share == NO_SHARE else with_utilization(candidate, place.share, self.problem)

    def estimate(self, place: Place) -> Estimate | None:
        """None: it would not start."""
        if place not in self.estimates:
            self.estimates[place] = self.attempt(self.candidate(place), self.problem)
        return self.estimates[place]

    def rows_at(self, place: Place) -> tuple[Row, ...]:
        """Every phase of a candidate that starts."""
        if place not in self.rows:
            answer = self.estimate(place)
            assert answer is not None
            # the simulated device counts NCCL's buffers as torch's (probes/runner/simulated_card.py, NOT_RESERVED)
            nccl = 0 if self.device == "simulated" else nccl_bytes(answer.candidate, self.problem.cluster.gpu)
            self.rows[place] = rows_of(answer, self.lines[place.line].name, nccl, self.device)
        return self.rows[place]

    def heavy_rows(self, place: Place) -> list[Row]:
        return heavy(self.rows_at(place))

    def merit(self, place: Place) -> tuple[float, ...]:
        """What the job asks for. Full fine-tuning in float32 comes before any in 16 bits, which rounds what is learned (planner/search/search.py)."""
        answer = self.estimate(place)
        assert answer is not None
        precise = answer.candidate.tuning == "lora" or answer.candidate.dtype == "float32"
        return (float(precise), *merit(answer, self.problem.job))

    def shares(self, line: int, size: int) -> tuple[int, int]:
        """The engine's shares of the card from what it needs to start to what there is; first above last: it cannot start."""
        if self.lines[line].structure.vllm != "colocate":
            return NO_SHARE, NO_SHARE
        if (line, size) not in self.ranges:
            self.ranges[line, size] = utilizations(self.lines[line].sizes[size], self.problem)
        return self.ranges[line, size]

    def leanest(self, line: int, size: int) -> Place:
        return Place(line, size, self.shares(line, size)[0])

    def starts(self, place: Place) -> bool:
        low, high = self.shares(place.line, place.size)
        return low <= place.share <= high and self.estimate(place) is not None

    def within(self, small: Place, large: Place) -> bool:
        """Whether one candidate takes no more than another because it is the same with less: of the card for its engine, or of many sizes.

        Where sizes are few a larger micro-batch means fewer of them, and gradients need not stay in between: it may take less.
        """
        if small.line != large.line or small.share > large.share:
            return False
        return small.size == large.size or (small.size < large.size and len(self.lines[small.line].sizes) > FEW_SIZES)

    def knobs(self, place: Place) -> dict[str, bool | int | float | str]:
        """The settings of a candidate that the search turns."""
        candidate = self.candidate(place)
        shown = {name: getattr(candidate, name) for name in (*self.named, *SIZE_KNOBS, length_field(candidate))}
        return {**shown, SHARE_KNOB: candidate.vllm_gpu_memory_utilization} if place.share else shown

    def shown(self, place: Place, beside: Place | None = None) -> str:
        """The settings of a candidate as text: those of its size, and of its structure those that others have otherwise; or that `beside` has otherwise."""
        knobs, other = self.knobs(place), {} if beside is None else self.knobs(beside)
        off = () if knobs.get("vllm", "off") != "off" else ("vllm_", "ds3_")
        told = {
            name: value
            for name, value in knobs.items()
            if name in self.varying and not name.startswith((*off, "expandable_segments"))
        }
        return settings_text(
            settings_of_fields(
                {name: value for name, value in told.items() if name not in other or other[name] != value}
            )
        )

    @property
    def varying(self) -> frozenset[str]:
        """Knobs that are not the same in every candidate."""
        of_structure = {name for name in self.named if len({getattr(line.structure, name) for line in self.lines}) > 1}
        return frozenset({*of_structure, *SIZE_KNOBS, length_field(self.lines[0].structure), SHARE_KNOB})

    def place(self, knobs: Knobs) -> Place | None:
        """The candidate with these settings; None where there is none."""
        for line, each in enumerate(self.lines):
            if all(getattr(each.structure, name) == knobs.get(name) for name in self.named):
                return next(
                    (
                        Place(line, size, round(100 * float(knobs.get(SHARE_KNOB, 0))))
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


def space_of(problem: SearchProblem, device: DeviceName, attempt: Attempt = attempt) -> Space:
    """Raises InputError where the job's pins leave nothing that runs on the device."""
    found = [
        each
        for each in structures(problem)
        if not any(getattr(each, name) in values for name, values in NOT_ON[device].items())
    ]
    if not found:
        raise InputError(
            f"Nothing that this asks for runs on the {device} device. Drop a --set, or give another --device."
        )
    differing = [
        entry.name
        for entry in fields(Candidate)
        if any(getattr(each, entry.name) != getattr(found[0], entry.name) for each in found[1:])
    ]
    named = tuple(dict.fromkeys((*ALWAYS_NAMED, *(name for name in differing if name not in DERIVED))))
    sized = (
        (each, longest(each, problem) if problem.job.optimize == "max-length" else batches(each, problem.job))
        for each in found
    )
    lines = tuple(Line(name=_name(each, named), structure=each, sizes=sizes) for each, sizes in sized if sizes)
    return Space(problem=problem, device=device, attempt=attempt, lines=lines, named=named)


def _name(structure: Candidate, named: tuple[str, ...]) -> str:
    return " ".join(f"{name}={getattr(structure, name)}" for name in named if not name.startswith(NOT_THE_PASS))
