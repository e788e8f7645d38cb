"""train.yaml, the file for `trl <method> --config`: a candidate's settings under the names of TRL's arguments."""

from collections.abc import Mapping
from typing import Literal

from planner.candidate import Candidate
from planner.errors import InputError
from planner.jobs.settings import CHECKPOINTING_KWARGS, settings_of, settings_text, trl_arguments
from planner.launch.requirements import pins_releases

FILE = "train.yaml"
ACCELERATE_FILE = "accelerate.yaml"
Launcher = Literal["accelerate", "torchrun"]
FACTS = "# Read by plan: "  # beginning of the comment that plan reads and TRL does not
FILL_IN = "FILL IN"  # mark of a line that the user must complete
HEADER = f"# Complete the lines marked {FILL_IN}. The other lines are the plan's settings; they determine memory."
DATASET = "your-organisation/your-dataset"
OUTPUT = "output"
# Argument of `trl vllm-serve` -> the setting with its value.
SERVER_ARGUMENTS: dict[str, str] = {
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "data_parallel_size": "vllm_data_parallel_size",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "max_model_len": "vllm_max_model_length",
}
# Names of arguments in releases of Transformers before the pinned one -> in that one, which warns about the old names.
# Source: transformers 5.23, training_args.py, `TrainingArguments.__post_init__`.
NEWER_NAMES: dict[str, str] = {
    "gradient_checkpointing": "activation_checkpointing",
    CHECKPOINTING_KWARGS: "activation_checkpointing_kwargs",
}
TEACHER_SETTINGS = ("teacher_server_model", "teacher_server_gpus", "teacher_server_gpu_memory_utilization")
REWARD_MODULE, REWARD_FUNCTION = "rewards", "reward"


def trl_config(candidate: Candidate) -> dict[str, object]:
    """The settings of the candidate under the names of TRL's arguments; settings not listed have TRL's defaults.

    Raises:
        InputError: TRL has no argument for a setting.
    """
    if not candidate.autocast_adapter_dtype and candidate.tuning == "lora":
        raise InputError(
            "TRL's scripts leave autocast_adapter_dtype at PEFT's true, and no argument changes it. Change "
            "autocast_adapter_dtype to true."
        )
    names = NEWER_NAMES if pins_releases(candidate) else {}
    config = {names.get(name, name): value for name, value in trl_arguments(candidate).items() if value is not None}
    argument = candidate.method_row.reward_model_argument
    if argument and candidate.reward_model is not None:
        config[argument] = candidate.reward_model.path or candidate.reward_model.id
    if candidate.teacher_server_gpus:
        config |= teacher_address(candidate)
    if environment := settings_of(candidate)["environment"]:
        config["env"] = environment
    return config


def placeholders(candidate: Candidate) -> dict[str, object]:
    """Arguments that a run needs and the candidate lacks: the dataset, the output folder, the source of rewards."""
    arguments: dict[str, object] = {"dataset_name": DATASET, "output_dir": OUTPUT}
    if needs_reward_function(candidate):
        arguments["reward_funcs"] = [f"{REWARD_MODULE}.{REWARD_FUNCTION}"]
    if not candidate.teacher_server_gpus:
        arguments |= teacher_address(candidate)
    argument = candidate.method_row.reward_model_argument
    if argument and candidate.reward_model is None:
        arguments[argument] = candidate.model.path or candidate.model.id  # a model of the same shape
    return arguments


def teacher_address(candidate: Candidate) -> dict[str, object]:
    """The argument that says where a teacher is served; empty without such a teacher."""
    row, url = candidate.method_row, f"http://localhost:{candidate.method_row.teacher_port}"
    if not row.teacher_server:
        return {}
    return {"teacher_server_urls": {"default": url}} if row.asynchronous else {"teacher_model_server_url": url}


def needs_reward_function(candidate: Candidate) -> bool:
    """True if the method takes rewards and the candidate has no reward model."""
    return candidate.method_row.takes_reward_functions and candidate.reward_model is None


def facts(candidate: Candidate, launcher: Launcher = "accelerate") -> dict[str, object]:
    """Return the facts that an estimate of the files needs and TRL has no argument for, by plan's own names.

    These are the method, the release, the launch file, facts of the data, a quantization that the checkpoint keeps, and
    the settings of a vLLM server.
    """
    said: dict[str, object] = {"method": candidate.method, "trl_version": candidate.trl_version}
    said |= {"accelerate_config": ACCELERATE_FILE} if launcher == "accelerate" else {}
    said |= {} if launcher == "accelerate" else {"num_processes": candidate.num_processes}
    said |= {"vllm_version": candidate.vllm_version} if candidate.vllm_version != "newest" else {}
    said |= {"padded": candidate.padded}
    said |= {"images_per_row": candidate.images_per_row} if candidate.images_per_row else {}
    said |= {"image_size": candidate.image_size} if candidate.image_size else {}
    said |= {"lengths": candidate.lengths.words} if candidate.lengths is not None else {}
    said |= {"completion_lengths": candidate.completion_lengths.words} if candidate.completion_lengths else {}
    said |= {"prompt_length": candidate.prompt_length} if candidate.method_row.generates else {}
    said |= {"quant_method": candidate.quantization} if candidate.quantization_row.dequantized else {}
    written, settings = trl_config(candidate), settings_of(candidate)
    said |= {name: settings[name] for name in TEACHER_SETTINGS if settings.get(name)}
    if candidate.method_row.teacher_server:  # 0, served elsewhere, is not what a job without a word gets
        said["teacher_server_gpus"] = candidate.teacher_server_gpus
    for name in ("use_vllm", "vllm_mode", *SERVER_ARGUMENTS.values()) if candidate.server_gpus else ():
        if name not in written and settings[name] is not None:
            said[name] = settings[name]
    return said


def facts_line(candidate: Candidate, launcher: Launcher = "accelerate") -> str:
    """The comment of train.yaml with the facts, which `plan estimate --config` reads."""
    return f"{FACTS}{settings_text(facts(candidate, launcher))}\n"


def train_yaml(
    candidate: Candidate, launcher: Launcher = "accelerate", sharding: Mapping[str, object] | None = None
) -> str:
    """The text of train.yaml: first the lines that the user must complete, then the plan's settings.

    `sharding`: the trainer's arguments that shard the model, for a launcher that does not.

    Raises:
        InputError: TRL has no argument for a setting.
    """
    import yaml  # lazy import: it takes 20 ms, and only launch files need it

    filled = yaml.safe_dump(placeholders(candidate), sort_keys=False)
    marked = "".join(f"{line}  # {FILL_IN}\n" for line in filled.splitlines())
    sharded = yaml.safe_dump(dict(sharding), sort_keys=False) if sharding else ""
    return f"{HEADER}\n{facts_line(candidate, launcher)}\n{marked}\n{settings_lines(candidate)}{sharded}"


def settings_lines(candidate: Candidate) -> str:
    """The plan's settings as YAML.

    Raises:
        InputError: TRL has no argument for a setting.
    """
    import yaml

    return str(yaml.safe_dump(trl_config(candidate), sort_keys=False, width=200))
