"""The table of model types: the one place that names them, held to what Transformers says of its classes."""

import ast
from pathlib import Path
from typing import get_args

import pytest

from planner import plan
from planner.candidate import Candidate
from planner.jobs.settings import settings_of, trl_arguments
from planner.models.architectures.dense import DENSE
from planner.models.architectures.measured import MEASURED
from planner.models.architectures.mixtures import MIXTURES
from planner.models.architectures.plain import PLAIN
from planner.models.architectures.table import ARCHITECTURES, architecture_of
from planner.models.architectures.with_images import WITH_IMAGES
from planner.models.catalogue import load_model, model_rows
from planner.models.layers import LayerProgram

PLANNER = Path(__file__).parent.parent / "planner"
HOME = PLANNER / "models" / "architectures"
TYPES = {*ARCHITECTURES, *(row.model_type for row in model_rows())}
PROGRAMS = set(get_args(LayerProgram))  # named like the first type that is written so
# Literals that are no model types: programs of layers, and a module's name.
OTHER_WORDS = {
    "models/layers.py": PROGRAMS, "models/image_tower.py": PROGRAMS, "memory/layers/decoder.py": PROGRAMS,
    "models/lora_targets.py": {"mamba"},
}  # fmt: skip


def types_named_in(path: Path) -> set[str]:
    """The model types among the text literals of a file."""
    names = {
        node.value
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in TYPES
    }
    return names - OTHER_WORDS.get(str(path.relative_to(PLANNER)), set())


def test_no_file_outside_the_table_names_a_model_type() -> None:
    outside = [path for path in PLANNER.rglob("*.py") if HOME not in path.parents]
    assert {str(path.relative_to(PLANNER)): names for path in outside if (names := types_named_in(path))} == {}


def test_every_row_stands_in_one_file() -> None:
    assert len(DENSE) + len(PLAIN) + len(MIXTURES) + len(WITH_IMAGES) + len(MEASURED) == len(ARCHITECTURES)


# FlashAttention's kernels lack their heads of 512, or a tower's class refuses it (audio).
WITHOUT_FLASH = {"gemma4", "gemma4_unified"}


@pytest.mark.slow
def test_sdpa_and_flash_attention_run_the_types_whose_classes_say_so() -> None:
    """`_supports_sdpa` and `_supports_flash_attn` of every language model that the installed Transformers has."""
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    transformers = pytest.importorskip("transformers")
    with_images = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    for name, class_name in {**with_images, **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}.items():
        found = getattr(transformers, class_name)
        assert architecture_of(name).sdpa is found._supports_sdpa, name
        flash = found._supports_flash_attn and name not in WITHOUT_FLASH
        assert architecture_of(name).flash_attention is flash, name


@pytest.mark.parametrize("name", ["bloom-560m", "gpt-neo-125m", "gpt-j-6b", "DeepSeek-V4-Flash", "gemma-2-2b"])
def test_a_model_without_sdpa_is_planned_with_eager_attention(name: str) -> None:
    """Transformers stops at `attn_implementation: sdpa` of these types when it loads the model."""
    assert load_model(name).default_attention == "eager"


def test_the_files_of_a_model_without_sdpa_say_eager() -> None:
    found = plan("bloom-560m", "1xA100-40G", method="sft")
    assert settings_of(found.best.candidate)["attn_implementation"] == "eager"


@pytest.mark.parametrize(("name", "named"), [("gemma-4-E2B", None), ("gemma-4-31B", "sdpa")])
def test_sdpa_is_not_named_to_a_model_whose_audio_tower_stops_at_it(name: str, named: str | None) -> None:
    """Source: transformers 5.23, models/gemma4/modeling_gemma4.py, `Gemma4AudioModel` (`_supports_sdpa`)."""
    candidate = Candidate(model=load_model(name), method="sft", attn_implementation="sdpa")
    assert trl_arguments(candidate).get("attn_implementation") == named
