"""Seconds of communication that runs beside computation."""

# Slowdown of computation by concurrent communication, in seconds per second: both share multiprocessors, memory
# bandwidth and power. Computation beside communication takes 18.9 % longer in the mean over FSDP and pipelines of GPT
# and LLaMA on four A100 or H100. Source: arXiv 2507.03114, abstract.
CONTENTION = 1 - 1 / 1.189


def exposed_seconds(alone: float, beside: float, compute: float, layers: int) -> float:
    """Seconds that a phase of a micro-step takes beyond its `compute` seconds.

        exposed    = alone + beside / layers + (layers - 1) / layers x max(0, beside - compute)
        contention = 0.159 x the hidden part of `beside`

    `beside`: seconds on the link, one part for each layer, overlapped with the computation of a neighbouring layer.
    Nothing overlaps with the first gather, nor with the last reduce-scatter. `alone`: seconds without computation.

    Example: gathers of 1.0 s over 32 layers beside 0.8 s of computation: 0.03 + 0.97 x 0.2 + 0.16 x 0.78 = 0.35 s.
    """
    waited = beside / layers + (layers - 1) / layers * max(0.0, beside - compute)
    return alone + waited + CONTENTION * (beside - waited)
