"""Random jobs for the tests of the study: model, cluster, method, pins and goal. Equal seeds give equal jobs."""

import random
from collections.abc import Iterator

from planner.errors import PlanError
from planner.gpus.catalogue import gpu_rows
from planner.gpus.cluster import Cluster
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Goal, Job
from planner.methods import METHODS
from planner.models.catalogue import load_model, model_rows
from planner.search.knobs import SearchProblem, tuning_classes

SMALLEST_PARAMS, LARGEST_PARAMS = 3e8, 8e10
ONE_NODE = ("1", "1", "1", "2", "4", "8")  # GPUs
GOALS: tuple[Goal, ...] = ("throughput", "throughput", "max-length", "batch-size")
TUNING = ("auto", "auto", "full", "lora", "qlora")
# Settings, the percentage of jobs that pin them, and the values.
PINS: dict[str, tuple[int, tuple[object, ...]]] = {
    "max_length": (40, (512, 2048, 4096, 8192)),
    "max_completion_length": (40, (256, 1024, 2048)),
    "prompt_length": (20, (256, 1024, 2048)),
    "num_generations": (30, (4, 8, 16)),
    "lora_r": (20, (8, 64, 128)),
    "gradient_checkpointing": (15, (True, False)),
    "attn_implementation": (15, ("sdpa",)),
    "padded": (15, (False,)),
    "use_liger_kernel": (10, (True,)),
}
LENGTHS = {"max_length", "max_completion_length", "prompt_length"}
ONLY_GENERATING = {"max_completion_length", "prompt_length", "num_generations"}
EFFECTIVE = (None, None, 32, 64, 128)
LARGEST_SPACE = 200  # structures


def random_job(draw: random.Random) -> tuple[Job, Cluster]:
    """Draw a job, and a cluster of one node.

    Raises:
        PlanError: the drawn settings contradict each other.
    """
    models = [row.id for row in model_rows() if row.known and SMALLEST_PARAMS <= row.params <= LARGEST_PARAMS]
    model = load_model(draw.choice(models))
    method = draw.choice(sorted(METHODS))
    cluster = parse_cluster(f"{draw.choice(ONE_NODE)}x{draw.choice([row.gpu.name for row in gpu_rows()])}", None)
    goal, tuning = draw.choice(GOALS), draw.choice(TUNING)
    pinned: dict[str, object] = {}
    for name, (share, values) in PINS.items():
        value, taken = draw.choice(values), draw.random() * 100 < share
        if (
            taken
            and (name not in ONLY_GENERATING or METHODS[method].generates)
            and not (goal == "max-length" and name in LENGTHS)
        ):
            pinned[name] = value
    if tuning == "qlora":
        pinned |= {"tuning": "lora", "quantization": "nf4"}
    job = Job(
        model=model,
        method=method,
        tuning=tuning,
        pinned=pinned,
        optimize=goal,
        effective_batch_size=draw.choice(EFFECTIVE),
    )  # type: ignore[arg-type]
    return job, cluster


def random_questions(seed: int) -> Iterator[tuple[int, SearchProblem]]:
    """One tuning class of each job without contradictions, with the number of the draw."""
    number = 0
    while True:
        number += 1
        draw = random.Random(f"job {seed} {number}")
        try:
            job, cluster = random_job(draw)
            yield number, SearchProblem(job=job, cluster=cluster, tuning_class=draw.choice(tuning_classes(job)))
        except PlanError:
            continue
