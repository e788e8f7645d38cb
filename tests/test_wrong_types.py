"""Values of wrong types in Python: an answer or the one documented exception, `planner.PlanError`."""

import importlib.metadata
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
from fuzz_calls import WRONG, call, calls

import planner
from planner import PlanError, estimate, load_model, parse_cluster, plan, sweep
from planner.commands.main import run
from planner.errors import shortened
from planner.files.installed import installed_version

ROOT = Path(__file__).resolve().parents[1]

CALLS = 300


@pytest.mark.parametrize("seed", range(4))
def test_values_of_wrong_types_raise_nothing_but_the_documented_exception(seed: int) -> None:
    refused = 0
    for name, wrong in calls(seed, CALLS):
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
    for reader in (load_model, parse_cluster, lambda value: parse_cluster("1xL4", value, value, value)):
        with suppress(PlanError):
            reader(wrong)
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
        ({"lengths": 10**5000}, "lengths inf cannot be read"),  # Python writes no number of more than 4,300 digits
        # Its divisors are tried one by one.
        ({"effective_batch_size": 2**70}, "effective_batch_size must be from 1 to 1,000,000, not 118059"),
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
