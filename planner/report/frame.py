"""Estimates and plans as pandas frames, for notebooks. Needs the [report] extra."""

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from planner.confidence import shown_probability
from planner.errors import PlanError
from planner.jobs.settings import settings_of
from planner.planning import Plan
from planner.quantities import Estimate
from planner.report.sentences import CLASS_LABELS, sentence
from planner.report.words import describe_excess
from planner.search.knobs import SearchProblem, tuning_classes
from planner.search.search import NEAR_BEST, Considered, examined

if TYPE_CHECKING:
    import pandas as pd


def breakdown(estimate: Estimate) -> "pd.DataFrame":
    """Return bytes by component, one row for each GPU role and phase; a component that a phase lacks is 0.

    Raises:
        PlanError: pandas is not installed.
    """
    rows = {(gpu.role, phase.name): dict(phase.components) for gpu in estimate.gpus for phase in gpu.phases}
    columns = list(dict.fromkeys(component for row in rows.values() for component in row))
    pandas = _pandas()
    index = pandas.MultiIndex.from_tuples(rows, names=["gpu", "phase"])
    return pandas.DataFrame(
        [[row.get(column, 0) for column in columns] for row in rows.values()], index=index, columns=columns
    )


def candidates(plan: Plan) -> "pd.DataFrame":
    """Return one row for each candidate of a plan, the best first: memory, speed, then its settings.

    Raises:
        PlanError: pandas is not installed.
    """
    labelled = [
        ("best", plan.best),
        *((sentence(other.change), other.estimate) for other in plan.alternatives),
        *((sentence(remedy.change), remedy.estimate) for remedy in plan.remedies),
    ]
    return frame_of({"label": label, **estimate_figures(estimate)} for label, estimate in labelled).set_index("label")


def considered(plan: Plan) -> "pd.DataFrame":
    """Return one row for each structure that a search of the job considers, with why it was not recommended.

    Searches every tuning class of the job again, without offloading, which takes as long as the plan did. A structure
    that was not estimated has its settings and the reason alone.

    Raises:
        PlanError: pandas is not installed.
    """
    speed, rows = plan.best.throughput.tokens_per_second, list[dict[str, object]]()
    for label, each in examined_structures(plan):
        shown = settings_of(each.structure) if each.answer is None else estimate_figures(each.answer)
        rows.append({"label": label, "reason": each.reason or _lost(each.answer, speed), **shown})
    return frame_of(rows).set_index("label")


def examined_structures(plan: Plan) -> Iterator[tuple[str, Considered]]:
    """Yield every structure that a search of the job considers, with the words for its tuning class."""
    for name in tuning_classes(plan.job):
        for each in examined(SearchProblem(job=plan.job, cluster=plan.cluster, tuning_class=name)):
            yield CLASS_LABELS[name], each


def _lost(answer: Estimate | None, best_speed: float) -> str:
    """Return why a structure that was examined was not recommended."""
    if answer is None:
        return "no batch is allowed, or the vLLM engine does not start"
    if not answer.fits:
        return f"does not fit, {describe_excess(answer)}"
    share = answer.throughput.tokens_per_second / best_speed if best_speed else 1.0
    if share < NEAR_BEST:
        return f"{share:.2f} times the speed of the best"
    return "within 2 % of the best speed" if share <= 1 / NEAR_BEST else "faster; another tuning class is preferred"


def frame_of(rows: Iterable[Mapping[str, object]]) -> "pd.DataFrame":
    """Return rows as a frame.

    Raises:
        PlanError: pandas is not installed.
    """
    return _pandas().DataFrame(list(rows))


def is_frame(value: object) -> bool:
    """True if a value is a frame.

    Raises:
        PlanError: pandas is not installed.
    """
    return isinstance(value, _pandas().DataFrame)


def estimate_figures(estimate: Estimate) -> dict[str, object]:
    """Return memory, speed and settings of a candidate: a row without its label."""
    heaviest = max(estimate.gpus, key=lambda gpu: gpu.peak_bytes)
    found = {
        "fits": estimate.fits,
        "tight": estimate.tight,
        "fit_probability": shown_probability(estimate.fit_probability),
        "evidence": estimate.evidence,
        "peak_bytes": heaviest.peak_bytes,
        "peak_phase": heaviest.peak_phase,
        "reserved_bytes": heaviest.reserved_bytes,
        "nvidia_smi_bytes": heaviest.nvidia_smi_bytes,
        "capacity_bytes": heaviest.capacity_bytes,
        "host_peak_bytes": estimate.host_peak_bytes,
        "host_capacity_bytes": estimate.host_capacity_bytes,
        "tokens_per_second": estimate.throughput.tokens_per_second,
        "step_seconds": estimate.throughput.step_seconds,
    }
    return found | settings_of(estimate.candidate)


def _pandas() -> ModuleType:
    try:
        return import_module("pandas")
    except ImportError as error:
        raise PlanError(
            "Frames need pandas, which is in the report extra: pip install 'finetune-plan[report]'."
        ) from error
