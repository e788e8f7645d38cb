"""What FSDP2's launch files say of a model, beside the model that Transformers builds of its config."""

import pytest

from planner.launch.accelerate import WRAPPED
from planner.models.catalogue import load_model, model_rows

pytest.importorskip("trl")

import torch
import transformers

from probes.layers.few_layers import few_layers
from probes.trainers import transformers_config

SMALLEST = {row.model_type: row.id for row in sorted(model_rows(), key=lambda row: -row.params)}
ALWAYS = ("gemma3", "paligemma", "llava", "gemma4", "deepseek_v3", "qwen3_vl")


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(each, marks=() if each in ALWAYS else pytest.mark.nightly) for each in sorted(SMALLEST)],
)
def test_the_launch_files_name_what_the_model_has(model_type: str) -> None:
    """accelerate stops at a class that the model lacks, and at a saved buffer where one process loads for all."""
    model = load_model(SMALLEST[model_type])
    config = transformers_config(few_layers(model).config)
    with torch.device("meta"):
        built = getattr(transformers, model.loading_class).from_config(config)
    has = {type(module).__name__ for module in built.modules()}
    named = set(built._no_split_modules or ())
    assert set(WRAPPED.get(model_type, named)) == named & has
    parameters = {name for name, _ in built.named_parameters(remove_duplicate=False)}
    assert model.loads_on_every_process == bool(built.state_dict().keys() - parameters)
