"""The settings of a candidate by the library that is given them, and the one command that starts the training."""

from msgspec import Struct

from planner.candidate import Candidate
from planner.jobs.settings import settings_of
from planner.launch import accelerate, trl_config
from planner.launch.accelerate import accelerate_config
from planner.launch.command import SCRIPT_FILE
from planner.launch.deepspeed import deepspeed_config
from planner.launch.files import launch_files
from planner.launch.placement import placement
from planner.launch.script import needs_script
from planner.launch.shell import LAUNCH_FILE, SLURM_FILE
from planner.launch.site import Site
from planner.launch.trl_config import SERVER_ARGUMENTS, facts
from planner.models.lora_targets import is_expression

# Setting of TRL's ModelConfig -> field of PEFT's LoraConfig. Source: trl 1.16, trainer/utils.py, `get_peft_config`.
PEFT_NAMES = {
    "lora_r": "r",
    "lora_dropout": "lora_dropout",
    "lora_modules_to_save": "modules_to_save",
    "use_dora": "use_dora",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
}


def settings_by_consumer(candidate: Candidate) -> dict[str, dict[str, object]]:
    """The settings by library: what train.yaml, LoraConfig, accelerate's and DeepSpeed's file, and vLLM are given.

    `env` are environment variables, and `facts` what no library is given: the method, the release, the data.

    Raises:
        InputError: TRL has no argument for a setting.
    """
    settings, config = settings_of(candidate), trl_config.trl_config(candidate)
    env = config.pop("env", {})
    engine = SERVER_ARGUMENTS.items() if candidate.vllm != "off" else ()
    lora = PEFT_NAMES.items() if candidate.tuning == "lora" else ()
    if is_expression(candidate.lora_target_modules):
        settings["lora_target_modules"] = candidate.lora_target_modules[0]  # of a list PEFT compares names
    return {
        "trl": config,
        "peft": {field: settings[name] for name, field in lora if settings.get(name) is not None},
        "accelerate": accelerate_config(candidate),
        "deepspeed": deepspeed_config(candidate),
        "vllm": {argument: settings[name] for argument, name in engine if settings.get(name) is not None},
        "env": dict(env) if isinstance(env, dict) else {},
        "facts": {name: value for name, value in facts(candidate).items() if name != "accelerate_config"},
    }


class Launch(Struct, frozen=True, kw_only=True):
    """A training to start: files of a folder (texts by name), the command to run in it, and variables for the command.

    `env` are defaults: a variable that is set already wins.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    files: dict[str, str]


def launch(candidate: Candidate, site: Site | None = None, config: str | None = None) -> Launch:
    """The launch of a candidate. `config`: the text of the user's own train.yaml.

    Raises:
        InputError: as `launch_files`.
    """
    files = launch_files(candidate, site=site, config=config)
    environment = settings_of(candidate)["environment"]
    env = {name: str(value) for name, value in environment.items()} if isinstance(environment, dict) else {}
    argv = _argv(candidate)
    if argv[0] == "accelerate" and not candidate.scheme_row.launched:
        env["CUDA_VISIBLE_DEVICES"] = "0"  # planner/launch/shell.py, `ONE_DEVICE`
    return Launch(argv=tuple(argv), env=env, files=files)


def _argv(candidate: Candidate) -> list[str]:
    """The command that starts the training; a script of the folder where it takes more than one command.

    TRL's commands are modules with the arguments of train.yaml (trl 1.16, scripts/sft.py and others).
    """
    if candidate.num_nodes > 1:
        return ["sbatch", SLURM_FILE]
    if candidate.tool != "trl":
        return ["bash", LAUNCH_FILE]
    if (
        placement(candidate).server_gpus or candidate.teacher_server_gpus or candidate.offload_optimizer
    ):  # a server, or threads for Adam on the host
        return ["bash", LAUNCH_FILE]
    script = [SCRIPT_FILE] if needs_script(candidate) else ["--module", f"trl.scripts.{candidate.method}"]
    launcher = ["accelerate", "launch", "--config_file", accelerate.FILE]
    return [*launcher, "--num_processes", str(candidate.num_processes), *script, "--config", trl_config.FILE]
