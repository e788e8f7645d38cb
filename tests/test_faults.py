"""Every fault of a probe is named, and leaves no process, no folder and no half-written file.

The workers are scripts without the libraries, except in the tests of the real worker at the end.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.errors import PlanError
from planner.files import cache
from planner.models.catalogue import load_model
from planner.quantities import Phase
from planner.units import MIB

pytest.importorskip("psutil")

from script_workers import LIMITS, TASK, run

from probes.runner.host import with_environment
from probes.runner.runner import KEPT_LOG_BYTES, WorkerLimits, run_probe

SOON_SECONDS = 10.0  # a worker that lives longer was not ended; two busy cores take a while
OURS = "PLAN_TEST_OF_FAULTS"
PATHS = [str(path) for path in Path(__file__).parents[:2]]


def wait_until(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON_SECONDS
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


@pytest.fixture(autouse=True)
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark the test's workers; afterwards none of them lives, and the runner left only complete files."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(OURS, mark)
    yield mark
    assert wait_until(lambda: not with_environment(OURS, mark))
    assert [path for folder in tmp_path.glob("plan-probe-*") for path in folder.rglob("*")] == []
    for told in tmp_path.rglob("*.json"):
        json.loads(told.read_text())
    assert {path.suffix for path in (tmp_path / "logs").glob("*")} <= {".json", ".out", ".err"}


def fault(text: str, tmp_path: Path, limits: WorkerLimits = LIMITS) -> tuple[str, str]:
    measured = run(text, tmp_path, limits)
    assert (measured.ranks, measured.shortage, measured.step_seconds) == ((), None, 0.0)
    assert not measured.decided or measured.outcome == "out_of_memory"
    return measured.outcome, measured.message


# -- ended by others ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", get_args(Phase))
def test_a_worker_killed_in_a_phase_is_killed_there(phase: Phase, tmp_path: Path) -> None:
    outcome = fault(f"open('phase', 'w').write({phase!r}); os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert outcome == ("killed", f"it was ended by SIGKILL that was not ours (in the {phase.replace('_', ' ')})")


def test_a_process_of_several_that_is_killed_is_told_through_its_launcher(tmp_path: Path) -> None:
    summary = (
        "Root Cause (first observed failure):\\n[0]:\\n"
        "  time      : 2026\\n  rank      : 1\\n  exitcode  : -9 (pid: 7)\\n"
    )
    failed = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
    assert fault(f"sys.stderr.write('{failed}\\n{summary}'); sys.exit(1)", tmp_path) == (
        "killed",
        "it was ended by SIGKILL that was not ours",
    )


def test_a_killed_guard_leaves_nothing_either(tmp_path: Path) -> None:
    assert fault("os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)", tmp_path)[0] == "killed"


@pytest.mark.parametrize("moment", [0.0, 0.05, 0.1, 0.2, 0.4])
def test_a_runner_that_is_killed_takes_its_worker_with_it(moment: float, tmp_path: Path, mark: str) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "from pathlib import Path\n"
        "from script_workers import run\n"
        "text = '''subprocess.Popen(['sleep', '60'], start_new_session=True); open('../up', 'w').close(); "
        "time.sleep(60)'''\n"
        "print('ready', flush=True)\n"
        "run(text, Path(sys.argv[3]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, *PATHS, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    if moment:
        assert wait_until((tmp_path / "up").exists)
        time.sleep(moment)
    process.kill()
    process.communicate()
    # the guard is marked too: once it is gone it has removed the folder
    assert wait_until(lambda: not with_environment(OURS, mark))


def test_what_probes_left_that_were_killed_a_day_ago_is_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    old = time.time() - 2 * 86_400
    ages = {
        f"plan-probe-{dead.pid}-a": old,
        f"plan-probe-{dead.pid}-b": time.time(),
        f"plan-probe-{os.getpid()}-c": old,
    }
    for name, changed in ages.items():
        (tmp_path / name / "inner").mkdir(parents=True)
        os.utime(tmp_path / name, (changed, changed))
    fault("sys.exit(1)", tmp_path)
    assert sorted(path.name for path in tmp_path.glob("plan-probe-*")) == sorted([*ages][1:])
    for name in [*ages][1:]:
        shutil.rmtree(tmp_path / name)


# Ends as a shell does that starts `plan`: the process gets SIGTERM once it has written the file "up".
INTERRUPTED = """
import sys, tempfile; sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from planner.commands import main
{imports}
def run(arguments):
    with tempfile.TemporaryDirectory(prefix="plan-probe-", dir=sys.argv[3]) as folder:
        {work}
main.run = run
main.main()
"""


def terminated(imports: str, work: str, folder: Path) -> int:
    code = INTERRUPTED.format(imports=imports, work=work)
    process = subprocess.Popen([sys.executable, "-c", code, *PATHS, str(folder)], stderr=subprocess.DEVNULL)
    assert wait_until((folder / "up").exists)
    process.terminate()
    return process.wait(SOON_SECONDS)


def test_no_process_of_windows_gets_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "os", SimpleNamespace(name="nt"))  # without `kill`
    assert cache._runs(1)


def test_a_command_that_is_terminated_removes_its_temporary_folders(tmp_path: Path) -> None:
    work = "(Path(folder) / 'kept').touch(); (Path(folder).parent / 'up').touch(); time.sleep(60)"
    assert terminated("import time", work, tmp_path) == -signal.SIGINT  # Python ends as by Ctrl-C


def test_a_compiler_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"sleep 60 &\ntouch $TMPDIR/part.s {tmp_path}/up\nsleep 60\n")
    imports = "from probes.emulated_gpu.build import _link\nfrom probes.emulated_gpu.libraries import Functions"
    work = f"_link(Path(folder), Path(folder), ('sh', {str(compiler)!r}), 'libcuda.so.1', Functions())"
    assert terminated(imports, work, tmp_path) == -signal.SIGINT


def test_a_folder_of_logs_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(PlanError, match=r"/logs cannot be made: File exists\. Set PLAN_CACHE to another folder\.$"):
        run("", tmp_path)


# -- its own fault -----------------------------------------------------------------------------------------------------


def test_an_exception_is_told_by_its_last_line(tmp_path: Path) -> None:
    text = "def backward():\n    raise RuntimeError('mat1 and mat2 shapes cannot be multiplied')\nbackward()"
    assert fault(text, tmp_path) == ("crashed", "RuntimeError: mat1 and mat2 shapes cannot be multiplied")


def test_of_several_processes_the_exception_is_told_not_the_launchers(tmp_path: Path) -> None:
    said = "[rank1]: ValueError: no such layer\\nsubprocess.CalledProcessError: Command failed\\n"
    assert fault(f"sys.stderr.write('{said}'); sys.exit(1)", tmp_path) == ("crashed", "ValueError: no such layer")


def test_a_crash_below_python_is_no_foreign_signal(tmp_path: Path) -> None:
    outcome, message = fault("os.kill(os.getpid(), signal.SIGSEGV)", tmp_path)
    assert (outcome, message.split(":")[0]) == ("crashed", "it was ended by SIGSEGV")


def test_an_exit_code_without_a_word_is_a_crash(tmp_path: Path) -> None:
    assert fault("sys.exit(7)", tmp_path) == ("crashed", "it ended with exit code 7")


def test_a_command_that_does_not_exist_is_a_crash(tmp_path: Path) -> None:
    measured = run_probe(TASK, LIMITS, tmp_path / "logs", lambda task, file: ["/no/such/python"])
    assert (measured.outcome, measured.message) == (
        "crashed",
        "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/python'",
    )


# -- hanging -----------------------------------------------------------------------------------------------------------

SHORT = replace(LIMITS, seconds=0.6)
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN);"


@pytest.mark.parametrize(
    "text",
    [
        "time.sleep(60)",
        "while True: pass",
        f"{DEAF} time.sleep(60)",
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "subprocess.Popen(['sleep', '60'], start_new_session=True); time.sleep(60)",
        "subprocess.run(['sh', '-c', 'setsid sh -c \"trap : TERM; sleep 60; sleep 60\" & sleep 60'])",
        "os.fork() or (os.setsid(), os.fork() and os._exit(0)); time.sleep(60)",
    ],
    ids=["sleeps", "spins", "deaf", "stopped", "own-session", "deaf-grandchild", "daemon"],
)
def test_a_worker_that_does_not_end_is_ended_with_all_that_it_started(text: str, tmp_path: Path) -> None:
    assert fault(f"open('phase', 'w').write('rollout')\n{text}", tmp_path, SHORT) == (
        "hung",
        "it had not ended after 0.60 s (in the rollout)",
    )


def test_what_a_worker_leaves_running_is_ended_though_it_answered(tmp_path: Path) -> None:
    started = time.monotonic()
    measured = run("subprocess.Popen(['sleep', '60'], start_new_session=True); print(answer)", tmp_path)
    assert measured.outcome == "fits"
    assert time.monotonic() - started < SOON_SECONDS


def test_a_worker_has_time_to_tidy_up(tmp_path: Path) -> None:
    text = "signal.signal(signal.SIGTERM, lambda *_: (print('bye', file=sys.stderr), sys.exit(0))); time.sleep(60)"
    assert Path(run(text, tmp_path, replace(LIMITS, seconds=1.0, grace_seconds=5.0)).log).read_text() == "bye\n"


# -- garbage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('done')", "it printed no measurement"),
        ("print(answer[:-20])", "its measurement cannot be read: "),
        (
            "print(answer.replace('\"schema\": 1', '\"schema\": 2'))",
            "its measurement cannot be read: A measurement of schema 2",
        ),
        ("print('@plan-measurement []')", "its measurement cannot be read: "),
        (
            "print(answer.replace('\"max_length\": 1024', '\"max_length\": 8'))",
            "it measured another candidate or device than it was told",
        ),
        ("sys.stdout.buffer.write(bytes(range(256)) * 100)", "it printed no measurement"),
    ],
    ids=["nothing", "cut", "schema", "list", "another", "binary"],
)
def test_a_worker_that_ends_well_and_says_nothing_of_use_is_garbage(text: str, message: str, tmp_path: Path) -> None:
    outcome, said = fault(text, tmp_path)
    assert (outcome, said[: len(message)]) == ("garbage", message)


def test_a_worker_that_prints_without_end_is_garbage_and_its_log_is_cut(tmp_path: Path) -> None:
    outcome, message = fault("while True: sys.stdout.write('x' * 2**20)", tmp_path, replace(LIMITS, log_bytes=8 * MIB))
    assert (outcome, message) == ("garbage", "it printed more than 0.01 GiB")
    assert next((tmp_path / "logs").glob("*.out")).stat().st_size == KEPT_LOG_BYTES


# -- the disk ----------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_told_by_its_error(tmp_path: Path) -> None:
    text = "open('phase', 'w').write('save'); file = open('/dev/full', 'w'); file.write('x'); file.flush()"
    assert fault(text, tmp_path) == ("disk_full", "OSError: [Errno 28] No space left on device (in the save)")


def test_a_checkpoint_that_could_not_be_written_whole_is_a_full_disk(tmp_path: Path) -> None:
    said = (
        "RuntimeError: [enforce fail at inline_container.cc:672] . "
        "PytorchStreamWriter failed writing file data/3: file write failed"
    )
    assert fault(f"raise RuntimeError({said.removeprefix('RuntimeError: ')!r})", tmp_path) == ("disk_full", said)


def test_a_worker_that_fills_its_folder_is_ended(tmp_path: Path) -> None:
    text = (
        "open('a', 'wb').write(bytes(4 * 2**20)); os.mkdir('b'); "
        "open('b/c', 'wb').write(bytes(4 * 2**20)); time.sleep(60)"
    )
    outcome, message = fault(text, tmp_path, replace(LIMITS, disk_bytes=6 * MIB))
    assert (outcome, message) == ("disk_full", "it held 0.01 GiB of disk, 0.01 GiB were allowed")


def test_the_host_keeps_some_of_its_disk(tmp_path: Path) -> None:
    outcome, message = fault("time.sleep(60)", tmp_path, replace(LIMITS, disk_reserve_bytes=2**60))
    assert outcome == "disk_full"
    assert message.endswith("GiB of disk were left, 1,073,741,824.00 GiB must be")


# -- host memory -------------------------------------------------------------------------------------------------------


def test_a_worker_that_holds_too_much_main_memory_is_ended(tmp_path: Path) -> None:
    text = "open('phase', 'w').write('load'); held = b'x' * (96 * 2**20); time.sleep(60)"
    outcome, message = fault(text, tmp_path, replace(LIMITS, host_bytes=64 * MIB))
    assert outcome == "host_out_of_memory"
    assert message.endswith("of host memory, 0.06 GiB were allowed (in the load)")


def test_the_memory_of_all_its_processes_counts(tmp_path: Path) -> None:
    hold = "held = b'x' * (48 * 2**20); time.sleep(60)"
    text = f"subprocess.Popen([sys.executable, '-c', \"import time; {hold}\"]); {hold}"
    assert fault(text, tmp_path, replace(LIMITS, host_bytes=80 * MIB))[0] == "host_out_of_memory"


def test_the_host_keeps_some_of_its_memory(tmp_path: Path) -> None:
    outcome, message = fault("time.sleep(60)", tmp_path, replace(LIMITS, host_reserve_share=2.0))
    assert outcome == "host_out_of_memory"
    assert "of host memory were left to the host" in message


def test_a_worker_that_the_kernel_ended_for_want_of_memory_is_no_foreign_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter([3, 4])
    monkeypatch.setattr("probes.runner.runner.kernel_kills", lambda: next(kills))
    outcome = fault("os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert outcome == ("host_out_of_memory", "the kernel ended it with SIGKILL: the host had no memory left")


@pytest.mark.parametrize(
    "said",
    [
        "MemoryError",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:126] . DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 9 bytes. Error code 12",
        "OSError: [Errno 12] Cannot allocate memory",
    ],
)
def test_main_memory_that_is_refused_is_told_from_the_gpus(said: str, tmp_path: Path) -> None:
    assert fault(f"print({said!r}, file=sys.stderr); sys.exit(1)", tmp_path) == ("host_out_of_memory", said)


def test_a_gpu_out_of_memory_that_nobody_caught_is_still_one(tmp_path: Path) -> None:
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert fault(f"print({said!r}, file=sys.stderr); sys.exit(1)", tmp_path) == ("out_of_memory", said)


def test_a_kernel_prefers_to_end_a_worker(tmp_path: Path) -> None:
    measured = run("print(open('/proc/self/oom_score_adj').read(), file=sys.stderr); print(answer)", tmp_path)
    assert Path(measured.log).read_text().strip() == "1000"


# -- the real worker ---------------------------------------------------------------------------------------------------

WATCHED = """
import os, runpy, signal, sys
from probes.worker.watch import Clock
enter = Clock.enter
def entered(clock, phase):
    enter(clock, phase)
    with open({entered!r}, "a") as file:
        print(phase, clock.file.read_text(), file=file)
    if phase == {last!r}:
        os.kill(os.getpid(), signal.SIGKILL)
Clock.enter = entered
sys.argv = ["worker", sys.argv[1]]
runpy.run_module("probes.worker.worker", run_name="__main__")
"""
PHASES = [phase for phase in get_args(Phase) if phase != "weight_sync"]  # only an engine has that one


ITS_PHASES = tuple(phase for phase in PHASES if phase != "evaluation")  # of a candidate without evaluations


@pytest.mark.slow
@pytest.mark.parametrize(
    "last", [pytest.param(phase, marks=() if phase == PHASES[-1] else pytest.mark.nightly) for phase in ITS_PHASES]
)
def test_the_real_worker_writes_down_each_phase_until_it_is_killed_in_one(last: Phase, tmp_path: Path) -> None:
    """Each case imports a trainer, so that `make` kills the worker in the last phase only."""
    pytest.importorskip("trl")
    model = load_model(str(Path(__file__).parent / "models" / "tiny-qwen2"))
    candidate = Candidate(
        model=model,
        method="grpo",
        prompt_length=8,
        max_completion_length=8,
        num_generations=2,
        per_device_train_batch_size=2,
        beta=0.1,
    )
    entered = tmp_path / "entered"
    program = WATCHED.format(entered=str(entered), last=last)
    killed = run_probe(
        replace(TASK, candidate=candidate),
        replace(LIMITS, seconds=120.0),
        tmp_path / "logs",
        lambda _, file: [sys.executable, "-c", program, str(file)],
    )
    assert (killed.outcome, killed.message) == (
        "killed",
        f"it was ended by SIGKILL that was not ours (in the {last.replace('_', ' ')})",
    )
    lines = [line.split() for line in entered.read_text().splitlines()]
    assert {phase for phase, _ in lines} == set(ITS_PHASES[: ITS_PHASES.index(last) + 1])
    assert all(phase == written for phase, written in lines)


def test_the_real_worker_is_ended_while_it_imports(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    hung = run_probe(replace(TASK, folder=str(tmp_path)), replace(LIMITS, seconds=1.0), tmp_path / "logs")
    assert (hung.outcome, hung.message) == ("hung", "it had not ended after 1.00 s")


def test_the_real_workers_libraries_alone_are_more_than_little_memory(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    ended = run_probe(replace(TASK, folder=str(tmp_path)), replace(LIMITS, host_bytes=64 * MIB), tmp_path / "logs")
    assert ended.outcome == "host_out_of_memory"
