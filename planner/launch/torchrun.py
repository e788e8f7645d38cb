"""Start a training with torchrun alone: the sharding is in train.yaml, as the trainer's own arguments."""

from planner.candidate import Candidate
from planner.errors import InputError
from planner.launch import deepspeed
from planner.launch.accelerate import PORT, fsdp, wrapped_classes
from planner.launch.placement import placement

# transformers leaves out buffers and the initialization on all processes but the first where this is set, and its own
# `fsdp` sets it too late, when the model is loaded. Source: transformers 5.23, distributed/fsdp.py, `is_fsdp_enabled`;
# accelerate 1.15, accelerator.py, `Accelerator.__init__`.
FSDP_ENVIRONMENT = {"ACCELERATE_USE_FSDP": "true"}

# Key of accelerate's section fsdp_config -> key of the trainer's `fsdp_config`, where it differs by more than "fsdp_".
# Source: transformers 5.23, training_args.py, `_process_fsdp_args`.
OFFLOAD = "cpu_offload"


def sharding_settings(candidate: Candidate) -> dict[str, object]:
    """The arguments of train.yaml that shard the model; accelerate.yaml has their equivalents.

    Raises:
        InputError: GPUs share rows or copies of the model, which only accelerate's file can say.
    """
    if candidate.row_gpus > 1 or candidate.dp_replicate_size > 1:
        raise InputError(
            "cp_size, sp_size and dp_replicate_size are settings of accelerate's file, which torchrun does not read. "
            "Use --launcher accelerate."
        )
    if candidate.scheme_row.section == "deepspeed_config":
        return {"deepspeed": deepspeed.FILE}
    if candidate.scheme_row.section == "fsdp_config":
        config = {name.removeprefix("fsdp_"): value for name, value in fsdp(candidate).items()}
        wrapped = wrapped_classes(candidate)
        named = {"transformer_layer_cls_to_wrap": list(wrapped)} if wrapped else {}
        return {"fsdp": True, "fsdp_config": config | {OFFLOAD: candidate.offload_param, **named}}
    return {}


def process_variables(candidate: Candidate) -> dict[str, str]:
    """The environment variables that the processes need."""
    return FSDP_ENVIRONMENT if candidate.scheme_row.section == "fsdp_config" else {}


def starter(candidate: Candidate) -> list[str]:
    """The command before the name of the script: torchrun, or Python for one process that shards nothing.

    One process of torchrun would be wrapped in DistributedDataParallel, whose buckets are as large as the gradients.
    """
    if not candidate.scheme_row.launched:
        return ["python"]
    placed = placement(candidate)
    nodes = ["--standalone"] if candidate.num_nodes == 1 else ["--nnodes", str(placed.train_nodes)]
    return ["torchrun", *nodes, "--nproc_per_node", str(placed.processes_per_node)]


def rendezvous(candidate: Candidate) -> str:
    """The arguments of torchrun in slurm.sh: where the processes of all nodes meet.

    Source: torch 2.13, distributed/run.py, "Multi-node".
    """
    if not candidate.scheme_row.launched:
        return ""
    return f' --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "${{nodes[0]}}:{PORT}"'
