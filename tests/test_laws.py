"""Laws that hold for every job, whatever the formulas, tried on random candidates and jobs."""

import os

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.errors import PlanError
from planner.estimation import estimate, training_estimate
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.memory.engine.budget import EngineDoesNotFit
from planner.memory.optimizer import unsplit_states_bytes
from planner.memory.parameters.policy import policy_parameters
from planner.methods import METHODS
from planner.models.catalogue import load_model
from planner.models.from_config import shape_of
from planner.planning import plan
from planner.quantities import Estimate
from planner.search.bounds import LEANEST_MARGIN, allocated_bytes

EXAMPLES = 150  # each is a few estimates of tens of microseconds; the first of a structure takes milliseconds
CLUSTER = parse_cluster("8xH100", None)
MODELS = [
    "Qwen2.5-0.5B",
    "Llama-3.2-1B",
    "Qwen3-1.7B",
    "gemma-3-1b-it",
    "gemma-2-2b",
    "Phi-3.5-mini-instruct",
    "OLMo-2-0425-1B",
    "pythia-1b",
    "Mixtral-8x7B-v0.1",
    "DeepSeek-V2-Lite",
]

ROUNDING = 1024  # bytes: an allocation is rounded to 512, and fused AdamW keeps its step count in one of its own

pytestmark = pytest.mark.filterwarnings(
    "ignore:Generating overly large repr"
)  # longest printed candidate that breaks a law, with its whole model

laws = settings(
    max_examples=int(os.environ.get("PLAN_LAWS", EXAMPLES)), deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)  # fmt: skip


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    """Random candidates that the libraries would run, of every method, tuning, precision and sharding."""
    method = draw(st.sampled_from(sorted(METHODS)))
    tuning = draw(st.sampled_from(["full", "lora"]))
    processes = draw(st.sampled_from([1, 2, 4]))
    sharding = "none" if processes == 1 else draw(st.sampled_from(["ddp", "zero1", "zero2", "zero3", "fsdp2"]))
    quantization = (
        draw(st.sampled_from(["none", "nf4", "nf4-double", "int8"]))
        if tuning == "lora" and sharding in ("none", "ddp")
        else "none"
    )
    model = load_model(draw(st.sampled_from(MODELS)))
    return Candidate(
        model=model,
        method=method,
        tuning=tuning,
        quantization=quantization,
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        precision=draw(st.sampled_from(["bf16", "no"])) if sharding in ("none", "ddp") else "bf16",
        sharding=sharding,
        num_processes=processes,
        lora_r=draw(st.sampled_from([4, 16, 64])),
        lora_dropout=draw(st.sampled_from([0.0, 0.05])) if not model.expert_params else 0.0,  # PEFT has none on experts
        per_device_train_batch_size=draw(st.integers(1, 8)),
        gradient_accumulation_steps=draw(st.sampled_from([1, 4])),
        max_length=draw(st.integers(130, 6000)),
        prompt_length=draw(st.integers(16, 2000)),
        max_completion_length=draw(st.integers(16, 2000)),
        padded=draw(st.booleans()),
        gradient_checkpointing=draw(st.booleans()),
        activation_offloading=draw(st.booleans()),
        attn_implementation=draw(st.sampled_from(["eager", "sdpa", "flash_attention_2"])),
        optim=draw(st.sampled_from(["adamw_torch_fused", "adamw_torch", "adamw_8bit", "adafactor", "sgd"])),
        beta=draw(st.sampled_from([0.0, 0.1])),
        teacher_model=model if METHODS[method].teacher else None,
    )


def peak_bytes(candidate: Candidate) -> int:
    return estimated(candidate).gpus[0].peak_bytes


def estimated(candidate: Candidate) -> Estimate:
    return estimate(candidate, CLUSTER)


@laws
@given(candidates())
def test_checkpointing_fewer_layers_never_needs_less(candidate: Candidate) -> None:
    """The search leaves out structures of which the one with every layer checkpointed does not fit."""
    every = replace(candidate, gradient_checkpointing=True, checkpoint_every_n_layers=1, activation_offloading=False)
    assume(not every.generates_without_cache)
    ways = (
        every,
        replace(every, checkpoint_every_n_layers=2),
        replace(every, checkpoint_every_n_layers=4),
    )
    needs = [allocated_bytes(estimated(way)) for way in (*ways, replace(every, gradient_checkpointing=False))]
    assert all(needs[0] <= LEANEST_MARGIN * need for need in needs[1:])


@laws
@given(candidates(), st.integers(1, 3000))
def test_more_tokens_never_need_less(candidate: Candidate, more: int) -> None:
    longer = replace(
        candidate, max_length=candidate.max_length + more, max_completion_length=candidate.max_completion_length + more
    )
    assert peak_bytes(longer) >= peak_bytes(candidate)


@laws
@given(candidates(), st.integers(1, 8))
def test_more_rows_never_need_less(candidate: Candidate, more: int) -> None:
    assert peak_bytes(
        replace(candidate, per_device_train_batch_size=candidate.per_device_train_batch_size + more)
    ) >= peak_bytes(candidate)


@laws
@given(candidates(), st.integers(1, 200))
def test_a_larger_rank_never_needs_less(candidate: Candidate, more: int) -> None:
    # ZeRO-3 leaves small matrices whole: a rank that makes them large enough to be cut needs less; of ZeRO-1 and 2 see
    # the next law
    assume(candidate.sharding not in ("zero1", "zero2", "zero3"))
    assume(
        candidate.optim != "adamw_8bit"
    )  # small matrices have states of 32 bits, larger ones of 8 (planner/memory/optimizer.py)
    assert peak_bytes(replace(candidate, lora_r=candidate.lora_r + more)) >= peak_bytes(candidate)


@laws
@given(candidates(), st.integers(1, 6))
def test_more_parameters_never_need_less(candidate: Candidate, more: int) -> None:
    assume(
        candidate.sharding not in ("zero1", "zero2")
    )  # the end of a piece decides how many whole gradients a rank has
    config = {key: value for key, value in load_model("Llama-3.2-1B").config.items()}
    models = [shape_of({**config, "num_hidden_layers": layers}, id=f"{layers} layers") for layers in (4, 4 + more)]
    smaller, larger = (peak_bytes(replace(candidate, model=model, teacher_model=None)) for model in models)
    assert larger >= smaller


@laws
@given(candidates())
def test_more_shards_never_need_more_on_each_gpu(candidate: Candidate) -> None:
    assume(candidate.sharding in ("zero1", "zero2", "zero3", "fsdp2"))
    assert peak_bytes(replace(candidate, num_processes=2 * candidate.num_processes)) <= peak_bytes(candidate)


@laws
@given(candidates())
def test_a_phase_is_the_sum_of_its_components_and_the_peak_the_heaviest_phase(candidate: Candidate) -> None:
    gpu = estimated(candidate).gpus[0]
    assert all(size > 0 for phase in gpu.phases for size in phase.components.values())
    assert all(phase.total_bytes == sum(phase.components.values()) for phase in gpu.phases)
    assert gpu.peak_bytes == max(phase.total_bytes for phase in gpu.phases)


@laws
@given(candidates())
def test_frozen_parameters_have_no_gradients_and_no_states(candidate: Candidate) -> None:
    assume(not candidate.method_row.value_model)  # PPO trains a value model in full beside any policy
    frozen = replace(candidate, tuning="lora", lora_r=1, sharding="none", num_processes=1)
    trained = policy_parameters(frozen).trainable
    rests = unsplit_states_bytes(frozen)  # of blocks, which no tensor fills
    for phase in estimated(frozen).gpus[0].phases:
        assert (
            phase.components.get("gradients", 0)
            <= trained * 4 + ROUNDING * policy_parameters(frozen).trainable_tensors.count
        )
        assert (
            phase.components.get("optimizer_states", 0)
            <= trained * 8 + rests + 2 * ROUNDING * policy_parameters(frozen).trainable_tensors.count
        )


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["Qwen2.5-0.5B", "Llama-3.1-8B", "gemma-3-4b-it"]),
    st.sampled_from(["1xA100-40G", "2xRTX-4090", "4xH100"]),
    st.sampled_from(["sft", "dpo", "grpo", "reward"]),
    st.integers(256, 4096),
)
def test_what_is_recommended_is_not_beaten_by_its_own_class_and_every_fit_is_one(
    model: str, gpus: str, method: str, length: int
) -> None:
    job = Job(model=load_model(model), method=method, pinned={"max_length": length})
    answer = plan(job, parse_cluster(gpus, None))
    assert answer.best.fits == (answer.verdict != "does_not_fit")
    for estimate_ in (answer.best, *(other.estimate for other in answer.alternatives)):
        fits = all(gpu.interval_bytes[1] <= gpu.capacity_bytes for gpu in estimate_.gpus)
        assert estimate_.fits == fits
        same_class = (estimate_.candidate.tuning, estimate_.candidate.quantization) == (
            answer.best.candidate.tuning,
            answer.best.candidate.quantization,
        )
        if same_class and estimate_.fits and not estimate_.candidate.offload_optimizer:
            assert estimate_.throughput.tokens_per_second <= answer.best.throughput.tokens_per_second


@laws
@given(candidates(), st.integers(5, 60), st.integers(5, 60), st.booleans())
def test_a_remembered_training_is_the_same_beside_any_share_of_the_card_for_vllm(
    candidate: Candidate, first: int, then: int, sleeps: bool
) -> None:
    assume(METHODS[candidate.method].supports_vllm and candidate.quantization == "none")
    beside = [
        replace(
            candidate,
            vllm="colocate",
            vllm_gpu_memory_utilization=share / 100,
            vllm_max_model_length=4096,
            vllm_enable_sleep_mode=sleeps,
        )
        for share in (first, then)
    ]
    try:
        remembered = [estimated(each) for each in beside]
    except EngineDoesNotFit:
        assume(False)
    training_estimate.cache_clear()
    assert estimated(beside[1]) == remembered[1]


@pytest.mark.parametrize("field", ["per_device_train_batch_size", "max_length", "lora_r", "num_processes"])
@pytest.mark.parametrize("value", [0, -1])
def test_zero_and_negative_numbers_are_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(PlanError, match=rf"^{field} must be at least 1, not {value}\.$"):
        Candidate(model=load_model("Qwen2.5-0.5B"), method="sft", **{field: value})  # type: ignore[arg-type]
