"""Vision towers as stacks of layers through which the images of a row pass, for memory and time.

Sources: transformers 5.23, models/siglip/modeling_siglip.py, models/gemma3/modeling_gemma3.py,
models/qwen2_vl/modeling_qwen2_vl.py, models/qwen2_5_vl/modeling_qwen2_5_vl.py, models/qwen3_vl/modeling_qwen3_vl.py,
models/qwen3_5/modeling_qwen3_5.py, models/mistral3/modeling_mistral3.py, models/pixtral/modeling_pixtral.py.
"""

from collections.abc import Callable
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import InputError, shortened
from planner.models.architectures.architecture import Tower
from planner.models.architectures.fields import Fields
from planner.models.architectures.parts import ACTIVATIONS, gated_mlp, norm, plain_mlp
from planner.models.layers import Activation, Attention, Layer, Linear, Mlp, Norm
from planner.models.shape import ModelShape
from planner.models.vision import SIGLIP_DEFAULTS

GEMMA3_IMAGE_TOKENS = 256  # `mm_tokens_per_image` of Gemma3Config
LARGEST_SIDE = 10**5  # of an image, in pixels: more than any camera makes
MOST_STRETCHED = 200  # the longer side over the shorter. Source: qwen2_vl/image_processing_qwen2_vl.py, `smart_resize`


class Merger(Struct, frozen=True, kw_only=True):
    """Joins the patches of a square to one token: a norm of patches or squares, then projections of the square.

    The last projection follows a GELU. `inside`: it reads a layer's output, which the next one reads, too (deepstack).
    """

    norm: Norm
    linears: tuple[Linear, ...]
    patches: int  # in a square
    reordered: bool = False  # its outputs are put back into the order of the image (windows)
    unfolded: bool = False  # squares are copied out of a grid, image by image
    inside: bool = False


class ImageTower(Struct, frozen=True, kw_only=True, eq=False):
    """A vision tower as a stack of layers. Compared by identity, as `ModelShape`.

    `stack`: its layers; "tokens" of this stack are patches. `joined_stack`: the same where one attention kernel takes
    all images of a batch (FlashAttention), not each image or window apart. `text_tokens`: tokens that one image takes
    in a row; of them `feature_tokens` are made of its patches, the others are ordinary ones between them. `merger`:
    None for gemma 3, which pools the patches. `one_row`: the patches of all images of a batch are one row, with a mask
    in the dtype of the weights that keeps the images apart; `first_norm` makes the row of them.
    """

    stack: ModelShape
    joined_stack: ModelShape
    pixels: int  # numbers that the processor makes of an image
    grid: tuple[int, int]  # patches of an image: rows, columns
    text_tokens: int
    feature_tokens: int
    text_hidden_size: int
    merger: Merger | None
    deepstack: int  # layers inside the tower behind which another merger makes as many tokens
    angles: int  # numbers of cos and sin for each patch, in float32, or of `one_row` in the dtype of the weights
    learned_positions: bool  # added to the patches
    masks_text: bool  # the tokens of an image see one another in the language model
    patches_learn: bool  # `enable_input_require_grads` finds the module that makes the patches (`_input_embed_layer`)
    one_row: bool = False
    first_norm: Norm | None = None

    @property
    def patches(self) -> int:
        """Return the number of patches of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def inner_merger(self) -> Merger | None:
        """Return the merger behind layers inside the tower, which normalises whole squares; None: there is none.

        Source: transformers 5.23, models/qwen3_vl/modeling_qwen3_vl.py, `deepstack_merger_list`.
        """
        if self.merger is None or not self.deepstack:
            return None
        return replace(self.merger, norm=norm(self.merger.norm.kind, self.merger.linears[0].in_features), inside=True)


def has_image_tower(model: ModelShape) -> bool:
    """Return whether the vision tower of a model has formulas."""
    return bool(model.architecture.tower) and isinstance(model.config.get("vision_config"), dict)


def needs_image_size(model: ModelShape) -> bool:
    """Return whether an image's tokens depend on its size: most processors keep it, gemma 3's resizes every image."""
    return has_image_tower(model) and bool(model.architecture.largest_image)


@lru_cache(maxsize=64)
def image_tower(model: ModelShape, image_size: str) -> ImageTower | None:
    """Return the vision tower of a model for images of a size, "WIDTHxHEIGHT" in pixels.

    None: the model has no tower, or one without formulas. Gemma 3 ignores the size.

    Raises:
        InputError: the size is none, or missing where the model needs it.
    """
    if not has_image_tower(model):
        return None
    return _TOWERS[model.architecture.tower](model, image_size)


def image_sides(image_size: str) -> tuple[int, int]:
    """Parse "WIDTHxHEIGHT" into pixels; raise InputError if it is no such size, or no processor takes it."""
    width, _, height = image_size.lower().partition("x")
    if not (width.isascii() and width.isdigit() and height.isascii() and height.isdigit()):
        raise InputError("An image size is WIDTHxHEIGHT in pixels, such as --image-size 1024x768.")
    sides = int(width[:9]), int(height[:9])
    if not 0 < min(sides) <= max(sides) <= min(LARGEST_SIDE, MOST_STRETCHED * min(sides)):
        raise InputError(
            f"No processor takes an image of this size: sides are 1 to {LARGEST_SIDE:,} pixels, the longer one at most "
            f"{MOST_STRETCHED} times the shorter. Use one such as --image-size 1024x768."
        )
    return sides


# -- gemma 3 -----------------------------------------------------------------------------------------------------------


def _gemma3(model: ModelShape, _: str) -> ImageTower:
    """`SiglipEncoderLayer` is a llama-like layer of LayerNorms, biases and a plain MLP without rotary positions.

    Every image is resized to `image_size` squared (processing_gemma3.py; "pan and scan" is off by default). Masks of
    the language model are made from `token_type_ids`: image tokens see one another (`create_masks_for_vision_model`).
    """
    fields = _vision_fields(model, SIGLIP_DEFAULTS)
    hidden_size, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    side, patch = fields.positive("image_size"), fields.positive("patch_size")
    layer = Layer(
        program="llama",
        hidden_size=hidden_size,
        attention=replace(
            _attention(heads, _projections(hidden_size, ("q_proj", "k_proj", "v_proj", "out_proj"), bias=True)),
            rotary=False,
        ),
        feed_forward=plain_mlp(
            hidden_size, fields.positive("intermediate_size"), "gelu_tanh", names=("fc1", "fc2"), bias=True
        ),
        norms=(norm("layer", hidden_size),) * 2,
    )
    patches = (side // patch) ** 2
    stack = _stack(
        model, (layer,) * fields.positive("num_hidden_layers"), norm("layer", hidden_size), patches * hidden_size
    )
    tokens = model.config.get("mm_tokens_per_image", GEMMA3_IMAGE_TOKENS)
    assert isinstance(tokens, int)
    return ImageTower(
        stack=stack,
        joined_stack=stack,
        pixels=fields.positive("num_channels") * side**2,
        grid=(side // patch, side // patch),
        text_tokens=tokens,
        feature_tokens=tokens,
        text_hidden_size=model.hidden_size,
        merger=None,
        deepstack=0,
        angles=0,
        learned_positions=True,
        masks_text=True,
        patches_learn=True,
    )


# -- qwen --------------------------------------------------------------------------------------------------------------


def _qwen2_vl(model: ModelShape, image_size: str) -> ImageTower:
    """`Qwen2VLVisionBlock`: LayerNorms and a plain MLP with QuickGELU (configuration_qwen2_vl.py)."""
    fields = _vision_fields(model, _QWEN_DEFAULTS | {"embed_dim": 1280, "mlp_ratio": 4})
    hidden_size = fields.positive("embed_dim")
    inner = int(hidden_size * fields.positive("mlp_ratio"))
    feed_forward = plain_mlp(hidden_size, inner, "quick_gelu", names=("fc1", "fc2"), bias=True)
    blocks = _Blocks(fields, hidden_size, norm("layer", hidden_size), feed_forward)
    return _qwen(model, blocks, image_size, merger=("0", "2"), out=fields.positive("hidden_size"))


def _qwen2_5_vl(model: ModelShape, image_size: str) -> ImageTower:
    """`Qwen2_5_VLVisionBlock`: RMS norms, a gated MLP with biases, and windows in most layers."""
    fields = _vision_fields(model, _QWEN_DEFAULTS | {"hidden_act": "silu", "window_size": 112, "hidden_size": 1280})
    hidden_size = fields.positive("hidden_size")
    mlp = gated_mlp(hidden_size, fields.positive("intermediate_size"), _activation(fields), bias=True)
    blocks = _Blocks(fields, hidden_size, norm("rms", hidden_size), mlp)
    tower = _qwen(model, blocks, image_size, merger=("0", "2"), out=fields.positive("out_hidden_size"), reordered=True)
    window = (fields.positive("window_size") // fields.positive("patch_size")) ** 2
    whole = fields.sequence("fullatt_block_indexes")
    return replace(
        tower,
        stack=_with_windows(tower.stack, window, whole),
        joined_stack=_with_windows(tower.joined_stack, window, whole),
    )


def _qwen3_vl(model: ModelShape, image_size: str) -> ImageTower:
    """`Qwen3VLVisionBlock`, `Qwen3_5VisionBlock`: LayerNorms and a plain MLP; learned positions are added."""
    fields = _vision_fields(model, _QWEN_DEFAULTS | {"hidden_act": "gelu_pytorch_tanh", "patch_size": 16})
    hidden_size = fields.positive("hidden_size")
    feed_forward = plain_mlp(
        hidden_size,
        fields.positive("intermediate_size"),
        _activation(fields),
        names=("linear_fc1", "linear_fc2"),
        bias=True,
    )
    blocks = _Blocks(fields, hidden_size, norm("layer", hidden_size), feed_forward)
    names = ("linear_fc1", "linear_fc2")
    return _qwen(
        model, blocks, image_size, merger=names, out=fields.positive("out_hidden_size"), learned_positions=True
    )


_QWEN_DEFAULTS: dict[str, object] = {
    "depth": 32, "num_heads": 16, "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip


class _Blocks(Struct, frozen=True):
    """Differences between the towers of the Qwen families: width, norms and MLP of a block."""

    fields: Fields
    hidden_size: int
    norm: Norm
    mlp: Mlp


def _qwen(
    model: ModelShape,
    blocks: _Blocks,
    image_size: str,
    *,
    merger: tuple[str, str],
    out: int,
    reordered: bool = False,
    learned_positions: bool = False,
) -> ImageTower:
    """A tower of one of the Qwen families: one projection for queries, keys and values, rotary positions in float32.

    The processor makes both sides whole squares of merged patches (`smart_resize`), and an image two frames long. Its
    limits on the number of pixels are not applied: `image_size` is what it makes of the image.
    """
    fields, hidden_size = blocks.fields, blocks.hidden_size
    patch, merge = fields.positive("patch_size"), fields.positive("spatial_merge_size")
    width, height = (max(1, round(side / (patch * merge))) * merge for side in _sides(model, image_size))
    heads, square = fields.positive("num_heads"), merge**2
    layer = _qwen_layer(blocks, heads)
    joined = replace(layer, attention=replace(layer.attention, in_pieces=False))
    depth, no_norm = fields.positive("depth"), norm("none", 0)
    return ImageTower(
        stack=_stack(model, (layer,) * depth, no_norm, 0),
        joined_stack=_stack(model, (joined,) * depth, no_norm, 0),
        pixels=width * height * fields.positive("in_channels") * fields.positive("temporal_patch_size") * patch**2,
        grid=(height, width),
        text_tokens=width * height // square,
        feature_tokens=width * height // square,
        text_hidden_size=model.hidden_size,
        merger=Merger(
            norm=blocks.norm,
            linears=(
                Linear(name=merger[0], in_features=square * hidden_size, out_features=square * hidden_size, bias=True),
                Linear(name=merger[1], in_features=square * hidden_size, out_features=out, bias=True),
            ),
            patches=square,
            reordered=reordered,
        ),
        deepstack=len(fields.sequence("deepstack_visual_indexes")),
        angles=2 * (hidden_size // heads),
        learned_positions=learned_positions,
        masks_text=False,
        patches_learn=not learned_positions,
    )


def _qwen_layer(blocks: _Blocks, heads: int) -> Layer:
    """A layer whose attention takes the images of a batch one by one."""
    hidden_size = blocks.hidden_size
    attention = _attention(
        heads,
        (
            Linear(name="qkv", in_features=hidden_size, out_features=3 * hidden_size, bias=True),
            Linear(name="proj", in_features=hidden_size, out_features=hidden_size, bias=True),
        ),
    )
    return Layer(
        program="llama",
        hidden_size=hidden_size,
        attention=replace(attention, rotary_style="float32", qkv_layout="unbound", in_pieces=True),
        feed_forward=blocks.mlp,
        norms=(blocks.norm, blocks.norm),
    )


def _with_windows(stack: ModelShape, window: int, whole: list[object]) -> ModelShape:
    """Return the stack with windows of that many patches, except in the layers that see a `whole` image."""
    seeing_all = stack.layers[0]
    narrow = replace(seeing_all, attention=replace(seeing_all.attention, sliding_window=window))
    return replace(stack, layers=tuple(seeing_all if i in whole else narrow for i in range(len(stack.layers))))


# -- mistral 3 ---------------------------------------------------------------------------------------------------------


def _mistral3(model: ModelShape, image_size: str) -> ImageTower:
    """`PixtralAttentionLayer` is a layer of llama without biases; all images of a batch are one row of patches.

    The processor makes both sides whole squares of merged patches, upwards; a token follows each row of squares
    (processing_pixtral.py, `num_image_tokens`). Its limit on the longest side is not applied: `image_size` is what it
    makes of the image.
    """
    fields = _vision_fields(model, _PIXTRAL_DEFAULTS)
    hidden_size, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    projector = Fields(
        id=model.id,
        model_type=model.model_type,
        values={"spatial_merge_size": 2, "multimodal_projector_bias": False, **model.config},
    )
    patch, merge = fields.positive("patch_size"), projector.positive("spatial_merge_size")
    columns, rows = (-(-side // (patch * merge)) for side in _sides(model, image_size))
    layer = Layer(
        program="llama",
        hidden_size=hidden_size,
        attention=_attention(heads, _projections(hidden_size, ("q_proj", "k_proj", "v_proj", "o_proj"), bias=False)),
        feed_forward=gated_mlp(hidden_size, fields.positive("intermediate_size"), _activation(fields)),
        norms=(norm("rms", hidden_size),) * 2,
    )
    stack = _stack(model, (layer,) * fields.positive("num_hidden_layers"), norm("none", 0), 0)
    bias, inner, outer = projector.flag("multimodal_projector_bias"), merge**2 * hidden_size, model.hidden_size
    return ImageTower(
        stack=stack,
        joined_stack=stack,
        pixels=fields.positive("num_channels") * rows * columns * (patch * merge) ** 2,
        grid=(rows * merge, columns * merge),
        text_tokens=rows * (columns + 1),
        feature_tokens=rows * columns,
        text_hidden_size=model.hidden_size,
        merger=Merger(
            norm=norm("rms", hidden_size),
            linears=(
                Linear(name="merging_layer", in_features=inner, out_features=hidden_size, bias=False),
                Linear(name="linear_1", in_features=hidden_size, out_features=outer, bias=bias),
                Linear(name="linear_2", in_features=outer, out_features=outer, bias=bias),
            ),
            patches=merge**2,
            unfolded=True,
        ),
        deepstack=0,
        angles=2 * (hidden_size // heads),
        learned_positions=False,
        masks_text=False,
        patches_learn=True,
        one_row=True,
        first_norm=norm("rms", hidden_size),
    )


_PIXTRAL_DEFAULTS: dict[str, object] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_channels": 3, "patch_size": 16, "hidden_act": "gelu",
}  # fmt: skip


# -- parts of all towers -----------------------------------------------------------------------------------------------


def _vision_fields(model: ModelShape, defaults: dict[str, object]) -> Fields:
    inner = model.config["vision_config"]
    assert isinstance(inner, dict)
    return Fields(id=model.id, model_type=model.model_type, values={**defaults, **inner})


def _attention(heads: int, linears: tuple[Linear, ...]) -> Attention:
    """Attention with as many heads of keys and values as of queries; the first product reads the hidden size."""
    head_dim = linears[0].in_features // heads
    return Attention(
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        linears=linears,
    )


def _projections(hidden_size: int, names: tuple[str, ...], *, bias: bool) -> tuple[Linear, ...]:
    """Products that keep the hidden size, by name."""
    return tuple(Linear(name=name, in_features=hidden_size, out_features=hidden_size, bias=bias) for name in names)


def _sides(model: ModelShape, image_size: str) -> tuple[int, int]:
    if not image_size:
        raise InputError(
            f"An image's tokens depend on its size in {model.id}. Give it in pixels, such as --image-size 1024x768."
        )
    return image_sides(image_size)


def _activation(fields: Fields) -> Activation:
    name = fields.text("hidden_act")
    if name not in ACTIVATIONS:
        raise InputError(f"The vision tower of {fields.id} has {shortened(name)} as hidden_act, which has no formula.")
    return ACTIVATIONS[name]


def _stack(model: ModelShape, layers: tuple[Layer, ...], final_norm: Norm, position_params: int) -> ModelShape:
    """The layers of a tower as a model of their own; its "embedding" is the projection of patches."""
    return ModelShape(
        id=f"{model.id} (vision tower)",
        model_type=f"{model.model_type}_vision",
        dtype=model.dtype,
        hidden_size=layers[0].hidden_size,
        vocab_size=1,
        max_position_embeddings=1,
        layers=layers,
        embed_params=layers[0].hidden_size,
        position_params=position_params,
        lm_head_params=0,
        final_norm=final_norm,
        tied=True,
        params=model.vision_params,
        config={},
    )


_TOWERS: dict[Tower, Callable[[ModelShape, str], ImageTower]] = {
    "siglip": _gemma3,
    "pixtral": _mistral3,
    "qwen2_vit": _qwen2_vl,
    "qwen2_5_vit": _qwen2_5_vl,
    "qwen3_vit": _qwen3_vl,
}
