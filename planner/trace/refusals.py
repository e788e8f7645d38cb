"""Candidates that profiles do not stand for, as a table."""

from collections.abc import Callable

from planner.candidate import ROWS_OF_MAX_LENGTH, Candidate
from planner.memory.sharding import SHARDED
from planner.trace.profile import NoProfile

Refusals = tuple[tuple[str, Callable[[Candidate], bool]], ...]

QUANTIZED = ("none", "nf4", "nf4-double", "int8")  # whose kernels a dry run knows: probes/fake/quantized.py
SHORTEST_ROLLOUT = 9  # shorter ones are generated token by token: probes/step/shortened_rollout.py, WHOLE_ROLLOUT_TOKENS

# Candidates that the traces do not stand for, and why; in the second table those that sizes decide.
REFUSALS: Refusals = (
    ("states on the host", lambda candidate: candidate.sharding not in SHARDED and (candidate.offload_optimizer or candidate.offload_param)),
    ("activations on the host, which small ones do not go to", lambda candidate: candidate.activation_offloading),
    ("Liger kernels", lambda candidate: candidate.use_liger_kernel),
    ("quantized weights of that kind", lambda candidate: candidate.quantization not in QUANTIZED),
    ("PPO", lambda candidate: candidate.method == "ppo"),
    ("a reward model", lambda candidate: candidate.reward_model is not None),
    ("a teacher of another shape", lambda candidate: candidate.teacher_model is not None and candidate.teacher_model.config != candidate.model.config),
)
REFUSED_SIZES: Refusals = (
    ("rows cut at max_length", lambda candidate: candidate.method in ROWS_OF_MAX_LENGTH and candidate.row_tokens < _whole_row(candidate)),
    ("rollouts of a few tokens", lambda candidate: candidate.method_row.generates and candidate.max_completion_length < SHORTEST_ROLLOUT),
    ("unfinished groups", lambda candidate: candidate.method in ("grpo", "rloo") and candidate.generation_rows % candidate.num_generations != 0),
)


def refuse(refusals: Refusals, candidate: Candidate) -> None:
    """That a candidate is none of those.

    Raises:
        NoProfile: it is one.
    """
    for what, applies in refusals:
        if applies(candidate):
            raise NoProfile(f"A profile does not stand for {what}.")


def _whole_row(candidate: Candidate) -> int:
    return candidate.prompt_length + candidate.max_completion_length
