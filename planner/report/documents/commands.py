"""The documents of the other commands: diagnosis, validation, comparisons, lists, an export, an error."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from planner.diagnose.incident import IncidentKind
from planner.errors import ErrorCode
from planner.measurements.measurement import Quantity
from planner.quantities import Evidence, Phase
from planner.report.documents.fields import Bytes, Count, Document, Settings, Share, Version
from planner.report.documents.plans import BestCandidate, EstimateReport, PlanReport

# -- a diagnosis -------------------------------------------------------------------------------------------------------


class IncidentReport(Document, frozen=True):
    """One lack of memory in a log."""

    kind: Annotated[
        IncidentKind,
        Meta(
            description="The part that found no memory: PyTorch's allocator (gpu), a CUDA library, NCCL "
            "(communication), the host, or vLLM at its start (its share of the card, KV cache, longest sequence, pool, "
            "profile run) or at its wake-up. killed: signal 9, for no stated reason; kernel: a Triton kernel that "
            "needs more shared memory than the GPU has; foreign: no CUDA or ROCm allocator of PyTorch; "
            "unsaid: the log ends before it says what happened; engine_preempts: vLLM only warned."
        ),
    ]
    line: Annotated[Count, Meta(description="Line of the log.")]
    rank: Annotated[str, Meta(description="The rank or worker as the log marks it; empty: no mark.")]
    gpu: Annotated[Bytes | None, Meta(description="The card's number in the message.")]
    phase: Annotated[Phase | None, Meta(description="The phase of the traceback; null: unknown.")]
    where: Annotated[str, Meta(description="The innermost place of the traceback that names code.")]
    bytes: Annotated[
        dict[str, int],
        Meta(description="Sizes in the message: tried, free, total, allocated, unallocated, process, ..."),
    ]
    numbers: Annotated[
        dict[str, float], Meta(description="Other figures in the message: utilization, length, longest.")
    ]
    happened: Annotated[str, Meta(description="The incident in one line.")]
    turn: Annotated[tuple[str, ...], Meta(description="Settings to change, without knowing the job.")]


class DiagnosisReport(Document, frozen=True):
    """The document of `plan diagnose --json`."""

    schema: Version
    incidents: Annotated[
        tuple[IncidentReport, ...],
        Meta(min_length=1, description="In the log's order; those after the first are often its consequences."),
    ]
    expected: Annotated[
        BestCandidate | None, Meta(description="The estimate of the job's settings; null: no job was given.")
    ]
    instead: Annotated[
        BestCandidate | None, Meta(description="The best candidate for the same data and batch; null: there is none.")
    ]
    compared: Annotated[
        tuple[str, ...],
        Meta(description="The log beside the job: tensors, card, sharding; empty: no job, or no difference."),
    ]
    why_none: Annotated[
        str,
        Meta(
            description="Why `instead` is null, or `expected` too: the job cannot be planned as given. Empty if "
            "`instead` is not null, or if no job was given."
        ),
    ]


# -- a validation ------------------------------------------------------------------------------------------------------


class SummaryReport(Document, frozen=True):
    """Signed errors of one group of cases."""

    group: str
    quantity: Quantity
    evidence: Evidence
    count: Count
    mean: float
    mean_absolute: float
    worst: float
    under: Annotated[int, Meta(ge=0, description="Figures predicted too small by more than `under_share`.")]


class Prediction(Document, frozen=True):
    """A predicted figure."""

    bytes: Bytes
    error: Annotated[float, Meta(description="Predicted / measured - 1: below 0, too little was predicted.")]


class ComparedFigureReport(Document, frozen=True):
    """One measured figure and its predictions."""

    line: Count
    label: str
    settings: Settings
    gpu: str | None
    quantity: Quantity
    measured_bytes: Bytes
    evidence: Annotated[Evidence, Meta(description="Of this figure: measured on a GPU or a CPU, or emulated.")]
    predicted: dict[Evidence, Prediction]


class OutOfMemoryCaseReport(Document, frozen=True):
    """A case that ran out of memory."""

    line: Count
    label: str
    settings: Settings
    foreseen: Annotated[dict[Evidence, bool], Meta(description="Whether each prediction says that it does not fit.")]


class LeftOutReport(Document, frozen=True):
    """A line that nothing is compared with."""

    line: Count
    why: str


class ValidationReport(Document, frozen=True):
    """The document of `plan validate --json`."""

    schema: Version
    interrupted: bool
    under_share: Share
    summaries: tuple[SummaryReport, ...]
    rows: tuple[ComparedFigureReport, ...]
    out_of_memory: tuple[OutOfMemoryCaseReport, ...]
    left_out: tuple[LeftOutReport, ...]


class ClusterReport(Struct, frozen=True):
    """One of several clusters that a job was planned on."""

    gpus: Annotated[str, Meta(description="As it was asked for.")]
    plan: Annotated[PlanReport | None, Meta(description="null: the job contradicts the cluster.")]
    why_none: Annotated[str, Meta(description="Why `plan` is null; empty if it is not.")]
    price_per_hour: Annotated[float | None, Meta(description="Of all GPUs; null: not given.")]
    price_per_million_tokens: Annotated[float | None, Meta(description="null: no price, or it does not fit.")]
    tokens: Annotated[Count, Meta(description="To train on: --tokens, else a million.")]
    hours: Annotated[float | None, Meta(description="To train on them; null: it does not fit.")]
    cost: Annotated[float | None, Meta(description="Of training on them; null: no price, or it does not fit.")]


class ChangeReport(Struct, frozen=True):
    """A behaviour of a library that changed in a release and matters for the job."""

    library: Annotated[Literal["trl", "torch", "vllm"], Meta(description="The library that changed.")]
    since: Annotated[str, Meta(description="The first release with the change.")]
    text: Annotated[str, Meta(description="What changed.")]


class DiffReport(Document, frozen=True):
    """The document of `plan diff --json`."""

    schema: Version
    estimates: Annotated[tuple[EstimateReport, EstimateReport], Meta(description="Under OLD, and under NEW.")]
    settings: Annotated[
        dict[str, tuple[Any, Any]], Meta(description="Arguments of TRL that differ: under OLD, under NEW.")
    ]
    changes: Annotated[tuple[ChangeReport, ...], Meta(description="In the order of the releases.")]


class ComparisonReport(Document, frozen=True):
    """The document of `plan --gpus A,B --json`."""

    schema: Version
    clusters: Annotated[tuple[ClusterReport, ...], Meta(description="In the order asked for.")]


# -- lists -------------------------------------------------------------------------------------------------------------


class KnownModel(Document, frozen=True):
    """A model of the catalogue."""

    id: Annotated[str, Meta(description="Its name on the Hub.")]
    aliases: Annotated[tuple[str, ...], Meta(description="Other names that --model takes.")]
    params: Annotated[Count, Meta(description="Parameters.")]
    dtype: Annotated[str, Meta(description="Of the published weights.")]
    model_type: Annotated[str, Meta(description="Of config.json.")]
    activations: Annotated[
        Literal["formula", "measured layers"],
        Meta(description="formula: computed; measured layers: one layer of each kind was run on fake tensors."),
    ]


class ModelsReport(Document, frozen=True):
    """The document of `plan models --json`."""

    schema: Version
    models: tuple[KnownModel, ...]


class KnownGpu(Document, frozen=True):
    """A card of the catalogue."""

    name: str
    aliases: Annotated[tuple[str, ...], Meta(description="Other names that --gpus takes.")]
    total_bytes: Annotated[Bytes, Meta(description="Memory that the driver reports.")]
    bf16: Annotated[bool, Meta(description="Whether it computes in bfloat16.")]
    memory_from: Annotated[
        Literal["driver", "derived"], Meta(description="driver: a driver's log; derived: from the data sheet.")
    ]


class GpusReport(Document, frozen=True):
    """The document of `plan gpus --json`."""

    schema: Version
    gpus: tuple[KnownGpu, ...]


# -- an export ---------------------------------------------------------------------------------------------------------


class ExportReport(Document, frozen=True):
    """The answer of the tool export of `plan mcp`."""

    schema: Version
    settings: Settings
    files: Annotated[tuple[str, ...], Meta(min_length=1, description="Paths of the files that were written.")]


# -- an error ----------------------------------------------------------------------------------------------------------


class ErrorDetails(Document, frozen=True):
    """Why there is no answer."""

    code: Annotated[
        ErrorCode,
        Meta(
            description="wrong_input: settings that contradict each other, or a wrong value; unknown_name: a model, "
            "GPU, method or setting that is in no table; unknown_architecture, not_measured: a model whose layers have "
            "no formulas; probe_failed: a probe without a result; "
            "nothing_fits: no candidate fits; failed: anything else."
        ),
    ]
    message: Annotated[str, Meta(description="The line on stderr, for a person.")]
    nearest: Annotated[tuple[str, ...], Meta(description="Known names similar to an unknown one, best first.")]


class ErrorDocument(Document, frozen=True):
    """The document of a command with `--json` that has no answer. The exit code is that of the error."""

    error: ErrorDetails
