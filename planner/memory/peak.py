"""The table phase x component of one training GPU: when each kind of memory is alive. The peak is its heaviest row."""

from dataclasses import dataclass

from planner.candidate import DTYPE_BYTES, Candidate
from planner.cluster import Gpu
from planner.quantities import Component, Phase, PhaseMemory
from planner.memory.activations import Peaks
from planner.memory.adapters import adapters_bytes
from planner.memory.autograd import Moment, Size
from planner.memory.communication import communication_bytes, gather_bytes, generation_gather_bytes, weight_sync_bytes
from planner.memory.engine import EngineMemory
from planner.memory.gradients import gradients_bytes, step_gradients_bytes
from planner.memory.kv_cache import generation_logits_bytes, kv_cache_dtype_bytes, kv_cache_peak_bytes, prefill_cache_bytes
from planner.memory.loss import FORMULAS, Head, LossMemory, loss_of
from planner.memory.optimizer import master_weights_bytes, optimizer_states_bytes, step_temporaries_bytes
from planner.memory.parameters import policy_parameters
from planner.memory.runtime import fragmentation_bytes, runtime_bytes
from planner.memory.stack import StackMemory, StackRecipe, frozen_recipe, stack_memory, stack_recipe
from planner.memory.weights import base_dtype_bytes, reference_weights_bytes, weights_by_role

Components = dict[Component, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """What the phases of one candidate are computed from."""

    candidate: Candidate
    stack: StackMemory
    recipe: StackRecipe
    loss: LossMemory
    head: Head
    resident: Components  # alive in every phase from the second step on
    engine: EngineMemory | None


def train_phases(candidate: Candidate, gpu: Gpu, engine: EngineMemory | None) -> tuple[PhaseMemory, ...]:
    """Every phase of a training GPU, from the second optimizer step on (the first has no optimizer states yet).

    `engine` is the vLLM engine in the same process, None without one.
    """
    passes = passes_of(candidate, gpu, engine)
    rows: list[tuple[Phase, Components]] = [("load", load(passes))]
    if candidate.method_row.generates:
        rows += [("weight_sync", weight_sync(passes))] if candidate.vllm != "off" else []
        rows += [("rollout", rollout(passes))]
    if scores_before_training(candidate):
        rows += [("score", score_pass(passes))]
    rows += [("forward", forward(passes)), ("loss", loss_phase(passes)), ("backward", backward(passes)), ("optimizer_step", optimizer_step(passes))]
    return tuple(finished(name, components, candidate) for name, components in rows)


def passes_of(candidate: Candidate, gpu: Gpu, engine: EngineMemory | None) -> Passes:
    recipe = stack_recipe(candidate, gpu.supports_flash_attention_2)
    accumulates = candidate.gradient_accumulation_steps > 1 or candidate.sharding in ("zero1", "zero2", "zero3", "fsdp2")
    head = head_of(candidate)
    elements = 0 if candidate.tuning == "lora" else head_elements(candidate)
    stack = stack_memory(candidate.model, recipe, accumulates, elements)
    resident: Components = {
        "weights": sum(weights_by_role(candidate).values()),
        "adapters": adapters_bytes(candidate),
        "optimizer_states": optimizer_states_bytes(candidate),
        "communication": communication_bytes(candidate, gpu),
        "runtime": runtime_bytes(gpu, candidate),
    }
    return Passes(candidate=candidate, stack=stack, recipe=recipe, loss=FORMULAS[loss_of(candidate)](head), head=head, resident=resident, engine=engine)


def finished(name: Phase, components: Components, candidate: Candidate) -> PhaseMemory:
    """A row of the table with the allocator's slack on what PyTorch allocated in it."""
    outside = components.get("runtime", 0) + components.get("engine", 0)
    components["fragmentation"] = fragmentation_bytes(sum(components.values()) - outside, candidate)
    return PhaseMemory(name=name, components={component: size for component, size in components.items() if size})


# -- the head ----------------------------------------------------------------------------------------------------------


def head_elements(candidate: Candidate) -> int:
    """Parameters of the output head: the reward trainers' score has one number for each of hidden_size."""
    model = candidate.model
    return model.hidden_size if candidate.method == "reward" else model.vocab_size * model.hidden_size


def head_of(candidate: Candidate) -> Head:
    model, width = candidate.model, base_width(candidate)
    compute = 2 if candidate.precision != "no" else width
    return Head(
        tokens=candidate.tokens,
        labelled_tokens=candidate.labelled_tokens,
        logit_tokens=candidate.labelled_tokens if candidate.method in ("grpo", "rloo") else candidate.tokens,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        hidden_width=width,
        weight_width=width,
        compute_width=compute,
        trainable=candidate.tuning == "full",
    )


def base_width(candidate: Candidate) -> int:
    """Bytes of a hidden state: those of the embedding as the forward pass sees it."""
    sharded = candidate.sharding in ("zero1", "zero2", "zero3", "fsdp2") and candidate.precision != "no"
    return 2 if sharded else DTYPE_BYTES[candidate.dtype]


def attention_mask_bytes(passes: Passes) -> int:
    """The mask that all layers share: a bool a score for sdpa, a number of the hidden dtype for eager; one for each kind of window.

    Source: transformers 5.23, masking_utils.py `sdpa_mask` and `eager_mask`.
    """
    candidate, recipe = passes.candidate, passes.recipe
    if recipe.attn_implementation == "eager":
        kinds = len({layer.attention.sliding_window for layer, _ in candidate.model.layer_kinds})
        return candidate.scores * passes.head.hidden_width * kinds
    if recipe.attn_implementation != "sdpa":
        return 0
    windows = {layer.attention.sliding_window for layer, _ in candidate.model.layer_kinds}
    needed = len(windows) if recipe.masked else len(windows - {None}) * recipe.windows_active
    return candidate.scores * needed


# -- phases ------------------------------------------------------------------------------------------------------------


def load(passes: Passes) -> Components:
    """Before the first step: no optimizer states; the engine starts beside the loaded model."""
    components = dict(passes.resident)
    components["optimizer_states"] = master_weights_bytes(passes.candidate)
    return with_engine(components, passes, awake=True)


def weight_sync(passes: Passes) -> Components:
    """New weights go to the engine: it holds its own weights but no KV cache yet when it slept."""
    components = dict(passes.resident)
    components["communication"] += weight_sync_bytes(passes.candidate)
    if passes.engine is not None:
        components["engine"] = passes.engine.weights_awake_bytes
    return components


def rollout(passes: Passes) -> Components:
    """Completions are sampled: by the engine, elsewhere by a server, or by `generate` with a cache of its own."""
    components = dict(passes.resident)
    if passes.candidate.vllm != "off":
        return with_engine(components, passes, awake=True)
    components["communication"] += generation_gather_bytes(passes.candidate)
    for component, size in generation(passes).items():
        components[component] = components.get(component, 0) + size
    return components


def generation(passes: Passes) -> Components:
    """`generate` at its largest: the last token with the whole cache, or the prompt's own forward pass."""
    candidate, model = passes.candidate, passes.candidate.model
    rows, prompt = candidate.generation_rows, candidate.prompt_length
    tokens = prompt + candidate.max_completion_length - 1
    width = kv_cache_dtype_bytes(model, passes.head.hidden_width, candidate.precision != "no")
    logits = generation_logits_bytes(model, rows)
    copies = passes.stack.copies[2] if candidate.tuning == "full" else 0
    last: Components = {"kv_cache": kv_cache_peak_bytes(model, rows, prompt, tokens, width), "loss": logits, "autocast_copies": copies}
    prefill = kinds_at(passes.stack.inference, rows * prompt, rows * prompt * prompt)
    first: Components = {"kv_cache": prefill_cache_bytes(model, rows, prompt, width), "loss": logits, **prefill}
    return max(last, first, key=lambda components: sum(components.values()))


def scores_before_training(candidate: Candidate) -> bool:
    """Whether log-probabilities are computed without gradients between sampling and training.

    Source: trl 1.16, grpo_trainer.py:2634-2733 (old log-probabilities with vLLM or when a batch is used more than once; reference where
    beta is not 0), online_dpo_trainer.py, ppo_trainer.py.
    """
    if candidate.method in ("grpo", "rloo"):
        reused = candidate.num_iterations > 1 or candidate.steps_per_generation > candidate.gradient_accumulation_steps
        return reused or candidate.vllm != "off" or candidate.beta != 0
    return candidate.method in ("online-dpo", "ppo")


def score_pass(passes: Passes) -> Components:
    """A forward pass without gradients over one micro-batch."""
    components = dict(passes.resident)
    inference = kinds_at(passes.stack.inference, passes.candidate.tokens, passes.candidate.scores)
    for component, size in inference.items():
        components[component] = components.get(component, 0) + size
    components["loss"] = passes.loss.forward
    components["communication"] += gather_bytes(passes.candidate, "forward")
    return with_engine(components, passes, awake=False)


def forward(passes: Passes) -> Components:
    return with_pass(passes, passes.stack.forward, "forward", 0)


def loss_phase(passes: Passes) -> Components:
    """The head after the last layer; with a reference model or a teacher, its forward pass on top of what the policy keeps."""
    components = training(passes)
    saved = size_at_kinds(kept(passes, passes.stack.saved), passes.candidate)
    add_all(components, saved)
    components["loss"] = passes.loss.forward
    components["communication"] += gather_bytes(passes.candidate, "forward")
    other = other_forward(passes)
    if sum(other.values()) + passes.loss.saved > components["loss"]:
        components["loss"] = passes.loss.saved
        add_all(components, other)
    return components


def other_forward(passes: Passes) -> Components:
    """The forward pass of a frozen model while the policy's graph is alive: DPO's and KTO's reference (trl 1.16, dpo_trainer.py:1299-1338)."""
    candidate = passes.candidate
    if candidate.method not in ("dpo", "kto") or candidate.precompute_ref_log_probs:
        return {}
    if candidate.separate_reference:
        frozen = stack_memory(candidate.model, frozen_recipe(candidate, passes.recipe.flash), True, 0)
        return {**kinds_at(frozen.inference, candidate.tokens, candidate.scores), "loss": passes.loss.forward}
    return {**kinds_at(passes.stack.inference, candidate.tokens, candidate.scores)}


def backward(passes: Passes) -> Components:
    """Layer by layer from the last; before them the head's own backward, after them the embedding's."""
    return max((with_pass(passes, passes.stack.backward, "backward", 0), head_backward(passes), embedding_backward(passes)), key=lambda c: sum(c.values()))


def head_backward(passes: Passes) -> Components:
    components = training(passes)
    saved = kept(passes, passes.stack.saved)
    add_all(components, size_at_kinds(saved, passes.candidate))
    components["autocast_copies"] = components.get("autocast_copies", 0) - passes.stack.copies[2]
    components["loss"] = passes.loss.backward
    components["communication"] += gather_bytes(passes.candidate, "backward")
    return components


def embedding_backward(passes: Passes) -> Components:
    """The end of the pass: all gradients, the embedding's own dense one, and under tied weights the head's beside it."""
    candidate = passes.candidate
    components = training(passes)
    width, model = base_dtype_bytes(candidate), candidate.model
    components["gradients"] = gradients_bytes(candidate)
    components["transients"] = candidate.tokens * model.hidden_size * passes.head.hidden_width
    if candidate.tuning == "full" and (model.tied or candidate.gradient_accumulation_steps > 1):
        components["transients"] += model.embed_params * width
    return components


def optimizer_step(passes: Passes) -> Components:
    components = dict(passes.resident)
    components["gradients"] = step_gradients_bytes(passes.candidate)
    components["transients"] = step_temporaries_bytes(passes.candidate)
    return with_engine(components, passes, awake=False)


# -- what phases are made of -------------------------------------------------------------------------------------------


def training(passes: Passes) -> Components:
    """Resident memory and gradients that are alive during a micro-step, and the shared attention mask."""
    components = dict(passes.resident)
    candidate = passes.candidate
    if candidate.gradient_accumulation_steps > 1 or candidate.sharding in ("zero1", "zero2", "zero3", "fsdp2"):
        components["gradients"] = gradients_bytes(candidate)
    components["attention_scores"] = attention_mask_bytes(passes)
    return with_engine(components, passes, awake=False)


def with_pass(passes: Passes, peaks: Peaks, pass_name: Phase, extra: int) -> Components:
    components = training(passes)
    candidate = passes.candidate
    _, moment = peaks.at(candidate.tokens, candidate.scores)
    add_all(components, size_at_kinds(kept(passes, moment), candidate))
    components["communication"] += gather_bytes(candidate, pass_name)
    return components


def kept(passes: Passes, moment: Moment) -> Moment:
    """The moment with what offloading has moved to the host taken out: all that is saved but one layer's."""
    candidate = passes.candidate
    if not (candidate.activation_offloading or (candidate.checkpoint_offload and candidate.gradient_checkpointing)):
        return moment
    saved = dict(passes.stack.saved.kinds).get("activations", (0, 0, 0))
    one = dict(passes.stack.one_layer.kinds).get("activations", (0, 0, 0))
    kinds = dict(moment.kinds)
    mine = kinds.get("activations", (0, 0, 0))
    kinds["activations"] = (
        max(min(mine[0], one[0]), mine[0] - saved[0] + one[0]),
        max(min(mine[1], one[1]), mine[1] - saved[1] + one[1]),
        mine[2],
    )
    return Moment(moment.total, tuple(kinds.items()))


def with_engine(components: Components, passes: Passes, awake: bool) -> Components:
    engine = passes.engine
    if engine is not None:
        components["engine"] = engine.total_bytes if awake else engine.asleep_bytes
    return components


def add_all(components: Components, others: Components) -> None:
    for component, size in others.items():
        components[component] = components.get(component, 0) + size


def size_at_kinds(moment: Moment, candidate: Candidate) -> Components:
    tokens, scores = candidate.tokens, candidate.scores
    return {kind: size[0] * tokens + size[1] * scores + size[2] for kind, size in moment.kinds}


def kinds_at(peaks: Peaks, tokens: int, scores: int) -> Components:
    _, moment = peaks.at(tokens, scores)
    return {kind: size[0] * tokens + size[1] * scores + size[2] for kind, size in moment.kinds}
