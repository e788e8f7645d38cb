"""Contract of the tracker: it reports what PyTorch allocates without it."""

import contextlib
import itertools
from collections.abc import Callable
from typing import ClassVar

import pytest
from pairwise import pairwise_cases
from test_dryrun import CONFIG, candidate, shape

from planner.candidate import Candidate, Dtype

pytest.importorskip("trl")

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PrinterCallback

from probes.dryrun.cuda.substitutions import WORKSPACES
from probes.dryrun.dry_run import dry_run
from probes.dryrun.fake_models import models_stay_where_they_are
from probes.dryrun.fake_trainer import fake_trainer
from probes.dryrun.quiet_libraries import quiet
from probes.step import hidden_allocations
from probes.step.tracker import Tracker, collector_off
from probes.worker.allocator_events import AllocatorEvents

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

# Scalars that kernels allocate inside themselves: the profiler sees them, a dispatch mode does not.
SCALARS_BYTES = 128


def untracked_peak_bytes(case: Candidate) -> int:
    """Peak of a real run above its start, from the allocator's own reports, without a dispatch mode."""
    with quiet(), collector_off(), models_stay_where_they_are():
        built = fake_trainer(case, "real")
        built.trainer.remove_callback(PrinterCallback)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            built.trainer.train()
    reports = sorted(
        (event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    )
    total = peak = 0
    for report in reports:
        total += report.nbytes()
        peak = max(peak, total)
    return peak


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "tuning", "checkpointing", "dtype"),
    pairwise_cases(itertools.product([True, False], ["full", "lora"], [True, False], ["float32", "bfloat16"])),
)
def test_peak_is_that_of_a_run_without_the_tracker(tied: bool, tuning: str, checkpointing: bool, dtype: Dtype) -> None:
    model = shape(model_type="llama", tie_word_embeddings=tied)
    case = candidate(model=model, tuning=tuning, gradient_checkpointing=checkpointing, dtype=dtype, padded=False)
    trace = dry_run(case, "cpu")
    residents = sum(allocation.size_bytes for allocation in trace.allocations if allocation.operator == "resident")
    # checkpointing keeps the random number generator's state on the host, which the profiler sees too
    layers = int(str(CONFIG["num_hidden_layers"]))
    generator_bytes = layers * torch.get_rng_state().nbytes if checkpointing else 0
    assert 0 <= untracked_peak_bytes(case) - (trace.peak_bytes - residents) - generator_bytes <= SCALARS_BYTES


class _Owner(torch.autograd.Function):
    """Return gradients from Python, and keep one of them if `keeps`."""

    kept: ClassVar[list[torch.Tensor]] = []
    keeps = False

    @staticmethod
    def forward(ctx: object, weight: torch.Tensor) -> torch.Tensor:
        return weight.sum()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(1000)
        if _Owner.keeps:
            _Owner.kept.append(made)
        return made


@pytest.mark.parametrize("keeps", [True, False])
def test_a_gradient_from_python_is_added_to_in_place_unless_python_holds_it(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Owner, "keeps", keeps)
    monkeypatch.setattr(_Owner, "kept", [])
    weight = torch.nn.Parameter(torch.zeros(1000))
    with contextlib.ExitStack() as stack:
        tracker = stack.enter_context(Tracker())
        inner = weight * 1.0
        total = (inner * 2.0).sum() + _Owner.apply(inner)  # type: ignore[no-untyped-call]
        total.backward()
    sums = [
        allocation
        for allocation in tracker.trace().allocations
        if allocation.operator == "aten.add.Tensor" and allocation.size_bytes == weight.nbytes
    ]
    assert len(sums) == keeps


ROWS, COLUMNS = 256, 4096
PLACES = torch.arange(ROWS).unsqueeze(1)
MASK = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) % 2 == 0
HALF = torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16)
# Operators whose backward formula or kernel allocates otherwise under a dispatch mode, or inside itself.
BRANCHES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gather": lambda y: y.gather(1, PLACES).squeeze(1) - y.logsumexp(1),
    "index": lambda y: y[PLACES.squeeze(1)],
    "index_select": lambda y: y.index_select(0, PLACES.squeeze(1)),
    "masked_select": lambda y: y.masked_select(MASK),
    "mul by 16 bits": lambda y: y * HALF,
    "cummax": lambda y: y.cummax(1)[0],
    "sort": lambda y: y.sort(1)[0],
    "stable sort": lambda y: y.sort(dim=1, stable=True)[0],
    "topk": lambda y: y.topk(8, 1)[0],
    "max": lambda y: y.max(1)[0],
    "min": lambda y: y.min(1)[0],
    "log_softmax of a slice": lambda y: y[:, 1:].log_softmax(1),
    "softmax of a slice": lambda y: y[:, 1:].softmax(1),
}


@pytest.mark.parametrize("operator", BRANCHES)
def test_operators_peak_as_without_the_tracker(operator: str) -> None:
    x = torch.randn(ROWS, COLUMNS, requires_grad=True)

    def run() -> None:
        (BRANCHES[operator](x * 1.0) * 2.0).sum().backward()  # type: ignore[no-untyped-call]
        x.grad = None

    run()
    reports = AllocatorEvents()
    with reports.recording(0):
        run()
    with Tracker(workspaces=hidden_allocations.ON_THE_CPU) as tracker:
        run()
    # the CPU sorts one row at a time in a buffer of its own, and keeps the number of each masked element
    scratch_bytes = 8 * ROWS * COLUMNS if operator == "masked_select" else 8 * COLUMNS
    constants_bytes = sum(tensor.nbytes for tensor in (PLACES, MASK, HALF))  # the tracker takes them for new if viewed
    assert -constants_bytes <= reports.peaks["load"] - tracker.trace().peak_bytes <= scratch_bytes


def test_a_kernel_that_copies_nothing_allocates_nothing() -> None:
    with Tracker(workspaces=hidden_allocations.EVERYWHERE) as tracker:
        torch.randn(4, 8).softmax(-1)
        torch.randn(8, 4).t().softmax(-1)
    copies = [each.size_bytes for each in tracker.trace(()).allocations if "workspace" in each.operator]
    assert copies == [128]


@pytest.mark.parametrize(
    ("transposed", "tensors"), [((False, False), 2), ((True, False), 3), ((False, True), 3), ((True, True), 4)]
)
def test_softmax_on_a_gpu_multiplies_gradient_and_result(transposed: tuple[bool, bool], tensors: int) -> None:
    """results/softmax_backward.md: the result, the product of the arguments, and copies to contiguous ones."""
    scores = [torch.empty(8, 8) for _ in transposed]
    gradient, output = (each.t() if turned else each for each, turned in zip(scores, transposed, strict=True))
    workspace = WORKSPACES[torch.ops.aten._softmax_backward_data.default]
    assert output.nbytes + workspace(gradient, output, -1, torch.float32) == tensors * output.nbytes
