"""The flags of all commands, in groups: a group is a `Struct`, each of its fields a flag that Typer shows.

A new command is a function in `planner/commands/` whose parameters are groups, such as
`def probe(options: CandidateOptions, output: ReportOptions) -> int`, decorated with `@grouped` and registered in
`planner/commands/main.py`. The groups of a job are in `planner/requests/options.py`, without Typer; here are those
that only the command has.
"""

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Annotated, Any, Literal, TypeGuard, get_args, get_type_hints

import typer
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields
from typer.models import OptionInfo

from planner.errors import InputError
from planner.gpus.hf_jobs import HF_JOBS
from planner.jobs.settings import parse_assignments
from planner.requests.options import Option, Panel
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

    version: Annotated[bool, typer.Option(help="Print the installed release and exit.")] = False


class PriceOptions(Struct, frozen=True, kw_only=True):
    """Prices, by which several clusters are compared."""

    prices: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Prices of a GPU and hour (TOML: H100 = 2.5), to compare clusters, as in --gpus 1xL4,2xA100-40G "
            f"or --gpus {HF_JOBS} (Hugging Face's machines, whose prices are built in).",
        ),
    ] = None
    price_per_hour: Annotated[
        float | None, typer.Option(metavar="PRICE", help="Price of all GPUs of one cluster for an hour.")
    ] = None
    tokens: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Tokens to train on, such as 300M: their hours and cost.")
    ] = None
    max_cost: Annotated[
        float | None,
        typer.Option(metavar="PRICE", help="Exit with 3 if the cheapest costs more (--tokens, else a million)."),
    ] = None
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Longest training time, such as 20h: exit with 3 if no cluster trains --tokens within it.",
        ),
    ] = None


class SavedPlan(Struct, frozen=True, kw_only=True):
    """A saved report instead of the options of a job."""

    saved: Annotated[
        str | None,
        typer.Argument(
            metavar="PLAN.json", help="A saved report of plan or plan estimate; instead of the options below."
        ),
    ] = None


class LogFile(Struct, frozen=True, kw_only=True):
    """The log of a training run."""

    log: Annotated[
        str,
        typer.Argument(
            metavar="LOG", help="A traceback or the log of a run, of TRL, accelerate, DeepSpeed or vLLM; - reads stdin."
        ),
    ]
    verbose: Annotated[
        bool,
        typer.Option("-v", "--verbose", help="Also what the answer was read from: frames, a line, settings in effect."),
    ] = False


class OutputOptions(Struct, frozen=True, kw_only=True):
    """Options of how the answer is printed."""

    json: Annotated[bool, typer.Option(help="Print the report as JSON (`plan schema`), bytes as integers.")] = False
    quiet: Annotated[bool, typer.Option(help="Nothing on stderr but errors.")] = False


class ReportOptions(OutputOptions, frozen=True, kw_only=True):
    """Options of how the answer is printed, and of the files that it is written to."""

    verbose: Annotated[
        bool,
        typer.Option("-v", "--verbose", help="The whole answer: memory by phase, reasons, host memory, every note."),
    ] = False

    out: Annotated[str | None, typer.Option(metavar="DIR", help="Also write plan.json and plan.txt there.")] = None
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Also write the report as one HTML file.")] = None


class CheckOptions(ReportOptions, frozen=True, kw_only=True):
    """Output options of a command that can check its answer by a dry run."""

    dry_run: Annotated[
        bool,
        typer.Option(help="Check the answer by one run of the installed trainer on an emulated GPU, about a minute."),
    ] = False


class AnswerOptions(CheckOptions, frozen=True, kw_only=True):
    """Output options of a command whose answer is one candidate."""

    export: Annotated[
        str | None, typer.Option(metavar="DIR", help="Also write the files that run it there (plan export).")
    ] = None
    overwrite: Annotated[bool, typer.Option(help="With --export: replace files that say something else.")] = False
    format: Annotated[
        Literal["yaml", "flags", "json"] | None,
        typer.Option(
            metavar="FORMAT",
            help="Print the settings alone, to paste: yaml for train.yaml, flags for `trl`, json by library.",
        ),
    ] = None


class ProbeOptions(Struct, frozen=True, kw_only=True):
    """Options of how probes run."""

    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="Where probes run. cuda: on the GPUs here. emulated: PyTorch's CUDA build, without a GPU. cpu: small "
            "models, here.",
        ),
    ] = "cuda"
    time_limit: Annotated[
        str, typer.Option(metavar="DURATION", help="A single probe that takes longer is ended, such as 90s, 30m, 1h.")
    ] = "30m"
    evaluate: Annotated[bool, typer.Option(help="A probe also runs one evaluation batch.")] = False
    steps: Annotated[
        int,
        typer.Option(
            metavar="STEPS",
            min=2,
            max=100_000,
            help="Optimizer steps of a probe. More than two, with rows and completions as --lengths and "
            "--completion-lengths say and the longest last, show whether memory grows.",
        ),
    ] = 2
    hub_weights: Annotated[
        bool, typer.Option(help="Load the model's real weights from the Hub. Default: random ones, made here.")
    ] = False
    logs: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where the workers' logs are kept. Default: the user's cache.")
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Probe on the nodes of a Ray cluster, as many at a time as have room. auto: this machine's.",
        ),
    ] = None


class ProofOptions(Struct, frozen=True, kw_only=True):
    """Options of probes: if they prove a plan, their budget, and the files that keep them."""

    probe: Annotated[
        bool,
        typer.Option(help="Probe candidates until the best that fits has run. Exit 4: the probes contradict the plan."),
    ] = False
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="With --probe: time for all probes, such as 10m; the last one is ended then. Default: no limit.",
        ),
    ] = None
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="With --probe: the database that keeps what was measured, so that no probe is repeated. Default: "
            "$PLAN_STORAGE, else files in the user's cache.",
        ),
    ] = None


class DiffOptions(Struct, frozen=True, kw_only=True):
    """The releases to compare."""

    old: Annotated[
        str, typer.Argument(metavar="OLD", help="A release of TRL, pins (vllm==0.27), or a requirements file.")
    ]
    new: Annotated[str, typer.Argument(metavar="NEW", help="The release, pins or file to compare it with.")]
    verbose: Annotated[
        bool,
        typer.Option("-v", "--verbose", help="Also changes of other cards, and of defaults that the job sets."),
    ] = False


class ValidateOptions(Struct, frozen=True, kw_only=True):
    """The predictions to compare with measurements, and the measurements to make first."""

    cases: Annotated[
        str,
        typer.Argument(
            metavar="CASES.jsonl", help="The cases, one JSON object a line: a run, and what it measured, if it ran."
        ),
    ]
    gpus: Annotated[
        str | None,
        typer.Option(metavar="CLUSTER", help="The card of cases that name none; with --measure, those to run on."),
    ] = None
    free_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What may be used of each GPU, such as 30GiB. Default: all.")
    ] = None
    measure: Annotated[bool, typer.Option(help="Measure the cases that nobody has, on --device.")] = False
    dry_run: Annotated[bool, typer.Option(help="Compare a dry run of each case too.")] = False
    record: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Add each measurement to this file, and go on from what is in it."),
    ] = None
    csv: Annotated[str | None, typer.Option(metavar="FILE", help="Also write the rows as CSV.")] = None


class ListOptions(Struct, frozen=True, kw_only=True):
    """Options of a list: which entries of a catalogue, and how they are printed."""

    word: Annotated[
        str | None, typer.Argument(metavar="WORD", help="Only those with this word in a name, such as llama or rtx.")
    ] = None
    json: Annotated[bool, typer.Option(help="Print them as JSON (`plan schema`).")] = False


class LengthsOptions(Struct, frozen=True, kw_only=True):
    """The dataset whose rows are counted, and the file of their counts."""

    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            help="A file (JSON lines, CSV, parquet, text), a folder that save_to_disk wrote, or a dataset of the Hub.",
        ),
    ]
    model: Annotated[str, typer.Option(metavar="NAME", help="The model whose tokenizer and chat template are taken.")]
    split: Annotated[str, typer.Option(metavar="NAME", help="The split of the dataset.")] = "train"
    text_field: Annotated[
        str, typer.Option(metavar="NAME", help="The column of a text (dataset_text_field of TRL).")
    ] = "text"
    out: Annotated[str, typer.Option(metavar="FILE", help="The file for the counts, one a line, for --lengths.")] = (
        "lengths.txt"
    )
    quiet: Annotated[bool, typer.Option(help="Nothing on stderr but errors.")] = False


class MeasurementsOptions(Struct, frozen=True, kw_only=True):
    """The user's own measurements to list, export or forget."""

    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A team's database. Default: $PLAN_STORAGE, else the user's cache."),
    ] = None
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="Only those of this card.")] = None
    export: Annotated[bool, typer.Option(help="Print them as JSON lines.")] = False
    forget: Annotated[
        str | None, typer.Option(metavar="ID", help="Remove the one with this id, or all (of --gpu).")
    ] = None


class ExportOptions(Struct, frozen=True, kw_only=True):
    """The plan to export, and the folder."""

    saved: Annotated[str, typer.Argument(metavar="PLAN.json", help="A saved report of plan or plan estimate.")]
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A folder for the files.")]
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="Your own TRL config: train.yaml is that file with the changes.")
    ] = None
    overwrite: Annotated[bool, typer.Option(help="Replace files of the same names that say something else.")] = False
    anyway: Annotated[bool, typer.Option(help="Also of a candidate that does not fit.")] = False
    launcher: Annotated[
        Literal["accelerate", "torchrun"],
        typer.Option(
            metavar="LAUNCHER",
            help="What starts the processes: accelerate, or torchrun (train.yaml has the sharding then).",
        ),
    ] = "accelerate"


class ServeOptions(Struct, frozen=True, kw_only=True):
    """The server's address, and the limits of a request."""

    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on. Beyond loopback it needs a token.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="Port to listen on; 0: a free one.")] = (
        8642
    )
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            envvar="PLAN_TOKEN",
            help="Requests must send Authorization: Bearer TOKEN; browsers ask for it as a password.",
        ),
    ] = None
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="Largest body of a request, such as a log.")] = "4MiB"
    time_limit: Annotated[str, typer.Option(metavar="DURATION", help="A request that takes longer is ended (503).")] = (
        "30s"
    )
    concurrency: Annotated[
        int, typer.Option(min=1, max=10_000, metavar="REQUESTS", help="Most requests at once (503).")
    ] = 64
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=1024, metavar="PROCESSES", help="Processes that plan. Default: one for each core."),
    ] = None
    allow_paths: Annotated[
        bool, typer.Option(help="Requests may name files of this machine, as --config and --model do.")
    ] = False
    allow_hub: Annotated[bool, typer.Option(help="Requests may name models that are read from the Hub.")] = False
    quiet: Annotated[bool, typer.Option(help="Nothing on stderr but errors.")] = False


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


# Groups whose options stand under one heading; those of a job have their own (`Option.panel`).
GROUP_PANELS: dict[type, str] = {
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
    types = get_type_hints(hint, include_extras=True)
    panel = GROUP_PANELS.get(hint)
    for field in fields(hint):
        default = inspect.Parameter.empty if field.default is NODEFAULT else field.default
        annotation = _flag(field.name, types[field.name], panel)
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag(name: str, hint: Any, panel: str | None) -> Any:
    """Return the annotation of a flag as Typer reads it: `Annotated[int | None, typer.Option("--max-length", ...)]`."""
    kind, option = get_args(hint)
    word = name.replace("_", "-")
    if not isinstance(option, Option):
        shown = copy.copy(option)
        shown.rich_help_panel = panel
        if isinstance(shown, OptionInfo) and not shown.param_decls:
            shown.param_decls = (f"--{word}",)
        return Annotated[kind, shown]
    kinds = set(get_args(kind))
    if name in TEXTS:
        kind = TEXTS[name][0]
    elif option.metavar == TOKENS and int in kinds:
        return Annotated[int | None if str not in kinds else str | None, _tokens(word, option, str in kinds)]
    elif kinds >= {int, str}:
        kind = str | None if NoneType in kinds else str  # a number is a text too
    flag = f"--{word}/--no-{word}" if bool in kinds else f"--{word}"
    shown = typer.Option(
        flag,
        metavar=option.metavar,
        min=option.min,
        max=option.max,
        help=option.help,
        rich_help_panel=PANELS[option.panel],
    )
    return Annotated[kind, shown]
