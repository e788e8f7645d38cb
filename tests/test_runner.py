"""The runner with a script as worker, without the libraries: its task, its limits and its verdict."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from planner.measurements.documents import measurement_line
from planner.measurements.measurement import Shortage

pytest.importorskip("psutil")

from script_workers import ANSWER, CANDIDATE, LIMITS, RANK, TASK, run, script

from probes.runner.gpus_in_use import Card, Holder
from probes.runner.runner import run_probe, worker_environment
from probes.task import ANSWER_PREFIX, read_task


def test_a_workers_answer_is_its_measurement(tmp_path: Path) -> None:
    measured = run("print('loading ...'); print(answer)", tmp_path)
    assert replace(measured, wall_seconds=0.1, log="") == ANSWER


def test_a_worker_is_ended_when_the_time_of_all_probes_is_over(tmp_path: Path) -> None:
    began = time.monotonic()
    measured = run("time.sleep(60)", tmp_path, replace(LIMITS, ends_at=began + 0.5))
    assert (measured.outcome, measured.message) == ("hung", "the time for all probes was over")
    assert time.monotonic() - began < 15


def test_the_probes_time_is_that_of_its_whole_process(tmp_path: Path) -> None:
    assert run("time.sleep(0.3); print(answer)", tmp_path).wall_seconds >= 0.3


def test_a_worker_is_told_its_task_in_a_file_that_can_be_run_again(tmp_path: Path) -> None:
    run("print(answer)", tmp_path)
    (told,) = (tmp_path / "logs").glob("*.json")
    task = read_task(told)
    assert replace(task, candidate=replace(task.candidate, model=CANDIDATE.model), folder="") == TASK


def test_what_a_worker_prints_is_kept(tmp_path: Path) -> None:
    measured = run("print('noise'); print('warning', file=sys.stderr); print(answer)", tmp_path)
    assert Path(measured.log).read_text() == "warning\n"
    assert Path(measured.log).with_suffix(".out").read_text().startswith("noise\n")


def test_the_same_task_has_the_same_logs_and_another_task_others(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    first, second = (run_probe(TASK, LIMITS, logs, script("print(answer)")).log for _ in range(2))
    other = replace(TASK, candidate=replace(CANDIDATE, max_length=7))
    assert first == second
    assert run_probe(other, LIMITS, logs, script("pass")).log != first


def test_a_worker_works_in_a_folder_of_its_own_that_is_gone_afterwards(tmp_path: Path) -> None:
    measured = run(
        "open('checkpoint', 'w').write('x'); print(os.getcwd(), os.environ['TMPDIR'], file=sys.stderr); print(answer)",
        tmp_path,
    )
    folder, temporary = Path(measured.log).read_text().split()
    assert folder == temporary
    assert Path(folder).parent == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_the_candidate_decides_what_the_allocator_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:1")
    plain, expandable = (
        worker_environment(replace(TASK, candidate=replace(CANDIDATE, expandable_segments=said)), "m")
        for said in (False, True)
    )
    assert "PYTORCH_CUDA_ALLOC_CONF" not in plain
    assert expandable["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_a_worker_is_no_process_of_the_launcher_around_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert "RANK" not in worker_environment(TASK, "m")


def test_a_worker_sees_the_gpus_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_environment(TASK, "m")["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    alone = worker_environment(replace(TASK, device="cuda"), "m")
    assert (alone["CUDA_VISIBLE_DEVICES"], alone["PLAN_GIVEN_GPUS"]) == ("4", "4,5")
    several = replace(TASK, device="cuda", candidate=replace(CANDIDATE, num_processes=2, sharding="ddp"))
    assert worker_environment(several, "m")["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_of_several_processes_the_one_that_ran_out_of_memory_counts(tmp_path: Path) -> None:
    shortage = Shortage(rank=1, phase="loss", tried_bytes=8, free_bytes=1, allocated_bytes=5, reserved_bytes=6)
    short = ANSWER_PREFIX + measurement_line(replace(ANSWER, outcome="out_of_memory", shortage=shortage))
    measured = run(f"print({short!r}); print(answer)", tmp_path)
    assert (measured.outcome, measured.shortage) == ("out_of_memory", shortage)


def test_an_answer_counts_however_its_process_ends(tmp_path: Path) -> None:
    measured = run("print(answer, flush=True); os.kill(os.getpid(), signal.SIGSEGV)", tmp_path)
    assert (measured.outcome, measured.ranks, measured.message) == (
        "fits",
        (RANK,),
        "it answered, then it was ended by SIGSEGV",
    )


def test_an_answer_counts_though_its_process_does_not_end(tmp_path: Path) -> None:
    measured = run("print(answer, flush=True); time.sleep(60)", tmp_path, replace(LIMITS, seconds=1.0))
    assert (measured.outcome, measured.message) == (
        "fits",
        "it answered and did not end: it had not ended after 1.00 s",
    )


def test_phases_are_told_as_they_come(tmp_path: Path) -> None:
    heard: list[str] = []
    text = "\n".join(f"open('phase', 'w').write({phase!r}); time.sleep(0.6)" for phase in ("load", "forward"))
    run_probe(TASK, LIMITS, tmp_path, script(f"{text}\nprint(answer)"), say=heard.append)
    assert heard == ["load", "forward"]


def card(free_bytes: int) -> Card:
    return Card(
        index=0,
        total_bytes=1000,
        free_bytes=free_bytes,
        holders=(Holder(process=12, name="python", used_bytes=1000 - free_bytes),),
    )


def test_a_gpu_that_others_use_is_noticed_before_anything_starts(tmp_path: Path) -> None:
    limits = replace(LIMITS, free_gpu_bytes=900, gpu_wait_seconds=0.0)
    measured = run_probe(TASK, limits, tmp_path / "logs", script("print(answer)"), cards=lambda _: (card(400),))
    assert measured.outcome == "gpu_in_use"
    assert measured.message == "GPU 0 has 0.00 GiB of 0.00 GiB free; python (process 12) holds 0.00 GiB"
    assert not (tmp_path / "logs").exists()


def test_memory_that_a_probe_before_has_left_is_waited_for(tmp_path: Path) -> None:
    readings = iter([400, 400, 1000])
    limits = replace(LIMITS, free_gpu_bytes=1000)
    assert (
        run_probe(TASK, limits, tmp_path, script("print(answer)"), cards=lambda _: (card(next(readings)),)).outcome
        == "fits"
    )


def test_a_second_wait_for_the_same_task_reads_the_new_answer(tmp_path: Path) -> None:
    assert run("print(answer)", tmp_path).outcome == "fits"
    assert run("pass", tmp_path).outcome == "garbage"


def test_ctrl_c_ends_the_worker_and_goes_on(tmp_path: Path) -> None:
    """Run in a process of its own, which gets the signal; a shell's background process would ignore it."""
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); sys.path[:0] = sys.argv[1:3]\n"
        "from pathlib import Path\n"
        "from probes.runner.runner import run_probe\n"
        "from script_workers import LIMITS, TASK, script\n"
        "folder = Path(sys.argv[3])\n"
        "run_probe(TASK, LIMITS, folder, script(f\"open({str(folder / 'up')!r}, 'w').write(str(os.getpid())); "
        'time.sleep(60)"))\n'
    )
    here = Path(__file__).parent
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(here.parent), str(here), str(tmp_path)], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 20
    while not ((tmp_path / "up").exists() and (tmp_path / "up").read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    worker = int((tmp_path / "up").read_text())
    process.send_signal(2)
    _, said = process.communicate(timeout=20)
    assert said.strip().endswith("KeyboardInterrupt")
    assert not Path(f"/proc/{worker}").exists()


def test_the_answer_is_json_of_one_line(tmp_path: Path) -> None:
    assert json.loads(measurement_line(run("print(answer)", tmp_path)))["outcome"] == "fits"


def test_a_second_process_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    """Its peaks count where they are higher; if it fails, the probe has failed."""
    resumed = "import json; resumed = json.load(open(task_file))['from_checkpoint'] != ''; "
    task = replace(TASK, resume=True, folder=str(tmp_path))
    heavier = "print(answer.replace('\"allocated_bytes\": 5', '\"allocated_bytes\": 7') if resumed else answer)"
    assert run_probe(task, LIMITS, tmp_path, script(resumed + heavier)).peak_bytes == 7
    silent = "print('' if resumed else answer)"
    assert run_probe(task, LIMITS, tmp_path, script(resumed + silent)).outcome == "garbage"
