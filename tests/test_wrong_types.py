"""Values of wrong types in Python: an answer or the one documented exception, `planner.PlanError`."""

import importlib.metadata
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest

import planner
from planner import Job, PlanError, estimate, load_model, parse_cluster, plan, sweep
from planner.commands.main import run
from planner.errors import shortened
from planner.files.installed import installed_version
from planner.jobs.settings import setting_names
from planner.requests.options import CandidateOptions, SearchOptions

ROOT = Path(__file__).resolve().parents[1]

WRONG: tuple[Any, ...] = (
    None, True, 0, -1, 7, 2**70, 10**5000, 1.16, float("nan"), float("inf"), -0.5, 1j, "", " ", "x", "1e3", b"x", "é\n",
    [], ["x"], [1, 2], [["x"]], (), (1, "x"), {}, {"a": 1}, {1, 2}, frozenset(), object(), int, len, Path("x"),
    Decimal("2.5"), Fraction(1, 3), numpy.int64(3), numpy.float32(0.5), numpy.array([1, 2]), iter([1]), ...,
)  # fmt: skip
CALLS = 300


def calls(seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls of `plan`, `estimate` and `Job` with one to three wrong values beside a right job."""
    chosen = random.Random(seed)
    for _ in range(CALLS):
        name = chosen.choice(["plan", "estimate", "Job"])
        kind = SearchOptions if name == "plan" else CandidateOptions
        own = [field.name for field in fields(Job if name == "Job" else kind)]
        names = own if name == "Job" else [*own, *chosen.sample(sorted(setting_names()), 8)]
        wrong = chosen.sample(names, chosen.randint(1, 3))
        yield name, {argument: chosen.choice(WRONG) for argument in wrong}


def call(name: str, wrong: dict[str, Any]) -> None:
    if name == "Job":
        Job(**{"model": load_model("Qwen2.5-0.5B"), "method": "sft", **wrong})
    elif name == "plan":
        plan("Qwen2.5-0.5B", "1xL4", **{"method": "sft", **wrong})
    else:
        estimate("Qwen2.5-0.5B", "1xL4", **{"method": "sft", **wrong})


@pytest.mark.parametrize("seed", range(4))
def test_values_of_wrong_types_raise_nothing_but_the_documented_exception(seed: int) -> None:
    refused = 0
    for name, wrong in calls(seed):
        try:
            call(name, wrong)
        except PlanError as error:
            refused += 1
            assert str(error), (name, wrong)
        except Exception as error:  # any other is what the test is for
            raise AssertionError(f"{name}({[*map(shortened, wrong.items())]}) raised {error!r}") from error
    assert refused > CALLS / 2


@pytest.mark.parametrize("wrong", WRONG, ids=lambda value: type(value).__name__)
def test_a_place_of_another_type_is_refused(wrong: Any) -> None:
    for call in (load_model, parse_cluster, lambda value: parse_cluster("1xL4", value, value, value)):
        with suppress(PlanError):
            call(wrong)
    for first, second in ((wrong, "1xL4"), ("Qwen2.5-0.5B", wrong), (wrong, wrong)):
        for answer in (plan, estimate, sweep):
            with suppress(PlanError):
                answer(first, second, method="sft")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"trl_version": 1.16}, r"trl_version must be text, such as '1\.16\.0', not 1\.16\."),
        ({"host_memory": 64 * 2**30}, "host_memory must be text, such as '64GiB', not 68719476736."),
        ({"free": 3}, "free must be a list of names, not 3."),
        ({"effective_batch_size": "x"}, "effective_batch_size must be a whole number, not x."),
        ({"max_length": {"a": 1}}, "max_length must be a number, text, .* not a dict."),
        ({"risk": [0.1]}, "risk must be a number, not a list."),
    ],
)  # fmt: skip
def test_a_refusal_names_the_argument_and_its_type(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan("Qwen2.5-0.5B", "1xL4", method="sft", **asked)


def test_a_cluster_is_text() -> None:
    with pytest.raises(PlanError, match=r"gpus must be text, such as '2xA100-40G', not 2\."):
        parse_cluster(2)  # type: ignore[arg-type]


def test_two_names_are_estimated_without_a_config() -> None:
    answer = estimate("Llama-3.1-8B", "1xRTX-4090", method="sft", tuning="lora", max_length=512)
    assert answer.candidate.model.id == "meta-llama/Llama-3.1-8B" and answer.candidate.max_length == 512


def test_several_models_are_an_axis_of_a_sweep() -> None:
    frame = sweep(["Qwen2.5-0.5B", "Qwen2.5-7B"], "1xL4", method="sft", tuning="full")
    assert list(frame["model"]) == ["Qwen2.5-0.5B", "Qwen2.5-7B"] and list(frame["fits"]) == [True, False]


def test_numbers_of_numpy_and_paths_are_taken() -> None:
    answer = plan(
        "Qwen2.5-0.5B", "1xL4", method="sft", max_length=numpy.int64(512), effective_batch_size=numpy.int32(8)
    )
    assert answer.best.candidate.max_length == 512 and answer.job.effective_batch_size == 8
    with pytest.raises(PlanError, match=r"no-such\.yaml"):
        plan("Qwen2.5-0.5B", "1xL4", config=Path("no-such.yaml"))


def test_the_exception_is_exported() -> None:
    assert planner.PlanError is PlanError


def test_the_version_is_that_of_the_installed_metadata(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"plan {planner.__version__}\n"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"1.2.3 of {name}")
    assert installed_version() == "1.2.3 of finetune-plan"


def test_the_version_is_written_in_one_place() -> None:
    written = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert len(written) == 1 and planner.__version__ in (*written, "0+unknown")
    own = [*ROOT.joinpath("planner").rglob("*.py"), *ROOT.joinpath("probes").rglob("*.py")]
    assert [path for path in own if '__version__ = "' in path.read_text()] == []
