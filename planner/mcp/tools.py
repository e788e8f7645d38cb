"""The tools of `plan mcp`: arguments in, the command's table and document out. The protocol is in server.py."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, to_builtins
from msgspec.json import schema_components
from msgspec.structs import asdict
from rich.console import Console

from planner.ask import compared, diagnosed, estimated, planned, silent
from planner.diagnose.log import read_incidents, reported_incidents
from planner.errors import InputError, NothingFits, PlanError, UnknownName
from planner.files.decode import convert_json
from planner.files.write import write_files
from planner.launch.files import launch_files
from planner.report.diagnosis import diagnosis_report, diagnosis_table
from planner.report.documents.commands import ComparisonReport, DiagnosisReport, ExportReport, GpusReport, ModelsReport
from planner.report.documents.plans import EstimateReport, PlanReport
from planner.report.json import error_document, estimate_report, export_report, in_words, plan_report
from planner.report.listing import (
    comparison_report,
    comparison_table,
    gpus_listing,
    gpus_named,
    gpus_report,
    models_listing,
    models_named,
    models_report,
)
from planner.report.resources import site_of
from planner.report.spelling import errors_spelled, spelled
from planner.report.table import estimate_table, nearest_refusal, plan_table
from planner.requests.bodies import (
    HINT,
    REQUIRED,
    CompareRequest,
    EstimateRequest,
    PlanRequest,
    options_in,
    request_type,
)
from planner.requests.machines import pricing_of
from planner.requests.options import CandidateOptions, JobOptions, SearchOptions, names_a_job
from planner.requests.read_config import config_text
from planner.requests.read_options import JobRequest, read_options
from planner.training_stack import complete_models

WIDTH = 100  # columns of a table
WRAPPED_FLAG = re.compile(r"(--[a-z][a-z-]*)\n +(?=\S)")  # at the end of a table's line, its value on the next one

DiagnoseArguments = request_type(
    "DiagnoseArguments",
    CandidateOptions,
    (
        ("log", Annotated[str | None, Meta(description="The text of the log; or give log_file.")], None),
        ("log_file", Annotated[str | None, Meta(description="The path of the log.")], None),
    ),
)
ExportArguments = request_type(
    "ExportArguments",
    SearchOptions,
    (
        ("folder", Annotated[str, Meta(description="The folder to write to.")]),
        ("overwrite", Annotated[bool, Meta(description="Replace files that say something else.")], False),
        (
            "launcher",
            Annotated[Literal["accelerate", "torchrun"], Meta(description="What starts the processes.")],
            "accelerate",
        ),
    ),
)


class ListArguments(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of a list."""

    word: Annotated[str | None, Meta(description="A part of a name. Default: all.")] = None


class ToolAnswer(Struct, frozen=True, kw_only=True):
    """The answer of a tool: text for a reader, and the document of the command with `--json`."""

    text: str
    document: Mapping[str, Any]
    is_error: bool = False


class Tool(Struct, frozen=True, kw_only=True):
    """A tool. `answer`: from its arguments, the text and the document. `writes`: it writes files.

    `required`: arguments that the schema calls required, beside those without a default.
    """

    description: str
    arguments: type[Struct]
    document: type[Struct]
    answer: Callable[[Struct], tuple[str, Struct]]
    writes: bool = False
    required: tuple[str, ...] = REQUIRED

    def argument_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the arguments; one that may be left out is not null, too, to be short."""
        schema = _object_schema(self.arguments)
        properties = {name: _without_null(each) for name, each in schema["properties"].items()}
        required = [*schema.get("required", ()), *self.required]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def document_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the document: its fields, and not what is in them, of which an agent reads all."""
        schema = _object_schema(self.document)
        properties = {name: _shallow(each) for name, each in schema["properties"].items()}
        return {"type": "object", "properties": properties, "required": schema.get("required", [])}


def call(name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
    """Call a tool by its name. An error that the caller can act on is an answer too."""
    try:
        if name not in TOOLS:
            raise UnknownName("tool", name, TOOLS)
        tool = TOOLS[name]
        with errors_spelled("json"):
            text, document = tool.answer(convert_json(dict(arguments), tool.arguments, "arguments", HINT))
    except PlanError as error:
        return ToolAnswer(text=str(error), document=to_builtins(error_document(error)), is_error=True)
    return ToolAnswer(
        text=spelled(WRAPPED_FLAG.sub(r"\1 ", text), "json"), document=in_words(to_builtins(document), "json")
    )


def _object_schema(kind: type[Struct]) -> dict[str, Any]:
    """Return the JSON Schema of a type with its own properties at the root, as the protocol wants it."""
    _, definitions = schema_components([kind], ref_template="#/$defs/{name}")
    root = definitions.pop(kind.__name__)
    return {**root, "$defs": definitions} if definitions else dict(root)


def _without_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an argument without null, its default, which leaving it out means."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    rest = {name: value for name, value in schema.items() if name != "anyOf" and (name, value) != ("default", None)}
    return rest | ({} if not kinds else kinds[0] if len(kinds) == 1 else {"anyOf": kinds})


def _shallow(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a field of a document, and its type where that is no object."""
    return {name: value for name, value in schema.items() if name in ("description", "type", "enum")}


def _requested(options: JobOptions) -> JobRequest:
    return read_options(options, complete_models(silent))


def _compare(arguments: Struct) -> tuple[str, Struct]:
    given = asdict(arguments)
    rows = compared(options_in(arguments, SearchOptions), pricing_of(given["prices"], given["tokens"]), _requested)
    console = Console(width=WIDTH, highlight=False)
    with console.capture() as table:
        console.print(comparison_table(rows))
    return table.get(), comparison_report(rows)


def _models(arguments: Struct) -> tuple[str, Struct]:
    rows = models_named(asdict(arguments)["word"])
    return models_listing(rows), models_report(rows)


def _gpus(arguments: Struct) -> tuple[str, Struct]:
    rows = gpus_named(asdict(arguments)["word"])
    return gpus_listing(rows), gpus_report(rows)


def _plan(arguments: Struct) -> tuple[str, Struct]:
    options = options_in(arguments, SearchOptions)
    answer = planned(_requested(options))
    return plan_table(answer, WIDTH).plain, plan_report(answer, config_text(options))


def _estimate(arguments: Struct) -> tuple[str, Struct]:
    options = options_in(arguments, CandidateOptions)
    request = _requested(options)
    answer, notes = estimated(request)
    return estimate_table(answer, request.cluster, notes, WIDTH).plain, estimate_report(
        answer, notes, request.cluster, config_text(options)
    )


def _diagnose(arguments: Struct) -> tuple[str, Struct]:
    given = asdict(arguments)
    text, path = given["log"], given["log_file"]
    if (text is None) == (path is None) or path == "-":
        raise InputError("Give the text of the log as log, or its path as log_file.")
    found = reported_incidents(text) if path is None else read_incidents(path)
    options = options_in(arguments, CandidateOptions)
    answer = diagnosed(found, partial(_requested, options) if names_a_job(options) else None)
    return diagnosis_table(answer, WIDTH).plain, diagnosis_report(answer)


def _export(arguments: Struct) -> tuple[str, Struct]:
    """Plan a job and write the files that run its best candidate.

    Raises:
        NothingFits: the job does not fit.
        InputError: a file of the folder says something else.
    """
    given = asdict(arguments)
    options = options_in(arguments, SearchOptions)
    answer = planned(_requested(options))
    if answer.verdict == "does_not_fit":
        raise NothingFits(nearest_refusal(answer))
    site = site_of(answer.best, answer.cluster, answer.job.risk)
    texts = launch_files(answer.best.candidate, given["launcher"], site, config_text(options))
    paths = write_files(texts, Path(given["folder"]), given["overwrite"])
    files = tuple(map(str, paths))
    return "\n".join(files), export_report(answer.best.candidate, files)


TOOLS: dict[str, Tool] = {
    "plan": Tool(
        description="Find the largest, fastest TRL configuration that fits the GPUs: memory of each phase, speed, "
        "alternatives, and, where nothing fits, changes that would. Needs model and method too, unless a config says "
        "them. No GPU is used.",
        arguments=PlanRequest,
        document=PlanReport,
        answer=_plan,
    ),
    "compare": Tool(
        description="Plan one job on several clusters (gpus: 1xL4,8xH100; hf-jobs: all machines of Hugging Face Jobs "
        "with their prices): where it fits, how fast, hours and cost; optimize cost sorts by cost.",
        arguments=CompareRequest,
        document=ComparisonReport,
        answer=_compare,
    ),
    "estimate": Tool(
        description="Estimate memory and speed of one configuration without a search: what is not set is as TRL has "
        "it. Takes the user's own files by path (config, accelerate_config, deepspeed_config).",
        arguments=EstimateRequest,
        document=EstimateReport,
        answer=_estimate,
    ),
    "diagnose": Tool(
        description="Explain the log of a run that ended in out of memory; with model, gpus and method also what fits "
        "instead.",
        arguments=DiagnoseArguments,
        document=DiagnosisReport,
        answer=_diagnose,
        required=(),
    ),
    "export": Tool(
        description="Plan a job and write the files that run it into a folder: train.yaml, accelerate.yaml, launch.sh, "
        "requirements.txt and others. An error if the job does not fit.",
        arguments=ExportArguments,
        document=ExportReport,
        answer=_export,
        writes=True,
    ),
    "models": Tool(
        description="List the models that are known by name; another one is named by its folder or its name on the "
        "Hub.",
        arguments=ListArguments,
        document=ModelsReport,
        answer=_models,
        required=(),
    ),
    "gpus": Tool(
        description="List the GPUs that are known by name; another one is named by its memory, such as 1x24GiB.",
        arguments=ListArguments,
        document=GpusReport,
        answer=_gpus,
        required=(),
    ),
}
