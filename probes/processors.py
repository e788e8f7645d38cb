"""Processors of vision-language models without the model's files: tokens of images, and files that Transformers reads.

A processor of Transformers is made of a tokenizer and an image processor. `write_processor` writes what the published
repositories have (preprocessor_config.json and so on) beside a config.json, with a tokenizer of words that knows the
tokens of images: TRL's trainers and vLLM read it as they read a real one, with torchvision and Pillow (extra `images`).
"""

import json
from collections.abc import Callable
from importlib import import_module
from math import isqrt, prod
from pathlib import Path
from typing import Any, get_args

from msgspec import Struct
from transformers import AutoProcessor, PreTrainedConfig, PreTrainedTokenizerFast, ProcessorMixin

from planner.candidate import Candidate
from planner.errors import InputError
from planner.models.architectures.architecture import Tower
from planner.models.image_tower import has_image_tower, image_sides, image_tower
from planner.models.shape import ModelShape

NEEDS = "Images are read with Pillow and torchvision: pip install 'finetune-plan[images]'."
RGB = 3  # channels of an image
# Image tokens of the Qwen families: field of the config -> text (transformers 5.23, models/qwen3_vl/
# processing_qwen3_vl.py).
QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
GEMMA3_NEWLINES = {106 + count: "\n" * count for count in range(1, 5)}  # which vLLM looks up; as published

# Each part of a message as a word: an image by the token that the processor replaces, everything else as it is.
TEMPLATE = (
    "{%% for message in messages %%}{%% if message['content'] is string %%}{{ message['content'] }} {%% else %%}"
    "{%% for part in message['content'] %%}{%% if part['type'] == 'image' %%}%s {%% else %%}{{ part['text'] }} "
    "{%% endif %%}{%% endfor %%}{%% endif %%}{%% endfor %%}"
)


class Processor(Struct, frozen=True, kw_only=True):
    """The processor of a family: its classes in Transformers, the text of its tokens by id, and its files.

    `placeholder`: what stands for an image in a prompt; `named`: attributes of the tokenizer that the processor reads.
    """

    processor: str
    image_processor: str
    video_processor: str = ""
    tokens: dict[int, str]
    placeholder: str
    image_settings: dict[str, Any]
    settings: dict[str, Any] = {}
    named: dict[str, str] = {}

    @property
    def chat_template(self) -> str:
        return TEMPLATE % self.placeholder


def processor_of(shape: ModelShape, config: PreTrainedConfig) -> Processor | None:
    """Return the processor of a model; None if it takes no images, or has no tower with formulas.

    `config`: the model's, of Transformers.
    """
    if not has_image_tower(shape):
        return None
    return PROCESSORS[shape.architecture.tower](shape.architecture.largest_image, config)


def _qwen(processor: str, video: str, smallest: int) -> Callable[[str, Any], Processor]:
    """Return what makes a processor of a Qwen family: beginnings of its classes, pixels of its smallest image.

    `smallest`: `shortest_edge` of the published preprocessor_config.json, which is a number of pixels.
    """

    def of_model(largest_image: str, config: Any) -> Processor:
        tower = config.vision_config
        largest = prod(image_sides(largest_image))
        return Processor(
            processor=f"{processor}Processor",
            image_processor="Qwen2VLImageProcessor",
            video_processor=f"{video}VideoProcessor",
            tokens={getattr(config, name): text for name, text in QWEN_TOKENS.items()},
            placeholder="<|vision_start|><|image_pad|><|vision_end|>",
            image_settings={
                "size": {"shortest_edge": smallest, "longest_edge": largest},
                "patch_size": tower.patch_size,
                "temporal_patch_size": tower.temporal_patch_size,
                "merge_size": tower.spatial_merge_size,
            },
        )

    return of_model


def _gemma3(_: str, config: Any) -> Processor:
    side = config.vision_config.image_size
    tokens = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    ids = (config.image_token_index, config.boi_token_index, config.eoi_token_index)
    return Processor(
        processor="Gemma3Processor",
        image_processor="Gemma3ImageProcessor",
        tokens=dict(zip(ids, tokens.values(), strict=True)) | GEMMA3_NEWLINES,
        placeholder=tokens["boi_token"],
        image_settings={"size": {"height": side, "width": side}},
        settings={"image_seq_length": config.mm_tokens_per_image},
        named=tokens,
    )


def _mistral3(largest_image: str, config: Any) -> Processor:
    """Return the processor of mistral 3, whose break and end tokens the config lacks: 12 and 13 in tekken.json."""
    patch, largest = config.vision_config.patch_size, max(image_sides(largest_image))
    return Processor(
        processor="PixtralProcessor",
        image_processor="PixtralImageProcessor",
        tokens={config.image_token_id: "[IMG]", 12: "[IMG_BREAK]", 13: "[IMG_END]"},
        placeholder="[IMG]",
        image_settings={"size": {"longest_edge": largest}, "patch_size": {"height": patch, "width": patch}},
        settings={"patch_size": patch, "spatial_merge_size": config.spatial_merge_size},
    )


PROCESSORS: dict[Tower, Callable[[str, Any], Processor]] = {
    "siglip": _gemma3,
    "pixtral": _mistral3,
    "qwen2_vit": _qwen("Qwen2VL", "Qwen2VL", 56 * 56),
    "qwen2_5_vit": _qwen("Qwen2_5_VL", "Qwen2VL", 56 * 56),
    "qwen3_vit": _qwen("Qwen3VL", "Qwen3VL", 256 * 256),
}
assert {"", *PROCESSORS} == set(get_args(Tower))


def write_processor(processor: Processor, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the files of a processor and its tokenizer into a model's folder."""
    kind = {"processor_class": processor.processor}
    image = processor.image_settings | kind | {"image_processor_type": processor.image_processor}
    _write(folder / "preprocessor_config.json", image)
    if processor.video_processor:
        video = processor.image_settings | kind | {"video_processor_type": processor.video_processor}
        _write(folder / "video_preprocessor_config.json", video)
    _write(folder / "processor_config.json", processor.settings | kind)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(processor.chat_template, encoding="utf-8")


def _write(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(settings), encoding="utf-8")


def read_processor(folder: Path, tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    """Load the processor from a model's folder, and give it our tokenizer.

    For some families `from_pretrained` picks a tokenizer class that cannot read our vocabulary. Source:
    transformers 5.23, models/auto/tokenization_auto.py (`MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS`).

    Raises:
        InputError: torchvision or Pillow is not installed.
    """
    try:
        found = AutoProcessor.from_pretrained(folder)
    except ImportError as error:
        raise InputError(NEEDS) from error
    found.tokenizer = tokenizer
    assert isinstance(found, ProcessorMixin)
    return found


def image_tokens(candidate: Candidate) -> int:
    """Return the tokens that the images of a row take, with those around them that a processor or a template adds."""
    tower = image_tower(candidate.model, candidate.image_size)
    assert tower is not None
    around = 0 if tower.one_row else 2  # a token for the beginning and one for the end
    return candidate.images_per_row * (tower.text_tokens + around)


def image_of(candidate: Candidate) -> Any:
    """Return a black image of the candidate's size, or of the one that the model's processor makes of every image.

    Raises:
        InputError: Pillow is not installed.
    """
    try:
        images = import_module("PIL.Image")
    except ImportError as error:
        raise InputError(NEEDS) from error
    tower = image_tower(candidate.model, candidate.image_size)
    assert tower is not None
    side = isqrt(tower.pixels // RGB)
    return images.new("RGB", image_sides(candidate.image_size) if candidate.image_size else (side, side))
