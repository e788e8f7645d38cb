"""The file that `trl <method> --config` takes: every setting of a candidate that TRL, Transformers and PEFT read, by its own name."""

from planner.candidate import Candidate, Optimizer
from planner.errors import InputError
from planner.jobs.settings import settings_of
from planner.methods import MethodName

FILE = "train.yaml"
FILL_IN = "FILL IN"  # what marks a line that the user completes
DATASET = "your-organisation/your-dataset"
OUTPUT = "output"
REWARD_MODULE, REWARD_FUNCTION = "rewards", "reward"

# Settings that are said elsewhere: in the launch file, in the DeepSpeed file, to the vLLM server, by the checkpoint, by the data,
# or by which command is given.
SAID_ELSEWHERE = frozenset({
    "distributed_type", "zero_stage", "fsdp_version", "num_processes", "num_machines", "offload_optimizer_device", "offload_param_device",
    "fsdp_offload_params", "vllm_data_parallel_size", "quant_method", "padded", "prompt_length", "autocast_adapter_dtype", "environment", "method",
    "trl_version",
})  # fmt: skip

# What a method's config has no field for, though others' have. Source: trl 1.16, experimental/online_dpo/online_dpo_config.py (its engine
# has max_length + max_new_tokens, online_dpo_trainer.py:496); trl 1.12, experimental/ppo/ppo_config.py.
UNKNOWN_TO: dict[MethodName, frozenset[str]] = {
    "orpo": frozenset({"activation_offloading"}),
    "cpo": frozenset({"activation_offloading"}),
    "gkd": frozenset({"ds3_gather_for_generation"}),
    "online-dpo": frozenset({"vllm_max_model_length"}),
    "ppo": frozenset({"reward_model_name_or_path"}),
}
PPO_REWARD_MODEL = "reward_model_path"  # trl 1.12, experimental/ppo/ppo_config.py

# Optimizers that need to be told which modules they project. Source: transformers 5.23, trainer_optimizer.py:121.
PROJECTED: frozenset[Optimizer] = frozenset({"galore_adamw", "apollo_adamw"})


def trl_config(candidate: Candidate) -> dict[str, object]:
    """The settings of the candidate under the names of TRL's arguments; what is not here is TRL's default.

    Raises:
        InputError: a setting that no argument of TRL can make.
    """
    if not candidate.autocast_adapter_dtype and candidate.tuning == "lora":
        raise InputError(
            "TRL's scripts leave autocast_adapter_dtype at PEFT's true, and no argument changes it. Use --set autocast_adapter_dtype=true."
        )
    spelled = settings_of(candidate)
    unknown = UNKNOWN_TO.get(candidate.method, frozenset())
    said = {
        name: value
        for name, value in spelled.items()
        if name not in SAID_ELSEWHERE and name not in unknown and value is not None
    }
    if candidate.optim in PROJECTED:
        said["optim_target_modules"] = "all-linear"
    if candidate.method == "ppo":
        reward = candidate.reward_model or candidate.model
        said[PPO_REWARD_MODEL] = reward.path or reward.id
    if spelled["environment"]:
        said["env"] = spelled["environment"]
    return said


def placeholders(candidate: Candidate) -> dict[str, object]:
    """What a candidate does not say and a run needs: the data, where the model goes, what a completion is worth."""
    said: dict[str, object] = {"dataset_name": DATASET, "output_dir": OUTPUT}
    if needs_reward_function(candidate):
        said["reward_funcs"] = [f"{REWARD_MODULE}.{REWARD_FUNCTION}"]
    return said


def needs_reward_function(candidate: Candidate) -> bool:
    return candidate.method_row.reward_model == "optional" and candidate.reward_model is None


def train_yaml(candidate: Candidate) -> str:
    import yaml  # 20 ms that only this command needs

    filled = yaml.safe_dump(placeholders(candidate), sort_keys=False)
    marked = "".join(f"{line}  # {FILL_IN}\n" for line in filled.splitlines())
    said = settings_lines(candidate)
    return f"# {FILL_IN}: the lines so marked are yours; the others are the plan's, and memory depends on them.\n{marked}\n{said}"


def settings_lines(candidate: Candidate) -> str:
    import yaml

    return str(yaml.safe_dump(trl_config(candidate), sort_keys=False, width=200))
