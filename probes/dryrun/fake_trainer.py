"""The TRL trainer of a dry run: built by `probes.trainers` from models without weights and from rows that are all of
full length.
"""

import contextlib
import tempfile

import datasets
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.errors import DryRunUnsupported
from probes.dryrun.fake_models import Device, policy, reference_without_weights, reward_model, teacher, tokenizer
from probes.step.built_trainer import WORD, BuiltTrainer
from probes.trainers import TRAINERS, Row, TrainerInputs, build_trainer

STEPS = 2  # the first step makes the optimizer's states, the second runs beside them


def fake_trainer(candidate: Candidate, device: Device) -> BuiltTrainer:
    """The candidate's trainer, ready to train.

    Raises:
        InputError: the candidate has a setting that the trainer has no argument for.
        DryRunUnsupported: its rows have images that a processor reads.
    """
    # TRL's stable trainers load their reference model from the policy's path; experimental ones copy the policy.
    row = candidate.method_row
    loads_reference = row.reference != "never" and not row.experimental
    with reference_without_weights(candidate, device) if loads_reference else contextlib.nullcontext():
        return build_trainer(trainer_inputs(candidate, device))


def trainer_inputs(candidate: Candidate, device: Device) -> TrainerInputs:
    """The inputs of a dry run's trainer.

    They differ from a probe's (probes/worker/workload.py) where the comments say why.

    Raises:
        DryRunUnsupported: a processor has to read the sizes of images, which have no values here.
    """
    if candidate.images_per_row and TRAINERS[candidate.method].processes_images:
        raise DryRunUnsupported(
            f"A dry run of {candidate.method} has no images. Drop images_per_row, or probe with --device emulated."
        )
    return TrainerInputs(
        # no engine is started: its completions come from fake_engine.py; Liger's kernels from cuda/liger.py
        candidate=replace(candidate, vllm="off", use_liger_kernel=False),
        # modules on the meta device instead of paths: nothing is read from a disk or from the Hub
        model=policy(candidate, device),
        teacher=teacher(candidate, device) if candidate.method_row.teacher else None,
        reward_model=None
        if candidate.reward_model is None
        else reward_model(candidate.reward_model, candidate, device),
        model_init_kwargs=None,
        tokenizer=tokenizer(),
        build_datasets=lambda row: equal_datasets(candidate, row),
        run_arguments={
            "output_dir": tempfile.gettempdir(),
            "max_steps": STEPS,
            "eval_strategy": "no",  # evaluated after the last step
            "save_strategy": "no",
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,  # there is no GPU to pin for
        },
    )


def equal_datasets(candidate: Candidate, row: Row) -> dict[str, datasets.Dataset]:
    """The training rows of all steps; with an `eval_strategy` the rows of an evaluation, of one batch at least."""
    count = STEPS * candidate.per_device_train_batch_size * candidate.gradient_accumulation_steps
    rows = {"train_dataset": equal_rows(candidate, row, count)}
    if candidate.eval_strategy == "no":
        return rows
    evaluated = max(candidate.per_device_eval_batch_size, candidate.kept_eval_rows)
    return rows | {"eval_dataset": equal_rows(candidate, row, evaluated)}


def equal_rows(candidate: Candidate, row: Row, count: int) -> datasets.Dataset:
    """Rows of one word repeated, none of them short: padding is marked in the mask instead (probes/step/phases.py)."""
    return datasets.Dataset.from_list(
        [row(candidate, lambda length: [WORD] * max(length, 1), index, 0) for index in range(count)]
    )
