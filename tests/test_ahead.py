"""What is asked of a process that imports ahead is done there, or here, and nothing of it is left."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner import ahead
from planner.ahead import CannotImport, run_here
from planner.errors import DryRunUnsupported


def raises(text: str) -> None:
    raise DryRunUnsupported(text)


def dies() -> None:
    if os.getppid() == int(os.environ["AHEAD_PARENT"]):
        os.kill(os.getpid(), 9)


@pytest.fixture(autouse=True)
def parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AHEAD_PARENT", str(os.getpid()))


def test_a_function_runs_in_the_other_process_and_what_it_raises_is_raised_here() -> None:
    with ahead.ahead("json") as run:
        assert run("json", "loads", "[1, 2]") == [1, 2]
        assert run("os", "getpid") != os.getpid()
        with pytest.raises(DryRunUnsupported, match=r"^no such setting$"):
            run(__name__, "raises", "no such setting")
        assert run("os", "getpid") != os.getpid()


@pytest.mark.skipif(sys.platform != "linux", reason="no process is forked ahead elsewhere")
@pytest.mark.parametrize("command", [True, False])
def test_only_a_command_gives_way_to_the_process_that_it_waits_for(command: bool) -> None:
    said = "ahead.this_process_only_plans()" if command else ""
    script = f"import os\nfrom planner import ahead\n{said}\nwith ahead.ahead('json') as run:\n    print(run('os', 'nice', 0) - os.nice(0))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.stdout.strip() == str(-ahead.NICENESS if command else 0), done.stderr


def test_what_cannot_be_run_there_is_run_here() -> None:
    with ahead.ahead("json") as run:
        assert run(__name__, "dies") is None
        assert run("os", "getpid") == os.getpid()
    with ahead.ahead("no_such_module") as run:
        assert run("os", "getpid") == os.getpid()


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(CannotImport, match=r"^ModuleNotFoundError: No module named 'no_such_module'$"):
        run_here("no_such_module", "run")


def test_who_asks_for_nothing_leaves_nothing_behind() -> None:
    open_before, began = os.listdir("/proc/self/fd"), time.monotonic()
    with pytest.raises(KeyError), ahead.ahead("json"):
        raise KeyError
    assert time.monotonic() - began < 10
    assert len(os.listdir("/proc/self/fd")) <= len(open_before)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_no_more_processes_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", none_left)
    with ahead.ahead("json") as run:
        assert run("os", "getpid") == os.getpid()


UNSHIPPED = ("--model", "Qwen2.5-0.5B", "--gpus", "1xRTX-3090", "--method", "sft", "--tuning", "lora", "--lora-r", "8", "--set", "lora_dropout=0.3")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a process ahead is no gain on one core")
def test_a_plan_stands_on_a_profile_that_was_made_elsewhere_and_nothing_else_is_left(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    kept, scratch = tmp_path / "cache", tmp_path / "scratch"
    scratch.mkdir()
    surroundings = {name: value for name, value in os.environ.items() if name != "PLAN_DRY_RUN"} | {"PLAN_CACHE": str(kept), "TMPDIR": str(scratch)}
    script = "import sys; from planner.cli import run; code = run(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", script, *UNSHIPPED], capture_output=True, text=True, env=surroundings)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "simulating the recipe: sft of Qwen/Qwen2.5-0.5B ...\n"
    assert "simulated (profile of torch" in done.stdout
    assert len(list(kept.rglob("*.json.z"))) == 1 and not list(scratch.iterdir())
