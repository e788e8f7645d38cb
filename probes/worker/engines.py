"""Start vLLM for a probe as TRL does: in the trainer's process, or as a server on GPUs of its own.

Not yet run on a GPU.
"""

import contextlib
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.errors import InputError
from planner.launch.command import server_arguments, server_variables
from planner.launch.placement import placement
from probes.emulated_gpu.start import plugin_environment
from probes.step.built_trainer import BuiltTrainer
from probes.step.phases import PhaseListener
from probes.step.rollouts import CompletionTokens
from probes.substitution import substituted
from probes.task import GIVEN_GPUS, free_port
from probes.worker.random_weights import write_sparse_checkpoint
from probes.worker.watch import Discarded, MemoryWatch

START_SECONDS = 900.0  # a server may compile for minutes; the runner has a limit of its own
LOOK_SECONDS = 1.0
END_SECONDS = 30.0


@contextlib.contextmanager
def engine(candidate: Candidate, model: str, random: bool) -> Iterator[dict[str, Any]]:
    """Run the candidate's vLLM engine inside the block, if it has one; yield the training arguments with its address.

    Args:
        candidate: its `vllm` says which kind of engine. model: path or id from which the engine reads config and
        tokenizer. random: the engine gets random weights (vLLM's `load_format="dummy"`); the first weight sync brings
        the trainer's.

    Raises:
        InputError: the server would run on another node.
        RuntimeError: the server ended or did not become healthy.
    """
    installed = importlib.util.find_spec("vllm") is not None
    if candidate.vllm == "off" or (candidate.method_row.asynchronous and not (candidate.sends_adapters and installed)):
        yield {}
    elif candidate.vllm == "colocate":
        with dummy_weights(candidate, Path(model)) if random else contextlib.nullcontext():
            yield {}
    else:
        if candidate.num_nodes > 1:
            raise InputError(
                "A vLLM server on another node is started by slurm.sh, not by a probe: probe with num_machines=1."
            )
        state, server, group = PartialState(), free_port(), free_port()
        with (
            served(
                command_on(candidate, model, server, random),
                server,
                server_environment(candidate) | server_variables(candidate) | plugin_environment(),
            )
            if state.is_main_process
            else contextlib.nullcontext()
        ):
            state.wait_for_everyone()
            beside = {"vllm_server_base_url": f"http://127.0.0.1:{server}"}
            yield (
                beside if candidate.method_row.asynchronous else {"vllm_server_port": server, "vllm_group_port": group}
            )


def with_share_of_this_card(candidate: Candidate, card_bytes: int) -> Candidate:
    """Return the candidate with vLLM's share converted from the planned GPU to the installed one: the same bytes.

        share here = share x planned GPU's bytes / installed GPU's bytes

    Example: 0.3 of a planned 40 GiB is 0.15 of an installed 80 GiB. `card_bytes`: of the planned GPU; 0 if it is the
    installed one. Source: vllm 0.33, v1/worker/utils.py, `request_memory`, which takes the share of the installed GPU.
    """
    if candidate.vllm == "off" or not card_bytes:
        return candidate
    return replace(
        candidate,
        vllm_gpu_memory_utilization=candidate.vllm_gpu_memory_utilization * card_bytes / torch.cuda.mem_get_info()[1],
    )


@contextlib.contextmanager
def dummy_weights(candidate: Candidate, model: Path) -> Iterator[None]:
    """Let TRL start its engine with `load_format="dummy"` inside the block; TRL has no setting for it.

    An engine with bitsandbytes reads a checkpoint and quantizes it, whatever `load_format` says (vllm 0.27,
    engine/arg_utils.py, `EngineArgs.create_load_config`), so it gets one of zeros.
    Source: trl 1.16, generation/vllm_generation.py, `VLLMGeneration._init_vllm`,
    experimental/online_dpo/online_dpo_trainer.py, `OnlineDPOTrainer.__init__`.
    """
    row = candidate.method_row
    module = importlib.import_module(row.trainer_module if row.builds_engine else "trl.generation.vllm_generation")
    if candidate.quantization_row.four_bit:
        write_sparse_checkpoint(model)
        yield
        return
    with substituted(module, "LLM", functools.partial(module.LLM, load_format="dummy")):
        yield


# -- server ------------------------------------------------------------------------------------------------------------


def command_on(candidate: Candidate, model: str, port: int, random: bool) -> list[str]:
    """Return the server command of the launch files with another model path and port.

    `--load-format` is an option of `vllm serve`; `trl vllm-serve` passes on options that it does not know. The program
    is the one beside this Python, whose environment need not be active.
    """
    program, *arguments = server_arguments(candidate, model, port)
    beside = Path(sys.executable).with_name(program)
    return [str(beside) if beside.is_file() else program, *arguments, *(["--load-format", "dummy"] if random else [])]


def server_environment(candidate: Candidate) -> dict[str, str]:
    """Return the environment in which the server sees the GPUs after the trainer's, of all that are visible here."""
    devices = placement(candidate).server_devices.split(",")
    visible = os.environ.get(GIVEN_GPUS, "").split(",")
    names = (visible[int(device)] if len(visible) > int(device) else device for device in devices)
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


@contextlib.contextmanager
def served(command: Sequence[str], port: int, environment: dict[str, str]) -> Iterator[None]:
    """Run the server inside the block, once it is healthy; end it and its workers afterwards."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=os.environ | environment, start_new_session=True
    )
    try:
        wait_for_health(process, f"http://127.0.0.1:{port}/health", START_SECONDS)
        yield
    finally:
        end_group(process)


def wait_for_health(process: "subprocess.Popen[bytes]", url: str, seconds: float) -> None:
    """Wait until the server answers at `url` (trl 1.16, generation/vllm_client.py, `check_server`).

    Raises:
        RuntimeError: the server has ended, or did not answer in time.
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
    """End a server and its worker processes: SIGTERM, and SIGKILL for what is left."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)


# -- sleep ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mark_sleep(watch: MemoryWatch, candidate: Candidate) -> Iterator[None]:
    """Report to the watch when a colocated engine falls asleep and wakes up inside the block.

    Asleep, the pages of all its pools are unmapped; it wakes up pool by pool, by their tags.
    Source: vllm 0.31, entrypoints/llm.py (`LLM.sleep`, `LLM.wake_up`), device_allocator/cumem.py (`CuMemAllocator`).
    """
    if candidate.vllm != "colocate" or not candidate.vllm_enable_sleep_mode:
        yield
        return
    owner = importlib.import_module("vllm").LLM
    pools = importlib.import_module("vllm.device_allocator.cumem").CuMemAllocator.get_instance()
    asleep = set[int]()  # addresses of segments
    sleep, wake_up = owner.sleep, owner.wake_up

    def marked_sleep(llm: Any, *args: Any, **kwargs: Any) -> None:
        watch.before_engine_turns()
        sleep(llm, *args, **kwargs)
        asleep.update(pools.pointer_to_data)
        watch.engine_turned(discarded_by(asleep))

    def marked_wake_up(llm: Any, tags: list[str] | None = None) -> None:
        watch.before_engine_turns()
        wake_up(llm, tags)
        asleep.difference_update(
            address for address, data in pools.pointer_to_data.items() if tags is None or data.tag in tags
        )
        watch.engine_turned(discarded_by(asleep))

    with substituted(owner, "sleep", marked_sleep), substituted(owner, "wake_up", marked_wake_up):
        yield


def discarded_by(addresses: Collection[int]) -> Discarded:
    """Return the bytes of the allocator's segments at these addresses."""
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["address"] in addresses]
    return Discarded(
        allocated_bytes=sum(segment["allocated_size"] for segment in segments),
        reserved_bytes=sum(segment["total_size"] for segment in segments),
    )


# -- phases ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mark_engine_phases(
    listener: PhaseListener, built: BuiltTrainer, candidate: Candidate, completion_tokens: CompletionTokens
) -> Iterator[None]:
    """Report the engine's weight syncs and rollouts as phases inside the block.

    Completions lose the tokens that `completion_tokens` does not give them.
    """
    if candidate.vllm == "off" or candidate.method_row.asynchronous:
        yield
        return
    trainer = built.trainer
    owner, sync, generate = (
        (trainer, "_move_model_to_vllm", "_generate_vllm")
        if candidate.method_row.builds_engine
        else (trainer.vllm_generation, "sync_weights", "generate")
    )
    sync_method: Callable[..., Any] = vars(type(owner))[sync]
    generate_method: Callable[..., Any] = vars(type(owner))[generate]

    def marked_sync(*args: Any, **kwargs: Any) -> Any:
        listener.enter_phase("weight_sync")
        return sync_method(owner, *args, **kwargs)

    def marked_generate(*args: Any, **kwargs: Any) -> Any:
        listener.enter_phase("rollout")
        result = generate_method(owner, *args, **kwargs)
        listener.enter_phase("score")
        if candidate.method_row.builds_engine:
            return result
        prompts, completions, *rest = result
        tokens = completion_tokens(len(completions), max(map(len, completions)))
        return (prompts, *(shortened_rows(each, tokens) for each in (completions, *rest)))

    with (
        substituted(owner, sync, marked_sync),
        substituted(owner, generate, marked_generate),
        prompts_as_tokens(trainer, candidate) if candidate.method_row.builds_engine else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def prompts_as_tokens(trainer: Any, candidate: Candidate) -> Iterator[None]:
    """Give vLLM the tokens of prompts that the trainer sends as text.

    Otherwise vLLM loads a tokenizer from the folder of random weights. Transformers then takes the class of the model's
    family, and that class cannot read our vocabulary. Source: transformers 5.23, models/auto/tokenization_auto.py,
    `AutoTokenizer.from_pretrained` (`MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS`).
    """
    colocated = candidate.vllm == "colocate"
    if not colocated and not trainer.accelerator.is_main_process:  # it does not talk to the server
        yield
        return
    engine = trainer.llm if colocated else trainer.vllm_client
    of_text = engine.generate

    def of_tokens(prompts: list[Any], *args: Any, **kwargs: Any) -> Any:
        tokens = [trainer.processing_class(each)["input_ids"] if isinstance(each, str) else each for each in prompts]
        if colocated:
            tokens = [{"prompt_token_ids": each} if isinstance(each, list) else each for each in tokens]
        return of_text(tokens, *args, **kwargs)

    with substituted(engine, "generate", of_tokens):
        yield


def shortened_rows(rows: list[list[Any]] | None, tokens: Sequence[int]) -> list[list[Any]] | None:
    """Return the first elements of each row, as many as it has tokens: tokens, or what belongs to tokens."""
    return None if rows is None else [row[:count] for row, count in zip(rows, tokens, strict=True)]
