"""Record what DeepSpeed's coordinator gathers in a real training step of a tiny model under ZeRO-3, on the CPU.

    python tests/coordinator_worker.py CASES.json FOLDER

One process is enough: the coordinator counts the same. Each case runs in a forked process and writes
FOLDER/<name>.json: of the last step, for every call its letter (F forward, R forward in the backward pass, B backward,
small letters their ends), and the elements that are gathered, and on their way, after it.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from peft import LoraConfig

from probes.step.built_trainer import WORD
from probes.worker.cpu_accelerators import cpu_accelerators
from probes.worker.random_weights import tokenizer

STEPS = 4  # the first records the calls, the third and fourth are alike
ROWS, TOKENS = 2, 16
PRIVATE = "_PartitionedParameterCoordinator__"

Calls = list[tuple[str, int, int]]


def watch(steps: list[Calls]) -> None:
    """Record every call of the coordinator, by step."""
    fetch, release, reset = (
        PartitionedParameterCoordinator.fetch_sub_module,
        PartitionedParameterCoordinator.release_sub_module,
        PartitionedParameterCoordinator.reset_step,
    )

    def look(coordinator: Any, letter: str) -> None:
        waiting = sum(param.ds_numel for param in getattr(coordinator, PRIVATE + "inflight_param_registry"))
        steps[-1].append((letter, getattr(coordinator, PRIVATE + "n_available_params"), waiting))

    def fetched(self: Any, module: Any, forward: bool) -> None:
        fetch(self, module, forward)
        again = torch._C._current_graph_task_id() != -1
        look(self, ("R" if again else "F") if forward else "B")

    def released(self: Any, module: Any, forward: bool = False) -> None:
        release(self, module, forward=forward)
        look(self, "f" if forward else "b")

    def began(self: Any) -> None:
        reset(self)
        steps.append([])

    PartitionedParameterCoordinator.fetch_sub_module = fetched
    PartitionedParameterCoordinator.release_sub_module = released
    PartitionedParameterCoordinator.reset_step = began


def arguments(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    zero = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 100_000}
    return {
        "output_dir": str(folder / case["name"]),
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": case["checkpointing"] != "none",
        "gradient_checkpointing_kwargs": {"use_reentrant": case["checkpointing"] == "reentrant"},
        "bf16": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "max_length": TOKENS,
        "deepspeed": {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "bf16": {"enabled": True},
            "zero_optimization": {**zero, **case["limits"]},
        },
    }


def trainer_of(case: dict[str, Any], folder: Path) -> Any:
    fields = dict(case["config"])
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields, num_labels=1, pad_token_id=0)
    rows, reward = STEPS * ROWS, case["method"] == "reward"
    task = "SEQ_CLS" if reward else "CAUSAL_LM"
    adapters = LoraConfig(r=case["lora_r"], target_modules="all-linear", task_type=task) if case["lora_r"] else None
    if reward:
        text = " ".join(["a"] * 8)
        return trl.RewardTrainer(
            model=transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16),
            args=trl.RewardConfig(**arguments(case, folder)),
            train_dataset=datasets.Dataset.from_dict({"chosen": [text] * rows, "rejected": [text] * rows}),
            processing_class=tokenizer(config.vocab_size),
            peft_config=adapters,
        )
    if case["method"] in ("dpo", "online-dpo"):
        return preference_trainer(case, folder, adapters)
    ids = [[WORD] * TOKENS] * rows
    return trl.SFTTrainer(
        model=transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
        args=trl.SFTConfig(dataset_kwargs={"skip_prepare_dataset": True}, **arguments(case, folder)),
        train_dataset=datasets.Dataset.from_dict({"input_ids": ids, "labels": ids}),
        processing_class=tokenizer(config.vocab_size),
        peft_config=adapters,
    )


def preference_trainer(case: dict[str, Any], folder: Path, adapters: LoraConfig) -> Any:
    """DPO or online DPO, whose reference is the policy without its adapters, or precomputed."""
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    fields = dict(case["config"])
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields, pad_token_id=0)
    text, rows, given = "a a a a", STEPS * ROWS, arguments(case, folder)
    settings: dict[str, Any] = {
        "model": transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
        "processing_class": tokenizer(config.vocab_size),
        "peft_config": adapters,
    }
    if case["method"] == "dpo":
        data = {"prompt": [text] * rows, "chosen": [text] * rows, "rejected": [text] * rows}
        chosen = trl.DPOConfig(precompute_ref_log_probs=case["precomputed"], **given)
        return trl.DPOTrainer(args=chosen, train_dataset=datasets.Dataset.from_dict(data), **settings)
    return OnlineDPOTrainer(
        args=OnlineDPOConfig(max_new_tokens=4, ds3_gather_for_generation=False, **given),
        reward_funcs=lambda completions, **_: [0.5] * len(completions),
        train_dataset=datasets.Dataset.from_dict({"prompt": [text] * rows}),
        **settings,
    )


def run(case: dict[str, Any], folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    steps: list[Calls] = [[]]  # generation may come before the first step
    watch(steps)
    with cpu_accelerators():
        trainer_of(case, folder).train()
    (folder / f"{case['name']}.json").write_text(json.dumps(steps[-1]))


def main(cases: list[dict[str, Any]], folder: Path) -> int:
    gc.freeze()  # the imports, which each trainer's gc.collect would go through
    failed = 0
    for case in cases:
        child = os.fork()
        if child == 0:
            try:
                run(case, folder)
                code = 0
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        failed += os.waitpid(child, 0)[1] != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])))
