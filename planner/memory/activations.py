"""Activations of the whole stack of decoder layers in one forward and backward pass, on one GPU.

The result does not depend on the batch: each snapshot has bytes per token, per score (query-key pair) and constant.
"""

from functools import lru_cache
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from planner.memory.dtypes import FLOAT32_BYTES, INT32_BYTES
from planner.memory.layers.autograd import NOTHING, Bucket, LiveBytes, MemoryKind, Size, scaled
from planner.memory.layers.one_layer import PassPeak, cached_copies, layer_inference, layer_passes, upper_envelope
from planner.memory.layers.projections import kept_tokens
from planner.memory.layers.recipe import Recipe
from planner.memory.parameters.tensors import expert_shapes
from planner.memory.stack_recipe import StackRecipe, kernel
from planner.models.layers import ExpertPart, Experts, Layer
from planner.models.shape import ModelShape

# Float32 numbers that a LayerNorm saves per token: mean and 1 / deviation.
# Source: pytorch 2.13, aten/src/ATen/native/layer_norm.cpp.
NORM_STATISTICS = 2
NO_BYTES = LiveBytes(NOTHING, ())


class StackMemory(Struct, frozen=True):
    """The passes of the stack. Every snapshot counts the embedding's output and the bytes that earlier layers saved.

    `saved`: alive after the last layer. `copies`: the part of `saved` that autocast drops when the forward pass ends.
    `backward` counts the gradients that the pass has made so far, `waiting` also those that DeepSpeed is yet to reduce.
    """

    saved: LiveBytes
    copies: Size
    forward: PassPeak
    backward: PassPeak
    first_backward: PassPeak  # as `backward`, of the first layer only
    waiting: PassPeak  # without snapshots if there is no bucket
    output_width: int  # bytes of one element of the last layer's output
    held: int  # bytes for each token that all layers' functions hold until the loss is dropped (`LayerPart.held`)
    tensors: tuple[Size, ...]  # saved ones of layers without checkpoints, in the order of allocation


class StackInference(Struct, frozen=True):
    """A forward pass of the stack without gradients. Every snapshot counts the embedding's output.

    `copies`: bytes of autocast's copies that stay to the end of the pass.
    """

    peak: PassPeak
    copies: int
    output_width: int  # bytes of one element of the last layer's output


class StackGradients(Struct, frozen=True):
    """The gradients of a stack's parameters around its backward pass.

    `exist`: `.grad` is set by earlier micro-steps, so that a new gradient is added to it and freed. `left`: (bytes of a
    parameter's gradient that stay after its layer's backward pass, GPUs that share them); None: the gradient itself.
    `dropped`: an optimizer steps within the backward pass and drops each gradient when the next one is complete.
    `bucket`: in which gradients wait to be reduced; None: they do not wait. `head_waits`: that of an untied head waits
    for the embedding's, whose unit it is in.
    """

    exist: bool
    left: tuple[int, int] | None = None
    dropped: bool = False
    bucket: Bucket | None = None
    head_waits: bool = False


EXISTING, NEW = StackGradients(True), StackGradients(False)
DROPPED = StackGradients(False, (0, 1), dropped=True)


@lru_cache(maxsize=4096)
def stack_memory(
    model: ModelShape, stack: StackRecipe, gradients: StackGradients, head_gradient_bytes: int
) -> StackMemory:
    """Compute every distinct layer once and add the results up along the depth.

        forward at layer i  = embedding + saved by layers 0..i-1 + snapshots of layer i
        backward at layer i = embedding + saved by layers 0..i-1 + snapshots of layer i
                            + gradients of the head and what is left of those of layers i+1.., unless they `exist`
                            + what Python functions of layers i+1.. hold until the loss is dropped (8 bits)

    Memory is linear between the first and the last layer of a kind, so that the peak is at one of those two.
    """
    parts = layer_parts(model, stack, gradients)
    offloaded = OffloadedInputs(model, stack, [part.output_width for part in parts])
    left = [plus(embedded(model, stack), offloaded.at_start)]
    for i, part in enumerate(parts):
        left.append(plus(left[-1], part.left, offloaded.at_output(i)))
    learned = [0] * (len(parts) + 1)
    # autograd adds the gradient of a tied head to that of the embedding before it adds both to an earlier one
    waits_for_embedding = model.tied and stack.recipe.trainable
    learned[-1] = head_gradient_bytes if waits_for_embedding or not gradients.exist else 0
    left_of_head = learned[-1]
    if gradients.left and learned[-1] and not (model.tied or gradients.head_waits):
        # an untied head is reduced before the last layer's backward pass, and its reduced gradient stays
        left_of_head = head_gradient_bytes // stack.recipe.weight_width * gradients.left[0] // gradients.left[1]
        learned[-1] = left_of_head + (0 if gradients.dropped else learned[-1])
    for i in range(len(parts) - 1, -1, -1):
        learned[i] = (learned[i + 1] if i + 1 < len(parts) else left_of_head) + parts[i].gradient_bytes
    ends = first_and_last([id(part.backward) for part in parts])
    copies = sum(part.copies for part in parts)
    forward = [
        plus(left[i], moment, offloaded.in_forward(i), *((held_embedding(model, stack),) if i else ()))
        for i in ends
        for moment in parts[i].forward.snapshots
    ]
    beside = {
        i: plus(
            left[i],
            autocast(-sum(part.copies for part in parts[:i])),  # dropped when the forward pass ends
            offloaded.in_backward(i),
            gradients_of(learned[i + 1]),
            per_token(sum(part.held for part in parts[i + 1 :])),
        )
        for i in sorted({0, *ends})
    }
    backward = {i: [plus(alive, moment) for moment in parts[i].backward.snapshots] for i, alive in beside.items()}
    return StackMemory(
        left[-1],
        (0, 0, copies),
        upper_envelope(forward),
        upper_envelope([moment for i in ends for moment in backward[i]]),
        upper_envelope(backward[0]),
        upper_envelope([plus(beside[i], moment) for i in ends for moment in parts[i].waiting.snapshots]),
        parts[-1].output_width,
        sum(part.held for part in parts),
        tuple(chain.from_iterable(part.tensors for part in parts)),
    )


@lru_cache(maxsize=4096)
def stack_inference(model: ModelShape, stack: StackRecipe) -> StackInference:
    """Compute a forward pass without gradients; its peak is at the first or the last layer of a kind.

        layer i = its input + embedding + autocast's copies of layers 0..i-1 + snapshots of layer i

    A variable of the model's forward pass holds the embedding's output to its end (`inputs_embeds`), which is the input
    of the first layer. Where each layer has an embedding of its own, others hold what those give and its sum with a
    projection (transformers 5.23, models/gemma4/modeling_gemma4.py, `per_layer_inputs`).
    """
    width, layers = first_width(model, stack), []
    beside = 2 * model.per_layer_embed_params // model.vocab_size * stack.embedding_width
    inputs = [per_token(model.hidden_size * embedding_width(model, stack) + beside)]
    for i, layer in enumerate(model.layers):
        layers.append(layer_inference(layer, layer_recipe(layer, stack, i, width, learns=True)))  # nothing does
        width = layers[-1].output_width
        inputs.append(per_token(model.hidden_size * width + embedding_bytes(model, stack) + beside))
    peak = upper_envelope(
        [
            plus(inputs[i], moment, autocast(i * layers[i].copies))
            for i in first_and_last([id(each) for each in layers])
            for moment in layers[i].peak.snapshots
        ]
    )
    return StackInference(peak, sum(each.copies for each in layers), width)


# Checkpoints on the GPU at a time with TRL's `activation_offloading`. Forward: those whose copy may still be running
# (`max_fwd_stash_size`). Backward: the running layer's and that of the layer before, which is freed when the next node
# needs a checkpoint. Source: trl 1.16, models/activation_offloading.py.
STASHED_FORWARD = 5
STASHED_BACKWARD = 2


class OffloadedInputs:
    """Inputs of checkpointed layers that are on the host from the layer's forward pass to its backward pass.

    The layer before counts each input in what it leaves on the GPU: `at_start` and `at_output` subtract the input, and
    `in_forward` and `in_backward` add the inputs that are on the GPU while a layer runs. transformers copies on the
    compute stream, so that only the running layer's input is on the GPU.
    Source: transformers 5.23, modeling_utils.py, `offload`; pytorch 2.13, autograd/graph.py, `save_on_cpu`.
    """

    def __init__(self, model: ModelShape, stack: StackRecipe, output_widths: list[int]) -> None:
        widths = [embedding_width(model, stack), *output_widths]
        self.inputs = [model.hidden_size * width for width in widths]  # bytes for each token
        offloads = stack.offloads != "nothing"
        self.layers = [*(offloads and is_checkpointed(stack, i) for i in range(len(output_widths))), False]
        self.stashes = stack.offloads == "activations"
        self.at_start = NO_BYTES
        if self.layers[0]:
            # with PEFT the embedding's output is a leaf that requires a gradient: the graph keeps it on the GPU, too
            stays = 0 if stack.embedding_learns or is_embedding_saved(model, stack) else embedding_bytes(model, stack)
            self.at_start = per_token(stays - self.inputs[0])

    def at_output(self, layer: int) -> LiveBytes:
        """Return minus the bytes of a layer's output if it is the offloaded input of the next layer, else nothing."""
        return per_token(-self.inputs[layer + 1]) if self.layers[layer + 1] else NO_BYTES

    def in_forward(self, layer: int) -> LiveBytes:
        """Return the offloaded inputs on the GPU while a layer runs forward: its own, and those being copied."""
        first = max(0, layer - (STASHED_FORWARD if self.stashes else 1) + 1)
        return per_token(sum(self.inputs[i] for i in range(first, layer + 1) if self.layers[i]))

    def in_backward(self, layer: int) -> LiveBytes:
        """Return the offloaded inputs that are back on the GPU while a layer runs backward."""
        last = layer + (STASHED_BACKWARD if self.stashes else 1)
        return per_token(sum(self.inputs[i] for i in range(layer, last) if self.layers[i]))


def held_embedding(model: ModelShape, stack: StackRecipe) -> LiveBytes:
    """Return the embedding's output, which a variable of the forward pass holds; nothing if it is counted elsewhere.

    With images the variable is the embeddings with the images' features inserted, which is not the leaf of PEFT's hook.
    """
    by_checkpoint = stack.gradient_checkpointing and stack.offloads == "nothing"
    by_graph = stack.gradient_checkpointing and not stack.embedding_learns and not stack.merged
    return NO_BYTES if by_checkpoint or by_graph else per_token(embedding_bytes(model, stack))


def embedded(model: ModelShape, stack: StackRecipe) -> LiveBytes:
    """Input of the first layer: the output of the embedding, or of a norm after it (bloom).

    Under autocast the norm's output is float32. The norm saves its input if that needs a gradient. With PEFT and
    gradient checkpointing it does, and the embedding's output stays alive in the graph whatever the model makes of it
    (transformers 5.23, modeling_utils.py, `enable_input_require_grads`).
    Source: transformers 5.23, models/bloom/modeling_bloom.py, `word_embeddings_layernorm`; pytorch 2.13,
    aten/src/ATen/autocast_mode.h (`layer_norm` in float32).
    """
    size = model.hidden_size * embedding_width(model, stack) + dropout_mask_bytes(model, stack)
    if is_embedding_saved(model, stack):
        size += embedding_bytes(model, stack) + (NORM_STATISTICS * FLOAT32_BYTES if model.embed_norm else 0)
    return per_token(size)


def dropout_mask_bytes(model: ModelShape, stack: StackRecipe) -> int:
    """Bytes for each token of the mask that the dropout of the embedding's output saves (gpt2); its input is dropped.

    Source: transformers 5.23, models/gpt2/modeling_gpt2.py, `GPT2Model.forward` (`self.drop`); pytorch 2.13,
    aten/src/ATen/native/Dropout.cpp, `_dropout_impl` (bool on CUDA, the dtype of the input on the CPU).
    """
    learns = stack.embedding_learns or stack.gradient_checkpointing
    if not (model.embed_dropout and stack.recipe.dropout and learns):
        return 0
    return model.hidden_size * (1 if stack.recipe.on_cuda else embedding_width(model, stack))


def is_embedding_saved(model: ModelShape, stack: StackRecipe) -> bool:
    """Return whether the graph keeps the embedding's output besides the first layer's input, see `embedded`."""
    if model.embed_norm is not None:
        return stack.embedding_learns or stack.gradient_checkpointing
    changed = model.embedding_changed or stack.merged
    return changed and stack.gradient_checkpointing and not stack.embedding_learns


def embedding_bytes(model: ModelShape, stack: StackRecipe) -> int:
    """Bytes of the embedding's output for one token."""
    return model.embedding_features * stack.embedding_width


def per_token(size_bytes: int) -> LiveBytes:
    """Live bytes of activations, for each token."""
    return of_kind("activations", (size_bytes, 0, 0))


def embedding_width(model: ModelShape, stack: StackRecipe) -> int:
    """Bytes of one element of the first layer's input."""
    normed = model.embed_norm is not None and stack.recipe.autocast_width
    return FLOAT32_BYTES if normed else stack.embedding_width


class LayerPart(Struct, frozen=True):
    """One layer at its position in the stack.

    `left`: alive after its forward pass. `copies`: bytes of `left` that autocast drops when the stack's forward pass
    ends. `held`: bytes of `left`, for each token, that its backward pass does not free: attributes of a
    `torch.autograd.Function` (bitsandbytes' 8-bit product) live until nobody holds the loss.
    """

    left: LiveBytes
    copies: int
    forward: PassPeak
    backward: PassPeak
    waiting: PassPeak
    gradient_bytes: int
    output_width: int
    held: int
    tensors: tuple[Size, ...]


def layer_parts(model: ModelShape, stack: StackRecipe, gradients: StackGradients) -> list[LayerPart]:
    """Memory of every layer in order. A layer's input has the dtype of the output of the layer before it.

    Norms in float32 raise the residual stream to float32 where projections keep their input's dtype, as bitsandbytes'
    do.
    """
    width, learns = first_width(model, stack), stack.gradient_checkpointing or stack.embedding_learns
    parts = []
    for i, layer in enumerate(model.layers):
        recipe = layer_recipe(layer, stack, i, width, learns)
        part = layer_part(layer, recipe, gradients, is_checkpointed(stack, i))
        below = not (learns or has_adapters(layer, recipe) or layer.measure)
        if below and i:
            part = replace(part, left=plus(part.left, per_token(-model.hidden_size * width)))  # its input is freed
        parts.append(part)
        width, learns = part.output_width, not below
    return parts


def first_width(model: ModelShape, stack: StackRecipe) -> int:
    """Bytes of one element of the residual stream in the first layer, which makes it float32 of two 16-bit dtypes."""
    return FLOAT32_BYTES if stack.recipe.mixes_halves else embedding_width(model, stack)


def layer_recipe(layer: Layer, stack: StackRecipe, index: int, input_width: int, learns: bool) -> Recipe:
    """Recipe of the layer at a position, with its input's width and whether that needs a gradient."""
    return replace(
        stack.recipe,
        kernel=kernel(stack, layer.attention),
        expert_parts=stack.expert_parts[index] if stack.expert_parts else frozenset(),
        input_width=input_width,
        input_learns=learns,
    )


def layer_part(layer: Layer, recipe: Recipe, gradients: StackGradients, checkpointed: bool) -> LayerPart:
    """Memory of the layer at a position, which decides whether it is checkpointed: layers 0, n, 2n, .. are.

    Source: transformers 5.23, modeling_layers.py, `GradientCheckpointingLayer`.
    """
    exist = gradients.exist or gradients.dropped
    passes = layer_passes(layer, recipe, exist, checkpointed)
    waiting, held = PassPeak(()), 0
    if gradients.bucket is not None:
        waiting = layer_passes(layer, recipe, exist, checkpointed, gradients.bucket).backward
    if recipe.quantized == "8bit":
        held = layer_passes(layer, recipe, exist, True).saved.total[0] - layer.hidden_size * passes.output_width
    return LayerPart(
        left=plus(passes.saved, passed_tokens(layer, recipe)) if checkpointed else passes.saved,
        copies=cached_copies(passes.saved) if checkpointed else 0,
        forward=passes.forward,
        backward=passes.backward,
        waiting=waiting,
        gradient_bytes=left_bytes(layer, recipe, gradients),
        output_width=passes.output_width,
        held=held,
        tensors=passes.tensors,
    )


def passed_tokens(layer: Layer, recipe: Recipe) -> LiveBytes:
    """Return the chosen tokens that a layer of sparse attention hands to the next one, whose checkpoint keeps them.

    Without checkpoints they are freed when the next layer has run, which is left out.
    Source: transformers 5.23, models/glm_moe_dsa/modeling_glm_moe_dsa.py, `GlmMoeDsaModel.forward`
    (`prev_topk_indices`); modeling_layers.py, `GradientCheckpointingLayer`.
    """
    block = layer.attention
    if not block.index_heads or layer.program == "measured":
        return NO_BYTES
    return of_kind("activations", scaled(kept_tokens(recipe, block), INT32_BYTES))


def is_checkpointed(stack: StackRecipe, index: int) -> bool:
    """Return whether the layer at a position is checkpointed: layers 0, n, 2n, .. are."""
    return stack.gradient_checkpointing and index % stack.every_n_layers == 0


def has_adapters(layer: Layer, recipe: Recipe) -> bool:
    """Return whether the layer has adapters, so that the inputs of the layers above need a gradient.

    Below the first adapters no input does without checkpointing, because nothing makes the embedding's output require a
    gradient (transformers 5.23, modeling_utils.py, `enable_input_require_grads`).
    """
    wrapped = isinstance(layer.feed_forward, Experts) and bool(recipe.lora_experts or recipe.expert_parts)
    return wrapped or any(linear.name in recipe.lora_targets for linear in layer.linears)


def left_bytes(layer: Layer, recipe: Recipe, gradients: StackGradients) -> int:
    """Bytes of the gradients that one layer's backward pass leaves, unless they exist."""
    if gradients.exist:
        return 0
    width = recipe.weight_width if recipe.trainable else recipe.adapter_width
    bytes_left, gpus = gradients.left or (width, 1)
    return trained_elements(layer, recipe) * bytes_left // gpus


def trained_elements(layer: Layer, recipe: Recipe) -> int:
    """Elements of the trained parameters of one layer that the batches pass."""
    if not layer.passed:
        return 0
    if recipe.trainable:
        return layer.params - sum(linear.params for linear in layer.linears if not linear.learns)
    adapted = [linear for linear in layer.linears if linear.name in recipe.lora_targets and linear.learns]
    elements = sum(recipe.lora_r * (linear.in_features + linear.out_features) for linear in adapted)
    if recipe.magnitude_width:
        elements += sum(linear.out_features for linear in adapted)
    return elements + expert_adapter_elements(layer, recipe)


def expert_adapter_elements(layer: Layer, recipe: Recipe) -> int:
    """Elements of the LoRA matrices on one layer's fused experts and router, see `planner.memory.parameters.lora`."""
    block = layer.feed_forward
    if not isinstance(block, Experts):
        return 0
    gate_up, down = expert_shapes(layer, block)
    sizes: dict[ExpertPart, int] = {
        "gate_up": block.num_experts * sum(gate_up[1:]),
        "down": block.num_experts * sum(down[1:]),
        "router": block.num_experts + layer.hidden_size,
    }
    return sum(recipe.expert_rank(part) * size for part, size in sizes.items())


def first_and_last(kinds: list[int]) -> list[int]:
    """Positions of the first and the last layer of each kind."""
    places: dict[int, list[int]] = {}
    for i, kind in enumerate(kinds):
        places.setdefault(kind, []).append(i)
    return sorted({end for found in places.values() for end in (found[0], found[-1])})


def plus(*moments: LiveBytes) -> LiveBytes:
    """The sum of live bytes, kind by kind."""
    kinds: dict[MemoryKind, Size] = {}
    for moment in moments:
        for kind, size in moment.kinds:
            kinds[kind] = add_sizes(kinds.get(kind, NOTHING), size)
    total = NOTHING
    for moment in moments:
        total = add_sizes(total, moment.total)
    return LiveBytes(total, tuple(kinds.items()))


def add_sizes(a: Size, b: Size) -> Size:
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2])


def gradients_of(size_bytes: int) -> LiveBytes:
    """Live bytes of gradients."""
    return of_kind("gradients", (0, 0, size_bytes))


def autocast(size_bytes: int) -> LiveBytes:
    """Live bytes of autocast's copies of weights."""
    return of_kind("autocast_copies", (0, 0, size_bytes))


def of_kind(kind: MemoryKind, size: Size) -> LiveBytes:
    return LiveBytes(size, ((kind, size),))
