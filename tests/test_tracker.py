"""Contract of the tracker: it reports what PyTorch allocates without it."""

from collections.abc import Callable
from typing import ClassVar

import pytest

pytest.importorskip("trl")

import torch

from probes.layers.cuda.substitutions import EVERYWHERE, WORKSPACES
from probes.layers.fake_tensors.tracker import STAYS, Tracker
from probes.worker.allocator_events import AllocatorEvents

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

GRADIENTS = 3  # of `weight`'s size in that pass: of the product, of the function from Python, of `weight` itself


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
    with Tracker() as tracker:
        inner = weight * 1.0
        total = (inner * 2.0).sum() + _Owner.apply(inner)  # type: ignore[no-untyped-call]
        before = len(tracker.records)
        total.backward()
    gradients = [record for record in tracker.records[before:] if record.size_bytes == weight.nbytes]
    assert len(gradients) == GRADIENTS + keeps


ROWS, COLUMNS = 256, 4096
PLACES = torch.arange(ROWS).unsqueeze(1)
MASK = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) % 2 == 0
# Operators whose backward formula or kernel allocates otherwise under a dispatch mode, or inside itself.
BRANCHES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gather": lambda y: y.gather(1, PLACES).squeeze(1) - y.logsumexp(1),
    "index": lambda y: y[PLACES.squeeze(1)],
    "index_select": lambda y: y.index_select(0, PLACES.squeeze(1)),
    "masked_select": lambda y: y.masked_select(MASK),
    "cummax": lambda y: y.cummax(1)[0],
    "sort": lambda y: y.sort(1)[0],
    "stable sort": lambda y: y.sort(dim=1, stable=True)[0],
    "topk": lambda y: y.topk(8, 1)[0],
    "max": lambda y: y.max(1)[0],
    "min": lambda y: y.min(1)[0],
    "log_softmax of a slice": lambda y: y[:, 1:].log_softmax(1),
    "softmax of a slice": lambda y: y[:, 1:].softmax(1),
}


def peak_bytes(tracker: Tracker) -> int:
    """The most bytes of a trace that are allocated at once."""
    allocations = tracker.trace().allocations
    events = [(each.born, each.size_bytes) for each in allocations]
    events += [(each.died, -each.size_bytes) for each in allocations if each.died < STAYS]
    total = peak = 0
    for _, size_bytes in sorted(events):
        total += size_bytes
        peak = max(peak, total)
    return peak


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
    with Tracker(workspaces=EVERYWHERE) as tracker:
        run()
    # the CPU sorts one row at a time in a buffer of its own, and keeps the number of each masked element
    scratch_bytes = 8 * ROWS * COLUMNS if operator == "masked_select" else 8 * COLUMNS
    constants_bytes = sum(tensor.nbytes for tensor in (PLACES, MASK))  # the tracker takes them for new if viewed
    assert -constants_bytes <= reports.peaks["load"] - peak_bytes(tracker) <= scratch_bytes


def test_a_kernel_that_copies_nothing_allocates_nothing() -> None:
    with Tracker(workspaces=EVERYWHERE) as tracker:
        torch.randn(4, 8).softmax(-1)
        torch.randn(8, 4).t().softmax(-1)
    # a workspace is freed by the event after the one that allocates it
    copies = [each.size_bytes for each in tracker.trace().allocations if each.died == each.born + 1]
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
