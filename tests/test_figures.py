"""The plots of the notebook: they show the figures of the answer, and what does not fit is told apart."""

import sys
from itertools import pairwise
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("plotly", reason="the extras notebook and test have plotly")

from planner import plan, plot_cards, sweep
from planner.errors import PlanError
from planner.notebook.answer import Answer
from planner.report.words import tightest
from planner.units import GIB


def shown(figure: float) -> Any:
    """A figure with the six digits that a plot has."""
    return pytest.approx(figure, rel=1e-5)


@pytest.fixture(scope="module")
def answer() -> Answer:
    return plan("Llama-3.1-8B", "1xL4", method="sft")


@pytest.fixture(scope="module")
def cards() -> pd.DataFrame:
    return sweep("Llama-3.1-8B", ["1xT4", "1xL40S"], method="sft", tuning="lora", max_length=[1024, 4096])


def test_the_parts_of_a_bar_add_up_to_its_phase(answer: Answer) -> None:
    figure = answer.plot_memory()
    bars = [trace for trace in figure.data if trace.type == "bar"]
    for index, phase in enumerate(answer.best.gpus[0].phases):
        shown = sum(bar.y[index] for bar in bars)
        assert phase.total_bytes / GIB == pytest.approx(
            shown, abs=0.05 * len(bars)
        )  # parts below 0.05 GiB are left out


def test_the_memory_plot_marks_the_end_of_the_card_and_the_interval_of_the_peak(answer: Answer) -> None:
    (gpu,), figure = answer.best.gpus, answer.plot_memory()
    assert figure.layout.shapes[0].y0 == shown(gpu.capacity_bytes / GIB)
    (peak,) = [trace for trace in figure.data if trace.type == "scatter"]
    assert (peak.x[0], peak.y[0]) == (gpu.peak_phase, shown(gpu.peak_bytes / GIB))
    assert peak.y[0] + peak.error_y.array[0] == shown(gpu.interval_bytes[1] / GIB)
    assert peak.y[0] - peak.error_y.arrayminus[0] == shown(gpu.interval_bytes[0] / GIB)


def test_the_phases_of_a_server_have_its_role() -> None:
    answer = plan("Qwen2.5-7B", "4xA100-40G", method="grpo", tuning="lora", use_vllm=True, vllm_mode="server")
    assert "rollout (vllm)" in answer.plot_memory().data[0].x


def test_no_candidate_that_fits_is_above_the_frontier(answer: Answer) -> None:
    traces = {trace.name: trace for trace in answer.plot_candidates().data}
    line = list(zip(traces["frontier"].x, traces["frontier"].y, strict=True))
    assert all(left[0] < right[0] and left[1] < right[1] for left, right in pairwise(line))
    for name in ("LoRA", "QLoRA", "recommended"):
        for need, speed in zip(traces[name].x, traces[name].y, strict=True):
            assert speed <= max(fastest for leaner, fastest in line if leaner <= need)


def test_the_recommended_candidate_is_marked(answer: Answer) -> None:
    traces = {trace.name: trace for trace in answer.plot_candidates().data}
    assert traces["recommended"].x == (shown(tightest(answer.best).peak_bytes / GIB),)
    assert traces["recommended"].y == (shown(answer.best.throughput.tokens_per_second),)


def test_a_colour_beyond_the_card_means_that_it_does_not_fit(answer: Answer) -> None:
    figure = answer.plot_what_if()
    (heat,) = figure.data
    cells = [
        (share, text)
        for shares, texts in zip(heat.z, heat.text, strict=True)
        for share, text in zip(shares, texts, strict=True)
    ]
    assert {share > 1 for share, _ in cells} == {True, False}
    assert all((share > 1) == text.endswith("does not fit") for share, text in cells)
    column, row = figure.layout.shapes[0].x0 + 0.5, figure.layout.shapes[0].y0 + 0.5
    assert heat.x[int(column)] == f"{answer.best.candidate.max_length:,}"
    assert heat.y[int(row)] == str(answer.best.candidate.per_device_train_batch_size)


def test_cards_have_a_bar_for_each_value_of_the_other_axis(cards: pd.DataFrame) -> None:
    bars = {trace.name: trace for trace in plot_cards(cards, by="max_length").data}
    assert list(bars) == ["max_length 1024", "max_length 4096"]
    assert bars["max_length 4096"].x == ("1xT4", "1xL40S")
    assert bars["max_length 4096"].text[0] == "does<br>not fit" and bars["max_length 4096"].y[0] == 0
    assert bars["max_length 4096"].y[1] == shown(cards["tokens_per_second"][3])


def test_a_column_of_the_reader_can_be_compared(cards: pd.DataFrame) -> None:
    one_length = cards[cards["max_length"] == 1024]
    priced = one_length.assign(price_of_a_million_tokens=[1.25, 0.5])
    figure = plot_cards(priced, "price_of_a_million_tokens")
    assert figure.layout.yaxis.title.text == "price of a million tokens"


def test_rows_that_would_share_a_bar_and_unknown_columns_are_refused(cards: pd.DataFrame) -> None:
    with pytest.raises(PlanError, match=r"plot_cards\(frame, by="):
        plot_cards(cards)
    with pytest.raises(PlanError, match="Did you mean tokens_per_second"):
        plot_cards(cards, "token_per_second")


@pytest.mark.parametrize("frame", [3, None, {"gpus": ["1xL4"]}])
def test_what_is_no_frame_is_refused_with_the_call_that_makes_one(frame: Any) -> None:
    with pytest.raises(PlanError, match=r"plot_cards takes the frame of a sweep: plot_cards\(sweep\("):
        plot_cards(frame)


def test_without_plotly_one_line_says_what_to_install(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(PlanError, match=r"pip install 'finetune-plan\[notebook\]'"):
        answer.plot_memory()
