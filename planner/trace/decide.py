"""The deciding rung of a search: an estimate whose training GPU is as its recipe's profile has it, where there is a profile."""

from dataclasses import replace

from planner.confidence import fit_probability, quantile, sigma_bytes
from planner.quantities import TOTAL_BYTES, Estimate, GpuMemory, Phase, PhaseMemory
from planner.trace.compose import OF_THE_ENGINE, OUTSIDE
from planner.trace.store import simulated_phases


def decided(answer: Estimate, risk: float) -> Estimate:
    """The estimate with its training GPUs simulated; the estimate itself where no profile speaks of the candidate.

        a phase = what the profile's heaviest moment holds + the estimate's components outside the trainer's tensors (compose.OUTSIDE)

    Those stay estimates, with their spread; what is simulated has none. Takes a millisecond, no torch. Phases that one process does not
    go through, and those of a vLLM engine, stay as estimated.
    """
    simulated = simulated_phases(answer.candidate)
    if simulated is None:
        return answer
    train, *others = answer.gpus
    gpu = _simulated(train, simulated, OF_THE_ENGINE if answer.candidate.vllm != "off" else (), risk)
    probabilities = [_fit_probability(gpu), *(fit_probability(other.peak, other.capacity_bytes) for other in others)]
    fits = all(each.interval_bytes[1] <= each.capacity_bytes for each in (gpu, *others))
    return replace(answer, gpus=(gpu, *others), evidence="simulated", fit_probability=min(probabilities), fits=fits)


def _simulated(gpu: GpuMemory, simulated: tuple[PhaseMemory, ...], estimated_only: tuple[Phase, ...], risk: float) -> GpuMemory:
    rows = {phase.name: phase for phase in gpu.phases}
    for phase in simulated:
        if phase.name not in estimated_only:
            around = _outside(rows.get(phase.name, rows["forward"])).components
            rows[phase.name] = PhaseMemory(name=phase.name, components=phase.components | around)
    heaviest = max(rows.values(), key=TOTAL_BYTES)
    reach = quantile(risk) * sigma_bytes(_outside(heaviest))
    interval_bytes = max(0, int(heaviest.total_bytes - reach)), int(heaviest.total_bytes + reach)
    return replace(gpu, phases=tuple(rows.values()), interval_bytes=interval_bytes)


def _outside(phase: PhaseMemory) -> PhaseMemory:
    return PhaseMemory(name=phase.name, components={name: size for name, size in phase.components.items() if name in OUTSIDE})


def _fit_probability(gpu: GpuMemory) -> float:
    """Probability that the heaviest phase stays within the card."""
    outside = _outside(gpu.peak)
    return fit_probability(outside, gpu.capacity_bytes - (gpu.peak_bytes - outside.total_bytes))
