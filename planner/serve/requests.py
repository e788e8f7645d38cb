"""The bodies of requests as msgspec types, made from the option groups of the commands, and their conversion back.

A body has the command's options by their names with underscores, and `set` as an object:
`{"model": "Qwen2.5-7B", "gpus": "2xA100-40G", "method": "grpo", "set": {"zero_stage": 3}}`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from msgspec import Meta, Struct, defstruct, structs
from typer.models import OptionInfo

from planner.commands.options import CandidateOptions, JobOptions, SearchOptions
from planner.errors import InputError

Setting = str | int | float | bool | list[str] | None
# Options that name a file on the server.
FILE_OPTIONS = ("config", "accelerate_config", "deepspeed_config")
# Options of a comparison of clusters or prices (`planner.commands.compare`), which is not served: unknown fields.
NOT_SERVED = ("prices", "price_per_hour", "tokens", "max_cost")
# Options that a command line gives as text and a body as a number too.
NUMBERS = ("lora_r", "max_completion_length")

Options = TypeVar("Options", bound=JobOptions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowed:
    """Permissions of requests, which may always name a model of the catalogue.

    paths: they may name files and folders of this machine. hub: they may name models that are read from the Hub.
    """

    paths: bool
    hub: bool


def _request_type(name: str, group: type[JobOptions], more: tuple[tuple[str, Any], ...] = ()) -> type[Struct]:
    """Return the type of a body with the options of a group, each with the description and the bounds of its flag."""
    hints = get_type_hints(group, include_extras=True)
    columns = [
        (entry.name, _documented(entry.name, hints[entry.name]), entry.default)
        for entry in fields(group)
        if entry.name not in NOT_SERVED
    ]
    made = defstruct(name, [*more, *columns], frozen=True, kw_only=True, forbid_unknown_fields=True)
    made.__doc__ = "The options of the command of that name."
    return made


def _documented(name: str, hint: Any) -> Any:
    """Return the type of an option as msgspec reads it: `Annotated[int | None, typer.Option(min=1, help=...)]`."""
    kind, option = get_args(hint)
    assert isinstance(option, OptionInfo)
    if name == "set":
        return Annotated[dict[str, Setting] | None, Meta(description="Settings by the libraries' names.")]
    kind = kind | int if name in NUMBERS else kind
    optional = type(None) in get_args(kind)
    if option.min is not None or option.max is not None:
        number = int if int in get_args(kind) or kind is int else float
        kind = Annotated[number, Meta(ge=option.min, le=option.max)]
        kind = kind | None if optional else kind
    return Annotated[kind, Meta(description=option.help)]


LOG = ("log", Annotated[str, Meta(description="The text of the log.")])
PlanRequest = _request_type("PlanRequest", SearchOptions)
EstimateRequest = _request_type("EstimateRequest", CandidateOptions)
DiagnoseRequest = _request_type("DiagnoseRequest", CandidateOptions, (LOG,))


def read_request(request: Struct, group: type[Options], allowed: Allowed) -> Options:
    """Return the options that a body stands for.

    Raises:
        InputError: it names a file, and requests may not.
    """
    known = {entry.name for entry in fields(group)}
    given = {name: value for name, value in structs.asdict(request).items() if name in known}
    for name in FILE_OPTIONS if not allowed.paths else ():
        if given[name] is not None:
            raise InputError(f"{name} names a file of the server, which was started without --allow-paths.")
    for name in NUMBERS:
        given[name] = None if given[name] is None else str(given[name])
    given["set"] = _assignments(given["set"] or {})
    return group(**given)


def _assignments(settings: Mapping[str, Setting]) -> list[str]:
    """Return settings as texts of `--set`; null stands for a setting that is not given."""
    return [f"{name}={_text(value)}" for name, value in settings.items() if value is not None]


def _text(value: Setting) -> str:
    if isinstance(value, list):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
