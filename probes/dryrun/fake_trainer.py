"""The TRL trainer of each method, ready to train models without weights on data of the candidate's longest rows."""

import tempfile
from collections.abc import Callable
from typing import Any

import datasets
import torch
import trl
from peft import LoraConfig

from planner.candidate import Candidate
from planner.methods import MethodName
from probes.dryrun.fake_models import Device, policy, references, reward_tokenizer, rewards, teacher, tokenizer
from probes.step.stage import WORD, Stage

STEPS = 2  # the first step makes the optimizer's states, the second runs beside them


def common_settings(candidate: Candidate) -> dict[str, Any]:
    """The training arguments that every method has, named as the candidate names them."""
    checkpointing: dict[str, Any] = {}
    if candidate.checkpoint_every_n_layers > 1:
        checkpointing["every_n_layers"] = candidate.checkpoint_every_n_layers
    if candidate.checkpoint_offload:
        checkpointing["offload"] = True
    return {
        "output_dir": tempfile.gettempdir(),
        "per_device_train_batch_size": candidate.per_device_train_batch_size,
        "gradient_accumulation_steps": candidate.gradient_accumulation_steps,
        "max_steps": STEPS,
        "gradient_checkpointing": candidate.gradient_checkpointing,
        "gradient_checkpointing_kwargs": checkpointing or None,
        "bf16": candidate.precision == "bf16",
        "fp16": candidate.precision == "fp16",
        "optim": candidate.optim,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def lora(candidate: Candidate) -> LoraConfig | None:
    if candidate.tuning != "lora":
        return None
    targets = candidate.lora_target_modules
    return LoraConfig(
        r=candidate.lora_r,
        target_modules="all-linear" if targets == ("all-linear",) else list(targets),
        lora_dropout=candidate.lora_dropout,
        task_type="SEQ_CLS" if candidate.method == "reward" else "CAUSAL_LM",
    )


def rows(candidate: Candidate, columns: dict[str, Any]) -> datasets.Dataset:
    """A dataset of equal rows, enough for all steps."""
    count = STEPS * candidate.per_device_train_batch_size * candidate.gradient_accumulation_steps
    return datasets.Dataset.from_dict({name: [value] * count for name, value in columns.items()})


def _stage(trainer: Any, *others: torch.nn.Module | None) -> Stage:
    return Stage(trainer=trainer, models=(trainer.model, *(model for model in others if model is not None)))


def sft(candidate: Candidate, device: Device) -> Stage:
    ids = [WORD] * candidate.max_length
    args = trl.SFTConfig(
        **common_settings(candidate), max_length=None if candidate.padding_free and not candidate.packing else candidate.max_length,
        packing=candidate.packing, padding_free=candidate.padding_free,
        activation_offloading=candidate.activation_offloading, dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=policy(candidate, device), args=args, train_dataset=rows(candidate, {"input_ids": ids, "labels": ids}), processing_class=tokenizer(),
        peft_config=lora(candidate),
    )  # fmt: skip
    return _stage(trainer)


def dpo(candidate: Candidate, device: Device) -> Stage:
    """The prompt is one word, so that all the rest of the row is scored."""
    data = rows(
        candidate,
        {"prompt": "word", "chosen": _words(candidate.max_length - 2), "rejected": _words(candidate.max_length - 2)},
    )
    args = trl.DPOConfig(
        **common_settings(candidate), max_length=candidate.max_length, beta=_beta(candidate),
        precompute_ref_log_probs=candidate.precompute_ref_log_probs, activation_offloading=candidate.activation_offloading,
        padding_free=candidate.padding_free,
    )  # fmt: skip
    with references(candidate, device, "dpo_trainer"):
        trainer = trl.DPOTrainer(
            model=policy(candidate, device),
            args=args,
            train_dataset=data,
            processing_class=tokenizer(),
            peft_config=lora(candidate),
        )
    return _stage(trainer, trainer.ref_model)


def kto(candidate: Candidate, device: Device) -> Stage:
    data = rows(candidate, {"prompt": "word", "completion": _words(candidate.max_length - 2)})
    data = data.add_column("label", [index % 2 == 0 for index in range(len(data))])
    args = trl.KTOConfig(
        **common_settings(candidate), max_length=candidate.max_length, beta=_beta(candidate),
        precompute_ref_log_probs=candidate.precompute_ref_log_probs, activation_offloading=candidate.activation_offloading,
    )  # fmt: skip
    with references(candidate, device, "kto_trainer"):
        trainer = trl.KTOTrainer(
            model=policy(candidate, device),
            args=args,
            train_dataset=data,
            processing_class=tokenizer(),
            peft_config=lora(candidate),
        )
    return _stage(trainer, trainer.ref_model)


def reward(candidate: Candidate, device: Device) -> Stage:
    ids = [WORD] * candidate.max_length
    args = trl.RewardConfig(
        **common_settings(candidate),
        max_length=candidate.max_length,
        activation_offloading=candidate.activation_offloading,
    )
    trainer = trl.RewardTrainer(
        model=policy(candidate, device), args=args, train_dataset=rows(candidate, {"chosen_ids": ids, "rejected_ids": ids}), processing_class=tokenizer(),
        peft_config=lora(candidate),
    )  # fmt: skip
    return _stage(trainer)


def _generating(candidate: Candidate) -> dict[str, Any]:
    return common_settings(candidate) | {
        "num_generations": candidate.num_generations,
        "max_completion_length": candidate.max_completion_length,
        "steps_per_generation": candidate.steps_per_generation,
        "num_iterations": candidate.num_iterations,
        "beta": candidate.beta,
    }


def grpo(candidate: Candidate, device: Device) -> Stage:
    return _in_groups(candidate, device, "grpo_trainer", trl.GRPOTrainer, trl.GRPOConfig)


def rloo(candidate: Candidate, device: Device) -> Stage:
    return _in_groups(candidate, device, "rloo_trainer", trl.RLOOTrainer, trl.RLOOConfig)


def _in_groups(candidate: Candidate, device: Device, module: str, trainer_class: Any, config: Any) -> Stage:
    """The trainers that compare the completions of one prompt."""
    with references(candidate, device, module):
        trainer = trainer_class(
            model=policy(candidate, device), reward_funcs=rewards(candidate, device), args=config(**_generating(candidate)),
            train_dataset=_prompts(candidate), processing_class=tokenizer(), reward_processing_classes=reward_tokenizer(candidate),
            peft_config=lora(candidate),
        )  # fmt: skip
    return _stage(
        trainer, trainer.ref_model, *(model for model in trainer.reward_funcs if isinstance(model, torch.nn.Module))
    )


def distillation(candidate: Candidate, device: Device) -> Stage:
    args = trl.DistillationConfig(**common_settings(candidate), max_completion_length=candidate.max_completion_length)
    trainer = trl.DistillationTrainer(
        model=policy(candidate, device), teacher_model=teacher(candidate, device), args=args, train_dataset=_prompts(candidate),
        processing_class=tokenizer(), peft_config=lora(candidate),
    )  # fmt: skip
    return _stage(trainer, trainer.teacher_model)


def online_dpo(candidate: Candidate, device: Device) -> Stage:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    args = OnlineDPOConfig(
        **common_settings(candidate), max_length=candidate.prompt_length + candidate.max_completion_length, max_new_tokens=candidate.max_completion_length,
        beta=_beta(candidate),
    )  # fmt: skip
    trainer = OnlineDPOTrainer(
        model=policy(candidate, device), reward_funcs=rewards(candidate, device), args=args, train_dataset=_prompts(candidate),
        processing_class=tokenizer(), reward_processing_classes=reward_tokenizer(candidate), peft_config=lora(candidate),
    )  # fmt: skip
    return _stage(
        trainer, trainer.ref_model, *(model for model in trainer.reward_funcs if isinstance(model, torch.nn.Module))
    )


def _pairs(candidate: Candidate) -> datasets.Dataset:
    """Rows of text that CPO and ORPO tokenize to `max_length`: they add an end token to the completion."""
    completion = _words(candidate.max_length - 2)
    return rows(candidate, {"prompt": "word", "chosen": completion, "rejected": completion})


def cpo(candidate: Candidate, device: Device) -> Stage:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    args = CPOConfig(**common_settings(candidate), max_length=candidate.max_length)
    trainer = CPOTrainer(
        model=policy(candidate, device),
        args=args,
        train_dataset=_pairs(candidate),
        processing_class=tokenizer(),
        peft_config=lora(candidate),
    )
    return _stage(trainer)


def orpo(candidate: Candidate, device: Device) -> Stage:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    args = ORPOConfig(**common_settings(candidate), max_length=candidate.max_length)
    trainer = ORPOTrainer(
        model=policy(candidate, device),
        args=args,
        train_dataset=_pairs(candidate),
        processing_class=tokenizer(),
        peft_config=lora(candidate),
    )
    return _stage(trainer)


def gkd(candidate: Candidate, device: Device) -> Stage:
    """Every step on the student's own completions (`lmbda` 1), which is the heavier of GKD's two kinds of step."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    args = GKDConfig(
        **common_settings(candidate),
        max_length=candidate.row_tokens,
        max_new_tokens=candidate.max_completion_length,
        lmbda=1.0,
    )
    prompt, row = candidate.prompt_length, candidate.row_tokens

    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        count = len(examples)
        ids = torch.full((count, row), WORD)
        labels = ids.clone()
        labels[:, :prompt] = -100
        return {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels,
            "prompts": ids[:, :prompt].clone(), "prompt_attention_mask": torch.ones_like(ids[:, :prompt]),
            "byte_offsets": torch.zeros(count, row, 2, dtype=torch.int64),  # trl 1.16, experimental/utils.py:411
        }  # fmt: skip

    trainer = GKDTrainer(
        model=policy(candidate, device), teacher_model=teacher(candidate, device), args=args, data_collator=collate,
        train_dataset=rows(candidate, {"input_ids": [WORD]}), processing_class=tokenizer(), peft_config=lora(candidate),
    )  # fmt: skip
    return _stage(trainer, trainer.teacher_model)


def _beta(candidate: Candidate) -> Any:
    """Of methods that have no loss at a beta of 0, which here says that nobody has set it."""
    return candidate.beta or candidate.method_row.defaults["beta"]


def _words(count: int) -> str:
    return " word" * max(count, 1)


def _prompts(candidate: Candidate) -> datasets.Dataset:
    return rows(candidate, {"prompt": _words(candidate.prompt_length).strip()})


METHOD_STAGES: dict[MethodName, Callable[[Candidate, Device], Stage]] = {
    "sft": sft, "dpo": dpo, "kto": kto, "reward": reward, "grpo": grpo, "rloo": rloo, "distillation": distillation, "online-dpo": online_dpo, "cpo": cpo,
    "orpo": orpo, "gkd": gkd,
}  # fmt: skip
