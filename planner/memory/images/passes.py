"""The passes of a vision tower over the images of a micro-batch, with the projector behind it."""

from msgspec import Struct
from msgspec.structs import replace

from planner.cache_keys import TrainingInput
from planner.candidate import FLASH
from planner.memory.activations import StackGradients, left_bytes, stack_inference, stack_memory
from planner.memory.dtypes import FLOAT32_BYTES
from planner.memory.images.merger import merger_memory
from planner.memory.layers.autograd import LiveBytes
from planner.memory.layers.components import (
    Components,
    add_components,
    component_bytes,
    negative,
    peak_components,
    total_bytes,
)
from planner.memory.layers.one_layer import PassPeak, norm_memory
from planner.memory.layers.recipe import Recipe
from planner.memory.stack_recipe import StackRecipe
from planner.models.image_tower import ImageTower, Merger, image_tower
from planner.models.layers import NO_BLOCKS, Norm
from planner.models.lora_targets import adapts_tower
from planner.models.shape import ModelShape


class ImagePasses(Struct, frozen=True, kw_only=True):
    """The passes of a vision tower over the images of one micro-batch, with the projector behind it.

    resident   the pixels of all micro-batches of an optimizer step, or of a rollout
    saved      alive until the tower's backward pass
    held       further tensors, alive until the language model's forward pass ends
    copies     the part of `saved` that autocast drops at that moment
    forward    at the tower's heaviest layer, without the entries above; so is `backward`
    """

    resident: Components
    saved: Components
    held: Components
    copies: int
    forward: Components
    backward: Components
    gradient_bytes: int  # gradients of the tower's layers at the end of the pass, which `backward` counts


def image_passes(
    candidate: TrainingInput, stack: StackRecipe, gradients: StackGradients, graph: bool = True, rows: int = 0
) -> ImagePasses | None:
    """Compute the passes of a candidate's images; None for rows of text. Without `graph`: a forward pass under no_grad.

    `rows`: those of the pass; 0: those of a micro-batch.

    The tower has no mask or dropout. It saves nothing where no weight or input of it requires a gradient: with LoRA on
    other modules, without checkpointing (`enable_input_require_grads` reaches its patches, too). The batches of an
    optimizer step are all on the GPU before its first micro-step (transformers 5.23, trainer.py, `get_batch_samples`;
    accelerate 1.15, data_loader.py, `DataLoaderShard.__iter__`), and those of a rollout until the next one is scored
    (trl 1.16, trainer/grpo_trainer.py, `_prepare_inputs`, `_buffered_inputs`).

    Leaves out the workspace of cuDNN's convolution, and windows under eager attention.
    """
    tower = image_tower(candidate.model, candidate.image_size) if candidate.images_per_row else None
    if tower is None:
        return None
    images = (rows or candidate.rows) * candidate.images_per_row
    weights = stack.recipe
    targets = weights.lora_targets if adapts_tower(candidate.model, candidate.lora_target_modules) else frozenset[str]()
    recipe = replace(
        stack,
        recipe=replace(weights, liger_blocks=NO_BLOCKS, lora_targets=targets),
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
        learns=graph and learns(tower, recipe),
        gradients=gradients,
    )
    kept = candidate.gradient_accumulation_steps * candidate.rows
    if candidate.method_row.generates:
        kept = candidate.generation_rows
    resident: Components = {"activations": kept * candidate.images_per_row * tower.pixels * FLOAT32_BYTES}
    return (pooled_passes if tower.merger is None else merged_passes)(size, resident)


class TowerInput(Struct, frozen=True, kw_only=True):
    """A vision tower with the images of a micro-batch. `learns`: its forward pass builds a graph."""

    tower: ImageTower
    layers: ModelShape
    recipe: StackRecipe
    images: int
    learns: bool
    gradients: StackGradients

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
        """Tensors that all layers read: cos and sin of the patches, and the mask."""
        width = self.recipe.recipe.weight_width if self.tower.one_row else FLOAT32_BYTES
        return {
            "activations": self.patches * self.tower.angles * width,
            "attention_scores": self.recipe.mask_widths * self.scores,
        }

    @property
    def shared_backward(self) -> Components:
        """As `shared`, in the backward pass: each layer has its own cast of the mask, unless checkpoints keep it."""
        cast = self.recipe.masked and not self.recipe.gradient_checkpointing
        return self.shared | ({"attention_scores": 0} if cast else {})

    @property
    def shared_between(self) -> Components:
        """As `shared`, between the passes: offloading moves the mask, an argument of a checkpointed layer, to the host.

        Source: transformers 5.23, models/pixtral/modeling_pixtral.py, `PixtralTransformer.forward`.
        """
        return self.shared_backward | ({} if self.recipe.offloads == "nothing" else {"attention_scores": 0})

    @property
    def first(self) -> Components:
        """Tensors that the norm before the layers saves, where its input needs a gradient."""
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
    def argument(self) -> Components:
        """Pixels in the dtype of the weights, which Qwen's code holds while the tower runs, unless they are saved.

        Source: transformers 5.23, models/qwen2_vl/modeling_qwen2_vl.py, `Qwen2VLModel.get_image_features`.
        """
        width = self.recipe.recipe.weight_width
        held = 0 if self.tower.one_row or width == FLOAT32_BYTES else self.pixels * width
        return {"activations": max(held - self.cast_bytes, 0)}

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that the backward pass of the layers leaves, unless they exist."""
        layers = self.layers.layer_kinds
        return sum(left_bytes(one, self.recipe.recipe, self.gradients) * n for one, n in layers)

    def components(self, snapshot: LiveBytes) -> Components:
        return component_bytes(snapshot, self.patches, self.scores)

    def peak(self, peaks: PassPeak) -> Components:
        return peak_components(peaks, self.patches, self.scores)


def pooled_passes(size: TowerInput, resident: Components) -> ImagePasses:
    """Passes of a tower whose patches are pooled, then projected to tokens.

    Source: transformers 5.23, models/gemma3/modeling_gemma3.py, `Gemma3MultiModalProjector`, `Gemma3Model.forward`.
    """
    tower, recipe = size.tower, size.recipe
    inference = stack_inference(size.layers, recipe)
    norm = norm_memory(size.layers.final_norm, replace(recipe.recipe, input_width=inference.output_width))
    output = size.patches * size.layers.hidden_size * norm.output_width
    pooled = pooled_bytes(tower, size.images, recipe.recipe)
    if not size.learns:
        return ImagePasses(
            resident=resident,
            saved={},
            held={"activations": output + pooled},
            copies=0,
            forward=size.peak(inference.peak),
            backward={},
            gradient_bytes=0,
        )
    memory = stack_memory(size.layers, recipe, size.gradients, 0)
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
    inference = stack_inference(size.layers, recipe)
    last, inner = (merger_passes(each, size, inference.output_width) for each in (tower.merger, tower.inner_merger))
    shared = size.shared
    output: Components = {"activations": size.patches * size.layers.hidden_size * inference.output_width}
    many = tower.deepstack
    kept = add_components(last.kept, *(inner.kept,) * many)
    if not size.learns:
        before = add_components(shared, size.argument, *(inner.kept,) * many)
        forward = (add_components(size.peak(inference.peak), before), add_components(output, before, last.forward))
        return ImagePasses(
            resident=resident,
            saved={},
            held=add_components(output, kept),
            copies=0,
            forward=max(*forward, key=total_bytes),
            backward={},
            gradient_bytes=0,
        )
    memory = stack_memory(size.layers, recipe, size.gradients, 0)
    cast = add_components({"activations": size.cast_bytes}, size.first)
    before = add_components(shared, cast, size.argument, *(inner.kept,) * many)
    saved = add_components(last.saved, *(inner.saved,) * many)
    layers = add_components(size.components(memory.saved), size.shared_between, cast)
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


class MergerPasses(Struct, frozen=True, kw_only=True):
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
    memory = merger_memory(merger, recipe, size.learns, size.gradients.exist)
    tokens = size.patches // merger.patches
    backward = peak_components(memory.backward, tokens, 0) if memory.backward else {}
    return MergerPasses(
        kept=component_bytes(memory.kept, tokens, 0),
        saved=component_bytes(memory.saved, tokens, 0),
        forward=peak_components(memory.forward, tokens, 0),
        backward={kind: size_bytes for kind, size_bytes in backward.items() if kind != "gradients"},
        gradient={"activations": tokens * merger.linears[-1].out_features * recipe.compute_width},
    )


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


def seen(layers: Components, images: ImagePasses | None) -> Components:
    """The larger peak of two passes without gradients: the vision tower's, then the language model's (`layers`)."""
    if images is None:
        return layers
    return max(add_components(layers, images.held), images.forward, key=total_bytes)
