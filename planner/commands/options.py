"""The flags of all commands, in groups: a group is a `Struct`, each of its fields a flag that Typer shows.

A new command is a function in `planner/commands/` whose parameters are groups, such as
`def probe(options: CandidateOptions, output: ReportOptions) -> int`, decorated with `@grouped` and registered in
`planner/commands/main.py`. The groups of a job are in `planner/requests/options.py`, without Typer; here are those
that only the command has.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Annotated, Any, Literal, TypeGuard, get_args, get_type_hints

import typer
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from planner.errors import InputError
from planner.jobs.settings import parse_assignments
from planner.requests.options import JobOptions, Option, Panel, described
from planner.settings.setting import Value
from planner.units import parse_count

# Headings of the groups of options in the help. A panel of the commands alone has no key.
PANELS: dict[Panel, str] = {
    "job": "Job",
    "hardware": "Hardware",
    "pins": "Pins: settings that you fix; the search decides the others",
    "goal": "Goal and cost",
}
OUTPUT, PROBE = "Output", "Probe: a short real run of the trainer, which proves the answer"
OPTIONS = "Options"
TOKENS = "TOKENS"  # the metavar of a number of tokens
HEADINGS = (OPTIONS, *PANELS.values(), OUTPUT, PROBE)  # in this order


class VersionOption(Struct, frozen=True, kw_only=True):
    """The release instead of an answer."""

    version: bool = False


class PriceOptions(Struct, frozen=True, kw_only=True):
    """Prices, by which several clusters are compared."""

    prices: str | None = None
    price_per_hour: float | None = None
    tokens: str | None = None
    max_cost: float | None = None
    deadline: str | None = None


class SavedPlan(Struct, frozen=True, kw_only=True):
    """A saved report instead of the options of a job."""

    saved: str | None = None


class LogFile(Struct, frozen=True, kw_only=True):
    """The log of a training run."""

    log: str


class OutputOptions(Struct, frozen=True, kw_only=True):
    """Options of how the answer is printed."""

    json: bool = False
    quiet: bool = False


class ReportOptions(OutputOptions, frozen=True, kw_only=True):
    """Options of how the answer is printed, and of the files that it is written to."""

    verbose: bool = False
    out: str | None = None
    html: str | None = None


class CheckOptions(ReportOptions, frozen=True, kw_only=True):
    """Output options of a command that can check its answer by a dry run."""

    dry_run: bool = False


class AnswerOptions(CheckOptions, frozen=True, kw_only=True):
    """Output options of a command whose answer is one candidate."""

    export: str | None = None
    overwrite: bool = False
    format: Literal["yaml", "flags", "json"] | None = None


class ProbeOptions(Struct, frozen=True, kw_only=True):
    """Options of how probes run."""

    device: str = "cuda"
    time_limit: str = "30m"
    evaluate: bool = False
    steps: int = 2
    hub_weights: bool = False
    logs: str | None = None
    ray: str | None = None


class ProofOptions(Struct, frozen=True, kw_only=True):
    """Options of probes: if they prove a plan, their budget, and the files that keep them."""

    probe: bool = False
    budget: str | None = None
    storage: str | None = None


class DiffOptions(Struct, frozen=True, kw_only=True):
    """The releases to compare."""

    old: str
    new: str
    verbose: bool = False


class ValidateOptions(Struct, frozen=True, kw_only=True):
    """The predictions to compare with measurements, and the measurements to make first."""

    cases: str
    gpus: str | None = None
    free_memory: str | None = None
    measure: bool = False
    dry_run: bool = False
    record: str | None = None
    csv: str | None = None


class ListOptions(Struct, frozen=True, kw_only=True):
    """Options of a list: which entries of a catalogue, and how they are printed."""

    word: str | None = None
    json: bool = False


class LengthsOptions(Struct, frozen=True, kw_only=True):
    """The dataset whose rows are counted, and the file of their counts."""

    dataset: str
    model: str
    split: str = "train"
    text_field: str = "text"
    out: str = "lengths.txt"
    quiet: bool = False


class MeasurementsOptions(Struct, frozen=True, kw_only=True):
    """The user's own measurements to list, export or forget."""

    storage: str | None = None
    gpu: str | None = None
    export: bool = False
    forget: str | None = None


class ExportOptions(Struct, frozen=True, kw_only=True):
    """The plan to export, and the folder."""

    saved: str
    folder: str
    config: str | None = None
    overwrite: bool = False
    anyway: bool = False
    launcher: Literal["accelerate", "torchrun"] = "accelerate"


class ServeOptions(Struct, frozen=True, kw_only=True):
    """The server's address, and the limits of a request."""

    host: str = "127.0.0.1"
    port: int = 8642
    token: str | None = None
    max_body: str = "4MiB"
    time_limit: str = "30s"
    concurrency: int = 64
    workers: int | None = None
    allow_paths: bool = False
    allow_hub: bool = False
    quiet: bool = False


def _settings(texts: list[str]) -> dict[str, Value]:
    """Return the settings of `--set`."""
    if any("{" in text for text in texts):
        from planner.requests.train_config import plain_assignments  # reads YAML and DeepSpeed's files

        return parse_assignments(plain_assignments(texts))
    return parse_assignments(texts)


# Options that a command line has as texts -> the type of these, and the function that reads them.
TEXTS: dict[str, tuple[Any, Callable[[list[str]], object]]] = {"set": (list[str] | None, _settings)}


def grouped(command: Callable[..., int]) -> Callable[..., int]:
    """Return a command as Typer reads it: each parameter that is a group is replaced by the group's fields.

    Typer takes the options of a command from the signature of its function. The returned function has a signature of
    fields; it builds the groups from them and calls the command. Parameters that are no group (`typer.Context`) stay.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if _is_group(hint)}
    parameters = [option for name, hint in hints.items() if name != "return" for option in _parameters(name, hint)]

    @functools.wraps(command)
    def call_with_groups(**options: Any) -> int:
        values = {
            name: group(**{field.name: _value(field.name, options.pop(field.name)) for field in fields(group)})
            for name, group in groups.items()
        }
        return command(**values, **options)

    # Typer calls `inspect.signature`, which reads this attribute.
    call_with_groups.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call_with_groups.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call_with_groups


def _value(name: str, given: Any) -> Any:
    """Return the typed value of an option."""
    return TEXTS[name][1](given) if name in TEXTS and given is not None else given


# Headings of groups; the options of a job have one each (`Option.panel`), and a group without has no heading.
GROUP_PANELS: dict[type[Struct], str] = {
    VersionOption: OUTPUT,
    PriceOptions: PANELS["goal"],
    OutputOptions: OUTPUT,
    ReportOptions: OUTPUT,
    CheckOptions: OUTPUT,
    AnswerOptions: OUTPUT,
    ProbeOptions: PROBE,
    ProofOptions: PROBE,
}


def _tokens(word: str, option: Option, may_be_text: bool) -> Any:
    """Return the flag of a number of tokens, which may be written as 4k. `may_be_text`: or be another text."""

    def read(text: str | int) -> str | int:
        try:
            count = parse_count(str(text))
        except InputError as error:
            if may_be_text:
                return text
            raise typer.BadParameter(str(error)) from error
        if not (option.min or 0) <= count <= (option.max or math.inf):
            raise typer.BadParameter(f"{count:,} is not from {option.min:,.0f} to {option.max:,.0f}.")
        return str(count) if may_be_text else count

    return typer.Option(
        f"--{word}", metavar=option.metavar, parser=read, help=option.help, rich_help_panel=PANELS[option.panel]
    )


def _is_group(hint: Any) -> TypeGuard[type[Struct]]:
    """Return whether a parameter of a command is a group of options."""
    return isinstance(hint, type) and issubclass(hint, Struct)


def _parameters(name: str, hint: Any) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a group's fields, or the parameter itself if it is no group."""
    if not _is_group(hint):
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint)
        return
    types, options = get_type_hints(hint), described(hint)
    for field in fields(hint):
        default = inspect.Parameter.empty if field.default is NODEFAULT else field.default
        kind, option = types[field.name], options[field.name]
        of_job = issubclass(hint, JobOptions)
        annotation = _flag(field.name, kind, option) if of_job else _own(field.name, kind, option, hint)
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _own(name: str, kind: Any, option: Option, group: type[Struct]) -> Any:
    """Return the annotation of an option, or of an argument, that only commands have."""
    panel = GROUP_PANELS.get(group)
    if option.argument:
        return Annotated[kind, typer.Argument(metavar=option.metavar, help=option.help, rich_help_panel=panel)]
    flags = (*([option.short] if option.short else []), f"--{name.replace('_', '-')}")
    return Annotated[kind, _shown(option, panel, *flags)]


def _flag(name: str, kind: Any, option: Option) -> Any:
    """Return the annotation of a flag as Typer reads it: `Annotated[int | None, typer.Option("--max-length", ...)]`."""
    word = name.replace("_", "-")
    kinds = set(get_args(kind)) or {kind}
    if name in TEXTS:
        kind = TEXTS[name][0]
    elif option.metavar == TOKENS and int in kinds:
        return Annotated[int | None if str not in kinds else str | None, _tokens(word, option, str in kinds)]
    elif kinds >= {int, str}:
        kind = str | None if NoneType in kinds else str  # a number is a text too
    flag = f"--{word}/--no-{word}" if bool in kinds else f"--{word}"
    return Annotated[kind, _shown(option, PANELS[option.panel], flag)]


def _shown(option: Option, panel: str | None, *flags: str) -> Any:
    """Return what Typer shows of an option."""
    return typer.Option(
        *flags,
        metavar=option.metavar,
        min=option.min,
        max=option.max,
        envvar=option.envvar,
        help=option.help,
        rich_help_panel=panel,
    )
