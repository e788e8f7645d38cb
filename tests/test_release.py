"""The release: a wheel and an sdist that twine accepts, installed in a fresh environment, under names of our own."""

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

import pytest

import planner
from planner.commands.main import run
from planner.files.installed import DISTRIBUTION, TOP_LEVEL, other_owners

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.findall(r'^version = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
SECONDS = 300  # for a program that takes a few on an idle machine


def finished(*command: str, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert ran.returncode == 0, (command, ran.stdout[-1000:], ran.stderr[-2000:])
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist and of the wheel that is built from it, without the network."""
    for module in ("build", "hatchling", "twine"):
        pytest.importorskip(module, reason="a package of the extra test is not installed")
    folder = tmp_path_factory.mktemp("dist")
    finished(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), folder=folder)
    return folder


@pytest.fixture(scope="module")
def programs(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The programs of a fresh environment with the wheel, which finds its dependencies in this environment."""
    folder = tmp_path_factory.mktemp("fresh")
    finished(sys.executable, "-m", "venv", "--without-pip", str(folder), folder=folder)
    python = str(folder / "bin" / "python")
    (wheel,) = built.glob("*.whl")
    install = ("install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel))
    finished(sys.executable, "-m", "pip", "--python", python, *install, folder=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    yield folder / "bin"


@pytest.mark.slow
class TestWheel:
    def test_twine_accepts_the_files_and_their_description(self, built):
        files = sorted(built.iterdir())
        assert [path.suffix for path in files] == [".whl", ".gz"]
        finished(sys.executable, "-m", "twine", "check", "--strict", *map(str, files), folder=built)

    def test_the_metadata_is_that_of_pyproject(self, built):
        (wheel,) = built.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            metadata = HeaderParser().parsestr(archive.read(name).decode())
        assert [metadata["Name"], [metadata["Version"]], metadata["Requires-Python"]] == [
            DISTRIBUTION,
            VERSION,
            ">=3.10",
        ]
        assert metadata["License-File"] == "LICENSE"
        assert {"dryrun", "training", "probe", "serve", "mcp", "docs"} <= set(metadata.get_all("Provides-Extra"))

    def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(self, built):
        (wheel,) = built.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        here = {
            path.relative_to(ROOT).as_posix()
            for package in TOP_LEVEL
            for path in (ROOT / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert inside == here

    def test_a_fresh_environment_answers_with_the_files_of_the_wheel(self, programs, tmp_path):
        plan = str(programs / "plan")
        assert finished(plan, "--version", folder=tmp_path) == f"plan {VERSION[0]}\n"
        answer = finished(plan, "--model", "Qwen2.5-0.5B", "--gpus", "1xL4", "--method", "sft", folder=tmp_path)
        assert "Fits, " in answer
        where = finished(str(programs / "python"), "-c", "import planner; print(planner.__file__)", folder=tmp_path)
        assert Path(where.strip()).is_relative_to(programs.parent)


def test_the_version_is_written_in_one_place():
    assert len(VERSION) == 1
    places = [*ROOT.glob("planner/**/*.py"), *ROOT.glob("probes/**/*.py"), ROOT / "README.md"]
    assert [path for path in places if VERSION[0] in path.read_text(encoding="utf-8")] == []
    assert isinstance(planner.__version__, str)


def test_no_other_distribution_of_this_environment_owns_our_names():
    assert other_owners() == {}


def test_another_distribution_with_a_package_of_our_name_is_named(tmp_path, monkeypatch, capsys):
    metadata = tmp_path / "other_planner-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-planner\nVersion: 1.0\n")
    (metadata / "RECORD").write_text("planner/__init__.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert other_owners() == {"planner": ("other-planner",)}
    assert run(["--version"]) == 0
    assert capsys.readouterr().err == (
        "Warning: other-planner installed a package planner too, over that of finetune-plan. "
        "Use an environment for each.\n"
    )
