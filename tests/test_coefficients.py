"""Layers without formulas: measured on fake tensors, compared with the formulas of a family that has them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from msgspec.structs import replace

pytest.importorskip("trl")

from planner.candidate import Candidate
from planner.errors import NotMeasured, UnknownArchitecture
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.measurements.validate import counted_bytes
from planner.memory.activations import NEW, StackMemory, stack_memory
from planner.memory.generation import kv_cache_bytes
from planner.memory.layers.measured_layers import (
    SHIPPED_FOLDER,
    ChunkedBytes,
    ChunkedMeasurements,
    LayerMeasurements,
    MeasuringRefused,
    complete_shipped,
    load_shipped,
)
from planner.memory.layers.one_layer import LayerPasses, PassPeak, layer_inference, layer_passes
from planner.memory.parameters.tensors import model_tensors
from planner.memory.stack_recipe import stack_recipe
from planner.models.catalogue import load_model
from planner.models.from_config import NOT_COUNTED, shape_of
from planner.models.shape import ModelShape
from planner.planning import plan
from planner.units import GIB
from probes.layers import store
from probes.layers.coefficients import (
    _fit_moments,
    complete_by_measuring,
    measure_layers,
    padded_rows,
    read_shapes,
)
from probes.layers.few_layers import few_layers, keep_layers, layer_kinds
from probes.layers.passes import layer_harness
from probes.layers.store import source_hash

LLAMA: dict[str, object] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip
GEMMA: dict[str, object] = {
    **LLAMA,
    "model_type": "gemma3_text",
    "head_dim": 64,
    "num_hidden_layers": 13,
    "sliding_window": 128,
    "sliding_window_pattern": 6,
}
HYBRID: dict[str, object] = {
    **LLAMA, "model_type": "lfm2", "layer_types": ["conv", "conv", "conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
}  # fmt: skip
SIZES_OF_ALL: dict[str, object] = {"hidden_size": 256, "vocab_size": 1000}
ATTENDING: dict[str, object] = {
    **SIZES_OF_ALL,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
}
# Tiny models of types without formulas: one mixes attention with a state space, one with linear attention and
# experts, one has a norm behind its embedding, one a tower for images.
BAMBA = {
    **ATTENDING,
    "model_type": "bamba",
    "attn_layer_indices": [3],
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
}
NEXT = {
    **ATTENDING, "model_type": "qwen3_next", "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
BLOOM = {**SIZES_OF_ALL, "model_type": "bloom", "n_layer": 4, "n_head": 4}
VISION = {
    "model_type": "qwen2_5_vl",
    "text_config": {**ATTENDING, "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]}},
    "vision_config": {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 256},
}  # fmt: skip
SCALARS = 64  # bytes: numbers such as the mask's minus infinity, which formulas leave out
ROUNDED_WITHIN = 0.03  # small tensors, counted in one, are rounded up to 512 bytes each
UNPADDED_WITHIN = 0.001
SIZES = ((2, 512), (4, 1024), (3, 256), (8, 2048))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLAN_CACHE", str(tmp_path))


def stack(model: ModelShape, **settings: object) -> StackMemory:
    candidate = Candidate(
        model=model, method="sft", tuning="lora", dtype="bfloat16", per_device_train_batch_size=4, **settings
    )  # type: ignore[arg-type]
    return stack_memory(model, stack_recipe(candidate, True), NEW, 0)


def bytes_at(peaks: PassPeak) -> list[int]:
    return [peaks.at(rows * length, rows * length**2)[0] for rows, length in SIZES]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"padded": True},
        {"padded": False},
        {"quantization": "nf4"},
        pytest.param({"quantization": "nf4", "padded": False}, marks=pytest.mark.nightly),
        {"attn_implementation": "flash_attention_2", "padded": False},
        pytest.param({"use_liger_kernel": True}, marks=pytest.mark.nightly),
        {"use_liger_kernel": True, "quantization": "nf4"},
    ],
    ids=str,
)
def test_a_measured_layer_needs_what_its_formulas_say(settings: dict[str, object]) -> None:
    model = shape_of(LLAMA, id="llama")
    found, expected = (
        stack(complete_by_measuring(replace(model, layers=()), nullcontext), **settings),
        stack(model, **settings),
    )
    assert found.saved.total == expected.saved.total
    assert bytes_at(found.forward) == pytest.approx(bytes_at(expected.forward), abs=SCALARS)
    assert bytes_at(found.backward) == pytest.approx(bytes_at(expected.backward), abs=SCALARS)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_a_measured_layer_has_the_indices_of_unpadded_rows(quantization: str) -> None:
    """The formulas leave out the places of tokens, a few bytes for each (`UNPADDED_WITHIN`)."""
    model = shape_of(LLAMA, id="llama")
    settings = {"attn_implementation": "flash_attention_2", "quantization": quantization}
    found, expected = (
        stack(complete_by_measuring(replace(model, layers=()), nullcontext), **settings),
        stack(model, **settings),
    )
    assert bytes_at(found.forward) == pytest.approx(bytes_at(expected.forward), rel=UNPADDED_WITHIN)
    assert bytes_at(found.backward) == pytest.approx(bytes_at(expected.backward), rel=UNPADDED_WITHIN)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bigscience/bloom-3b", "EleutherAI/gpt-j-6b"])
def test_a_layer_runs_beside_the_probabilities_that_the_layer_before_it_returned(name: str) -> None:
    """The caller holds them until the next layer has run: 8.2 GB in a rollout of Bloom-3B (start 7-24)."""
    model = complete_shipped(load_model(name), lambda recipe: MeasuringRefused(reason="not shipped"))
    assert model is not None
    candidate = Candidate(model=model, method="sft", tuning="full", attn_implementation="eager")
    recipe = replace(stack_recipe(candidate, True).recipe, kernel="eager_masked")
    layer = model.layers[0]
    kept = layer_passes(layer, recipe, True, True).forward
    assert most_per_score(layer_inference(layer, recipe).peak) == most_per_score(kept)


def most_per_score(peak: PassPeak) -> int:
    return max(snapshot.total[1] for snapshot in peak.snapshots)


def test_unmasked_rows_are_measured_without_the_mask_of_a_sliding_window(tmp_path: Path) -> None:
    """sdpa has a mask in rows as long as a window; rows without padding below it have none."""
    config = {**GEMMA, "num_hidden_layers": 2, "sliding_window_pattern": 2}
    model = shape_of(config, id="gemma")
    windowed = complete_by_measuring(replace(model, layers=()), nullcontext)
    recipe = replace(stack_recipe(Candidate(model=model, method="sft", dtype="bfloat16"), True).recipe, kernel="flash")
    sliding, full = (layer_passes(layer, recipe, False, False) for layer in windowed.layers)
    assert windowed.layers[0].attention.sliding_window == 128
    assert sliding.saved.total == full.saved.total


def test_the_moments_of_a_loop_are_fitted_in_rows_of_one_length() -> None:
    """The heaviest moment of short rows can be another than that of long ones, which loop more often."""
    shapes = load_shipped(load_model("Qwen/Qwen3.5-9B"))
    assert shapes is not None
    assert not [result for _, result in shapes.results if isinstance(result, MeasuringRefused)]


# GiB of tensors in the forward pass of Granite 4 H micro, by tokens of a row: `plan dry-run` of trl 1.16 with 4 padded
# rows on an A100-40G, LoRA on 16-bit weights without gradient checkpointing.
GRANITE_FORWARD = {300: 34.15, 256: 23.29, 96: 19.12}
ONE_CHUNK_WITHIN = 0.02  # in rows of one chunk some tensors stay views, which are copied for several chunks


@pytest.mark.parametrize("length", GRANITE_FORWARD)
def test_rows_are_padded_to_chunks(length: int) -> None:
    model = complete_shipped(load_model("ibm-granite/granite-4.0-h-micro"), lambda _: MeasuringRefused(reason=""))
    assert model is not None
    candidate = Candidate(
        model=model, method="sft", tuning="lora", dtype="bfloat16", max_length=length, padded=True,
        per_device_train_batch_size=4, gradient_checkpointing=False,
    )  # fmt: skip
    cluster = parse_cluster("1xA100-40G", None)
    forward = next(phase for phase in estimate(candidate, cluster).gpus[0].phases if phase.name == "forward")
    within = ONE_CHUNK_WITHIN if length <= 256 else UNPADDED_WITHIN
    found = counted_bytes(forward, "allocated", candidate, cluster.gpu)
    assert found == pytest.approx(GRANITE_FORWARD[length] * GIB, rel=within)


def test_a_layer_that_pads_rows_needs_as_much_for_every_token_of_a_chunk() -> None:
    layer = ChunkedBytes((("activations", (10, 0, 7, 100, 640)),))
    sizes = [layer.at(length, -(-length // 64) * 64).total for length in (64, 65, 128)]
    assert sizes == [(10 + 100 + 10, 0, 7), (10 + round((12800 + 640) / 65), 0, 7), (10 + 100 + 5, 0, 7)]


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("chunk", [64, 128, 256])
def test_bytes_of_padded_rows_are_fitted_exactly(chunk: int, several: bool) -> None:
    fit, size = padded_rows(chunk, several), (1000, 3, 5000, 70, 9000 if several else 0)
    measured = [{"activations": sum(a * b for a, b in zip(size, batch.terms, strict=True))} for batch in fit.batches]
    (found,) = _fit_moments(load_model("gpt2"), fit.batches, fit.terms, [[each] for each in measured])  # type: ignore[list-item]
    assert found.total == size


@pytest.mark.slow
def test_a_model_that_pads_rows_is_measured_for_rows_of_any_length(tmp_path: Path) -> None:
    model = from_file(tmp_path, {**BAMBA, "mamba_chunk_size": 64})
    recipe = replace(stack_recipe(Candidate(model=model, method="sft"), True).recipe, row_length=0)
    result = measure_layers(model, recipe)
    assert isinstance(result, ChunkedMeasurements) and result.chunk == 64
    with layer_harness(model, recipe) as harness:
        rows = {length: harness.measure_kinds(2, length, frozenset({0}))[0][0] for length in (96, 300, 512)}
    for length, measured in rows.items():
        per_token, _, constant = result.at(length).without_gradients[0].saved.total
        assert per_token * 2 * length + constant == pytest.approx(sum(measured.saved.values()), rel=ONE_CHUNK_WITHIN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tuning", "dtype"),
    [
        ("full", "float32"),
        ("lora", "bfloat16"),
        pytest.param("full", "bfloat16", marks=pytest.mark.nightly),
        pytest.param("lora", "float32", marks=pytest.mark.nightly),
    ],
)
def test_a_measured_layer_leaves_what_its_formulas_say(tuning: str, dtype: str) -> None:
    """With float32 weights a norm keeps the layer's input itself, so that every layer's output stays."""
    model = shape_of(LLAMA, id="llama")
    candidate = Candidate(model=model, method="sft", tuning=tuning, dtype=dtype, per_device_train_batch_size=4)  # type: ignore[arg-type]
    recipe = replace(stack_recipe(candidate, True).recipe, kernel="efficient")
    found, expected = (
        layer_passes(complete_by_measuring(replace(model, layers=()), nullcontext).layers[0], recipe, False, False),
        layer_passes(model.layers[0], recipe, False, False),
    )
    assert found.saved.total == pytest.approx(expected.saved.total, abs=SCALARS)
    assert bytes_at(found.backward) == pytest.approx(bytes_at(expected.backward), abs=SCALARS)


def from_file(folder: Path, config: dict[str, object]) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return complete_by_measuring(load_model(str(folder)), nullcontext)


SLOW_CONFIGS = [
    # 19, 34 and 9 s
    *(pytest.param(config, marks=(pytest.mark.slow, pytest.mark.nightly)) for config in (NEXT, BAMBA, VISION)),
    pytest.param(BLOOM, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("config", SLOW_CONFIGS, ids=lambda config: str(config["model_type"]))
def test_a_config_of_a_type_without_formulas_is_planned_for(config: dict[str, object], tmp_path: Path) -> None:
    model = from_file(tmp_path, config)
    assert model.params == sum(tensors.params for tensors in model_tensors(model, "lm_head"))
    answer = plan(Job(model=model, method="sft"), parse_cluster("1xA100-40G", None))
    assert answer.verdict == "fits"
    assert {each.candidate.tuning for each in (answer.best, *(other.estimate for other in answer.alternatives))} == {
        "full",
        "lora",
    }


def test_a_published_count_is_found_without_the_catalogue(tmp_path: Path) -> None:
    published = load_model("LiquidAI/LFM2-350M")
    model = from_file(tmp_path, dict(published.config))
    found = (
        model.params,
        model.embed_params,
        model.lm_head_params,
        model.auto_class,
        model.hidden_size,
        model.vocab_size,
    )
    assert found == (
        published.params,
        published.embed_params,
        published.lm_head_params,
        published.auto_class,
        published.hidden_size,
        published.vocab_size,
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {**BAMBA, "model_type": "bamda"},
            r"^\S+ is of model type 'bamda', which transformers \S+ does not know either\. Did you mean bamba",
        ),
        (
            {**BAMBA, "model_type": "t5"},
            r"^\S+ is of model type 't5', of which transformers \S+ has no causal language model\.$",
        ),
        ({**BAMBA, "model_type": "bert"}, r"^\S+ \(bert\) cannot be built here: it is no decoder"),
        (
            {**ATTENDING, "model_type": "jamba"},
            r"^\S+ \(jamba\): layer 1 is unlike layer 0, and its config does not show why\.$",
        ),
    ],
)
def test_what_is_no_language_model_that_transformers_knows_is_refused(
    config: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnknownArchitecture, match=message) as refusal:
        from_file(tmp_path, config)
    assert "\n" not in str(refusal.value)


def test_a_model_that_nobody_counted_is_refused_where_nothing_measures_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BAMBA), encoding="utf-8")
    with pytest.raises(
        UnknownArchitecture, match=r"\(bamba\) are not known by formula\. The extra training measures such layers"
    ):
        Job(model=load_model(str(tmp_path)), method="sft")


def test_a_measured_model_has_the_parameters_that_its_formulas_count() -> None:
    model = shape_of(LLAMA, id="llama")
    layer = complete_by_measuring(replace(model, layers=()), nullcontext).layers[0]
    assert layer.params == model.layers[0].params
    assert [linear.name for linear in layer.linears] == [linear.name for linear in model.layers[0].linears]


def test_a_cut_model_keeps_two_layers_of_each_kind() -> None:
    assert layer_kinds(GEMMA) == ((0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12), (5, 11))
    assert few_layers(shape_of(GEMMA, id="gemma")).config["layer_types"] == [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "full_attention",
    ]


def test_a_cut_model_keeps_the_settings_of_single_layers_under_their_new_places() -> None:
    """As Transformers saves them: keys are text, with leading zeros."""
    own = {"05": {"head_dim": 512}, "11": {"head_dim": 512}}
    assert keep_layers({**GEMMA, "per_layer_config": own}, [0, 1, 5, 11])["per_layer_config"] == {
        "2": {"head_dim": 512},
        "3": {"head_dim": 512},
    }


def test_a_gradient_is_added_to_the_one_that_exists() -> None:
    model = shape_of(LLAMA, id="llama")
    found = complete_by_measuring(replace(model, layers=()), nullcontext)
    candidate = Candidate(model=model, method="sft", per_device_train_batch_size=4)
    recipe = stack_recipe(candidate, True).recipe
    for checkpointed in (False, True):
        with_gradients, expected = (
            layer_passes(layer, recipe, True, checkpointed) for layer in (found.layers[0], model.layers[0])
        )
        assert bytes_at(with_gradients.backward) == pytest.approx(bytes_at(expected.backward), abs=SCALARS)


def test_what_was_measured_is_kept_and_a_broken_file_is_made_anew(tmp_path: Path) -> None:
    times: list[None] = []

    @contextmanager
    def counted() -> Iterator[None]:
        times.append(None)
        yield

    def again() -> LayerPasses:
        model = shape_of(LLAMA, id="llama")
        recipe = stack_recipe(Candidate(model=model, method="sft"), True).recipe
        return layer_passes(complete_by_measuring(replace(model, layers=()), counted).layers[0], recipe, False, False)

    first = again()
    assert len(times) == 2  # the shapes, then the passes
    assert again() == first
    assert len(times) == 2
    for file in tmp_path.rglob("*.json"):
        file.write_text('{"of_each_kind": [')
    assert again() == first
    assert len(times) == 4


def test_a_model_that_keeps_more_than_keys_and_values_does_not_generate() -> None:
    model = complete_by_measuring(shape_of(HYBRID, id="hybrid", counts=NOT_COUNTED), nullcontext)
    assert [layer.attention.num_key_value_heads for layer in model.layers] == [0, 0, 0, 2]
    with pytest.raises(NotMeasured, match="keep no keys and values"):
        kv_cache_bytes(model, 1, 100, 2)


def test_layers_of_a_quantized_checkpoint_are_not_measured() -> None:
    model = complete_by_measuring(replace(shape_of(LLAMA, id="llama"), layers=()), nullcontext)
    with pytest.raises(NotMeasured, match="not measured with quantized checkpoints"):
        stack(model, quantization="gptq")


def test_the_shipped_layers_were_measured_by_the_code_of_this_tree() -> None:
    """If it fails, run `python -m scripts.measure_layers`, which says when its --spot-check is enough."""
    assert json.loads((SHIPPED_FOLDER / "release.json").read_text(encoding="utf-8"))["source_hash"] == source_hash()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EleutherAI/gpt-neo-125m", "bigscience/bloom-560m", "LiquidAI/LFM2-350M"])
def test_shipped_layers_are_measured_again_with_the_same_result(name: str) -> None:
    model = load_model(name)
    shipped = load_shipped(model)
    assert shipped is not None
    assert read_shapes(model) == shipped.shapes
    for recipe, result in (shipped.results[0], shipped.results[-1]):
        assert isinstance(result, LayerMeasurements)
        assert measure_layers(model, recipe) == result


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"[" * 100_000, b'{"x": ' + b"[" * 100_000, b"\xff\x00"])
def test_a_damaged_file_of_measured_layers_is_as_none(content, tmp_path, monkeypatch):
    monkeypatch.setenv("PLAN_CACHE", str(tmp_path))
    model = load_model("Qwen2.5-0.5B")
    monkeypatch.setattr(store, "_path", lambda *_: tmp_path / "layers" / "own.json")
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "own.json").write_bytes(content)
    assert store.load_shapes(model) is None


def test_layers_that_cannot_be_kept_leave_no_file(tmp_path):
    (tmp_path / "own.json").mkdir()
    store._write(tmp_path / "own.json", b"{}")
    assert [path.name for path in tmp_path.iterdir()] == ["own.json"]
