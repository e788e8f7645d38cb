"""Settings that change the allocations: the dry run runs them and agrees with the formulas."""

import pytest

from planner.candidate import Candidate
from planner.errors import DryRunUnsupported
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.models.catalogue import load_model
from planner.training_stack import complete_models

pytest.importorskip("trl")

from probes.dryrun.dry_run import dry_run
from probes.dryrun.simulate import unsupported_by_libraries
from probes.layers.few_layers import few_layers

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

# The project's bound for the difference between formulas and dry run.
AGREEMENT = 0.03
OUTSIDE_THE_TRACE = {"runtime", "fragmentation", "communication"}  # a dry run sees what PyTorch allocates
MODEL = few_layers(load_model("Llama-3.2-1B"))
# Other norms, rotary functions and MLPs that Liger replaces.
LIGER_MODELS = [
    few_layers(load_model(name), 1) for name in ("gemma-2-2b", "Qwen3-0.6B", "microsoft/Phi-3-mini-4k-instruct")
]
EXPERTS = few_layers(load_model("Qwen3-30B-A3B"), 2)
WITH_SINKS = few_layers(load_model("gpt-oss-20b"), 1)


def candidate(**changes: object) -> Candidate:
    settings: dict[str, object] = {
        "model": MODEL, "method": "sft", "tuning": "lora", "dtype": "bfloat16", "max_length": 512,
        "per_device_train_batch_size": 2, "padded": False,
    }  # fmt: skip
    return Candidate(**(settings | changes))  # type: ignore[arg-type]


SETTINGS: list[dict[str, object]] = [
    {"attn_implementation": "flash_attention_2"},
    {"attn_implementation": "flash_attention_2", "padded": True, "gradient_checkpointing": False},
    {"attn_implementation": "eager", "padded": True},
    {"model": WITH_SINKS, "attn_implementation": "eager", "dtype": "float32", "max_length": 4096},
    {"quantization": "nf4", "gradient_checkpointing": False},
    {"quantization": "nf4-double"},
    {"quantization": "int8"},
    {"quantization": "nf4", "prepare_model_for_kbit_training": True},
    {"quantization": "nf4", "prepare_model_for_kbit_training": True, "precision": "no", "float32_adapters": True},
    {"gradient_accumulation_steps": 4, "tuning": "full"},
    {"gradient_accumulation_steps": 2, "tuning": "full", "dtype": "float32", "max_length": 64},  # tied: two gradients
    {"gradient_accumulation_steps": 2, "tuning": "full", "max_length": 64, "method": "orpo"},  # and a view of one
    {"checkpoint_offload": True},
    {"checkpoint_offload": True, "tuning": "full"},
    {"activation_offloading": True, "gradient_checkpointing": True},
    {"activation_offloading": True, "gradient_checkpointing": True, "tuning": "full"},
    {"checkpoint_every_n_layers": 2},
    {"packing": True, "attn_implementation": "flash_attention_2"},
    {"packing": True},
    {"padding_free": True},
    {"precision": "fp16", "dtype": "float16"},
    {"precision": "fp16", "dtype": "float16", "quantization": "nf4"},
    {"precision": "no", "dtype": "float32"},
    {"use_liger_kernel": True, "gradient_checkpointing": False},
    {"use_liger_kernel": True, "gradient_checkpointing": False, "tuning": "full", "dtype": "float32"},
    {"use_liger_kernel": True, "gradient_checkpointing": False, "quantization": "nf4"},
    *({"use_liger_kernel": True, "model": model, "gradient_checkpointing": False} for model in LIGER_MODELS),
    {"lora_modules_to_save": ("lm_head", "embed_tokens")},
    {"lora_modules_to_save": ("embed_tokens",), "gradient_checkpointing": False, "gradient_accumulation_steps": 2},
    {"lora_modules_to_save": ("lm_head",), "quantization": "nf4", "dtype": "float32"},
    {"model": EXPERTS, "lora_target_modules": ("q_proj",), "lora_target_parameters": ("experts.gate_up_proj",)},
    {
        "model": EXPERTS,
        "lora_target_modules": (),
        "lora_target_parameters": ("1.mlp.experts.down_proj",),
        "gradient_checkpointing": False,
    },
    {"model": WITH_SINKS, "attn_implementation": "eager", "lora_target_parameters": ("mlp.experts.down_proj",)},
    {"tuning": "full", "optim": "adamw_torch"},
    {"tuning": "full", "optim": "adamw_8bit"},
    {"tuning": "full", "optim": "paged_adamw_8bit"},
    {"tuning": "full", "optim": "adafactor"},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    SETTINGS,
    ids=lambda changes: " ".join(f"{name}={getattr(value, 'id', value)}" for name, value in changes.items()),
)
def test_formulas_and_dry_run_agree(changes: dict[str, object]) -> None:
    case = candidate(**changes)
    phases = estimate(case, parse_cluster("1xH200", None)).gpus[0].phases
    estimated = max(
        sum(size for name, size in phase.components.items() if name not in OUTSIDE_THE_TRACE) for phase in phases
    )
    assert abs(estimated / dry_run(case).peak_bytes - 1) < AGREEMENT


def allocated_in(phases: object, name: str) -> int:
    phase = next(phase for phase in phases if phase.name == name)  # type: ignore[attr-defined]
    return sum(size for component, size in phase.components.items() if component not in OUTSIDE_THE_TRACE)


ROLLOUTS: list[dict[str, object]] = [
    {"tuning": "full", "dtype": "float32"},  # with autocast's copy of the head
    {"model": complete_models(print)(load_model("LFM2-350M"))},  # convolutions keep no keys
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", ROLLOUTS, ids=["float32", "LFM2"])
def test_formulas_and_dry_run_agree_in_a_rollout(changes: dict[str, object]) -> None:
    case = candidate(**{"method": "grpo", "num_generations": 2} | changes)
    estimated = allocated_in(estimate(case, parse_cluster("1xH200", None)).gpus[0].phases, "rollout")
    assert abs(estimated / allocated_in(dry_run(case).phases, "rollout") - 1) < AGREEMENT


def test_gradients_that_gradscaler_cannot_unscale_are_named() -> None:
    with pytest.raises(DryRunUnsupported, match="GradScaler cannot unscale 16-bit gradients, such as that of model"):
        dry_run(candidate(tuning="full", precision="fp16"), steps=1)


def test_offloaded_activations_leave_less_on_the_gpu() -> None:
    kept = dry_run(candidate(gradient_checkpointing=False)).peak_bytes
    assert dry_run(candidate(gradient_checkpointing=False, activation_offloading=True)).peak_bytes < kept


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sharding": "zero3", "num_processes": 2}, "zero3"),
        ({"method": "ppo"}, "not run ppo"),
        ({"quantization": "gptq"}, "gptq"),
    ],
)
def test_what_one_process_cannot_show_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(DryRunUnsupported, match=named):
        dry_run(candidate(**changes))


def test_real_tensors_have_none_of_ligers_kernels() -> None:
    with pytest.raises(DryRunUnsupported, match="Liger's kernels run on a GPU only"):
        dry_run(candidate(use_liger_kernel=True), device="real")


def test_a_package_that_is_not_installed_is_named() -> None:
    error = ModuleNotFoundError("No module named 'bitsandbytes.nn'", name="bitsandbytes.nn")
    assert (
        str(unsupported_by_libraries(error))
        == "The installed libraries need bitsandbytes for it, which is not installed: pip install bitsandbytes."
    )
    assert str(unsupported_by_libraries(KeyError("q"))) == "The installed libraries stop at it: KeyError: 'q'"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_reference_model_is_there_in_every_run(method: str) -> None:
    weights = {
        component
        for _ in range(2)
        for component in [resident_weights(dry_run(candidate(method=method, tuning="full", beta=0.1)))]
    }
    assert len(weights) == 1
    assert weights.pop() > 1.9 * resident_weights(dry_run(candidate(tuning="full")))


def resident_weights(trace: object) -> int:
    from planner.allocator.trace import Trace

    assert isinstance(trace, Trace)
    return sum(allocation.size_bytes for allocation in trace.allocations if allocation.operator == "resident")


BATCHES_BYTES = 2**16  # the batch of the step before or after, as numbers of tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"tuning": "full"}, {"method": "grpo", "num_generations": 2, "prompt_length": 64, "max_completion_length": 64}],
)
def test_one_step_beside_ready_states_peaks_as_two_steps_do(changes: dict[str, object]) -> None:
    case = candidate(**changes)
    two, one = ({phase.name: phase.total_bytes for phase in dry_run(case, steps=steps).phases} for steps in (2, 1))
    assert two.keys() == one.keys()
    assert all(
        abs(two[phase] - one[phase]) < BATCHES_BYTES for phase in ("forward", "loss", "backward", "optimizer_step")
    )
