"""Inputs of all phases of one training GPU: layers, head and loss, states, images, and the sizes of the batch."""

from msgspec import Struct
from msgspec.structs import replace

from planner.cache_keys import StateInput, TrainingInput, state_settings
from planner.gpus.cluster import Gpu
from planner.memory.activations import DROPPED, EXISTING, NEW, StackGradients, StackMemory, stack_memory
from planner.memory.dtypes import FLOAT32_BYTES
from planner.memory.images.passes import ImagePasses, image_passes
from planner.memory.layers.autograd import Bucket, Size
from planner.memory.layers.components import Components, add_components, component_bytes
from planner.memory.layers.one_layer import NormMemory, norm_memory
from planner.memory.layers.recipe import Recipe
from planner.memory.losses.formulas import FORMULAS, Head, LossMemory, given_width
from planner.memory.optimizer import unsplit_states_bytes
from planner.memory.parameters.copied_modules import copies_head
from planner.memory.parameters.kbit_preparation import autocasts_loss, prepared_in_passes
from planner.memory.parameters.segments import unsplit_bytes
from planner.memory.parameters.widths import (
    adapter_dtype_bytes,
    base_dtype_bytes,
    compute_weight_width,
    copied_dtype_bytes,
)
from planner.memory.schemes.deepspeed import reduce_bucket_elements, reduced_copy_width
from planner.memory.schemes.table import scheme_of
from planner.memory.stack_recipe import StackRecipe, autocast_width, frozen_recipe, mixes_halves, policy_stack
from planner.memory.states import StateMemory, state_memory
from planner.models.layers import Norm


class Passes(Struct, frozen=True, kw_only=True):
    """Inputs of the phases of one candidate. `tokens` and `scores` are those of the policy's forward pass."""

    candidate: TrainingInput
    tokens: int
    scores: int
    states: StateMemory
    stack: StackMemory
    kept: Components  # saved by the layers and alive after the last one, with `unsplit`
    unsplit: int  # bytes that saved tensors of layers without checkpoints take beyond their own
    gradients: StackGradients
    recipe: StackRecipe
    head: Head
    norm: NormMemory
    loss: LossMemory
    idle: Components  # alive in every phase
    masks: Components  # that all layers share, during a forward pass
    # alive during a micro-step: `idle`, earlier gradients, masks under checkpointing, PPO's value graph and what it
    # holds of the micro-step before
    training: Components
    images: ImagePasses | None  # None: rows of text


def passes_of(candidate: TrainingInput, gpu: Gpu) -> Passes:
    """Compute the inputs of a candidate's phases on one of its training GPUs."""
    states = state_memory(state_settings(candidate), gpu)
    recipe = policy_stack(states.recipe, candidate, gpu.supports_flash_attention_2)
    scores = candidate.scores
    gradients = stack_gradients(candidate)
    stack = stack_memory(candidate.model, recipe, gradients, head_gradient_bytes(candidate))
    norm = final_norm(candidate, recipe.recipe, stack.output_width)
    head = head_of(candidate, norm, states.gathers.head_in_loss)
    unsplit = unsplit_activations(stack.tensors, candidate)
    idle = add_components(states.resident, {"optimizer_states": unsplit_states_bytes(candidate)})
    training: Components = {
        "gradients": states.gradients.accumulated if gradients_exist(candidate) else 0,
        # a checkpoint keeps the mask as an argument of its layer; without one, variables of the forward pass hold it
        "attention_scores": recipe.mask_widths * scores if candidate.gradient_checkpointing else 0,
        "communication": scheme_of(candidate).kept_by_graph(candidate),
    }
    images = image_passes(candidate, recipe, gradients)
    return Passes(
        candidate=candidate,
        tokens=head.tokens,
        scores=scores,
        states=states,
        stack=stack,
        kept=add_components(component_bytes(stack.saved, head.tokens, scores), {"activations": unsplit}),
        unsplit=unsplit,
        gradients=gradients,
        recipe=recipe,
        head=head,
        norm=norm,
        loss=FORMULAS[candidate.loss](head),
        idle=idle,
        masks={"attention_scores": recipe.mask_widths * scores},
        training=add_components(
            idle,
            training,
            kept_scores(candidate),
            *((kept_output(candidate, head), probabilities(candidate, head)) if candidate.accumulates else ()),
            value_graph(candidate, recipe, head.tokens, scores),
            images.resident if images else {},
        ),
        images=images,
    )


def unsplit_activations(tensors: tuple[Size, ...], candidate: TrainingInput) -> int:
    """Bytes that saved tensors take beyond their own; 0 with expandable segments, whose pages tensors share."""
    if candidate.expandable_segments or not tensors:
        return 0
    tokens, scores = candidate.tokens, candidate.scores
    return unsplit_bytes(tuple(size[0] * tokens + size[1] * scores + size[2] for size in tensors))


def gathered_at_loss(passes: Passes) -> int:
    """Bytes gathered while the loss is computed, by the model or after it."""
    gathers = passes.states.gathers
    return gathers.at["loss"] if passes.loss.in_model is None or gathers.outside is None else gathers.outside


def gradients_exist(candidate: TrainingInput) -> bool:
    """Return whether gradients exist when a micro-step begins: accumulated ones, or ZeRO-3's buffer.

    ZeRO-1 and ZeRO-2 drop theirs at the end of a step. An optimizer that steps within the backward pass does so in
    every micro-step and accumulates nothing.
    Source: deepspeed 0.19.8, zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.step` (`averaged_gradients[i] = None`),
    stage3.py, `_setup_for_real_optimizer` (`grad_partitions_flat_buffer`).
    """
    accumulates = candidate.accumulates and not candidate.optimizer_row.fused_backward
    return accumulates or candidate.scheme_row.gradient_buffer


def stack_gradients(candidate: TrainingInput) -> StackGradients:
    """Return how the backward pass of a candidate's layers makes gradients and what is left of them.

    FSDP2 computes each gradient anew, and reduces those of a layer to shards of the parameters' dtype when its backward
    pass is over, which `offload_param` sends to the host; `sync_each_batch` adds them to the shards of earlier
    micro-steps. Without it `.grad` stays. ZeRO-2 drops each gradient as soon as it is reduced, to one buffer for all of
    the rank's partition (step.py). ZeRO-3 copies each gradient to its bucket; one that is larger waits as it is for the
    next one.
    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_reduce`; results/fsdp2_memory.md;
    deepspeed 0.19.8, zero/stage_1_and_2.py, `reduce_ipg_grads` (`clear_grad_attribute`); stage3.py,
    `reduce_independent_p_g_buckets_and_remove_grads`, `__add_grad_to_ipg_bucket`.
    """
    if candidate.scheme_row.partition_buffer:
        return StackGradients(False, (0, 1))
    if candidate.scheme_row.gradient_buffer:
        return StackGradients(True, bucket=Bucket(reduce_bucket_elements(candidate), reduced_copy_width(candidate)))
    if candidate.optimizer_row.fused_backward and not gradients_exist(candidate):
        return DROPPED
    if not candidate.scheme_row.units or candidate.keeps_whole_gradients:
        return EXISTING if gradients_exist(candidate) else NEW
    own = candidate.tool_row.own_fsdp2
    if candidate.accumulates or candidate.offload_param:
        return StackGradients(False, (0, 1), head_waits=own)
    width = base_dtype_bytes(candidate) if candidate.tuning == "full" else adapter_dtype_bytes(candidate)
    return StackGradients(False, (width, candidate.shard_gpus), head_waits=own)


def value_graph(candidate: TrainingInput, recipe: StackRecipe, tokens: int, scores: int) -> Components:
    """Saved activations of PPO's value model, alive during the policy's passes; empty for other methods.

    Source: trl 1.12, experimental/ppo/ppo_trainer.py, `PolicyAndValueWrapper` (one forward pass runs both models).
    """
    if not candidate.method_row.value_model:
        return {}
    stack = stack_memory(candidate.reward_model or candidate.model, frozen_recipe(candidate, recipe.flash), EXISTING, 0)
    return component_bytes(stack.saved, tokens, scores)


# -- the head ----------------------------------------------------------------------------------------------------------


def head_of(candidate: TrainingInput, norm: NormMemory, gathered_in_loss: bool) -> Head:
    """Sizes of the output head and of the tokens that it scores in one micro-step; see `Gathers.head_in_loss`."""
    model, width, tokens = candidate.model, compute_weight_width(candidate), candidate.tokens
    prepared, autocast = prepared_in_passes(candidate), autocast_width(candidate)
    labelled, weight_width = candidate.labelled_tokens, width if prepared is None else prepared.head
    if gathered_in_loss:
        weight_width = base_dtype_bytes(candidate)
    copied = learns_head_copy(candidate)
    trainer_casts = copied and candidate.trainer_casts_to_bfloat16  # the copy, to autocast's dtype
    if copied:
        weight_width = copied_dtype_bytes(candidate)
    return Head(
        tokens=tokens,
        labelled_tokens=labelled,
        logit_tokens=labelled if candidate.method_row.completion_logits_only else tokens,
        vocab_size=model.vocab_size,
        rows=candidate.rows,
        teacher_vocab_size=candidate.teacher_model.vocab_size if candidate.teacher_model else 0,
        hidden_size=model.embedding_features,
        hidden_width=norm.output_width,
        weight_width=weight_width,
        compute_width=autocast or (width if gathered_in_loss else weight_width),
        # accelerate wraps no model of DeepSpeed's (accelerate 1.15, accelerator.py, `_prepare_deepspeed`)
        converted=autocast > 0 and candidate.scheme_row.autocasts,
        autocasts_loss=autocasts_loss(candidate),
        # DeepSpeed switches autocast off around the model (deepspeed 0.19.8, runtime/torch_autocast.py)
        copies_half=(autocasts_loss(candidate) and candidate.scheme_row.casts == "gathered")
        or (mixes_halves(candidate, candidate.dtype) and prepared is None and not trainer_casts),
        cloned=looks_for_unused(candidate),
        liger_cross_entropy=candidate.use_liger_kernel and model.architecture.liger_cross_entropy,
        trainable=candidate.tuning == "full" or copied,
        norm_bytes=norm.saved[0],
        softcapped=model.config.get(
            "final_logit_softcapping", model.architecture.defaults.get("final_logit_softcapping")
        )
        is not None,
    )


def looks_for_unused(candidate: TrainingInput) -> bool:
    """Return whether DDP looks for unused parameters: with adapters always, in full without gradient checkpointing.

    Source: transformers 5.23, trainer.py, `Trainer._build_accelerator_args` (`find_unused_parameters`).
    """
    return candidate.scheme_row.reducer and not (candidate.tuning == "full" and candidate.gradient_checkpointing)


def head_elements(candidate: TrainingInput) -> int:
    """Parameters of the output head: hidden_size for a reward model's score, else vocabulary x hidden_size."""
    model = candidate.model
    scores = candidate.method_row.head == "score"
    return model.embedding_features if scores else model.lm_head_params or model.embed_params


def learns_head_copy(candidate: StateInput) -> bool:
    """Return whether PEFT's copy of the language-model head is trained beside the adapters."""
    return candidate.tuning == "lora" and copies_head(candidate.lora_modules_to_save, candidate.method_row.head)


def head_gradient_bytes(candidate: TrainingInput) -> int:
    """Bytes of the gradient of the output head: of the model's, or of PEFT's copy; 0 if neither is trained.

    Leaves out PEFT's copy of a score head: a few KiB.
    """
    if candidate.tuning == "full":
        return compute_weight_width(candidate) * head_elements(candidate)
    return copied_dtype_bytes(candidate) * head_elements(candidate) if learns_head_copy(candidate) else 0


def final_norm(candidate: TrainingInput, recipe: Recipe, stream_width: int) -> NormMemory:
    """Return the memory of the norm after the last layer, an RMS norm in models without formulas."""
    model = candidate.model
    module = model.final_norm
    if any(layer.measure for layer, _ in model.layer_kinds):
        module = Norm(kind="rms", features=model.hidden_size, params=model.hidden_size)
    return norm_memory(module, replace(recipe, input_width=stream_width))


def between_steps(passes: Passes) -> Components:
    """Bytes that stay on the GPU while no step runs: under ZeRO-3 also the buffer for the rank's gradients.

    Source: deepspeed 0.19.8, zero/stage3.py, `DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer`
    (`grad_partitions_flat_buffer`).
    """
    kept = add_components(passes.idle, kept_scores(passes.candidate))
    if not passes.candidate.scheme_row.gradient_buffer:
        return kept
    return add_components(kept, {"gradients": passes.states.gradients.at_step})


def kept_scores(candidate: TrainingInput) -> Components:
    """The float32 scores of all sampled tokens, if the trainer keeps them (`Method.keeps_scores`); else empty.

        scores = rows of a step, padded to whole generation batches x completion x vocabulary x 4

    Source: trl 1.12, experimental/ppo/ppo_trainer.py, `batch_generation` (the rows are a view of `padded_logitss`).

    Example: 4 completions of 64 tokens of Qwen2.5-0.5B: 4 x 64 x 151,936 x 4 = 155.6 MB.
    """
    if not candidate.method_row.keeps_scores:
        return {}
    batches = -(-candidate.rows * candidate.gradient_accumulation_steps // candidate.generation_rows)
    return {"loss": batches * candidate.generation_rows * scores_bytes(candidate)}


def scores_bytes(candidate: TrainingInput) -> int:
    """Bytes of the float32 scores of one completion."""
    return candidate.max_completion_length * candidate.model.vocab_size * FLOAT32_BYTES


def kept_output(candidate: TrainingInput, head: Head) -> Components:
    """The last model output, logits and hidden states, which PPO's `train` holds until the next; else empty.

    Source: trl 1.12, experimental/ppo/ppo_trainer.py, `forward` (`output_hidden_states`), `train` (deletes `output` and
    `logits` after the last micro-batch).
    """
    if not candidate.method_row.keeps_scores:
        return {}
    hidden = (candidate.model.num_layers + 1) * candidate.model.hidden_size
    return {"loss": head.tokens * (head.vocab_size + hidden) * given_width(head)}


def probabilities(candidate: TrainingInput, head: Head) -> Components:
    """The probabilities of the vocabulary at each token of the completions, for the entropy that PPO logs; else empty.

    Source: as `kept_output` (`prob_dist`).
    """
    if not candidate.method_row.keeps_scores:
        return {}
    return {"loss": head.labelled_tokens * head.vocab_size * given_width(head)}


def beside_rollouts(passes: Passes) -> Components:
    """Bytes that stay on the GPU while completions are sampled and scored, gradients of earlier micro-steps included.

    Online DPO and GKD sample for single micro-steps, GRPO and its like once in `steps_per_generation` x
    `num_iterations` of them.
    Source: trl 1.16, experimental/online_dpo/online_dpo_trainer.py, gkd_trainer.py, `training_step`;
    trainer/grpo_trainer.py, `_prepare_inputs`.
    """
    kept = between_steps(passes)
    if not passes.candidate.samples_within_step:
        return kept
    return {**kept, "gradients": max(kept.get("gradients", 0), passes.training.get("gradients", 0))}


def kept_pixels(passes: Passes) -> Components:
    """The pixels of the last rollout, which are buffered until the next one is scored.

    Source: trl 1.16, trainer/grpo_trainer.py, `_prepare_inputs` (`_buffered_inputs`).
    """
    return passes.images.resident if passes.images else {}
