"""Simulate a candidate's training step: run a dry run of one process, and compose its trace into a rank's memory."""

from planner.allocator.simulation import Simulation, compose, single_process
from planner.allocator.trace import Trace
from planner.candidate import Candidate
from planner.errors import DryRunUnsupported, PlanError
from planner.gpus.cluster import Gpu
from planner.quantities import Estimate
from probes.dryrun.dry_run import Kernels as Kernels
from probes.dryrun.dry_run import dry_run as dry_run

REASON_LENGTH = 200  # characters of a library's error message that are shown


def simulate(estimate: Estimate, kernels: Kernels = "cuda") -> Simulation:
    """Simulate the first training GPU of an estimate.

    Sharding and the vLLM engine, which a single process does not have, are added from the estimate's components.

    Raises:
        DryRunUnsupported: a dry run cannot show one of the settings, or the installed libraries raised an error.
    """
    candidate = estimate.candidate
    return compose(candidate, trace_step(single_process(candidate), kernels), estimate.gpus[0])


def kernels_of(gpu: Gpu | None) -> Kernels:
    """Return which kernels run on a GPU; without a GPU, those of the CPU, as a probe with `--device cpu` runs them."""
    if gpu is None:
        return "cpu"
    return "cuda" if gpu.supports_flash_attention_2 else "cuda before 8.0"


def trace_step(candidate: Candidate, kernels: Kernels = "cuda") -> Trace:
    """Return the trace of one training step of a single process.

    Raises:
        DryRunUnsupported: a dry run cannot show one of the settings, or the installed libraries raised an error.
    """
    try:
        return dry_run(candidate, kernels, steps=1)
    except PlanError:
        raise
    except Exception as error:  # any error of the installed libraries means that they cannot run this candidate
        raise unsupported_by_libraries(error) from error


def unsupported_by_libraries(error: Exception) -> DryRunUnsupported:
    """Return an exception of the installed libraries as a `DryRunUnsupported` that names the package or the error."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return DryRunUnsupported(
            f"The installed libraries need {package} for it, which is not installed: pip install {package}."
        )
    reason = " ".join(str(error).split())[:REASON_LENGTH]
    return DryRunUnsupported(f"The installed libraries stop at it: {type(error).__name__}: {reason}")
