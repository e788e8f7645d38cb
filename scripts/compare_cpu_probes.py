"""Compare real trainers on the CPU, measured by PyTorch's allocator, with their dry runs.

python -m scripts.compare_cpu_probes                      rewrites results/cpu_probes.md (about 20 minutes)
python -m scripts.compare_cpu_probes sft,grpo qwen2       prints the rows of these, writes nothing
"""

import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path

import torch

from planner.candidate import Candidate
from planner.errors import PlanError
from planner.measurements.measurement import Measurement
from planner.methods import METHODS, MethodName
from planner.models.from_config import shape_of
from planner.models.shape import ModelShape
from probes.dryrun.dry_run import dry_run
from probes.task import Task
from probes.worker.worker import measure

RESULT = Path(__file__).parents[1] / "results" / "cpu_probes.md"
# Sizes of the small models. Two layers of each kind; groups of query heads share a key head where the type allows it.
SIZES: dict[str, object] = {
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
OWN_KEYS = {**SIZES, "num_key_value_heads": 4}
MODELS: dict[str, dict[str, object]] = {
    "qwen2": SIZES,
    "qwen3": {**SIZES, "head_dim": 16},
    "llama": SIZES,
    "gemma3_text": {**SIZES, "head_dim": 16, "sliding_window": 64},
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {**SIZES, "pad_token_id": 0},
    "olmo2": SIZES,
    "gpt_neox": OWN_KEYS,
    "granite": SIZES,
    "smollm3": {**SIZES, "pad_token_id": 0, "no_rope_layers": [1, 0]},
    "deepseek_v2": {
        **OWN_KEYS,
        "moe_intermediate_size": 40,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "opt": {
        "vocab_size": 640,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 176,
        "word_embed_proj_dim": 64,
        "max_position_embeddings": 1024,
    },
    "falcon": {"vocab_size": 640, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "glm4": {**SIZES, "head_dim": 16, "pad_token_id": 0},
    "gpt2": {"vocab_size": 640, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024},
    "gpt_oss": {
        **SIZES,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
ROWS = 4
LENGTHS: dict[str, object] = {
    "max_length": 128,
    "prompt_length": 32,
    "max_completion_length": 32,
    "num_generations": 2,
    "per_device_train_batch_size": ROWS,
}
CLOSE = 0.001  # a difference beyond it has its phase beside it
HEAD = """# Probes on the CPU against dry runs

Each row is TRL's real trainer, two steps of a small model with random weights on the CPU. *Measured* is the peak that
PyTorch's allocator reports (`probes/worker/allocator_events.py`): no dispatch mode runs, so PyTorch takes the same code
paths as without us. Beside it stands the dry run of the same candidate with the CPU's kernels. Bytes; bfloat16;
batches of {rows} rows: 128 tokens, or a prompt and a completion of 32. Nothing here ran on a GPU.

Made by `python -m scripts.compare_cpu_probes`.

*Host* is the state of the random number generator, {state:,} bytes, which checkpointing keeps for each layer, and once
more while a layer is recomputed (torch 2.13, utils/checkpoint.py, `torch.random.fork_rng`). It lies on the host also
where there is a GPU, so that a dry run does not count it. How many of them there are at the peak was not counted: as
many as fit the difference. The last columns are what is left: measured - host - dry run.

The allocator's reports were themselves held against a library that counts `posix_memalign` and `free` below PyTorch:
equal (`tests/test_allocator_events.py`, which repeats it).

What is left has two causes: numbers of 4 to 8 bytes that C++ makes, which no dispatch mode sees, and one byte for each
row of attention scores (`_safe_softmax`), which DeepSeek-V2's heads need. *By phase* names the phases that differ by
more than {close:.1%}, none of which holds the peak: the optimizer's step begins while tensors of the backward pass are
still alive, which the dry run counts in the backward pass only; reading a checkpoint ("load") makes copies of its own.

Versions: {versions}.

**Summary.** {summary}

| method | model | settings | measured | host | dry run | left | left, % | by phase |
|---|---|---|---:|---:|---:|---:|---:|---|
"""


def small_model(name: str) -> ModelShape:
    return shape_of({"model_type": name, "torch_dtype": "bfloat16", **MODELS[name]}, id=f"small-{name}")


def candidates(methods: list[MethodName], models: list[str]) -> Iterator[Candidate]:
    """Every method with every model; tuning, checkpointing and padding in turn."""
    settings = cycle(product(("full", "lora"), (True, False), (True, False)))
    for name, method in product(models, methods):
        model = small_model(name)
        row = METHODS[method]
        tuning, checkpointing, padded = next(settings)
        lengths = {key: value for key, value in LENGTHS.items()}
        yield Candidate(
            method=method,
            model=model,
            dtype="bfloat16",
            tuning=tuning,
            gradient_checkpointing=checkpointing,
            padded=padded,
            teacher_model=model if row.teacher else None,
            **{**row.defaults, **lengths},  # type: ignore[arg-type]
        )


def measured(candidate: Candidate) -> Measurement:
    """Run the candidate's trainer in this process."""
    with tempfile.TemporaryDirectory() as folder:
        return measure(Task(candidate=candidate, device="cpu", folder=folder, save=False, resume=False, evaluate=False))


def host_bytes(candidate: Candidate, left_bytes: int) -> int:
    """Bytes of the random number generator's states at the peak: of as many recomputed layers as explain `left_bytes`.

    At most one state for each layer, as the layers release theirs one by one, and one more while a layer is recomputed.
    """
    state = torch.get_rng_state().nbytes
    layers = candidate.model.num_layers if candidate.gradient_checkpointing else 0
    return min(layers + 1 if layers else 0, max(0, round(left_bytes / state))) * state


def line(candidate: Candidate) -> tuple[str, float]:
    """The row of a candidate, and the share of the peak that is left unexplained."""
    name = f"| {candidate.method} | {candidate.model.id.removeprefix('small-')} | {settings_of(candidate)} |"
    try:
        found = measured(candidate)
        dry = dry_run(candidate, "cpu")
    except (PlanError, ValueError, RuntimeError, NotImplementedError, AttributeError, IndexError, TypeError) as error:
        return f"{name} does not run: {type(error).__name__}: {str(error).splitlines()[0][:90]} | | | | | |", 0.0
    host = host_bytes(candidate, found.peak_bytes - dry.peak_bytes)
    left = found.peak_bytes - host - dry.peak_bytes
    share = left / dry.peak_bytes
    of_dry = {phase.name: phase.total_bytes for phase in dry.phases}
    phases = {phase.name: phase.allocated_bytes for phase in found.ranks[0].phases}
    beyond = [
        f"{phase} {size - of_dry[phase]:+,}"
        for phase, size in phases.items()
        if phase in of_dry and abs(size - of_dry[phase] - host) > CLOSE * of_dry[phase] + host
    ]
    figures = f"{found.peak_bytes:,} | {host:,} | {dry.peak_bytes:,} | {left:+,} | {share:+.3%}"
    return f"{name} {figures} | {', '.join(beyond)} |", share


def settings_of(candidate: Candidate) -> str:
    return ", ".join(
        word
        for word, holds in (
            (candidate.tuning, True),
            ("checkpointed", candidate.gradient_checkpointing),
            ("padded", candidate.padded),
        )
        if holds
    )


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # operators as small as these only wait for other threads
    everything = [name for name, row in METHODS.items() if row.last_trl == "current" and name != "ppo"]
    methods = [name for name in everything if len(sys.argv) < 2 or name in sys.argv[1].split(",")]
    models = [name for name in MODELS if len(sys.argv) < 3 or name in sys.argv[2].split(",")]
    rows, shares = [], []
    # One process a row: Python's collector leaves what earlier rows built to chance.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for row, share in pool.imap(line, candidates(methods, models)):
            rows.append(row)
            shares.append(share)
            print("ROW", row, file=sys.stderr, flush=True)
    if len(sys.argv) == 1:
        RESULT.write_text(report(rows, shares), encoding="utf-8")


def report(rows: list[str], shares: list[float]) -> str:
    from importlib.metadata import version

    names = ("torch", "transformers", "trl", "peft", "accelerate")
    failed = sum("does not run" in row for row in rows)
    equal = sum("| +0 |" in row for row in rows)
    summary = (
        f"{len(rows)} rows, {failed} do not run; {equal} equal to the byte; worst "
        f"{max(abs(share) for share in shares):.3%}; {sum(abs(share) > CLOSE for share in shares)} beyond {CLOSE:.1%}."
    )
    head = HEAD.format(
        rows=ROWS,
        close=CLOSE,
        state=torch.get_rng_state().nbytes,
        versions=", ".join(f"{name} {version(name)}" for name in names),
        summary=summary,
    )
    return head + "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
