"""Contract of the dry run: it sees what a real run of the same steps allocates, to the byte.

11 methods x full or LoRA x checkpointing x float32 with autocast or bfloat16 are 88 cases, of which `make` runs a
pairwise selection; besides, two other architectures.
"""

import gc
import sys
from itertools import product

import pytest
from msgspec.structs import replace
from pairwise import pairwise_cases

from planner.candidate import Candidate, Dtype
from planner.methods import METHODS, MethodName
from planner.models.layers import Norm
from planner.models.shape import ModelShape

pytest.importorskip("trl")

from probes.dryrun.dry_run import dry_run

METHODS_NOW = [name for name, method in METHODS.items() if method.last_trl == "current"]
# The libraries' own deprecations are not errors; those of our code are.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

CONFIG: dict[str, object] = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 640, "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
}  # fmt: skip


def shape(**changes: object) -> ModelShape:
    config = CONFIG | changes
    return ModelShape(
        id="tiny", model_type=str(config["model_type"]), dtype="float32", hidden_size=64, vocab_size=640,
        max_position_embeddings=1024, layers=(), embed_params=640 * 64, lm_head_params=640 * 64,
        final_norm=Norm(kind="rms", features=64, params=64), tied=False, params=0, config=config,
    )  # fmt: skip


def candidate(method: MethodName = "sft", **changes: object) -> Candidate:
    settings: dict[str, object] = {
        "model": shape(), "per_device_train_batch_size": 2, "max_length": 32, "prompt_length": 8,
        "max_completion_length": 5, "num_generations": 2, "dtype": "bfloat16",
    }  # fmt: skip
    return Candidate(method=method, **(settings | changes))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "tuning", "checkpointing", "dtype"),
    pairwise_cases(product(METHODS_NOW, ["full", "lora"], [True, False], ["float32", "bfloat16"])),
)
def test_dry_run_peaks_where_a_real_run_does(
    method: MethodName, tuning: str, checkpointing: bool, dtype: Dtype
) -> None:
    assert_alike(candidate(method, tuning=tuning, gradient_checkpointing=checkpointing, dtype=dtype))


def assert_alike(case: Candidate) -> None:
    real, fake = dry_run(case, "cpu", "real"), dry_run(case, "cpu")
    assert fake.peak_bytes == real.peak_bytes
    assert [(phase.name, phase.total_bytes) for phase in fake.phases] == [
        (phase.name, phase.total_bytes) for phase in real.phases
    ]


OTHERS: dict[str, dict[str, object]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96},
    "gemma3": {
        "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method", "tuning", "dtype"),
    pairwise_cases(
        (name, *settings)
        for name in OTHERS
        for settings in (("sft", "full", "float32"), ("dpo", "lora", "bfloat16"), ("grpo", "lora", "float32"))
    ),
)
def test_experts_and_sliding_windows_peak_where_a_real_run_does(
    name: str, method: MethodName, tuning: str, dtype: Dtype
) -> None:
    assert_alike(candidate(method, model=shape(**OTHERS[name]), tuning=tuning, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "rloo", "online-dpo"])
def test_a_reward_model_scores_as_in_a_real_run(method: MethodName) -> None:
    assert_alike(candidate(method, tuning="lora", reward_model=shape()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "rows"), [("sft", 1), ("sft", 2), ("gkd", 1), ("dpo", 1), ("reward", 1), ("grpo", 2)]
)
def test_batches_are_masked_where_rows_are_padded_together(method: MethodName, rows: int) -> None:
    case = candidate(method, per_device_train_batch_size=rows, gradient_checkpointing=False)
    forward, without = (
        next(phase.total_bytes for phase in dry_run(each, "cpu").phases if phase.name == "forward")
        for each in (case, replace(case, padded=False))
    )
    assert case.pads is (rows * METHODS[method].rows_per_sample > 1)
    assert (forward > without) is case.pads


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS_NOW)
def test_every_method_runs_in_cudas_ways(method: MethodName) -> None:
    trace = dry_run(candidate(method, tuning="lora", padded=False))
    assert {"forward", "backward", "optimizer_step"} <= {phase.name for phase in trace.phases}
    assert all(allocation.size_bytes % 512 == 0 for allocation in trace.allocations)


@pytest.mark.parametrize(("key_heads", "before"), [(4, "efficient"), (2, "_safe_softmax")])
def test_an_older_card_takes_another_kernel_where_sdpa_has_no_mask(key_heads: int, before: str) -> None:
    """Only FlashAttention takes fewer key heads; the memory-efficient kernel refuses them."""
    few = shape(num_key_value_heads=key_heads)
    case = candidate(
        model=few, dtype="bfloat16", precision="bf16", per_device_train_batch_size=1, gradient_checkpointing=False
    )
    kernels = {
        kernels: " ".join(allocation.operator for allocation in dry_run(case, kernels).allocations)
        for kernels in ("cuda", "cuda before 8.0")
    }
    assert "flash_attention" in kernels["cuda"] and before not in kernels["cuda"]
    assert "flash_attention" not in kernels["cuda before 8.0"] and before in kernels["cuda before 8.0"]


def test_the_second_step_runs_beside_optimizer_states_of_twice_the_weights() -> None:
    trace = dry_run(candidate(dtype="float32"))
    held = {phase.name: phase.components for phase in trace.phases}["backward"]
    assert held["optimizer_states"] - 2 * held["weights"] < 2 * 512 * sum(
        1 for allocation in trace.allocations if allocation.component == "optimizer_states"
    )


def test_padding_costs_a_mask_of_every_pair_of_tokens() -> None:
    with_mask = dry_run(candidate(padded=True, gradient_checkpointing=False, max_length=256)).peak_bytes
    assert with_mask > dry_run(candidate(padded=False, gradient_checkpointing=False, max_length=256)).peak_bytes


def test_a_shortened_rollout_peaks_as_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = candidate("grpo", max_completion_length=24)

    def rollout() -> int:
        return next(phase.total_bytes for phase in dry_run(case).phases if phase.name == "rollout")

    shortened = rollout()
    monkeypatch.setattr("probes.step.shortened_rollout.WHOLE_ROLLOUT_TOKENS", 24)
    assert shortened == rollout()


def test_a_dry_run_leaves_the_process_as_it_was() -> None:
    import torch

    dropout, attention = torch.nn.functional.dropout, torch.nn.functional.scaled_dot_product_attention
    dry_run(candidate())
    assert torch.nn.functional.dropout is dropout
    assert torch.nn.functional.scaled_dot_product_attention is attention
    assert gc.isenabled()
    assert "triton" not in sys.modules
