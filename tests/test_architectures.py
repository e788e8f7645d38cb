"""The table of model types: the one place that names them, held to what Transformers says of its classes."""

import ast
import json
import re
from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import replace

from planner import estimate, plan
from planner.candidate import Candidate
from planner.errors import InputError
from planner.jobs.settings import settings_of, trl_arguments
from planner.launch.user_config import merged_yaml
from planner.models.architectures.table import ARCHITECTURES, FUNCTIONS, TABLE, architecture_of
from planner.models.catalogue import load_model, model_rows
from planner.models.layers import LayerProgram
from planner.models.shape import ModelShape

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


def test_a_type_has_one_row() -> None:
    names = [name for row in json.loads(TABLE.read_bytes()) for name in row["types"]]
    assert len(names) == len(set(names))


# FlashAttention's kernels lack their heads of 512, or a tower's class refuses it (audio).
WITHOUT_FLASH = {"gemma4", "gemma4_unified"}


# Their layers were measured in whole chunks only: rows of 96 tokens need up to 14 % more of a mixer, of 300 3 %.
MEASURED_IN_WHOLE_CHUNKS = {"qwen3_5", "qwen3_5_moe", "qwen3_next"}


@pytest.mark.parametrize(("column", "other"), [("window", "window"), ("rotary", "no_window"), ("layer", "opt_norm")])
def test_a_column_names_only_functions_of_its_kind(column: str, other: str) -> None:
    named = {name: row[name] for row in json.loads(TABLE.read_text()) for name in FUNCTIONS if name in row}
    assert all(name in FUNCTIONS[column] for column, name in named.items())
    assert other not in FUNCTIONS[column]


def test_every_type_that_pads_rows_to_chunks_says_so() -> None:
    """The modeling files that round a row up to `chunk_size`, and the rows with a `chunk`."""
    models = Path(pytest.importorskip("transformers").__file__).parent / "models"
    rounds = re.compile(r"% (self\.)?chunk_size\) % |% chunk_size != 0")
    found = {path.parent.name for path in models.glob("*/modeling_*.py") if rounds.search(path.read_text("utf-8"))}
    named = {name.removesuffix("_text") for name, row in ARCHITECTURES.items() if row.chunk}
    assert named == found - MEASURED_IN_WHOLE_CHUNKS


# The plan leaves a part whole: weights that norms have for each head; the expert of all tokens (two emulated cards held
# 0.77 GiB more of Qwen1.5-MoE-A2.7B than with a divided one).
PARTS_LEFT_WHOLE = {"cohere", "qwen2_moe"}
DIVIDED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "colwise"),
    **dict.fromkeys(("o_proj", "down_proj"), "rowwise"),
    **dict.fromkeys(("q_norm", "k_norm"), "replicated_with_grad_allreduce"),
    "gate_up_proj": "packed_colwise",  # of experts
    "experts": "moe_tp_experts",
}


def test_types_whose_layers_transformers_divides_say_so() -> None:
    """`base_model_tp_plan` of each type with formulas: heads of attention, features of MLPs and experts."""
    configs = pytest.importorskip("transformers").CONFIG_MAPPING
    found = set()
    for name in ARCHITECTURES.keys() & configs.keys():
        plan_of_type = configs[name].base_model_tp_plan or {}
        styles = {(path.rsplit(".", 1)[-1], style) for path, style in plan_of_type.items()}
        attention = styles >= {(part, DIVIDED[part]) for part in ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")}
        if attention and styles <= DIVIDED.items() and ARCHITECTURES[name].has_formulas:
            found.add(name)
    assert {name for name, row in ARCHITECTURES.items() if row.divides_layers} == found - PARTS_LEFT_WHOLE


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


def one_of_each_kind() -> list[ModelShape]:
    """The smallest model of the catalogue of every model type, with and without the parts that stop at sdpa."""
    shapes = [load_model(row.id, hub=False) for row in sorted(model_rows(), key=lambda row: -row.params)]
    return list({(shape.model_type, shape.auto_class, shape.stops_at_named_sdpa): shape for shape in shapes}.values())


@pytest.mark.slow
@pytest.mark.parametrize("shape", one_of_each_kind(), ids=lambda shape: shape.model_type)
def test_every_part_of_a_model_loads_with_the_attention_that_its_file_names(shape: ModelShape) -> None:
    """Each part asks its own class: a tower, or the text model that experimental trainers load alone."""
    flash_attention = pytest.importorskip("probes.layers.cuda.flash_attention").flash_attention
    candidate = Candidate(model=shape, method="sft", attn_implementation=shape.default_attention)
    for loading_class in {shape.loading_class, *(["AutoModelForCausalLM"] if shape.loads_as_causal_model else [])}:
        found = attention_of_parts(shape, loading_class, trl_arguments(candidate)["attn_implementation"])
        assert found[0] == shape.default_attention
        assert "eager" not in found or shape.stops_at_named_sdpa
        if shape.supports_flash_attention:
            with flash_attention():
                assert {"eager", "sdpa"}.isdisjoint(attention_of_parts(shape, loading_class, "flash_attention_2"))


def attention_of_parts(shape: ModelShape, loading_class: str, named: object) -> list[str]:
    """What the model, first, and each model inside it run as attention, loaded with a setting that names one."""
    import torch
    import transformers

    from probes.layers.few_layers import few_layers
    from probes.trainers import transformers_config

    auto = getattr(transformers, loading_class)
    with torch.device("meta"):
        config = transformers_config(few_layers(shape, 1).config)
        model = auto.from_config(config, dtype=torch.bfloat16, attn_implementation=named)
    inner = (module for module in model.modules() if isinstance(module, transformers.PreTrainedModel))
    return [module.config._attn_implementation for module in inner]


@pytest.mark.parametrize("name", ["bloom-560m", "gpt-neo-125m", "gpt-j-6b", "DeepSeek-V4-Flash", "gemma-2-2b"])
def test_a_model_without_sdpa_is_planned_with_eager_attention(name: str) -> None:
    """Transformers stops at `attn_implementation: sdpa` of these types when it loads the model."""
    assert load_model(name).default_attention == "eager"


def test_the_files_of_a_model_without_sdpa_say_eager() -> None:
    found = plan("bloom-560m", "1xA100-40G", method="sft")
    assert settings_of(found.best.candidate)["attn_implementation"] == "eager"


def test_sdpa_is_not_named_to_a_run_one_of_whose_models_has_none() -> None:
    """Teachers and reward models are loaded with the policy's `attn_implementation`: trl 1.16, distillation.py."""
    found = plan("google/gemma-2b", "1xA100-80G", method="distillation", teacher_model="gemma-2-2b", dtype="float32")
    candidate = replace(found.best.candidate, attn_implementation="sdpa")
    assert trl_arguments(candidate)["attn_implementation"] is None
    theirs = "attn_implementation: sdpa\nmodel_init_kwargs: {attn_implementation: sdpa}\n"
    assert "attn_implementation: sdpa" not in re.sub("#.*", "", merged_yaml(theirs, candidate))


def test_flash_attention_is_refused_if_the_teacher_has_none() -> None:
    with pytest.raises(InputError, match="flash_attention_2 does not run google/gemma-4-E2B: gemma4 has none in"):
        plan(
            "google/gemma-3-270m", "1xA100-40G", method="distillation", teacher_model="google/gemma-4-E2B",
            attn_implementation="flash_attention_2", dtype="bfloat16",
        )  # fmt: skip


def test_both_releases_of_flash_attention_run_sinks_with_the_same_kernel() -> None:
    """Source: transformers 5.23, models/gpt_oss/modeling_gpt_oss.py, `_compatible_flash_implementations`."""
    second, third = (
        estimate("gpt-oss-20b", "1xH100", method="sft", tuning="lora", attn_implementation=name).gpus[0].peak
        for name in ("flash_attention_2", "flash_attention_3")
    )
    assert second == third


@pytest.mark.parametrize(("name", "named"), [("gemma-4-E2B", None), ("gemma-4-31B", "sdpa")])
def test_sdpa_is_not_named_to_a_model_whose_audio_tower_stops_at_it(name: str, named: str | None) -> None:
    """Source: transformers 5.23, models/gemma4/modeling_gemma4.py, `Gemma4AudioModel` (`_supports_sdpa`)."""
    candidate = Candidate(model=load_model(name), method="sft", attn_implementation="sdpa")
    assert trl_arguments(candidate).get("attn_implementation") == named
