"""The commands that start the training and its vLLM server."""

from planner.candidate import Candidate
from planner.jobs.settings import settings_of
from planner.launch import accelerate, trl_config
from planner.launch.placement import placement
from planner.launch.script import needs_script
from planner.launch.site import Site
from planner.launch.torchrun import starter
from planner.launch.trl_config import SERVER_ARGUMENTS

SCRIPT_FILE = "train.py"
SERVER_PORT = 8000  # trl 1.16, scripts/vllm_serve.py and `vllm_server_port` of the configs

ACCELERATE = ("accelerate", "launch")


def launch_command(candidate: Candidate, script: str = "", launcher: tuple[str, ...] = ACCELERATE) -> list[str]:
    """The command that trains the candidate, to be run in the folder of its launch files.

    With `script` it is `accelerate launch` of that script. Without, it is TRL's command for the method, or `accelerate
    launch train.py` (`script.needs_script`). More arguments at the end are passed to the script.
    """
    if not script and not needs_script(candidate):
        return ["trl", candidate.method, "--config", trl_config.FILE, "--accelerate_config", accelerate.FILE]
    launch = [*launcher, "--config_file", accelerate.FILE, "--num_processes", str(candidate.num_processes)]
    return [*launch, script] if script else [*launch, SCRIPT_FILE, "--config", trl_config.FILE]


def torchrun_command(candidate: Candidate) -> tuple[list[str], list[str]]:
    """The command that trains the candidate without accelerate's launcher: what starts a script, and the script.

    TRL's commands are modules with the arguments of train.yaml (trl 1.16, scripts/sft.py and others).
    """
    script = [SCRIPT_FILE] if needs_script(candidate) else ["-m", f"trl.scripts.{candidate.method.replace('-', '_')}"]
    return starter(candidate), [*script, "--config", trl_config.FILE]


def server_command(candidate: Candidate) -> list[str]:
    """The command that starts the vLLM server of a candidate; empty if it has none.

    Source: trl 1.16, scripts/vllm_serve.py, `ScriptArguments`.
    """
    if not placement(candidate).server_gpus:
        return []
    settings = settings_of(candidate)
    command = ["trl", "vllm-serve", "--model", candidate.model.path or candidate.model.id, "--port", str(SERVER_PORT)]
    for argument, name in SERVER_ARGUMENTS.items():
        if settings[name] is not None:
            command += [f"--{argument}", str(settings[name])]
    return command


def estimate_command(site: Site | None = None) -> list[str]:
    """The command that estimates the launch files in their folder; without a site, `--gpus` must be added."""
    return ["plan", "estimate", "--config", trl_config.FILE, *(site.flags if site is not None else ())]
