"""The answer to a `plan` without a whole job: on which cards a model trains, or what GPUs can train."""

from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from msgspec.structs import replace

from planner.commands.compare import compare, compares
from planner.commands.exit_codes import EXIT_PLANNED, EXIT_WRONG_INPUT
from planner.commands.options import AnswerOptions, PriceOptions, ProofOptions
from planner.errors import InputError
from planner.gpus.cluster import Cluster
from planner.gpus.parse import parse_cluster
from planner.requests.options import SearchOptions, config_paths

if TYPE_CHECKING:
    from planner.report.listing import Compared

# Models of several sizes, the methods that most people use first, and cards of several sizes. Judged.
FAVOURITES = (
    "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Llama-3.2-3B", "Llama-3.1-8B", "Qwen2.5-14B", "Qwen2.5-32B", "Llama-3.1-70B",
)  # fmt: skip
FIRST_METHODS = ("sft", "dpo", "grpo")
USUAL_CARDS = "1xRTX-4090,1xL40S,1xA100-80G,1xH100,4xA100-80G,8xH100"
FIRST_COMMANDS = """No GPU is here. Three ways to begin:
  plan --model Qwen2.5-7B --gpus 2xA100-40G --method grpo   the settings of a job
  plan --model Llama-3.1-8B                                 on which cards a model trains
  plan --gpus 1xRTX-4090                                    what a card can train"""


def begins(options: SearchOptions, output: AnswerOptions) -> bool:
    """Return whether `begin` answers: no GPUs, or GPUs alone; no config file, and no option that needs one plan."""
    files = any(path is not None for path in config_paths(options))
    for_one_plan = (output.json, output.out, output.html, output.export, output.format, output.dry_run)
    alone = options.gpus is None or (options.model is None and options.method is None)
    return alone and not files and not any(for_one_plan) and "," not in (options.gpus or "")


def begin(options: SearchOptions, pricing: PriceOptions, output: AnswerOptions, study: ProofOptions) -> int:
    """Print the cards that a model fits, or what the given GPUs can train; with neither, what this machine's GPUs can.

    Raises:
        InputError: the method alone is given, prices without a model, or the GPUs cannot be read.
    """
    if options.model is None and compares(options, pricing):
        raise InputError("Prices are compared for a job: give --model too.")
    if options.model is not None:
        asked = replace(options, gpus=USUAL_CARDS, method=options.method or "sft")
        return compare(asked, pricing, output, study)
    if options.method is not None:
        raise InputError("--model and --gpus are missing. For example: plan --model Qwen2.5-7B --gpus 2xA100-40G")
    try:
        cluster = parse_cluster(options.gpus or "local", options.free_memory, options.host_memory, options.network)
    except InputError:
        if options.gpus is not None:
            raise
        print(FIRST_COMMANDS)
        return EXIT_WRONG_INPUT
    return _trainable(options, cluster, output)


def _trainable(options: SearchOptions, cluster: Cluster, output: AnswerOptions) -> int:
    """Print what the GPUs can train, of models of several sizes, method by method.

    Raises:
        InputError: an option is wrong for each of them.
    """
    from rich.console import Console

    from planner.ask import answer_of_cluster, refuse_what_all_refuse
    from planner.commands.printing import live_line, width
    from planner.report.listing import trainable_table
    from planner.report.words import describe_cluster
    from planner.requests.read_options import read_options
    from planner.training_stack import complete_models

    rows: dict[str, list[Compared]] = {}
    with live_line(output, "searching") as line:
        for model, method in product(FAVOURITES, FIRST_METHODS):
            line.phase(f"{model}, {method}")
            asked = replace(options, gpus=options.gpus or "local", model=model, method=method)
            found = answer_of_cluster(partial(read_options, asked, complete_models(line.say)), cluster.gpu.name)
            rows.setdefault(model, []).append(found)
    refuse_what_all_refuse([found for each in rows.values() for found in each])
    print(f"{describe_cluster(cluster)} · what it can train, tokens a second")
    Console(width=width(), highlight=False).print(trainable_table(FIRST_METHODS, rows))
    print(f"next: plan --model {FAVOURITES[0]} --gpus {options.gpus or 'local'} --method {FIRST_METHODS[0]}")
    return EXIT_PLANNED
