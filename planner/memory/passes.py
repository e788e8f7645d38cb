"""What all phases of one training GPU are computed from: the layers' passes, the head and its loss, the states, and the sizes of the batch."""

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
    """What the phases of one candidate are computed from. `tokens` and `scores` are those of the policy's training forward."""

    candidate: TrainingInput
    tokens: int
    scores: int
    states: StateMemory
    stack: StackMemory
    recipe: StackRecipe
    head: Head
    loss: LossMemory
    idle: Components  # alive in every phase
    training: (
        Components  # alive during a micro-step: the same, gradients that stay, the attention mask that all layers share
    )


def passes_of(candidate: TrainingInput, gpu: Gpu) -> Passes:
    head, states = head_of(candidate), state_memory(state_settings(candidate), gpu)
    recipe = with_data(states.recipe, candidate, gpu.supports_flash_attention_2)
    scores = candidate.scores
    trained_head = 0 if candidate.tuning == "lora" else head_elements(candidate)
    stay = gradients_stay(candidate)
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
        training=together(idle, training, value_graph(candidate, recipe, head.tokens, scores)),
    )


def gradients_stay(candidate: TrainingInput) -> bool:
    """Whether gradients are there when a micro-step begins: accumulated ones, and the buffers of ZeRO and FSDP2."""
    return candidate.gradient_accumulation_steps > 1 or candidate.sharding in SHARDED


def value_graph(candidate: TrainingInput, recipe: StackRecipe, tokens: int, scores: int) -> Components:
    """What PPO's value model keeps while the policy's passes run: both are one forward (trl 1.12, ppo_trainer.py, PolicyAndValueWrapper)."""
    if not candidate.method_row.value_model:
        return {}
    stack = stack_memory(candidate.reward_model or candidate.model, frozen_recipe(candidate, recipe.flash), True, 0)
    return sizes(stack.saved, tokens, scores)


# -- the head ----------------------------------------------------------------------------------------------------------


def head_of(candidate: TrainingInput) -> Head:
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
    """Parameters of the output head: the reward trainers' score has one number for each of hidden_size."""
    model = candidate.model
    return model.hidden_size if candidate.method == "reward" else model.vocab_size * model.hidden_size


# -- components of a moment --------------------------------------------------------------------------------------------


def at_moment(passes: Passes, peaks: PassPeak) -> Components:
    """The heaviest moment; with offloading, the one that is heaviest with what has moved to the host taken out."""
    if not offloads(passes.candidate):
        return at(peaks, passes.tokens, passes.scores)
    return max(
        (sizes(remaining(passes, moment), passes.tokens, passes.scores) for moment in peaks.snapshots), key=total
    )


def remaining(passes: Passes, moment: LiveBytes) -> LiveBytes:
    """The moment without what offloading has moved to the host: of what is saved, one layer's stays.

    Source: trl 1.16, models/activation_offloading.py (up to five tensors wait for their copy); transformers 5.23, `offload` of
    activation_checkpointing_kwargs.
    """
    if not offloads(passes.candidate):
        return moment
    kinds = dict(moment.kinds)
    for kind in ("activations", "attention_scores"):
        held, saved, layer = (
            dict(each.kinds).get(kind, NOTHING) for each in (moment, passes.stack.saved, passes.stack.one_layer)
        )
        kinds[kind] = (
            max(held[0] - saved[0], 0) + min(held[0], layer[0]),
            max(held[1] - saved[1], 0) + min(held[1], layer[1]),
            held[2],
        )
    return LiveBytes(moment.total, tuple(kinds.items()))


def offloads(candidate: TrainingInput) -> bool:
    return candidate.activation_offloading or (candidate.checkpoint_offload and candidate.gradient_checkpointing)


def at(peaks: PassPeak, tokens: int, scores: int) -> Components:
    return sizes(peaks.at(tokens, scores)[1], tokens, scores)


def sizes(moment: LiveBytes, tokens: int, scores: int) -> Components:
    return {kind: size[0] * tokens + size[1] * scores + size[2] for kind, size in moment.kinds}


def together(first: Components, *parts: Components) -> Components:
    components = first.copy()
    known = components.get
    for part in parts:
        for component, size in part.items():
            components[component] = known(component, 0) + size
    return components


def total(components: Components) -> int:
    return sum(components.values())
