"""Files that a user names are read within bounds."""

import os
from pathlib import Path

import pytest

from planner.errors import InputError
from planner.files.read import open_regular, read_bytes, read_text


def test_a_regular_file_is_read(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfabc")
    assert read_text(tmp_path / "a") == "abc"
    with open_regular(tmp_path / "a") as file:
        assert file.read()[3:] == b"abc"


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe cannot be read: it is no regular file"):
        read_bytes(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/dev/zero", "it is no regular file."),
        ("/dev/stdin", "it is no regular file."),
        ("/", "Is a directory."),
        ("/none", "No such file or directory."),
        ("/" + "a" * 5000, "File name too long."),
        ("a\0b", "embedded null byte."),
    ],
)
def test_another_thing_than_a_file_is_refused_in_one_line(path, reason):
    if path == "/dev/stdin" and Path(path).is_file():
        pytest.skip("stdin is a file here")
    with pytest.raises(InputError) as refused:
        read_bytes(Path(path))
    assert str(refused.value).endswith(f"cannot be read: {reason}")


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with open(tmp_path / "large", "wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    with pytest.raises(InputError, match=r"it has 1,099,511,627,776 bytes, more than the 8,388,608"):
        read_bytes(tmp_path / "large")


def test_a_file_that_grows_beyond_the_limit_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"abcd")
    with pytest.raises(InputError, match="more than the 3"):
        read_bytes(tmp_path / "a", most_bytes=3)


def test_a_file_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"abc\xff")
    with pytest.raises(InputError, match=r"it is no UTF-8 text \(byte 3\)"):
        read_text(tmp_path / "a")
