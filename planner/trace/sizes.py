"""The sizes that a profile is asked with, and their regime: which thresholds they are beyond, where allocations depend on them by one."""

from planner.candidate import Candidate
from planner.model import ModelShape
from planner.trace.architecture import WIDTH_FIELDS, head_of, numbers
from planner.trace.profile import NoProfile
from planner.trace.refusals import REFUSED_SIZES, refuse
from planner.trace.terms import TOKEN_CHUNK

MASK_ALIGNMENT = 16  # the memory-efficient kernel pads masks to it: probes/fake/substitutions.py, EFFICIENT_BIAS_ALIGNMENT
MANY_CHUNKS = 3  # a first, a last, and some between: from here on every further one is like those between
GENERATING_AHEAD = ("grpo", "rloo", "distillation")  # for several micro-steps at once, with lists that have a tensor a row
MANY_ROWS = 4  # the fewest that make two groups of two; fewer are regimes of their own
SEVERAL_STEPS = 2  # the first makes gradients, the second adds to them, and so does every further one


def sizes_of(candidate: Candidate) -> dict[str, int]:
    """What a profile is asked with: the values of `terms.py`."""
    config = candidate.model.config
    hidden, intermediate, heads, key_heads, vocabulary = numbers(config, *WIDTH_FIELDS)
    sizes = {
        "rows": candidate.per_device_train_batch_size, "tokens": candidate.row_tokens, "hidden": hidden, "intermediate": intermediate, "heads": heads,
        "key heads": key_heads, "head": head_of(config), "vocabulary": vocabulary, "rank": candidate.lora_r,
        "accumulation": candidate.gradient_accumulation_steps,
    }  # fmt: skip
    if not candidate.method_row.generates:
        return sizes
    generated = candidate.generation_rows
    groups = generated // candidate.num_generations if candidate.method in ("grpo", "rloo") else generated
    rollout = {"prompt": candidate.prompt_length, "completion": candidate.max_completion_length, "generated": generated, "groups": groups}
    return sizes | rollout


def regime(candidate: Candidate) -> dict[str, object]:
    """Which thresholds a candidate's sizes are beyond.

    One row copies less than two; more tokens than a chunk of TRL's loss are scored in a loop; a mask whose length is no multiple of 16
    is padded for the memory-efficient kernel; what accumulates stays.

    Raises:
        NoProfile: it is not one of the sizes that traces stand for.
    """
    refuse(REFUSED_SIZES, candidate)
    found: dict[str, object] = {
        "one row": candidate.per_device_train_batch_size == 1,
        "chunks": chunks(candidate),
        "aligned": [length % MASK_ALIGNMENT == 0 for length in _masked_lengths(candidate)],
        "window": beyond_window(candidate),
        "accumulation": traced_accumulation(candidate),
    }
    if candidate.method not in GENERATING_AHEAD:
        return found
    several = {"rows": traced_rows(candidate), "several prompts": sizes_of(candidate)["groups"] > 1}
    return found | several | ({} if for_a_step(candidate) else {"generated": candidate.generation_rows})


def for_a_step(candidate: Candidate) -> bool:
    """Whether as much is generated at once as an optimizer step trains on: then any number of micro-steps has one profile."""
    return candidate.method not in ("grpo", "rloo") or candidate.steps_per_generation == candidate.gradient_accumulation_steps


def traced_accumulation(candidate: Candidate) -> int:
    """The fewest micro-steps that stand for a candidate's; of single rows several prompts, which are pairs at least, need two of them."""
    steps = candidate.gradient_accumulation_steps
    if not for_a_step(candidate):
        return steps
    single = candidate.method in ("grpo", "rloo") and candidate.per_device_train_batch_size == 1
    return min(steps, 2 * SEVERAL_STEPS if single and sizes_of(candidate)["groups"] > 1 else SEVERAL_STEPS)


def traced_rows(candidate: Candidate) -> int:
    """The fewest rows that stand for those of a candidate that generates ahead."""
    rows = candidate.per_device_train_batch_size
    return min(rows, MANY_ROWS) if for_a_step(candidate) else rows


def _masked_lengths(candidate: Candidate) -> list[int]:
    """The lengths of masks that attention is given; FlashAttention is given none."""
    if candidate.attn_implementation == "flash_attention_2":
        return []
    tokens, prompt = candidate.row_tokens, candidate.prompt_length
    return [tokens, tokens - 1, prompt, prompt + 1, prompt + 2] if candidate.method_row.generates and candidate.vllm == "off" else [tokens]


def chunks(candidate: Candidate) -> int:
    """Chunks that the loss is computed in, the many taken together; 0 where it is not chunked.

    Raises:
        NoProfile: it depends on how many tokens of each row are scored.
    """
    if candidate.method_row.loss not in ("fused", "divergence"):
        return 0
    scored = candidate.max_completion_length if candidate.method_row.generates else candidate.row_tokens
    counts = {min(-(-candidate.rows * max(length, 1) // TOKEN_CHUNK), MANY_CHUNKS) for length in (scored, scored - 2)}
    if len(counts) > 1:
        raise NoProfile(f"{candidate.rows} rows of {scored} tokens are too near to a whole number of chunks.")
    return counts.pop()


def beyond_window(candidate: Candidate) -> str:
    """Whether attention's window is shorter than the rows.

    Raises:
        NoProfile: `generate` keeps a cache as long as the window.
    """
    window = window_of(candidate.model)
    if not window:
        return "none"
    if window > candidate.row_tokens:
        return "longer"
    if candidate.method_row.generates and candidate.vllm == "off":
        raise NoProfile("A profile does not stand for caches as long as a window.")
    return "shorter"


def window_of(model: ModelShape) -> int:
    """Tokens that attention's window holds; 0 where it has none."""
    window = model.config.get("sliding_window")
    return window if isinstance(window, int) and model.config.get("use_sliding_window") is not False else 0
