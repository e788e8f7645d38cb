"""An estimate and a plan written by hand, so that reports are tested without the formulas."""

from msgspec.structs import replace

from planner.candidate import Candidate
from planner.gpus.cluster import Cluster, Gpu, HostMemory
from planner.jobs.job import Job
from planner.models.catalogue import load_model
from planner.planning import Plan
from planner.quantities import Estimate, GpuMemory, Note, PhaseMemory, Throughput
from planner.search.variations import Variation
from planner.units import GIB, MIB

MODEL = load_model("Qwen2.5-7B")
A100 = Gpu(
    name="A100-40G",
    total_bytes=40 * GIB,
    free_bytes=39 * GIB + 512 * MIB,
    bf16_flops=312e12,
    memory_bytes_per_second=1555e9,
    nvlink_bytes_per_second=600e9,
    pcie_bytes_per_second=32e9,
    compute_capability=(8, 0),
    multiprocessors=108,
    source="a data sheet",
)
HOST = HostMemory(total_bytes=64 * GIB, origin="assumed", source="a cloud's instances")
CLUSTER = Cluster(gpu=A100, nodes=1, gpus_per_node=2, host=HOST)

COLOCATED = Candidate(
    model=MODEL,
    method="grpo",
    tuning="lora",
    dtype="bfloat16",
    sharding="ddp",
    num_processes=2,
    gradient_accumulation_steps=2,
    vllm="colocate",
    vllm_enable_sleep_mode=True,
    expandable_segments=True,
)
FULL = replace(COLOCATED, tuning="full", sharding="zero3", offload_optimizer=True, expandable_segments=False)

TRAINING = GpuMemory(
    role="train+vllm",
    count=2,
    capacity_bytes=A100.free_bytes,
    context_bytes=GIB,
    phases=(
        PhaseMemory(name="load", components={"weights": 14 * GIB, "runtime": GIB}),
        PhaseMemory(
            name="rollout", components={"weights": 14 * GIB, "adapters": 160 * MIB, "engine": 20 * GIB, "runtime": GIB}
        ),
        PhaseMemory(
            name="backward",
            components={
                "weights": 14 * GIB,
                "adapters": 160 * MIB,
                "gradients": 160 * MIB,
                "optimizer_states": 320 * MIB,
                "activations": 9 * GIB,
                "transients": GIB,
                "loss": 512 * MIB,
                "communication": 256 * MIB,
                "fragmentation": 512 * MIB,
                "runtime": GIB,
            },
        ),
        PhaseMemory(
            name="optimizer_step",
            components={
                "weights": 14 * GIB,
                "adapters": 160 * MIB,
                "gradients": 160 * MIB,
                "optimizer_states": 320 * MIB,
            },
        ),
    ),
    interval_bytes=(34 * GIB, 37 * GIB),
    details={"engine": {"weights": 14 * GIB, "kv_cache": 5 * GIB, "cuda_graphs": GIB}},
)

ESTIMATE = Estimate(
    candidate=COLOCATED,
    fits=True,
    fit_probability=0.9951,
    evidence="estimated",
    gpus=(TRAINING,),
    host_peak_bytes=20 * GIB,
    host_capacity_bytes=64 * GIB,
    throughput=Throughput(
        tokens_per_second=2904.7, step_seconds=14.1, seconds={"generation": 9.1, "training": 5.0}, evidence="estimated"
    ),
    reasons=(Note("float32_by_default", {"more_bytes": 14 * GIB, "dtype": "bfloat16"}),),
)
TOO_LARGE = replace(
    ESTIMATE,
    candidate=FULL,
    fits=False,
    fit_probability=0.0,
    gpus=(
        replace(
            TRAINING,
            phases=(
                *TRAINING.phases[:2],
                PhaseMemory(
                    name="optimizer_step",
                    components={"weights": 14 * GIB, "gradients": 14 * GIB, "optimizer_states": 28 * GIB},
                ),
            ),
            interval_bytes=(55 * GIB, 58 * GIB),
        ),
    ),
)

JOB = Job(model=MODEL, method="grpo", pinned={"lora_r": 16, "vllm": "colocate"})
PLAN = Plan(
    job=JOB,
    cluster=CLUSTER,
    best=ESTIMATE,
    alternatives=(
        Variation(
            change=Note("tuning_class", {"tuning": "full"}),
            estimate=TOO_LARGE,
            takes=(Note("host_memory_needed", {"needed_bytes": 20 * GIB}),),
        ),
    ),
    remedies=(),
    more=(Note("batch_fits_no_faster", {"batch": 4}),),
    warnings=(Note("model_source", {"model": "org/model", "remark": "its config has no licence"}),),
    versions={"trl": "1.16"},
)
NOTHING_FITS = replace(
    PLAN,
    best=TOO_LARGE,
    alternatives=(),
    remedies=(Variation(change=Note("with_option", {"option": "--tuning", "value": "lora"}), estimate=ESTIMATE),),
)
