"""The table phase x component of one training GPU: when each kind of memory is alive. The peak is its heaviest row."""

from planner.cache_keys import TrainingInput
from planner.gpus.cluster import Gpu
from planner.memory.activations import stack_memory
from planner.memory.engine.budget import EngineMemory
from planner.memory.kv_cache import (
    generation_logits_bytes,
    kv_cache_dtype_bytes,
    kv_cache_peak_bytes,
    mla_expansion_bytes,
    prefill_cache_bytes,
)
from planner.memory.loss import LINEAR_HEAD, loss_of
from planner.memory.passes import (
    Components,
    Passes,
    at,
    at_moment,
    gradients_stay,
    passes_of,
    remaining,
    sizes,
    together,
    total,
)
from planner.memory.runtime import fragmentation_bytes
from planner.memory.stack_recipe import frozen_recipe, without_adapters
from planner.quantities import Phase, PhaseMemory


def training_phases(candidate: TrainingInput, gpu: Gpu) -> tuple[PhaseMemory, ...]:
    """Every phase of a training GPU without a vLLM engine, from the second optimizer step on: in the first there are no optimizer states yet."""
    passes = passes_of(candidate, gpu)
    phases: list[tuple[Phase, Components]] = [("load", load(passes))]
    if candidate.method_row.generates:
        phases += [("weight_sync", weight_sync(passes))] if candidate.vllm != "off" else []
        phases += [("rollout", rollout(passes))]
    if scores_before_training(candidate):
        phases += [("score", score(passes))]
    phases += [
        ("forward", forward(passes)),
        ("loss", loss(passes)),
        ("backward", backward(passes)),
        ("optimizer_step", optimizer_step(passes)),
    ]
    return tuple(phase_memory(name, components, candidate) for name, components in phases)


def phase_memory(name: Phase, components: Components, candidate: TrainingInput) -> PhaseMemory:
    """One row of the table, with the allocator's slack on what PyTorch allocated; components of 0 bytes are left out."""
    allocated_bytes = sum(components.values()) - components.get("runtime", 0)
    every = {**components, "fragmentation": fragmentation_bytes(allocated_bytes, candidate)}
    return PhaseMemory(name=name, components={component: size for component, size in every.items() if size})


def with_engine(phase: PhaseMemory, engine: EngineMemory) -> PhaseMemory:
    """The phase on a GPU where a colocated vLLM engine also holds memory.

    The engine samples in a rollout and starts while the model is loaded. When it receives new weights it holds its own
    weights, and no KV cache yet if it slept. In the other phases it holds what it keeps while asleep, or everything.
    """
    size = engine.total_bytes if phase.name in ("load", "rollout") else engine.asleep_bytes
    if phase.name == "weight_sync":
        size = engine.weights_awake_bytes
    components = phase.components.copy()
    fragmentation = components.pop("fragmentation", 0)
    components["engine"] = size
    if fragmentation:
        components["fragmentation"] = fragmentation  # stays the last
    return PhaseMemory(name=phase.name, components=components)


def load(passes: Passes) -> Components:
    """Before the first step: no optimizer states but DeepSpeed's master weights."""
    return {**passes.idle, "optimizer_states": passes.states.master_weights}


def weight_sync(passes: Passes) -> Components:
    """New weights go to the engine."""
    return together(passes.idle, {"communication": passes.states.weight_sync})


def rollout(passes: Passes) -> Components:
    """Completions are sampled: by the engine, elsewhere by a server, or by `generate` with a cache of its own."""
    if passes.candidate.vllm != "off":
        return passes.idle
    return together(passes.idle, {"communication": passes.states.generation_gather}, generation(passes))


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


def scores_before_training(candidate: TrainingInput) -> bool:
    """Whether log-probabilities are computed without gradients between sampling and training.

    Source: trl 1.16, grpo_trainer.py:2634-2733 (old log-probabilities with vLLM or when a batch is used more than once; reference where
    beta is not 0); trl 1.12, ppo_trainer.py.
    """
    if candidate.method_row.grouped_completions:
        reused = candidate.num_iterations > 1 or candidate.steps_per_generation > candidate.gradient_accumulation_steps
        return reused or candidate.vllm != "off" or candidate.beta != 0
    return candidate.method == "ppo"


def score(passes: Passes) -> Components:
    """A forward pass without gradients over one micro-batch."""
    layers = at(passes.stack.inference, passes.tokens, passes.scores)
    return together(passes.idle, layers, {"loss": passes.loss.forward, "communication": passes.states.forward_gather})


def forward(passes: Passes) -> Components:
    """The heaviest layer on the way up."""
    return together(
        passes.training, at_moment(passes, passes.stack.forward), {"communication": passes.states.forward_gather}
    )


def loss(passes: Passes) -> Components:
    """The head after the last layer; then the pass of a model that is only read, while the policy's graph is alive."""
    kept = sizes(remaining(passes, passes.stack.saved), passes.tokens, passes.scores)
    own: Components = {"loss": passes.loss.forward, "communication": passes.states.forward_gather}
    other = frozen_forward(passes)
    if other:
        dropped: Components = {
            "autocast_copies": -passes.stack.copies[2]
        }  # by then autocast has let go of the policy's copies
        beside: Components = {"loss": passes.loss.saved, "communication": passes.states.forward_gather}
        own = max(own, together(beside, other, dropped), key=total)
    return together(passes.training, kept, own)


def frozen_forward(passes: Passes) -> Components:
    """A forward pass without gradients beside the policy's graph, its layers or its head: DPO's and KTO's reference, a teacher.

    Source: trl 1.16, trainer/dpo_trainer.py:1299-1338, kto_trainer.py:1306, distillation_trainer.py, experimental/gkd/gkd_trainer.py.
    """
    candidate = passes.candidate
    compares = candidate.method_row.reference_in_loss and not candidate.precompute_ref_log_probs
    other = candidate.teacher_model if candidate.method_row.teacher else candidate.model
    if other is None or not (compares or candidate.method_row.teacher):
        return {}
    apart = candidate.separate_reference or candidate.method_row.teacher
    recipe = frozen_recipe(candidate, passes.recipe.flash) if apart else without_adapters(passes.recipe)
    stack = stack_memory(other, recipe, True, 0)
    layers = at(stack.inference, passes.tokens, passes.scores)
    head: Components = {
        "loss": passes.loss.frozen_bytes if compares else 0
    }  # a teacher's logits are part of the loss' own formula
    return max(layers, head, key=total)


def backward(passes: Passes) -> Components:
    """Layer by layer from the last; before them the head's own backward, after them the embedding's.

    Where gradients stay, the rest of them is one buffer, made with the first gradient that goes there (ZeRO-1 and 2, accumulating).
    """
    states = passes.states
    gather: Components = {"communication": states.backward_gather}
    if gradients_stay(passes.candidate):
        gather["gradients"] = states.gradients - states.accumulated_gradients
    layers = together(gather, at_moment(passes, passes.stack.backward))
    return together(
        passes.training, max(layers, together(gather, head_backward(passes)), embedding_backward(passes), key=total)
    )


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
        "transients": passes.tokens * model.hidden_size * width
        + (copies * model.embed_params * width if candidate.tuning == "full" else 0),
    }


def optimizer_step(passes: Passes) -> Components:
    return together(
        passes.idle, {"gradients": passes.states.step_gradients, "transients": passes.states.step_temporaries}
    )
