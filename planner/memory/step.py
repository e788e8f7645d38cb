"""A step in TRL's order: the heaviest moment of each phase, by component. The peak is the heaviest phase."""

from collections.abc import Iterator

from planner.cache_keys import TrainingInput
from planner.gpus.cluster import Gpu
from planner.memory.engine.budget import EngineMemory
from planner.memory.generation import rollout
from planner.memory.images.passes import ImagePasses
from planner.memory.inference import (
    evaluation,
    evaluation_passes,
    frozen_forward,
    reference_ahead,
    score,
    scored_passes,
    teacher_cache,
)
from planner.memory.layers.components import Components, add_components, peak_components, total_bytes
from planner.memory.layers.one_layer import PassPeak
from planner.memory.parameters.kbit_preparation import autocasts_loss
from planner.memory.parameters.widths import copied_dtype_bytes
from planner.memory.passes import (
    Passes,
    between_steps,
    gathered_at_loss,
    gradients_exist,
    head_elements,
    head_gradient_bytes,
    kept_output,
    kept_pixels,
    kept_scores,
    passes_of,
    probabilities,
)
from planner.memory.runtime import context_bytes
from planner.memory.slack import fragmentation_bytes
from planner.memory.stack_recipe import learns_embedding_copy
from planner.memory.weights import averaging_bytes
from planner.methods import LINEAR_HEAD
from planner.quantities import Phase, PhaseMemory

# Probabilities, their product with the logits, and the exponentials of a logsumexp. Source: trl 1.12,
# experimental/ppo/ppo_trainer.py, `PPOTrainer.train` (`entropy`).
ENTROPY_TENSORS = 3


def training_phases(candidate: TrainingInput, gpu: Gpu) -> tuple[PhaseMemory, ...]:
    """Every phase of a training GPU, without a vLLM engine in the same process.

    The rows stand for the second optimizer step and all later ones: the first has no optimizer states before its end.
    """
    passes = passes_of(candidate, gpu)
    phases: list[tuple[Phase, Components]] = [("load", load(passes, gpu))]
    if candidate.method_row.generates and candidate.generated_share:
        phases += [("weight_sync", weight_sync(passes))] if candidate.vllm != "off" else []
        phases += [("rollout", rollout(passes))]
    if candidate.scores_samples:
        phases += [("score", score(passes, scored_passes(passes, candidate, gpu)))]
    phases += [
        ("forward", forward(passes)),
        ("loss", loss(passes)),
        ("backward", backward(passes)),
        ("optimizer_step", optimizer_step(passes)),
    ]
    evaluated = evaluation_passes(candidate, gpu)
    if evaluated:
        phases.append(("evaluation", evaluation(evaluated)))
    return tuple(phase_memory(name, components, candidate) for name, components in phases)


def phase_memory(name: Phase, components: Components, candidate: TrainingInput) -> PhaseMemory:
    """One row of the table: components that are not 0, and the allocator's slack on all that PyTorch allocated."""
    every = {**components, "fragmentation": fragmentation_bytes(components, candidate, name)}
    return PhaseMemory(name=name, components={component: size for component, size in every.items() if size})


def with_engine(phase: PhaseMemory, engine: EngineMemory) -> PhaseMemory:
    """The phase on a GPU where a colocated vLLM engine holds memory too.

        load, rollout   total_bytes: it starts beside the loaded model, and samples in a rollout
        weight_sync     weights_awake_bytes: a sleeping engine has no KV cache yet when it gets new weights
        others          asleep_bytes; the rollout of an evaluation is as heavy as one of the training

    Source: see `EngineMemory`, planner/memory/engine/budget.py.
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


def load(passes: Passes, gpu: Gpu) -> Components:
    """Before the first step: weights that are sharded later, DDP's broadcast, DeepSpeed's master weights.

    Under ZeRO-3 weights are sharded as they are created, long before the master weights and their copy exist. By the
    time ZeRO-3 has its buffer for gradients, the first forward pass begins, which gathers the embedding and prefetches
    nothing. There is no cuBLAS workspace before the first matrix product.
    """
    states, idle = passes.states, passes.idle
    unsharded: Components = {
        "weights": states.unsharded_while_loading,
        "communication": states.parameter_broadcast,
    }
    masters: Components = {"optimizer_states": states.masters.kept}
    prepared: Components = {**idle, **masters, "transients": states.masters.copy}
    if passes.candidate.scheme_row.creates_sharded:
        idle = {**idle, "runtime": context_bytes(gpu)}
        created = add_components({**idle, "adapters": 0, "optimizer_states": 0}, unsharded)
        embedding = passes.candidate.model.embed_params * passes.recipe.recipe.weight_width
        first: Components = {"communication": embedding if states.gathers.at["embedding"] else 0}
        begun: Components = {**idle, **masters, "gradients": states.gradients.at_step}
        return max(created, prepared, add_components(begun, first), key=total_bytes)
    whole = add_components({**idle, **masters}, unsharded)
    return max(whole, prepared, reference_ahead(passes), key=total_bytes)


def weight_sync(passes: Passes) -> Components:
    """The trainer sends new weights to the vLLM engine."""
    return add_components(between_steps(passes), kept_pixels(passes), {"communication": passes.states.weight_sync})


def forward(passes: Passes) -> Components:
    """Forward pass at its heaviest layer, of the vision tower or of the language model after it."""
    masks = {} if passes.candidate.gradient_checkpointing else passes.masks  # else among `training`
    layers = add_components(
        masks, with_unsplit(passes, peak_components(passes.stack.forward, passes.tokens, passes.scores))
    )
    if passes.images:
        after = add_components(layers, passes.images.saved, passes.images.held)
        layers = max(after, passes.images.forward, key=total_bytes)
    layers = add_components(layers, {"communication": passes.states.gathers.at["forward"]})
    first: Components = {"communication": passes.states.gathers.at["embedding"]}
    return add_components(passes.training, max(layers, first, key=total_bytes))


def loss(passes: Passes) -> Components:
    """Head and loss after the last layer, or the forward pass of a frozen model while the policy's graph is alive."""
    gathered, teacher = passes.states.gathers.at, passes.states.gathers.teacher_head
    heads = gathered_at_loss(passes) + teacher
    own: Components = {"loss": passes.loss.forward, "communication": heads, **teacher_cache(passes)}
    # autocast drops its copies of the policy's weights at the end of the model's forward pass
    copies = 0 if autocasts_loss(passes.candidate) else passes.stack.copies[2]
    dropped: Components = {"autocast_copies": -copies}
    if passes.loss.in_model is not None:
        in_model: Components = {"loss": passes.loss.in_model, "communication": gathered["loss"] + teacher}
        own = max(in_model, add_components(own, dropped), key=total_bytes)
    first = passes.states.gathers.first_loss
    if first:
        states = passes.states.masters.kept - passes.idle.get("optimizer_states", 0)
        own = max(own, add_components(own, {"communication": first, "optimizer_states": states}), key=total_bytes)
    frozen = frozen_forward(passes)
    if frozen:
        policy: Components = {"loss": passes.loss.beside_bytes, "communication": passes.states.gathers.kept_head}
        own = max(own, add_components(policy, frozen, dropped), key=total_bytes)
        if passes.states.gathers.kept_head:
            embedding: Components = {"communication": gathered["embedding"]}
            own = max(own, add_components(policy, embedding, dropped), key=total_bytes)
    return add_components(passes.training, passes.kept, own, passes.images.saved if passes.images else {})


def backward(passes: Passes) -> Components:
    """The heaviest of: the head's backward pass, one layer's, the vision tower's, the embedding's.

    Under FSDP2 the first layer's runs beside the next unit, the embedding (torch 2.13,
    distributed/fsdp/_fully_shard/_fsdp_param_group.py, `_backward_prefetch`).

    ZeRO-2 allocates the buffer for all gradients of the rank's partition with the first of them that it reduces, after
    the head's backward pass: counted here for a rank with the last layers. ZeRO-1 reduces after the backward pass.
    Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `copy_grads_in_partition` (`grads_in_partition`).
    """
    states, row = passes.states, passes.candidate.scheme_row
    gradients = (
        states.gradients.after_backward - states.gradients.accumulated if gradients_exist(passes.candidate) else 0
    )
    reduced = partition_gradients(passes) if row.partition_buffer else gradients
    done, gathered = layer_of_most_gathered(passes, states.gathers.in_backward)
    gather: Components = {"communication": gathered, "gradients": reduced}
    at_head: Components = {
        "communication": states.gathers.teacher_head, "gradients": 0 if row.partition_buffer else gradients
    }  # fmt: skip
    updated: Components = {"gradients": states.gradient_before, "transients": states.update_in_layers}
    own = add_components(gather, layer_backward(passes, passes.stack.backward, done))
    layers = max((own, *waiting_gradients(passes, reduced)), key=total_bytes)
    moments = [add_components(layers, updated)]
    moments += [add_components(at_head, moment) for moment in head_backward(passes)]
    if states.gathers.at["first_layer_backward"]:
        first: Components = {"communication": states.gathers.at["first_layer_backward"]}
        own = peak_components(passes.stack.first_backward, passes.tokens, passes.scores)
        moments.append(add_components(own, first))
    if passes.images:
        tower: Components = {"autocast_copies": -passes.images.copies}
        moments = [add_components(moment, passes.images.saved, tower) for moment in moments]
        moments.append(add_components(gather, tower_backward(passes, passes.images)))
    if row.reduces_after:
        moments.append(reduction(passes))
    held = kept_output(passes.candidate, passes.head)
    return add_components(passes.training, held, max(*moments, embedding_backward(passes), key=total_bytes))


def partition_gradients(passes: Passes) -> int:
    """Bytes of the gradients that a backward pass leaves, beside those of earlier micro-steps."""
    return passes.states.gradients.after_backward - passes.training.get("gradients", 0)


def reduction(passes: Passes) -> Components:
    """ZeRO-1 after the backward pass: all gradients, the buffer for those of the rank's partition, and a bucket.

    Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `reduce_gradients`, `copy_grads_in_partition`.
    """
    return {
        "communication": passes.states.gathers.at["backward"],
        "gradients": partition_gradients(passes) + passes.states.gradients.at_step,
        "transients": passes.states.gradients.norm_of_offloaded,
    }


def waiting_gradients(passes: Passes, gradients: int) -> Iterator[Components]:
    """Yield a layer's backward pass with the gradients that wait to be reduced, where DeepSpeed lets some wait.

    They wait until the next gradient exists. By then the layer has waited for its parameters and has freed the buffers
    in which they were received.
    """
    if passes.stack.waiting.snapshots:
        done, gathered = layer_of_most_gathered(passes, passes.states.gathers.computing)
        norm = passes.states.gradients.norm_in_layers
        held: Components = {"communication": gathered, "gradients": gradients, "transients": norm}
        yield add_components(held, layer_backward(passes, passes.stack.waiting, done))


def layer_of_most_gathered(passes: Passes, layers: tuple[int, ...]) -> tuple[int, int]:
    """Return (layers whose backward pass is done, gathered bytes) where gathered plus saved bytes are largest."""
    if not layers:
        return 0, passes.states.gathers.at["backward"]
    saved = total_bytes(passes.kept)
    most = max(range(len(layers)), key=lambda done: layers[done] - saved * done // len(layers))
    return most, layers[most]


def layer_backward(passes: Passes, peak: PassPeak, done: int) -> Components:
    """Backward pass of one layer, without the bytes that the `done` layers above it had saved.

    If only every n-th layer is checkpointed, the layers that remain may be the ones without.
    """
    heaviest = with_unsplit(passes, peak_components(peak, passes.tokens, passes.scores))
    if not done:
        return heaviest
    layers = max(passes.candidate.model.num_layers, 1)
    gone = max(done + 1 - passes.candidate.checkpoint_every_n_layers, 0)
    freed: Components = {kind: -(size * gone // layers) for kind, size in passes.kept.items()}
    freed["autocast_copies"] = 0
    return {kind: max(size, 0) for kind, size in add_components(heaviest, freed).items()}


def with_unsplit(passes: Passes, moment: Components) -> Components:
    """A moment of the layers with `Passes.unsplit`, in the proportion of the saved tensors that are alive in it."""
    if not passes.unsplit:
        return moment
    saved = passes.kept["activations"] - passes.unsplit
    alive = min(saved, moment.get("activations", 0))
    return add_components(moment, {"activations": passes.unsplit * alive // saved if saved else 0})


def tower_backward(passes: Passes, images: ImagePasses) -> Components:
    """Backward pass of a vision tower, the last one: the gradients of the language model exist already."""
    if not images.backward:
        return {}
    gradients = partition_gradients(passes) - images.gradient_bytes
    counted = gradients_exist(passes.candidate) or passes.candidate.scheme_row.partition_buffer
    done: Components = {} if counted else {"gradients": gradients}
    return add_components(images.backward, done)


def head_backward(passes: Passes) -> Iterator[Components]:
    """Backward pass of the loss, then of head and final norm, while the saved activations of all layers are alive."""
    candidate = passes.candidate
    norm_bytes = passes.norm.backward.at(passes.tokens, passes.scores)[0]
    if candidate.tuning == "full" and not passes.gradients.exist:
        norm_bytes += 0 if candidate.model.tied else passes.states.update_of_largest
    if not passes.gradients.exist:
        norm_bytes += head_gradient_bytes(candidate)
    elif not candidate.model.tied:
        norm_bytes += reduced_alone(passes, head_elements(candidate)) if candidate.tuning == "full" else 0
    gathers, loss = passes.states.gathers, passes.loss
    moments = [(loss.backward, gathers.at["head_backward"])]
    if gathers.outside is not None and loss.head_backward is not None:
        moments = [(loss.backward, gathers.outside), (loss.head_backward, gathers.at["head_backward"])]
    for own_bytes, gathered in moments:
        own: Components = {"loss": max(own_bytes, norm_bytes), "communication": gathered}
        yield add_components(passes.kept, own, {"autocast_copies": -passes.stack.copies[2]})


def embedding_backward(passes: Passes) -> Components:
    """End of the backward pass: all gradients, and the embedding's dense gradients before they are added up.

    Tied weights have a gradient from the head and one from the embedding. Their sum is made before it is added to the
    gradient of earlier micro-steps or to ZeRO-3's buffer. The gradient of an `nn.Linear` head is a view, to which
    autograd adds out of place: a third copy (pytorch 2.13, torch/csrc/autograd/input_buffer.cpp,
    `can_accumulate_inplace`). TRL's fused head and autocast's cast of a 16-bit gradient return tensors of their own,
    not views. PEFT's copy of the embedding is not tied and has one gradient.
    """
    candidate, model, width = passes.candidate, passes.candidate.model, passes.recipe.recipe.weight_width
    in_full, row = candidate.tuning == "full", candidate.scheme_row
    # a sequence classifier has no head that could be tied
    tied = model.tied and candidate.method_row.head == "lm_head" and in_full
    view = tied and candidate.loss in LINEAR_HEAD and passes.head.weight_cast_bytes == 0
    gradients = partition_gradients(passes)
    copies = ((2 if view else 1) if tied else 0) + gradients_exist(candidate)
    if row.units or row.partition_buffer:
        copies = 3 if view else 2 if tied else 1
    if row.units and in_full:
        return unit_embedding_backward(passes, gradients, copies)
    dense = width if in_full else copied_dtype_bytes(candidate) if learns_embedding_copy(candidate) else 0
    words = model.vocab_size * model.embedding_features  # all, of tensor parallelism too
    added, norm = copies * words * dense, passes.states.gradients.norm_of_offloaded
    if row.gradient_buffer:
        alone = reduced_alone(passes, model.embed_params) if in_full else 0
        added = max(added, model.embed_params * dense + norm, alone)  # the norm is computed from the sum
    return {
        "communication": passes.states.gathers.at["embedding_backward"],
        "gradients": gradients,
        "activations": passes.tokens * passes.stack.held,
        "transients": passes.tokens * model.hidden_size * width
        + max(added, passes.states.update_of_largest)
        + (norm if row.partition_buffer else 0),
    }


def reduced_alone(passes: Passes, elements: int) -> int:
    """Bytes of a gradient that is reduced alone and of its copy; 0 without a copy, or for one that the bucket takes."""
    bucket = passes.gradients.bucket
    if bucket is None or not bucket.copy_width or elements <= bucket.elements:
        return 0
    return elements * (passes.recipe.recipe.weight_width + bucket.copy_width)


def unit_embedding_backward(passes: Passes, gradients: int, copies: int) -> Components:
    """End of the backward pass in full where units are reduced (FSDP2): before the embedding's is, or while it is.

        before   shards of the layers' gradients, `copies` dense ones of the embedding, and what is gathered
        while    all shards, the unit's gradient, its copy for the reduce-scatter, and the output of that; with
                 `narrow_shards` that is the shard, made when the gradient is gone (`unsharded_grads.clear`); under
                 hybrid sharding also `copied_gradients_bytes`; the head that `generate` left gathered

    An embedding for each layer is in the root, whose gradient is dense, too, and reduced last.
    An untied embedding is gathered before, and as large as its copy, so that the second is never less.
    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_reduce`; results/fsdp2_memory.md.
    """
    candidate, model = passes.candidate, passes.candidate.model
    width = passes.recipe.recipe.weight_width
    root = model.per_layer_embed_params * width
    dense = model.embed_params * width
    reduced = max(dense, root, passes.states.gathers.last_unit)
    bytes_left, gpus = passes.gradients.left or (0, 1)
    before: Components = {
        "communication": passes.states.gathers.at["embedding_backward"],
        "gradients": gradients - model.embed_params * bytes_left // gpus,
        "transients": passes.tokens * model.hidden_size * width + copies * dense + root,
    }
    gathers = passes.states.gathers
    shard = reduced // candidate.shard_gpus
    output = -shard if candidate.narrow_shards else shard
    reducing: Components = {
        "communication": reduced + output + gathers.copied_gradients + gathers.left_head,
        "gradients": gradients,
        "transients": reduced,
    }
    return max(before, reducing, key=total_bytes)


def optimizer_step(passes: Passes) -> Components:
    """The optimizer's step, with its temporaries, and PPO's entropy beside gradients that wait for more."""
    entropy = probabilities(passes.candidate, passes.head)
    stepped = add_components(
        passes.idle,
        {"gradients": passes.states.gradients.at_step, "transients": passes.states.step_temporaries},
        passes.images.resident if passes.images else {},
        kept_scores(passes.candidate),
        kept_output(passes.candidate, passes.head),
        *(entropy,) * (ENTROPY_TENSORS if passes.candidate.accumulates else 0),
    )
    averaged: Components = {"communication": averaging_bytes(passes.candidate)}
    return max(stepped, add_components(between_steps(passes), averaged), key=total_bytes)
