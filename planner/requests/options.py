"""The options of a job, as typed values: those of a command line, a request over HTTP, or a notebook's arguments.

A group is a dataclass, each of its fields an option. `planner/commands/options.py` makes flags of them and
`planner/requests/bodies.py` the types of requests.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Struct
from msgspec.structs import fields

from planner.errors import InputError
from planner.jobs.job import LARGEST_RISK, SMALLEST_RISK
from planner.methods import METHODS
from planner.quantities import DEFAULT_RISK
from planner.settings.setting import MAX_BATCH_SIZE, MAX_NUMBER, Value

# Groups of options, as the command's help shows them.
Panel = Literal["job", "hardware", "pins", "goal"]


class Option(Struct, frozen=True, kw_only=True):
    """The description of an option: one sentence, the word for its value, and the bounds of a number (None: none)."""

    help: str
    panel: Panel = "job"
    metavar: str | None = None
    min: float | None = None
    max: float | None = None


class JobOptions(Struct, frozen=True, kw_only=True):
    """The job: model, method and GPUs, and the files that a training is started with."""

    model: Annotated[
        str | None,
        Option(metavar="NAME", help="A name of `plan models`, a folder with a config.json, or a name on the Hub."),
    ] = None
    gpus: Annotated[
        str | None,
        Option(
            metavar="CLUSTER",
            help="The GPUs: 2xA100-40G, H100:8, 4x8xH100 (4 nodes of 8), 1x24GB, or local: those of this machine.",
        ),
    ] = None
    method: Annotated[
        str | None,
        Option(
            metavar="METHOD",
            help=f"The trainer of TRL: {', '.join(METHODS)}.",
        ),
    ] = None
    tuning: Annotated[
        str, Option(metavar="CLASS", help="What is trained: full, lora or qlora; auto: the first of them that fits.")
    ] = "auto"
    config: Annotated[
        str | None, Option(metavar="FILE", help="A config file of TRL, Axolotl or LLaMA-Factory; flags win over it.")
    ] = None
    accelerate_config: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="The file for `accelerate launch` (YAML), or the name of TRL's, such as zero3; flags win over it.",
        ),
    ] = None
    deepspeed_config: Annotated[str | None, Option(metavar="FILE", help="A DeepSpeed config (JSON).")] = None
    max_length: Annotated[
        int | None,
        Option(metavar="TOKENS", min=1, max=MAX_NUMBER, help="Tokens of a row: prompt and completion. Default: TRL's."),
    ] = None
    prompt_length: Annotated[
        int | None,
        Option(
            metavar="TOKENS",
            min=1,
            max=MAX_NUMBER,
            help="Tokens of the longest prompt, for methods that generate.",
        ),
    ] = None
    max_completion_length: Annotated[
        str | int | None, Option(metavar="TOKENS", help="Tokens of the longest completion. Default: TRL's.")
    ] = None
    batch_size: Annotated[
        int | None,
        Option(
            panel="pins",
            metavar="SAMPLES",
            min=1,
            max=MAX_BATCH_SIZE,
            help="per_device_train_batch_size. Default: searched.",
        ),
    ] = None
    effective_batch_size: Annotated[
        int | None,
        Option(
            metavar="SAMPLES",
            min=1,
            max=MAX_BATCH_SIZE,
            help="Samples per optimizer step over all GPUs. Default: what TRL's defaults amount to.",
        ),
    ] = None
    lora_r: Annotated[
        str | int | None,
        Option(
            panel="pins",
            metavar="RANK",
            help="LoRA rank; several (16,32,64) to get the largest that fits. Default: TRL's, 16.",
        ),
    ] = None
    set: Annotated[
        Mapping[str, Value] | None,
        Option(
            panel="pins",
            metavar="NAME=VALUE",
            help="Any other setting by its name in TRL, PEFT, accelerate, DeepSpeed or vLLM, such as "
            "vllm_gpu_memory_utilization=0.3. Repeatable.",
        ),
    ] = None
    images_per_row: Annotated[
        int | None, Option(metavar="N", min=0, help="Images in each row of a vision-language model.")
    ] = None
    image_size: Annotated[
        str | None,
        Option(metavar="WIDTHxHEIGHT", help="Pixels of an image, as the processor resizes it; models of Qwen need it."),
    ] = None
    lengths: Annotated[
        str | None,
        Option(
            metavar="FILE|QUANTILES",
            help="Tokens of the dataset's rows: a file of counts, or quantiles, such as p50=380,p95=1900,max=8192.",
        ),
    ] = None
    completion_lengths: Annotated[
        str | None,
        Option(
            metavar="FILE|QUANTILES",
            help="Tokens of sampled completions, as --lengths, for the speed; memory: --max-completion-length.",
        ),
    ] = None
    padded: Annotated[
        bool | None,
        Option(
            help="Do all batches hold padding, or none? Default (padded=either): both occur; the heavier is planned."
        ),
    ] = None
    free_memory: Annotated[
        str | None,
        Option(
            panel="hardware", metavar="SIZE", help="What may be used of each GPU, such as 30GiB. Default: all of it."
        ),
    ] = None
    host_memory: Annotated[
        str | None,
        Option(
            panel="hardware",
            metavar="SIZE",
            help="Host memory of each node, such as 256GiB. Default: what nodes with that GPU usually have.",
        ),
    ] = None
    network: Annotated[
        str | None,
        Option(
            panel="hardware",
            metavar="SPEED",
            help="Network of each node, such as 400Gb or 8x400Gb a second. Default: 400Gb.",
        ),
    ] = None
    risk: Annotated[
        float,
        Option(
            panel="goal",
            metavar="PROBABILITY",
            min=SMALLEST_RISK,
            max=LARGEST_RISK,
            help="Accepted probability of running out of memory: less of it leaves more of the card free.",
        ),
    ] = DEFAULT_RISK
    trl_version: Annotated[
        str | None, Option(metavar="VERSION", help="The TRL to plan for. Default: the newest that is known.")
    ] = None
    vllm_version: Annotated[
        str | None, Option(metavar="VERSION", help="The vLLM of a rollout engine. Default: the newest that TRL takes.")
    ] = None


class SearchOptions(JobOptions, frozen=True, kw_only=True):
    """The options of a job whose candidates are searched."""

    free: Annotated[
        list[str] | None,
        Option(
            panel="pins",
            metavar="NAME,...",
            help="Settings of --config that the search decides all the same. Repeatable.",
        ),
    ] = None
    optimize: Annotated[
        str,
        Option(
            panel="goal",
            metavar="GOAL",
            help="What the search prefers: throughput, max-length, batch-size, or cost (needs prices).",
        ),
    ] = "throughput"


class CandidateOptions(JobOptions, frozen=True, kw_only=True):
    """The options of one candidate without a search: a setting that is not given has TRL's default."""

    tuning: Annotated[
        str,
        Option(
            metavar="CLASS",
            help="full, lora or qlora; auto: as the settings say, full where they say nothing.",
        ),
    ] = "auto"
    batch_size: Annotated[
        int | None,
        Option(
            panel="pins",
            metavar="SAMPLES",
            min=1,
            max=MAX_BATCH_SIZE,
            help="per_device_train_batch_size. Default: TRL's, 8.",
        ),
    ] = None


def config_paths(options: JobOptions) -> tuple[str | None, str | None, str | None]:
    """Return the paths of the TRL, accelerate and DeepSpeed configs; None: not given."""
    return options.config, options.accelerate_config, options.deepspeed_config


def names_a_job(options: JobOptions) -> bool:
    """Return whether the options say which job it is: one of the model, the GPUs, the method or a config file."""
    given = (options.model, options.gpus, options.method, *config_paths(options))
    return any(option is not None for option in given)


def refuse_empty(options: JobOptions) -> None:
    """Raise InputError for an empty option, such as `--gpus ""` from an unset variable of a shell script."""
    for entry in fields(options):
        value = getattr(options, entry.name)
        if isinstance(value, str) and not value.strip():
            raise InputError(f"--{entry.name.replace('_', '-')} is empty.")
