"""The TRL trainer of a probe, built by `probes.trainers`. TRL loads its models by path; its batches are the longest."""

import importlib.metadata
import os
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import set_seed

from planner.errors import InputError
from planner.jobs.settings import loading_arguments, trl_arguments
from planner.methods import release
from planner.models.shape import ModelShape
from probes.step.built_trainer import BuiltTrainer
from probes.task import Task
from probes.trainers import TRAINERS, TrainerInputs, build_trainer
from probes.worker.random_weights import made_up_processor, model_folder, tokenizer
from probes.worker.worst_batch import worst_case_datasets, worst_evaluation_rows


def trainer_of_task(task: Task, engine_arguments: dict[str, Any]) -> BuiltTrainer:
    """Build the task's trainer, ready to train. With random weights, call it inside `random_weights()`.

    `engine_arguments`: training arguments that say where the vLLM server is.

    Raises:
        InputError: the trainer cannot run the candidate, or not in the processes that were launched.
    """
    candidate = task.candidate
    last, installed = candidate.method_row.last_trl, importlib.metadata.version("trl")
    if last != "current" and release(installed) > release(last):
        raise InputError(f"TRL {installed} has no trainer for {candidate.method}: probe it where TRL {last} is.")
    if PartialState().num_processes != candidate.num_processes:
        launched = PartialState().num_processes
        raise InputError(f"The candidate has num_processes {candidate.num_processes}, and {launched} were launched.")
    row = candidate.quantization_row
    if row.published and not row.made_up and task.weights == "random":
        raise InputError(
            f"Weights of {candidate.quantization} are published so and cannot be made up: probe with --weights hub."
        )
    if candidate.prepare_model_for_kbit_training:
        raise InputError(
            "A probe gives the trainer a path, and no base that PEFT prepared (prepare_model_for_kbit_training): start "
            "the launch files instead."
        )
    # as `accelerate launch` does with accelerate.yaml (accelerate 1.15, utils/launch.py), for PPO's own Accelerator
    os.environ["ACCELERATE_MIXED_PRECISION"] = candidate.precision
    set_seed(task.seed)
    return build_trainer(trainer_inputs(task, engine_arguments))


def trainer_inputs(task: Task, engine_arguments: dict[str, Any]) -> TrainerInputs:
    """Return the inputs of a probe's trainer."""
    candidate = task.candidate
    teacher = candidate.teacher_model or candidate.model
    processes = candidate.images_per_row > 0 and TRAINERS[candidate.method].processes_images
    return TrainerInputs(
        candidate=candidate,
        model=model_path(task, candidate.model),
        teacher=model_path(task, teacher) if candidate.method_row.teacher else None,
        reward_model=None if candidate.reward_model is None else model_path(task, candidate.reward_model),
        model_init_kwargs=model_init_kwargs(task),
        tokenizer=tokenizer(candidate.model.vocab_size),
        teacher_tokenizer=tokenizer(teacher.vocab_size) if candidate.use_uld_loss else None,
        processor=made_up_processor(candidate.model, models_folder(task)) if processes else None,
        build_datasets=lambda row: worst_case_datasets(task, row),
        run_arguments=run_arguments(task) | engine_arguments,
    )


def model_path(task: Task, shape: ModelShape) -> str:
    """Return the id or path to load a model from; for random weights each process writes a folder of its own."""
    if task.weights == "hub":
        return shape.id
    return str(model_folder(shape, models_folder(task)))


def models_folder(task: Task) -> Path:
    """Return the folder in which this process writes the folders of its models."""
    return Path(task.folder) / "models" / str(PartialState().process_index)


def model_init_kwargs(task: Task) -> dict[str, Any]:
    """Return the `model_init_kwargs` of TRL's scripts (trl 1.16, scripts/sft.py), but for the quantization.

    Several processes, and DeepSpeed on one, have `device_map` None, which stable trainers set themselves; CPO, ORPO and
    online DPO take "auto" if it is not there, which Transformers refuses under ZeRO-3 (trl 1.16,
    experimental/cpo/cpo_trainer.py).
    """
    candidate = task.candidate
    attention = trl_arguments(candidate).get("attn_implementation")  # None, as of a file that names none: the default
    settings: dict[str, Any] = {"dtype": candidate.dtype, "attn_implementation": attention}
    settings |= loading_arguments(candidate)
    state = PartialState()
    if state.distributed_type != DistributedType.NO:
        settings["device_map"] = None
    elif task.device != "cpu":
        settings["device_map"] = {"": state.local_process_index}  # "auto" would leave on the host what does not fit
    return settings


def run_arguments(task: Task) -> dict[str, Any]:
    """Return the arguments of the run, not of the candidate: the number of steps, the folder, the order of rows."""
    # The run from the checkpoint needs the `save_steps` of the run that saved it, which was one step shorter.
    save_steps = task.steps if task.save else task.steps - 1
    return {
        "output_dir": str(Path(task.folder) / "checkpoints"),
        "max_steps": task.steps,
        "save_strategy": "steps" if task.save else "no",
        "save_steps": save_steps,
        "eval_strategy": "no",  # evaluated after the last step
        "per_device_eval_batch_size": worst_evaluation_rows(task.candidate),
        "train_sampling_strategy": "sequential",  # keeps the short row the last of its batch
        "shuffle_dataset": False,  # the same, in GRPO and RLOO
        "seed": task.seed,
        "use_cpu": task.device == "cpu",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
    }
