"""Input that is meant to harm neither hangs the command, nor writes elsewhere, nor reaches a shell or a terminal."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import pytest
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.commands.main import run
from planner.errors import InputError, one_line, visible
from planner.files.write import write_all
from planner.files.yaml import parse_yaml, read_yaml_text
from planner.launch.files import launch_files
from planner.methods import release
from planner.models.catalogue import load_model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
START = "from planner.commands.main import main; main()"
ASKED = ["estimate", "--gpus", "1xA100-80G", "--method", "sft"]


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(arguments) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 100_000}, "'num_hidden_layers': 100000, more than 1,000."),
        ({"hidden_size": 10**400}, "..., more than 1,099,511,627,776."),
        ({"attention_dropout": 10**400}, "..., more than 1,099,511,627,776."),
    ],
)
def test_a_size_that_no_model_has_is_refused(changes, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    assert message in refusal([*ASKED, "--model", str(tmp_path)], capsys)


@pytest.mark.parametrize("share", ["Infinity", "NaN", "1e308", "-1", "2"])
def test_a_share_of_a_head_that_cannot_be_rotated_is_refused(share, tmp_path, capsys):
    text = json.dumps(LLAMA | {"partial_rotary_factor": 0.125}).replace("0.125", share)
    (tmp_path / "config.json").write_text(text)
    assert refusal([*ASKED, "--model", str(tmp_path)], capsys).endswith("Give a share from 0 to 1.\n")


@pytest.mark.parametrize("model_type", ["a" * 300, "../../llama", "a\0b"])
def test_a_model_type_is_never_a_part_of_a_path(model_type, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": model_type}))
    assert "model type" in refusal([*ASKED, "--model", str(tmp_path)], capsys)


@pytest.mark.parametrize("field", ["num_attention_heads", "num_key_value_heads", "head_dim"])
def test_zeros_in_a_model_whose_layers_are_measured_are_refused(field, tmp_path, capsys):
    config = dict(load_model("Qwen/Qwen3-Next-80B-A3B-Instruct").config) | {field: 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "cannot be built here" in refusal([*ASKED, "--model", str(tmp_path)], capsys)


def test_a_number_of_5000_digits_is_refused_without_repeating_it(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA).replace("64", "1" * 5000))
    assert len(refusal([*ASKED, "--model", str(tmp_path)], capsys)) < 500
    for option in (
        ["--gpus", "1" * 5000 + "xH100"],
        ["--free-memory", "9" * 5000 + "GiB"],
        ["--lora-r", "1," + "9" * 5000],
    ):
        assert len(refusal([*ASKED, "--model", "gpt2", *option], capsys)) < 600


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)),
            "values",
        ),
        ("a: &a [*a]", "nested too deeply"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("a: 2001-99-99", "month must be in 1..12"),
        ("a: !!int x", "invalid literal"),
    ],
)
def test_yaml_that_is_meant_to_harm_is_refused(text, reason, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(InputError, match=reason):
        parse_yaml(read_yaml_text(tmp_path / "a.yaml"), "a.yaml")


@pytest.mark.parametrize("name", [b"a\nrm -rf x", b"a\x1b]0;x\x07", b"a\xff", "a\u202eb".encode()])
def test_a_model_folder_with_an_unprintable_name_is_refused(name, tmp_path, capsys):
    folder = os.fsencode(tmp_path) + b"/" + name
    os.mkdir(folder)
    Path(os.fsdecode(folder), "config.json").write_text(json.dumps(LLAMA))
    error = refusal([*ASKED, "--model", os.fsdecode(folder)], capsys)
    assert "has characters that are not printable" in error
    assert "\x1b" not in error


@pytest.mark.parametrize(
    "version", ["1.16\nrm -rf x", "1.16.0\n--index-url http://x", "1.16; id", "1.16 # x", "1.16.$(id)"]
)
def test_a_release_with_more_than_a_release_is_not_exported(version):
    candidate = Candidate(model=load_model("gpt2"), method="sft")
    with pytest.raises(InputError, match="is no TRL release"):
        launch_files(replace(candidate, trl_version=version))


@pytest.mark.parametrize("change", [{"id": "a\nrm -rf x"}, {"path": "/a\nrm -rf x"}])
def test_a_model_with_a_line_break_in_its_name_is_not_exported(change):
    model = replace(load_model("gpt2"), **change)
    with pytest.raises(InputError, match="not printable"):
        launch_files(Candidate(model=model, method="sft"))


def test_unknown_keys_of_a_file_reach_the_terminal_escaped(tmp_path, capsys):
    (tmp_path / "t.yaml").write_text('"a\\e]0;x\\a": 1\n')
    assert run([*ASKED, "--model", "gpt2", "--config", str(tmp_path / "t.yaml")]) == 0
    out, err = capsys.readouterr()
    assert "a\\x1b]0;x" in out + err
    assert "\x1b" not in out + err


def test_control_characters_are_escaped_and_text_stays():
    assert visible("a\x1b[2J\x7f\x9b\u202e\udcff") == "a\\x1b[2J\\x7f\\x9b\\u202e\\udcff"
    assert visible("漢字 ▓ ·\n\tx") == "漢字 ▓ ·\n\tx"
    assert len(one_line("a " * 5000)) <= 1000


def test_a_link_at_the_path_of_an_answer_is_replaced_and_not_followed(tmp_path):
    victim, out = tmp_path / "victim", tmp_path / "plan.json"
    victim.write_text("keep")
    out.symlink_to(victim)
    (tmp_path / "plan.json.part").symlink_to(victim)
    write_all({out: "new"})
    assert (victim.read_text(), out.read_text(), out.is_symlink()) == ("keep", "new", False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "plan.json.part", "victim"]


def test_an_answer_has_the_permissions_of_a_new_file(tmp_path):
    (tmp_path / "usual").touch()
    write_all({tmp_path / "new": "x"})
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_files_of_several_writers_are_those_of_one(tmp_path):
    def write(writer):
        for _ in range(40):
            write_all({tmp_path / name: writer for name in ("plan.json", "plan.txt")})

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(write, "abcdef"))
    assert len({path.read_text() for path in tmp_path.iterdir()}) == 1


def test_files_are_moved_to_their_places_when_no_other_process_holds_the_folder(tmp_path):
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write_all, {tmp_path / "plan.json": "x"})
        with pytest.raises(FutureTimeout):
            writing.result(timeout=0.3)
        assert not (tmp_path / "plan.json").exists()
        os.close(held)
        writing.result(timeout=10)
    assert (tmp_path / "plan.json").read_text() == "x"


class Killed(BaseException):
    """Stands for the end of the process: no error that writing handles."""


@pytest.mark.parametrize("moves", range(4))
def test_files_that_a_killed_writer_leaves_are_those_of_one_answer(moves, tmp_path, monkeypatch):
    paths = [tmp_path / name for name in ("plan.json", "plan.txt", "page.html")]
    write_all(dict.fromkeys(paths, "old"))
    left = iter(range(moves))
    move = Path.replace

    def move_or_end(part: Path, path: Path) -> Path:
        if next(left, None) is None:
            raise Killed
        return move(part, path)

    monkeypatch.setattr(Path, "replace", move_or_end)
    with contextlib.suppress(Killed):
        write_all(dict.fromkeys(paths, "new"))
    assert len({path.read_text() for path in paths if path.exists()}) == 1
    assert paths[0].exists()


@pytest.mark.parametrize("path", ["/dev/null", "/", "."])
def test_a_device_or_a_folder_is_never_replaced_by_an_answer(path):
    with pytest.raises(InputError, match="it is no regular file"):
        write_all({Path(path): "x"})


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        (">&-", 1, "Error: The answer cannot be written: stdout is closed.\n"),
        ("2>&-", 0, ""),
        (">&- 2>&-", 1, ""),
        (">/dev/full", 1, "Error: The answer cannot be written: No space left on device.\n"),
        (">/dev/full 2>/dev/full", 1, ""),
    ],
)
def test_a_closed_or_full_stream_gives_no_traceback(redirection, code, message):
    program = f"{sys.executable} -c '{START}'"
    ended = subprocess.run(
        ["bash", "-c", f"{program} {' '.join(ASKED)} --model gpt2 --quiet {redirection}"],
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (code, message)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:se/cret@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u@h/db?password=secret&x=1", "postgresql://u@h/db?password=***&x=***"),
        ("sqlite:////a.db", "sqlite:////a.db"),
    ],
)
def test_a_storage_is_shown_without_its_secrets(url, shown):
    storage = pytest.importorskip("probes.study.storage")
    assert storage.hide_password(url) == shown


@pytest.mark.parametrize("version", ["1.16.0+local", "1.16.0.dev0", "1.16.0+g1a2b3c.d20261123"])
def test_a_release_that_somebody_built_is_a_release(version: str) -> None:
    """The callback passes the release of the installed TRL."""
    assert release(version) == (1, 16)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_bars_are_ascii_where_the_stream_has_nothing_else(encoding):
    ended = subprocess.run(
        [sys.executable, "-c", START, *ASKED, "--model", "gpt2", "--quiet", "-v"],
        capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
    )  # fmt: skip
    said = ended.stdout.decode(encoding)
    assert "# weights  = states" in said and "?" not in said and " <" in said


def test_a_named_pipe_is_no_missing_file(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(InputError, match="is no regular file"):
        load_model(str(tmp_path / "config.json"))
