"""The jobs of the emulated grid: methods, tunings, shardings, checkpointing, attention, losses, models and cards."""

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import msgspec
from msgspec import Struct

from planner.candidate import Candidate
from planner.memory.layers.measured_layers import MeasuringRefused, complete_shipped
from planner.methods import METHODS, MethodName
from planner.models.catalogue import load_model
from planner.models.shape import ModelShape

# Targets on the language model alone, of whose modules a vision tower has some by the same names.
TEXT_ALONE = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
MODELS = ("model", "teacher_model", "reward_model")  # settings that name one
ALWAYS = ("method", "max_length", "per_device_train_batch_size", "padded")  # settings for which a `Job` has defaults


class Job(Struct, frozen=True, kw_only=True):
    """One row of the grid: a kind of job, its GPUs, and the settings other than SFT of one row of 2,048 tokens."""

    kind: str
    gpus: str
    settings: dict[str, Any]

    @property
    def key(self) -> str:
        return json.dumps([self.gpus, self.settings], sort_keys=True)

    @property
    def candidate(self) -> Candidate:
        usual = {"method": "sft", "max_length": 2048, "per_device_train_batch_size": 1, "padded": False}
        named = {
            name: complete(load_model(value)) if name in MODELS else _hashable(value)
            for name, value in (usual | self.settings).items()
        }
        return Candidate(**named)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def complete(model: ModelShape) -> ModelShape:
    """The model with its layers; those without formulas have the memory that ships with the package."""
    if model.known:
        return model
    shipped = complete_shipped(model, lambda recipe: MeasuringRefused(reason=f"{model.id} does not ship with {recipe}"))
    assert shipped is not None
    return shipped


def settings_of(candidate: Candidate) -> dict[str, Any]:
    """Return the fields of a candidate that are not `Candidate`'s defaults, as JSON has them."""
    usual = Candidate(model=candidate.model, method=candidate.method)
    values = {name: getattr(candidate, name) for name in candidate.__struct_fields__}
    changed = {name: value for name, value in values.items() if name in ALWAYS or value != getattr(usual, name)}
    plain: dict[str, Any] = msgspec.to_builtins(
        {name: value.id if isinstance(value, ModelShape) else value for name, value in changed.items()}
    )
    return {"model": candidate.model.id, **plain}


SMALL, MIDDLE, LARGE = "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B"
TOWER_OF_ONE_ROW = "Ministral-3-3B-Instruct-2512"
LORA, FULL = {"tuning": "lora", "dtype": "bfloat16"}, {"tuning": "full", "dtype": "bfloat16"}
TUNINGS = {
    "LoRA": LORA,
    "full 16 bit": FULL,
    "full float32": {"tuning": "full", "dtype": "float32"},
    "QLoRA": LORA | {"quantization": "nf4-double"},
}


def grid() -> Iterator[Job]:
    """Yield the jobs, one kind after another."""
    for model, (kind, tuning) in product((SMALL, MIDDLE), TUNINGS.items()):
        for more in ({}, {"gradient_checkpointing": False}, {"per_device_train_batch_size": 4, "max_length": 1024}):
            yield Job(kind=kind, gpus="1xA100-40G", settings={"model": model, **tuning, **more})
    for length, model in product((1024, 2048, 4096), (SMALL, MIDDLE)):
        eager = {"model": model, **LORA, "attn_implementation": "eager", "max_length": length}
        yield Job(kind="eager attention", gpus="1xA100-40G", settings=eager)
    yield from other_methods()
    for optim in ("adamw_torch", "adafactor", "sgd", "adamw_8bit", "lion_32bit"):
        yield Job(kind="optimizers", gpus="1xA100-40G", settings={"model": SMALL, **FULL, "optim": optim})
    yield from sharded()
    yield from measured_layers()
    for model, (kind, tuning) in product((SMALL, MIDDLE), TUNINGS.items()):
        changes = {"model": model, **tuning, "expandable_segments": True}
        yield Job(kind=f"{kind}, expandable", gpus="1xA100-40G", settings=changes)
    yield from zero_1_and_2()
    yield from zero3()
    yield from fsdp2()
    yield from losses()
    yield from other_cards()
    yield from sharded_methods()
    yield from adapters()
    yield from long_rows()
    yield from liger()
    yield from ppo()
    yield from passes()
    yield from other_models()
    yield from without_checkpoints()
    yield from images()
    yield from mixtures()
    yield from towers_under_fsdp2()
    yield from divided_experts()
    yield from divided_layers()
    yield from asynchronous()
    yield from shared_rows()
    yield from rare_kinds()
    yield from more_zero3()


def measured_layers() -> Iterator[Job]:
    """Yield jobs of models without formulas, on 4-bit bases and with Liger's kernels."""
    qlora = LORA | {"quantization": "nf4", "padded": True, "max_length": 512, "per_device_train_batch_size": 4}
    liger = {**qlora, "quantization": "none", "use_liger_kernel": True}
    for model in ("LiquidAI/LFM2-350M", "Qwen/Qwen3.5-0.8B"):
        for more in ({}, {"gradient_checkpointing": False}):
            yield Job(kind="QLoRA, measured layers", gpus="1xA100-40G", settings={"model": model, **qlora, **more})
    for model in ("Qwen/Qwen3.5-0.8B", "google/gemma-4-E2B"):
        for more in ({}, {"gradient_checkpointing": False}, {"quantization": "nf4"}):
            yield Job(kind="Liger, measured layers", gpus="1xA100-40G", settings={"model": model, **liger, **more})


def other_methods() -> Iterator[Job]:
    for method, (kind, tuning) in product(
        ("dpo", "kto", "reward", "grpo", "rloo"), {"LoRA": LORA, "full": FULL}.items()
    ):
        rows: dict[str, Any] = {"kto": {"per_device_train_batch_size": 2}}.get(method, {})  # TRL refuses one row
        if method in ("grpo", "rloo"):
            rows = {"per_device_train_batch_size": 4, "num_generations": 4}
        changes = {"model": SMALL, "method": method, **tuning, **rows, "max_length": 1024}
        yield Job(kind=f"{method} {kind}", gpus="1xA100-40G", settings=changes)


def sharded() -> Iterator[Job]:
    """Yield jobs of two real processes, with a small model for a small machine, and of one rank of eight."""
    for sharding, ranks in product(("ddp", "zero2", "zero3", "fsdp2"), (2, 8)):
        for kind, tuning, model in (("LoRA", LORA, LARGE), ("full", FULL, MIDDLE)):
            shards = {**tuning, "sharding": sharding, "num_processes": ranks, "max_length": 1024}
            settings = {"model": SMALL if ranks == 2 else model, **shards}
            yield Job(kind=f"{sharding} {kind}", gpus=f"{ranks}xA100-80G", settings=settings)


def zero_1_and_2() -> Iterator[Job]:
    """Yield jobs of two real processes and of one of eight, with and without accumulation."""
    for sharding, model, (kind, tuning), steps in product(
        ("zero2", "zero1"), (SMALL, MIDDLE), {"full": FULL, "LoRA": LORA}.items(), (1, 4)
    ):
        shards = {"sharding": sharding, "num_processes": 2, "max_length": 1024, "gradient_accumulation_steps": steps}
        yield Job(kind=f"{sharding} {kind}", gpus="2xA100-80G", settings={"model": model, **tuning, **shards})
    for sharding, steps in (("zero2", 4), ("zero1", 1), ("zero1", 4), ("ddp", 4)):
        shards = {"sharding": sharding, "num_processes": 8, "max_length": 1024, "gradient_accumulation_steps": steps}
        for kind, tuning, model in (("full", FULL, MIDDLE), ("LoRA", LORA, LARGE)):
            yield Job(kind=f"{sharding} {kind}", gpus="8xA100-80G", settings={"model": model, **tuning, **shards})


def zero3() -> Iterator[Job]:
    """Yield jobs of ZeRO-3, whole ones and generating ones, gathered or not."""
    for model, (kind, tuning), ranks, more in (
        (LARGE, ("LoRA", LORA), 4, {}),
        (MIDDLE, ("full", FULL), 2, {"max_length": 1024}),
        (MIDDLE, ("full", FULL), 4, {}),
        (SMALL, ("full", FULL), 4, {"max_length": 512}),
        (LARGE, ("full", FULL), 8, {}),
        (MIDDLE, ("LoRA", LORA), 2, {"max_length": 1024}),
        (MIDDLE, ("LoRA", LORA), 8, {"max_length": 4096}),
        ("Llama-3.1-8B", ("LoRA", LORA), 4, {"max_length": 512}),
        ("Llama-3.1-8B", ("full", FULL), 8, {"max_length": 4096}),
        ("Qwen2.5-14B", ("LoRA", LORA), 4, {"max_length": 1024}),
        ("Llama-3.2-1B", ("full", FULL), 4, {"max_length": 1024, "gradient_accumulation_steps": 4}),
        (MIDDLE, ("full", FULL), 4, {"gradient_checkpointing": False, "max_length": 1024}),
        (LARGE, ("LoRA", LORA), 4, {"gradient_checkpointing": False, "max_length": 1024}),
    ):
        shards = {"sharding": "zero3", "num_processes": ranks, **more}
        yield Job(kind=f"zero3 {kind}", gpus=f"{ranks}xA100-80G", settings={"model": model, **tuning, **shards})
    for model, (kind, tuning), ranks in (
        (LARGE, ("LoRA", LORA), 4), (MIDDLE, ("full", FULL), 4), (MIDDLE, ("full", FULL), 2), (LARGE, ("full", FULL), 8)
    ):  # fmt: skip
        shards = {"sharding": "zero3", "num_processes": ranks, "expandable_segments": True}
        yield Job(
            kind=f"zero3 {kind}, expandable", gpus=f"{ranks}xA100-80G", settings={"model": model, **tuning, **shards}
        )
    for method, (kind, tuning), gathers in product(
        ("rloo", "online-dpo", "grpo"), {"LoRA": LORA, "full": FULL}.items(), (False, True)
    ):
        if method == "grpo" and kind == "LoRA":
            continue
        rows = {} if method == "online-dpo" else {"num_generations": 2}
        shards = {"sharding": "zero3", "num_processes": 4, "ds3_gather_for_generation": gathers}
        lengths = {"prompt_length": 256, "max_completion_length": 8, "max_length": 264}
        settings = {"model": MIDDLE, "method": method, **tuning, **shards, **rows, **lengths}
        settings["per_device_train_batch_size"] = 2
        if kind == "full" and not gathers and method != "online-dpo":
            settings["stage3_prefetch_bucket_size"] = 0  # see planner/jobs/stops.py, `HEAD_IN_FLIGHT`
        yield Job(
            kind=f"zero3 {'gathered' if gathers else 'ungathered'} generation", gpus="4xA100-80G", settings=settings
        )
    for method, (kind, tuning) in product(("dpo", "reward"), {"LoRA": LORA, "full": FULL}.items()):
        shards = {"sharding": "zero3", "num_processes": 4, "max_length": 1024}
        yield Job(
            kind=f"zero3 {kind}", gpus="4xA100-80G", settings={"model": MIDDLE, "method": method, **tuning, **shards}
        )


def fsdp2() -> Iterator[Job]:
    """Yield jobs of FSDP2, with each way to accumulate."""
    for model, (kind, tuning), ranks, more in (
        (LARGE, ("LoRA", LORA), 4, {}),
        (MIDDLE, ("full", FULL), 2, {"max_length": 1024}),
        (MIDDLE, ("full", FULL), 4, {}),
        (LARGE, ("full", FULL), 8, {}),
        (MIDDLE, ("LoRA", LORA), 2, {"max_length": 1024}),
        ("Llama-3.1-8B", ("LoRA", LORA), 4, {"max_length": 512}),
        ("Llama-3.1-8B", ("full", FULL), 8, {"max_length": 4096}),
        (MIDDLE, ("full", FULL), 4, {"gradient_accumulation_steps": 4}),
        (MIDDLE, ("full", FULL), 4, {"gradient_accumulation_steps": 4, "sync_each_batch": True}),
        (MIDDLE, ("LoRA", LORA), 4, {"gradient_accumulation_steps": 4}),
        (MIDDLE, ("full", FULL), 4, {"gradient_checkpointing": False, "max_length": 1024}),
        (MIDDLE, ("LoRA", LORA), 4, {"gradient_checkpointing": False, "max_length": 1024}),
    ):
        shards = {"sharding": "fsdp2", "num_processes": ranks, **more}
        yield Job(kind=f"fsdp2 {kind}", gpus=f"{ranks}xA100-80G", settings={"model": model, **tuning, **shards})
    for method, (kind, tuning) in product(("dpo", "reward"), {"LoRA": LORA, "full": FULL}.items()):
        shards = {"sharding": "fsdp2", "num_processes": 4, "max_length": 1024}
        yield Job(
            kind=f"fsdp2 {kind}", gpus="4xA100-80G", settings={"model": MIDDLE, "method": method, **tuning, **shards}
        )


def fsdp1() -> Iterator[Job]:
    """Yield jobs of FSDP 1 on two GPUs, whose root unit a tied and an untied head take differently."""
    untied, wide = "TinyLlama-1.1B-Chat-v1.0", {"tuning": "full", "dtype": "float32"}
    for kind, settings in {
        "LoRA": {"model": untied, **LORA, "gradient_checkpointing": True},
        "LoRA without checkpoints": {"model": SMALL, **LORA, "gradient_checkpointing": False},
        "full float32": {"model": untied, **wide, "gradient_checkpointing": True},
        "full, tied": {"model": SMALL, **wide, "gradient_checkpointing": False},
        "full 16 bit": {"model": untied, **FULL, "gradient_checkpointing": True, "max_length": 512},
        "QLoRA": {
            "model": MIDDLE,
            **LORA,
            "quantization": "nf4",
            "bnb_4bit_quant_storage": "bfloat16",
            "max_length": 1024,
        },
    }.items():
        yield Job(
            kind=f"fsdp1 {kind}", gpus="2xA100-40G", settings={**settings, "sharding": "fsdp1", "num_processes": 2}
        )


def divided_experts() -> Iterator[Job]:
    """Yield jobs whose GPUs divide experts, under Transformers' own FSDP2."""
    attention = {**LORA, "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    for model, ranks, more in (
        ("OLMoE-1B-7B-0924", 2, {**FULL, "ep_size": 2}),
        ("OLMoE-1B-7B-0924", 2, {**attention, "ep_size": 2}),
        ("OLMoE-1B-7B-0924", 8, {**FULL, "ep_size": 8}),
        ("OLMoE-1B-7B-0924", 8, {**FULL, "ep_size": 4}),
        ("OLMoE-1B-7B-0924", 8, {**FULL, "dtype": "float32", "ep_size": 8}),
        ("OLMoE-1B-7B-0924", 8, {**FULL, "ep_size": 8, "gradient_accumulation_steps": 4}),
        ("OLMoE-1B-7B-0924", 8, {**FULL, "ep_size": 8, "gradient_checkpointing": False}),
        ("Qwen3-30B-A3B", 8, {**FULL, "ep_size": 8}),
        ("Qwen3-30B-A3B", 8, {**attention, "ep_size": 8}),
        ("Moonlight-16B-A3B", 8, {**FULL, "ep_size": 8}),
        ("Mixtral-8x7B-v0.1", 8, {**FULL, "ep_size": 8}),
        ("Qwen1.5-MoE-A2.7B", 4, {**FULL, "ep_size": 4}),
        ("GLM-4.5-Air", 64, {**FULL, "num_nodes": 8, "ep_size": 8}),
        ("GLM-4.5-Air", 64, {**FULL, "num_nodes": 8, "ep_size": 32}),
        ("GLM-4.6", 16, {**attention, "num_nodes": 2, "ep_size": 16}),
    ):
        shards = {"sharding": "distributed", "num_processes": ranks}
        nodes = more.get("num_nodes", 1)
        gpus = f"{nodes}x8xA100-80G" if nodes > 1 else f"{ranks}xA100-80G"
        yield Job(kind="divided experts", gpus=gpus, settings={"model": model, **more, **shards})


def divided_layers() -> Iterator[Job]:
    """Yield jobs whose GPUs divide each layer, all of them or pairs beside FSDP2; of more than two the first runs."""
    reading = {**LORA, "lora_target_modules": ["gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"]}
    beside = {"sharding": "distributed", "tp_size": 2}
    for model, ranks, more in (
        ("Qwen3-0.6B", 2, FULL),
        ("Llama-3.2-1B", 2, reading),
        ("Llama-3.2-1B", 2, {"tuning": "full", "dtype": "float32", "gradient_checkpointing": False}),
        ("Qwen3-30B-A3B", 2, {**LORA, "lora_target_modules": ["k_proj", "q_proj", "v_proj"]}),
        ("Llama-3.1-8B", 8, FULL),
        ("OLMoE-1B-7B-0924", 2, FULL),
        ("Llama-3.1-8B", 8, {**FULL, **beside}),
        ("Qwen2.5-1.5B", 2, {**FULL, "gradient_accumulation_steps": 4}),
    ):
        settings = {"model": model, "sharding": "tensor", **more, "num_processes": ranks}
        yield Job(kind="divided layers", gpus=f"{ranks}xA100-80G", settings=settings)


def shared_rows() -> Iterator[Job]:
    """Yield jobs whose GPUs share a row, in a ring or by Ulysses; of eight GPUs the first runs."""
    ring, ulysses = {"sharding": "fsdp2"}, {"sharding": "zero3"}
    for model, ranks, length, more in (
        ("Qwen3-1.7B", 2, 65536, {**FULL, **ring, "cp_size": 2, "checkpoint_offload": True}),
        ("Qwen3-1.7B", 2, 65536, {**LORA, **ring, "cp_size": 2}),
        ("Qwen3-0.6B", 2, 65536, {**FULL, **ring, "cp_size": 2}),
        ("Qwen3-0.6B", 2, 8192, {**FULL, **ring, "cp_size": 2, "gradient_checkpointing": False}),
        ("SmolLM2-1.7B", 2, 32768, {**FULL, **ring, "cp_size": 2, "checkpoint_offload": True}),
        ("Qwen3-1.7B", 8, 524288, {**FULL, **ring, "cp_size": 8, "checkpoint_offload": True}),
        ("Qwen3-1.7B", 2, 65536, {**FULL, **ulysses, "sp_size": 2}),
        ("Qwen3-1.7B", 2, 65536, {**LORA, **ulysses, "sp_size": 2}),
        ("Qwen3-0.6B", 2, 8192, {**FULL, **ulysses, "sp_size": 2, "gradient_checkpointing": False}),
        ("Qwen3-1.7B", 8, 524288, {**LORA, **ulysses, "sp_size": 8}),
        ("OLMoE-1B-7B-0924", 8, 8192, {**FULL, **ulysses, "sp_size": 4}),
    ):
        rows = {"model": model, "max_length": length, "num_processes": ranks, **more}
        yield Job(kind="shared rows", gpus=f"{ranks}xH100", settings=rows)


def rare_kinds() -> Iterator[Job]:
    """Yield jobs of the kinds of `RECORDED_SHARES` that few other jobs have; of four GPUs the first runs."""
    whole, pairs = {"gradient_checkpointing": False}, {"per_device_train_batch_size": 2, "padded": True}
    orpo, dpo = {"method": "orpo", **pairs, "max_length": 1024}, {"method": "dpo", **pairs, "max_length": 512}
    for sharding, model, more in (
        ("zero1", SMALL, {**FULL, **whole}),
        ("zero1", "Llama-3.2-1B", {**FULL, **whole, **dpo}),
        ("zero1", MIDDLE, {**LORA, **whole}),
        ("zero1", "Qwen3-0.6B", {**LORA, **whole, **dpo}),
        ("zero1", "Llama-3.2-1B", {**FULL, **orpo}),
        ("zero1", SMALL, {**FULL, **whole, **orpo}),
        ("zero1", "Qwen3-0.6B", {**FULL, **whole, **orpo}),
        ("zero2", SMALL, {**FULL, **whole}),
        ("zero2", "Llama-3.2-1B", {**FULL, **whole, **dpo}),
        ("zero2", MIDDLE, {**LORA, **whole, **orpo}),
        ("zero3", SMALL, {**FULL, **whole}),
        ("zero3", "Llama-3.2-1B", {**FULL, **whole, **dpo}),
        ("fsdp2", SMALL, {**FULL, **whole}),
        ("fsdp2", "Llama-3.2-1B", {**FULL, **whole, **dpo}),
        ("fsdp2", MIDDLE, {**LORA, **whole}),
        ("fsdp2", MIDDLE, {**LORA, **whole, **orpo}),
        ("fsdp2", "Llama-3.2-1B", {**LORA, **whole, **orpo}),
        ("fsdp2", SMALL, {**FULL, **orpo}),
        ("fsdp2", "Llama-3.2-1B", {**FULL, **orpo}),
        ("tensor", "Llama-3.1-8B", {**LORA, "lora_target_modules": ["gate_proj", "q_proj", "up_proj", "v_proj"]}),
        ("tensor", MIDDLE, {**LORA, "lora_target_modules": ["q_proj", "v_proj"]}),
        ("tensor", "Llama-3.2-1B", FULL),
        ("tensor", "Qwen3-0.6B", {**FULL, **whole}),
        ("tensor", MIDDLE, {**FULL, **whole}),
        ("tensor", "Llama-3.2-1B", {**FULL, **whole}),
        ("distributed", "Qwen1.5-MoE-A2.7B", {**LORA, "lora_target_modules": ["q_proj", "v_proj"], "ep_size": 4}),
        ("none", SMALL, {**FULL, "checkpoint_every_n_layers": 2}),
        ("none", "Llama-3.2-1B", {**FULL, "checkpoint_every_n_layers": 2, **dpo, "method": "reward"}),
        ("none", "Qwen3-0.6B", {**FULL, "checkpoint_every_n_layers": 2}),
        ("none", MIDDLE, {**FULL, "checkpoint_every_n_layers": 2}),
        ("none", "Llama-3.2-1B", {**FULL, "checkpoint_every_n_layers": 2}),
        ("none", "SmolLM2-360M", {**FULL, "checkpoint_every_n_layers": 4, "max_length": 2048}),
        ("none", "TinyLlama-1.1B", {**FULL, "checkpoint_every_n_layers": 4}),
        ("none", "gemma-3-1b-it", {**FULL, "checkpoint_every_n_layers": 2, "max_length": 1024}),
        ("none", "OLMo-2-0425-1B", {**FULL, "checkpoint_every_n_layers": 4}),
        ("none", SMALL, {**FULL, "checkpoint_every_n_layers": 6, "dtype": "float32"}),
        ("none", "pythia-410m", {**FULL, "checkpoint_every_n_layers": 3, **dpo, "method": "reward"}),
        ("none", "Qwen3-0.6B", {**FULL, "method": "gkd", "teacher_model": "Qwen3-0.6B", **whole, **pairs}),
    ):
        ranks = {"none": 1, "tensor": 2}.get(sharding, 4)
        settings = {"model": model, **more, "sharding": sharding, "num_processes": ranks}
        yield Job(kind=f"rare, {sharding}", gpus=f"{ranks}xA100-80G", settings=settings)


def more_zero3() -> Iterator[Job]:
    """Yield jobs of ZeRO-3 of which the first rank runs."""
    for model, ranks, more in (
        ("Qwen2.5-3B", 8, FULL),
        ("Qwen2.5-3B", 4, {**FULL, "max_length": 1024, "per_device_train_batch_size": 2}),
        (SMALL, 4, {**FULL, "per_device_train_batch_size": 4, "max_length": 1024}),
        ("Llama-3.2-1B", 4, FULL),
        ("Qwen3-1.7B", 8, {**FULL, "max_length": 4096}),
        ("Qwen2.5-3B", 4, LORA),
        ("Qwen2.5-3B", 8, {**LORA, "max_length": 4096}),
        (SMALL, 4, {**LORA, "per_device_train_batch_size": 4, "max_length": 1024}),
        ("Llama-3.2-1B", 8, {**LORA, "max_length": 8192}),
    ):
        settings = {"model": model, **more, "sharding": "zero3", "num_processes": ranks}
        kind = f"more zero3, {'full' if more['tuning'] == 'full' else 'LoRA'}"
        yield Job(kind=kind, gpus=f"{ranks}xA100-80G", settings=settings)


# Settings of a trainer whose server samples meanwhile.
STREAMED = {
    "vllm": "server",
    "attn_implementation": "flash_attention_3",
    "max_completion_length": 512,
    "max_length": 1024,
    "num_processes": 1,
}


def asynchronous() -> Iterator[Job]:
    """Yield jobs whose server samples meanwhile; the trainer runs on the emulated card without it."""
    rows = {"method": "async-grpo", **STREAMED, "token_budget": 4615}
    for kind, tuning in {"LoRA": LORA, "full": FULL}.items():
        for checkpoints in (True, False):
            changes = {"model": SMALL, **rows, **tuning, "gradient_checkpointing": checkpoints}
            yield Job(kind=f"async-grpo {kind}", gpus="2xH100", settings=changes)


def losses() -> Iterator[Job]:
    """Yield jobs of each way to compute the loss, with and without checkpoints."""
    shapes: dict[MethodName, dict[str, Any]] = {
        "orpo": {"max_length": 1024},
        "cpo": {"max_length": 1024},
        "tpo": {"max_length": 1024},
        "online-dpo": {"prompt_length": 448, "max_completion_length": 64, "max_length": 512},
        "gkd": {"max_length": 1024, "prompt_length": 992, "max_completion_length": 32, "lmbda": 0.0},
        "gold": {"max_length": 1024, "prompt_length": 992, "max_completion_length": 32, "lmbda": 1.0},
        "iw-opd": {"max_length": 512, "prompt_length": 384, "max_completion_length": 128},
        "distillation": {"prompt_length": 480, "max_completion_length": 32},
        "server-distillation": {"prompt_length": 448, "max_completion_length": 64},
        "sdft": {"prompt_length": 448, "max_completion_length": 64, "num_generations": 2},
        "sdpo": {"prompt_length": 320, "max_completion_length": 128, "num_generations": 2},
    }
    for method, (kind, tuning), checkpointing in product(shapes, TUNINGS.items(), (True, False)):
        teacher = {"teacher_model": SMALL} if METHODS[method].teacher else {}
        settings = {"model": SMALL, "method": method, **tuning, **shapes[method], **teacher}
        settings["per_device_train_batch_size"] = 2
        if tuning["tuning"] == "lora" and not METHODS[method].takes_adapters:
            continue
        yield Job(
            kind=f"{method} {kind}", gpus="1xA100-80G", settings=settings | {"gradient_checkpointing": checkpointing}
        )
    for model, (kind, tuning) in product((SMALL, MIDDLE), {"LoRA": LORA, "full 16 bit": FULL}.items()):
        some = {"per_device_train_batch_size": 2, "max_length": 1024, "checkpoint_every_n_layers": 4}
        yield Job(kind=f"orpo {kind}", gpus="1xA100-80G", settings={"model": model, "method": "orpo", **tuning, **some})
    large = {"model": LARGE, "method": "orpo", "per_device_train_batch_size": 2, "max_length": 1024}
    yield Job(kind="orpo LoRA", gpus="1xA100-80G", settings={**large, **LORA})
    for method, (kind, tuning) in product(("orpo", "gkd", "online-dpo"), {"LoRA": LORA, "full 16 bit": FULL}.items()):
        teacher = {"teacher_model": MIDDLE} if method == "gkd" else {}
        settings = {"model": MIDDLE, "method": method, **tuning, **shapes[method], **teacher}
        yield Job(kind=f"{method} {kind}", gpus="1xA100-80G", settings=settings | {"per_device_train_batch_size": 2})


def streamed_teachers() -> Iterator[Job]:
    """Yield jobs of async-distillation; the trainer runs on the emulated card without its two servers."""
    rows = {"model": SMALL, "method": "async-distillation", **STREAMED, "token_budget": 4096}
    for kind, checkpoints in product(("LoRA", "full float32", "full 16 bit"), (True, False)):
        changes = rows | TUNINGS[kind] | {"gradient_checkpointing": checkpoints}
        yield Job(kind=f"async-distillation {kind}", gpus="2xH100", settings=changes)


def other_tokenizers() -> Iterator[Job]:
    """Yield jobs of GOLD whose teacher may have another tokenizer, and another vocabulary."""
    rows: dict[str, Any] = {"model": SMALL, "method": "gold", "use_uld_loss": True, "max_length": 512}
    short = {"per_device_train_batch_size": 2, "max_completion_length": 32, "prompt_length": 480, "lmbda": 1.0}
    for kind, checkpoints in product(("LoRA", "full float32", "QLoRA"), (True, False)):
        changes = TUNINGS[kind] | {"teacher_model": SMALL, "gradient_checkpointing": checkpoints}
        yield Job(kind=f"gold {kind}, other tokenizer", gpus="1xA100-80G", settings=rows | short | changes)
    long = {"per_device_train_batch_size": 3, "max_completion_length": 256, "prompt_length": 256, "lmbda": 0.0}
    for teacher, tuning in (("Llama-3.2-1B", FULL), ("SmolLM2-135M", LORA)):
        changes = {"teacher_model": teacher, **tuning}
        yield Job(kind="gold, other vocabulary", gpus="1xA100-80G", settings=rows | long | changes)


def sampled_values() -> Iterator[Job]:
    """Yield jobs of A2PO, whose samples before the training may take most."""
    values = {"model": SMALL, "method": "a2po", "prompt_length": 448, "max_completion_length": 64}
    for kind, checkpointing in product(("full float32", "full 16 bit"), (True, False)):
        more = {"per_device_train_batch_size": 2, "gradient_checkpointing": checkpointing}
        yield Job(kind=f"a2po {kind}", gpus="1xA100-80G", settings=values | TUNINGS[kind] | more)
    many = {**FULL, "per_device_train_batch_size": 4, "num_value_samples": 64}
    yield Job(kind="a2po full 16 bit", gpus="1xA100-80G", settings=values | many)
    sharded = {**TUNINGS["full float32"], "per_device_train_batch_size": 2, "sharding": "zero2"}
    yield Job(kind="a2po full float32", gpus="2xA100-80G", settings=values | sharded)


def other_cards() -> Iterator[Job]:
    """Yield jobs on cards of other generations and sizes."""
    for gpu, (kind, tuning) in product(
        ("1xT4", "1xL4", "1xRTX-4090", "1xH100", "1xB200"),
        {"LoRA": LORA, "full": FULL, "QLoRA": TUNINGS["QLoRA"]}.items(),
    ):
        half = {"dtype": "float16", "precision": "fp16"} if gpu == "1xT4" else {}
        if gpu == "1xT4" and kind == "full":
            half = {"dtype": "float32", "precision": "fp16"}
        yield Job(kind=f"other cards, {kind}", gpus=gpu, settings={"model": SMALL, **tuning, **half})
        padded = {"padded": True, "per_device_train_batch_size": 4, "max_length": 1024}
        yield Job(kind=f"other cards, {kind}", gpus=gpu, settings={"model": "Qwen3-0.6B", **tuning, **half, **padded})


def passes() -> Iterator[Job]:
    """Yield jobs with other ways to keep activations, other attention, and other batches."""
    for more in ({"activation_offloading": True}, {"checkpoint_offload": True}, {"checkpoint_every_n_layers": 4}):
        for model, (kind, tuning) in product((SMALL, MIDDLE), {"LoRA": LORA, "full": FULL}.items()):
            (name,) = more
            yield Job(kind=f"{name}, {kind}", gpus="1xA100-40G", settings={"model": model, **tuning, **more})
    for (kind, tuning), more in product(
        {"LoRA": LORA, "full": FULL}.items(),
        (
            {"padded": True, "per_device_train_batch_size": 8, "max_length": 512},
            {"padded": True, "per_device_train_batch_size": 4, "max_length": 2048},
            {"padding_free": True, "per_device_train_batch_size": 4, "max_length": 512},
            {"attn_implementation": "eager", "gradient_checkpointing": False, "max_length": 1024},
            {"max_length": 8192},
            {"per_device_train_batch_size": 16, "max_length": 512},
            {"gradient_accumulation_steps": 4},
        ),
    ):
        yield Job(kind=f"batches, {kind}", gpus="1xA100-80G", settings={"model": MIDDLE, **tuning, **more})
    for optim in (
        "adagrad", "rmsprop", "lion_8bit", "ademamix", "ademamix_8bit", "rmsprop_bnb", "adamw_bnb_8bit"
    ):  # fmt: skip
        yield Job(kind="optimizers", gpus="1xA100-40G", settings={"model": SMALL, **FULL, "optim": optim})


def other_models() -> Iterator[Job]:
    """Yield jobs of other architectures, with and without checkpoints."""
    for model, (kind, tuning), checkpointing in product(
        (
            "Qwen3-0.6B", "Llama-3.2-1B", "gemma-3-1b-it", "gpt2", "SmolLM2-360M", "opt-350m", "pythia-410m",
            "OLMo-2-0425-1B", "microsoft/phi-1_5", "TinyLlama-1.1B", "gemma-2-2b",
        ),
        {"LoRA": LORA, "full": FULL, "QLoRA": TUNINGS["QLoRA"]}.items(),
        (True, False),
    ):  # fmt: skip
        settings = {"model": model, **tuning, "max_length": 1024, "gradient_checkpointing": checkpointing}
        yield Job(kind=f"other models, {kind}", gpus="1xA100-40G", settings=settings)


def without_checkpoints() -> Iterator[Job]:
    """Yield jobs of the other methods without checkpoints, in float32 and on 4-bit bases."""
    for method, (kind, tuning), checkpointing in product(
        ("dpo", "kto", "reward", "grpo", "rloo"), TUNINGS.items(), (False, True)
    ):
        rows: dict[str, Any] = {"per_device_train_batch_size": 2, "max_length": 1024}
        if method in ("grpo", "rloo"):
            rows = {"per_device_train_batch_size": 4, "num_generations": 4, "prompt_length": 480}
            rows |= {"max_completion_length": 32}
        changes = {"model": SMALL, "method": method, **tuning, **rows, "gradient_checkpointing": checkpointing}
        yield Job(kind=f"{method} {kind.removesuffix(' 16 bit')}", gpus="1xA100-40G", settings=changes)


def sharded_methods() -> Iterator[Job]:
    """Yield jobs of more methods on one rank of four, and 4-bit bases on several GPUs."""
    rows: dict[str, dict[str, Any]] = {
        "kto": {"max_length": 1024},
        "grpo": {"num_generations": 2, "prompt_length": 256, "max_completion_length": 8, "max_length": 264},
        "gkd": {"max_length": 1024, "prompt_length": 992, "max_completion_length": 32, "lmbda": 0.0},
    }
    for method, sharding, tuning in product(rows, ("zero2", "zero3", "fsdp2"), (LORA, FULL)):
        teacher = {"teacher_model": SMALL} if method == "gkd" else {}
        shards = {"sharding": sharding, "num_processes": 4, "per_device_train_batch_size": 2}
        settings = {"model": MIDDLE, "method": method, **tuning, **rows[method], **teacher, **shards}
        yield Job(kind=f"{method} {sharding}", gpus="4xA100-80G", settings=settings)
    for method, tuning in product(("orpo", "cpo"), (LORA, FULL)):
        shards = {"sharding": "fsdp2", "num_processes": 4, "max_length": 1024, "per_device_train_batch_size": 2}
        yield Job(
            kind=f"{method} fsdp2", gpus="4xA100-80G", settings={"model": SMALL, "method": method, **tuning, **shards}
        )
    for sharding, ranks, model in (
        ("ddp", 2, SMALL), ("zero2", 2, MIDDLE), ("zero2", 4, LARGE), ("zero3", 4, LARGE), ("fsdp2", 2, MIDDLE),
        ("fsdp2", 4, LARGE),
    ):  # fmt: skip
        shards = {"sharding": sharding, "num_processes": ranks, "max_length": 1024}
        storage = {"bnb_4bit_quant_storage": "bfloat16"} if sharding in ("zero3", "fsdp2") else {}
        settings = {"model": model, **TUNINGS["QLoRA"], **shards, **storage}
        yield Job(kind=f"{sharding} QLoRA", gpus=f"{ranks}xA100-80G", settings=settings)


def adapters() -> Iterator[Job]:
    """Yield jobs with DoRA, other ranks and targets of adapters, and modules that are trained whole."""
    for model, (kind, tuning) in product((SMALL, MIDDLE), {"LoRA": LORA, "QLoRA": TUNINGS["QLoRA"]}.items()):
        yield Job(kind=f"DoRA, {kind}", gpus="1xA100-40G", settings={"model": model, **tuning, "use_dora": True})
    for more in (
        {"lora_r": 256},
        {"lora_target_modules": ["q_proj", "v_proj"]},
        {"lora_modules_to_save": ["embed_tokens", "lm_head"]},
        {"lora_dropout": 0.05},
    ):
        yield Job(kind="adapters", gpus="1xA100-40G", settings={"model": MIDDLE, **LORA, **more})


def long_rows() -> Iterator[Job]:
    """Yield jobs of long rows with checkpoints, and of packed rows."""
    for model, length, more in (
        (SMALL, 32768, {}),
        (MIDDLE, 16384, {}),
        (MIDDLE, 32768, {}),
        (LARGE, 16384, {}),
        (MIDDLE, 32768, {"use_liger_kernel": True}),
        (MIDDLE, 16384, {"activation_offloading": True}),
    ):
        settings = {"model": model, **LORA, "max_length": length, **more}
        yield Job(kind="long rows, LoRA", gpus="1xA100-80G", settings=settings)
    for length in (16384, 32768):
        yield Job(kind="long rows, full", gpus="1xA100-80G", settings={"model": SMALL, **FULL, "max_length": length})
    for kind, tuning in (("LoRA", LORA), ("full", FULL)):
        packed = {"packing": True, "packing_strategy": "wrapped", "per_device_train_batch_size": 4}
        yield Job(kind=f"packing, {kind}", gpus="1xA100-80G", settings={"model": MIDDLE, **tuning, **packed})


def liger() -> Iterator[Job]:
    """Yield jobs with Liger's kernels."""
    for method, (kind, tuning) in product(("sft", "dpo", "kto", "grpo"), {"LoRA": LORA, "full": FULL}.items()):
        rows: dict[str, Any] = {"per_device_train_batch_size": 2, "max_length": 1024}
        if method == "grpo":
            rows = {"per_device_train_batch_size": 4, "num_generations": 4, "prompt_length": 480}
            rows |= {"max_completion_length": 32}
        settings = {"model": SMALL, "method": method, **tuning, **rows, "use_liger_kernel": True}
        yield Job(kind=f"Liger, {kind}", gpus="1xA100-40G", settings=settings)


def images() -> Iterator[Job]:
    """Yield rows with images of every family of vision towers, and rollouts of their models without images."""
    towers = ("Qwen2.5-VL-3B-Instruct", "Qwen3-VL-4B-Instruct", "Qwen3.5-0.8B", "gemma-3-4b-pt", TOWER_OF_ONE_ROW)
    shown: dict[str, dict[str, Any]] = {
        name: {"model": name, "images_per_row": 1, "per_device_train_batch_size": 4, "max_length": 1024}
        | ({} if name.startswith("gemma") else {"image_size": "448x448"})
        for name in towers
    }
    rolls = {"prompt_length": 512, "max_completion_length": 64, "num_generations": 4, "gradient_accumulation_steps": 2}
    for rows in shown.values():
        for method in ("sft", "dpo", "kto"):
            yield Job(kind=f"images, {method}", gpus="1xH200", settings={"method": method, **rows, **LORA})
        sampled = {"method": "grpo", **rows, **LORA, **rolls, "steps_per_generation": 2}
        yield Job(kind="images, grpo", gpus="1xH200", settings=sampled)
        yield Job(kind="images, sft full", gpus="1xH200", settings={"method": "sft", **rows, **FULL})
        without: dict[str, Any] = {"images_per_row": 0, "image_size": "", "prompt_length": 1536}
        yield Job(kind="grpo of measured layers", gpus="1xH200", settings=sampled | without)
    for method, (kind, tuning) in product(("rloo", "grpo"), (("QLoRA", TUNINGS["QLoRA"]), ("full", FULL))):
        settings = {"method": method, **shown["gemma-3-4b-pt"], **tuning, **rolls, "steps_per_generation": 2}
        yield Job(kind=f"images, {method} {kind}", gpus="1xH200", settings=settings)


def ppo() -> Iterator[Job]:
    """Yield jobs of PPO, which TRL 1.12 was the last to have."""
    rows = {"per_device_train_batch_size": 2, "prompt_length": 256, "max_completion_length": 32, "max_length": 288}
    for kind, tuning in (("LoRA", LORA), ("full", FULL)):
        settings = {"model": SMALL, "method": "ppo", "trl_version": "1.12", **tuning, **rows}
        yield Job(kind=f"ppo {kind}", gpus="1xA100-80G", settings=settings)


def mixtures() -> Iterator[Job]:
    """Yield jobs of mixtures of experts at their real size."""
    lora = LORA | {"max_length": 1024}
    for model, gpus, more in (
        ("OLMoE-1B-7B-0924", "1xA100-80G", {"per_device_train_batch_size": 2}),
        ("OLMoE-1B-7B-0924", "4xA100-40G", {"sharding": "zero3", "num_processes": 4}),
        ("LFM2-8B-A1B", "1xA100-80G", {"quantization": "nf4"}),
        ("granite-4.0-h-tiny", "1xA100-80G", {"per_device_train_batch_size": 2}),
        ("ERNIE-4.5-21B-A3B-PT", "1xA100-80G", {}),
        ("gpt-oss-20b", "1xA100-80G", {}),
        ("Moonlight-16B-A3B", "1xA100-80G", {}),
        ("Qwen3-30B-A3B", "1xH200", {}),
        ("Qwen3-30B-A3B", "8xH100", {"sharding": "zero3", "num_processes": 8}),
    ):
        yield Job(kind="mixtures of experts", gpus=gpus, settings={"model": model, **lora, **more})


def towers_under_fsdp2() -> Iterator[Job]:
    """Yield jobs of models with vision towers under FSDP2, whose layers the launch files name."""
    for gpus, processes, tuning in (("2xA100-80G", 2, LORA), ("8xH100", 8, {"tuning": "full", "dtype": "float32"})):
        sharded = {"sharding": "fsdp2", "num_processes": processes}
        for model in ("gemma-3-4b-pt", "gemma-4-E2B"):
            yield Job(kind="towers under FSDP2", gpus=gpus, settings={"model": model, **tuning, **sharded})


def branches() -> Iterator[Job]:
    """Yield jobs for branches of formulas that no job of `grid` takes; their rows are held out of every fit."""
    yield from fsdp1()
    yield from sampled_values()
    yield from streamed_teachers()
    yield from other_tokenizers()
    shown: dict[str, Any] = {"images_per_row": 1, "per_device_train_batch_size": 2, "max_length": 1024}
    sized = shown | {"image_size": "448x448"}
    qwen, qwen3 = {"model": "Qwen2.5-VL-3B-Instruct", **sized}, {"model": "Qwen3-VL-2B-Instruct", **sized}
    gemma, one_row = {"model": "gemma-3-4b-pt", **shown}, {"model": TOWER_OF_ONE_ROW, **sized}
    float32 = {"dtype": "float32"}
    text_alone = {"lora_target_modules": [TEXT_ALONE]}
    for settings in (
        qwen | LORA | {"gradient_checkpointing": False},
        qwen | LORA | float32 | {"eval_strategy": "steps"},
        qwen | LORA | {"activation_offloading": True, "eval_strategy": "steps"},
        qwen3 | FULL | float32 | {"gradient_checkpointing": False},
        one_row | LORA | {"gradient_checkpointing": False},
        one_row | LORA | float32 | {"gradient_checkpointing": False},
        one_row | LORA | float32,
        one_row | LORA | {"activation_offloading": True},
        gemma | LORA | {"gradient_checkpointing": False, "lora_target_modules": ["gate_proj"]},
        gemma | LORA | float32 | {"gradient_checkpointing": False, "eval_strategy": "steps"},
        gemma | LORA | text_alone,
        gemma | LORA | text_alone | {"gradient_checkpointing": False},
        qwen | LORA | text_alone | float32,
        qwen3 | TUNINGS["QLoRA"] | text_alone | {"gradient_checkpointing": False, "method": "dpo"},
    ):
        yield Job(kind="images, other branches", gpus="1xH200", settings=settings)
    sampled = {"method": "grpo", "num_generations": 2, "prompt_length": 1016, "max_completion_length": 8}
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    for settings in (
        {"model": "OLMoE-1B-7B-0924", "lora_target_parameters": experts},
        {"model": "OLMoE-1B-7B-0924", "lora_target_parameters": experts[1:], "gradient_checkpointing": False},
        {"model": "Qwen3-30B-A3B", "lora_target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
        {"model": "gpt-oss-20b", "gradient_checkpointing": False},
        {"model": "DeepSeek-V2-Lite", "per_device_train_batch_size": 2, **sampled},
        {"model": "falcon-7b", "padded": True},
        {"model": "falcon-7b", "gradient_checkpointing": False},
        {"model": "bloom-560m", "gradient_checkpointing": False, "dtype": "float32"},
        {"model": "open_llama_3b", "gradient_checkpointing": False},
        {"model": "Llama-3.2-1B", "gradient_checkpointing": False, "dtype": "float32", "precision": "no"},
    ):
        yield Job(kind="models, other branches", gpus="1xH200", settings=LORA | {"max_length": 1024} | settings)
    full_rows = LORA | {"model": SMALL, "method": "sft", "dtype": "float16", "precision": "fp16", "padded": False}
    for kernel in ("eager", "sdpa"):
        own = {"max_length": 4352, "attn_implementation": kernel}
        yield Job(kind="rows without padding on a T4", gpus="1xT4", settings=full_rows | own)
    alone: dict[str, Any] = {"model": SMALL, "max_length": 1024}
    for settings in (
        {"sharding": "zero3", **LORA},
        {"sharding": "zero3", **FULL, "offload_param": True, "offload_optimizer": True},
        {"sharding": "zero3", **FULL, "offload_optimizer": True, "gradient_accumulation_steps": 2},
        {"sharding": "zero2", **FULL},
        {"sharding": "zero1", **FULL, "offload_optimizer": True},
        {"sharding": "fsdp2", **FULL, "offload_param": True},
        {"sharding": "fsdp2", **LORA, "precision": "no"},
    ):
        yield Job(kind="one GPU, other branches", gpus="1xA100-40G", settings=alone | settings)
    sft: dict[str, Any] = {"model": SMALL, "method": "sft", "max_length": 1024, "per_device_train_batch_size": 2}
    for release, settings in product(("1.12", "1.14"), (LORA, FULL, FULL | float32)):
        yield Job(kind="older TRL", gpus="1xA100-80G", settings=sft | {"trl_version": release} | settings)
    pairs = {**FULL, "sharding": "distributed", "tp_size": 2}
    accumulated = {"gradient_accumulation_steps": 4}
    for model, ranks, more in (
        ("Llama-3.2-1B", 8, {}),
        ("Qwen3-0.6B", 4, {}),
        ("Qwen2.5-1.5B", 8, accumulated),
        ("TinyLlama-1.1B-Chat-v1.0", 8, accumulated),
    ):
        settings = {"model": model, **pairs, **more, "num_processes": ranks}
        yield Job(kind="divided layers", gpus=f"{ranks}xA100-80G", settings=settings)
    groups = {**LORA, "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "ep_size": 4}
    groups |= {"model": "OLMoE-1B-7B-0924", "sharding": "distributed", "num_processes": 8}
    yield Job(kind="divided experts", gpus="8xA100-80G", settings=groups)
    yield from divided_models()


def divided_models() -> Iterator[Job]:
    """Yield jobs of each way in which Transformers' mesh divides a model, in full and with adapters.

    Adapters beside `tp_size` and FSDP2 together stop.
    """
    attention = {**LORA, "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    reading = {**LORA, "lora_target_modules": ["q_proj", "k_proj", "v_proj"]}
    some, output = ({**LORA, "lora_target_modules": names} for names in (["q_proj", "v_proj"], ["o_proj"]))
    whole = {"gradient_checkpointing": False}
    for kind, model, ranks, more in (
        ("layers", "Qwen3-1.7B", 2, FULL),
        ("layers", "Qwen3-4B", 4, {**reading, **whole}),
        ("layers beside FSDP2", "Qwen3-1.7B", 8, {**FULL, **whole, "tp_size": 4}),
        ("layers beside FSDP2", "Llama-3.2-3B", 4, {**FULL, "dtype": "float32", "tp_size": 2}),
        ("experts", "OLMoE-1B-7B-0924", 4, {**FULL, "ep_size": 4, "per_device_train_batch_size": 4}),
        ("experts", "OLMoE-1B-7B-0924", 2, {**attention, **whole, "ep_size": 2}),
        ("experts", "Qwen3-30B-A3B", 8, {**attention, **whole, "ep_size": 8}),
        ("experts", "DeepSeek-V2-Lite", 8, {**attention, "ep_size": 8}),
        ("experts", "OLMoE-1B-7B-0924", 4, {**FULL, **whole, "ep_size": 4}),
        ("experts", "Qwen1.5-MoE-A2.7B", 4, {**FULL, **whole, "ep_size": 4}),
        ("experts", "DeepSeek-V2-Lite", 4, {**FULL, **whole, "ep_size": 4}),
        ("experts", "OLMoE-1B-7B-0924", 4, {**some, **whole, "ep_size": 4}),
        ("experts", "Qwen1.5-MoE-A2.7B", 4, {**some, **whole, "ep_size": 4}),
        ("experts", "DeepSeek-V2-Lite", 4, {**output, **whole, "ep_size": 4}),
        ("experts", "Moonlight-16B-A3B", 4, {**output, **whole, "ep_size": 4}),
        ("experts beside FSDP2", "Qwen1.5-MoE-A2.7B", 8, {**FULL, "ep_size": 4}),
        ("experts beside FSDP2", "Moonlight-16B-A3B", 16, {**FULL, **whole, "ep_size": 8}),
        ("experts beside FSDP2", "Mixtral-8x7B-v0.1", 16, {**attention, "ep_size": 8}),
        ("experts beside FSDP2", "Qwen3-30B-A3B", 16, {**attention, **whole, "ep_size": 8}),
    ):
        scheme = "tensor" if kind == "layers" else "distributed"
        nodes = -(-ranks // 8)
        settings = {"model": model, "sharding": scheme, **more, "num_processes": ranks, "num_nodes": nodes}
        gpus = f"{nodes}x8xA100-80G" if nodes > 1 else f"{ranks}xA100-80G"
        yield Job(kind=f"held out, divided {kind}", gpus=gpus, settings=settings)
