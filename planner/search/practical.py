"""Impractical plans that fit: steps of many minutes, and `generate` with large models."""

from planner.quantities import Estimate, Note

# A run of a few hundred optimizer steps takes days from here on.
LONGEST_STEP_SECONDS = 600.0
# From this size on every expert uses an inference engine: `generate` reads all weights for each token, without paged
# attention or CUDA graphs (TRL, docs/source/speeding_up_training.md).
LARGEST_GENERATED_PARAMS = 30 * 10**9


def impractical(answer: Estimate) -> tuple[Note, ...]:
    """Return a note that says why nobody would train like this; empty for a practical plan."""
    candidate, seconds = answer.candidate, answer.throughput.step_seconds
    if seconds > LONGEST_STEP_SECONDS:
        return (Note("step_too_long", {"samples": candidate.effective_batch_size, "step_seconds": seconds}),)
    generates = candidate.method_row.generates and candidate.vllm == "off"
    if generates and candidate.model.params > LARGEST_GENERATED_PARAMS:
        share = answer.throughput.seconds["generation"] / seconds
        return (Note("generates_large_model", {"model": candidate.model.id, "share": share}),)
    return ()
