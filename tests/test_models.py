"""Models by name, path and config: counts equal the published ones, layers those that transformers builds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.errors import InputError, UnknownArchitecture, UnknownName
from planner.memory.layers.measured_layers import MeasuringRefused, complete_shipped, load_shipped, shipped_path
from planner.models.architectures.table import ARCHITECTURES, KNOWN_MODEL_TYPES, architecture_of
from planner.models.catalogue import ALIAS_POSITIONS, CATALOGUE, ModelRow, load_model, model_rows
from planner.models.from_config import shape_of
from planner.models.layers import Experts, Mlp
from planner.models.shape import ModelShape

REPOSITORY = Path(__file__).resolve().parent.parent
FACTS = REPOSITORY.parent / "shared" / "data"
ROWS = [json.loads(line) for line in CATALOGUE.read_text(encoding="utf-8").splitlines()]
FORMULAS = [row for row in ROWS if row["config"]["model_type"] in KNOWN_MODEL_TYPES]
# Their layers have no formula: another activation, a norm for each head.
COUNTED_ONLY = {"EleutherAI/gpt-neox-20b", "stabilityai/stablelm-2-12b"}
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100,
}  # fmt: skip


def ids(rows: list[dict]) -> list[str]:
    return [row["id"] for row in rows]


def catalogue_config(model_id: str) -> dict:
    return next(row["config"] for row in ROWS if row["id"] == model_id)


# Aliases whose official weights have a quantization without a formula (planner/models/architectures/published.py).
NO_FORMULA = {"moonshotai/Kimi-K2-Thinking"}


class TestFacts:
    @pytest.mark.parametrize(
        "row", [row for row in FORMULAS if row["id"] not in COUNTED_ONLY], ids=lambda row: row["id"]
    )
    def test_formulas_count_every_parameter_of_the_catalogue(self, row: dict) -> None:
        shape = shape_of(row["config"], id=row["id"])
        detail = row["params_detail"]
        assert shape.params == row["params"]
        assert (shape.embed_params, shape.lm_head_params, shape.expert_params) == (
            detail["embed"],
            detail["lm_head"],
            detail["experts"],
        )
        assert shape.vision_params + (shape.other_params if shape.vision_params else 0) == detail["vision"]
        assert shape.tied is (detail["lm_head"] == 0)

    def test_llama_3_8b_has_half_of_its_published_16_060_522_496_bytes(self) -> None:
        assert load_model("meta-llama/Meta-Llama-3-8B").params == 16_060_522_496 // 2

    def test_the_parts_of_a_shape_sum_to_its_parameters(self) -> None:
        for row in FORMULAS:
            shape = load_model(row["id"])
            if shape.known:
                parts = (
                    shape.embed_params
                    + shape.position_params
                    + shape.lm_head_params
                    + shape.lm_head_bias_params
                    + shape.final_norm.params
                )
                assert (
                    parts + shape.other_params + shape.vision_params + sum(layer.params for layer in shape.layers)
                    == shape.params
                )

    @pytest.mark.parametrize("row", ROWS, ids=ids(ROWS))
    def test_every_row_is_a_shape_with_its_count_and_says_where_it_is_from(self, row: dict) -> None:
        shape = load_model(row["id"])
        assert shape.params == row["params"]
        assert row["source"]
        assert shape.known is (row["config"]["model_type"] in KNOWN_MODEL_TYPES and row["id"] not in COUNTED_ONLY)
        assert shape.known or "not known by formula" in shape.notes[0]

    def test_rows_that_nobody_verified_say_why(self) -> None:
        for row in ROWS:
            assert row["verified"] or row.get("why_unverified") or row.get("notes"), row["id"]

    def test_the_families_that_the_project_promises_are_known(self) -> None:
        promised = (
            "llama qwen2 qwen3 mistral gemma gemma2 gemma3_text gemma3 phi3 gpt2 gpt_neox opt olmo2 mixtral qwen2_moe "
            "qwen3_moe gpt_oss "
            "deepseek_v2 deepseek_v3 smollm3 granite cohere falcon"
        )
        assert set(promised.split()) <= KNOWN_MODEL_TYPES

    def test_gpt_neox_20b_has_its_count_by_formula_too(self) -> None:
        row = next(row for row in ROWS if row["id"] == "EleutherAI/gpt-neox-20b")
        assert shape_of({**row["config"], "hidden_act": "gelu"}, id="x").params == row["params"]


class TestLayers:
    def test_equal_layers_are_the_same_object(self) -> None:
        assert len({id(layer) for layer in load_model("Llama-3.1-8B").layers}) == 1
        assert len({id(layer) for layer in load_model("gemma-3-4b-it").layers}) == 2

    def test_gemma_3_sees_everything_in_every_sixth_layer(self) -> None:
        windows = [layer.attention.sliding_window for layer in load_model("google/gemma-3-4b-it").layers]
        assert windows[:6] == [1024] * 5 + [None]
        assert windows.count(None) == 5

    def test_smollm3_leaves_rotary_positions_out_of_every_fourth_layer(self) -> None:
        assert [layer.attention.rotary for layer in load_model("SmolLM3-3B").layers[:8]] == [
            True,
            True,
            True,
            False,
        ] * 2

    def test_a_qwen2_window_needs_use_sliding_window(self) -> None:
        config = {**catalogue_config("Qwen/Qwen2.5-7B"), "sliding_window": 4096, "max_window_layers": 20}
        assert {layer.attention.sliding_window for layer in shape_of(config, id="x").layers} == {None}
        config["use_sliding_window"] = True
        assert [layer.attention.sliding_window for layer in shape_of(config, id="x").layers] == [None] * 20 + [4096] * 8

    def test_the_layer_types_of_a_config_win_over_its_familys_rule(self) -> None:
        config = {
            **LLAMA,
            "model_type": "gemma3_text",
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 8,
        }
        assert [layer.attention.sliding_window for layer in shape_of(config, id="x").layers] == [None, 8]

    def test_deepseek_v3_is_dense_in_its_first_three_layers(self) -> None:
        layers = load_model("DeepSeek-V3").layers
        assert [isinstance(layer.feed_forward, Mlp) for layer in layers[:4]] == [True, True, True, False]
        assert layers[0].attention.kv_latent_dim == 576
        assert (layers[0].attention.head_dim, layers[0].attention.v_head_dim) == (192, 128)

    def test_phi3_projects_queries_keys_and_values_at_once(self) -> None:
        layer = load_model("phi-4").layers[0]
        assert [linear.name for linear in layer.linears] == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]

    def test_falcon_7b_has_one_key_head_and_falcon_40b_eight(self) -> None:
        assert load_model("falcon-7b").layers[0].attention.num_key_value_heads == 1
        assert load_model("falcon-40b").layers[0].attention.num_key_value_heads == 8
        assert [len(load_model(name).layers[0].norms) for name in ("falcon-7b", "falcon-40b")] == [1, 2]

    def test_opt_350m_projects_its_narrower_embedding_in_and_out(self) -> None:
        shape = load_model("facebook/opt-350m")
        assert shape.other_params == 2 * 512 * 1024
        assert shape.final_norm.params == 0

    def test_gpt2_drops_a_tenth_everywhere_while_it_trains(self) -> None:
        shape = load_model("gpt2")
        assert (shape.embed_dropout, shape.layers[0].residual_dropout, shape.layers[0].attention.dropout) == (
            0.1,
            0.1,
            0.1,
        )

    def test_olmo_2_normalises_whole_projections_and_qwen3_heads(self) -> None:
        assert load_model("OLMo-2-1124-7B").layers[0].attention.qk_norm == "full"
        assert load_model("Qwen3-8B").layers[0].attention.qk_norm == "head"


# One model of each family; four layers of each show every kind of layer.
REFERENCES = [
    "meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "mistralai/Mistral-7B-v0.1", "google/gemma-2b",
    "google/gemma-2-2b", "google/gemma-3-270m", "google/gemma-3-4b-pt", "microsoft/phi-4", "openai-community/gpt2",
    "EleutherAI/pythia-70m", "facebook/opt-125m", "facebook/opt-350m", "allenai/OLMo-2-0425-1B",
    "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen1.5-MoE-A2.7B", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b",
    "deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V3", "HuggingFaceTB/SmolLM3-3B",
    "ibm-granite/granite-3.1-2b-instruct", "CohereForAI/c4ai-command-r-v01", "CohereForAI/c4ai-command-r-plus",
    "CohereForAI/c4ai-command-r7b-12-2024", "tiiuae/falcon-7b", "tiiuae/falcon-40b", "microsoft/phi-2",
    "allenai/OLMo-1B-hf", "allenai/Olmo-3-1025-7B", "allenai/OLMoE-1B-7B-0924", "bigcode/starcoder2-3b",
    "stabilityai/stablelm-3b-4e1t", "zai-org/glm-4-9b-chat-hf", "zai-org/GLM-4-9B-0414", "LGAI-EXAONE/EXAONE-4.0-1.2B",
    "LGAI-EXAONE/EXAONE-4.0-32B", "ByteDance-Seed/Seed-OSS-36B-Base", "baidu/ERNIE-4.5-0.3B-PT", "zai-org/GLM-4.5-Air",
    "zai-org/GLM-5",
]  # fmt: skip
SHORT = 4  # layers
NEWER = {"exaone"}  # types with formulas that transformers 5.24 has and 5.23 has not


class TestAgainstTransformers:
    @pytest.mark.parametrize("model_id", REFERENCES)
    def test_a_shape_is_what_transformers_builds(self, model_id: str) -> None:
        torch = pytest.importorskip("torch")
        pytest.importorskip("transformers")
        config = shortened(catalogue_config(model_id))
        shape, model = shape_of(config, id=model_id), built(config)
        assert shape.params == sum(parameter.numel() for parameter in model.parameters())
        text = model.config.get_text_config()
        layer_types = getattr(text, "layer_types", None)
        for index, layer in enumerate(shape.layers):
            prefix = layer_prefix(model, index)
            found = {
                (name.rsplit(".", 1)[-1], module.weight.numel(), module.bias is not None)
                for name, module in model.named_modules()
                if name.startswith(prefix)
                and (isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D")
                and not name.endswith("_gate")
            }
            assert {(linear.name, linear.weight_params, linear.bias) for linear in layer.linears} == found
            if layer_types:
                assert (layer.attention.sliding_window is not None) is (layer_types[index] == "sliding_attention")

    @pytest.mark.parametrize("model_type", sorted(name for name, row in ARCHITECTURES.items() if row.defaults))
    def test_an_absent_key_means_what_transformers_means_by_it(self, model_type: str) -> None:
        transformers = pytest.importorskip("transformers")
        if model_type in NEWER:
            pytest.skip("a later release of transformers has it")
        known = transformers.CONFIG_MAPPING[model_type]
        for key, value in ARCHITECTURES[model_type].defaults.items():
            if hasattr(known, key):
                assert (getattr(known, key) or None) == (value or None), key

    def test_transformers_has_a_sequence_classifier_of_every_type_but_these(self) -> None:
        auto = pytest.importorskip("transformers.models.auto.modeling_auto")
        types = {row.model_type for row in model_rows()}
        without = {name for name in types if not architecture_of(name).classifier}
        assert types - set(auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES) == without

    def test_the_catalogues_families_are_all_compared(self) -> None:
        compared = {catalogue_config(model_id)["model_type"] for model_id in REFERENCES}
        assert compared | NEWER == KNOWN_MODEL_TYPES

    def test_exaone_3_5_is_llama_under_other_names(self) -> None:
        """Sizes of LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct, whose model card counts 7,818,448,896 parameters."""
        sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "vocab_size": 102400}
        config = {**sizes, "model_type": "exaone", "num_layers": 32, "activation_function": "silu"}
        shape = shape_of(config, id="exaone")
        assert shape.params == 7_818_448_896
        assert (shape.max_position_embeddings, shape.num_layers, shape.tied) == (4096, 32, False)
        llama = shape_of(
            {**sizes, "model_type": "llama", "num_hidden_layers": 32, "num_key_value_heads": 8}, id="llama"
        )
        assert shape.layers == llama.layers


def shortened(config: dict) -> dict:
    """The config with four layers and its other sizes unchanged."""
    config = json.loads(json.dumps(config))
    inner = config.get("text_config", config)
    inner["n_layer" if "n_layer" in inner else "num_hidden_layers"] = SHORT
    if "layer_types" in inner:
        inner["layer_types"] = inner["layer_types"][:SHORT]
    return config


def built(config: dict):
    import torch
    import transformers

    known = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(
        {key: value for key, value in config.items() if key != "model_type"}
    )
    auto = transformers.AutoModelForImageTextToText if "vision_config" in config else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(known)


def layer_prefix(model, index: int) -> str:
    """The module name of decoder layer `index`."""
    layers = (
        name
        for name, module in model.named_modules()
        if type(module).__name__ == "ModuleList" and len(module) == SHORT and "vision" not in name
    )
    return f"{next(layers)}.{index}."


class TestNames:
    @pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B", "qwen/qwen2.5-7b", "Qwen2.5-7B", "QWEN2.5-7B"])
    def test_case_and_organisation_do_not_matter(self, name: str) -> None:
        shape = load_model(name)
        assert shape.id == "Qwen/Qwen2.5-7B"
        assert shape.quantization == "none"

    def test_an_alias_keeps_its_own_name(self) -> None:
        assert load_model("qwen2.5-7b-instruct").id == "Qwen/Qwen2.5-7B-Instruct"

    @pytest.mark.parametrize(
        ("name", "repository"),
        [
            ("Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
            ("meta-llama/llama-3-8b", "meta-llama/Meta-Llama-3-8B"),
            ("TinyLlama-1.1B", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
            ("Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4"),
        ],
    )
    def test_a_name_that_no_repository_has_becomes_one_of_the_hub(self, name: str, repository: str) -> None:
        assert load_model(name).id == repository

    def test_every_name_of_the_catalogue_becomes_one_with_an_organisation(self) -> None:
        names = [name for row in model_rows() for name in (row.id, *row.aliases) if name not in NO_FORMULA]
        assert [name for name in names if "/" not in load_model(name).id] == []

    def test_every_alias_finds_a_model_with_its_rows_count(self) -> None:
        counts = {row.id: row.params for row in model_rows()}
        for row in model_rows():
            for alias in {*row.aliases} - NO_FORMULA:
                assert load_model(alias).params in (row.params, counts.get(alias)), alias

    @pytest.mark.parametrize(
        ("name", "quantization", "group_size"),
        [
            ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "gptq", 128),
            ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "gptq-int8", 128),
            ("Qwen/Qwen2.5-7B-Instruct-AWQ", "awq", 128),
            ("unsloth/Qwen2.5-7B-Instruct-bnb-4bit", "nf4", 64),
            ("unsloth/Qwen2.5-7B-Instruct-unsloth-bnb-4bit", "nf4", 64),
            ("Qwen/Qwen3-8B-FP8", "fp8", 128),
            ("TheBloke/Mistral-7B-Instruct-v0.2-GPTQ", "gptq", 128),
        ],
    )
    def test_a_quantized_name_is_its_original_quantized(self, name: str, quantization: str, group_size: int) -> None:
        shape = load_model(name)
        assert (shape.id, shape.quantization, shape.quantization_group_size) == (name, quantization, group_size)
        assert "taken from the name" in shape.notes[0]

    @pytest.mark.parametrize(
        ("name", "width", "params"),
        [
            # 80 layers of 3 x 8192 x 128 weights more than those of Qwen2.5-72B
            ("Qwen2.5-72B-Instruct-AWQ", 29696, 72_706_203_648 + 251_658_240),
            ("Qwen/Qwen1.5-14B-Chat-GPTQ-Int4", 14336, 14_167_290_880 + 40 * 3 * 5120 * 640),
            ("Qwen2.5-72B-Instruct", 29568, 72_706_203_648),
        ],
    )
    def test_mlps_that_were_padded_before_quantization_are_wider(self, name: str, width: int, params: int) -> None:
        shape = load_model(name)
        assert (shape.layers[0].feed_forward.linears[-1].in_features, shape.params) == (width, params)

    def test_gpt_oss_is_published_in_mxfp4(self) -> None:
        assert load_model("gpt-oss-20b").quantization == "mxfp4"
        assert load_model("unsloth/gpt-oss-20b-BF16").quantization == "none"

    @pytest.mark.parametrize(
        ("name", "quantization"),
        [
            ("mistralai/Ministral-3-8B-Instruct-2512", "fp8"), ("mistralai/Ministral-3-8B-Base-2512", "none"),
            ("unsloth/Ministral-3-3B-Instruct-2512", "none"), ("Kimi-K2-Instruct", "fp8"), ("MiniMax-M2.5", "fp8"),
            ("DeepSeek-V3.2", "fp8"), ("DeepSeek-V4-Flash", "fp8"), ("zai-org/GLM-5", "none"),
        ],
    )  # fmt: skip
    def test_official_weights_are_quantized_as_their_config_says(self, name: str, quantization: str) -> None:
        assert load_model(name).quantization == quantization

    def test_official_weights_without_a_formula_are_refused(self) -> None:
        with pytest.raises(InputError, match="Kimi-K2-Thinking is quantized with compressed-tensors, which has no"):
            load_model("Kimi-K2-Thinking")

    def test_a_family_without_its_marks_finds_its_models(self) -> None:
        with pytest.raises(UnknownName, match=r"Did you mean meta-llama/Llama-3-8B or meta-llama/Llama-3\.1-8B"):
            load_model("llama3")
        with pytest.raises(UnknownName, match="Did you mean google/gemma-3-27b"):
            load_model("gemma3-27b")

    @pytest.mark.parametrize(
        ("name", "model"), [("glm-4-9b", "THUDM/glm-4-9b-hf"), ("Llama-2-7b", "meta-llama/Llama-2-7b-hf")]
    )
    def test_a_name_without_the_ending_of_a_conversion_is_that_of_the_conversion(self, name: str, model: str) -> None:
        assert load_model(name).id == model

    def test_an_unknown_name_is_answered_with_the_nearest(self) -> None:
        with pytest.raises(
            UnknownName, match=r"^Unknown model 'Qwen2\.5-8B'\. Did you mean Qwen/Qwen2\.5-7B or .*--model \./folder\.$"
        ):
            load_model("Qwen2.5-8B")

    def test_the_names_that_an_unknown_name_begins_come_first(self) -> None:
        with pytest.raises(UnknownName, match=r"Did you mean Qwen/Qwen2\.5-VL-7B-Instruct or "):
            load_model("Qwen2.5-VL-7B")

    def test_without_the_hub_an_unknown_name_points_at_the_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("planner.models.catalogue.hub_config", lambda name: "the Hub is not reachable")
        with pytest.raises(UnknownName, match=r"not in the catalogue, and the Hub is not reachable\. Or give the path"):
            load_model("nobody/has-this-model")

    def test_a_config_from_the_hub_is_read_like_a_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("planner.models.catalogue.hub_config", lambda name: LLAMA)
        assert load_model("somebody/tiny-llama").known

    def test_the_hub_is_not_asked_when_it_is_switched_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        constants = pytest.importorskip("huggingface_hub.constants")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(UnknownName, match="switched off"):
            load_model("nobody/has-that-model")


class TestConfigs:
    def write(self, folder: Path, config: object) -> str:
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
        return str(folder)

    def test_a_config_that_changes_is_read_again(self, tmp_path: Path) -> None:
        """In one process, such as a notebook. What does not change is one object, by which caches know it."""
        for count in (2, 3):
            (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": count}))
            found = load_model(str(tmp_path))
            assert found.num_layers == count and load_model(str(tmp_path)) is found

    def test_a_folder_and_its_file_are_the_same_model(self, tmp_path: Path) -> None:
        folder = self.write(tmp_path, {**LLAMA, "torch_dtype": "float16"})
        assert load_model(folder).params == load_model(folder + "/config.json").params
        assert load_model(folder).dtype == "float16"

    def test_an_absent_key_has_the_default_of_transformers(self) -> None:
        attention = shape_of(LLAMA, id="x").layers[0].attention
        assert (attention.num_key_value_heads, attention.head_dim) == (4, 16)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ("not json", r"is no JSON: "),
            ("[1, 2]", r"is no JSON object"),
            ({"hidden_size": 64}, r"has no model_type"),
            ({key: value for key, value in LLAMA.items() if key != "hidden_size"}, r"has no 'hidden_size'"),
            ({**LLAMA, "num_hidden_layers": "two"}, r"'num_hidden_layers': 'two', which is not a whole number"),
            ({**LLAMA, "num_attention_heads": 0}, r"'num_attention_heads': 0, which must be positive"),
            (
                {**LLAMA, "quantization_config": {"quant_method": "hqq"}},
                r"quantized with hqq, which has no formula here",
            ),
            ({**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 3}}, r"with gptq to 3 bits"),
        ],
    )
    def test_what_is_no_config_is_refused_in_one_line(self, tmp_path: Path, config: object, message: str) -> None:
        with pytest.raises(InputError, match=message) as refusal:
            load_model(self.write(tmp_path, config))
        assert "\n" not in str(refusal.value)

    @pytest.mark.parametrize("config", [{**LLAMA, "model_type": "never_heard_of"}, {**LLAMA, "hidden_act": "xielu"}])
    def test_an_unknown_architecture_is_refused_with_the_reason(self, config: dict) -> None:
        with pytest.raises(UnknownArchitecture, match=r"never_heard_of|xielu"):
            shape_of(config, id="x")

    def test_a_path_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(InputError, match=r"does not exist"):
            load_model("./no/such/folder")

    @pytest.mark.parametrize(
        ("settings", "quantization", "group_size"),
        [
            ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "gptq", 32),
            ({"quant_method": "gptq", "bits": 8, "group_size": 64}, "gptq-int8", 64),
            ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "awq", 64),
            (
                {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
                "nf4-double",
                64,
            ),
            ({"load_in_4bit": True}, "nf4", 64),
            ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8", 128),
            ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 128),
            ({"quant_method": "fp8"}, "fp8", -1),  # vLLM takes one scale for a tensor
            ({"quant_method": "mxfp4"}, "mxfp4", 32),
        ],
    )
    def test_a_quantization_config_is_understood(self, settings: dict, quantization: str, group_size: int) -> None:
        shape = shape_of({**LLAMA, "quantization_config": settings}, id="x")
        assert (shape.quantization, shape.quantization_group_size) == (quantization, group_size)


def test_mixtral_keeps_its_experts_out_of_its_linears() -> None:
    layer = load_model("Mixtral-8x7B-v0.1").layers[0]
    assert isinstance(layer.feed_forward, Experts)
    assert [linear.name for linear in layer.linears] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert layer.expert_params == 8 * 3 * 4096 * 14336


def test_the_rows_for_people_are_the_rows_of_the_file() -> None:
    rows: tuple[ModelRow, ...] = model_rows()
    assert [row.id for row in rows] == ids(ROWS)


def test_a_shape_is_loaded_once() -> None:
    first: ModelShape = load_model("Qwen2.5-7B")
    assert load_model("Qwen2.5-7B") is first


@pytest.mark.skipif(not FACTS.is_dir(), reason="the collected facts are not beside this checkout")
def test_the_catalogue_is_what_the_script_makes_of_the_facts(tmp_path: Path) -> None:
    program = "import sys; sys.path.insert(0, 'scripts'); import build_catalogue as b; from pathlib import Path; "
    program += f"b.DATA = Path({str(tmp_path)!r}); b.main()"
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True)
    for name in ("models.jsonl", "gpus.jsonl"):
        assert (tmp_path / name).read_bytes() == (REPOSITORY / "planner" / "data" / name).read_bytes()


class TestShippedLayers:
    """Models without formulas, planned with the layers of `planner/data/layers/`."""

    @pytest.mark.parametrize("name", [row.id for row in model_rows() if not load_model(row.id).known])
    def test_a_model_without_formulas_has_all_its_parameters_in_shipped_layers(self, name: str) -> None:
        model = complete_shipped(load_model(name), lambda _: MeasuringRefused(reason="not shipped"))
        assert model is not None
        outside = model.embed_params + model.lm_head_params + model.vision_params
        assert sum(layer.params for layer in model.layers) + outside <= model.params == load_model(name).params

    @pytest.mark.parametrize("method", ["sft", "dpo", "reward"])
    def test_a_model_without_formulas_is_planned_without_torch(self, method: str, tmp_path: Path) -> None:
        """Run in a process that can import neither torch nor probes."""
        blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'trl', 'peft', 'probes')))"
        command = f"{blocked}; from planner.commands.main import main; main()"
        arguments = ["--model", "Qwen3.5-4B", "--gpus", "1xA100-80G", "--method", method, "--json", "--quiet"]
        ended = subprocess.run(
            [sys.executable, "-c", command, *arguments],
            capture_output=True, text=True, cwd=REPOSITORY, env={**os.environ, "PLAN_CACHE": str(tmp_path)},
            check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        answer = json.loads(ended.stdout)
        assert answer["verdict"] == "fits"
        assert answer["best"]["settings"]["per_device_train_batch_size"] >= 1

    def test_a_damaged_file_of_shipped_layers_is_named_in_one_line(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr("planner.memory.layers.measured_layers.SHIPPED_FOLDER", tmp_path)
        model = load_model("Qwen3.5-4B")
        shipped_path(model).write_bytes(b"no xz file")
        with pytest.raises(InputError, match=r"^\S+\.json\.xz, a file of this package, is damaged: .*\.$"):
            load_shipped(model)


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("Qwen2.5-7B", 131072),
        ("Qwen2.5-7B-Instruct", 32768),
        ("unsloth/Qwen2.5-7B-Instruct", 32768),
        ("Qwen2.5-7B-Instruct-GPTQ-Int4", 32768),
        ("qwen2.5-math-7b", 4096),
        ("Qwen2.5-7B-Instruct-1M", 1010000),
    ],
)
def test_an_alias_has_the_positions_of_its_own_config(name: str, positions: int) -> None:
    assert load_model(name).max_position_embeddings == positions


def test_every_alias_with_positions_of_its_own_is_in_the_catalogue() -> None:
    known = {alias.rsplit("/", 1)[-1] for row in model_rows() for alias in row.aliases}
    assert ALIAS_POSITIONS.keys() <= known
