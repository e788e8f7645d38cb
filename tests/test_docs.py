"""Every command that the documents show runs, and the help that they quote is the command's."""

import ast
import json
import os
import re
import shlex
from pathlib import Path

import pytest
from test_layout import ALLOWED, PATHS, part, tree_of

from planner.commands.help import EXAMPLES
from planner.commands.main import COMMANDS as COMMANDS_OF_PLAN
from planner.commands.main import run
from scripts.choices_page import PAGE as CHOICES_PAGE
from scripts.choices_page import answer
from scripts.choices_page import page as choices
from scripts.picture import PICTURE, picture

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("answer", "examples", "python", "serve", "accuracy", "choosing", "design", "lengths", "limits")  # of docs/
DOCUMENTS = "\n".join([README, *((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in PAGES)])
EXAMPLES_PAGE = ROOT / "docs" / "examples.md"
LONG_ROWS = re.compile(r"(?<=\| tokens \| GPUs \| the plan \|\n\|---\|---\|---\|\n)(?:\|.*\n)*")
HELP_PAGE = ROOT / "docs" / "command.md"
DESIGN_PAGE = ROOT / "docs" / "design.md"
TREE = re.compile(r"(?<=by `make golden`:\n\n```\n).*?(?=```\n)", re.DOTALL)  # of the design page
SUBCOMMANDS = ("", *COMMANDS_OF_PLAN)
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


def layout_tree() -> str:
    """The folders and root modules of both packages, from the bottom of the table of imports to its top, as a text.

    A row holds the first line of a docstring.
    """
    parts = list(ALLOWED)
    rows = {"planner": [], "probes": []}
    for module, path in PATHS.items():
        package, *inside = module.split(".")
        if len(inside) == 1 or (len(inside) == 2 and path.name == "__init__.py" and inside[1] != "migrations"):
            name = f"{'/'.join(inside)}{'/' if path.name == '__init__.py' else '.py'}"
            rank = max(parts.index(part(each)) for each in PATHS if f"{each}.".startswith(f"{module}."))
            rows[package].append((rank, name, (ast.get_docstring(tree_of(module)) or "").partition("\n")[0]))
    return "".join(
        f"{package + '/':<26}{(ast.get_docstring(tree_of(package)) or '').partition(chr(10))[0]}\n"
        + "".join(f"  {name:<24}{said}\n" for _, name, said in sorted(rows[package]))
        for package in rows
    )


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


# Examples that run until they are ended, need a GPU, PyTorch's build for CUDA or a tokenizer of the Hub.
NOT_RUN = ("plan serve", "plan mcp", "plan probe", "plan dry-run", "plan lengths")


@pytest.mark.slow
def test_the_examples_of_the_help_run_in_the_order_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLAN_CACHE", str(tmp_path / "cache"))
    log = ROOT / "tests" / "logs" / "grpo_optimizer_step.log"
    (tmp_path / "train.log").write_text(log.read_text(encoding="utf-8"), encoding="utf-8")
    case = {"model": "Qwen2.5-0.5B", "settings": {"method": "sft"}, "gpu": "L4", "quantity": "reserved"}
    (tmp_path / "cases.jsonl").write_text(json.dumps(case | {"measured_gib": 7.9}) + "\n", encoding="utf-8")
    for example in (example for examples in EXAMPLES.values() for example in examples):
        if not example.startswith(NOT_RUN):
            assert run(shlex.split(example)[1:]) == 0, example
            assert capsys.readouterr().out


def test_every_subcommand_has_examples_of_its_own():
    assert EXAMPLES.keys() == {"", *COMMANDS_OF_PLAN}
    for name, examples in EXAMPLES.items():
        assert examples and all(example.startswith(f"plan {name}".strip()) for example in examples)
        assert all(len(example) <= 78 for example in examples)


def test_the_help_of_plan_has_panels_and_the_question_first(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = help_text("", capsys)
    panels = re.findall(r"^╭─ (\w[\w ]*)", shown, flags=re.MULTILINE)
    assert [panel.strip() for panel in panels] == [
        "Job",
        "Hardware",
        "Pins",
        "Goal and cost",
        "Output",
        "Probe",
        "Commands",
    ]
    flags = re.findall(r"^│ (?:-\w, )?(--[\w-]+)", shown, flags=re.MULTILINE)
    assert flags[:3] == ["--model", "--gpus", "--method"]
    assert max(map(len, shown.splitlines())) <= 80


def test_the_help_ends_with_examples_and_the_exit_codes(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in SUBCOMMANDS:
        ending = help_text(name, capsys).split("Examples:")[1]
        assert all(f"  {example}\n" in ending for example in EXAMPLES[name])
        assert all(f"{code} " in ending.split("Exit codes: ")[1] for code in range(5))


def test_the_help_in_the_documents_is_the_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = help_page(capsys)
    if REWRITE:
        HELP_PAGE.write_text(page, encoding="utf-8")
    assert HELP_PAGE.read_text(encoding="utf-8") == page


def test_the_tree_of_the_design_page_is_that_of_the_docstrings():
    if REWRITE:
        DESIGN_PAGE.write_text(TREE.sub(layout_tree(), DESIGN_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    assert TREE.findall(DESIGN_PAGE.read_text(encoding="utf-8")) == [layout_tree()]


def test_every_folder_says_in_one_line_what_it_holds():
    assert [line for line in layout_tree().splitlines() if not re.search(r"\s{2,}\S.*\.$", line)] == []


def test_the_readme_shows_one_line_that_installs_and_tests():
    lines = [line.strip() for line in README.splitlines() if line.strip().startswith("pip install -c constraints.txt")]
    assert lines == ["pip install -c constraints.txt '.[test]' && make"]


def test_the_readme_begins_with_the_command_of_the_mission():
    assert shown_commands(README)[0] == "plan --model Qwen2.5-7B --gpus 2xA100-40G --method grpo"


def test_the_readme_asks_why_of_a_job_that_does_not_fit(capsys):
    command = shown_commands(README.partition("Why does it not fit")[2])[0]
    assert run(shlex.split(command)[1:]) == 3
    assert "\nDoes not fit" in capsys.readouterr().out


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


@pytest.mark.slow
def test_the_recipes_for_long_rows_are_the_plans_of_today():
    page = EXAMPLES_PAGE.read_text(encoding="utf-8")
    jobs = [(length, gpus) for gpus in ("1xH200", "8xH100", "2x8xH100") for length in (131_072, 524_288, 1_048_576)]
    found = "".join(
        f"| {length:,} | {gpus} | "
        f"{answer({'model': 'Qwen3-8B', 'gpus': gpus, 'method': 'sft', 'pinned': {'max_length': length}})} |\n"
        for length, gpus in jobs
    )
    if REWRITE:
        page = LONG_ROWS.sub(found, page)
        EXAMPLES_PAGE.write_text(page, encoding="utf-8")
    assert LONG_ROWS.findall(page) == [found]


@pytest.mark.slow
def test_an_experts_choices_stand_beside_the_plans_of_today():
    if REWRITE:
        CHOICES_PAGE.write_text(choices(), encoding="utf-8")
    assert CHOICES_PAGE.read_text(encoding="utf-8") == choices()


def test_what_is_pinned_for_the_tests_is_what_the_project_asks_for():
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    wanted = re.findall(r'"([A-Za-z][\w.-]*)(?:\[[\w,]+\])?>=', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    optional = {"hatchling", "deepspeed", "vllm", "ray", "tomli"}
    assert [
        name for name in wanted if name not in optional and f"\n{name.lower().replace('_', '-')}==" not in constraints
    ] == []
