"""Passes without gradients: scoring of rollouts, frozen models beside the policy, evaluation."""

from msgspec.structs import replace

from planner.cache_keys import TrainingInput, training_settings
from planner.gpus.cluster import Gpu
from planner.memory.activations import EXISTING, StackInference, stack_inference
from planner.memory.generation import kv_cache_dtype_bytes, prefill_cache_bytes, recurrent_state_bytes, rollout
from planner.memory.images.passes import image_passes, seen
from planner.memory.layers.components import Components, add_components, peak_components, total_bytes
from planner.memory.losses.formulas import FLOAT32
from planner.memory.parameters.kbit_preparation import autocasts_loss
from planner.memory.parameters.widths import reference_dtype_bytes, teacher_dtype_bytes
from planner.memory.passes import (
    Passes,
    beside_rollouts,
    between_steps,
    gathered_at_loss,
    kept_output,
    kept_pixels,
    passes_of,
)
from planner.memory.schemes.contract import FrozenGather
from planner.memory.stack_recipe import frozen_recipe, without_adapters
from planner.memory.weights import separate_reference_bytes
from planner.methods import LINEAR_HEAD
from planner.models.shape import ModelShape


def score(step: Passes, passes: Passes) -> Components:
    """Forward pass without gradients over one batch: its layers, or head and loss after them, beside those of the step.

    `step`: the training passes; `passes`: `scored_passes`.

    Leaves out a third copy of a rollout's pixels, made when the rollout is shuffled and cut, without activations beside
    (trl 1.16, trainer/grpo_trainer.py, `_prepare_inputs`, `unsplit_pixel_values_by_grid`).
    """
    gathered, stack = passes.states.gathers.at, scoring_stack(passes)
    layers = peak_components(stack.peak, passes.tokens, passes.scores)
    layers = seen(layers, image_passes(passes.candidate, passes.recipe, EXISTING, graph=False))
    reference = beside_no_policy(passes)
    layers = add_components(layers, passes.masks, {"communication": max(gathered["forward"], reference.layers)})
    first: Components = {"communication": max(passes.states.gathers.scored, reference.embedding)}
    cache: Components
    head: Components = {
        "loss": passes.loss.forward,
        "communication": gathered_at_loss(passes),
        "autocast_copies": cached_at_head(passes, stack),
    }
    if passes.candidate.method_row.keeps_scores:
        # Nothing wraps this reference, so its output is not cast: the loss after it has no more than the output.
        width, plain = passes.recipe.recipe.weight_width, replace(passes.head, converted=False)
        cache = {"kv_cache": row_cache_bytes(passes, passes.candidate.model, width)}
        head = {**head, **kept_output(passes.candidate, plain), **cache}
    if passes.candidate.method_row.copies_reference:
        width = reference_dtype_bytes(passes.candidate)
        cache = {"kv_cache": row_cache_bytes(passes, passes.candidate.model, width)}
        head = {**head, "loss": passes.loss.evaluated_bytes - passes.head.final_norm_bytes, **cache}
        layers = add_components(layers, cache)
    pixels = add_components(kept_pixels(step), kept_pixels(step))  # of the last rollout, and of the one scored
    return add_components(beside_rollouts(step), pixels, max(first, layers, head, key=total_bytes))


def scored_passes(passes: Passes, candidate: TrainingInput, gpu: Gpu) -> Passes:
    """Compute the inputs of `score`: those of a micro-batch, or of `scored_batch`."""
    settings = training_settings(candidate)
    batch = settings.scored_batch
    return passes if batch is None else passes_of(replace(settings, **batch._asdict()), gpu)


def scoring_stack(passes: Passes) -> StackInference:
    """Return the stack that scores rollouts: the policy's, or its base without adapters if only the reference runs."""
    candidate = passes.candidate
    own = candidate.rescores_samples or candidate.method_row.sampling_forwards > 0
    if candidate.separate_reference and candidate.method_row.experimental_reference and not own:
        frozen = frozen_recipe(candidate, passes.recipe.flash, reference_dtype_bytes(candidate))
        return stack_inference(candidate.model, frozen)
    whole = own or candidate.tuning == "full"
    return stack_inference(candidate.model, passes.recipe if whole else without_adapters(passes.recipe))


def beside_no_policy(passes: Passes) -> FrozenGather:
    """Bytes that a separate reference gathers to score rollouts before the policy's pass; zeros without one."""
    candidate = passes.candidate
    refers = candidate.separate_reference or candidate.refers_without_adapters
    scores = refers and not candidate.method_row.reference_in_loss
    return passes.states.gathers.of_reference if scores else FrozenGather(0, 0, 0)


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
    if candidate.reference_load_dtype != candidate.dtype:
        width = reference_dtype_bytes(candidate)
    recipe = passes.recipe if candidate.averages_adapters else without_adapters(passes.recipe)
    if apart:
        recipe = frozen_recipe(candidate, passes.recipe.flash, width)
    stack = stack_inference(other, recipe)
    layers = frozen_layers(passes, stack)
    layers = seen(layers, image_passes(candidate, recipe, EXISTING, graph=False))
    # the formula of the loss counts a teacher's logits itself
    head: Components = {
        "loss": passes.loss.frozen_bytes if compares else 0,
        "autocast_copies": cached_at_head(passes, stack),
    }
    if candidate.method_row.copies_reference and apart and not candidate.gradient_checkpointing:
        head["kv_cache"] = row_cache_bytes(passes, other, passes.recipe.recipe.weight_width)
    if candidate.method_row.teacher:
        head = max(head, teacher_at_head(passes, stack, other), key=total_bytes)
    beside = passes.states.gathers.beside
    layers = add_components(layers, {"communication": beside.layers})
    head = add_components(head, {"communication": beside.head})
    return max({"communication": beside.embedding}, layers, head, key=total_bytes)


def teacher_at_head(passes: Passes, stack: StackInference, teacher: ModelShape) -> Components:
    """A teacher's head in its model, beside autocast's copies of its weights, which go when it returns.

    Empty for losses that build no logits.
    """
    if passes.loss.in_model is None or passes.candidate.loss not in LINEAR_HEAD:
        return {}
    width = passes.head.compute_width
    copied = width != teacher_dtype_bytes(passes.candidate)
    words = teacher.vocab_size * (teacher.embedding_features * copied + passes.head.logit_tokens)
    return {"loss": width * words, "autocast_copies": stack.copies}


def frozen_layers(passes: Passes, stack: StackInference) -> Components:
    """Peak of a frozen model's layers beside the policy: of the policy's rows, or of longer ones."""
    candidate, tokens, scores = passes.candidate, passes.tokens, passes.scores
    if candidate.frozen_row_tokens != candidate.row_tokens:
        tokens = candidate.rows * candidate.frozen_row_tokens
        scores = tokens * candidate.frozen_row_tokens
    masks: Components = {"attention_scores": passes.recipe.mask_widths * scores}
    return add_components(peak_components(stack.peak, tokens, scores), masks)


def reference_ahead(passes: Passes) -> Components:
    """Peak of the pass in which a reference computes its log-probabilities before the policy is on the GPU.

    Empty if there is none, or if the policy itself is that reference, as without FSDP2.

    Source: trl 1.16, trainer/dpo_trainer.py and kto_trainer.py, `__init__`, `_precompute_ref_logps` (in batches of
    `per_device_train_batch_size`).
    """
    candidate, gathered = passes.candidate, passes.states.gathers.of_reference
    if not candidate.separate_reference or candidate.keeps_reference:
        return {}
    stack = stack_inference(candidate.model, frozen_recipe(candidate, passes.recipe.flash))
    layers = add_components(peak_components(stack.peak, passes.tokens, passes.scores), passes.masks)
    head: Components = {"loss": passes.loss.frozen_bytes, "autocast_copies": cached_at_head(passes, stack)}
    alone: Components = {**passes.idle, "weights": separate_reference_bytes(candidate), "optimizer_states": 0}
    return add_components(alone, {"communication": gathered.head}, max(layers, head, key=total_bytes))


def row_cache_bytes(passes: Passes, model: ModelShape, weight_width: int) -> int:
    """Bytes of the KV cache of whole rows that a frozen model returns, if its caller does not say `use_cache=False`."""
    candidate = passes.candidate
    autocast = candidate.precision != "no"
    width = kv_cache_dtype_bytes(model, weight_width, autocast)
    keys_and_values = prefill_cache_bytes(model, candidate.rows, candidate.row_tokens, width)
    return keys_and_values + recurrent_state_bytes(model, candidate.rows, width, autocast)


def teacher_cache(passes: Passes) -> Components:
    """The KV cache that a teacher returns with its logits, until the loss is there (`Method.keeps_teacher_cache`)."""
    candidate = passes.candidate
    if candidate.teacher_model is None or not candidate.method_row.keeps_teacher_cache:
        return {}
    return {"kv_cache": row_cache_bytes(passes, candidate.teacher_model, teacher_dtype_bytes(candidate))}


def cached_at_head(passes: Passes, stack: StackInference) -> int:
    """Bytes of autocast's copies of a stack's weights while the head runs without gradients.

    0 if the trainer computes the loss, because the copies are freed when the model returns, unless the trainer itself
    runs the pass under autocast.
    """
    return stack.copies if passes.loss.in_model is None or autocasts_loss(passes.candidate) else 0


def beside_frozen_bytes(passes: Passes) -> int:
    """Bytes of the policy's head and logits while a frozen model runs after it; 0 for losses without logits."""
    if passes.candidate.loss not in LINEAR_HEAD:
        return 0
    return passes.loss.beside_bytes - passes.head.final_norm_bytes


def evaluation(passes: Passes) -> Components:
    """The heaviest moment of an evaluation batch: its rollout, the policy's or a frozen model's pass, kept logits.

    Weights and optimizer states are on the GPU, gradients are not. The kept logits of earlier batches are counted
    beside the passes of the last batch. GKD evaluates rows of the dataset and samples none. `passes` are those
    of an evaluation batch.
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
        moments.append(rollout(after_another(passes)))
    return max(moments, key=total_bytes)


def after_another(passes: Passes) -> Passes:
    """Return the inputs of a rollout that follows another without a backward pass: the head is still gathered."""
    gathers = passes.states.gathers
    prompt = gathers.generation.prompt + gathers.left_head
    generation = gathers.generation._replace(prompt=prompt)
    return replace(passes, states=replace(passes.states, gathers=replace(gathers, generation=generation)))


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
    gathered, stack = passes.states.gathers.at, stack_inference(passes.candidate.model, passes.recipe)
    layers = add_components(peak_components(stack.peak, passes.tokens, passes.scores), passes.masks)
    layers = seen(layers, image_passes(passes.candidate, passes.recipe, EXISTING, graph=False))
    layers = add_components(layers, {"communication": gathered["forward"]})
    head: Components = {
        "loss": passes.loss.evaluated_bytes - passes.head.final_norm_bytes,
        "communication": gathered_at_loss(passes),
        "autocast_copies": cached_at_head(passes, stack),
        **teacher_cache(passes),
    }
    return max({"communication": gathered["embedding"]}, layers, head, key=total_bytes)


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
