"""The commands that start the training and its vLLM server."""

from collections.abc import Iterator, Mapping

from planner.candidate import Candidate
from planner.jobs.settings import settings_of
from planner.launch import accelerate, trl_config
from planner.launch.placement import placement
from planner.launch.script import needs_script
from planner.launch.torchrun import starter
from planner.launch.trl_config import SERVER_ARGUMENTS

SCRIPT_FILE = "train.py"

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
    """The command that starts the vLLM server of a candidate, with its variables; empty if it has none."""
    if not placement(candidate).server_gpus:
        return []
    variables = [f"{name}={value}" for name, value in server_variables(candidate).items()]
    model = candidate.model.path or candidate.model.id
    return [
        *(["env", *variables] if variables else []),
        *server_arguments(candidate, model, candidate.method_row.server_port),
    ]


def teacher_command(candidate: Candidate) -> list[str]:
    """The command that starts the vLLM server of a teacher; empty if it has none here.

    Without the two flags its log-probabilities are those of a temperature of 1, 20 words at most.
    Source: trl 1.16, experimental/async_distillation/async_distillation_config.py (`teacher_server_urls`);
    scripts/vllm_serve.py, which adds them to `vllm serve`.
    """
    teacher = candidate.teacher_server_model
    if teacher is None or not candidate.teacher_server_gpus:
        return []
    name, sizes = (
        teacher.path or teacher.id,
        {
            "port": candidate.method_row.teacher_port,
            "tensor_parallel_size": candidate.teacher_server_gpus,
            "gpu_memory_utilization": candidate.teacher_server_gpu_memory_utilization,
            "max_model_len": candidate.teacher_row_tokens,
        },
    )
    if not candidate.method_row.asynchronous:
        return ["trl", "vllm-serve", "--model", name, *(f"--{key}={value}" for key, value in sizes.items())]
    words = [f"--{key.replace('_', '-')}={value}" for key, value in sizes.items()]
    return ["vllm", "serve", name, *words, "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]


def server_arguments(candidate: Candidate, model: str, port: int) -> list[str]:
    """The program of a vLLM server with its arguments. `model`: path or id.

    Source: trl 1.16, scripts/vllm_serve.py, `ScriptArguments`, which `vllm serve` has with other dashes.
    """
    settings, where = settings_of(candidate), ["--port", str(port)]
    if candidate.method_row.asynchronous:
        return ["vllm", "serve", model, *where, *_asynchronous_server(candidate), *_served(settings, "-")]
    return ["trl", "vllm-serve", "--model", model, *where, *_served(settings, "_")]


def server_variables(candidate: Candidate) -> dict[str, str]:
    """The variables that `vllm serve` needs beside an asynchronous trainer.

    Source: trl 1.16, experimental/async_grpo/vllm_client.py (VLLM_SERVER_DEV_MODE), docs/source/async_grpo_trainer.md.
    """
    if not candidate.method_row.asynchronous:
        return {}
    adapters = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if candidate.sends_adapters else {}
    return {"VLLM_SERVER_DEV_MODE": "1", **adapters}


def _served(settings: Mapping[str, object], joint: str) -> Iterator[str]:
    """Yield the server's arguments with their values; `joint`: between the words of an argument."""
    for argument, name in SERVER_ARGUMENTS.items():
        if settings[name] is not None:
            yield from (f"--{argument.replace('_', joint)}", str(settings[name]))


def _asynchronous_server(candidate: Candidate) -> list[str]:
    """Return arguments of `vllm serve` beside an asynchronous trainer: adapters from a folder, or weights over NCCL.

    A server in the trainer's dtype computes nearer log-probabilities; a GPTQ checkpoint is published in float16.
    Source: trl 1.16, docs/source/async_grpo_trainer.md; experimental/async_grpo/async_grpo_config.py (`dtype`),
    async_grpo_trainer.py, `select_adapter_sync`.
    """
    arguments = ["--logprobs-mode", "processed_logprobs"]
    arguments += ["--dtype", candidate.dtype] if candidate.dtype != "float32" else []
    if not candidate.sends_adapters:
        return [*arguments, "--weight-transfer-config", '{"backend":"nccl"}']
    rank, slots = candidate.adapter_slots
    return [*arguments, "--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(slots)]
