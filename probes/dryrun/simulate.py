"""A candidate's dry run as the planner asks for it: one process' step, composed with what sharding and an engine add."""

from planner.allocator.simulation import Simulation, compose, single_process
from planner.allocator.trace import Trace
from planner.candidate import Candidate
from planner.errors import DryRunUnsupported, PlanError
from planner.gpus.cluster import Gpu
from planner.quantities import Estimate
from probes.dryrun.dry_run import Ways as Ways
from probes.dryrun.dry_run import dry_run as dry_run

REASON_LENGTH = 200  # characters of a library's message that are shown


def simulate(estimate: Estimate, ways: Ways = "cuda") -> Simulation:
    """The first training GPU of an estimate, simulated. `ways`: with whose kernels, the CPU's own as a probe there runs them.

    Raises:
        DryRunUnsupported: a setting that a dry run cannot show, or one at which the installed libraries stop.
    """
    candidate = estimate.candidate
    return compose(candidate, traced(single_process(candidate), ways), estimate.gpus[0])


def simulate_on(estimate: Estimate, gpu: Gpu | None) -> Simulation:
    """As `simulate`, with the kernels of a card, or where there is none with those that a probe on the CPU runs."""
    return simulate(estimate, "cpu" if gpu is None else ways_on(gpu))


def ways_on(gpu: Gpu) -> Ways:
    return "cuda" if gpu.supports_flash_attention_2 else "cuda before 8.0"


def traced(candidate: Candidate, ways: Ways = "cuda") -> Trace:
    """The trace of the candidate's step in one process.

    Raises:
        DryRunUnsupported: a setting that a dry run cannot show, or the installed libraries raise.
    """
    try:
        return dry_run(candidate, ways, steps=1)
    except PlanError:
        raise
    except Exception as error:  # whatever the installed libraries raise is the answer that they cannot run this
        raise stopped_at(error) from error


def stopped_at(error: Exception) -> DryRunUnsupported:
    """What the installed libraries raised, as an answer."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return DryRunUnsupported(
            f"The installed libraries need {package} for it, which is not installed: pip install {package}."
        )
    reason = " ".join(str(error).split())[:REASON_LENGTH]
    return DryRunUnsupported(f"The installed libraries stop at it: {type(error).__name__}: {reason}")
