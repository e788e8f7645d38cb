"""The commands of the README and of docs/, each in a fresh environment with nothing but the extra named for it."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from test_docs import DOCUMENTS, shown_commands

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 900  # to install an environment, or for one command
pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # each environment is installed from the package index

Installed = Callable[[str], Path]


def extra_of(command: str) -> str:
    """The extra that a command needs, "" for a core install."""
    words = shlex.split(command)
    if "--probe" in words or words[1] in ("probe", "validate"):
        return "probe"
    if "--dry-run" in words or words[1] == "dry-run":
        return "dryrun"
    return "report" if "--html" in words else ""


COMMANDS = shown_commands(DOCUMENTS)
TINY = str(ROOT / "tests" / "models" / "tiny-qwen2")
CLUSTER_PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
CLUSTER_COMMANDS = shown_commands(CLUSTER_PAGE)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Returns the programs of a fresh environment with one extra."""

    @cache
    def install(extra: str) -> Path:
        folder = tmp_path_factory.mktemp(extra or "core")
        finished([sys.executable, "-m", "venv", str(folder)], folder)
        project = f"{ROOT}[{extra}]" if extra else str(ROOT)
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
        finished([*pip, project], folder)
        return folder / "bin"

    return install


def finished(
    command: list[str], folder: Path, codes: tuple[int, ...] = (0,), environment: dict[str, str] | None = None
) -> str:
    ran = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False,
        env=os.environ | (environment or {}),
    )  # fmt: skip
    assert ran.returncode in codes, (command, ran.returncode, ran.stderr[-2000:])
    return ran.stdout


def test_the_readme_names_every_extra_that_it_needs() -> None:
    named = {extra for line in re.findall(r"pip install '\.\[([\w,]+)\]'", DOCUMENTS) for extra in line.split(",")}
    assert {"probe", "dryrun", "report", "serve", "notebook"} <= named


def test_the_commands_run_in_the_order_printed_after_a_core_install(installed: Installed, tmp_path: Path) -> None:
    programs = installed("")
    for command in COMMANDS:
        if not extra_of(command):
            words = shlex.split(command)
            assert finished([str(programs / words[0]), *words[1:]], tmp_path, (0, 3)), command


def test_a_command_without_its_extra_names_it(installed: Installed, tmp_path: Path) -> None:
    plan = str(installed("") / "plan")
    job = ["--model", "Qwen2.5-0.5B", "--gpus", "1xT4", "--method", "sft"]
    for asked, extra in (
        ([*job, "--html", "page.html"], "report"),
        ([*job, "--probe", "--device", "cpu"], "probe"),
        (["serve"], "serve"),
        (["mcp"], "mcp"),
    ):
        ran = subprocess.run([plan, *asked], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode in (1, 2), (asked, ran.stderr)
        assert f"finetune-plan[{extra}]" in ran.stderr
        assert "Traceback" not in ran.stderr


def test_a_page_is_written_with_its_extra(installed: Installed, tmp_path: Path) -> None:
    plan = str(installed("report") / "plan")
    finished([*(plan, *shlex.split(COMMANDS[0])[1:]), "--html", "page.html"], tmp_path)
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_a_notebook_runs_the_lines_of_the_readme(installed: Installed, tmp_path: Path) -> None:
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", DOCUMENTS, flags=re.DOTALL) if "sweep" in block]
    finished([str(installed("notebook") / "python"), "-c", code], tmp_path)


@contextmanager
def served(plan: Path, folder: Path) -> Iterator[int]:
    """A running server; yields its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([str(plan), "serve", "--port", str(port)], cwd=folder, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(300):
                try:
                    urlopen(f"http://127.0.0.1:{port}/openapi.json", timeout=5).close()
                    break
                except URLError:
                    time.sleep(0.1)
            yield port
        finally:
            server.terminate()


def test_a_server_answers_the_requests_of_the_readme(installed: Installed, tmp_path: Path) -> None:
    requests = re.findall(r"^ {4}(curl .*)$", DOCUMENTS, flags=re.MULTILINE)
    assert len(requests) == 2
    with served(installed("serve") / "plan", tmp_path) as port:
        for request in requests:
            answer = finished(["curl", "--silent", *shlex.split(request.replace(":8642", f":{port}"))[1:]], tmp_path)
            assert "error" not in json.loads(answer)


def test_a_probe_runs_with_its_extra(installed: Installed, tmp_path: Path) -> None:
    job = ["--model", TINY, "--gpus", "1xT4", "--method", "sft", "--tuning", "lora", "--max-length", "64"]
    assert finished([str(installed("probe") / "plan"), *job, "--probe", "--device", "cpu"], tmp_path, (0, 3, 4))


def test_a_dry_run_runs_with_its_extra(installed: Installed, tmp_path: Path) -> None:
    job = ["--model", "Qwen2.5-0.5B", "--gpus", "1xT4", "--method", "sft", "--tuning", "lora", "--dry-run"]
    said = finished([str(installed("dryrun") / "plan"), *job], tmp_path)
    assert "a dry run with the installed trl" in " ".join(said.split())


# -- docs/cluster.md ---------------------------------------------------------------------------------------------------


def on_this_cpu(command: str, gpus: str) -> list[str]:
    """The words of a command behind `plan`, with a tiny model on this machine's CPU in place of its own."""
    words = shlex.split(command)[1:]
    for name, value in (("--gpus", gpus), ("--model", TINY), ("--method", "sft")):
        words[words.index(name) + 1] = value
    return [*words, "--device", "cpu", "--max-length", "64"]


def test_the_page_about_clusters_names_the_extras_of_its_commands() -> None:
    named = re.findall(r"pip install ['\"]finetune-plan\[([\w,]+)\]['\"]", CLUSTER_PAGE)
    assert {"probe,storage", "ray"} <= set(named)


def test_a_plan_for_several_nodes_runs_after_a_core_install(installed: Installed, tmp_path: Path) -> None:
    (command,) = [each for each in CLUSTER_COMMANDS if "--network" in each]
    assert finished([str(installed("") / "plan"), *shlex.split(command)[1:]], tmp_path)


def test_a_team_shares_a_study_and_its_measurements(installed: Installed, tmp_path: Path) -> None:
    """On SQLite; a PostgreSQL server is started in test_shared_storage.py."""
    plan = str(installed("probe,storage") / "plan")
    team = {"PLAN_STORAGE": f"sqlite:///{tmp_path / 'plans.db'}"}
    (probe,) = [each for each in CLUSTER_COMMANDS if "--probe" in each and "--ray" not in each]
    finished([plan, *on_this_cpu(probe, "1xA100-80G")], tmp_path, environment=team)
    shown = [shlex.split(each) for each in CLUSTER_COMMANDS if each.startswith("plan measurements")]
    assert len(shown) == 4
    for words in shown:
        kept = words[1 : words.index(">")] if ">" in words else words[1:]
        unknown = (0, 2) if "3f0c9a1b2d4e" in kept else (0,)  # an id that is only an example
        finished([plan, *kept], tmp_path, unknown, team)


@contextmanager
def ray_cluster(programs: Path) -> Iterator[dict[str, str]]:
    """A cluster of one node with one logical GPU; yields the environment in which `auto` finds it and no other."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # short: sockets lie in it
        own = {"RAY_TMPDIR": folder}
        head = ["--head", "--port=0", "--num-cpus=1", "--num-gpus=1", "--include-dashboard=false", "--block"]
        cluster = subprocess.Popen(
            [str(programs / "ray"), "start", *head],
            env=os.environ | own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            for _ in range(120):
                status = [str(programs / "ray"), "status"]
                if not subprocess.run(status, env=os.environ | own, capture_output=True, check=False).returncode:
                    break
                assert cluster.poll() is None
                time.sleep(0.5)
            yield own
        finally:
            os.killpg(cluster.pid, signal.SIGTERM)
            cluster.wait(60)


def test_a_probe_runs_on_a_cluster_that_ray_start_has_begun(installed: Installed, tmp_path: Path) -> None:
    programs = installed("ray")
    (probe,) = [each for each in CLUSTER_COMMANDS if "--ray auto" in each]
    with ray_cluster(programs) as own:
        finished([str(programs / "plan"), *on_this_cpu(probe, "1xA100-80G")], tmp_path, environment=own)
