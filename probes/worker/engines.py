"""vLLM beside the trainer, as TRL starts it: in the trainer's process, or as a server on GPUs of its own. Not yet run on a GPU."""

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import PartialState

from planner.candidate import Candidate
from planner.errors import InputError
from planner.launch.command import server_command
from planner.launch.placement import placement
from probes.step.listener import Told
from probes.step.rollouts import short_row
from probes.step.stage import Stage
from probes.substitution import substituted

START_SECONDS = 900.0  # a server may compile for minutes; the runner has a limit of its own
LOOK_SECONDS = 1.0
END_SECONDS = 30.0


@contextlib.contextmanager
def engine(candidate: Candidate, model: str, random: bool) -> Iterator[dict[str, Any]]:
    """While inside, trainers find the engine that they ask for; yields the settings that say where it is.

    `model`: where it reads its config and tokenizer. `random`: its weights are made up as well (vLLM's `load_format="dummy"`); the first
    weight sync brings the trainer's.
    """
    if candidate.vllm == "off":
        yield {}
    elif candidate.vllm == "colocate":
        with dummy_weights(candidate) if random else contextlib.nullcontext():
            yield {}
    else:
        if candidate.num_nodes > 1:
            raise InputError(
                "A server on another node is started by launch.sh, not by a probe: probe with num_machines=1."
            )
        state, server, group = PartialState(), free_port(), free_port()
        with (
            served(command_on(candidate, model, server, random), server, server_environment(candidate))
            if state.is_main_process
            else contextlib.nullcontext()
        ):
            state.wait_for_everyone()
            yield {"vllm_server_port": server, "vllm_group_port": group}


def with_share_of_this_card(candidate: Candidate, card_bytes: int) -> Candidate:
    """vLLM takes a share of the card that it finds: of a larger one than the plan's, as many bytes are a smaller share. `card_bytes`: of the plan's, 0 if here.

    Source: vllm 0.33, v1/worker/utils.py:724.
    """
    if candidate.vllm == "off" or not card_bytes:
        return candidate
    return replace(
        candidate,
        vllm_gpu_memory_utilization=candidate.vllm_gpu_memory_utilization * card_bytes / torch.cuda.mem_get_info()[1],
    )


@contextlib.contextmanager
def dummy_weights(candidate: Candidate) -> Iterator[None]:
    """TRL gives its engine no `load_format` (trl 1.16, generation/vllm_generation.py:347, experimental/online_dpo/online_dpo_trainer.py:490): here it does."""
    if candidate.method == "online-dpo":
        from trl.experimental.online_dpo import online_dpo_trainer as module
    else:
        from trl.generation import vllm_generation as module
    with substituted(module, "LLM", functools.partial(module.LLM, load_format="dummy")):
        yield


# -- server ------------------------------------------------------------------------------------------------------------


def command_on(candidate: Candidate, model: str, port: int, random: bool) -> list[str]:
    """The launch files' own server command, for another path of the model and another port; what TRL does not know it hands on to `vllm serve`."""
    command = server_command(candidate)
    for name, value in (("--model", model), ("--port", str(port))):
        command[command.index(name) + 1] = value
    return command + (["--load-format", "dummy"] if random else [])


def server_environment(candidate: Candidate) -> dict[str, str]:
    """The server's GPUs are those behind the trainer's, of those that this process was given."""
    devices, given = placement(candidate).server_devices.split(","), os.environ.get(GIVEN_GPUS, "").split(",")
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(
            given[int(device)] if len(given) > int(device) else device for device in devices
        )
    }


GIVEN_GPUS = "PLAN_GIVEN_GPUS"  # what CUDA_VISIBLE_DEVICES was before the trainer kept its own


def keep_own_gpus(candidate: Candidate) -> None:
    """One process without a launcher takes one GPU: of several Transformers would make replicas in threads (training_args.py, `n_gpu`)."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    os.environ[GIVEN_GPUS] = given
    if candidate.num_processes == 1 and "WORLD_SIZE" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = given.split(",")[0] or "0"


@contextlib.contextmanager
def served(command: Sequence[str], port: int, environment: dict[str, str]) -> Iterator[None]:
    """While inside, the server runs and is healthy; afterwards nothing of it is left."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=os.environ | environment, start_new_session=True
    )
    try:
        wait_for_health(process, f"http://127.0.0.1:{port}/health", START_SECONDS)
        yield
    finally:
        end_group(process)


def wait_for_health(process: "subprocess.Popen[bytes]", url: str, seconds: float) -> None:
    """Source: trl 1.16, generation/vllm_client.py, `check_server`.

    Raises:
        RuntimeError: it has ended, or did not answer in time.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"The vLLM server has ended with exit code {process.returncode} before it was healthy.")
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
            urllib.request.urlopen(url, timeout=LOOK_SECONDS) as answer,
        ):
            if answer.status == 200:  # OK
                return
        time.sleep(LOOK_SECONDS / 4)
    raise RuntimeError(f"The vLLM server was not healthy after {seconds:.0f} s.")


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """A server has workers of its own."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# -- phases ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def engine_phases_told(watch: Told, stage: Stage, candidate: Candidate) -> Iterator[None]:
    """While inside, weight syncs and rollouts of an engine are phases, and a completion ends early where nothing else pads a batch."""
    if candidate.vllm == "off":
        yield
        return
    trainer = stage.trainer
    owner, sync, generate = (
        (trainer, "_move_model_to_vllm", "_generate_vllm")
        if candidate.method == "online-dpo"
        else (trainer.vllm_generation, "sync_weights", "generate")
    )
    syncs: Callable[..., Any] = vars(type(owner))[sync]
    generates: Callable[..., Any] = vars(type(owner))[generate]

    def synced(*args: Any, **kwargs: Any) -> Any:
        watch.enter_phase("weight_sync")
        return syncs(owner, *args, **kwargs)

    def generated(*args: Any, **kwargs: Any) -> Any:
        watch.enter_phase("rollout")
        result = generates(owner, *args, **kwargs)
        watch.enter_phase("score")
        return (
            result
            if candidate.method == "online-dpo"
            else (result[0], *(shortened(each, short_row(candidate)) for each in result[1:]))
        )

    with substituted(owner, sync, synced), substituted(owner, generate, generated):
        yield


def shortened(rows: list[list[Any]] | None, short: int) -> list[list[Any]] | None:
    """Every `short`-th completion without its last token; the same of what belongs to tokens."""
    if rows is None or not short:
        return rows
    return [row[:-1] if index % short == short - 1 and len(row) > 1 else row for index, row in enumerate(rows)]
