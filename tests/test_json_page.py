"""docs/json.md, docs/schema.json, docs/mcp.md and docs/SKILL.md: what they promise is what the command does."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from planner.commands.main import run
from planner.errors import ErrorCode

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SCHEMA_FILE = DOCS / "schema.json"
REWRITE = os.environ.get("PLAN_REWRITE_GOLDEN") == "1"
LOG = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 22.16 GiB "
    "of which 1.00 GiB is free. Including non-PyTorch memory, this process has 21.16 GiB memory in use. Of the "
    "allocated memory 20.00 GiB is allocated by PyTorch, and 0.50 GiB is reserved by PyTorch but unallocated."
)


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page(name), flags=re.DOTALL)


def test_the_published_schema_is_the_schema_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema"]) == 0
    printed = capsys.readouterr().out
    if REWRITE:
        SCHEMA_FILE.write_text(printed, encoding="utf-8")
    assert SCHEMA_FILE.read_text(encoding="utf-8") == printed


def test_the_page_names_every_code_with_its_exit_code() -> None:
    rows = re.findall(r"^\| (`.*`) \| .* \| (\d) \|$", page("json.md"), flags=re.MULTILINE)
    assert {code for names, _ in rows for code in re.findall(r"`(\w+)`", names)} == set(get_args(ErrorCode))


def test_the_error_that_the_page_shows_is_the_command_s(capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = map(json.loads, blocks("json.md", "json"))
    assert run(["--model", "Qwen2.5-7B", "--gpus", "1xL4", "--method", "grp", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["message"].startswith(shown["error"].pop("message").removesuffix("..."))
    assert error.items() >= shown["error"].items()


# -- the launcher ------------------------------------------------------------------------------------------------------


@pytest.fixture
def launch(tmp_path: Path) -> Any:
    """Runs the page's launcher with a stub `accelerate`, which prints its folder and its arguments."""
    (launcher,) = blocks("json.md", "python")
    assert len([line for line in launcher.splitlines() if line.strip()]) <= 15
    (tmp_path / "launcher.py").write_text(launcher)
    start = f"{shlex.quote(sys.executable)} -c 'from planner.commands.main import main; main()'"
    programs = {
        "accelerate": '#!/bin/sh\necho "accelerate in $(basename "$PWD"): $@"\nls "$3"\nexit 7\n',
        "plan": f'#!/bin/sh\nexec {start} "$@"\n',
    }
    for name, text in programs.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    own = os.environ | {"PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}

    def launched(arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "launcher.py", *arguments.split()], cwd=tmp_path, env=own, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip

    return launched


@pytest.mark.parametrize(("method", "started"), [("sft", "--module trl.scripts.sft"), ("gkd", "train.py")])
def test_the_launcher_starts_accelerate_on_the_exported_files(launch: Any, method: str, started: str) -> None:
    ran = launch(f"--model Qwen2.5-0.5B --gpus 1xL4 --method {method} --tuning lora")
    assert ran.returncode == 7, ran.stderr
    *_, call, file = ran.stdout.splitlines()
    assert call == f"accelerate in run: launch --config_file accelerate.yaml {started} --config train.yaml"
    assert file == "accelerate.yaml"


def test_the_launcher_passes_on_remedies_and_errors(launch: Any) -> None:
    ran = launch("--model Qwen2.5-7B --gpus 1xT4 --method sft --tuning full")
    assert ran.returncode == 1 and "\nTry --tuning qlora\n" in ran.stderr and "accelerate" not in ran.stdout
    ran = launch("--model Qwen2.5-7B --gpus 1xT4 --method sftt")
    assert ran.returncode == 2 and "Did you mean sft" in ran.stderr


# -- pages for agents --------------------------------------------------------------------------------------------------


def test_the_skill_has_the_front_matter_that_agents_read() -> None:
    _, front, text = page("SKILL.md").split("---\n", 2)
    described = yaml.safe_load(front)
    assert described.keys() == {"name", "description"}
    assert re.fullmatch(r"[a-z0-9-]{1,64}", described["name"]) and len(described["description"]) <= 1024
    assert len(text.splitlines()) < 500


def test_every_command_of_the_skill_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text("max_length: 512\nper_device_train_batch_size: 1\nuse_peft: true\n")
    (tmp_path / "run.log").write_text(LOG)
    commands = [line for line in re.findall(r"`(plan[^`]*)`", page("SKILL.md").split("## How")[0]) if " " in line]
    assert len(commands) == 6
    for command in commands:
        assert run(shlex.split(command)[1:]) in (0, 3), command
        assert capsys.readouterr().out


def test_the_page_about_agents_names_the_tools_and_shows_a_call_that_works() -> None:
    from planner.mcp.tools import TOOLS, call

    assert re.findall(r"^\| `(\w+)` \|", page("mcp.md"), flags=re.MULTILINE) == list(TOOLS)
    config, arguments = map(json.loads, blocks("mcp.md", "json"))
    assert config["mcpServers"]["plan"] == {"command": "plan", "args": ["mcp"]}
    assert call("plan", arguments).document["best"]["settings"]["zero_stage"] == 3
