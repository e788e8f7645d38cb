"""Run expert parallelism as Transformers had it until 5.18 on emulated GPUs: results/earlier_experts.jsonl.

    CONSTRAINTS=FILE scripts/emulated_environment.sh DIR    FILE: constraints.txt with transformers==5.18.0
    DIR/bin/python -m scripts.earlier_experts               runs that have no row yet

`DistributedConfig(tp_size=E, fsdp_size=D, enable_expert_parallel=True)` makes groups of E GPUs with the same batch. The
GPUs of a group divide the experts of each layer and have everything else; FSDP2 shards what a GPU has over D groups.
The router masks tokens of other GPUs' experts, whose rows are not left out, and the outputs are summed.
Source: transformers 5.18, models/glm4_moe/configuration_glm4_moe.py (`base_model_ep_plan`); distributed/mixin.py
(`tp_plan`, `maybe_distribute_model`), tensor_parallel.py (`EpRouterParallel`, `MoeExpertsParallel`).
"""

import importlib.metadata
import json
import os
import sys
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.memory.dtypes import SIXTEEN_BIT_BYTES
from planner.models.layers import Experts
from planner.models.shape import ModelShape
from probes.substitution import substituted
from scripts import emulated_grid
from scripts.emulated_jobs import Job

ROWS = emulated_grid.RESULTS / "earlier_experts.jsonl"
MESH = "PLAN_EARLIER_MESH"  # environment variable: the `DistributedConfig` of a run, as JSON
ON_ATTENTION = {"tuning": "lora", "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


class Run(Struct, frozen=True, kw_only=True, eq=False):
    """One run: GPUs that divide the experts (`group`), groups, GPUs of a node, and the settings."""

    model: str
    group: int
    groups: int = 1
    node: int = 8
    settings: dict[str, Any]

    @property
    def mesh(self) -> dict[str, Any]:
        return {"tp_size": self.group, "fsdp_size": self.groups, "enable_expert_parallel": True}

    @property
    def nodes(self) -> int:
        return self.group * self.groups // self.node

    @property
    def job(self) -> Job:
        processes = {"num_processes": self.group * self.groups, "num_nodes": self.nodes}
        settings = {"model": self.model, "dtype": "bfloat16", **self.settings, "sharding": "distributed", **processes}
        return Job(kind="earlier experts", gpus=f"{self.nodes}x{self.node}xH100", settings=settings)

    def planned(self) -> tuple[int, int]:
        """Return the allocated bytes and the need of one GPU.

        They are those of the model with a GPU's experts, on one GPU of each group. Before the weights come,
        Transformers 5.18 allocates at once what it takes for a GPU's: the experts over all GPUs, and all else whole,
        though FSDP2 shards it (modeling_utils.py, `caching_allocator_warmup`, `get_total_byte_count`).
        """
        several = {"num_processes": self.groups, "num_nodes": self.groups}
        alone = {"num_processes": 1, "num_nodes": 1, "sharding": "none"}
        candidate = replace(self.job.candidate, **(several if self.groups > 1 else alone))
        candidate = replace(candidate, model=of_one_gpu(candidate.model, self.group))
        cluster = parse_cluster(f"{self.groups}x1xH100", None)
        gpu = estimate(candidate, cluster).gpus[0]
        phases = [emulated_grid.torch_bytes(candidate, cluster, phase) for phase in gpu.phases]
        model = self.job.candidate.model
        experts = model.expert_params
        warm_up = SIXTEEN_BIT_BYTES * (model.params - experts + experts // (self.group * self.groups))
        outside = gpu.peak_bytes - max(phases)
        return max(warm_up, *phases), max(warm_up + outside, gpu.peak_bytes)


# The runs of huggingface/trl#6869, and the memory of a GPU that it says, in GB. GLM-5 has the shape of GLM-5.2.
RUNS = {
    Run(model="Qwen3-30B-A3B", group=8, settings={"tuning": "full"}): 34,
    Run(model="GLM-4.5-Air", group=32, groups=2, settings={"tuning": "full"}): 41,
    Run(model="GLM-4.6", group=16, settings=ON_ATTENTION): 73,
    Run(model="GLM-5", group=32, groups=2, settings=ON_ATTENTION): 56,
}


def of_one_gpu(model: ModelShape, gpus: int) -> ModelShape:
    """Return the model with the experts that one of `gpus` GPUs has; each token still has as many rows."""

    def own(block: Any) -> Any:
        if not isinstance(block, Experts):
            return block
        return replace(block, num_experts=block.num_experts // gpus, expert_params=block.expert_params // gpus)

    pieces = {layer: replace(layer, feed_forward=own(layer.feed_forward)) for layer, _ in model.layer_kinds}
    gone = sum(count * (layer.params - pieces[layer].params) for layer, count in model.layer_kinds)
    return replace(model, layers=tuple(pieces[layer] for layer in model.layers), params=model.params - gone)


def run() -> None:
    """Run the runs that have no row yet, and append the row of each as it is ready."""
    done = [(row["settings"]["model"], row["mesh"]) for row in emulated_grid.load_rows(ROWS)]
    versions = {name: importlib.metadata.version(name) for name in emulated_grid.LIBRARIES}
    for each in RUNS:
        if (each.model, each.mesh) not in done:
            os.environ[MESH] = json.dumps(each.mesh)
            with substituted(emulated_grid, "RECORDED_WORKER", "scripts.earlier_experts"):
                row = {**emulated_grid.row(each.job), "mesh": each.mesh, "versions": versions}
            with ROWS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def work(task_file: str) -> int:
    """Run one process of a run: the worker of a probe with the run's mesh, and with the allocator's history."""
    from probes.worker import worker, workload
    from scripts import recorded_worker

    loading: dict[str, object] = {"distributed_config": json.loads(os.environ[MESH])}
    with (
        substituted(workload, "loading_arguments", lambda candidate: loading),
        substituted(worker, "memory_watch", recorded_worker.recording_watch),
        substituted(worker, "measure", recorded_worker.recorded),
    ):
        return worker.main(task_file)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(work(sys.argv[1]))
    run()
