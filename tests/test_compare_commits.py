"""The gate between two commits: what counts as moved, what a trailer names, and where there is nothing to compare."""

import sys
from itertools import islice
from pathlib import Path

import pytest

from planner import estimate
from scripts import compare_commits
from scripts.compare_commits import drawn_jobs, job_of_words, moves, report
from scripts.predict_jobs import prediction

JOB = {"model": "Qwen2.5-0.5B", "gpus": "1xL4"}


def predicted(answer: str = "fits", **figures: float) -> dict[str, object]:
    return {"kinds": ["sft", "lora", "qwen2", "unsharded"], "answer": answer, "figures": figures}


def test_figures_that_changed_by_more_than_one_per_cent_moved() -> None:
    found = moves(JOB, predicted(load=1000, loss=1000, speed=50.0), predicted(load=1011, loss=1010, speed=49.0))
    assert {each.figure: each.change for each in found} == {"load": pytest.approx(0.011), "speed": pytest.approx(-0.02)}


def test_a_phase_that_came_and_one_that_went_moved() -> None:
    found = moves(JOB, predicted(load=1, save=7), predicted(load=1, score=5))
    assert {each.figure: each.words for each in found} == {"save": "7 -> 0", "score": "0 -> 5"}


@pytest.mark.parametrize("answers", [("fits", "does not fit"), ("tight", "fits"), ("refused", "fits")])
def test_another_answer_is_a_move(answers: tuple[str, str]) -> None:
    (found,) = moves(JOB, *map(predicted, answers))
    assert (found.figure, found.words) == ("answer", " -> ".join(answers))


def test_figures_of_a_refused_job_are_not_compared() -> None:
    refused = {"kinds": [], "answer": "refused", "figures": {}}
    assert [each.figure for each in moves(JOB, predicted(load=1), refused)] == ["answer"]
    assert not list(moves(JOB, refused, refused))


@pytest.mark.parametrize(
    ("trailer", "named"),
    [("lora load", True), ("load", True), ("qwen2 sft", True), ("all", True), ("lora loss", False), ("zero3", False)],
)
def test_a_trailer_names_a_move_that_has_all_its_words(trailer: str, named: bool) -> None:
    (found,) = moves(JOB, predicted(load=1000), predicted(load=2000))
    assert found.is_named([frozenset({"kto"}), frozenset(trailer.split())]) is named


def test_the_report_proposes_the_trailer_of_what_is_not_named() -> None:
    found = list(moves(JOB, predicted(load=1000, loss=9), predicted(load=1500, loss=12)))
    text = "\n".join(report(found, [frozenset({"loss"})]))
    assert "load: 1 jobs, +50.0% in the median, worst +50.0%" in text
    assert text.count("not named") == 1
    assert "Moves: lora qwen2 sft unsharded load" in text


def test_words_of_a_command_line_are_a_job() -> None:
    words = ["--model", "gpt2", "--gpus", "1xT4", "--max-length", "512", "--no-padded", "--set", "zero_stage=3"]
    expected = {"model": "gpt2", "gpus": "1xT4", "max_length": 512, "padded": False, "zero_stage": "3"}
    assert job_of_words(words) == expected


def test_more_than_half_of_the_drawn_jobs_are_planned() -> None:
    found = [prediction(job) for job in islice(drawn_jobs(), 30)]
    assert sum(each["answer"] != "refused" for each in found) > 15


def test_a_prediction_has_the_figures_of_the_estimate() -> None:
    figures = prediction(JOB | {"method": "sft"})["figures"]
    found = estimate(*JOB.values(), method="sft")
    assert max(size for name, size in figures.items() if name not in ("nvidia-smi", "host")) == found.gpus[0].peak_bytes
    assert (figures["host"], figures["nvidia-smi"]) == (found.host_peak_bytes, found.gpus[0].nvidia_smi_bytes)


def test_a_folder_that_is_no_clone_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_commits, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["compare_commits"])
    assert compare_commits.main() == 0
    assert "Not compared" in capsys.readouterr().out


@pytest.mark.skipif(not compare_commits.git("rev-parse", "HEAD"), reason="not a clone")
def test_a_commit_beside_itself_has_no_moves(capsys: pytest.CaptureFixture[str]) -> None:
    head = compare_commits.git("rev-parse", "HEAD")
    assert compare_commits.compare(head, head, 6) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(" 0 moves")
