"""The bodies of requests as msgspec types, made from the options of a job, and their conversion back.

A body has the options by their names, and `set` as an object:
`{"model": "Qwen2.5-7B", "gpus": "2xA100-40G", "method": "grpo", "set": {"zero_stage": 3}}`.
"""

from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from msgspec import Meta, Struct, defstruct, structs

from planner.errors import InputError
from planner.requests.options import CandidateOptions, JobOptions, Option, SearchOptions

# Options that name a file on the server.
FILE_OPTIONS = ("config", "accelerate_config", "deepspeed_config")
# Options whose help is about the command line -> their description here.
DESCRIPTIONS = {"set": "Settings by the libraries' names."}

Options = TypeVar("Options", bound=JobOptions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowed:
    """Permissions of requests, which may always name a model of the catalogue.

    paths: they may name files and folders of this machine. hub: they may name models that are read from the Hub.
    """

    paths: bool
    hub: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of requests. `concurrency`: requests that are worked on or wait for a worker."""

    body_bytes: int
    seconds: float
    concurrency: int
    workers: int


def _request_type(name: str, group: type[JobOptions], more: tuple[tuple[str, Any], ...] = ()) -> type[Struct]:
    """Return the type of a body with the options of a group, each with its description and its bounds."""
    hints = get_type_hints(group, include_extras=True)
    columns = [(entry.name, _documented(entry.name, hints[entry.name]), entry.default) for entry in fields(group)]
    made = defstruct(name, [*more, *columns], frozen=True, kw_only=True, forbid_unknown_fields=True)
    made.__doc__ = "The options of the command of that name."
    return made


def _documented(name: str, hint: Any) -> Any:
    """Return the type of an option as msgspec reads it: `Annotated[Annotated[int, Meta(ge=1)] | None, Meta(...)]`."""
    kind, option = get_args(hint)
    assert isinstance(option, Option)
    if option.min is not None or option.max is not None:
        optional = type(None) in get_args(kind)
        number = int if int in get_args(kind) or kind is int else float
        kind = Annotated[number, Meta(ge=option.min, le=option.max)]
        kind = kind | None if optional else kind
    return Annotated[kind, Meta(description=DESCRIPTIONS.get(name, option.help))]


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
    return group(**given)
