"""The file for `accelerate launch --config_file`: the number of processes, and how they shard the model."""

from planner.candidate import Candidate
from planner.launch import deepspeed
from planner.launch.placement import placement
from planner.launch.trl_config import ACCELERATE_FILE
from planner.models.architectures.table import architecture_of
from planner.settings.table import SPELLINGS

FILE = ACCELERATE_FILE
PORT = 29500  # torchrun's default port; accelerate 1.15, utils/launch.py, `prepare_deepspeed_cmd_env`

# FSDP wraps each layer by itself; gradient checkpointing is left to the trainer.
# Source: trl 1.16, accelerate_configs/fsdp2.yaml.
FSDP2: dict[str, object] = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_reshard_after_forward": True,
    "fsdp_activation_checkpointing": False,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
}
# Source: trl 1.16, accelerate_configs/fsdp1.yaml.
FSDP1: dict[str, object] = {
    "fsdp_version": 1,
    "fsdp_reshard_after_forward": "FULL_SHARD",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_forward_prefetch": True,
    "fsdp_sync_module_states": True,
    "fsdp_use_orig_params": True,
}


def wrapped_classes(candidate: Candidate) -> tuple[str, ...]:
    """Names of the policy's classes that FSDP2 wraps; empty if the model has all of its own list, the default."""
    model = candidate.model
    if model.config.get("audio_config") is None and model.architecture.wrapped_without_audio:
        return model.architecture.wrapped_without_audio
    text = architecture_of(_type_of(model.config.get("text_config"))).wrapped_as_text
    tower = architecture_of(_type_of(model.config.get("vision_config"))).wrapped_as_tower
    return (*text, *tower, *model.architecture.wrapped_projector) if text and tower else ()


def _type_of(config: object) -> str:
    return str(config.get("model_type", "")) if isinstance(config, dict) else ""


def accelerate_config(candidate: Candidate) -> dict[str, object]:
    """The keys and values of the file, named as in accelerate's `ClusterConfig`.

    Omits the settings of the DeepSpeed file, such as mixed precision: accelerate raises an error if both files have
    them (accelerate 1.15, utils/dataclasses.py, `DeepSpeedPlugin._deepspeed_config_checks`).
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
    if candidate.scheme_row.section == "deepspeed_config":
        # "standard": torchrun starts the processes of each node as without DeepSpeed, instead of DeepSpeed's ssh
        # launcher.
        plugin = {
            "deepspeed_config_file": deepspeed.FILE,
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": candidate.scheme_row.creates_sharded,
        }
        return config | {"deepspeed_config": plugin} | parallelism_config(candidate)
    config["mixed_precision"] = candidate.precision
    if candidate.scheme_row.section == "fsdp_config":
        wrapped = wrapped_classes(candidate)
        named = {"fsdp_transformer_layer_cls_to_wrap": ",".join(wrapped)} if wrapped else {}
        config["fsdp_config"] = fsdp(candidate) | {"fsdp_offload_params": candidate.offload_param, **named}
    return config | parallelism_config(candidate)


def fsdp(candidate: Candidate) -> dict[str, object]:
    """The settings of FSDP that both launchers write, under the names of accelerate's section fsdp_config."""
    version = FSDP2 | FSDP1 if candidate.scheme_row.flat_units else FSDP2
    return version | {"fsdp_cpu_ram_efficient_loading": not candidate.model.has_saved_buffers}


def parallelism_config(candidate: Candidate) -> dict[str, object]:
    """The section for copies of a sharded model and for shared rows; empty without both.

    Its keys are named as the arguments of `accelerate launch`.
    Source: accelerate 1.15, commands/launch.py, utils/launch.py (`prepare_extend_env_parallelism_config`).
    """
    if candidate.row_gpus == candidate.dp_replicate_size == 1:
        return {}
    section: dict[str, object] = {
        "parallelism_config_dp_replicate_size": candidate.dp_replicate_size,
        "parallelism_config_dp_shard_size": candidate.shard_gpus // candidate.row_gpus,
        "parallelism_config_tp_size": 1,
        "parallelism_config_cp_size": candidate.cp_size,
        "parallelism_config_sp_size": candidate.sp_size,
    }
    if candidate.cp_size > 1:
        section |= {"parallelism_config_cp_backend": "torch", "parallelism_config_cp_comm_strategy": "allgather"}
    elif candidate.sp_size > 1:
        section |= {
            "parallelism_config_sp_backend": "deepspeed",
            "parallelism_config_sp_seq_length_is_variable": True,
            "parallelism_config_sp_attn_implementation": candidate.attn_implementation,
        }
    return {"parallelism_config": section}


def accelerate_yaml(candidate: Candidate) -> str:
    """The text of the file."""
    import yaml

    return str(yaml.safe_dump(accelerate_config(candidate), sort_keys=False))
