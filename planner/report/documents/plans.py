"""The documents of an estimate, a plan and a dry run."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from planner.gpus.cluster import Cluster
from planner.jobs.job import Goal, TuningOption
from planner.methods import MethodName
from planner.quantities import Component, Evidence, GpuRole, Phase, ProbedOn, Throughput, Verdict
from planner.report.documents.fields import (
    Bytes,
    Count,
    Document,
    Interval,
    NoteReport,
    PinnedSettings,
    Probability,
    ProbeDevice,
    Settings,
    SummaryText,
    Version,
    Versions,
    Warnings,
    WarningsData,
)

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
    """Host memory of one node."""

    peak_bytes: Bytes
    capacity_bytes: Bytes


class BestCandidate(Document, frozen=True):
    """A candidate, the memory that it needs and its speed."""

    settings: Settings
    fits: Annotated[
        bool, Meta(description="GPUs (upper bound of the peak) and host memory are large enough, or the plan is tight.")
    ]
    fit_probability: Annotated[Probability, Meta(description="Probability to run, in whole percent, rounded down.")]
    comparable_runs: Annotated[
        Count,
        Meta(description="Published runs with at least as much of their card to spare; at most as much, if tight."),
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
        Meta(
            description="The risk is higher than accepted, nothing safer was found, and it is more likely to run "
            "than not."
        ),
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
    host_bytes: Annotated[Bytes, Meta(description="Least host memory of a node.")]
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
        Meta(
            description="Of the best candidate; tight: it is more likely to run than not, at a higher risk than "
            "accepted."
        ),
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
