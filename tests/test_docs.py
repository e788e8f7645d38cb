"""Every command that the documents show runs, and the help that they quote is the command's."""

import os
import re
import shlex
from pathlib import Path

import pytest

from planner.commands.main import EPILOG, run
from scripts.picture import PICTURE, picture

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("answer", "examples", "python", "serve", "accuracy", "choosing", "design", "limits")  # of docs/
DOCUMENTS = "\n".join([README, *((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in PAGES)])
HELP_PAGE = ROOT / "docs" / "command.md"
SUBCOMMANDS = (
    "",
    "estimate",
    "dry-run",
    "probe",
    "diagnose",
    "validate",
    "export",
    "serve",
    "mcp",
    "models",
    "gpus",
    "schema",
    "measurements",
)
REWRITE = os.environ.get("PLAN_REWRITE_GOLDEN") == "1"


def shown_commands(text: str) -> list[str]:
    """The lines of a document's code that begin with `plan`, or that install and then run it."""
    lines = [
        line.strip().removeprefix("$ ").rpartition("&& ")[2]
        for line in re.findall(r"^ {4,}\S.*$|^plan .*$", text, flags=re.MULTILINE)
    ]
    return list(dict.fromkeys(line.split("  #")[0].strip() for line in lines if line.startswith("plan ")))


def help_text(subcommand: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run([*subcommand.split(), "--help"]) == 0
    return capsys.readouterr().out


def help_page(capsys: pytest.CaptureFixture[str]) -> str:
    parts = ["# The command\n\nWritten by `make golden` from the command itself.\n"]
    for subcommand in SUBCOMMANDS:
        call = f"plan {subcommand}".strip()
        parts.append(f"## `{call}`\n\n```\n{help_text(subcommand, capsys).rstrip()}\n```\n")
    return "\n".join(parts)


COMMANDS = [
    pytest.param(command, marks=pytest.mark.slow if "--probe" in command else ())
    for command in shown_commands(DOCUMENTS)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all commands of the documents: later ones read what earlier ones have written."""
    return tmp_path_factory.mktemp("readme")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_documents_answers_in_the_order_printed(command, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert run(shlex.split(command)[1:]) in (0, 3)
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", shown_commands(EPILOG))
def test_the_commands_at_the_end_of_the_help_run(command, capsys):
    assert run(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def test_the_help_ends_with_the_exit_codes_and_two_commands(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ending = help_text("", capsys).split("Exit codes: ")[1]
    assert all(f"{code} " in ending for code in range(5))
    assert len(re.findall(r"^ +plan ", ending, flags=re.MULTILINE)) == 2


def test_the_help_in_the_documents_is_the_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = help_page(capsys)
    if REWRITE:
        HELP_PAGE.write_text(page, encoding="utf-8")
    assert HELP_PAGE.read_text(encoding="utf-8") == page


def test_the_readme_shows_one_line_that_installs_and_tests():
    lines = [line.strip() for line in README.splitlines() if line.strip().startswith("pip install -c constraints.txt")]
    assert lines == ["pip install -c constraints.txt '.[test]' && make"]


def test_the_readme_begins_with_the_command_of_the_mission():
    assert shown_commands(README)[0] == "plan --model Qwen2.5-7B --gpus 2xA100-40G --method grpo"


def test_the_readme_is_one_page():
    assert len(README.splitlines()) <= 100


def test_every_link_of_the_documents_leads_to_a_file():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_picture_is_that_of_the_answer():
    if REWRITE:
        PICTURE.write_text(picture(), encoding="utf-8")
    assert PICTURE.read_text(encoding="utf-8") == picture()


def test_what_is_pinned_for_the_tests_is_what_the_project_asks_for():
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    wanted = re.findall(r'"([A-Za-z][\w.-]*)(?:\[[\w,]+\])?>=', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    optional = {"hatchling", "deepspeed", "vllm", "ray", "tomli"}
    assert [
        name for name in wanted if name not in optional and f"\n{name.lower().replace('_', '-')}==" not in constraints
    ] == []
