"""Permissions and limits of HTTP requests, and the check that no body names a file or a Hub model without one."""

from typing import Annotated

from msgspec import Meta, Struct

from planner.errors import InputError
from planner.requests.bodies import Options, options_in, request_type
from planner.requests.options import CandidateOptions, JobOptions
from planner.rows.lengths import is_words
from planner.settings.table import ROW_LENGTHS

# Options that name a file on the server.
FILE_OPTIONS = ("config", "accelerate_config", "deepspeed_config")

DiagnoseRequest = request_type(
    "DiagnoseRequest", CandidateOptions, (("log", Annotated[str, Meta(description="The text of the log.")]),)
)


class Allowed(Struct, frozen=True, kw_only=True):
    """Permissions of requests, which may always name a model of the catalogue.

    paths: they may name files and folders of this machine. hub: they may name models that are read from the Hub.
    """

    paths: bool
    hub: bool


class RequestLimits(Struct, frozen=True, kw_only=True):
    """Limits of requests. `concurrency`: requests that are worked on or wait for a worker."""

    body_bytes: int
    seconds: float
    concurrency: int
    workers: int


def read_request(request: Struct, group: type[Options], allowed: Allowed) -> Options:
    """Return the options that a body stands for; raise InputError if it names a file, and requests may not."""
    options = options_in(request, group)
    refuse_files(options, allowed)
    return options


def refuse_files(options: JobOptions, allowed: Allowed) -> None:
    """Raise InputError for an option that names a file on the server, unless requests may name them."""
    given = {name: getattr(options, name) for name in FILE_OPTIONS}
    for name in ROW_LENGTHS:
        texts = (getattr(options, name), (options.set or {}).get(name))
        given[name] = next((text for text in texts if isinstance(text, str) and not is_words(text)), None)
    for name in () if allowed.paths else given:
        if given[name] is not None:
            raise InputError(f"{name} names a file of the server, which was started without --allow-paths.")
