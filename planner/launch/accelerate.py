"""The file that `accelerate launch --config_file` takes: how many processes, and what shards the model between them."""

from planner.candidate import DEEPSPEED, Candidate
from planner.jobs.spellings import SPELLINGS
from planner.launch import deepspeed
from planner.launch.placement import placement

FILE = "accelerate.yaml"
PORT = 29500  # torchrun's, accelerate 1.15, utils/launch.py `prepare_deepspeed_cmd_env`

# Source: trl 1.16, accelerate_configs/fsdp2.yaml. The layers are wrapped one by one, checkpointing stays the trainer's.
FSDP2: dict[str, object] = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_reshard_after_forward": True,
    "fsdp_activation_checkpointing": False,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
}


def accelerate_config(candidate: Candidate) -> dict[str, object]:
    """The launch file's keys and values, as accelerate's `ClusterConfig` has them.

    With a DeepSpeed file accelerate refuses whatever that file says too, mixed precision among it (accelerate 1.15,
    utils/dataclasses.py:1525).
    """
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": SPELLINGS["sharding"][candidate.sharding]["distributed_type"],
        "num_machines": placement(candidate).train_nodes,
        "num_processes": candidate.num_processes,
        "machine_rank": 0,
        "main_training_function": "main",
        "same_network": True,
        "rdzv_backend": "static",
        "use_cpu": False,
    }
    if candidate.sharding in DEEPSPEED:
        # torchrun starts the processes of each node, as it does without DeepSpeed, and not DeepSpeed's own launcher over ssh
        plugin = {
            "deepspeed_config_file": deepspeed.FILE,
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": candidate.sharding == "zero3",
        }
        return config | {"deepspeed_config": plugin}
    config["mixed_precision"] = candidate.precision
    if candidate.sharding == "fsdp2":
        config["fsdp_config"] = FSDP2 | {"fsdp_offload_params": candidate.offload_param}
    return config


def accelerate_yaml(candidate: Candidate) -> str:
    import yaml

    return str(yaml.safe_dump(accelerate_config(candidate), sort_keys=False))
