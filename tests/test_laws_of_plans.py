"""Laws of the search: more hardware and fewer pins never make a plan slower, and a plan pinned whole is itself."""

import os
from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from planner.candidate import FIELDS
from planner.errors import PlanError
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job, TuningOption
from planner.jobs.settings import is_shown
from planner.methods import METHODS, MethodName
from planner.models.catalogue import load_model
from planner.planning import Plan, plan
from planner.search.choice import MUCH_FASTER
from planner.search.search import NEAR_BEST

EXAMPLES = 6  # each is two or three plans of 20 to 300 ms
MODELS = ["Qwen2.5-0.5B", "Llama-3.2-1B", "Qwen3-1.7B", "gemma-2-2b", "Qwen2.5-7B", "Llama-3.1-8B"]
CARDS = ["T4", "L4", "RTX-4090", "A100-40G", "A100-80G", "H100"]

# Settings that the search decides on several GPUs, and values to pin.
PINS: list[tuple[str, object]] = [
    ("gradient_checkpointing", True),
    ("gradient_checkpointing", False),
    ("attn_implementation", "flash_attention_2"),
    ("attn_implementation", "sdpa"),
    ("per_device_train_batch_size", 1),
    ("per_device_train_batch_size", 4),
    ("gradient_accumulation_steps", 1),
    ("gradient_accumulation_steps", 8),
    ("expandable_segments", True),
]
SHARDING_PINS: list[tuple[str, object]] = [("sharding", name) for name in ("ddp", "zero1", "zero2", "zero3", "fsdp2")]
ENGINE_PINS: list[tuple[str, object]] = [
    ("vllm", "off"),
    ("vllm", "colocate"),
    ("vllm", "server"),
    ("vllm_gpu_memory_utilization", 0.3),
    ("vllm_gpu_memory_utilization", 0.6),
    ("vllm_tensor_parallel_size", 1),
    ("vllm_tensor_parallel_size", 2),
    ("vllm_enable_sleep_mode", True),
]

laws = settings(
    max_examples=int(os.environ.get("PLAN_LAWS", EXAMPLES)),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class Question(Struct, frozen=True, kw_only=True):
    """A job of one tuning class and lengths, on a number of cards of one kind."""

    model: str
    method: MethodName
    tuning: TuningOption
    lengths: Mapping[str, object]
    count: int
    card: str
    nodes: int = 1

    @property
    def pinned(self) -> dict[str, object]:
        """What the job fixes: lengths, and float32 in full fine-tuning, which 16-bit weights would be slower than."""
        return {**self.lengths, **({"dtype": "float32"} if self.tuning == "full" else {})}

    @property
    def samples(self) -> int:
        """The effective batch of TRL's defaults, which stays when the batch of a GPU is pinned."""
        return 8 * self.count


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """Jobs of every method on one to eight cards."""
    method = draw(st.sampled_from(sorted(METHODS)))
    lengths: dict[str, object] = {"max_length": draw(st.sampled_from([512, 2048, 8192]))}
    if METHODS[method].generates:
        lengths = {
            "prompt_length": draw(st.sampled_from([64, 512, 2000])),
            "max_completion_length": draw(st.sampled_from([64, 256, 1500])),
        }
    if METHODS[method].bounded_rows:
        lengths["max_length"] = 4096
    return Question(
        model=draw(st.sampled_from(MODELS)),
        method=method,
        tuning=draw(st.sampled_from(["full", "lora", "qlora"])),
        lengths=lengths,
        count=draw(st.sampled_from([1, 2, 4, 8])),
        card=draw(st.sampled_from(CARDS)),
    )


def planned(
    question: Question,
    samples: int | None = None,
    pins: Mapping[str, object] | None = None,
    free_memory: str | None = None,
    host_memory: str | None = None,
) -> Plan:
    """The plan of a question; tries another question if it is refused."""
    cluster = parse_cluster(f"{question.nodes}x{question.count}x{question.card}", free_memory, host_memory)
    job = Job(
        model=load_model(question.model),
        method=question.method,
        tuning=question.tuning,
        pinned={**question.pinned, **(pins or {})},
        effective_batch_size=samples,
    )
    try:
        return plan(job, cluster)
    except PlanError:
        assume(False)
        raise


def speed(answer: Plan) -> float:
    """Tokens per second; 0 if nothing fits."""
    return answer.best.throughput.tokens_per_second if answer.best.fits else 0.0


def not_slower(answer: Plan, other: Plan) -> bool:
    """Whether a plan is at most 2 % slower than another one: of candidates that near, memory decides.

    One that offloads to the host, or runs one process or QLoRA by another launcher, must be 1.5 times as fast as one
    that does not.
    """
    candidate = other.best.candidate
    offloads = (
        candidate.offload_optimizer
        or candidate.offload_param
        or (candidate.num_processes == 1 and candidate.sharding != "none")
        or (candidate.quantization != "none" and candidate.sharding != "ddp")
    )
    return speed(answer) >= (1 / MUCH_FASTER if offloads else NEAR_BEST) * speed(other)


@laws
@given(questions())
def test_another_gpu_never_makes_a_plan_slower(question: Question) -> None:
    assume(question.count < 8)
    one, more = planned(question), planned(replace(question, count=question.count + 1))
    assert not_slower(more, one)


@pytest.mark.slow
@laws
@given(questions())
def test_another_node_never_makes_a_plan_slower(question: Question) -> None:
    assert not_slower(planned(replace(question, nodes=2)), planned(question))


@laws
@given(questions(), st.floats(0.3, 0.95))
def test_more_gpu_memory_never_makes_a_plan_slower(question: Question, share: float) -> None:
    all_of_it = planned(question)
    part = max(1.1, share * all_of_it.cluster.gpu.free_bytes / 2**30)
    assert not_slower(all_of_it, planned(question, free_memory=f"{part:.2f}GiB"))


@laws
@given(questions(), st.floats(0.05, 0.95))
def test_more_host_memory_never_makes_a_plan_slower(question: Question, share: float) -> None:
    all_of_it = planned(question)
    part = max(1.1, share * all_of_it.cluster.host.total_bytes / 2**30)
    assert not_slower(all_of_it, planned(question, host_memory=f"{part:.1f}GiB"))


@laws
@given(questions(), st.data())
def test_a_pin_never_makes_a_plan_faster(question: Question, data: st.DataObject) -> None:
    # QLoRA whose teacher or value model ZeRO-3 or FSDP2 shards beside replicated 4-bit weights is planned where pinned,
    # and so is an engine that samples from a 4-bit base without its adapters.
    engines = ENGINE_PINS if METHODS[question.method].supports_vllm and question.tuning != "qlora" else []
    sharded = SHARDING_PINS[:3] if question.tuning == "qlora" else SHARDING_PINS
    name, value = data.draw(st.sampled_from([*PINS, *sharded, *engines]))
    free = planned(question, question.samples)
    assert not_slower(free, planned(question, question.samples, {name: value}))


@laws
@given(questions())
def test_a_plan_with_all_of_its_settings_pinned_is_the_same_plan(question: Question) -> None:
    answer = planned(question, question.samples)
    own = {
        field: getattr(answer.best.candidate, field)
        for field in FIELDS
        if field not in ("model", "method", "trl_version") and is_shown(answer.best.candidate, field)
    }
    again = planned(replace(question, tuning="auto"), answer.best.candidate.effective_batch_size, own)
    assert replace(again.best, reasons=()) == replace(answer.best, reasons=())
