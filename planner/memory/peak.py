"""The table phase x component of one training GPU: when each kind of memory is alive. The peak is its heaviest row."""

from dataclasses import dataclass

from planner.candidate import Candidate
from planner.cluster import Gpu
from planner.memory.activations import Peaks
from planner.memory.autograd import Moment
from planner.memory.engine import EngineMemory
from planner.memory.kv_cache import generation_logits_bytes, kv_cache_dtype_bytes, kv_cache_peak_bytes, mla_expansion_bytes, prefill_cache_bytes
from planner.memory.loss import FORMULAS, LINEAR_HEAD, Head, LossMemory, loss_of
from planner.memory.runtime import fragmentation_bytes
from planner.memory.stack import (
    SHARDED,
    StackMemory,
    StackRecipe,
    autocast_width,
    compute_weight_width,
    frozen_recipe,
    stack_memory,
    with_data,
    without_adapters,
)
from planner.memory.states import States, states_of
from planner.quantities import Component, Phase, PhaseMemory

Components = dict[Component, int]
NOTHING = (0, 0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """What the phases of one candidate are computed from. `tokens` and `scores` are those of the policy's training forward."""

    candidate: Candidate
    tokens: int
    scores: int
    states: States
    stack: StackMemory
    recipe: StackRecipe
    head: Head
    loss: LossMemory
    idle: Components  # alive in every phase, the engine not sampling
    training: Components  # alive during a micro-step: the same, gradients that stay, the attention mask that all layers share
    engine: EngineMemory | None  # None: no vLLM engine in this process


def train_phases(candidate: Candidate, gpu: Gpu, engine: EngineMemory | None) -> tuple[PhaseMemory, ...]:
    """Every phase of a training GPU, from the second optimizer step on: the first has no optimizer states yet.

    `engine` is the vLLM engine in the same process, None without one.
    """
    passes = passes_of(candidate, gpu, engine)
    rows: list[tuple[Phase, Components]] = [("load", load(passes))]
    if candidate.method_row.generates:
        rows += [("weight_sync", weight_sync(passes))] if candidate.vllm != "off" else []
        rows += [("rollout", rollout(passes))]
    if scores_before_training(candidate):
        rows += [("score", score(passes))]
    rows += [("forward", forward(passes)), ("loss", loss(passes)), ("backward", backward(passes)), ("optimizer_step", optimizer_step(passes))]
    return tuple(finished(name, components, candidate) for name, components in rows)


def passes_of(candidate: Candidate, gpu: Gpu, engine: EngineMemory | None) -> Passes:
    head, states = head_of(candidate), states_of(candidate, gpu)
    recipe = with_data(states.recipe, candidate, gpu.supports_flash_attention_2)
    scores = head.tokens * candidate.attention_length
    trained_head = 0 if candidate.tuning == "lora" else head_elements(candidate)
    stay = gradients_stay(candidate)
    idle = dict(states.resident)
    if engine is not None:
        idle["engine"] = engine.asleep_bytes
    training: Components = {"gradients": states.accumulated_gradients if stay else 0, "attention_scores": recipe.mask_widths * scores}
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
        engine=engine,
    )


def gradients_stay(candidate: Candidate) -> bool:
    """Whether gradients are there when a micro-step begins: accumulated ones, and the buffers of ZeRO and FSDP2."""
    return candidate.gradient_accumulation_steps > 1 or candidate.sharding in SHARDED


def finished(name: Phase, components: Components, candidate: Candidate) -> PhaseMemory:
    """A row of the table, with the allocator's slack on what PyTorch allocated in it."""
    outside = components.get("runtime", 0) + components.get("engine", 0)
    components["fragmentation"] = fragmentation_bytes(sum(components.values()) - outside, candidate)
    for component in [component for component, size in components.items() if not size]:
        del components[component]
    return PhaseMemory(name=name, components=components)


# -- the head ----------------------------------------------------------------------------------------------------------


def head_elements(candidate: Candidate) -> int:
    """Parameters of the output head: the reward trainers' score has one number for each of hidden_size."""
    model = candidate.model
    return model.hidden_size if candidate.method == "reward" else model.vocab_size * model.hidden_size


def head_of(candidate: Candidate) -> Head:
    model, width, tokens = candidate.model, compute_weight_width(candidate), candidate.tokens
    labelled = candidate.labelled_tokens
    return Head(
        tokens=tokens,
        labelled_tokens=labelled,
        logit_tokens=labelled if candidate.method in ("grpo", "rloo") else tokens,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        hidden_width=width,
        weight_width=width,
        compute_width=autocast_width(candidate) or width,
        trainable=candidate.tuning == "full",
        softcapped=model.config.get("final_logit_softcapping", 30.0 if model.model_type == "gemma2" else None) is not None,  # Gemma2Config's default
    )


# -- phases ------------------------------------------------------------------------------------------------------------


def load(passes: Passes) -> Components:
    """Before the first step: no optimizer states but DeepSpeed's master weights; the engine starts beside the loaded model."""
    components = awake(passes)
    components["optimizer_states"] = passes.states.master_weights
    return components


def weight_sync(passes: Passes) -> Components:
    """New weights go to the engine: it holds its own weights but no KV cache yet when it slept."""
    components = dict(passes.idle)
    components["communication"] += passes.states.weight_sync
    if passes.engine is not None:
        components["engine"] = passes.engine.weights_awake_bytes
    return components


def rollout(passes: Passes) -> Components:
    """Completions are sampled: by the engine, elsewhere by a server, or by `generate` with a cache of its own."""
    components = awake(passes)
    if passes.candidate.vllm != "off":
        return components
    components["communication"] += passes.states.generation_gather
    return together(components, generation(passes))


def generation(passes: Passes) -> Components:
    """`generate` at its largest: the last token with the whole cache, or the prompt's own forward pass."""
    candidate, model = passes.candidate, passes.candidate.model
    rows, prompt = candidate.generation_rows, candidate.prompt_length
    tokens = prompt + candidate.max_completion_length - 1
    width = kv_cache_dtype_bytes(model, passes.head.hidden_width, candidate.precision != "no")
    logits = generation_logits_bytes(model, rows)
    last: Components = {
        "kv_cache": kv_cache_peak_bytes(model, rows, prompt, tokens, width),
        "loss": logits,
        "autocast_copies": passes.stack.copies[2] if candidate.tuning == "full" else 0,
        "transients": mla_expansion_bytes(model, rows, tokens, width),
    }
    prefill: Components = {"kv_cache": prefill_cache_bytes(model, rows, prompt, width), "loss": logits}
    first = together(prefill, at(passes.stack.inference, rows * prompt, rows * prompt * prompt))
    return max(last, first, key=total)


def scores_before_training(candidate: Candidate) -> bool:
    """Whether log-probabilities are computed without gradients between sampling and training.

    Source: trl 1.16, grpo_trainer.py:2634-2733 (old log-probabilities with vLLM or when a batch is used more than once; reference where
    beta is not 0); trl 1.12, ppo_trainer.py.
    """
    if candidate.method in ("grpo", "rloo"):
        reused = candidate.num_iterations > 1 or candidate.steps_per_generation > candidate.gradient_accumulation_steps
        return reused or candidate.vllm != "off" or candidate.beta != 0
    return candidate.method == "ppo"


def score(passes: Passes) -> Components:
    """A forward pass without gradients over one micro-batch."""
    layers = at(passes.stack.inference, passes.tokens, passes.scores)
    return together(passes.idle, layers, {"loss": passes.loss.forward, "communication": passes.states.forward_gather})


def forward(passes: Passes) -> Components:
    """The heaviest layer on the way up."""
    return together(passes.training, at_moment(passes, passes.stack.forward), {"communication": passes.states.forward_gather})


def loss(passes: Passes) -> Components:
    """The head after the last layer; then the pass of a model that is only read, while the policy's graph is alive."""
    kept = sizes(remaining(passes, passes.stack.saved), passes.tokens, passes.scores)
    own: Components = {"loss": passes.loss.forward, "communication": passes.states.forward_gather}
    other = frozen_forward(passes)
    if other:
        dropped: Components = {"autocast_copies": -passes.stack.copies[2]}  # by then autocast has let go of the policy's copies
        beside: Components = {"loss": passes.loss.saved, "communication": passes.states.forward_gather}
        own = max(own, together(beside, other, dropped), key=total)
    return together(passes.training, kept, own)


def frozen_forward(passes: Passes) -> Components:
    """A forward pass without gradients beside the policy's graph, its layers or its head: DPO's and KTO's reference, a teacher.

    Source: trl 1.16, trainer/dpo_trainer.py:1299-1338, kto_trainer.py:1306, distillation_trainer.py, experimental/gkd/gkd_trainer.py.
    """
    candidate = passes.candidate
    compares = candidate.method in ("dpo", "kto", "online-dpo") and not candidate.precompute_ref_log_probs
    other = candidate.teacher_model if candidate.method_row.teacher else candidate.model
    if other is None or not (compares or candidate.method_row.teacher):
        return {}
    apart = candidate.separate_reference or candidate.method_row.teacher
    recipe = frozen_recipe(candidate, passes.recipe.flash) if apart else without_adapters(passes.recipe)
    stack = stack_memory(other, recipe, True, 0)
    layers = at(stack.inference, passes.tokens, passes.scores)
    head: Components = {"loss": passes.loss.frozen_bytes if compares else 0}  # a teacher's logits are part of the loss' own formula
    return max(layers, head, key=total)


def value_graph(candidate: Candidate, recipe: StackRecipe, tokens: int, scores: int) -> Components:
    """What PPO's value model keeps while the policy's passes run: both are one forward (trl 1.12, ppo_trainer.py, PolicyAndValueWrapper)."""
    if not candidate.method_row.value_model:
        return {}
    stack = stack_memory(candidate.reward_model or candidate.model, frozen_recipe(candidate, recipe.flash), True, 0)
    return sizes(stack.saved, tokens, scores)


def backward(passes: Passes) -> Components:
    """Layer by layer from the last; before them the head's own backward, after them the embedding's.

    Where gradients stay, the rest of them is one buffer, made with the first gradient that goes there (ZeRO-1 and 2, accumulating).
    """
    states = passes.states
    gather: Components = {"communication": states.backward_gather}
    if gradients_stay(passes.candidate):
        gather["gradients"] = states.gradients - states.accumulated_gradients
    layers = together(gather, at_moment(passes, passes.stack.backward))
    return together(passes.training, max(layers, together(gather, head_backward(passes)), embedding_backward(passes), key=total))


def head_backward(passes: Passes) -> Components:
    kept = sizes(remaining(passes, passes.stack.saved), passes.tokens, passes.scores)
    return together(kept, {"loss": passes.loss.backward, "autocast_copies": -passes.stack.copies[2]})


def embedding_backward(passes: Passes) -> Components:
    """The end of the pass: all gradients, the embedding's own dense one, and under tied weights the head's beside it.

    The gradient of an `nn.Linear` head is a view, to which the engine adds out of place: a third copy (torch/csrc/autograd/input_buffer.cpp,
    `can_accumulate_inplace`). TRL's fused head returns a tensor of its own, and so does the cast of autocast's 16-bit one.
    """
    candidate, model, width = passes.candidate, passes.candidate.model, passes.head.hidden_width
    tied = model.tied and candidate.method != "reward"  # a sequence classifier has no head that could be tied
    view = tied and loss_of(candidate) in LINEAR_HEAD and passes.head.weight_cast_bytes == 0
    copies = (2 if view else 1) if tied or gradients_stay(candidate) else 0
    return {
        "gradients": passes.states.gradients - passes.training.get("gradients", 0),
        "transients": passes.tokens * model.hidden_size * width + (copies * model.embed_params * width if candidate.tuning == "full" else 0),
    }


def optimizer_step(passes: Passes) -> Components:
    return together(passes.idle, {"gradients": passes.states.step_gradients, "transients": passes.states.step_temporaries})


# -- what phases are made of -------------------------------------------------------------------------------------------


def awake(passes: Passes) -> Components:
    """What is there in every phase, and the engine of the same process while it samples or starts."""
    components = dict(passes.idle)
    if passes.engine is not None:
        components["engine"] = passes.engine.total_bytes
    return components


def at_moment(passes: Passes, peaks: Peaks) -> Components:
    """The heaviest moment; with offloading, the one that is heaviest with what has moved to the host taken out."""
    if not offloads(passes.candidate):
        return at(peaks, passes.tokens, passes.scores)
    return max((sizes(remaining(passes, moment), passes.tokens, passes.scores) for moment in peaks.moments), key=total)


def offloads(candidate: Candidate) -> bool:
    return candidate.activation_offloading or (candidate.checkpoint_offload and candidate.gradient_checkpointing)


def at(peaks: Peaks, tokens: int, scores: int) -> Components:
    return sizes(peaks.at(tokens, scores)[1], tokens, scores)


def sizes(moment: Moment, tokens: int, scores: int) -> Components:
    return {kind: size[0] * tokens + size[1] * scores + size[2] for kind, size in moment.kinds}


def remaining(passes: Passes, moment: Moment) -> Moment:
    """The moment without what offloading has moved to the host: of what is saved, one layer's stays.

    Source: trl 1.16, models/activation_offloading.py (up to five tensors wait for their copy); transformers 5.23, `offload` of
    activation_checkpointing_kwargs.
    """
    if not offloads(passes.candidate):
        return moment
    kinds = dict(moment.kinds)
    for kind in ("activations", "attention_scores"):
        held, saved, layer = (dict(each.kinds).get(kind, NOTHING) for each in (moment, passes.stack.saved, passes.stack.one_layer))
        kinds[kind] = (max(held[0] - saved[0], 0) + min(held[0], layer[0]), max(held[1] - saved[1], 0) + min(held[1], layer[1]), held[2])
    return Moment(moment.total, tuple(kinds.items()))


def together(first: Components, *parts: Components) -> Components:
    components = first.copy()
    known = components.get
    for part in parts:
        for component, size in part.items():
            components[component] = known(component, 0) + size
    return components


def total(components: Components) -> int:
    return sum(components.values())
