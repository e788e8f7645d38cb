"""The JSON documents of `plan`, as msgspec types: what `--json` prints, and the JSON Schema of `plan schema`.

A key that a document does not always have is `UNSET` where it is left out. Memory is in bytes, time in seconds.
Additions are allowed; a change of meaning raises `SCHEMA`.
"""

from typing import Annotated, Any, Literal, get_type_hints

from msgspec import UNSET, Meta, Struct, UnsetType, defstruct
from msgspec.json import schema_components

from planner.candidate import FIELDS, MODEL_FIELDS, Candidate, Elements
from planner.diagnose.incident import IncidentKind
from planner.errors import ErrorCode
from planner.gpus.cluster import Cluster
from planner.jobs.job import Goal, TuningOption
from planner.measurements.measurement import Quantity
from planner.methods import METHODS, MethodName
from planner.quantities import Component, Evidence, GpuRole, NoteCode, Phase, ProbedOn, Throughput, Verdict
from planner.settings.setting import Setting
from planner.settings.table import ROW_LENGTHS, SETTINGS

SCHEMA: Literal[1] = 1

Version = Annotated[Literal[1], Meta(description="The version of this schema.")]
Bytes = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Probability = Annotated[float, Meta(ge=0, le=1, description="Probability that no GPU runs out of memory.")]
Interval = Annotated[tuple[Bytes, Bytes], Meta(description="Lower and upper bound of the peak at the accepted risk.")]
ProbeDevice = Literal["cuda", "cpu", "emulated"]
Warnings = Annotated[tuple[str, ...], Meta(description="Notes for the reader, one line each.")]
Versions = Annotated[dict[str, str], Meta(description="Releases of the libraries that the figures stand for.")]


class Document(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all objects in a document: frozen, and without unknown keys."""


class NoteReport(Document, frozen=True):
    """A reason, a limit, a note or a change as data, and its sentence."""

    code: Annotated[NoteCode, Meta(description="Identifies what is said; it does not change.")]
    values: Annotated[
        dict[str, Any],
        Meta(description="The values in the sentence; one that is a note itself has `code`, `values` and `text` too."),
    ]
    text: Annotated[str, Meta(description="The sentence in English; it may change.")]


SummaryText = Annotated[str, Meta(description="The answer in one line, for a person.")]
WarningsData = Annotated[tuple[NoteReport, ...], Meta(description="The warnings as data.")]


# -- settings ----------------------------------------------------------------------------------------------------------


class CheckpointingArguments(Document, frozen=True):
    """`gradient_checkpointing_kwargs` of Transformers' TrainingArguments."""

    use_reentrant: Annotated[bool, Meta(description="True for adapters under ZeRO-3, where TRL forces it.")]
    every_n_layers: Annotated[Count, Meta(description="Only every n-th layer is recomputed.")] | UnsetType = UNSET
    offload: Annotated[bool, Meta(description="Inputs of layers wait in pinned host memory.")] | UnsetType = UNSET


class Environment(Document, frozen=True):
    """Environment variables to launch with."""

    PYTORCH_CUDA_ALLOC_CONF: str | UnsetType = UNSET


def _settings_types() -> dict[str, tuple[Any, bool]]:
    """Return every setting of a candidate by its library name: its type in JSON, and whether every candidate has it."""
    types = get_type_hints(Candidate)
    found: dict[str, tuple[Any, bool]] = {}
    for row in sorted(SETTINGS, key=lambda row: FIELDS.index(row.field)):
        always = not (row.methods or row.owner_values or row.needs) and row.unset is ...
        if row.values:
            for name in row.library_names:
                values = list(dict.fromkeys(each[name] for each in row.values.values() if name in each))
                kind = bool if isinstance(values[0], bool) else str if row.file == "environment" else _one_of(values)
                note = row.names[name].sentence if name in row.names else row.sentence
                found[name] = _described(kind, note), always and all(name in each for each in row.values.values())
        else:
            found[row.written or row.field] = _described(_json_type(row, types[row.field]), row.sentence), always
        for other in (name for name in row.names if name not in row.library_names):
            found[other] = _described(bool, row.names[other].sentence), False
        for other in dict.fromkeys(method.argument_names.get(row.field, "") for method in METHODS.values()):
            if other:
                users = ", ".join(
                    method.name for method in METHODS.values() if method.argument_names.get(row.field) == other
                )
                found[other] = _described(_json_type(row, types[row.field]), f"{row.sentence} ({users})"), False
    return found


def _json_type(row: Setting, hint: object) -> object:
    """Return the type that a field's value has in JSON."""
    if row.field in (*MODEL_FIELDS, *ROW_LENGTHS):
        return str
    if row.field == "lora_target_modules":
        return Literal["all-linear"] | tuple[str, ...] | None
    if row.field == "image_size":
        return Annotated[str, Meta(pattern="^[0-9]{1,6}x[0-9]{1,6}$")]
    if row.field == "vllm_max_model_length":
        return Count | None
    if row.bounds is None:
        return hint
    least, most = row.bounds
    if hint is float:
        return Annotated[float, Meta(ge=0, le=1) if most == 1 else Meta(ge=0)]
    whole = Annotated[int, Meta(ge=int(least))]
    return whole | Literal["auto"] if hint == Elements else whole


def _one_of(values: list[Any]) -> object:
    return Literal[tuple(values)]


def _described(kind: object, sentence: str) -> object:
    return Annotated[kind, Meta(description=sentence)]


SETTINGS_TYPES = _settings_types()
# Settings that are keys of others in a candidate's.
NESTED = tuple(name for row in SETTINGS if row.file in ("checkpointing", "environment") for name in row.library_names)


_Settings: Any = defstruct(
    "Settings",
    [
        *((name, kind) for name, (kind, always) in SETTINGS_TYPES.items() if always and name not in NESTED),
        ("environment", Environment),
        *(
            (name, kind | UnsetType, UNSET)
            for name, (kind, always) in SETTINGS_TYPES.items()
            if not always and name not in NESTED
        ),
        ("gradient_checkpointing_kwargs", CheckpointingArguments | UnsetType, UNSET),
    ],
    bases=(Document,),
    frozen=True,
    kw_only=True,
)
_PinnedSettings: Any = defstruct(
    "PinnedSettings",
    [
        *((name, kind | UnsetType, UNSET) for name, (kind, _) in SETTINGS_TYPES.items()),
        ("gradient_checkpointing_kwargs", CheckpointingArguments | UnsetType, UNSET),
    ],
    bases=(Document,),
    frozen=True,
)


class Settings(_Settings):  # type: ignore[misc]
    """A candidate's settings, named as TRL, Transformers, PEFT, accelerate, DeepSpeed and vLLM name them.

    A setting that the method, the tuning or the sharding does not read is left out.
    """


class PinnedSettings(_PinnedSettings):  # type: ignore[misc]
    """Settings that the user decided and the search keeps."""


# -- an estimate -------------------------------------------------------------------------------------------------------

COMPONENT_DESCRIPTIONS: dict[Component, str] = {
    "weights": "Weights of every model that is resident, as stored.",
    "adapters": "LoRA matrices.",
    "gradients": "Gradients of trained parameters.",
    "optimizer_states": "Buffers that the optimizer keeps between steps.",
    "autocast_copies": "16-bit copies of float32 weights that autocast keeps, of GPTQ weights that autograd keeps.",
    "activations": "Tensors saved for the backward pass.",
    "attention_scores": "Tensors that grow with the square of the length.",
    "transients": "Tensors of one layer's forward, recomputation or backward, and temporaries of the optimizer.",
    "loss": "Head, logits and log-probabilities.",
    "kv_cache": "Keys and values of Transformers' generate().",
    "engine": "vLLM's share of the card.",
    "communication": "Gathered parameters, buckets, NCCL.",
    "fragmentation": "Reserved by PyTorch's allocator and not allocated.",
    "runtime": "CUDA context and cuBLAS workspaces.",
    "unexplained": "Measured, and more than the components of the estimate.",
}
ComponentBytes = Annotated[
    dict[Component, Bytes],
    Meta(
        description="Bytes by component; a component of 0 bytes may be left out.",
        extra_json_schema={
            "properties": {
                name: {"type": "integer", "minimum": 0, "description": text}
                for name, text in COMPONENT_DESCRIPTIONS.items()
            },
            "propertyNames": {"enum": list(COMPONENT_DESCRIPTIONS)},
        },
    ),
]


class PhaseReport(Document, frozen=True):
    """The memory of one phase on one GPU."""

    name: Phase
    total_bytes: Annotated[Bytes, Meta(description="The sum of the components.")]
    components: ComponentBytes


class Gpus(Document, frozen=True):
    """The GPUs of one role; all are alike."""

    role: GpuRole
    count: Count
    capacity_bytes: Annotated[Bytes, Meta(description="Memory of one card that this run may use.")]
    peak_bytes: Annotated[Bytes, Meta(description="Memory that the heaviest phase needs on one card.")]
    peak_phase: Annotated[Phase, Meta(description="The heaviest phase.")]
    interval_bytes: Interval
    reserved_bytes: Annotated[
        Bytes,
        Meta(description="What PyTorch's allocator reserves where there is room: torch.cuda.max_memory_reserved."),
    ]
    nvidia_smi_bytes: Annotated[
        Bytes, Meta(description="What the driver shows for the process: the peak with the allocator's cache.")
    ]
    nvidia_smi_interval_bytes: Annotated[
        tuple[Bytes, Bytes],
        Meta(
            description="Bounds of nvidia_smi_bytes: the upper one is at least what nine of ten published runs of such "
            "jobs stayed below, and at most what the card has."
        ),
    ]
    phases: Annotated[tuple[PhaseReport, ...], Meta(min_length=1)]
    details: Annotated[
        dict[str, dict[str, Bytes]],
        Meta(description="Parts of a component by name: bytes, or a count if the name ends in tokens or sequences."),
    ]
    headroom_bytes: Annotated[
        Bytes, Meta(description="Memory that must stay free above peak_bytes at the accepted risk.")
    ] = 0


class Host(Document, frozen=True):
    """Main memory of one node."""

    peak_bytes: Bytes
    capacity_bytes: Bytes


class BestCandidate(Document, frozen=True):
    """A candidate, the memory that it needs and its speed."""

    settings: Settings
    fits: Annotated[
        bool, Meta(description="GPUs (upper bound of the peak) and main memory are large enough, or it is tight.")
    ]
    fit_probability: Annotated[Probability, Meta(description="Probability to run, in whole percent, rounded down.")]
    comparable_runs: Annotated[
        Count, Meta(description="Published runs with as much of their card to spare; with as little, if it is tight.")
    ]
    worst_miss: Annotated[
        float, Meta(description="Largest share by which a published run of such a job needed more than was predicted.")
    ]
    evidence: Annotated[
        Evidence,
        Meta(description="estimated: by formulas; emulated: by a run without a GPU; measured: by a probe on a device."),
    ]
    gpus: Annotated[tuple[Gpus, ...], Meta(min_length=1)]
    host: Host
    throughput: Throughput
    reasons: Annotated[tuple[str, ...], Meta(description="Reasons for the settings, one line each.")]
    reasons_data: Annotated[tuple[NoteReport, ...], Meta(description="The reasons as data.")]
    tight: Annotated[
        bool,
        Meta(description="The risk is higher than accepted, nothing safer was found, and it rather runs than not."),
    ] = False
    comparable_ran: Annotated[Count, Meta(description="How many of comparable_runs ran.")] = 0
    device: (
        Annotated[ProbeDevice, Meta(description="The device of the candidate's probe; absent: no probe ran.")]
        | UnsetType
    ) = UNSET


Plain = dict[str, Any]


class SettingsByLibrary(Document, frozen=True):
    """A candidate's settings by the library that is given them, under its own names."""

    trl: Annotated[Plain, Meta(description="Arguments of TRL's command: the keys of train.yaml.")]
    peft: Annotated[Plain, Meta(description="Fields of PEFT's LoraConfig; empty for full fine-tuning.")]
    accelerate: Annotated[Plain, Meta(description="Keys of the file of `accelerate launch --config_file`.")]
    deepspeed: Annotated[Plain, Meta(description="DeepSpeed's config; empty without DeepSpeed.")]
    vllm: Annotated[Plain, Meta(description="Arguments of vLLM's engine; empty without vLLM.")]
    env: Annotated[dict[str, str], Meta(description="Environment variables.")]
    facts: Annotated[Plain, Meta(description="What no library is given: the method, the TRL release, the data.")]


class LaunchReport(Document, frozen=True):
    """Files and command that start the training: write the files into a folder, and run the command there."""

    argv: Annotated[
        tuple[str, ...],
        Meta(
            min_length=1,
            description="The command: `accelerate launch ...`, or a script of the files where it takes several.",
        ),
    ]
    env: Annotated[dict[str, str], Meta(description="Variables for the command; one that is set already wins.")]
    files: Annotated[dict[str, str], Meta(description="Texts of the files by name, as `plan export` writes them.")]


class ResourcesReport(Document, frozen=True, kw_only=True):
    """The machines to rent for a run; `launch` has the command, its variables and files."""

    nodes: Count
    gpus_per_node: Count
    gpu_bytes: Annotated[Bytes, Meta(description="Least memory of a card, with what must stay free.")]
    host_bytes: Annotated[Bytes, Meta(description="Least main memory of a node.")]
    disk_bytes: Annotated[
        Bytes,
        Meta(
            description="Models and two checkpoints, as under save_total_limit 1, without the environment and the data."
        ),
    ]
    cards: Annotated[
        tuple[str, ...],
        Meta(description="Cards that clouds rent on which the candidate fits as it is, the smallest first."),
    ]
    epoch_seconds: Annotated[
        float | None, Meta(description="Of a pass over the data; null: the number of rows is not known.")
    ]
    packages: Annotated[tuple[str, ...], Meta(description="The lines of requirements.txt.")]


class LaunchedCandidate(BestCandidate, frozen=True, kw_only=True):
    """A candidate with what starts it."""

    settings_by_library: Annotated[
        SettingsByLibrary | None, Meta(description="null: TRL has no argument for a setting.")
    ] = None
    launch: Annotated[LaunchReport | None, Meta(description="null: there is nothing to start.")] = None
    why_no_launch: Annotated[str, Meta(description="Why `launch` is null; empty if it is not.")] = ""
    resources: Annotated[ResourcesReport, Meta(description="Absent: the GPUs are unknown.")] | UnsetType = UNSET


class EstimateReport(LaunchedCandidate, frozen=True, kw_only=True):
    """The document of `plan estimate --json` and `plan probe --json`."""

    schema: Version
    summary: SummaryText = ""
    warnings: Warnings
    warnings_data: WarningsData
    cluster: Annotated[Cluster, Meta(description="The GPUs that the estimate is for.")] | UnsetType = UNSET


# -- a plan ------------------------------------------------------------------------------------------------------------


class JobReport(Document, frozen=True):
    """The job: the training to plan and the settings that the user decided."""

    model: str
    method: MethodName
    tuning: TuningOption
    pinned: PinnedSettings
    optimize: Goal
    risk: Annotated[float, Meta(ge=0, le=1, description="Accepted probability of running out of memory.")]
    effective_batch_size: Annotated[
        Count | None, Meta(description="Samples per optimizer step; null: as many as TRL's defaults give.")
    ]
    trl_version: str


class AlternativeReport(BestCandidate, frozen=True, kw_only=True):
    """A runner-up: the best of another tuning class, or of another way to run."""

    label: str
    label_data: Annotated[NoteReport, Meta(description="The label as data.")]
    note: str
    note_data: Annotated[tuple[NoteReport, ...], Meta(description="The parts of the note as data.")]


class LeverReport(BestCandidate, frozen=True, kw_only=True):
    """A change that would be faster than the recommended candidate, at a price."""

    change: Annotated[str, Meta(description="The change, as options of the command.")]
    change_data: Annotated[NoteReport, Meta(description="The change as data.")]
    factor: Annotated[float, Meta(ge=0, description="Its speed as a multiple of the recommended candidate's.")]
    price: Annotated[str, Meta(description="What it changes in learning, or needs.")]
    price_data: Annotated[NoteReport, Meta(description="The price as data.")]


class RemedyReport(BestCandidate, frozen=True, kw_only=True):
    """A change that makes the job fit, tried by estimating it."""

    change: Annotated[str, Meta(description="The change, as options of the command.")]
    change_data: Annotated[NoteReport, Meta(description="The change as data.")]
    note: Annotated[str, Meta(description="The cost of the change.")]
    note_data: Annotated[tuple[NoteReport, ...], Meta(description="The parts of the note as data.")]
    saves_bytes: Annotated[Bytes, Meta(description="By how much the peak of the heaviest GPU falls.")]


class PhaseDifferenceReport(Document, frozen=True):
    """A phase of the best candidate on its heaviest GPU, expected and measured."""

    name: Phase
    expected_bytes: Bytes
    measured_bytes: Annotated[Bytes, Meta(description="All memory that was taken.")]
    needed_bytes: Annotated[Bytes, Meta(description="Without the cache that PyTorch's allocator could give back.")]
    error: Annotated[float, Meta(description="expected_bytes / needed_bytes - 1: below 0, too little was expected.")]


class ProofReport(Document, frozen=True):
    """The result of the probes."""

    evidence: Annotated[Evidence, Meta(description="measured, or emulated: on cards that run no kernel.")]
    device: Annotated[ProbedOn, Meta(description="none: no probe decided.")]
    expected: Annotated[Evidence, Meta(description="The evidence of the best candidate before its probes.")]
    lines: Annotated[tuple[str, ...], Meta(description="The certificate as text.")]
    differences: tuple[PhaseDifferenceReport, ...]
    report: Annotated[dict[str, Any], Meta(description="The certificate as JSON.")]


class PlanReport(Document, frozen=True, kw_only=True):
    """The document of `plan --json`."""

    schema: Version
    summary: SummaryText = ""
    verdict: Annotated[
        Verdict,
        Meta(description="Of the best candidate; tight: it rather runs than not, at a higher risk than accepted."),
    ]
    best: Annotated[LaunchedCandidate, Meta(description="The recommended candidate; the nearest one if none fits.")]
    job: JobReport
    cluster: Cluster
    alternatives: Annotated[
        tuple[AlternativeReport, ...], Meta(description="The best of other tuning classes and other ways to run.")
    ]
    remedies: Annotated[tuple[RemedyReport, ...], Meta(description="Changes that make the job fit, cheapest first.")]
    levers: Annotated[tuple[LeverReport, ...], Meta(description="Changes that would be faster, at a price.")]
    more: Annotated[tuple[str, ...], Meta(description="Larger settings, and what limits them.")]
    more_data: Annotated[tuple[NoteReport, ...], Meta(description="`more` as data.")]
    warnings: Warnings
    warnings_data: WarningsData
    versions: Versions
    proof: Annotated[ProofReport, Meta(description="The result of --probe.")] | UnsetType = UNSET


# -- a dry run ---------------------------------------------------------------------------------------------------------


class EmulatedPhase(Document, frozen=True):
    """The memory of one phase of a dry run on one GPU."""

    name: Phase
    total_bytes: Annotated[Bytes, Meta(description="What the phase needs, as total_bytes of the estimated phases.")]
    allocated_bytes: Annotated[Bytes, Meta(description="Tensors: torch.cuda.max_memory_allocated.")]
    estimated_allocated_bytes: Annotated[Bytes, Meta(description="The same, estimated; 0: the phase is not.")]
    reserved_bytes: Annotated[Bytes, Meta(description="PyTorch's allocator, its cache included.")]
    driver_bytes: Annotated[Bytes, Meta(description="The process, with the CUDA context and libraries.")]


class EstimatedPhases(Document, frozen=True):
    """The estimate of the same candidate."""

    peak_bytes: Bytes
    phases: tuple[PhaseReport, ...]


class OutOfMemory(Document, frozen=True):
    """The figures of PyTorch's out-of-memory message."""

    phase: Phase
    tried_bytes: Annotated[Bytes, Meta(description="Size of the allocation that failed.")]
    total_bytes: Annotated[Bytes, Meta(description="Memory of the card.")]
    free_bytes: Bytes
    allocated_bytes: Bytes
    unallocated_bytes: Annotated[Bytes, Meta(description="Reserved by PyTorch but unallocated.")]
    message: Annotated[str, Meta(description="The message, as PyTorch prints it.")]


class DryRunReport(Document, frozen=True):
    """The document of `plan dry-run --json`: one emulated run of a candidate."""

    schema: Version
    evidence: Literal["emulated"]
    settings: Settings
    fits: Annotated[bool, Meta(description="Whether the run ended; false: it ran out of the GPU's memory.")]
    peak_bytes: Annotated[Bytes, Meta(description="What the GPU must have; a lower bound if memory ran out.")]
    peak_phase: Phase
    phases: Annotated[tuple[EmulatedPhase, ...], Meta(description="The phases that the run went through.")]
    reserved_peak_bytes: Annotated[Bytes, Meta(description="Most memory that PyTorch's allocator reserves.")]
    out_of_memory: Annotated[OutOfMemory | None, Meta(description="null if the run fits, or its message is lost.")]
    estimated: EstimatedPhases
    difference: Annotated[float, Meta(description="Estimated peak / emulated peak - 1.")]
    versions: Versions


# -- a diagnosis -------------------------------------------------------------------------------------------------------


class IncidentReport(Document, frozen=True):
    """One lack of memory in a log."""

    kind: Annotated[
        IncidentKind,
        Meta(
            description="The part that found no memory: PyTorch's allocator (gpu), a CUDA library, NCCL "
            "(communication), the host, or vLLM at its start (its share of the card, KV cache, longest sequence, pool, "
            "profile run) or at its wake-up. killed: signal 9, for no stated reason; kernel: a Triton kernel that "
            "needs more shared memory than the GPU has; foreign: no CUDA or ROCm allocator of PyTorch."
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
            description="Why `instead` is null, or `expected` too: the job does not plan as given. Empty if `instead` "
            "is not null, or if no job was given."
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
    """A fact that is another one for the job since a release of a library."""

    library: Annotated[Literal["trl", "torch"], Meta(description="Whose fact it is.")]
    since: Annotated[str, Meta(description="The first release with it.")]
    text: Annotated[str, Meta(description="What is another one since then.")]


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


DOCUMENTS = (
    PlanReport,
    EstimateReport,
    DryRunReport,
    DiagnosisReport,
    ValidationReport,
    ComparisonReport,
    DiffReport,
    ModelsReport,
    GpusReport,
    ExportReport,
    ErrorDocument,
)


# Descriptions of properties that mean the same in every type, and of those of types that are not defined here.
PROPERTIES: dict[str, str] = {
    "models": "The models.",
    "allocated_bytes": "Memory that tensors hold.",
    "bf16_flops": "Dense operations a second in bf16; in fp16 on cards without bf16.",
    "bytes": "The predicted figure.",
    "capacity_bytes": "Memory that this run may use.",
    "cluster": "The GPUs.",
    "component": "The kind of memory.",
    "compute_capability": "CUDA's compute capability: major and minor number.",
    "count": "How many there are.",
    "differences": "Phases, expected and measured.",
    "environment": "Environment variables to launch with.",
    "epoch": "One pass over the given data; absent: no data was given.",
    "error": "Why there is no answer.",
    "estimated": "The estimate of the same candidate.",
    "evidence": "What the figure stands on: estimated, emulated or measured.",
    "expected_bytes": "The figure before it was measured.",
    "free_bytes": "Memory that is free, or that this run may use.",
    "gpu": "The card.",
    "gpus": "The GPUs by role; all of one role are alike.",
    "gpus_per_node": "GPUs of one node.",
    "gradient_checkpointing_kwargs": "Arguments of gradient checkpointing.",
    "group": "The cases that are summed up.",
    "host": "Main memory of one node.",
    "interrupted": "Whether it was ended before all cases were measured.",
    "job": "The training to plan, and the settings that the user decided.",
    "label": "The name of the case or of the candidate, for a person.",
    "left_out": "Lines that nothing is compared with.",
    "line": "Line of the file.",
    "mean": "Mean signed error.",
    "mean_absolute": "Mean absolute error.",
    "measured_bytes": "The measured figure.",
    "memory_bytes_per_second": "Bandwidth of the card's memory.",
    "method": "The method, as `trl <method>` names it.",
    "model": "Name of the policy on the Hub.",
    "module": "The module whose pass made the tensors.",
    "multiprocessors": "The card's multiprocessors.",
    "name": "The name.",
    "network_bytes_per_second": "Network of one node, one way.",
    "nodes": "Nodes of the cluster.",
    "note": "The cost of it, for a person.",
    "nvlink_bytes_per_second": "One direction; 0: no NVLink.",
    "operator": "The operator that made the tensors.",
    "optimize": "The goal of the search.",
    "origin": "given: --host-memory; local: this machine; assumed: a usual node with this card; unlimited: unknown.",
    "out_of_memory": "Cases that ran out of memory.",
    "pcie_bytes_per_second": "One direction.",
    "peak_bytes": "Memory that the heaviest phase needs.",
    "peak_phase": "The heaviest phase.",
    "phase": "The part of a step.",
    "phases": "The memory of each phase.",
    "pinned": "Settings that the user decided.",
    "predicted": "The predictions by their evidence.",
    "PYTORCH_CUDA_ALLOC_CONF": "Options of PyTorch's allocator.",
    "quantity": "What was measured.",
    "role": "Whose memory it is.",
    "rows": "The compared figures; of an epoch: rows of the data.",
    "seconds": "Seconds of a step by cause.",
    "settings": "The settings, named as the libraries name them.",
    "size_bytes": "Bytes of all of them.",
    "source": "Where the figures come from.",
    "step_seconds": "Seconds of one optimizer step.",
    "summaries": "Signed errors by group.",
    "throughput": "The speed.",
    "tokens_per_second": "Tokens a second over all GPUs, padding left out.",
    "total_bytes": "All memory.",
    "trl_version": "The TRL release that is planned for.",
    "tuning": "full, lora, qlora, or auto: the first that fits.",
    "under_share": "The share below which a prediction counts as too small.",
    "whole": "Whether plans use all of an assumed main memory.",
    "why": "The reason.",
    "worst": "The signed error with the largest absolute value.",
    "drawn_rows": "Rows that are drawn in one pass.",
    "trained_rows": "Rows that are trained on.",
    "tokens": "Tokens that are trained on.",
    "padding": "Tokens of padding.",
    "cut_rows": "Rows that are cut at max_length.",
    "cut_tokens": "Tokens that are cut off.",
    "steps": "Optimizer steps.",
    "layout": "How rows are laid out in batches.",
    "max_length": "Tokens of the longest row.",
}


def _with_descriptions(definitions: dict[str, Any]) -> dict[str, Any]:
    """Return definitions in which every property has a description."""
    for kind in definitions.values():
        for name, schema in kind.get("properties", {}).items():
            if "description" not in schema and name in PROPERTIES:
                kind["properties"][name] = {**schema, "description": PROPERTIES[name]}
    return definitions


def json_schema() -> dict[str, object]:
    """The JSON Schema of all documents, generated from their types."""
    references, definitions = schema_components(DOCUMENTS, ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "plan",
        "description": "What `--json` prints: memory in bytes as integers, time in seconds.",
        "oneOf": list(references),
        "$defs": _with_descriptions(definitions),
    }
