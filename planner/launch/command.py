"""The commands: what starts the training, and what starts a vLLM server beside it."""

from planner.candidate import Candidate
from planner.jobs.settings import settings_of
from planner.launch import accelerate, trl_config
from planner.launch.placement import placement

SCRIPT_FILE = "train.py"
SERVER_PORT = 8000  # trl 1.16, scripts/vllm_serve.py and `vllm_server_port` of the configs

ACCELERATE = ("accelerate", "launch")


def launch_command(candidate: Candidate, script: str = "", launcher: tuple[str, ...] = ACCELERATE) -> list[str]:
    """What trains the candidate, run in the folder of its launch files; further arguments go to the script.

    Without `script` it is TRL's own command, or our script where TRL has none; with it, `accelerate launch` of that script.
    """
    if not script and not candidate.method_row.experimental:
        return ["trl", candidate.method, "--config", trl_config.FILE, "--accelerate_config", accelerate.FILE]
    started = [*launcher, "--config_file", accelerate.FILE, "--num_processes", str(candidate.num_processes)]
    return [*started, script] if script else [*started, SCRIPT_FILE, "--config", trl_config.FILE]


def server_command(candidate: Candidate) -> list[str]:
    """What serves completions to the trainer; empty without a server. Source: trl 1.16, scripts/vllm_serve.py `ScriptArguments`."""
    if not placement(candidate).server_gpus:
        return []
    said = settings_of(candidate)
    command = ["trl", "vllm-serve", "--model", candidate.model.path or candidate.model.id, "--port", str(SERVER_PORT)]
    for argument, name in SERVER_ARGUMENTS.items():
        if said[name] is not None:
            command += [f"--{argument}", str(said[name])]
    return command


# An argument of `trl vllm-serve`, and the setting that it takes.
SERVER_ARGUMENTS: dict[str, str] = {
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "data_parallel_size": "vllm_data_parallel_size",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "max_model_len": "vllm_max_model_length",
}
