"""Candidates a second that one process estimates: `python benchmarks/estimator.py`."""

from itertools import product
from time import perf_counter

from msgspec.structs import replace

from planner.candidate import Candidate
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.models.catalogue import load_model

RISK = 0.05


def candidates() -> list[Candidate]:
    """The 9,216 combinations of the settings that a search changes most."""
    grpo = Candidate(
        model=load_model("Qwen2.5-7B"),
        method="grpo",
        dtype="bfloat16",
        sharding="ddp",
        num_processes=2,
        vllm="colocate",
    )
    grpo = replace(grpo, vllm_tensor_parallel_size=2, vllm_max_model_length=4096)
    knobs = product(
        (1, 2, 4, 8),
        (256, 512, 1024, 2048),
        (1, 2, 4, 8),
        (8, 16, 32, 64),
        ("full", "lora"),
        (True, False),
        ("ddp", "zero2", "zero3"),
        (0.2, 0.3, 0.4),
    )
    return [
        replace(
            grpo,
            per_device_train_batch_size=batch,
            max_completion_length=length,
            gradient_accumulation_steps=accumulation,
            lora_r=rank,
            tuning=tuning,
            gradient_checkpointing=checkpointing,
            sharding=sharding,
            vllm_gpu_memory_utilization=utilization,
        )
        for batch, length, accumulation, rank, tuning, checkpointing, sharding, utilization in knobs
    ]


def main() -> None:
    cluster = parse_cluster("2xA100-40G")
    tried = candidates()
    start = perf_counter()
    fitting = sum(estimate(candidate, cluster, RISK).fits for candidate in tried)
    seconds = perf_counter() - start
    print(f"{len(tried):,} candidates in {seconds:.2f} s: {len(tried) / seconds:,.0f} a second; {fitting:,} fit")


if __name__ == "__main__":
    main()
