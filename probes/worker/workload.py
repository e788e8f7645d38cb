"""The real TRL trainer of a candidate, as a script of TRL would make it."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate import PartialState
from transformers import PreTrainedTokenizerFast, set_seed
from trl import ModelConfig, get_peft_config, get_quantization_config

from planner.candidate import Candidate
from planner.errors import InputError
from planner.jobs.settings import settings_of
from planner.methods import MethodName
from planner.models.shape import ModelShape
from probes.step.rollouts import prompts_differ
from probes.step.stage import DTYPES, Stage
from probes.task import Task
from probes.worker.random_weights import model_folder, tokenizer
from probes.worker.worst_batch import Text, data, evaluation_rows, pair, prompt

# Settings that whoever launches the worker reads, those that only say what data is like, and names for what is passed otherwise.
ELSEWHERE = frozenset({
    "model_name_or_path", "reward_model_name_or_path", "teacher_model_name_or_path", "method", "trl_version", "distributed_type", "zero_stage", "num_processes",
    "num_machines", "fsdp_version", "fsdp_offload_params", "offload_optimizer_device", "offload_param_device", "environment", "prompt_length", "padded",
    "vllm_data_parallel_size", "autocast_adapter_dtype", "quant_method",
})  # fmt: skip
DEFAULT_TARGETS = ("default",)  # the linear layers that PEFT chooses by itself


@dataclass(frozen=True, kw_only=True, slots=True)
class _Workload:
    """What all trainers of one task are made from."""

    task: Task
    words: PreTrainedTokenizerFast
    engine: dict[str, Any]  # settings that say where the vLLM engine is

    @property
    def candidate(self) -> Candidate:
        return self.task.candidate

    @property
    def model(self) -> str:
        return self.path(self.candidate.model)

    def path(self, shape: ModelShape) -> str:
        return model_path(self.task, shape)

    @property
    def rewards(self) -> list[Any]:
        return [spread] if self.candidate.reward_model is None else [self.path(self.candidate.reward_model)]

    @property
    def reward_words(self) -> list[PreTrainedTokenizerFast] | None:
        return None if self.candidate.reward_model is None else [self.words]


def model_path(task: Task, shape: ModelShape) -> str:
    """Where a trainer loads a model from."""
    return (
        shape.id
        if task.weights == "hub"
        else str(model_folder(shape, Path(task.folder) / "models" / str(PartialState().process_index)))
    )


def workload(task: Task, engine: dict[str, Any]) -> Stage:
    """A trainer ready to train. What it loads, and how, is TRL's own doing; random weights need `random_weights()` around it.

    Raises:
        InputError: the candidate has a setting that the trainer cannot be given.
    """
    candidate = task.candidate
    if candidate.method not in TRAINERS:
        raise InputError(f"The installed TRL has no {candidate.method} trainer to run.")
    if PartialState().num_processes != candidate.num_processes:
        raise InputError(
            f"The candidate has num_processes {candidate.num_processes}, and {PartialState().num_processes} were launched."
        )
    if candidate.quantization in ("gptq", "awq", "fp8", "mxfp4") and task.weights == "random":
        raise InputError(
            f"Weights of {candidate.quantization} are published so and cannot be made up: probe with --weights hub."
        )
    set_seed(task.seed)
    stage = TRAINERS[candidate.method](_Workload(task=task, words=tokenizer(candidate.model.vocab_size), engine=engine))
    if candidate.tuning == "lora" and not candidate.autocast_adapter_dtype:
        adapters_as_the_base(stage.models[0], DTYPES[candidate.dtype])
    return stage


def adapters_as_the_base(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """PEFT's `autocast_adapter_dtype=False`, which TRL passes on under ZeRO-3 only."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)


def spread(completions: list[Any], **_: Any) -> list[float]:
    """A reward for every completion, none like another, so that every group has an advantage."""
    return [float(index) for index in range(len(completions))]


# -- settings ----------------------------------------------------------------------------------------------------------


def arguments(load: _Workload, config: Any, **more: Any) -> Any:
    """The training arguments of a method's own config class, from the candidate's settings under their own names."""
    candidate, known = load.candidate, {field.name for field in fields(config)}
    settings = {name: value for name, value in settings_of(candidate).items() if name not in ELSEWHERE}
    if candidate.method_row.needs_beta and not candidate.beta:
        settings.pop("beta", None)
    of_models = {field.name for field in fields(ModelConfig)}
    lost = {name for name, value in settings.items() if value} - known - of_models
    if lost:
        raise InputError(f"{config.__name__} of the installed TRL has no setting {', '.join(sorted(lost))}.")
    ours = run_arguments(load.task) | load.engine | {"model_init_kwargs": model_arguments(load)} | more
    return config(
        **{name: value for name, value in settings.items() if name in known}
        | {name: value for name, value in ours.items() if name in known}
    )


def run_arguments(task: Task) -> dict[str, Any]:
    """What is no candidate's business: how many steps, where files go."""
    candidate = task.candidate
    return {
        "output_dir": str(Path(task.folder) / "checkpoints"),
        "max_steps": task.steps,
        "save_strategy": "steps" if task.save else "no",
        "save_steps": task.steps
        if task.save
        else task.steps - 1,  # a run that resumes says what the one that saved has said
        "per_device_eval_batch_size": evaluation_rows(candidate),
        "train_sampling_strategy": "sequential",  # of one batch's rows the last is the short one
        "shuffle_dataset": False,
        "seed": task.seed,
        "use_cpu": task.device == "cpu",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
    }


def model_arguments(load: _Workload) -> dict[str, Any]:
    """What TRL's scripts put into `model_init_kwargs` (trl 1.16, scripts/sft.py)."""
    candidate = load.candidate
    found: dict[str, Any] = {"dtype": candidate.dtype}
    if candidate.attn_implementation != "sdpa":  # sdpa where the model has it, else eager: what nobody asks for
        found["attn_implementation"] = candidate.attn_implementation
    state = PartialState()
    if load.task.device == "cuda" and state.num_processes == 1:
        found["device_map"] = {"": state.local_process_index}  # "auto" would leave on the host what does not fit
    if candidate.method_row.experimental and quantization(candidate) is not None:
        found["quantization_config"] = quantization(candidate)
    return found


def model_config(candidate: Candidate) -> ModelConfig:
    """TRL's own description of how the model is loaded and which adapters it gets."""
    known = {field.name for field in fields(ModelConfig)}
    settings = {name: value for name, value in settings_of(candidate).items() if name in known}
    made = ModelConfig(**settings)
    made.lora_task_type = "SEQ_CLS" if candidate.method == "reward" else "CAUSAL_LM"
    if candidate.lora_target_modules == DEFAULT_TARGETS:
        made.lora_target_modules = None
    return made


def quantization(candidate: Candidate) -> Any:
    return get_quantization_config(model_config(candidate))


def common(load: _Workload, config: Any, **more: Any) -> dict[str, Any]:
    """What every trainer's constructor takes."""
    candidate = load.candidate
    made = {
        "model": load.model, "args": arguments(load, config, **more), "processing_class": load.words, "peft_config": get_peft_config(model_config(candidate)),
    }  # fmt: skip
    return made | ({"quantization_config": quantization(candidate)} if not candidate.method_row.experimental else {})


# -- trainers ----------------------------------------------------------------------------------------------------------


def _stage(trainer: Any, *others: Any) -> Stage:
    return Stage(
        trainer=trainer, models=(trainer.model, *(model for model in others if isinstance(model, torch.nn.Module)))
    )


def sft(load: _Workload) -> Stage:
    candidate = load.candidate
    unbounded = (
        {"max_length": None} if candidate.padding_free and not candidate.packing else {}
    )  # trl 1.16, sft_trainer.py:999
    padded = not candidate.flattened and candidate.rows > 1  # a row alone has nothing to be padded to
    rows = data(load.task, lambda text, _, short: {"input_ids": text.ids(candidate.max_length - short * padded)})
    return _stage(trl.SFTTrainer(**common(load, trl.SFTConfig, **unbounded), **rows))


def dpo(load: _Workload) -> Stage:
    trainer = trl.DPOTrainer(**common(load, trl.DPOConfig), **data(load.task, pair(load.candidate)))
    return _stage(trainer, trainer.ref_model)


def kto(load: _Workload) -> Stage:
    length = load.candidate.max_length - 2
    rows = data(
        load.task,
        lambda text, index, short: {
            "prompt": text(1),
            "completion": " " + text(length - short),
            "label": index % 2 == 0,
        },
    )
    trainer = trl.KTOTrainer(**common(load, trl.KTOConfig), **rows)
    return _stage(trainer, trainer.ref_model)


def reward(load: _Workload) -> Stage:
    length = load.candidate.max_length
    rows = data(
        load.task, lambda text, _, short: {"chosen_ids": text.ids(length), "rejected_ids": text.ids(length - short)}
    )
    return _stage(trl.RewardTrainer(**common(load, trl.RewardConfig), **rows))


def grpo(load: _Workload) -> Stage:
    trainer = trl.GRPOTrainer(
        **common(load, trl.GRPOConfig, generation_kwargs=unending(load.candidate)), **data(load.task, prompt(load.candidate)),
        reward_funcs=load.rewards, reward_processing_classes=load.reward_words,
    )  # fmt: skip
    return _stage(trainer, trainer.ref_model, *trainer.reward_funcs)


def rloo(load: _Workload) -> Stage:
    trainer = trl.RLOOTrainer(
        **common(load, trl.RLOOConfig, generation_kwargs=unending(load.candidate)), **data(load.task, prompt(load.candidate)),
        reward_funcs=load.rewards, reward_processing_classes=load.reward_words,
    )  # fmt: skip
    return _stage(trainer, trainer.ref_model, *trainer.reward_funcs)


def distillation(load: _Workload) -> Stage:
    more = {"generation_kwargs": unending(load.candidate), "teacher_model_init_kwargs": _teacher_arguments(load)}
    trainer = trl.DistillationTrainer(
        **common(load, trl.DistillationConfig, **more),
        **data(load.task, prompt(load.candidate)),
        teacher_model=_teacher(load),
    )
    return _stage(trainer, trainer.teacher_model)


def online_dpo(load: _Workload) -> Stage:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    candidate = load.candidate
    whole = candidate.prompt_length + candidate.max_completion_length
    trainer = OnlineDPOTrainer(
        **common(load, OnlineDPOConfig, generation_kwargs=unending(candidate), max_length=max(candidate.max_length, whole)),
        **data(load.task, prompt(candidate)), reward_funcs=load.rewards, reward_processing_classes=load.reward_words,
    )  # fmt: skip
    return _stage(trainer, trainer.ref_model, *trainer.reward_funcs)


def cpo(load: _Workload) -> Stage:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return _stage(CPOTrainer(**common(load, CPOConfig), **data(load.task, pair(load.candidate))))


def orpo(load: _Workload) -> Stage:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    return _stage(ORPOTrainer(**common(load, ORPOConfig), **data(load.task, pair(load.candidate))))


def gkd(load: _Workload) -> Stage:
    """Every step on the student's own completions (`lmbda` 1), which is the heavier of GKD's two kinds of step."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    candidate = load.candidate
    completion = candidate.row_tokens - candidate.prompt_length

    def row(text: Text, index: int, _: int) -> dict[str, Any]:
        asked = text.ids(candidate.prompt_length - int(prompts_differ(candidate) and index % 2))
        mask = [0] * len(asked) + [1] * completion
        return {
            "prompt": " ".join(f"w{token}" for token in asked),
            "input_ids": asked + text.ids(completion),
            "completion_mask": mask,
        }

    trainer = GKDTrainer(
        **common(load, GKDConfig, lmbda=1.0, teacher_model_init_kwargs=_teacher_arguments(load)),
        **data(load.task, row),
        teacher_model=_teacher(load),
    )
    trainer.generation_config.eos_token_id = unending(candidate)[
        "eos_token_id"
    ]  # GKD's config has no generation_kwargs
    return _stage(trainer, trainer.teacher_model)


def unending(candidate: Candidate) -> dict[str, Any]:
    """What lets every completion come to its full length: of `generate` the end token is one that is never sampled, vLLM ignores it.

    `min_new_tokens` would do as well, but keeps another copy of the logits while it forbids the end.
    """
    return {"eos_token_id": candidate.model.vocab_size} if candidate.vllm == "off" else {"ignore_eos": True}


def _teacher(load: _Workload) -> str:
    return load.path(load.candidate.teacher_model or load.candidate.model)


def _teacher_arguments(load: _Workload) -> dict[str, Any]:
    return {name: value for name, value in model_arguments(load).items() if name != "quantization_config"}


TRAINERS: dict[MethodName, Callable[[_Workload], Stage]] = {
    "sft": sft, "dpo": dpo, "kto": kto, "reward": reward, "grpo": grpo, "rloo": rloo, "distillation": distillation, "online-dpo": online_dpo, "cpo": cpo,
    "orpo": orpo, "gkd": gkd,
}  # fmt: skip
