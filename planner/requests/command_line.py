"""Write the command that has the options of a job, to be pasted into a shell."""

import shlex
from collections.abc import Iterator

from msgspec.structs import fields

from planner.requests.options import JobOptions
from planner.settings.setting import Value


def command_line(options: JobOptions, *subcommand: str) -> str:
    """Return the command with the options that differ from their defaults: `plan --model Qwen2.5-7B --gpus 1xL4`."""
    return shlex.join(["plan", *subcommand, *_flags(options)])


def _flags(options: JobOptions) -> Iterator[str]:
    for entry in fields(options):
        value, flag = getattr(options, entry.name), f"--{entry.name.replace('_', '-')}"
        if value == entry.default:
            continue
        if entry.name == "set":
            for name, setting in value.items():
                yield from ("--set", f"{name}={_text(setting)}")
        elif isinstance(value, bool):
            yield flag if value else flag.replace("--", "--no-", 1)
        else:
            for each in value if isinstance(value, list) else [value]:
                yield from (flag, str(each))


def _text(value: Value) -> str:
    """Return a setting as `--set` reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
