"""Record the bytes that each of several CPU processes keeps under ZeRO and FSDP2 between a TRL trainer's steps.

    python tests/sharded_worker.py CASES.json FOLDER                       every case, in forked processes
    accelerate launch ... tests/sharded_worker.py CASES.json FOLDER        the first case, in accelerate's processes

The forked processes share one import of the libraries. A case is a candidate and the environment that
`accelerate launch` gives its processes. Each rank writes FOLDER/<name>.<rank>.json: for each part the bytes of every
distinct storage.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from accelerate.utils import DistributedType
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from peft import LoraConfig
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensor
from trl import get_quantization_config

from planner.candidate import Candidate
from planner.measurements.documents import candidate_of_report
from probes.step.built_trainer import WORD
from probes.trainers import model_config
from probes.worker.cpu_accelerators import cpu_accelerators
from probes.worker.random_weights import tokenizer

STEPS = 2
SCALARS_BYTES = 512  # losses, norms of gradients, the rotary frequencies
LIMIT_SECONDS = 120  # for one case, which takes 3 s on an idle core

Storages = dict[int, int]  # address -> bytes


def storages(tensors: Iterable[torch.Tensor | None]) -> Storages:
    """The distinct storages of the tensors; of a DTensor its local part."""
    found: Storages = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if local is None or local.device.type == "meta" or isinstance(local, FakeTensor):
            continue
        memory = local.untyped_storage()
        if memory.nbytes():
            found[memory.data_ptr()] = memory.nbytes()
    return found


def numbers() -> Storages:
    """Every storage that Python can reach and that holds more floating-point numbers than a few scalars."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.is_floating_point()]
    return {address: size for address, size in storages(tensors).items() if size > SCALARS_BYTES}


class Watch(transformers.TrainerCallback):  # type: ignore[misc]
    """Record the storages before and after every optimizer step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.kept_gradients: Storages = {}  # of ZeRO-3, whose buffer stays
        self.parts: dict[str, list[int]] = {}

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if (
            self.trainer.accelerator.distributed_type != DistributedType.DEEPSPEED
        ):  # DeepSpeed steps inside its backward
            self.look("gradients", storages(parameter.grad for parameter in self.trainer.model.parameters()))

    def backward_ends(self, optimizer: Any) -> None:
        """Record the gradients before the last reduction, without those that lie in the bucket."""
        held = [parameter.grad for parameter in self.trainer.model.parameters()]
        held += [
            optimizer.grads_in_partition,
            *(gradient for group in optimizer.all_grad_tensors.values() for gradient in group or ()),
        ]
        found = storages(held)
        for address in storages(buffer for bucket in optimizer.ipg_buckets.values() for buffer in bucket.buffer):
            found.pop(address, None)
        self.look("gradients_in_backward", found)

    def before_deepspeed_steps(self, optimizer: Any) -> None:
        held = [parameter.grad for parameter in self.trainer.model.parameters()]
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            held.append(optimizer.grad_partitions_flat_buffer)
            self.kept_gradients = storages(held)
        else:
            held += [gradient for group in optimizer.averaged_gradients.values() for gradient in group or ()]
        self.look("gradients", storages(held))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        model, optimizer = self.trainer.model, self.trainer.optimizer
        inner = (
            optimizer.optimizer
            if self.trainer.accelerator.distributed_type != DistributedType.DEEPSPEED
            else self.trainer.model_wrapped.optimizer
        )
        parameters = list(model.parameters())
        trained = storages(
            each for one in parameters if one.requires_grad for each in (one.data, getattr(one, "ds_tensor", None))
        )
        frozen = storages(
            each for one in parameters if not one.requires_grad for each in (one.data, getattr(one, "ds_tensor", None))
        )
        frozen |= storages(quantization_scales(model))
        masters = [
            *getattr(inner, "single_partition_of_fp32_groups", ()),
            *getattr(inner, "fp32_partitioned_groups_flat", ()),
        ]
        state = getattr(inner, "optimizer", inner).state
        states = storages(
            [*masters, *(value for row in state.values() for value in row.values() if isinstance(value, torch.Tensor))]
        )
        buckets = storages(
            bucket.buffer
            for bucket in getattr(inner, "ipg_buckets", {}).values()
            if isinstance(getattr(bucket, "buffer", None), torch.Tensor)
        )
        others = {
            address: size
            for address, size in numbers().items()
            if address not in trained | frozen | states | buckets | self.kept_gradients
        }
        for name, found in {
            "trained": trained,
            "frozen": frozen,
            "optimizer_states": states,
            "buckets": buckets,
            "others": others,
        }.items():
            self.look(name, found)

    def look(self, name: str, found: Storages) -> None:
        self.parts[name] = sorted(found.values(), reverse=True)


def built(candidate: Candidate, folder: Path) -> Any:
    fields = dict(candidate.model.config)
    config = transformers.AutoConfig.for_model(str(fields.pop("model_type")), **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, candidate.dtype))
    if candidate.quantization == "none":
        return model
    config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})  # save_pretrained: rank 0 only
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, candidate.dtype),
        quantization_config=get_quantization_config(model_config(candidate)),
    )


def quantization_scales(model: torch.nn.Module) -> list[torch.Tensor]:
    """The tensors beside 4-bit weights: absmax and the table of values."""
    states = [module.quant_state for module in model.modules() if getattr(module, "quant_state", None) is not None]
    return [value for state in states for value in (state.absmax, state.code)]


def trainer_of(candidate: Candidate, folder: Path) -> Any:
    ids = [WORD] * candidate.max_length
    rows = [ids] * (STEPS * candidate.effective_batch_size)
    args = trl.SFTConfig(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=candidate.per_device_train_batch_size,
        gradient_accumulation_steps=candidate.gradient_accumulation_steps,
        gradient_checkpointing=candidate.gradient_checkpointing, bf16=candidate.precision == "bf16",
        optim=candidate.optim, max_length=candidate.max_length, dataset_kwargs={"skip_prepare_dataset": True},
        report_to="none", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    adapters = (
        LoraConfig(r=candidate.lora_r, target_modules="all-linear", task_type="CAUSAL_LM")
        if candidate.tuning == "lora"
        else None
    )
    data = datasets.Dataset.from_dict({"input_ids": rows, "labels": rows})
    model = built(candidate, folder / f"model {os.environ['RANK']}")
    return trl.SFTTrainer(
        model=model,
        args=args,
        train_dataset=data,
        processing_class=tokenizer(candidate.model.vocab_size),
        peft_config=adapters,
    )


def run(candidate: Candidate, folder: Path) -> dict[str, list[int]]:
    with cpu_accelerators():
        trainer = trainer_of(candidate, folder)
        watch = watch_of(trainer)
        trainer.train()
    return watch.parts


def watch_of(trainer: Any) -> Watch:
    """The record of a trainer whose training has not begun."""
    watch = Watch(trainer)
    trainer.add_callback(watch)
    for optimizer in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer.step = watched(optimizer.step, watch.before_deepspeed_steps)
    reduce_last = DeepSpeedZeroOptimizer.independent_gradient_partition_epilogue
    DeepSpeedZeroOptimizer.independent_gradient_partition_epilogue = watched(reduce_last, watch.backward_ends)
    return watch


def watched(method: Callable[..., Any], look: Callable[[Any], None]) -> Callable[..., Any]:
    def look_and_call(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        look(optimizer)
        return method(optimizer, *args, **kwargs)

    return look_and_call


def run_case(case: dict[str, Any], folder: Path) -> None:
    signal.alarm(LIMIT_SECONDS)  # torchrun's processes have their own session and outlive the one that started them
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    parts = run(candidate_of_report(case["candidate"]), folder)
    (folder / f"{case['name']}.{rank}.json").write_text(json.dumps(parts))
    torch.distributed.destroy_process_group()


def forked(case: dict[str, Any], folder: Path) -> list[int]:
    """Fork the processes of a case, with a free port."""
    processes = candidate_of_report(case["candidate"]).num_processes
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            world = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": processes,
                "LOCAL_WORLD_SIZE": processes,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            os.environ.update(case["environment"] | {name: str(value) for name, value in world.items()})
            code = 1
            try:
                run_case(case, folder)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return children


def wait(children: list[int]) -> bool:
    """Wait for the processes; return True if all succeeded. If one fails or lasts too long, end the others."""
    end, left = time.monotonic() + LIMIT_SECONDS, set(children)
    well = True
    while left and well and time.monotonic() < end:
        for child in tuple(left):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                left.remove(child)
                well = well and status == 0
        time.sleep(0.05)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return well and not left


def main(cases: list[dict[str, Any]], folder: Path) -> int:
    if "RANK" in os.environ:
        run_case(cases[0], folder)
        return 0
    gc.freeze()
    return 0 if all(wait(forked(case, folder)) for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])))
