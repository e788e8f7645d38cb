"""Every model of the catalogue with every method: an answer or one line, the same with the extra training and not."""

import pytest

import planner.training_stack
from planner.commands.main import run
from planner.memory.layers.measured_layers import MeasuringRefused
from planner.memory.layers.recipe import Recipe
from planner.methods import METHODS
from planner.models.catalogue import model_rows

NAMES = sorted(row.id for row in model_rows())
CLUSTERS = ("1xL4", "2xT4", "8xH100")
# Its trainer computes without autocast, under which no layers that ship are measured: it is refused.
WITHOUT_AUTOCAST = "distillation"
METHODS_EACH = 4  # methods of a model, other ones for the next model
# Mixtures of experts, hybrids that cannot generate, and images.
SAMPLE = (
    ("LiquidAI/LFM2-8B-A1B", "sft", "1xL4"),
    ("LiquidAI/LFM2-700M", "grpo", "2xT4"),
    ("google/gemma-4-26B-A4B", "gkd", "8xH100"),
    ("Qwen/Qwen3.5-0.8B", "grpo", "8xH100"),
    ("ibm-granite/granite-4.0-h-micro", "dpo", "1xL4"),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """The recipes that the extra training would measure, and without which the answer goes on without it."""
    found: list[Recipe] = []

    def refuse(model: object, measuring: object, recipe: Recipe) -> MeasuringRefused:
        found.append(recipe)
        return MeasuringRefused(reason="the extra training is not installed")

    monkeypatch.setattr(planner.training_stack, "_measure_missing", refuse)
    return found


@pytest.mark.parametrize("model", ["Qwen/Qwen3.5-9B", "google/gemma-4-E2B"])
def test_no_layers_are_measured_for_a_note_on_float32(model: str, asked: list[Recipe]) -> None:
    assert run(["--model", model, "--method", "sft", "--tuning", "qlora", "--gpus", "1xL4", "--quiet"]) == 0
    assert asked == []


@pytest.mark.parametrize(("model", "method", "gpus"), SAMPLE)
def test_no_layers_are_measured_for_a_plain_job(model: str, method: str, gpus: str, asked: list[Recipe]) -> None:
    assert run(["--model", model, "--method", method, "--gpus", gpus, "--quiet"]) in (0, 2, 3)
    assert asked == []


def rotated(number: int) -> list[tuple[str, str]]:
    """Some methods, each with a cluster, that differ from model to model."""
    methods = [method for method in METHODS if method != WITHOUT_AUTOCAST]
    steps = range(METHODS_EACH * number, METHODS_EACH * (number + 1))
    return [(methods[step % len(methods)], CLUSTERS[step % len(CLUSTERS)]) for step in steps]


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(len(NAMES)), ids=lambda number: NAMES[number])
def test_every_model_is_planned_or_refused(number: int, asked: list[Recipe]) -> None:
    for method, gpus in rotated(number):
        assert run(["--model", NAMES[number], "--method", method, "--gpus", gpus, "--quiet"]) in (0, 2, 3)
    assert asked == []
