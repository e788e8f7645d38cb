"""Inputs of all phases of one training GPU: layers, head and loss, states, images, and the sizes of the batch."""

from dataclasses import dataclass, replace

from planner.cache_keys import TrainingInput, state_settings
from planner.candidate import FLASH, SHARDED
from planner.gpus.cluster import Gpu
from planner.memory.activations import StackMemory, stack_memory, trained_bytes
from planner.memory.layers.autograd import NOTHING, LiveBytes
from planner.memory.layers.merger import merger_memory
from planner.memory.layers.one_layer import NormMemory, PassPeak, norm_memory
from planner.memory.layers.recipe import Recipe
from planner.memory.loss import FORMULAS, Head, LossMemory, loss_of
from planner.memory.parameters.kbit_preparation import prepared_bytes
from planner.memory.stack_recipe import StackRecipe, autocast_width, compute_weight_width, frozen_recipe, policy_stack
from planner.memory.states import StateMemory, state_memory
from planner.models.architectures.image_tower import ImageTower, Merger, image_tower
from planner.models.shape import ModelShape, Norm
from planner.quantities import Component

Components = dict[Component, int]
FLOAT32_BYTES = 4


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
    norm: NormMemory
    loss: LossMemory
    idle: Components  # alive in every phase
    masks: Components  # that all layers share, during a forward pass
    # alive during a micro-step: `idle`, gradients of earlier ones, masks under checkpointing, PPO's value graph
    training: Components
    images: "ImagePasses | None"  # None: rows of text


def passes_of(candidate: TrainingInput, gpu: Gpu) -> Passes:
    """Compute the inputs of a candidate's phases on one of its training GPUs."""
    states = state_memory(state_settings(candidate), gpu)
    recipe = policy_stack(states.recipe, candidate, gpu.supports_flash_attention_2)
    scores = candidate.scores
    trained_head = 0 if candidate.tuning == "lora" else head_elements(candidate)
    stay = gradients_exist(candidate)
    stack = stack_memory(candidate.model, recipe, stay, trained_head)
    norm = final_norm(candidate, recipe.recipe, stack.output_width)
    head = head_of(candidate, norm)
    idle = dict(states.resident)
    training: Components = {
        "gradients": states.accumulated_gradients if stay else 0,
        # a checkpoint keeps the mask as an argument of its layer; without one, variables of the forward pass hold it
        "attention_scores": recipe.mask_widths * scores if candidate.gradient_checkpointing else 0,
    }
    images = image_passes(candidate, recipe, stay)
    return Passes(
        candidate=candidate,
        tokens=head.tokens,
        scores=scores,
        states=states,
        stack=stack,
        recipe=recipe,
        head=head,
        norm=norm,
        loss=FORMULAS[loss_of(candidate)](head),
        idle=idle,
        masks={"attention_scores": recipe.mask_widths * scores},
        training=add_components(
            idle, training, value_graph(candidate, recipe, head.tokens, scores), images.resident if images else {}
        ),
        images=images,
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


# -- images ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePasses:
    """The passes of a vision tower over the images of one micro-batch, with the projector behind it.

    `resident`: the pixels of all micro-batches of an optimizer step; `saved`: alive until the tower's backward pass;
    `held`: besides, until the language model's forward pass ends; `copies`: the part of `saved` that autocast drops
    then; `forward` and `backward`: at the tower's heaviest layer, without the other entries.
    """

    resident: Components
    saved: Components
    held: Components
    copies: int
    forward: Components
    backward: Components
    gradient_bytes: int  # of the tower's layers that `backward` counts, at its end


def image_passes(candidate: TrainingInput, stack: StackRecipe, gradients_exist: bool) -> ImagePasses | None:
    """Compute the passes of a candidate's images; None for rows of text.

    The tower has no mask or dropout. It saves nothing where no weight or input of it requires a gradient: with LoRA on
    other modules, without checkpointing (`enable_input_require_grads` reaches its patches, too). The batches of an
    optimizer step are all on the GPU before its first micro-step (transformers 5.23, trainer.py, `get_batch_samples`;
    accelerate 1.15, data_loader.py, `DataLoaderShard.__iter__`).

    Leaves out the workspace of cuDNN's convolution, and windows under eager attention.
    """
    tower = image_tower(candidate.model, candidate.image_size) if candidate.images_per_row else None
    if tower is None:
        return None
    images = candidate.rows * candidate.images_per_row
    weights = stack.recipe
    recipe = replace(
        stack,
        recipe=replace(weights, liger=False),
        # a mask in another dtype than that of autocast is cast in every layer
        masked=tower.one_row and weights.autocast_width not in (0, weights.weight_width),
        flash=stack.flash and not tower.one_row,  # PyTorch's own flash kernel takes no mask
        merged=tower.first_norm is not None or (tower.merger is not None and tower.merger.reordered),
        unpads=False,
        windows_active=False,
        mask_widths=weights.weight_width if tower.one_row and stack.attn_implementation not in FLASH else 0,
    )
    size = TowerInput(
        tower=tower,
        layers=tower.joined_stack if stack.attn_implementation in FLASH else tower.stack,
        recipe=recipe,
        images=images,
        learns=learns(tower, recipe),
        gradients_exist=gradients_exist,
    )
    resident: Components = {"activations": candidate.gradient_accumulation_steps * size.pixels * FLOAT32_BYTES}
    return (pooled_passes if tower.merger is None else merged_passes)(size, resident)


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerInput:
    """A vision tower with the images of a micro-batch. `learns`: its forward pass builds a graph."""

    tower: ImageTower
    layers: ModelShape
    recipe: StackRecipe
    images: int
    learns: bool
    gradients_exist: bool

    @property
    def pixels(self) -> int:
        return self.images * self.tower.pixels

    @property
    def patches(self) -> int:
        return self.images * self.tower.patches

    @property
    def scores(self) -> int:
        return self.patches**2 if self.tower.one_row else self.images * self.tower.patches**2

    @property
    def shared(self) -> Components:
        """What all layers read: cos and sin of the patches, and the mask."""
        width = self.recipe.recipe.weight_width if self.tower.one_row else FLOAT32_BYTES
        return {
            "activations": self.patches * self.tower.angles * width,
            "attention_scores": self.recipe.mask_widths * self.scores,
        }

    @property
    def shared_backward(self) -> Components:
        """The same in the backward pass: autocast has cast the mask for each layer, and a checkpoint keeps the mask."""
        cast = self.recipe.masked and not self.recipe.gradient_checkpointing
        return self.shared | ({"attention_scores": 0} if cast else {})

    @property
    def first(self) -> Components:
        """What the norm before the layers saves, where its input needs a gradient."""
        recipe = self.recipe.recipe
        if self.tower.first_norm is None or not (recipe.trainable or self.recipe.gradient_checkpointing):
            return {}
        saved = norm_memory(self.tower.first_norm, replace(recipe, input_width=recipe.compute_width)).saved
        return {"activations": self.patches * (saved[0] + self.layers.hidden_size * recipe.compute_width)}

    @property
    def cast_bytes(self) -> int:
        """Bytes of the pixels in the dtype of the weights, which a convolution that is trained saves."""
        return self.pixels * self.recipe.recipe.compute_width if self.recipe.recipe.trainable else 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that the backward pass of the layers leaves, unless they exist."""
        layers = self.layers.layer_kinds
        return 0 if self.gradients_exist else sum(trained_bytes(one, self.recipe.recipe) * n for one, n in layers)

    def components(self, snapshot: LiveBytes) -> Components:
        return component_bytes(snapshot, self.patches, self.scores)

    def peak(self, peaks: PassPeak) -> Components:
        return peak_components(peaks, self.patches, self.scores)


def pooled_passes(size: TowerInput, resident: Components) -> ImagePasses:
    """Passes of a tower whose patches are pooled, then projected to tokens.

    Source: transformers 5.23, models/gemma3/modeling_gemma3.py, `Gemma3MultiModalProjector`, `Gemma3Model.forward`.
    """
    tower, recipe = size.tower, size.recipe
    memory = stack_memory(size.layers, recipe, size.gradients_exist, 0)
    norm = norm_memory(size.layers.final_norm, replace(recipe.recipe, input_width=memory.output_width))
    output = size.patches * size.layers.hidden_size * norm.output_width
    pooled = pooled_bytes(tower, size.images, recipe.recipe)
    if not size.learns:
        return ImagePasses(
            resident=resident,
            saved={},
            held={"activations": output + pooled},
            copies=0,
            forward=size.peak(memory.inference),
            backward={},
            gradient_bytes=0,
        )
    # average pooling saves a contiguous copy of the features
    behind: Components = {"activations": norm.saved[0] * size.patches + output + pooled + size.cast_bytes}
    cast: Components = {"activations": size.cast_bytes}
    return ImagePasses(
        resident=resident,
        saved=add_components(size.components(memory.saved), behind),
        held={"activations": output},
        copies=memory.copies[2],
        forward=add_components(size.peak(memory.forward), cast),
        backward=add_components(size.peak(memory.backward), cast),
        gradient_bytes=size.gradient_bytes,
    )


def merged_passes(size: TowerInput, resident: Components) -> ImagePasses:
    """Passes of a tower behind which squares of patches are merged to tokens.

    The model's output holds the tower's output and the tokens of each image, beside all tokens in one tensor, to the
    end of the forward pass; so it does with the tokens of deepstack, whose gradients are alive in the tower's backward
    pass. Cos and sin of the patches, and a mask, live as long as the layers.
    Source: transformers 5.23, models/qwen2_vl/modeling_qwen2_vl.py, `Qwen2VLModel.forward`.
    """
    tower, recipe = size.tower, size.recipe
    memory = stack_memory(size.layers, recipe, size.gradients_exist, 0)
    last, inner = (merger_passes(each, size, memory.output_width) for each in (tower.merger, tower.inner_merger))
    shared = size.shared
    output: Components = {"activations": size.patches * size.layers.hidden_size * memory.output_width}
    many = tower.deepstack
    kept = add_components(last.kept, *(inner.kept,) * many)
    if not size.learns:
        before = add_components(shared, *(inner.kept,) * many)
        forward = (add_components(size.peak(memory.inference), before), add_components(output, before, last.forward))
        return ImagePasses(
            resident=resident,
            saved={},
            held=add_components(output, kept),
            copies=0,
            forward=max(*forward, key=total_bytes),
            backward={},
            gradient_bytes=0,
        )
    cast = add_components({"activations": size.cast_bytes}, size.first)
    before = add_components(shared, cast, *(inner.kept,) * many)
    saved = add_components(last.saved, *(inner.saved,) * many)
    layers = add_components(size.components(memory.saved), size.shared_backward, cast)
    # gradients of weights are counted as those of the language model, which exist by then
    after = add_components(size.shared_backward, cast, *(inner.saved, inner.gradient) * many)
    return ImagePasses(
        resident=resident,
        saved=add_components(layers, saved),
        held=add_components(kept, negative(saved)),
        copies=memory.copies[2],
        forward=max(
            add_components(size.peak(memory.forward), before),
            add_components(size.components(memory.saved), before, last.forward),
            key=total_bytes,
        ),
        backward=max(
            add_components(size.peak(memory.backward), after),
            add_components(size.components(memory.saved), after, last.backward),
            key=total_bytes,
        ),
        gradient_bytes=size.gradient_bytes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MergerPasses:
    """A merger's passes over the patches of a micro-batch, see `MergerMemory`. `gradient`: of the tokens it makes."""

    kept: Components
    saved: Components
    forward: Components
    backward: Components
    gradient: Components


def merger_passes(merger: Merger | None, size: TowerInput, input_width: int) -> MergerPasses:
    """Compute a merger's passes; without a merger they take nothing."""
    if merger is None:
        return MergerPasses(kept={}, saved={}, forward={}, backward={}, gradient={})
    recipe = replace(size.recipe.recipe, input_width=input_width)
    memory = merger_memory(merger, recipe, size.learns, size.gradients_exist)
    tokens = size.patches // merger.patches
    backward = peak_components(memory.backward, tokens, 0) if memory.backward else {}
    return MergerPasses(
        kept=component_bytes(memory.kept, tokens, 0),
        saved=component_bytes(memory.saved, tokens, 0),
        forward=peak_components(memory.forward, tokens, 0),
        backward={kind: size_bytes for kind, size_bytes in backward.items() if kind != "gradients"},
        gradient={"activations": tokens * merger.linears[-1].out_features * recipe.compute_width},
    )


def negative(components: Components) -> Components:
    """The components with the opposite sign."""
    return {kind: -size_bytes for kind, size_bytes in components.items()}


def learns(tower: ImageTower, stack: StackRecipe) -> bool:
    """Return whether the tower's forward pass builds a graph.

    Source: transformers 5.23, modeling_utils.py, `enable_input_require_grads` and `get_input_embeddings`.
    """
    adapted = any(linear.name in stack.recipe.lora_targets for linear in tower.stack.layers[0].linears)
    return stack.recipe.trainable or adapted or (stack.gradient_checkpointing and tower.patches_learn)


def pooled_bytes(tower: ImageTower, images: int, recipe: Recipe) -> int:
    """Bytes behind the pooling: features that the norm and the projection save, and the projected features."""
    features = images * tower.text_tokens
    norm = norm_memory(Norm(kind="rms_gemma", features=tower.stack.hidden_size, params=0), recipe)
    saved = norm.saved[0] + tower.stack.hidden_size * norm.output_width
    return features * (saved + tower.text_hidden_size * recipe.compute_width)


# -- the head ----------------------------------------------------------------------------------------------------------


def head_of(candidate: TrainingInput, norm: NormMemory) -> Head:
    """Sizes of the output head and of the tokens that it scores in one micro-step."""
    model, width, tokens = candidate.model, compute_weight_width(candidate), candidate.tokens
    prepared, autocast = prepared_bytes(candidate), autocast_width(candidate)
    labelled = candidate.labelled_tokens
    return Head(
        tokens=tokens,
        labelled_tokens=labelled,
        logit_tokens=labelled if candidate.method_row.completion_logits_only else tokens,
        vocab_size=model.vocab_size,
        hidden_size=model.embed_params // model.vocab_size,
        hidden_width=norm.output_width,
        weight_width=width if prepared is None else prepared.head,
        compute_width=autocast or width,
        trainable=candidate.tuning == "full",
        norm_bytes=norm.saved[0],
        softcapped=model.config.get("final_logit_softcapping", 30.0 if model.model_type == "gemma2" else None)
        is not None,  # Gemma2Config's default
    )


def head_elements(candidate: TrainingInput) -> int:
    """Parameters of the output head: hidden_size for a reward model's score, else vocabulary x hidden_size."""
    model = candidate.model
    features = model.embed_params // model.vocab_size
    return features if candidate.method == "reward" else model.vocab_size * features


def final_norm(candidate: TrainingInput, recipe: Recipe, stream_width: int) -> NormMemory:
    """Memory of the norm after the last layer; that of models without formulas is taken for an RMS norm."""
    model = candidate.model
    module = model.final_norm
    if any(layer.measure for layer, _ in model.layer_kinds):
        module = Norm(kind="rms", features=model.hidden_size, params=model.hidden_size)
    return norm_memory(module, replace(recipe, input_width=stream_width))


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
