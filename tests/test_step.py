"""The phases of a step beside an engine, the kernels that attention runs, and the masks that layers share."""

from typing import Any

import pytest
from msgspec.structs import replace

from planner.cache_keys import TrainingInput, state_settings, training_settings
from planner.candidate import Candidate
from planner.gpus.catalogue import load_gpu
from planner.memory.activations import embedded, layer_recipe, trained_elements
from planner.memory.engine.budget import EngineMemory
from planner.memory.parameters.trained import learning_groups
from planner.memory.runtime import context_bytes
from planner.memory.slack import cache_base_reach_bytes, cache_shares, fragmentation_bytes
from planner.memory.stack_recipe import StackRecipe, kernel, stack_recipe
from planner.memory.states import state_memory
from planner.memory.step import training_phases, with_engine
from planner.memory.weights import teacher_weights_bytes
from planner.models.catalogue import load_model
from planner.quantities import Phase, PhaseMemory
from planner.units import MIB
from scripts.emulated_jobs import complete

WINDOW = 512  # of gemma-3-1b-it: its fifth of six layers sees all tokens
GEMMA = load_model("gemma-3-1b-it")
# As vLLM divides a budget: 10 in all, 3 of it weights, 1 the profile run's temporaries; 2 stay when it sleeps.
ENGINE = EngineMemory(
    budget_bytes=10,
    weights_bytes=3,
    activation_peak_bytes=1,
    non_torch_bytes=0,
    cuda_graph_bytes=0,
    persistent_buffer_bytes=1,
    expert_workspace_bytes=0,
    tuned_table_bytes=0,
    dropped_head_bytes=0,
    outside_budget_bytes=1,
    kv_cache_bytes=5,
    kv_tokens=0,
    max_concurrency=1.0,
    block_size=16,
    max_model_len=16,
    asleep_bytes=2,
)


@pytest.mark.parametrize(
    ("phase", "held"),
    [("load", 11), ("rollout", 11), ("weight_sync", 6), ("score", 2), ("backward", 2), ("evaluation", 2)],
)
def test_an_engine_is_awake_in_rollouts_and_has_no_cache_while_it_gets_weights(phase: Phase, held: int) -> None:
    found = with_engine(PhaseMemory(name=phase, components={"weights": 7, "fragmentation": 4}), ENGINE)
    assert list(found.components.items()) == [("weights", 7), ("engine", held), ("fragmentation", 4)]
    assert with_engine(PhaseMemory(name=phase, components={"weights": 7}), ENGINE).components["engine"] == held
    assert "fragmentation" not in with_engine(PhaseMemory(name=phase, components={}), ENGINE).components


def asked(**settings: Any) -> TrainingInput:
    defaults: dict[str, Any] = {"method": "sft", "tuning": "lora", "dtype": "bfloat16", "padded": False}
    named = {"model": load_model(settings.pop("model"))} if isinstance(settings["model"], str) else {}
    return training_settings(Candidate(**(defaults | settings | named)))


def recipe(flash: bool = True, **settings: Any) -> StackRecipe:
    return stack_recipe(asked(**settings), flash)


@pytest.mark.parametrize(
    ("settings", "flash", "kernel_of_first_layer"),
    [
        ({"model": "Qwen2.5-0.5B"}, True, "flash"),
        ({"model": "Qwen2.5-0.5B", "padded": True}, True, "efficient"),
        ({"model": "Qwen2.5-0.5B"}, False, "math"),  # grouped queries, up to torch 2.13
        ({"model": "Qwen2.5-0.5B", "torch_version": "2.14"}, False, "efficient_grouped"),
        ({"model": "gpt2"}, False, "efficient_unmasked"),
        ({"model": "gpt2", "dtype": "float32", "precision": "no"}, True, "efficient_unmasked"),
        ({"model": "open_llama_3b"}, True, "flash"),
        ({"model": "open_llama_3b"}, False, "math"),  # heads of 100 x 2 bytes, no multiple of 16
        ({"model": "open_llama_3b", "padded": True}, True, "math"),
        ({"model": "Qwen2.5-0.5B", "attn_implementation": "eager"}, True, "eager_masked"),
        ({"model": "Qwen2.5-0.5B", "attn_implementation": "flash_attention_2"}, True, "flash"),
        ({"model": "Qwen2.5-0.5B", "attn_implementation": "flash_attention_2", "padded": True}, True, "flash_varlen"),
        ({"model": "gpt-oss-20b"}, True, "eager_masked"),  # its sinks are no argument of sdpa
        ({"model": "gpt-oss-20b", "attn_implementation": "flash_attention_3"}, True, "flash"),
        ({"model": "falcon-7b"}, True, "math"),  # always a mask, and one key head
        ({"model": "gemma-3-1b-it", "max_length": WINDOW - 1}, True, "flash"),
        ({"model": "gemma-3-1b-it", "max_length": WINDOW}, True, "efficient"),
    ],
)
def test_the_kernel_of_attention(settings: dict[str, Any], flash: bool, kernel_of_first_layer: str) -> None:
    """As torch 2.13 chooses, sdp_utils.cpp, and transformers 5.23, masking_utils.py; see `kernel`."""
    stack, model = recipe(flash, **settings), asked(**settings).model
    assert kernel(stack, model.layers[0].attention) == kernel_of_first_layer


def test_a_layer_without_a_window_needs_no_mask_for_it() -> None:
    stack = recipe(model=GEMMA, max_length=4 * WINDOW)
    every = [kernel(stack, layer.attention) for layer in GEMMA.layers]
    assert every[:6] == ["efficient"] * 5 + ["flash"]


@pytest.mark.parametrize(
    ("settings", "bytes_per_score"),
    [
        ({"model": "Qwen2.5-0.5B"}, 0),
        ({"model": "Qwen2.5-0.5B", "padded": True}, 1),
        ({"model": "Qwen2.5-0.5B", "attn_implementation": "eager"}, 2),
        ({"model": "Qwen2.5-0.5B", "attn_implementation": "eager", "dtype": "float32"}, 4),
        ({"model": "Qwen2.5-0.5B", "attn_implementation": "flash_attention_2", "padded": True}, 0),
        ({"model": "falcon-7b"}, 1),
        ({"model": "gemma-3-1b-it", "max_length": WINDOW - 1}, 0),
        ({"model": "gemma-3-1b-it", "max_length": WINDOW}, 1),  # of the layers with windows
        ({"model": "gemma-3-1b-it", "padded": True}, 2),  # and of the others
        ({"model": "gemma-3-1b-it", "attn_implementation": "eager"}, 4),
    ],
)
def test_a_mask_for_each_window_is_bool_with_sdpa_and_of_the_weights_dtype_with_eager(
    settings: dict[str, Any], bytes_per_score: int
) -> None:
    assert recipe(**settings).mask_widths == bytes_per_score


@pytest.mark.parametrize(
    ("capability", "hundredths"),
    [((7, 5), 350), ((7, 2), 464), ((8, 7), 556), ((11, 0), 464), ((12, 1), 357), ((5, 2), 541)],
)
def test_a_card_without_a_measured_context_has_that_of_the_next_lower_capability(
    capability: tuple[int, int], hundredths: int
) -> None:
    card = replace(load_gpu("T4"), compute_capability=capability, multiprocessors=100)
    assert context_bytes(card) == hundredths * MIB


def test_a_rollout_ends_with_a_cache_of_all_tokens_but_the_last() -> None:
    """28 layers keep 2 x 512 numbers a token; the last one copies 512 of each token before, to append the new one."""
    rows, tokens = 8, 16 + 4096 - 1
    sampled = asked(
        model="Qwen2.5-7B", method="grpo", per_device_train_batch_size=rows, num_generations=rows, prompt_length=16,
        max_completion_length=4096,
    )  # fmt: skip
    phases = {phase.name: phase.components for phase in training_phases(sampled, load_gpu("H100"))}
    assert phases["rollout"]["kv_cache"] == 2 * rows * (28 * tokens * 1024 + (tokens - 1) * 512)


@pytest.mark.parametrize(("implementation", "bytes_per_score"), [("sdpa", 1), ("eager", 2)])
def test_a_rollout_without_a_cache_has_masks_of_whole_rows(implementation: str, bytes_per_score: int) -> None:
    rows, tokens = 8, 512 + 513 - 1  # online DPO samples two completions of each prompt
    sampled = asked(
        model="Qwen2.5-0.5B", method="online-dpo", per_device_train_batch_size=4, prompt_length=512,
        max_completion_length=513, padded=True, attn_implementation=implementation,
    )  # fmt: skip
    assert sampled.generates_without_cache
    phases = {phase.name: phase.components for phase in training_phases(sampled, load_gpu("H100"))}
    assert phases["rollout"]["attention_scores"] == rows * tokens**2 * bytes_per_score


def test_a_rollout_without_a_cache_copies_the_experts_of_every_token() -> None:
    """Start 7-17 of results/emulated_starts.md ran out of memory with 1,387 GiB, which the plan did not see."""
    sampled = asked(
        model="Qwen1.5-MoE-A2.7B", method="online-dpo", tuning="lora", per_device_train_batch_size=8,
        prompt_length=2016, max_completion_length=32, padded=True,
    )  # fmt: skip
    phases = {phase.name: phase.components for phase in training_phases(sampled, load_gpu("H100"))}
    copied = 16 * 2047 * 4 * 3 * 2048 * 1408 * 2
    assert phases["rollout"]["transients"] >= copied


def test_a_phase_in_which_nothing_comes_and_goes_has_no_slack() -> None:
    usual = asked(model="Qwen2.5-0.5B")
    assert fragmentation_bytes({"weights": 10**9, "adapters": 10**8, "runtime": 10**8}, usual, "load") == 0
    assert fragmentation_bytes({"weights": 10**9, "activations": 1}, usual, "forward") > 0


def test_an_update_in_the_layers_is_of_their_largest_tensor_and_at_the_end_of_the_head() -> None:
    """LOMO on bfloat16: 2 x 4 - 2 bytes for each parameter of Qwen2.5-7B's MLP projections, and of its head."""
    states = state_memory(state_settings(asked(model="Qwen2.5-7B", tuning="full", optim="lomo")), load_gpu("H100"))
    assert states.update_in_layers == 6 * 18_944 * 3584
    assert states.update_of_largest == 6 * 152_064 * 3584


EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "Qwen2.5-0.5B"},
        {"model": "Qwen2.5-0.5B", "lora_target_modules": ("all-linear",), "use_dora": True},
        {"model": "gpt2", "lora_target_modules": ("all-linear",)},
        {"model": "DeepSeek-V2-Lite", "lora_target_modules": ("kv_a_proj_with_mqa", "kv_b_proj")},
        {"model": "Qwen3-30B-A3B", "lora_target_modules": ("all-linear",)},
        {"model": "Qwen3-30B-A3B", "lora_target_modules": ("gate", "gate_proj", "up_proj", "down_proj")},
        {"model": "Qwen3-30B-A3B", "lora_target_modules": ("q_proj",), "lora_target_parameters": EXPERTS},
        {"model": "Qwen3-30B-A3B", "lora_target_parameters": (EXPERTS[1], "mlp.gate.weight")},
        {"model": "Qwen2.5-0.5B", "tuning": "full"},
        {"model": "OLMoE-1B-7B-0924", "tuning": "full"},
    ],
)
def test_layers_learn_the_parameters_that_the_optimizer_has(settings: dict[str, Any]) -> None:
    """The gradients that layers leave are those of PEFT's matrices, or of all layers, counted apart."""
    case, stack = asked(**settings), recipe(**settings)
    layers = enumerate(case.model.layers)
    learned = sum(trained_elements(each, layer_recipe(each, stack, i, 2, True)) for i, each in layers)
    optimized = sum(tensors.params for tensors, _ in learning_groups(state_settings(case)))
    outside = case.model.params - sum(layer.params for layer in case.model.layers) if case.tuning == "full" else 0
    assert learned == optimized - outside > 0


def test_blooms_norm_of_the_embedding_saves_its_input_and_two_numbers() -> None:
    """pytorch 2.13, layer_norm.cpp: mean and 1 / deviation, in float32, as autocast's output of the norm is."""
    hidden, saved = 1024, 2 * 4
    bloom = complete(load_model("bloom-560m"))
    (_, size), *others = embedded(bloom, recipe(model=bloom)).kinds
    assert size == (4 * hidden + 2 * hidden + saved, 0, 0) and not others
    plain = embedded(asked(model="Qwen2.5-0.5B").model, recipe(model="Qwen2.5-0.5B"))
    assert plain.total == (2 * 896, 0, 0)


@pytest.mark.parametrize("settings", [{"padded": True}, {"expandable_segments": True}, {"tuning": "full"}])
def test_a_cache_may_be_larger_than_the_usual_one_the_more_deviations_are_asked_for(settings: dict[str, Any]) -> None:
    """A search keeps below the upper end of the interval, which is never below its middle."""
    job = asked(model="Qwen2.5-0.5B", max_length=512, use_liger_kernel=True, **settings)
    more = [cache_shares(job, deviations)[1] for deviations in (0.0, 1.0, 2.0)]
    assert 0 <= more[0] <= more[1] <= more[2]
    assert more[2] > 0
    assert cache_base_reach_bytes(job, 2.0) == 0  # no whole logits


def test_a_teacher_of_its_own_is_held_and_a_policy_that_teaches_itself_is_not() -> None:
    student = load_model("Qwen2.5-0.5B")
    taught = asked(method="gkd", model=student, teacher_model=GEMMA)
    assert teacher_weights_bytes(state_settings(taught)) > GEMMA.params
    assert teacher_weights_bytes(state_settings(asked(method="sft", model=student, teacher_model=GEMMA))) == 0
