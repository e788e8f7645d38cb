"""The commands that start the training and its vLLM server."""

from typing import Literal

from planner.candidate import Candidate
from planner.jobs.job import DEQUANTIZED
from planner.jobs.settings import settings_of
from planner.launch import accelerate, trl_config
from planner.launch.placement import placement
from planner.launch.script import needs_script
from planner.launch.torchrun import starter
from planner.methods import NEWEST_TRL

SCRIPT_FILE = "train.py"
SERVER_PORT = 8000  # trl 1.16, scripts/vllm_serve.py and `vllm_server_port` of the configs

ACCELERATE = ("accelerate", "launch")
Launcher = Literal["accelerate", "torchrun"]


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


def estimate_command(candidate: Candidate, launcher: Launcher = "accelerate") -> list[str]:
    """The command that estimates the launch files, to be run in their folder with `--gpus` added.

    Its flags are what no file has: the method, the release, the data, a quantization that the checkpoint keeps, and the
    settings of a vLLM server.
    """
    command = ["plan", "estimate", "--method", candidate.method, "--config", trl_config.FILE]
    if launcher == "accelerate":
        command += ["--accelerate-config", accelerate.FILE]
    else:
        command += ["--set", f"num_processes={candidate.num_processes}"]
    command += ["--padded" if candidate.padded else "--no-padded"]
    for flag, value in (("--images-per-row", candidate.images_per_row), ("--image-size", candidate.image_size)):
        command += [flag, str(value)] if value else []
    if candidate.trl_version not in (NEWEST_TRL, candidate.method_row.last_trl):
        command += ["--trl-version", candidate.trl_version]
    if candidate.method_row.generates:
        command += ["--prompt-length", str(candidate.prompt_length)]
    if candidate.quantization in DEQUANTIZED:
        command += ["--set", f"quant_method={candidate.quantization}"]
    written, settings = trl_config.trl_config(candidate), settings_of(candidate)
    for name in SERVER_ARGUMENTS.values() if candidate.server_gpus else ():
        if name not in written and settings[name] is not None:
            command += ["--set", f"{name}={settings[name]}"]
    return command


# Argument of `trl vllm-serve` -> the setting with its value.
SERVER_ARGUMENTS: dict[str, str] = {
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "data_parallel_size": "vllm_data_parallel_size",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "max_model_len": "vllm_max_model_length",
}
