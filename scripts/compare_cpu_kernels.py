"""Compare estimates, which are of a GPU's kernels, with dry runs of the CPU's kernels; write results/cpu_kernels.md.

    python -m scripts.compare_cpu_kernels

The prior "logits" of probes on the CPU (probes/study/posterior.py) rests on it. Needs the extra training.
"""

from itertools import product
from pathlib import Path
from statistics import mean, stdev

from planner import estimate
from planner.errors import PlanError
from planner.measurements.corrected_estimate import NOT_ON_A_CPU
from planner.training_stack import dry_run
from probes.study.posterior import logits_bytes

RESULT = Path(__file__).parents[1] / "results" / "cpu_kernels.md"
MODELS = ("SmolLM2-135M", "Qwen2.5-0.5B")
METHODS = ("sft", "dpo", "kto", "orpo", "reward", "grpo")
ROWS = {"batch_size": 4, "max_length": 512}
SIZES = {"grpo": {"batch_size": 4, "prompt_length": 256, "max_completion_length": 256, "num_generations": 4}}
TUNINGS = ("full", "lora")
HEAD = """# Estimates against dry runs of the CPU's kernels

An estimate is of the kernels that a GPU runs. A probe on the CPU runs others, whose loss keeps logits that a GPU's
does not. Each row is one candidate (4 samples of 512 tokens, TRL's defaults otherwise): the bytes of tensors in the
heaviest phase of the dry run, and what is above the estimate as a multiple of a micro-batch's logits in float32.
Nothing here ran on a GPU.

Made by `python -m scripts.compare_cpu_kernels`.

| method | model | tuning | phase | estimated | CPU's kernels | above, in logits |
|---|---|---|---|---:|---:|---:|
"""


def compared(model: str, method: str, tuning: str) -> tuple[str, float] | None:
    """Return the row of one candidate and its multiple of the logits; None if it cannot be estimated or simulated."""
    try:
        expected = estimate(model, "1xA100-80G", method=method, tuning=tuning, **SIZES.get(method, ROWS))
        trace = dry_run(expected, None, lambda line: None).trace
    except PlanError as error:
        print(model, method, tuning, error, flush=True)
        return None
    phases = {phase.name: phase for phase in expected.gpus[0].phases}
    heaviest = max((each for each in trace.phases if each.name in phases), key=lambda each: each.total_bytes)
    components = phases[heaviest.name].components
    tensors = sum(size for name, size in components.items() if name not in NOT_ON_A_CPU)
    share = (heaviest.total_bytes - tensors) / logits_bytes(expected.candidate)
    cells = (method, model, tuning, heaviest.name, f"{tensors:,}", f"{heaviest.total_bytes:,}", f"{share:+.2f}")
    return f"| {' | '.join(cells)} |", share


def main() -> None:
    rows = []
    for model, method, tuning in product(MODELS, METHODS, TUNINGS):
        if (row := compared(model, method, tuning)) is not None:
            print(row[0], flush=True)
            rows.append(row)
    shares = [share for _, share in rows]
    summary = f"\n**Summary.** {len(rows)} rows: mean {mean(shares):+.2f}, standard deviation {stdev(shares):.2f}.\n"
    RESULT.write_text(HEAD + "\n".join(text for text, _ in rows) + "\n" + summary, encoding="utf-8")


if __name__ == "__main__":
    main()
