"""Requests as msgspec types, made from the options of a job: bodies over HTTP and arguments of an agent's tools.

A request has the options by their names, and `set` as an object:
`{"model": "Qwen2.5-7B", "gpus": "2xA100-40G", "method": "grpo", "set": {"zero_stage": 3}}`.
"""

from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from msgspec import Meta, Struct, defstruct
from msgspec.structs import asdict, fields

from planner.requests.options import CandidateOptions, JobOptions, Option, SearchOptions

# Options whose help is about the command line -> their description here.
DESCRIPTIONS = {"set": "Settings by the libraries' names."}
# `Value` without what no request can write.
SETTINGS = dict[str, str | int | float | bool | tuple[str, ...] | None]

LISTS = ("gpus",)  # options of which a request may give several, which the command line joins with commas

Options = TypeVar("Options", bound=JobOptions)


def request_type(name: str, group: type[JobOptions], more: tuple[tuple[Any, ...], ...] = ()) -> type[Struct]:
    """Return the type of a request with the options of a group, each with its description and its bounds.

    `more`: further fields, each with its name, its type and, if it may be left out, its default.
    """
    hints = get_type_hints(group, include_extras=True)
    hints["set"] = Annotated[SETTINGS | None, get_args(hints["set"])[1]]
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
    kind = kind | list[str] if name in LISTS else kind
    return Annotated[kind, Meta(description=DESCRIPTIONS.get(name, option.help))]


# What a schema calls required; the answer to a request without it says how to write it.
REQUIRED = ("gpus",)

# Of an error about a name that a request does not have.
HINT = "Settings of the libraries stand in `set`."

PRICES: tuple[tuple[Any, ...], ...] = (
    (
        "prices",
        Annotated[dict[str, float] | None, Meta(description="Dollars an hour of a GPU by its name: {'H100': 2.5}.")],
        None,
    ),
    ("tokens", Annotated[str | int | None, Meta(description="Tokens to train on, such as 300M. Default: 1M.")], None),
)
PlanRequest = request_type("PlanRequest", SearchOptions)
EstimateRequest = request_type("EstimateRequest", CandidateOptions)
CompareRequest = request_type("CompareRequest", SearchOptions, PRICES)


def options_in(request: Struct, group: type[Options]) -> Options:
    """Return the options that a request has."""
    known = {entry.name for entry in fields(group)}
    given = {name: value for name, value in asdict(request).items() if name in known}
    joined = {name: ",".join(given[name]) for name in LISTS if isinstance(given[name], list)}
    return group(**given | joined)
