"""train.yaml, the file for `trl <method> --config`: a candidate's settings under the names of TRL's arguments."""

from collections.abc import Mapping

from planner.candidate import Candidate
from planner.errors import InputError
from planner.jobs.settings import settings_of, trl_arguments

FILE = "train.yaml"
FILL_IN = "FILL IN"  # mark of a line that the user must complete
DATASET = "your-organisation/your-dataset"
OUTPUT = "output"
REWARD_MODULE, REWARD_FUNCTION = "rewards", "reward"


def trl_config(candidate: Candidate) -> dict[str, object]:
    """The settings of the candidate under the names of TRL's arguments; settings not listed have TRL's defaults.

    Raises:
        InputError: TRL has no argument for a setting.
    """
    if not candidate.autocast_adapter_dtype and candidate.tuning == "lora":
        raise InputError(
            "TRL's scripts leave autocast_adapter_dtype at PEFT's true, and no argument changes it. Use --set "
            "autocast_adapter_dtype=true."
        )
    config = {name: value for name, value in trl_arguments(candidate).items() if value is not None}
    if candidate.optimizer_row.projects:
        config["optim_target_modules"] = "all-linear"
    argument = candidate.method_row.reward_model_argument
    if argument and candidate.reward_model is not None:
        config[argument] = candidate.reward_model.path or candidate.reward_model.id
    if environment := settings_of(candidate)["environment"]:
        config["env"] = environment
    return config


def placeholders(candidate: Candidate) -> dict[str, object]:
    """Arguments that a run needs and the candidate lacks: the dataset, the output folder, the source of rewards."""
    arguments: dict[str, object] = {"dataset_name": DATASET, "output_dir": OUTPUT}
    if needs_reward_function(candidate):
        arguments["reward_funcs"] = [f"{REWARD_MODULE}.{REWARD_FUNCTION}"]
    argument = candidate.method_row.reward_model_argument
    if argument and candidate.reward_model is None:
        arguments[argument] = candidate.model.path or candidate.model.id  # a model of the same shape
    return arguments


def needs_reward_function(candidate: Candidate) -> bool:
    """True if the method takes rewards and the candidate has no reward model."""
    return candidate.method_row.reward_model == "optional" and candidate.reward_model is None


def train_yaml(candidate: Candidate, sharding: Mapping[str, object] | None = None) -> str:
    """The text of train.yaml: first the lines that the user must complete, then the plan's settings.

    `sharding`: the trainer's arguments that shard the model, for a launcher that does not.

    Raises:
        InputError: TRL has no argument for a setting.
    """
    import yaml  # lazy import: it takes 20 ms, and only launch files need it

    filled = yaml.safe_dump(placeholders(candidate), sort_keys=False)
    marked = "".join(f"{line}  # {FILL_IN}\n" for line in filled.splitlines())
    comment = f"# Complete the lines marked {FILL_IN}. The other lines are the plan's settings; they determine memory."
    sharded = yaml.safe_dump(dict(sharding), sort_keys=False) if sharding else ""
    return f"{comment}\n{marked}\n{settings_lines(candidate)}{sharded}"


def settings_lines(candidate: Candidate) -> str:
    """The plan's settings as YAML.

    Raises:
        InputError: TRL has no argument for a setting.
    """
    import yaml

    return str(yaml.safe_dump(trl_config(candidate), sort_keys=False, width=200))
