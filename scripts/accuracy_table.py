"""Print the table of docs/accuracy.md: `python -m scripts.accuracy_table`. Every estimate in it is computed anew.

`make golden` puts it into the page, and its shorter form into the README.
"""

import statistics
from collections.abc import Iterable, Iterator

from planner.estimation import estimate
from planner.schemes import Sharding
from planner.units import GIB
from scripts import compare_published, emulated_grid
from scripts.compare_published import Compared, Quantity

EMULATED, PUBLISHED = "[emulated CUDA]({}/emulated.md)", "[published runs]({}/published.md)"
ALLOCATED: tuple[Quantity, ...] = ("allocated", "after step")
T4 = "fitcheck T4"  # beginning of the groups of a harness that ran 79 jobs on a Tesla T4
FSDP_1 = "FSDP 1"  # in the names of groups that ran under it
RL = "AgileRL"  # beginning of the groups that train and run a vLLM engine in turns
# Rows of the emulated grid by how the model is distributed.
SHARDINGS: dict[str, tuple[Sharding, ...]] = {
    "one process or DDP": ("none", "ddp"),
    "ZeRO-1 and ZeRO-2": ("zero1", "zero2"),
    "ZeRO-3": ("zero3",),
    "FSDP2": ("fsdp2",),
}


HEAD = (
    "| computed | against | figures | median error | mean absolute | worst | under by more than 3 % |",
    "|---|---|---|---|---|---|---|",
)


def accuracy_table(results: str) -> str:
    """A Markdown table of signed errors: one line for each source that the estimate is compared with.

    `results`: the folder of the linked pages, as seen from the page that holds the table.
    """
    on_emulated, published_pages = EMULATED.format(results), PUBLISHED.format(results)
    lines = [line("allocated", f"{on_emulated}: {words}", errors) for words, errors in emulated_allocated()]
    lines += [line("need", f"{on_emulated}: {words}", errors) for words, errors in emulated_needs()]
    lines += [line(computed, f"{published_pages}: {words}", errors) for computed, words, errors in published()]
    return "\n".join((*HEAD, *lines))


def short_table(results: str) -> str:
    """The README's form of the table: the emulated grid in two lines, without special trainers and cards."""
    on_emulated, published_pages = EMULATED.format(results), PUBLISHED.format(results)
    _, allocated = next(emulated_allocated())
    _, need = next(emulated_needs())
    lines = [line("allocated", f"{on_emulated}", allocated), line("need", f"{on_emulated}", need)]
    rows = [*by_base(everywhere_but_on_t4()), *held_out()]
    lines += [line(computed, f"{published_pages}: {words}", errors) for computed, words, errors in rows]
    return "\n".join((*HEAD, *lines))


def emulated_allocated() -> Iterator[tuple[str, list[float]]]:
    """Yield errors of the bytes that PyTorch allocates, of all jobs and by how the model is distributed."""
    rows = emulated_grid.ran()
    yield "all jobs", [each.error for each in rows]
    for words, shardings in SHARDINGS.items():
        yield words, [each.error for each in rows if each.candidate.sharding in shardings]


def emulated_needs() -> Iterator[tuple[str, list[float]]]:
    """Yield errors of the need, which decides if a job fits, of the jobs whose need was recorded."""
    rows = [each for each in emulated_grid.ran() if each.needed]
    yield "all jobs", [each.needed_error for each in rows]
    for words, sharded in (("one process or DDP", False), ("sharded", True)):
        yield words, [each.needed_error for each in rows if each.candidate.scheme_row.whole != sharded]


def published() -> Iterator[tuple[str, str, list[float]]]:
    """Yield what is computed, the kind of published runs, and the errors, by what was measured."""
    yield from by_base(everywhere_but_on_t4())
    for computed, quantities in (("allocated", ALLOCATED), ("reserved", ("reserved",))):
        errors = [one.error for one in more_runs() if on_t4(one) and one.row.quantity in quantities]
        yield computed, "LoRA and QLoRA on a Tesla T4", errors
    yield from reinforcement_learning()
    yield from held_out()


def by_base(rows: list[Compared]) -> Iterator[tuple[str, str, list[float]]]:
    """Yield the errors of published runs by what was measured, of unquantized and of 4-bit bases."""
    for computed, quantities in (("allocated", ALLOCATED), ("reserved", ("reserved",)), ("nvidia-smi", ("process",))):
        yield computed, "unquantized", errors_of(rows, quantities, quantized=False)
        words = "4-bit bases, most with older bitsandbytes or GPTQ"
        yield computed, words, errors_of(rows, quantities, quantized=True)


def everywhere_but_on_t4() -> list[Compared]:
    """Return the published runs that are not of the harness on a Tesla T4."""
    groups = compare_published.groups(compare_published.all_compared()[0])
    return [one for members in groups.values() for one in members] + [one for one in more_runs() if not on_t4(one)]


def more_runs() -> list[Compared]:
    """Return the published runs that were read after the first ones."""
    return [one for members in compare_published.more_groups().values() for one in members]


def on_t4(one: Compared) -> bool:
    """Return whether a run is of the harness on a Tesla T4."""
    return one.row.group.startswith(T4)


def held_out() -> Iterator[tuple[str, str, list[float]]]:
    """Yield errors of the runs that no formula and no unit of the verdict rests on."""
    rows = [one for members in compare_published.more_groups(compare_published.HELD_OUT).values() for one in members]
    for words, fsdp1 in (("held out, with Liger on an A100", False), ("held out, under FSDP 1", True)):
        for computed, quantities in (("allocated", ALLOCATED), ("nvidia-smi", ("process",))):
            members = [one for one in rows if (FSDP_1 in one.row.group) == fsdp1]
            yield computed, words, [one.error for one in members if one.row.quantity in quantities]


def errors_of(rows: Iterable[Compared], quantities: Iterable[Quantity], *, quantized: bool) -> list[float]:
    """Return the errors of the rows of these quantities, with or without a quantized base."""
    return [
        one.error
        for one in rows
        if one.row.quantity in quantities and (one.row.candidate.quantization != "none") == quantized
    ]


def reinforcement_learning() -> Iterator[tuple[str, str, list[float]]]:
    """Yield errors of GRPO in another trainer that lets its vLLM engine sleep: training, and the engine awake."""
    training, engine = list[float](), list[float]()
    for row in compare_published.outcome_rows():
        if row["group"].startswith(RL):
            trainer, vllm = estimate(*compare_published.outcome_job(row)).gpus
            training.append(trainer.nvidia_smi_bytes / (row["figures_gib"]["training"] * GIB) - 1)
            engine.append(vllm.peak_bytes / (row["figures_gib"]["rollout"] * GIB) - 1)
    yield "nvidia-smi", "GRPO with LoRA in AgileRL's trainer, training", training
    yield "vLLM engine", "the same, rollout", engine


def line(computed: str, against: str, errors: Iterable[float]) -> str:
    """Return a line of the table."""
    found = sorted(errors)
    mean = statistics.mean(map(abs, found))
    under = sum(error < -0.03 for error in found) / len(found)
    middle, worst = statistics.median(found), max(found, key=abs)
    return f"| {computed} | {against} | {len(found)} | {middle:+.1%} | {mean:.1%} | {worst:+.1%} | {under:.0%} |"


if __name__ == "__main__":
    print(accuracy_table("../results"))
