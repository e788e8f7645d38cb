"""The deciding rung of a search: an estimate whose training GPU is as its recipe's profile has it, where there is a profile."""

from dataclasses import replace

from planner.cluster import Cluster
from planner.confidence import fit_probability, quantile, sigma_bytes
from planner.quantities import TOTAL_BYTES, Component, Estimate, GpuMemory, PhaseMemory
from planner.trace.store import simulated_phases

# What a profile does not see: these stay estimates, with their spread.
OUTSIDE_THE_TRACE: frozenset[Component] = frozenset({"runtime", "communication", "fragmentation"})


def decided(answer: Estimate, cluster: Cluster, risk: float) -> Estimate:
    """The estimate with its training GPUs simulated; the estimate itself where no profile speaks of the candidate.

    The phases that a dry run does not tell apart, such as `score`, keep what the formulas say. Takes a millisecond, no torch.
    """
    simulated = simulated_phases(answer.candidate, cluster.gpu)
    if simulated is None:
        return answer
    by_name = {phase.name: phase for phase in simulated}
    train, *others = answer.gpus
    phases = tuple(by_name.pop(phase.name, phase) for phase in train.phases) + tuple(by_name.values())
    gpus = (_gpu(train, phases, risk), *others)
    probability = _fit_probability(gpus[0])
    return replace(
        answer, gpus=gpus, evidence="simulated", fit_probability=min(probability, answer.fit_probability) if others else probability,
        fits=all(gpu.interval_bytes[1] <= gpu.capacity_bytes for gpu in gpus),
    )  # fmt: skip


def _gpu(gpu: GpuMemory, phases: tuple[PhaseMemory, ...], risk: float) -> GpuMemory:
    heaviest = max(phases, key=TOTAL_BYTES)
    reach = quantile(risk) * sigma_bytes(_outside(heaviest))
    interval_bytes = max(0, int(heaviest.total_bytes - reach)), int(heaviest.total_bytes + reach)
    return replace(gpu, phases=phases, interval_bytes=interval_bytes)


def _outside(phase: PhaseMemory) -> PhaseMemory:
    return PhaseMemory(name=phase.name, components={name: size for name, size in phase.components.items() if name in OUTSIDE_THE_TRACE})


def _fit_probability(gpu: GpuMemory) -> float:
    """Probability that the heaviest phase stays within the card: what is counted exactly has no spread."""
    outside = _outside(gpu.peak)
    exact_bytes = gpu.peak_bytes - outside.total_bytes
    return fit_probability(outside, gpu.capacity_bytes - exact_bytes)
