"""Contract of the worker on `cpu`: a real trainer with real weights peaks where the dry run does.

Running out of memory is a measurement too.
"""

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.measurements.corrected_plan import steps_note
from planner.measurements.documents import measurement_of
from planner.measurements.measurement import Measurement
from planner.methods import MethodName
from planner.models.catalogue import load_model
from planner.models.from_config import shape_of
from planner.rows.lengths import lengths_in_words
from planner.units import GIB

pytest.importorskip("trl")

import torch
import transformers

from probes.emulated_gpu.start import plugin_environment
from probes.emulated_gpu.values import keep_small_values_on_host
from probes.task import ANSWER_PREFIX, PHASE_FILE, Task, resumed, usual_steps, write_task
from probes.trainers import sft_row, transformers_config
from probes.worker.engines import command_on, free_port, mark_sleep, served, server_environment, with_share_of_this_card
from probes.worker.random_weights import random_state_dict, random_weights, unwritten_state_dict
from probes.worker.shortage import lacks_memory, shortage_of_message
from probes.worker.watch import Clock, CudaWatch, Driver
from probes.worker.worker import measure, step_seconds
from probes.worker.worst_batch import worst_case_datasets

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

ROOT = Path(__file__).parents[1]
METHODS: tuple[MethodName, ...] = ("sft", "kto", "grpo", "distillation")
OTHER_METHODS: tuple[MethodName, ...] = ("dpo", "reward", "rloo", "gmpo", "online-dpo")  # like one of those, or below
# A row: every second prompt of a probe is a token shorter; a dry run's shortened rollout holds the masks and positions
# of its first step besides those of the last.


@pytest.fixture(autouse=True)
def one_thread() -> object:
    """Run on one thread: operators as small as these only wait for other threads.

    Run without oneDNN, too: its matrix products take scratch memory from PyTorch's allocator, which is as large as the
    tensors here and differs between CPUs. Source: pytorch 2.13, aten/src/ATen/native/mkldnn/IDeepRegistration.cpp.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.backends.mkldnn.flags(enabled=False):
        yield
    torch.set_num_threads(threads)


def candidate(method: MethodName = "sft", model: str = "tiny-qwen2", **changes: object) -> Candidate:
    shape = load_model(str(ROOT / "tests" / "models" / model))
    settings: dict[str, object] = {
        "model": shape,
        "per_device_train_batch_size": 4,
        "max_length": 32,
        "prompt_length": 8,
        "max_completion_length": 5,
        "num_generations": 2,
        "dtype": "bfloat16",
        "teacher_model": shape if method == "distillation" else None,
    }
    return Candidate(method=method, **(settings | changes))  # type: ignore[arg-type]


def measured(case: Candidate, folder: Path, **changes: object) -> Measurement:
    settings: dict[str, object] = {"save": False, "resume": False}
    return measure(Task(candidate=case, device="cpu", folder=str(folder), **(settings | changes)))


@pytest.mark.parametrize(
    "method", [*METHODS, *(pytest.param(method, marks=pytest.mark.nightly) for method in OTHER_METHODS)]
)
@pytest.mark.slow
def test_every_method_is_measured(method: MethodName, tmp_path: Path) -> None:
    case = candidate(method)
    found = measured(case, tmp_path)
    assert found.outcome == "fits"
    phases = {phase.name: phase.allocated_bytes for phase in found.ranks[0].phases}
    assert {"load", "forward", "loss", "backward", "optimizer_step"} <= phases.keys() and min(phases.values()) > 0
    assert ("rollout" in phases) == case.method_row.generates


@pytest.mark.slow
def test_random_weights_take_as_much_memory_as_saved_ones(tmp_path: Path) -> None:
    """Mixtral: an expert is a tensor of its own in the files, all experts of a layer are one tensor in memory."""
    case = candidate("sft", "tiny-mixtral")
    config = dict(case.model.config) | {"architectures": ["MixtralForCausalLM"]}
    fields = {name: value for name, value in config.items() if name != "model_type"}
    saved = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("mixtral", **fields), dtype=torch.bfloat16
    )
    saved.save_pretrained(tmp_path / "saved")
    from_disk = measured(replace(case, model=shape_of(config, id=str(tmp_path / "saved"))), tmp_path, weights="hub")
    assert from_disk.peak_bytes == measured(case, tmp_path).peak_bytes


@pytest.mark.parametrize(
    ("method", "pads"),
    [
        ("sft", False),
        ("dpo", True),
        *(
            pytest.param(method, pads, marks=pytest.mark.nightly)
            for method, pads in (("gkd", False), ("reward", True), ("online-dpo", True))
        ),
    ],
)
@pytest.mark.slow
def test_a_batch_of_one_row_is_padded_if_several_rows_are_padded_together(
    method: MethodName, pads: bool, tmp_path: Path
) -> None:
    alone = candidate(method, per_device_train_batch_size=1, gradient_checkpointing=False)
    found, without = measured(alone, tmp_path), measured(replace(alone, padded=False), tmp_path)
    forward, forward_without = (
        next(phase for phase in case.ranks[0].phases if phase.name == "forward") for case in (found, without)
    )
    assert alone.pads is pads
    assert (forward.allocated_bytes > forward_without.allocated_bytes) is pads


@pytest.mark.slow
def test_micro_batches_of_one_completion_hold_the_padding_of_all_that_were_sampled(tmp_path: Path) -> None:
    alone = candidate(
        "grpo",
        per_device_train_batch_size=1,
        steps_per_generation=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
    )
    found = measured(alone, tmp_path)
    assert alone.pads and not replace(alone, steps_per_generation=1).pads
    assert found.peak_bytes > measured(replace(alone, padded=False), tmp_path).peak_bytes


@pytest.mark.parametrize("quantization", ["nf4", pytest.param("nf4-double", marks=pytest.mark.nightly), "int8"])
@pytest.mark.slow
def test_a_quantized_base_is_loaded_and_quantized_as_from_the_hub(quantization: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    case = candidate("sft", "tiny-llama", tuning="lora", quantization=quantization)
    assert measured(case, tmp_path).outcome == "fits"


@pytest.mark.slow
def test_completions_of_one_prompt_are_padded_by_one_that_ends_early(tmp_path: Path) -> None:
    padded = candidate("grpo", per_device_train_batch_size=2)
    found, without = measured(padded, tmp_path), measured(replace(padded, padded=False), tmp_path)
    assert found.peak_bytes > without.peak_bytes


@pytest.mark.slow
def test_bytes_between_steps_equal_the_formulas(tmp_path: Path) -> None:
    full = measured(candidate(), tmp_path).ranks[0].state_bytes
    assert full == {"weights": 267_392, "gradients": 267_392, "optimizer_states": 2 * 267_392}
    adapters = measured(candidate(tuning="lora"), tmp_path).ranks[0].state_bytes
    assert adapters == {"weights": 267_392, "adapters": 149_504, "gradients": 149_504, "optimizer_states": 2 * 149_504}


def test_a_long_probe_draws_its_rows_and_ends_with_the_longest(tmp_path: Path) -> None:
    lengths = lengths_in_words("rows=100,p50=8,max=30")
    case = candidate(lengths=lengths, gradient_accumulation_steps=2)
    task = Task(candidate=case, device="cpu", folder=str(tmp_path), steps=5, save=False, resume=False)
    rows = [len(ids) for ids in worst_case_datasets(task, sft_row)["train_dataset"]["input_ids"]]
    drawn, longest = rows[:32], rows[32:]
    assert longest == [32, 32, 32, 31] * 2  # one is shorter, so that its batch is padded
    assert set(drawn) <= set(lengths.tokens) | {4} and np.median(drawn) - 3 < 8 and max(drawn) <= 30
    usual = worst_case_datasets(replace(task, steps=2), sft_row)["train_dataset"]["input_ids"]
    assert [len(ids) for ids in usual] == [32, 32, 32, 31] * 4


@pytest.mark.slow
def test_a_long_probe_says_the_memory_after_each_step(tmp_path: Path) -> None:
    case = candidate(lengths=lengths_in_words("rows=100,p50=8,max=30"))
    found = measured(case, tmp_path, steps=4)
    assert [step.host_bytes > 0 for step in found.ranks[0].steps] == [True] * 4
    assert not measured(case, tmp_path).ranks[0].steps
    (note,) = steps_note(found)
    assert note.values["steps"] == [2, 3, 4]


@pytest.mark.slow
def test_a_run_with_one_byte_too_little_runs_out_of_memory_at_its_peak(tmp_path: Path) -> None:
    case = candidate()
    fits = measured(case, tmp_path)
    short = measured(case, tmp_path, capacity_bytes=fits.peak_bytes - 1)
    assert short.outcome == "out_of_memory"
    assert short.shortage is not None
    assert short.shortage.phase == fits.ranks[0].peak_phase == "backward"
    assert short.shortage.over_bytes == 1
    assert short.shortage.allocated_bytes + short.shortage.tried_bytes == fits.peak_bytes
    assert measured(case, tmp_path, capacity_bytes=fits.peak_bytes).outcome == "fits"


def test_models_that_do_not_fit_run_out_of_memory_while_loading(tmp_path: Path) -> None:
    short = measured(candidate(), tmp_path, capacity_bytes=100_000)
    assert short.shortage is not None
    assert short.shortage.phase == "load"


@pytest.mark.parametrize("method", [pytest.param("dpo", marks=pytest.mark.nightly), "grpo"])
@pytest.mark.slow
def test_a_probe_saves_evaluates_and_goes_on_from_its_checkpoint(method: MethodName, tmp_path: Path) -> None:
    case = candidate(method, tuning="lora")
    task = Task(candidate=case, device="cpu", folder=str(tmp_path), evaluate=True)
    whole, again, alone = measure(task), measure(resumed(task)), measured(case, tmp_path)
    assert {phase.name for phase in whole.ranks[0].phases} >= {
        "load",
        "forward",
        "loss",
        "backward",
        "optimizer_step",
        "save",
        "score",
    }
    assert all(phase.seconds > 0 for phase in whole.ranks[0].phases)
    assert whole.peak_bytes >= alone.peak_bytes
    assert whole.step_seconds > 0
    assert (
        {"load", "optimizer_step"}
        <= {phase.name for phase in again.ranks[0].phases}
        < {phase.name for phase in whole.ranks[0].phases}
    )


@pytest.mark.slow
@pytest.mark.nightly  # 30 s; tests/test_devices.py starts the same worker
def test_a_worker_prints_its_measurement_last_and_leaves_nothing(tmp_path: Path) -> None:
    task = Task(candidate=candidate("reward", "tiny-mixtral"), device="cpu", folder=str(tmp_path), resume=False)
    write_task(task, tmp_path / "task.json")
    done = subprocess.run(
        [sys.executable, "-m", "probes.worker.worker", str(tmp_path / "task.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = measurement_of(json.loads(line.removeprefix(ANSWER_PREFIX)))
    assert found.outcome == "fits"
    assert "train_runtime" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [PHASE_FILE, "task.json"]


def test_a_worker_refuses_a_task_for_other_processes_or_weights(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"^The candidate has num_processes 2, and 1 were launched\.$"):
        measured(candidate(num_processes=2, sharding="ddp"), tmp_path)
    with pytest.raises(
        Exception, match=r"^Weights of fp8 are published so and cannot be made up: probe with --weights hub\.$"
    ):
        measured(candidate(quantization="fp8", tuning="lora"), tmp_path)


@pytest.mark.slow
def test_a_probe_whose_optimizer_skipped_a_step_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate.optimizer.AcceleratedOptimizer.step", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match=r"^the optimizer skipped 2 of 2 steps$"):
        measured(candidate(), tmp_path)


@pytest.mark.slow
def test_a_probe_without_a_step_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A2PO drops prompts without a reward before it trains, which were all of them on an emulated card."""
    monkeypatch.setattr("transformers.Trainer._inner_training_loop", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match=r"^the trainer made no step$"):
        measured(candidate(), tmp_path)


def test_a_shortage_has_the_figures_of_the_allocators_message() -> None:
    message = (
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.25 GiB is "
        "free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the allocated memory "
        "76.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
    )
    found = shortage_of_message(message, 3, "backward", 1, 2, 3)
    gib = 2**30
    assert (found.rank, found.phase, found.tried_bytes, found.free_bytes) == (3, "backward", 5 * gib // 2, 5 * gib // 4)
    assert (found.allocated_bytes, found.reserved_bytes) == (76 * gib, 76 * gib + gib // 2)
    assert found.over_bytes == 5 * gib // 4
    capped = message.replace("in use. Of", "in use. 77.00 GiB allowed; Of")
    assert shortage_of_message(capped, 0, "loss", 1, 2, 3).free_bytes == gib // 2
    assert shortage_of_message("CUDA driver says no", 0, "loss", 1, 2, 3).allocated_bytes == 2


class Counters:
    """The counters of PyTorch's CUDA allocator: current bytes, and the peak since the last reset."""

    def __init__(self) -> None:
        self.statistics = {
            f"{what}_bytes.all.{which}": 0 for what in ("allocated", "reserved") for which in ("current", "peak")
        }
        self.driver_bytes = 500

    def allocate(self, allocated: int, peak: int, reserved: int, reserved_peak: int) -> None:
        names = (
            "allocated_bytes.all.current",
            "allocated_bytes.all.peak",
            "reserved_bytes.all.current",
            "reserved_bytes.all.peak",
        )
        self.statistics.update(zip(names, (allocated, peak, reserved, reserved_peak), strict=True))
        self.driver_bytes = 500 + reserved

    def set_back(self) -> None:
        for what in ("allocated", "reserved"):
            self.statistics[f"{what}_bytes.all.peak"] = self.statistics[f"{what}_bytes.all.current"]

    def held_bytes(self) -> int:
        return self.driver_bytes


def test_each_phase_has_the_peaks_between_its_beginning_and_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    card = Counters()
    monkeypatch.setattr("probes.worker.watch.Driver", lambda: card)
    for name, fake in {
        "synchronize": lambda: None,
        "memory_stats": lambda: dict(card.statistics),
        "reset_peak_memory_stats": card.set_back,
        "mem_get_info": lambda: (9_000, 10_000),
        "set_per_process_memory_fraction": lambda share: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    watch = CudaWatch(Clock(tmp_path / PHASE_FILE), 8_000)
    card.allocate(100, 150, 200, 200)
    watch.enter_phase("forward")
    card.allocate(300, 700, 800, 1000)  # 200 are freed before the phase ends
    watch.enter_phase("backward")
    card.allocate(100, 300, 800, 800)
    watch.enter_phase("forward")
    found = {peak.name: (peak.allocated_bytes, peak.reserved_bytes, peak.driver_bytes) for peak in watch.peaks}
    assert found == {"load": (150, 200, 700), "forward": (700, 1000, 1500), "backward": (300, 800, 1300)}
    assert [peak.name for peak in watch.peaks] == ["load", "forward", "backward"]
    assert watch.capacity_bytes == 8_000


ENGINE_SEGMENTS = {0x10: ("weights", 4_000), 0x20: ("kv_cache", 2_000)}  # tag and bytes by address


class SleepingEngine:
    """An engine on a faked card of `Counters`: its pools have `ENGINE_SEGMENTS`."""

    def __init__(self, card: Counters) -> None:
        self.card = card

    def sleep(self, level: int) -> None:
        self.card.driver_bytes -= 6_000

    def wake_up(self, tags: list[str]) -> None:
        self.card.driver_bytes += sum(size for tag, size in ENGINE_SEGMENTS.values() if tag in tags)


def test_an_engine_counts_awake_as_it_was_before_it_fell_asleep_and_asleep_as_what_it_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    card, engine = Counters(), SleepingEngine
    data = {address: SimpleNamespace(tag=tag) for address, (tag, _) in ENGINE_SEGMENTS.items()}
    pools = SimpleNamespace(get_instance=lambda: SimpleNamespace(pointer_to_data=data))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=engine))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", SimpleNamespace(CuMemAllocator=pools))
    segments = [
        {"address": address, "allocated_size": size - 100, "total_size": size}
        for address, (_, size) in (ENGINE_SEGMENTS | {0x30: ("", 300)}).items()
    ]
    monkeypatch.setattr("probes.worker.watch.Driver", lambda: card)
    for name, fake in {
        "synchronize": lambda: None,
        "memory_stats": lambda: dict(card.statistics),
        "memory_snapshot": lambda: segments,
        "reset_peak_memory_stats": card.set_back,
        "mem_get_info": lambda: (9_000, 10_000),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    watch, llm = CudaWatch(Clock(tmp_path / PHASE_FILE), 0), engine(card)
    colocated = replace(candidate("grpo"), vllm="colocate", vllm_enable_sleep_mode=True)
    with mark_sleep(watch, colocated):
        card.allocate(6_000, 6_200, 6_300, 6_300)
        llm.sleep(level=2)
        watch.enter_phase("weight_sync")
        llm.wake_up(tags=["weights"])
        watch.enter_phase("rollout")
        llm.wake_up(tags=["kv_cache"])
        llm.sleep(level=2)
        watch.enter_phase("forward")
    found = {peak.name: (peak.allocated_bytes, peak.reserved_bytes, peak.driver_bytes) for peak in watch.peaks}
    awake, asleep = (6_300, 6_800), (200, 300, 800)
    assert found == {
        "load": (6_200, *awake),
        "weight_sync": (4_100, 4_300, 4_800),
        "rollout": (6_000, *awake),
        "forward": asleep,
    }
    short = watch.shortage(RuntimeError("CUDA driver says no"), 0)
    assert (short.allocated_bytes, short.reserved_bytes) == asleep[:2]


def test_on_a_larger_card_the_allocator_is_limited_to_the_planned_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    card, shares = Counters(), list[float]()
    monkeypatch.setattr("probes.worker.watch.Driver", lambda: card)
    for name, fake in {
        "synchronize": lambda: None,
        "memory_stats": lambda: dict(card.statistics),
        "reset_peak_memory_stats": card.set_back,
        "mem_get_info": lambda: (9_000, 10_000),
        "set_per_process_memory_fraction": shares.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    watch = CudaWatch(Clock(tmp_path / PHASE_FILE), 8_000)
    card.allocate(100, 150, 200, 200)
    card.driver_bytes += 100  # kernels were loaded
    watch.enter_phase("forward")
    assert shares == [0.75, 0.74]
    CudaWatch(Clock(tmp_path / PHASE_FILE), 0).enter_phase("forward")
    assert shares == [0.75, 0.74]


def test_a_driver_that_does_not_know_the_process_counts_the_growth_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    used, processes = [1000], [SimpleNamespace(pid=os.getpid(), usedGpuMemory=700)]
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: "card",
        nvmlDeviceGetUUID=lambda card: "GPU-1-2",
        nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(used=used[0]),
        nvmlDeviceGetComputeRunningProcesses=lambda card: processes,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    driver = Driver()
    assert driver.held_bytes() == 700
    used[0], processes[0].pid = 1800, 1
    assert driver.held_bytes() == 800


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (
            ValueError(
                "No available memory for the cache blocks. "
                "Try increasing `gpu_memory_utilization` when initializing the engine."
            ),
            True,
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("max_length must be positive"), False),
    ],
)
def test_only_errors_of_missing_memory_are_recognized(error: Exception, lacks: bool) -> None:
    assert lacks_memory(error) is lacks


SERVER = """
import http.server, sys, time
time.sleep(0.5)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def test_a_server_is_healthy_inside_the_block_and_gone_after_it() -> None:
    port = free_port()
    with served([sys.executable, "-c", SERVER, str(port)], port, {}):
        socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    ended = pytest.raises(RuntimeError, match=r"^The vLLM server has ended with exit code 3 before it was healthy\.$")
    with ended, served([sys.executable, "-c", "raise SystemExit(3)"], port, {}):
        pass


def test_on_a_larger_card_an_engine_gets_as_many_bytes_by_a_smaller_share(monkeypatch: pytest.MonkeyPatch) -> None:
    case = candidate("grpo", vllm="colocate", vllm_gpu_memory_utilization=0.3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 * GIB, 80 * GIB))
    assert with_share_of_this_card(case, 40 * GIB).vllm_gpu_memory_utilization == pytest.approx(0.15)
    assert with_share_of_this_card(case, 0) == case
    alone = candidate("sft")
    assert with_share_of_this_card(alone, 40 * GIB) == alone


def test_a_server_gets_the_model_folder_and_the_gpus_after_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    case = candidate("grpo", vllm="server", num_processes=2, sharding="ddp", vllm_tensor_parallel_size=2)
    command = command_on(case, "/models/here", 1234, random=True)
    assert Path(command[0]).parent in (Path(sys.executable).parent, Path())
    assert [Path(command[0]).name, *command[1:6]] == ["trl", "vllm-serve", "--model", "/models/here", "--port", "1234"]
    assert command[-2:] == ["--load-format", "dummy"]
    monkeypatch.setenv("PLAN_GIVEN_GPUS", "")
    assert server_environment(case) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    monkeypatch.setenv("PLAN_GIVEN_GPUS", "4,5,6,7")
    assert server_environment(case) == {"CUDA_VISIBLE_DEVICES": "6,7"}


@pytest.mark.parametrize("method", ["async-grpo", "grpo"])
def test_a_server_gets_another_model_folder_and_port(method: str) -> None:
    case = candidate(method, tuning="lora", vllm="server")
    program, *arguments = command_on(case, "/models/serve", 1234, random=True)
    assert [Path(program).name, *arguments[:1]] in (["vllm", "serve"], ["trl", "vllm-serve"])
    assert "/models/serve" in arguments and arguments[arguments.index("--port") + 1] == "1234"


def test_vllm_finds_the_plugin_of_an_emulated_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PLAN_EMULATED_MACHINE", raising=False)
    assert plugin_environment() == {}
    monkeypatch.setenv("PLAN_EMULATED_MACHINE", str(tmp_path / "machine"))
    monkeypatch.setenv("PYTHONPATH", "here")
    first, folder = plugin_environment()["PYTHONPATH"].split(os.pathsep)
    (found,) = importlib.metadata.distributions(path=[folder])
    (point,) = found.entry_points.select(group="vllm.general_plugins")
    assert (first, point.load()) == ("here", keep_small_values_on_host)


def test_seconds_of_a_step_include_its_share_of_a_rollout(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "phase")
    clock.steps = [(90.0, 40.0), (10.0, 0.0), (12.0, 0.0)]
    case = replace(candidate("grpo"), steps_per_generation=4, gradient_accumulation_steps=1)
    assert step_seconds(case, clock) == 11.0 + 40.0 / 4
    clock.steps = [(90.0, 60.0), (30.0, 20.0)]
    assert step_seconds(replace(case, steps_per_generation=1), clock) == 30.0
    clock.steps = []
    assert step_seconds(case, clock) == 0.0


def test_tied_weights_are_loaded_once_as_from_a_published_checkpoint() -> None:
    shape = load_model(str(ROOT / "tests" / "models" / "tiny-qwen2"))
    config = transformers_config({**shape.config, "tie_word_embeddings": True})
    model = transformers.AutoModelForCausalLM.from_config(config)
    names = set(model.state_dict()) - {"lm_head.weight"}
    assert set(random_state_dict(model)) == set(unwritten_state_dict(model)) == names


def test_4_bit_weights_of_gpt2_are_quantized_as_outputs_by_inputs(tmp_path: Path) -> None:
    """bitsandbytes keeps the dequantized weights of others for the backward pass."""
    transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2).save_pretrained(tmp_path)
    quantization = transformers.BitsAndBytesConfig(load_in_4bit=True)
    with random_weights():
        model = transformers.GPT2LMHeadModel.from_pretrained(
            tmp_path, dtype=torch.bfloat16, quantization_config=quantization
        )
    assert model.transformer.h[0].mlp.c_fc.weight.quant_state.shape == (256, 64)


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-VL-2B-Instruct"])
def test_a_sparse_checkpoint_is_read_as_zeros(model: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    from probes.worker.random_weights import model_folder, write_sparse_checkpoint

    shape = load_model(model)
    folder = model_folder(shape, tmp_path)
    write_sparse_checkpoint(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:  # type: ignore[no-untyped-call]
        names = list(file.keys())
        norm = next(name for name in names if name.endswith("input_layernorm.weight"))
        assert not file.get_tensor(norm).any()
    assert "lm_head.weight" not in names
    assert (folder / "model.safetensors").stat().st_blocks * 512 < 10_000_000


def test_a_sparse_gptq_checkpoint_is_packed(tmp_path: Path) -> None:
    from safetensors import safe_open

    from probes.worker.random_weights import model_folder, write_sparse_checkpoint

    folder = model_folder(load_model("Qwen2.5-0.5B-Instruct-GPTQ-Int4"), tmp_path)
    write_sparse_checkpoint(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:  # type: ignore[no-untyped-call]
        up = {name.rpartition(".")[2]: file.get_tensor(name) for name in file.keys() if ".0.mlp.up_proj" in name}  # noqa: SIM118
    shapes = {name: tuple(each.shape) for name, each in up.items()}
    assert shapes == {"qweight": (112, 4864), "qzeros": (7, 608), "scales": (7, 4864), "g_idx": (896,)}


def test_experts_are_written_as_they_are_published(tmp_path: Path) -> None:
    """ZeRO-3 hides a parameter's shape from Transformers, which always turns the experts of Qwen3-VL there."""
    from probes.worker.random_weights import model_folder, write_sparse_checkpoint

    folder = model_folder(load_model("Qwen/Qwen3-VL-30B-A3B-Instruct"), tmp_path)
    write_sparse_checkpoint(folder)
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert header["model.language_model.layers.0.mlp.experts.gate_up_proj"]["shape"] == [128, 2048, 1536]


@pytest.mark.parametrize(
    ("method", "settings", "steps"),
    [
        ("sft", {}, 2),
        ("dpo", {"beta": 0.1, "precompute_ref_log_probs": True}, 2),
        ("dpo", {"beta": 0.1, "precompute_ref_log_probs": True, "sharding": "zero3", "num_processes": 2}, 3),
        ("grpo", {}, 2),
        ("grpo", {"num_iterations": 2}, 3),
        ("grpo", {"steps_per_generation": 4, "gradient_accumulation_steps": 4}, 2),
        ("grpo", {"steps_per_generation": 8, "gradient_accumulation_steps": 4, "num_iterations": 2}, 5),
        ("grpo", {"gradient_accumulation_steps": 4}, 2),
        ("grpo", {"steps_per_generation": 32, "num_iterations": 4}, 2),
    ],
)
def test_a_probe_samples_again_beside_the_optimizers_states(
    method: MethodName, settings: dict[str, object], steps: int
) -> None:
    """Until the second rollout, the scores of a reference and the KV cache lie beside no optimizer states.

    ZeRO-3 gathers ahead by the second trace of an engine that precomputed a reference from the third step on.
    """
    assert usual_steps(candidate(method, **settings)) == steps


def test_each_process_of_a_long_probe_gets_the_longest_rows_last(tmp_path: Path) -> None:
    case = candidate(
        lengths=lengths_in_words("rows=100,p50=8,max=30"), gradient_accumulation_steps=2, num_processes=2, padded=False
    )
    task = Task(candidate=case, device="cpu", folder=str(tmp_path), steps=4, save=False, resume=False)
    lengths = [len(ids) for ids in worst_case_datasets(task, sft_row)["train_dataset"]["input_ids"]]
    batches = [lengths[at : at + 4] for at in range(0, len(lengths), 4)]
    assert batches[0::2] == batches[1::2]  # of two processes, which take batches in turn
    assert batches[-4:] == [[32] * 4] * 4 and all(max(batch) <= 30 for batch in batches[:-4])
