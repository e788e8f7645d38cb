"""Inputs of all phases of one training GPU: layers, head and loss, states, and the sizes of the batch."""

from dataclasses import dataclass

from planner.cache_keys import TrainingInput, state_settings
from planner.candidate import SHARDED
from planner.gpus.cluster import Gpu
from planner.memory.activations import StackMemory, stack_memory
from planner.memory.layers.autograd import NOTHING, LiveBytes
from planner.memory.layers.one_layer import PassPeak
from planner.memory.loss import FORMULAS, Head, LossMemory, loss_of
from planner.memory.stack_recipe import StackRecipe, autocast_width, compute_weight_width, frozen_recipe, with_data
from planner.memory.states import StateMemory, state_memory
from planner.quantities import Component

Components = dict[Component, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Inputs of the phases of one candidate. `tokens` and `scores` are those of the policy's forward pass."""

    candidate: TrainingInput
    tokens: int
    scores: int
    states: StateMemory
    stack: StackMemory
    recipe: StackRecipe
    head: Head
    loss: LossMemory
    idle: Components  # alive in every phase
    # alive during a micro-step: `idle`, gradients of earlier ones, the masks that all layers share, PPO's value graph
    training: Components


def passes_of(candidate: TrainingInput, gpu: Gpu) -> Passes:
    """Compute the inputs of a candidate's phases on one of its training GPUs."""
    head, states = head_of(candidate), state_memory(state_settings(candidate), gpu)
    recipe = with_data(states.recipe, candidate, gpu.supports_flash_attention_2)
    scores = candidate.scores
    trained_head = 0 if candidate.tuning == "lora" else head_elements(candidate)
    stay = gradients_exist(candidate)
    idle = dict(states.resident)
    training: Components = {
        "gradients": states.accumulated_gradients if stay else 0,
        "attention_scores": recipe.mask_widths * scores,
    }
    return Passes(
        candidate=candidate,
        tokens=head.tokens,
        scores=scores,
        states=states,
        stack=stack_memory(candidate.model, recipe, stay, trained_head),
        recipe=recipe,
        head=head,
        loss=FORMULAS[loss_of(candidate)](head),
        idle=idle,
        training=add_components(idle, training, value_graph(candidate, recipe, head.tokens, scores)),
    )


def gradients_exist(candidate: TrainingInput) -> bool:
    """Return whether gradients exist when a micro-step begins: accumulated ones, and the buffers of ZeRO and FSDP2."""
    return candidate.gradient_accumulation_steps > 1 or candidate.sharding in SHARDED


def value_graph(candidate: TrainingInput, recipe: StackRecipe, tokens: int, scores: int) -> Components:
    """Saved activations of PPO's value model, which are alive during the policy's passes; empty for other methods.

    Source: trl 1.12, experimental/ppo/ppo_trainer.py, `PolicyAndValueWrapper` (one forward pass runs both models).
    """
    if not candidate.method_row.value_model:
        return {}
    stack = stack_memory(candidate.reward_model or candidate.model, frozen_recipe(candidate, recipe.flash), True, 0)
    return component_bytes(stack.saved, tokens, scores)


# -- the head ----------------------------------------------------------------------------------------------------------


def head_of(candidate: TrainingInput) -> Head:
    """Sizes of the output head and of the tokens that it scores in one micro-step."""
    model, width, tokens = candidate.model, compute_weight_width(candidate), candidate.tokens
    labelled = candidate.labelled_tokens
    return Head(
        tokens=tokens,
        labelled_tokens=labelled,
        logit_tokens=labelled if candidate.method_row.completion_logits_only else tokens,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        hidden_width=width,
        weight_width=width,
        compute_width=autocast_width(candidate) or width,
        trainable=candidate.tuning == "full",
        softcapped=model.config.get("final_logit_softcapping", 30.0 if model.model_type == "gemma2" else None)
        is not None,  # Gemma2Config's default
    )


def head_elements(candidate: TrainingInput) -> int:
    """Parameters of the output head: hidden_size for a reward model's score, else vocabulary x hidden_size."""
    model = candidate.model
    return model.hidden_size if candidate.method == "reward" else model.vocab_size * model.hidden_size


# -- components of live bytes ------------------------------------------------------------------------------------------


def pass_components(passes: Passes, peaks: PassPeak) -> Components:
    """Components of the heaviest snapshot of a pass; with offloading, without the bytes that the host holds then."""
    if not offloads(passes.candidate):
        return peak_components(peaks, passes.tokens, passes.scores)
    return max(
        (
            component_bytes(without_offloaded(passes, snapshot), passes.tokens, passes.scores)
            for snapshot in peaks.snapshots
        ),
        key=total_bytes,
    )


def without_offloaded(passes: Passes, snapshot: LiveBytes) -> LiveBytes:
    """The snapshot without the bytes that offloading has copied to the host: of saved activations one layer's stay.

    Source: trl 1.16, models/activation_offloading.py (up to five tensors wait for their copy); transformers 5.23,
    modeling_utils.py:3110, `offload` of activation_checkpointing_kwargs.
    """
    if not offloads(passes.candidate):
        return snapshot
    kinds = dict(snapshot.kinds)
    for kind in ("activations", "attention_scores"):
        held, saved, layer = (
            dict(each.kinds).get(kind, NOTHING) for each in (snapshot, passes.stack.saved, passes.stack.one_layer)
        )
        kinds[kind] = (
            max(held[0] - saved[0], 0) + min(held[0], layer[0]),
            max(held[1] - saved[1], 0) + min(held[1], layer[1]),
            held[2],
        )
    return LiveBytes(snapshot.total, tuple(kinds.items()))


def offloads(candidate: TrainingInput) -> bool:
    """Return whether saved activations or checkpoints are copied to the host."""
    return candidate.activation_offloading or (candidate.checkpoint_offload and candidate.gradient_checkpointing)


def peak_components(peaks: PassPeak, tokens: int, scores: int) -> Components:
    """Components of the heaviest snapshot of a pass over `tokens` tokens and `scores` query-key pairs."""
    return component_bytes(peaks.at(tokens, scores)[1], tokens, scores)


def component_bytes(snapshot: LiveBytes, tokens: int, scores: int) -> Components:
    """Bytes of each component of a snapshot: per token x tokens + per score x scores + constant."""
    return {kind: size[0] * tokens + size[1] * scores + size[2] for kind, size in snapshot.kinds}


def add_components(first: Components, *parts: Components) -> Components:
    """The sum of components, one by one."""
    components = first.copy()
    known = components.get
    for part in parts:
        for component, size in part.items():
            components[component] = known(component, 0) + size
    return components


def total_bytes(components: Components) -> int:
    """Bytes of all components."""
    return sum(components.values())
