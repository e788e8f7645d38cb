"""The emulated GPU: what the real CUDA stack allocates on it, and that nothing of it is left.

Run in an environment of scripts/emulated_environment.sh (`make emulated`): PyTorch must be its CUDA build.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.commands.exit_codes import EXIT_PLANNED, EXIT_WRONG_INPUT
from planner.commands.main import run
from planner.estimation import estimate
from planner.gpus.cluster import Cluster
from planner.gpus.parse import parse_cluster
from planner.measurements.measurement import Measurement
from planner.memory.runtime import context_bytes
from planner.models.catalogue import load_model
from planner.units import GIB, MIB
from probes.emulated_gpu.machine import Machine, ProcessMemory, read_processes
from probes.emulated_gpu.start import MACHINE_FILE, machine_environment
from probes.runner.devices import DeviceOptions, device
from probes.runner.runner import WorkerLimits
from scripts.emulated_grid import torch_bytes

TORCH = find_spec("torch")
# Without NVIDIA's libraries PyTorch's CUDA build can be imported in a worker only.
if TORCH is None or not Path(str(TORCH.origin)).with_name("lib").joinpath("libtorch_cuda.so").exists():
    pytest.skip("needs PyTorch's CUDA build: make emulated", allow_module_level=True)

A100 = parse_cluster("1xA100-40G", None)
TINY = load_model(str(Path(__file__).parent / "models" / "tiny-qwen2"))
# Two runs differ by the last segment of a pool; the prototype's figures are rounded to 0.01 GiB.
TOLERANCE = 0.002
APPEARS_SECONDS = 600  # until what must come is taken for missing, on a machine where much else runs


def lora_7b(**changes: Any) -> Candidate:
    settings = dict(
        model=load_model("Qwen2.5-7B"), method="sft", tuning="lora", dtype="bfloat16", max_length=2048,
        per_device_train_batch_size=1, padded=False,
    )  # fmt: skip
    return Candidate(**settings | changes)


def probed(candidate: Candidate, cluster: Cluster, folder: Path, **options: Any) -> Measurement:
    settings = {"resume": False, "save": False} | options
    found = device(
        "emulated", cluster, DeviceOptions(logs=folder, limits=WorkerLimits(host_reserve_share=0.0), **settings)
    )
    return found(candidate)


@pytest.fixture
def on_card(tmp_path: Path) -> Callable[..., tuple[str, tuple[ProcessMemory, ...]]]:
    """Run Python code on an emulated machine; return what it prints, and the memory of its processes."""

    def ran(code: str, **machine: Any) -> tuple[str, tuple[ProcessMemory, ...]]:
        settings: dict[str, Any] = {"gpu": A100.gpu, "cards": 1} | machine
        environment = machine_environment(Machine(**settings), tmp_path)
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.strip(), read_processes(tmp_path / MACHINE_FILE)

    return ran


class TestDriver:
    def test_a_card_runs_out_of_memory_at_the_byte(self, on_card) -> None:
        code = (
            "import torch; free, total = torch.cuda.mem_get_info(); size = free // 2**21 * 2**21\n"
            "held = torch.empty(size, dtype=torch.uint8, device='cuda')\n"
            "print(total - torch.cuda.mem_get_info()[0] - size)\n"
            "try: torch.empty(1, device='cuda'); print('fits')\n"
            "except torch.OutOfMemoryError as error: print(str(error)[:19])"
        )
        text, (process,) = on_card(code)
        context, _, message = text.partition("\n")
        assert message == "CUDA out of memory."
        assert process.peak_bytes[0] <= A100.gpu.total_bytes < process.peak_bytes[0] + 2 * MIB
        assert int(context) == context_bytes(A100.gpu)

    def test_a_process_sees_the_cards_that_it_is_shown(self, on_card) -> None:
        code = (
            "import os; os.environ['CUDA_VISIBLE_DEVICES'] = '2,1'\n"
            "import torch; torch.empty(2**22, device='cuda:1'); print(torch.cuda.device_count())"
        )
        text, (process,) = on_card(code, cards=4)
        assert text == "2" and [size > 0 for size in process.peak_bytes] == [False, True, False, False]

    def test_memory_that_others_hold_is_not_free(self, on_card) -> None:
        gpu = replace(A100.gpu, free_bytes=A100.gpu.total_bytes - 30 * GIB)
        text, _ = on_card("import torch; print(torch.cuda.mem_get_info()[0])", gpu=gpu)
        assert int(text) == gpu.free_bytes - context_bytes(gpu)

    def test_two_processes_share_a_card(self, on_card) -> None:
        child = (
            "import torch; torch.empty(2**30, dtype=torch.uint8, device='cuda'); print(torch.cuda.mem_get_info()[0])"
        )
        code = (
            "import subprocess, sys, torch; held = torch.empty(2**30, dtype=torch.uint8, device='cuda')\n"
            f"print(subprocess.run([sys.executable, '-c', {child!r}], capture_output=True, text=True).stdout)"
        )
        text, processes = on_card(code)
        assert int(text) == A100.gpu.total_bytes - 2 * (GIB + context_bytes(A100.gpu)) and len(processes) == 2

    def test_pinned_memory_is_counted_apart(self, on_card) -> None:
        code = "import os, torch; x = torch.empty(2**28, dtype=torch.uint8).pin_memory(); os._exit(0)"
        _, (process,) = on_card(code)
        assert process.pinned_bytes == 2**28 and process.peak_bytes[0] < GIB

    def test_events_complete_when_their_stream_has_come_to_them(self, on_card) -> None:
        code = (
            "import torch; x = torch.empty(8192, 8192, device='cuda'); event = torch.cuda.Event()\n"
            "for _ in range(100): x @ x\n"
            "event.record(); print(event.query()); event.synchronize(); print(event.query())"
        )
        assert on_card(code, pace=1.0)[0] == "False\nTrue"
        assert on_card(code, pace=0.0)[0] == "True\nTrue"

    @pytest.mark.parametrize("gpu", ["L4", "B300", "V100-16G"])
    def test_a_card_runs_the_kernels_of_its_generation(self, gpu: str, on_card) -> None:
        """CUB's kernels, of `masked_scatter`, are found by the architecture that they were compiled for."""
        code = (
            "import torch; mask = torch.ones(64, 64, dtype=torch.bool, device='cuda')\n"
            "print(torch.zeros(64, 64, device='cuda').masked_scatter(mask, torch.ones(4096, device='cuda')).shape[0])"
        )
        assert on_card(code, gpu=parse_cluster(f"1x{gpu}", None).gpu)[0] == "64"

    @pytest.mark.parametrize("elements", [16, 64])
    def test_what_an_earlier_tensor_left_is_no_overflow(self, elements: int, on_card) -> None:
        code = (
            "import torch; from probes.emulated_gpu.values import small_values_on_host\n"
            "with small_values_on_host():\n"
            f"    left = torch.full(({elements},), -1, dtype=torch.int32, device='cuda')\n"
            "    del left\n"
            f"    gradient = torch.empty({elements}, device='cuda')\n"
            "    print(bool(torch.isfinite(gradient.amax()).logical_and(torch.isfinite(gradient.amin()))))"
        )
        assert on_card(code)[0] == "True"

    def test_small_integers_are_computed_and_large_tensors_are_not(self, on_card) -> None:
        code = (
            "import torch\nfrom probes.emulated_gpu.values import small_values_on_host\n"
            "with small_values_on_host():\n"
            "    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).cuda().ne(0)\n"
            "    print(mask.sum(-1).tolist(), mask.all().item(), mask.nonzero().tolist(), (2.0 ** mask.sum()).item())\n"
            "    weights = torch.ones(4096, 4096, device='cuda'); print((weights @ weights).sum().item())"
        )
        assert on_card(code)[0] == "[2, 1] False [[0, 0], [0, 1], [1, 0]] 8.0\n0.0"


class TestRanks:
    def test_the_tensor_of_a_collective_is_dropped_after_the_wait_for_its_watchdog(self, on_card) -> None:
        code = (
            "import torch, torch.distributed as ranks\nfrom probes.emulated_gpu.peers import wait_for_watchdog\n"
            "ranks.init_process_group('nccl', store=ranks.HashStore(), rank=0, world_size=1)\n"
            "bucket, small = torch.empty(2**24, device='cuda'), torch.zeros(1, device='cuda')\n"
            "ranks.all_reduce(bucket, async_op=True).get_future().wait()\n"
            "del bucket; wait_for_watchdog(); ranks.all_reduce(small); print(torch.cuda.memory_allocated())"
        )
        assert on_card(code)[0] == "512"


class TestProbes:
    def test_lora_of_7b_allocates_as_on_the_first_emulator(self, tmp_path: Path) -> None:
        found = probed(lora_7b(), A100, tmp_path)
        (rank,) = found.ranks
        assert (found.outcome, found.evidence) == ("fits", "emulated"), found.message
        assert rank.allocated_bytes == pytest.approx(15.78 * GIB, rel=TOLERANCE)

    def test_two_runs_are_equal(self, tmp_path: Path) -> None:
        candidate = Candidate(model=TINY, method="dpo", max_length=64, per_device_train_batch_size=2, dtype="bfloat16")
        one, other = (probed(candidate, A100, tmp_path).ranks[0].phases for _ in range(2))
        assert [replace(each, seconds=0.0) for each in one] == [replace(each, seconds=0.0) for each in other]

    def test_a_card_that_is_too_small_runs_out_of_memory(self, tmp_path: Path) -> None:
        found = probed(lora_7b(), parse_cluster("1xRTX-4060-Ti-16G", None), tmp_path)
        assert found.outcome == "out_of_memory" and found.shortage is not None

    def test_qlora_runs_the_kernels_of_bitsandbytes(self, tmp_path: Path) -> None:
        found = probed(lora_7b(quantization="nf4"), parse_cluster("1xRTX-3090", None), tmp_path)
        assert found.outcome == "fits", found.message
        assert found.ranks[0].allocated_bytes == pytest.approx(6.69 * GIB, rel=TOLERANCE)

    @pytest.mark.nightly  # 44 s
    def test_a_rollout_from_images_needs_what_is_estimated(self, tmp_path: Path) -> None:
        candidate = lora_7b(
            model=load_model("gemma-3-4b-pt"), method="grpo", per_device_train_batch_size=2, num_generations=2,
            steps_per_generation=2, gradient_accumulation_steps=2, prompt_length=320, max_completion_length=4,
            images_per_row=1, padded=True,
        )  # fmt: skip
        found = probed(candidate, A100, tmp_path)
        assert found.outcome == "fits", found.message
        phases = estimate(candidate, A100).gpus[0].phases
        estimated = {phase.name: torch_bytes(candidate, A100, phase) for phase in phases}
        for phase in found.ranks[0].phases:
            if phase.name in ("rollout", "forward", "backward"):
                assert phase.allocated_bytes == pytest.approx(estimated[phase.name], rel=0.01), phase.name

    def test_zero3_runs_in_two_processes(self, tmp_path: Path) -> None:
        candidate = lora_7b(model=TINY, sharding="zero3", num_processes=2, max_length=64)
        found = probed(candidate, parse_cluster("2xA100-40G", None), tmp_path)
        assert found.outcome == "fits", found.message
        assert [rank.rank for rank in found.ranks] == [0, 1]
        assert found.ranks[0].allocated_bytes == found.ranks[1].allocated_bytes

    @pytest.mark.nightly  # 14 s
    def test_zero3_runs_in_one_process(self, tmp_path: Path) -> None:
        """CPO loads its policy with `device_map="auto"`, which Transformers refuses: certificate 1-4 crashed in it."""
        found = probed(lora_7b(model=TINY, sharding="zero3", method="cpo", max_length=64), A100, tmp_path)
        assert found.outcome == "fits", found.message

    def test_ranks_gather_objects_as_large_as_images(self, on_card, tmp_path: Path) -> None:
        """TRL gathers prompts with their images: start 2-25 of results/emulated_starts.md could not unpickle them."""
        script = tmp_path / "gather.py"
        script.write_text(
            f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
            "from probes.emulated_gpu.values import keep_small_values_on_host\n"
            "keep_small_values_on_host()\n"
            "from accelerate import PartialState\n"
            "from accelerate.utils import gather_object\n"
            "rank = PartialState().process_index\n"
            "found = gather_object([bytes([rank + 1]) * (3 + rank) * 2**20])\n"
            "if rank == 0: print([(len(each) >> 20, set(each)) for each in found])\n"
        )
        arguments = ["torchrun", "--nproc-per-node", "2", str(script)]
        start = (
            f"import runpy, sys; sys.argv = {arguments}; runpy.run_module('torch.distributed.run', run_name='__main__')"
        )
        assert on_card(start, cards=2)[0] == "[(3, {1}), (4, {2})]"

    @pytest.mark.nightly
    def test_ranks_report_though_their_reports_differ_in_size(self, on_card, tmp_path: Path) -> None:
        script = tmp_path / "report.py"
        script.write_text(
            f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
            "from accelerate import PartialState\n"
            "from planner.measurements.measurement import RankMemory\n"
            "from probes.worker.worker import of_all_ranks\n"
            "rank = PartialState().process_index\n"
            "blocks = {f'block {index}': index for index in range(100 * (2 - rank))}\n"
            "mine = RankMemory(rank=rank, phases=(), state_bytes={}, capacity_bytes=0, allocator=blocks)\n"
            "found = of_all_ranks(mine)\n"
            "if rank == 0: print([len(each.allocator) for each in found])\n"
        )
        arguments = ["torchrun", "--nproc-per-node", "2", str(script)]
        start = (
            f"import runpy, sys; sys.argv = {arguments}; runpy.run_module('torch.distributed.run', run_name='__main__')"
        )
        said, _ = on_card(start, cards=2)
        assert said == "[200, 100]"

    def test_one_rank_of_64_runs_alone(self, tmp_path: Path) -> None:
        candidate = lora_7b(
            model=load_model("Qwen2.5-0.5B"), sharding="fsdp2", num_processes=64, num_nodes=8, max_length=512
        )
        found = probed(candidate, parse_cluster("8x8xH100", None), tmp_path)
        assert found.outcome == "fits", found.message
        assert [rank.rank for rank in found.ranks] == [0]

    @pytest.mark.nightly
    def test_a_rank_alone_gathers_objects_over_the_cpu(self, tmp_path: Path) -> None:
        """GRPO under FSDP2 gathers the texts of all ranks over the CPU: a rank alone waited for its peers."""
        candidate = lora_7b(
            model=load_model("Qwen2.5-0.5B"), method="grpo", sharding="fsdp2", num_processes=4, num_generations=2,
            per_device_train_batch_size=2, prompt_length=64, max_completion_length=8, max_length=72,
        )  # fmt: skip
        found = probed(candidate, parse_cluster("4xA100-40G", None), tmp_path)
        assert found.outcome == "fits", found.message

    @pytest.mark.nightly
    @pytest.mark.parametrize("tuning", ["lora", "full"])
    @pytest.mark.parametrize("sharding", ["ddp", "zero2", "zero3", "fsdp2"])
    @pytest.mark.parametrize("ranks", [2, 8])
    def test_a_rank_alone_is_the_rank_among_real_ones(
        self, ranks: int, sharding: Any, tuning: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr("probes.runner.devices.REAL_PROCESSES", ranks)
        model, cluster = load_model("Qwen2.5-0.5B"), parse_cluster(f"{ranks}xA100-40G", None)
        candidate = lora_7b(model=model, sharding=sharding, num_processes=ranks, max_length=512, tuning=tuning)
        among = probed(candidate, cluster, tmp_path).ranks[0]
        monkeypatch.setattr("probes.runner.devices.REAL_PROCESSES", 1)
        alone = probed(candidate, cluster, tmp_path).ranks[0]
        sizes = [(rank.allocated_bytes, rank.reserved_bytes, rank.driver_bytes) for rank in (among, alone)]
        assert sizes[0] == sizes[1]

    @pytest.mark.nightly
    def test_one_rank_of_1024_takes_less_than_a_minute_of_a_core(self, tmp_path: Path) -> None:
        """Seconds of the processor, as far as the system knows them: other work does not lengthen them much."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = probed(
            lora_7b(sharding="zero3", num_processes=1024, num_nodes=128), parse_cluster("128x8xH100", None), tmp_path
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert found.outcome == "fits", found.message
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60


def test_plan_itself_imports_pytorch_without_nvidias_libraries() -> None:
    """They are loaded into its process: the measuring of layers stopped at libcudnn.so.9."""
    code = "from planner.training_stack import import_torch; import_torch(); import torch; print(torch.version.cuda)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("13."), done.stderr


class TestDryRun:
    MODEL = str(Path(__file__).parent / "models" / "tiny-qwen2")
    JOB = ("--model", MODEL, "--gpus", "1xT4", "--method", "sft", "--tuning", "lora", "--max-length", "64")

    def test_a_configuration_runs_beside_its_estimate(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["dry-run", *self.JOB, "--json", "--quiet"]) == EXIT_PLANNED
        report = json.loads(capsys.readouterr().out)
        assert (report["evidence"], report["fits"], report["out_of_memory"]) == ("emulated", True, None)
        phases = {phase["name"]: phase for phase in report["phases"]}
        for name in ("forward", "loss", "backward"):
            phase = phases[name]
            assert phase["allocated_bytes"] == pytest.approx(phase["estimated_allocated_bytes"], rel=0.01), name
            assert phase["allocated_bytes"] < phase["reserved_bytes"] < phase["driver_bytes"]

    @pytest.mark.nightly
    def test_the_answer_of_plan_is_checked(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run([*self.JOB, "--dry-run", "--json", "--quiet"]) == EXIT_PLANNED
        assert json.loads(capsys.readouterr().out)["warnings_data"][0]["code"] == "dry_run"


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class TestFaults:
    @pytest.mark.parametrize("killed", ["parent", pytest.param("worker", marks=pytest.mark.nightly)])
    def test_nothing_is_left_when_a_process_is_killed(self, killed: str, tmp_path: Path) -> None:
        arguments = "probe --device emulated --model Qwen2.5-0.5B --gpus 1xT4 --method sft --tuning lora"
        environment = os.environ | {"TMPDIR": str(tmp_path)}
        code = f"from planner.commands.main import run; run({arguments.split()!r})"
        parent = subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True)
        until = time.monotonic() + APPEARS_SECONDS
        while not any(tmp_path.glob("plan-probe-*/machine")) and time.monotonic() < until:
            time.sleep(0.1)
        found = list(tmp_path.glob("plan-probe-*"))
        started = psutil.Process(parent.pid).children(recursive=True)
        workers = [each for each in started if "probes.worker.worker" in each.cmdline()]
        for process in [psutil.Process(parent.pid)] if killed == "parent" else workers:
            process.kill()
        parent.wait(APPEARS_SECONDS)
        (folder,) = found
        until = time.monotonic() + APPEARS_SECONDS
        while (folder.exists() or any(map(_runs, started))) and time.monotonic() < until:
            time.sleep(0.1)
        assert workers and not folder.exists() and not any(map(_runs, started))


def test_a_study_ends_in_a_certificate_of_emulated_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--probe --device emulated --model Qwen2.5-0.5B --gpus 1xRTX-3090 --method sft"
    assert run(arguments.split()) == EXIT_PLANNED
    out = capsys.readouterr().out
    assert "proven (emulated)" in out and "no GPU was measured" in out


def test_an_emulated_probe_needs_a_compiler_once(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv("PLAN_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("probes.emulated_gpu.build.find_spec", lambda name: None)
    arguments = "probe --device emulated --model Qwen2.5-0.5B --gpus 1xT4 --method sft --tuning lora"
    assert run(arguments.split()) == EXIT_WRONG_INPUT
    assert "pip install ziglang" in capsys.readouterr().err
