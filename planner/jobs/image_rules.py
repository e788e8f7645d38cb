"""Rules about rows with images: models, methods, engines and lengths that they do not go with."""

from collections.abc import Iterator

from planner.candidate import DEFAULT_PROMPT_LENGTH
from planner.jobs.job import DEFAULT_MAX_LENGTH, PinnedJob
from planner.methods import METHODS
from planner.models.image_tower import ImageTower, has_image_tower, image_tower, needs_image_size
from planner.units import format_count


def image_problems(pins: PinnedJob) -> Iterator[str]:
    """Refuse rows with images for a model that they are not counted for, and sizes that are missing or without use."""
    model, images, image_size = pins.job.model, pins.pinned.get("images_per_row", 0), pins.pinned.get("image_size", "")
    if not images:
        if image_size:
            yield f"image_size={image_size} is for rows with images. Use {pins.way(images_per_row=1)}."
        return
    if not has_image_tower(model):
        what = "a vision tower without formulas" if model.vision_params else "no vision tower"
        yield f"images_per_row={images}: {model.id} has {what}. Use Qwen2-VL, 2.5-VL, 3-VL, 3.5, Gemma 3 or Mistral 3."
    elif needs_image_size(model) != (image_size != ""):
        yield (
            f"image_size={image_size}: {model.id} resizes every image to one size. Drop it."
            if image_size
            else f"An image's tokens depend on its size in {model.id}: add it in pixels, such as --image-size 1024x768."
        )
    else:
        yield from _image_row_problems(pins, images, image_tower(model, image_size))


def _image_row_problems(pins: PinnedJob, images: int, tower: ImageTower | None) -> Iterator[str]:
    """Refuse rows with images for a method that they are not counted for, and rows that TRL refuses or cuts.

    Source: trl 1.16, trainer/sft_trainer.py, `SFTTrainer.__init__` (packing, padding-free) and
    `SFTTrainer.compute_loss` (image tokens that are cut); trainer/dpo_trainer.py, `DPOTrainer.__init__`
    (precompute_ref_log_probs).
    """
    job, pinned = pins.job, pins.pinned
    method = METHODS[job.method]
    if method.images == "refused":
        yield f"images_per_row={images}: TRL's {method.trainer} takes no images. Drop it."
    elif method.images == "not yet":
        counted = ", ".join(name for name, method in METHODS.items() if method.images == "counted")
        yield f"images_per_row={images}: images are counted for {counted}; not for {job.method} yet. Drop it."
    for field in ("packing", "padding_free", "cp_size", "sp_size", "precompute_ref_log_probs"):
        if pinned.get(field, False) is True or pinned.get(field, 1) > 1:
            yield f"{field} is not there for rows with images. Drop it."
    if tower is not None:
        yield from _image_length_problems(pins, images, images * tower.text_tokens)


def _image_length_problems(pins: PinnedJob, images: int, tokens: int) -> Iterator[str]:
    """Refuse a prompt or a row that the tokens of its images do not fit into."""
    what = f"the {tokens} tokens of {format_count(images)} image{'s' if images > 1 else ''}"
    if METHODS[pins.job.method].generates:
        prompt = pins.pinned.get("prompt_length", DEFAULT_PROMPT_LENGTH)
        if prompt < tokens:
            advice = f"Use {pins.way(prompt_length=tokens + DEFAULT_PROMPT_LENGTH)}."
            yield f"A prompt of {prompt} tokens (prompt_length) does not hold {what}. {advice}"
        return
    length = pins.pinned.get("max_length", 0 if pins.job.optimize == "max-length" else DEFAULT_MAX_LENGTH)
    if 0 < length < tokens:
        yield f"max_length {length} cuts {what}. Use {pins.way(max_length=tokens + DEFAULT_MAX_LENGTH)}."
