"""The table phase x component of one training GPU. The peak is its heaviest row."""

from msgspec.structs import replace

from planner.cache_keys import TrainingInput, training_settings
from planner.gpus.cluster import Gpu
from planner.memory.activations import EXISTING, StackMemory, stack_memory
from planner.memory.communication import row_exchange_bytes
from planner.memory.dtypes import FLOAT32_BYTES, SIXTEEN_BIT_BYTES
from planner.memory.engine.budget import EngineMemory
from planner.memory.images.passes import ImagePasses, image_passes
from planner.memory.kv_cache import (
    generation_logits_bytes,
    kv_cache_dtype_bytes,
    kv_cache_peak_bytes,
    mla_expansion_bytes,
    prefill_cache_bytes,
    recurrent_state_bytes,
)
from planner.memory.layers.components import Components, add_components, component_bytes, peak_components, total_bytes
from planner.memory.loss import FLOAT32, loss_of
from planner.memory.parameters.kbit_preparation import autocasts_loss
from planner.memory.parameters.widths import copied_dtype_bytes, teacher_dtype_bytes
from planner.memory.passes import Passes, gradients_exist, head_gradient_bytes, passes_of
from planner.memory.schemes.contract import FrozenGather
from planner.memory.slack import fragmentation_bytes
from planner.memory.stack_recipe import (
    autocasts_generation,
    frozen_recipe,
    generation_stack,
    learns_embedding_copy,
    without_adapters,
)
from planner.methods import LINEAR_HEAD
from planner.models.shape import ModelShape
from planner.quantities import Phase, PhaseMemory


def training_phases(candidate: TrainingInput, gpu: Gpu) -> tuple[PhaseMemory, ...]:
    """Every phase of a training GPU, without a vLLM engine in the same process.

    The rows stand for the second optimizer step and all later ones: the first has no optimizer states before its end.
    """
    passes = passes_of(candidate, gpu)
    phases: list[tuple[Phase, Components]] = [("load", load(passes))]
    if candidate.method_row.generates and candidate.generated_share:
        phases += [("weight_sync", weight_sync(passes))] if candidate.vllm != "off" else []
        phases += [("rollout", rollout(passes))]
    if candidate.scores_samples:
        phases += [("score", score(passes))]
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


def load(passes: Passes) -> Components:
    """Before the first step: weights that are sharded later, DDP's broadcast; DeepSpeed's master weights.

    Under ZeRO-3 weights are sharded while they are created, long before there are master weights, and a copy of those.
    """
    states = passes.states
    unsharded: Components = {
        "weights": states.unsharded_while_loading,
        "communication": states.parameter_broadcast,
    }
    masters: Components = {"optimizer_states": states.masters.kept}
    prepared: Components = {**passes.idle, **masters, "transients": states.masters.copy}
    if passes.candidate.scheme_row.creates_sharded:
        created = add_components({**passes.idle, "adapters": 0, "optimizer_states": 0}, unsharded)
        return max(created, prepared, key=total_bytes)
    return max(add_components({**passes.idle, **masters}, unsharded), prepared, key=total_bytes)


def weight_sync(passes: Passes) -> Components:
    """The trainer sends new weights to the vLLM engine."""
    return add_components(between_steps(passes), kept_pixels(passes), {"communication": passes.states.weight_sync})


def kept_pixels(passes: Passes) -> Components:
    """The pixels of the last rollout, which are buffered until the next one is scored.

    Source: trl 1.16, trainer/grpo_trainer.py, `_prepare_inputs` (`_buffered_inputs`).
    """
    return passes.images.resident if passes.images else {}


def rollout(passes: Passes) -> Components:
    """Completions are sampled by vLLM, or by `generate`, whose KV cache and pixels are then on this GPU."""
    idle = add_components(beside_rollouts(passes), kept_pixels(passes))
    if passes.candidate.vllm != "off":
        return idle
    return add_components(idle, kept_pixels(passes), generation(passes))


def between_steps(passes: Passes) -> Components:
    """Bytes that stay on the GPU while no step runs: under ZeRO-3 also the buffer for the rank's gradients.

    Source: deepspeed 0.19.8, zero/stage3.py, `DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer`
    (`grad_partitions_flat_buffer`).
    """
    if not passes.candidate.scheme_row.gradient_buffer:
        return passes.idle
    return add_components(passes.idle, {"gradients": passes.states.gradients.at_step})


def beside_rollouts(passes: Passes) -> Components:
    """Bytes that stay on the GPU while completions are sampled and scored: with the gradients of earlier micro-steps.

    Online DPO and GKD sample for single micro-steps, GRPO and its like once in `steps_per_generation` x
    `num_iterations` of them.
    Source: trl 1.16, experimental/online_dpo/online_dpo_trainer.py, gkd_trainer.py, `training_step`;
    trainer/grpo_trainer.py, `_prepare_inputs`.
    """
    kept = between_steps(passes)
    if not passes.candidate.samples_within_step:
        return kept
    return {**kept, "gradients": max(kept.get("gradients", 0), passes.training.get("gradients", 0))}


def generation(passes: Passes) -> Components:
    """`generate` at its peak: the last token with the full KV cache, or the forward pass over the prompt.

    Each with what is gathered then. Without a cache: the forward pass over the whole row.
    """
    candidate, model = passes.candidate, passes.candidate.model
    rows, prompt = candidate.generation_rows, candidate.prompt_length
    tokens = prompt + candidate.max_completion_length - 1
    recipe = generation_stack(passes.recipe, candidate)
    stack = stack_memory(model, recipe, EXISTING, 0)
    weight_width, autocast = recipe.recipe.weight_width, recipe.recipe.autocast_width > 0
    width = kv_cache_dtype_bytes(model, weight_width, autocast)
    logits = generation_logits_bytes(model, rows, FLOAT32_BYTES if autocast else weight_width)
    # PEFT calls the base model's forward, which accelerate does not wrap (`generation_stack`)
    states = recurrent_state_bytes(model, rows, weight_width, autocast and candidate.tuning == "full")
    last: Components = {
        "kv_cache": kv_cache_peak_bytes(model, rows, prompt, tokens, width) + states,
        "loss": logits,
        "autocast_copies": stack.copies[2] + generation_head_copy(passes) if candidate.tuning == "full" else 0,
        "transients": mla_expansion_bytes(model, rows, tokens, width),
    }
    images = image_passes(candidate, recipe, EXISTING, graph=False, rows=rows)
    in_prompt: Components = {"communication": passes.states.gathers.generation.prompt}
    after: Components = {"communication": passes.states.gathers.generation.after}
    if candidate.generates_without_cache:
        whole: Components = {"loss": logits, "attention_scores": recipe.mask_widths * rows * tokens * tokens}
        layers = peak_components(stack.inference, rows * tokens, rows * tokens * tokens)
        return seen(add_components(whole, layers, max(in_prompt, after, key=total_bytes)), images)
    scores = rows * prompt * prompt
    prefill: Components = {
        "kv_cache": prefill_cache_bytes(model, rows, prompt, width) + states,
        "attention_scores": recipe.mask_widths * scores,
    }
    layers = add_components(prefill, peak_components(stack.inference, rows * prompt, scores), in_prompt)
    return max(
        {"communication": passes.states.gathers.generation.embedding, "attention_scores": recipe.mask_widths * scores},
        seen(layers, images),
        add_components(prefill, {"loss": logits}, after),
        add_components(last, after),
        key=total_bytes,
    )


def generation_head_copy(passes: Passes) -> int:
    """Bytes of the 16-bit copy of a float32 head in `generate` of full fine-tuning, which accelerate autocasts."""
    if not autocasts_generation(passes.candidate):
        return passes.head.weight_cast_bytes
    return replace(passes.head, compute_width=SIXTEEN_BIT_BYTES).weight_cast_bytes


def seen(layers: Components, images: ImagePasses | None) -> Components:
    """The larger peak of two passes without gradients: the vision tower's, then the language model's (`layers`)."""
    if images is None:
        return layers
    return max(add_components(layers, images.held), images.forward, key=total_bytes)


def evaluation(passes: Passes) -> Components:
    """The heaviest of an evaluation batch: its rollout, the policy's forward pass, a frozen model's, the kept logits.

    Weights and optimizer states are there, gradients are not; beside the passes of the last batch, the logits that are
    kept of those before it. Methods whose rows are the dataset's in part (GKD) evaluate those. `passes` are those of an
    evaluation batch.
    Source: transformers 5.23, trainer.py, `Trainer.evaluation_loop`; trl 1.16, trainer/grpo_trainer.py,
    `_prepare_inputs` (samples and scores an evaluation batch as one).
    """
    row, idle = passes.candidate.method_row, between_steps(passes)
    forward_pass = evaluation_forward(passes)
    reference = beside_no_policy(passes)
    gathered = max(forward_pass.get("communication", 0), reference.layers)
    kept: Components = {"loss": max(passes.candidate.kept_eval_batches - 1, 0) * batch_logits_bytes(passes)}
    forward_pass = add_components({**forward_pass, "communication": gathered}, kept)
    first: Components = {"communication": reference.embedding}
    moments = [add_components(idle, moment) for moment in (forward_pass, first, kept_logits(passes))]
    frozen = frozen_forward(passes)
    if frozen:
        moments.append(add_components(idle, frozen, {"loss": beside_frozen_bytes(passes)}, kept))
    if row.generates and not row.mixes_rows:
        moments.append(rollout(passes))
    return max(moments, key=total_bytes)


def evaluation_passes(candidate: TrainingInput, gpu: Gpu) -> Passes | None:
    """Compute the inputs of the formulas for an evaluation batch; None without evaluation."""
    settings = training_settings(candidate)
    if settings.evaluation is None:
        return None
    batch = settings.evaluation._asdict()
    return passes_of(replace(settings, **batch, gradient_accumulation_steps=1, steps_per_generation=1), gpu)


def evaluation_forward(passes: Passes) -> Components:
    """Return the policy's forward pass and the loss, without gradients: its layers, or head and loss after them.

    Nothing is saved, neither by the layers nor by the final norm.
    Source: trl 1.16, trainer/sft_trainer.py, dpo_trainer.py, `prediction_step` (`torch.no_grad`).
    """
    gathered, stack = passes.states.gathers.at, passes.stack
    layers = add_components(peak_components(stack.inference, passes.tokens, passes.scores), passes.masks)
    layers = seen(layers, image_passes(passes.candidate, passes.recipe, EXISTING, graph=False))
    layers = add_components(layers, {"communication": gathered["forward"]})
    head: Components = {
        "loss": passes.loss.evaluated_bytes - passes.head.final_norm_bytes,
        "communication": gathered["loss"],
        "autocast_copies": cached_at_head(passes, stack),
        **teacher_cache(passes),
    }
    return max(layers, head, key=total_bytes)


def cached_at_head(passes: Passes, stack: StackMemory) -> int:
    """Bytes of autocast's copies of a stack's weights while the head runs without gradients.

    0 if the trainer computes the loss: they go when the model returns, unless the trainer's pass is in autocast, too.
    """
    return stack.cached if passes.loss.in_model is None or autocasts_loss(passes.candidate) else 0


def beside_frozen_bytes(passes: Passes) -> int:
    """Bytes of the policy's head that are alive while a frozen model runs after it: its logits, if there are any."""
    if loss_of(passes.candidate) not in LINEAR_HEAD:
        return 0
    return passes.loss.beside_bytes - passes.head.final_norm_bytes


def batch_logits_bytes(passes: Passes) -> int:
    """Bytes of one evaluation batch's logits, gathered from all processes; see `kept_logits`."""
    width = FLOAT32 if passes.candidate.precision != "no" else passes.head.compute_width
    return passes.tokens * passes.head.vocab_size * width * passes.candidate.num_processes


def kept_logits(passes: Passes) -> Components:
    """Return the logits that an evaluation keeps for a function of metrics, at their most.

        batch = rows x tokens x V x 4: float32 copies, by accelerate
        one   = (c / 4 + 1) batch, while the second forward pass makes them, or (1 + processes) batch while they are
                gathered
        n > 1 = 2 n x processes x batch: those of n - 1 batches, the new ones, and both concatenated

    Each process gathers the logits of all. n: `Candidate.kept_eval_batches`.

    Source: transformers 5.23, trainer.py, `Trainer.evaluation_loop`; trainer_pt_utils.py, `EvalLoopContainer.add` and
    `torch_pad_and_concatenate`; trl 1.16, trainer/sft_trainer.py, `compute_loss` (the logits have a forward pass of
    their own); accelerate 1.15, utils/operations.py, `convert_to_fp32`.

    Example: Qwen2.5-7B, 100 rows of 1,024 tokens in batches of 4: 2 x 25 x 4 x 1,024 x 152,064 x 4 = 116 GiB.
    """
    candidate, batches = passes.candidate, passes.candidate.kept_eval_batches
    if not batches:
        return {}
    gathered = batch_logits_bytes(passes)
    if batches > 1:
        return {"loss": 2 * batches * gathered}
    batch = gathered // candidate.num_processes
    made = passes.tokens * passes.head.vocab_size * passes.head.compute_width if candidate.precision != "no" else 0
    return {"loss": batch + max(made, gathered if candidate.num_processes > 1 else 0)}


def score(passes: Passes) -> Components:
    """Forward pass without gradients over one micro-batch: its layers, or head and loss after them.

    Leaves out a third copy of a rollout's pixels, made when the rollout is shuffled and cut, without activations beside
    (trl 1.16, trainer/grpo_trainer.py, `_prepare_inputs`, `unsplit_pixel_values_by_grid`).
    """
    gathered, stack = passes.states.gathers.at, scoring_stack(passes)
    layers = peak_components(stack.inference, passes.tokens, passes.scores)
    layers = seen(layers, image_passes(passes.candidate, passes.recipe, EXISTING, graph=False))
    reference = beside_no_policy(passes)
    layers = add_components(layers, passes.masks, {"communication": max(gathered["forward"], reference.layers)})
    first: Components = {"communication": reference.embedding}
    head: Components = {
        "loss": passes.loss.forward,
        "communication": gathered["loss"],
        "autocast_copies": cached_at_head(passes, stack),
    }
    pixels = add_components(kept_pixels(passes), kept_pixels(passes))  # of the last rollout, and of the one scored
    return add_components(beside_rollouts(passes), pixels, max(first, layers, head, key=total_bytes))


def scoring_stack(passes: Passes) -> StackMemory:
    """The stack that scores rollouts: the policy's, or its base without adapters if only a reference's are needed."""
    candidate = passes.candidate
    own = candidate.rescores_samples or candidate.method_row.sampling_forwards > 0
    if own or candidate.tuning == "full":
        return passes.stack
    return stack_memory(candidate.model, without_adapters(passes.recipe), EXISTING, 0)


def beside_no_policy(passes: Passes) -> FrozenGather:
    """Bytes that a separate reference gathers as it scores rollouts before the policy's pass; zeros without one."""
    scores = passes.candidate.separate_reference and not passes.candidate.method_row.reference_in_loss
    return passes.states.gathers.of_reference if scores else FrozenGather(0, 0, 0)


def forward(passes: Passes) -> Components:
    """Forward pass at its heaviest layer, of the vision tower or of the language model after it."""
    masks = {} if passes.candidate.gradient_checkpointing else passes.masks  # else among `training`
    layers = add_components(masks, peak_components(passes.stack.forward, passes.tokens, passes.scores))
    if passes.images:
        after = add_components(layers, passes.images.saved, passes.images.held)
        layers = max(after, passes.images.forward, key=total_bytes)
    exchanged = row_exchange_bytes(passes.candidate, "forward")
    layers = add_components(layers, {"communication": passes.states.gathers.at["forward"] + exchanged})
    first: Components = {"communication": passes.states.gathers.at["embedding"]}
    return add_components(passes.training, max(layers, first, key=total_bytes))


def loss(passes: Passes) -> Components:
    """Head and loss after the last layer, or the forward pass of a frozen model while the policy's graph is alive."""
    kept = component_bytes(passes.stack.saved, passes.tokens, passes.scores)
    gathered = passes.states.gathers.at
    heads = gathered["loss"] + passes.states.gathers.teacher_head
    own: Components = {"loss": passes.loss.forward, "communication": heads, **teacher_cache(passes)}
    # autocast drops its copies of the policy's weights at the end of the model's forward pass
    copies = 0 if autocasts_loss(passes.candidate) else passes.stack.copies[2]
    dropped: Components = {"autocast_copies": -copies}
    if passes.loss.in_model is not None:
        in_model: Components = {"loss": passes.loss.in_model, "communication": heads}
        own = max(in_model, add_components(own, dropped), key=total_bytes)
    frozen = frozen_forward(passes)
    if frozen:
        policy: Components = {"loss": passes.loss.beside_bytes, "communication": passes.states.gathers.kept_head}
        own = max(own, add_components(policy, frozen, dropped), key=total_bytes)
        if passes.states.gathers.kept_head:
            first: Components = {"communication": gathered["embedding"]}
            own = max(own, add_components(policy, first, dropped), key=total_bytes)
    return add_components(passes.training, kept, own, passes.images.saved if passes.images else {})


def frozen_forward(passes: Passes) -> Components:
    """Peak of a frozen model's forward pass (DPO's and KTO's reference, a teacher), with what is gathered then.

    Its embedding, its layers or its head; empty if the method has none.

    Source: trl 1.16, trainer/dpo_trainer.py, `DPOTrainer._compute_loss`, trainer/kto_trainer.py,
    `KTOTrainer.compute_ref_log_probs`, trainer/distillation_trainer.py, experimental/gkd/gkd_trainer.py (all run it
    after the policy's forward pass, whose graph is alive).
    """
    candidate = passes.candidate
    compares = candidate.method_row.reference_in_loss and not candidate.precompute_ref_log_probs
    other = candidate.teacher_model if candidate.method_row.teacher else candidate.model
    if other is None or not (compares or candidate.method_row.teacher):
        return {}
    apart = candidate.separate_reference or candidate.method_row.teacher
    evaluated = candidate.method_row.teacher and candidate.scheme_row.shards_evaluated
    width = teacher_dtype_bytes(candidate) if evaluated else 0
    recipe = frozen_recipe(candidate, passes.recipe.flash, width) if apart else without_adapters(passes.recipe)
    stack = stack_memory(other, recipe, EXISTING, 0)
    layers = add_components(peak_components(stack.inference, passes.tokens, passes.scores), passes.masks)
    layers = seen(layers, image_passes(candidate, recipe, EXISTING, graph=False))
    # the formula of the loss counts a teacher's logits itself
    head: Components = {
        "loss": passes.loss.frozen_bytes if compares else 0,
        "autocast_copies": cached_at_head(passes, stack),
    }
    if candidate.method_row.experimental_reference and apart and not candidate.gradient_checkpointing:
        head["kv_cache"] = row_cache_bytes(passes, other, passes.recipe.recipe.weight_width)
    before, beside = passes.states.gathers.at["forward"], passes.states.gathers.beside
    layers = add_components(layers, {"communication": max(before, beside.layers)})
    head = add_components(head, {"communication": max(before, beside.head)})
    return max({"communication": beside.embedding}, layers, head, key=total_bytes)


def row_cache_bytes(passes: Passes, model: ModelShape, weight_width: int) -> int:
    """Bytes of the KV cache of whole rows that a frozen model returns, if its caller does not say `use_cache=False`."""
    candidate = passes.candidate
    autocast = candidate.precision != "no"
    width = kv_cache_dtype_bytes(model, weight_width, autocast)
    keys_and_values = prefill_cache_bytes(model, candidate.rows, candidate.row_tokens, width)
    return keys_and_values + recurrent_state_bytes(model, candidate.rows, width, autocast)


def teacher_cache(passes: Passes) -> Components:
    """The KV cache that GKD's teacher returns with its logits, until the loss is there; empty for other methods.

    Source: trl 1.16, experimental/gkd/gkd_trainer.py, `GKDTrainer.compute_loss` (`teacher_outputs`).
    """
    candidate = passes.candidate
    if candidate.teacher_model is None or not (candidate.method_row.teacher and candidate.method_row.experimental):
        return {}
    return {"kv_cache": row_cache_bytes(passes, candidate.teacher_model, teacher_dtype_bytes(candidate))}


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
    done, gathered = layer_of_most_gathered(passes)
    gather: Components = {"communication": gathered, "gradients": reduced}
    head_gather: Components = {
        "communication": states.gathers.at["head_backward"] + states.gathers.teacher_head,
        "gradients": 0 if row.partition_buffer else gradients,
    }
    exchange: Components = {"communication": row_exchange_bytes(passes.candidate, "backward")}
    updated: Components = {"gradients": states.gradient_before, "transients": states.update_in_layers}
    layers = add_components(gather, exchange, layer_backward(passes, done), updated)
    moments = [layers, add_components(head_gather, head_backward(passes))]
    if states.gathers.at["first_layer_backward"]:
        first: Components = {"communication": states.gathers.at["first_layer_backward"]}
        own = peak_components(passes.stack.first_backward, passes.tokens, passes.scores)
        moments.append(add_components(own, first, exchange))
    if passes.images:
        tower: Components = {"autocast_copies": -passes.images.copies}
        moments = [add_components(moment, passes.images.saved, tower) for moment in moments]
        moments.append(add_components(gather, tower_backward(passes, passes.images)))
    if row.reduces_after:
        moments.append(reduction(passes))
    return add_components(passes.training, max(*moments, embedding_backward(passes), key=total_bytes))


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


def layer_of_most_gathered(passes: Passes) -> tuple[int, int]:
    """(Layers whose backward pass is done, gathered bytes) where gathered and saved bytes together are most."""
    layers = passes.states.gathers.in_backward
    if not layers:
        return 0, passes.states.gathers.at["backward"]
    saved = total_bytes(component_bytes(passes.stack.saved, passes.tokens, passes.scores))
    most = max(range(len(layers)), key=lambda done: layers[done] - saved * done // len(layers))
    return most, layers[most]


def layer_backward(passes: Passes, done: int) -> Components:
    """Backward pass of one layer, without the bytes that `done` layers had saved.

    Of several layers with one checkpoint those that are left may be the ones without.
    """
    heaviest = peak_components(passes.stack.backward, passes.tokens, passes.scores)
    if not done:
        return heaviest
    layers = max(passes.candidate.model.num_layers, 1)
    saved = component_bytes(passes.stack.saved, passes.tokens, passes.scores)
    gone = max(done + 1 - passes.candidate.checkpoint_every_n_layers, 0)
    freed: Components = {kind: -(size * gone // layers) for kind, size in saved.items()}
    freed["autocast_copies"] = 0
    return {kind: max(size, 0) for kind, size in add_components(heaviest, freed).items()}


def tower_backward(passes: Passes, images: ImagePasses) -> Components:
    """Backward pass of a vision tower: the last, beside the gradients of the language model."""
    if not images.backward:
        return {}
    gradients = passes.states.gradients.after_backward - passes.training.get("gradients", 0) - images.gradient_bytes
    counted = gradients_exist(passes.candidate) or passes.candidate.scheme_row.partition_buffer
    done: Components = {} if counted else {"gradients": gradients}
    return add_components(images.backward, done)


def head_backward(passes: Passes) -> Components:
    """Backward pass of loss and head, then of the final norm, while the saved activations of all layers are alive."""
    kept = component_bytes(passes.stack.saved, passes.tokens, passes.scores)
    candidate = passes.candidate
    norm_bytes = passes.norm.backward.at(passes.tokens, passes.scores)[0]
    if candidate.tuning == "full" and not passes.gradients.exist:
        norm_bytes += 0 if candidate.model.tied else passes.states.update_of_largest
    if not passes.gradients.exist:
        norm_bytes += head_gradient_bytes(candidate)
    own: Components = {"loss": max(passes.loss.backward, norm_bytes), "autocast_copies": -passes.stack.copies[2]}
    return add_components(kept, own)


def embedding_backward(passes: Passes) -> Components:
    """End of the backward pass: all gradients, and dense gradients of the embedding before they are added up.

    Tied weights have a gradient from the head and one from the embedding, which are added up before they are added to
    the gradient of earlier micro-steps, or to the buffer of ZeRO-3. The gradient of an `nn.Linear` head is a
    view, to which autograd adds out of place: a third copy (pytorch 2.13, torch/csrc/autograd/input_buffer.cpp,
    `can_accumulate_inplace`). TRL's fused head and autocast's cast of a 16-bit gradient return tensors of their own.
    PEFT's copy of the embedding is not tied, and has one gradient.
    """
    candidate, model, width = passes.candidate, passes.candidate.model, passes.recipe.recipe.weight_width
    in_full, row = candidate.tuning == "full", candidate.scheme_row
    # a sequence classifier has no head that could be tied
    tied = model.tied and candidate.method_row.head == "lm_head" and in_full
    view = tied and loss_of(candidate) in LINEAR_HEAD and passes.head.weight_cast_bytes == 0
    gradients = partition_gradients(passes)
    copies = ((2 if view else 1) if tied else 0) + gradients_exist(candidate)
    if row.units or row.partition_buffer:
        copies = 3 if view else 2 if tied else 1
    if row.units and in_full:
        return fsdp2_embedding_backward(passes, gradients, copies)
    dense = width if in_full else copied_dtype_bytes(candidate) if learns_embedding_copy(candidate) else 0
    added, norm = copies * model.embed_params * dense, passes.states.gradients.norm_of_offloaded
    if row.gradient_buffer:
        added = max(added, model.embed_params * dense + norm)  # the norm is taken of the sum
    return {
        "communication": passes.states.gathers.at["embedding_backward"],
        "gradients": gradients,
        "activations": passes.tokens * passes.stack.held,
        "transients": passes.tokens * model.hidden_size * width
        + max(added, passes.states.update_of_largest)
        + (norm if row.partition_buffer else 0),
    }


def fsdp2_embedding_backward(passes: Passes, gradients: int, copies: int) -> Components:
    """End of the backward pass under FSDP2 in full: before the embedding's unit is reduced, or while it is.

        before   shards of the layers' gradients, `copies` dense ones of the embedding, and what is gathered
        while    all shards, the unit's gradient, its copy for the reduce-scatter, and the output of that; under hybrid
                 sharding also `copied_gradients_bytes`

    An embedding for each layer is in the root, whose gradient is dense, too, and reduced last.
    An untied embedding is gathered before, and as large as its copy, so that the second is never less.
    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_reduce`; results/fsdp2_memory.md.
    """
    candidate, model = passes.candidate, passes.candidate.model
    width = passes.recipe.recipe.weight_width
    root = model.per_layer_embed_params * width
    dense = model.embed_params * width
    reduced = max(dense, root)
    bytes_left, gpus = passes.gradients.left or (0, 1)
    before: Components = {
        "communication": passes.states.gathers.at["embedding_backward"],
        "gradients": gradients - model.embed_params * bytes_left // gpus,
        "transients": passes.tokens * model.hidden_size * width + copies * dense + root,
    }
    reducing: Components = {
        "communication": reduced + reduced // candidate.shard_gpus + passes.states.gathers.copied_gradients,
        "gradients": gradients,
        "transients": reduced,
    }
    return max(before, reducing, key=total_bytes)


def optimizer_step(passes: Passes) -> Components:
    """The optimizer's step, with its temporaries."""
    return add_components(
        passes.idle,
        {"gradients": passes.states.gradients.at_step, "transients": passes.states.step_temporaries},
        passes.images.resident if passes.images else {},
    )
