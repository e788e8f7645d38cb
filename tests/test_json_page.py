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


def test_every_property_of_the_schema_is_described() -> None:
    kinds = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))["$defs"]
    properties = {(kind, name): each for kind in kinds for name, each in kinds[kind].get("properties", {}).items()}
    assert [where for where, each in properties.items() if not each.get("description")] == []


def test_the_first_keys_are_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(shlex.split("--model Qwen2.5-0.5B --gpus 1xL4 --method sft --json --quiet")) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report)[:4] == ["schema", "summary", "verdict", "best"]
    assert report["summary"].startswith("Qwen/Qwen2.5-0.5B, sft on 1 x L4 (")
    best = report["best"]
    assert best["settings_by_library"]["trl"].items() <= yaml.safe_load(best["launch"]["files"]["train.yaml"]).items()
    assert best["settings_by_library"]["accelerate"] == yaml.safe_load(best["launch"]["files"]["accelerate.yaml"])
    assert best["launch"]["env"]["CUDA_VISIBLE_DEVICES"] == "0" and best["why_no_launch"] == ""


def test_what_does_not_fit_has_no_launch(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(shlex.split("estimate --model Llama-3.1-70B --gpus 1xT4 --method sft --json --quiet")) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["launch"] is None and report["why_no_launch"] == "It does not fit."


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        ("--gpus 2x8xH100 --set distributed_type=FSDP", ["sbatch", "slurm.sh"]),
        ("--gpus 2xA100-80G --set zero_stage=2 --set offload_optimizer_device=cpu", ["bash", "launch.sh"]),
    ],
)
def test_what_takes_several_commands_is_started_by_a_script(
    words: str, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(shlex.split(f"estimate --model Qwen2.5-0.5B --method sft --json --quiet {words}")) == 0
    launch = json.loads(capsys.readouterr().out)["launch"]
    assert launch["argv"] == argv and argv[1] in launch["files"]


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
            timeout=400, check=False,
        )  # fmt: skip

    return launched


@pytest.mark.parametrize(("method", "started"), [("sft", "--module trl.scripts.sft"), ("gkd", "train.py")])
def test_the_launcher_starts_accelerate_on_the_exported_files(launch: Any, method: str, started: str) -> None:
    ran = launch(f"--model Qwen2.5-0.5B --gpus 1xL4 --method {method} --tuning lora")
    assert ran.returncode == 7, ran.stderr
    summary, call, file = ran.stdout.splitlines()
    assert summary.startswith(f"Qwen/Qwen2.5-0.5B, {method} on 1 x L4 (")
    launched = f"launch --config_file accelerate.yaml --num_processes 1 {started} --config train.yaml"
    assert call == f"accelerate in run: {launched}"
    assert file == "accelerate.yaml"


def test_the_launcher_takes_the_first_of_several_clusters_on_which_the_job_fits(launch: Any) -> None:
    """It ended in a KeyError."""
    ran = launch("--model Llama-3.1-8B --gpus 1xRTX-3050-4G,1xL4,1xH100 --method sft --tuning lora")
    assert ran.returncode == 7 and "sft on 1 x L4 (" in ran.stdout, ran.stderr


def test_the_launcher_passes_on_remedies_and_errors(launch: Any) -> None:
    ran = launch("--model Qwen2.5-7B --gpus 1xT4 --method sft --tuning full")
    assert ran.returncode == 1 and "\nTry --tuning qlora\n" in ran.stderr and "accelerate" not in ran.stdout
    ran = launch("--model Qwen2.5-7B --gpus 1xT4 --method sftt")
    assert ran.returncode == 2 and "Did you mean sft" in ran.stderr


@pytest.mark.slow
def test_the_launcher_trains_a_tiny_model(launch: Any, tmp_path: Path) -> None:
    """accelerate's own launcher and TRL's own script, on the CPU: two steps of the user's file with the plan in it."""
    exported_runs = pytest.importorskip("test_exported_runs")
    (tmp_path / "bin" / "accelerate").unlink()
    (tmp_path / "bin" / "accelerate").symlink_to(Path(sys.executable).parent / "accelerate")
    model = exported_runs.tiny_model(tmp_path / "model", json.loads(exported_runs.CONFIG.read_text(encoding="utf-8")))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(f"{json.dumps(exported_runs.ROWS['sft'][0])}\n" * 16)
    own = {
        "dataset_name": str(tmp_path / "data"),
        "output_dir": "output",
        "max_steps": 2,
        "use_cpu": True,
        "use_liger_kernel": False,
    }
    (tmp_path / "mine.yaml").write_text(
        f"# mine\n{yaml.safe_dump(own)}max_length: 64\nreport_to: none\nattn_implementation: sdpa\n"
    )
    ran = launch(f"--model {model} --gpus 1xL4 --method sft --config mine.yaml --batch-size 2")
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert (tmp_path / "run" / "train.yaml").read_text().splitlines()[1] == "# mine"
    exported_runs.assert_trained(tmp_path / "run", model)


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
