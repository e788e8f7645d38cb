"""Layers that nobody wrote a formula for: measured on fake tensors, held against the formulas of a family that has them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("trl")

from planner.architectures import Counts, shape_of
from planner.candidate import Candidate
from planner.errors import NotMeasured
from planner.memory.activations import LayerMemory, Peaks, layer_memory
from planner.memory.kv_cache import kv_cache_bytes
from planner.memory.stack import StackMemory, stack_memory, stack_recipe
from planner.model import ModelShape
from probes.coefficients import measured
from probes.few_layers import few_layers, layer_kinds

LLAMA: dict[str, object] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip
GEMMA: dict[str, object] = {**LLAMA, "model_type": "gemma3_text", "head_dim": 64, "num_hidden_layers": 13, "sliding_window": 128, "sliding_window_pattern": 6}
HYBRID: dict[str, object] = {
    **LLAMA, "model_type": "lfm2", "layer_types": ["conv", "conv", "conv", "full_attention"], "block_auto_adjust_ff_dim": False,
}  # fmt: skip
SCALARS = 64  # bytes: numbers such as the mask's minus infinity, which formulas leave out
SIZES = ((2, 512), (4, 1024), (3, 256), (8, 2048))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLAN_CACHE", str(tmp_path))


def stack(model: ModelShape, **settings: object) -> StackMemory:
    candidate = Candidate(model=model, method="sft", tuning="lora", dtype="bfloat16", per_device_train_batch_size=4, **settings)  # type: ignore[arg-type]
    return stack_memory(model, stack_recipe(candidate, True), False, 0)


def bytes_at(peaks: Peaks) -> list[int]:
    return [peaks.at(rows * length, rows * length**2)[0] for rows, length in SIZES]


@pytest.mark.parametrize("padded", [True, False])
def test_a_measured_layer_needs_what_its_formulas_say(padded: bool) -> None:
    model = shape_of(LLAMA, id="llama")
    found, expected = stack(measured(replace(model, layers=()), nullcontext), padded=padded), stack(model, padded=padded)
    assert found.saved.total == expected.saved.total
    assert bytes_at(found.forward) == pytest.approx(bytes_at(expected.forward), abs=SCALARS)
    assert bytes_at(found.backward) == pytest.approx(bytes_at(expected.backward), abs=SCALARS)


def test_a_measured_model_has_the_parameters_that_its_formulas_count() -> None:
    model = shape_of(LLAMA, id="llama")
    layer = measured(replace(model, layers=()), nullcontext).layers[0]
    assert layer.params == model.layers[0].params
    assert [linear.name for linear in layer.linears] == [linear.name for linear in model.layers[0].linears]


def test_a_cut_model_keeps_two_layers_of_each_kind() -> None:
    assert layer_kinds(GEMMA) == ((0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12), (5, 11))
    assert few_layers(shape_of(GEMMA, id="gemma")).config["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]


def test_a_gradient_is_added_to_the_one_that_exists() -> None:
    model = shape_of(LLAMA, id="llama")
    found = measured(replace(model, layers=()), nullcontext)
    candidate = Candidate(model=model, method="sft", per_device_train_batch_size=4)
    recipe = stack_recipe(candidate, True).recipe
    with_gradients, expected = layer_memory(found.layers[0], recipe, True), layer_memory(model.layers[0], recipe, True)
    assert bytes_at(with_gradients.backward) == pytest.approx(bytes_at(expected.backward), abs=SCALARS)
    assert bytes_at(with_gradients.checkpointed_backward) == pytest.approx(bytes_at(expected.checkpointed_backward), abs=SCALARS)


def test_what_was_measured_is_kept_and_a_broken_file_is_made_anew(tmp_path: Path) -> None:
    times: list[None] = []

    @contextmanager
    def counted() -> Iterator[None]:
        times.append(None)
        yield

    def again() -> LayerMemory:
        model = shape_of(LLAMA, id="llama")
        recipe = stack_recipe(Candidate(model=model, method="sft"), True).recipe
        return layer_memory(measured(replace(model, layers=()), counted).layers[0], recipe, False)

    first = again()
    assert len(times) == 2  # the shapes, then the passes
    assert again() == first
    assert len(times) == 2
    for file in tmp_path.rglob("*.json"):
        file.write_text('{"of_each_kind": [')
    assert again() == first
    assert len(times) == 4


def test_a_model_that_keeps_more_than_keys_and_values_does_not_generate() -> None:
    model = measured(shape_of(HYBRID, id="hybrid", counts=Counts(params=10**6, embed=10**5, lm_head=0)), nullcontext)
    assert [layer.attention.num_key_value_heads for layer in model.layers] == [0, 0, 0, 2]
    with pytest.raises(NotMeasured, match="keep no keys and values"):
        kv_cache_bytes(model, 1, 100, 2)


def test_quantized_layers_are_not_measured() -> None:
    model = measured(replace(shape_of(LLAMA, id="llama"), layers=()), nullcontext)
    with pytest.raises(NotMeasured, match="not measured with quantized weights"):
        stack(model, quantization="nf4")
