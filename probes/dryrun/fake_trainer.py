"""The TRL trainer of a dry run: built by `probes.trainers` from models without weights and from rows that are all of
full length.
"""

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import datasets
import torch

from planner.candidate import Candidate
from planner.models.architectures.vision import image_tower
from probes.dryrun.fake_models import Device, policy, reference_without_weights, reward_model, teacher, tokenizer
from probes.step.built_trainer import WORD, BuiltTrainer
from probes.trainers import Row, TrainerInputs, build_trainer

GEMMA3_IMAGE_TOKEN = 262144  # `image_token_index` of Gemma3Config
STEPS = 2  # the first step makes the optimizer's states, the second runs beside them


def fake_trainer(candidate: Candidate, device: Device) -> BuiltTrainer:
    """The candidate's trainer, ready to train.

    Raises:
        InputError: the candidate has a setting that the trainer has no argument for.
    """
    # TRL's stable trainers load their reference model from the policy's path; experimental ones copy the policy.
    row = candidate.method_row
    loads_reference = row.reference != "never" and not row.experimental
    with reference_without_weights(candidate, device) if loads_reference else contextlib.nullcontext():
        built = build_trainer(trainer_inputs(candidate, device))
    if candidate.images_per_row:
        built.trainer.data_collator = with_images(built.trainer.data_collator, candidate)
    return built


def trainer_inputs(candidate: Candidate, device: Device) -> TrainerInputs:
    """The inputs of a dry run's trainer.

    They differ from a probe's (probes/worker/workload.py) where the comments say why.
    """
    return TrainerInputs(
        # no engine is started: its completions come from fake_engine.py
        candidate=replace(candidate, vllm="off"),
        # modules on the meta device instead of paths: nothing is read from a disk or from the Hub
        model=policy(candidate, device),
        teacher=teacher(candidate, device) if candidate.method_row.teacher else None,
        reward_model=None
        if candidate.reward_model is None
        else reward_model(candidate.reward_model, candidate, device),
        model_init_kwargs=None,
        tokenizer=tokenizer(),
        build_datasets=lambda row: {"train_dataset": equal_rows(candidate, row)},
        run_arguments={
            "output_dir": tempfile.gettempdir(),
            "max_steps": STEPS,
            "save_strategy": "no",
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,  # there is no GPU to pin for
        },
    )


def with_images(collate: Callable[[Any], Any], candidate: Candidate) -> Callable[[Any], Any]:
    """Wrap the trainer's collator so that its batches of text hold images, too, at the beginning of each row.

    There is no processor without the model's files: the batch gets what Gemma3Processor returns for a row (transformers
    5.23, models/gemma3/processing_gemma3.py).
    """
    tower = image_tower(candidate.model)
    if tower is None:
        return collate
    image_token = candidate.model.config.get("image_token_index", GEMMA3_IMAGE_TOKEN)
    shown = candidate.images_per_row * tower.text_tokens

    def collate_images(examples: Any) -> Any:
        batch = collate(examples)
        tokens = batch["input_ids"]
        tokens[:, :shown] = image_token
        types = torch.zeros_like(tokens)
        types[:, :shown] = 1
        pixels = torch.zeros(len(tokens) * candidate.images_per_row, tower.channels, tower.side, tower.side)
        return {**batch, "token_type_ids": types, "pixel_values": pixels}

    return collate_images


def equal_rows(candidate: Candidate, row: Row) -> datasets.Dataset:
    """Rows of one word repeated, enough for all steps and none of them short: padding is marked in the mask instead
    (probes/step/phases.py).
    """
    count = STEPS * candidate.per_device_train_batch_size * candidate.gradient_accumulation_steps
    return datasets.Dataset.from_list(
        [row(candidate, lambda length: [WORD] * max(length, 1), index, 0) for index in range(count)]
    )
