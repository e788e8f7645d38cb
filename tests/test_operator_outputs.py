"""Cached operator outputs equal those of PyTorch's own fake mode."""

from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("trl")

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from planner.candidate import Candidate
from planner.models.catalogue import load_model
from planner.models.from_config import shape_of
from probes.dryrun import operator_outputs
from probes.dryrun.dry_run import dry_run
from probes.dryrun.fake_tensors import SMALL_BYTES, FakeArithmetic, _mode_and_outputs
from probes.dryrun.operator_outputs import SAME_SHAPE_OPERATORS, OperatorOutputs
from probes.layers.few_layers import keep_layers
from probes.step.tracker import Tracker

CASES = (
    {"method": "sft", "max_length": 48, "gradient_accumulation_steps": 2},
    {"method": "sft", "max_length": 48, "tuning": "full", "dtype": "float32", "attn_implementation": "eager"},
    {"method": "grpo", "prompt_length": 24, "max_completion_length": 40, "num_generations": 4, "beta": 0.1},
    {"method": "kto", "max_length": 48, "lora_dropout": 0.1},
    {"method": "sft", "max_length": 48, "quantization": "nf4-double", "optim": "adamw_torch"},
)
NIGHTLY_CASES = (
    {"method": "dpo", "max_length": 48, "gradient_checkpointing": False},
    {"method": "reward", "max_length": 48},
)


def comparable(recipe: Any) -> Any:
    """Return a recipe without the strides of dimensions of size 1, which have no effect."""
    if isinstance(recipe, tuple):
        return tuple(map(comparable, recipe))
    return (
        recipe
        if recipe.shape is None
        else replace(
            recipe, stride=tuple(step for step, size in zip(recipe.stride, recipe.shape, strict=True) if size != 1)
        )
    )


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "settings",
    [*CASES, *(pytest.param(case, marks=pytest.mark.nightly) for case in NIGHTLY_CASES)],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_cached_outputs_equal_those_of_the_fake_mode(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    add = OperatorOutputs._add
    compared: set[Any] = set()

    def compare(self: OperatorOutputs, key: Any, func: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
        if func not in SAME_SHAPE_OPERATORS and torch.Tag.pointwise not in func.tags:
            return add(self, key, func, args, kwargs, tensors)
        expected = operator_outputs._recipe_of(self._mode.dispatch(func, (), args, kwargs), tensors)
        result = add(self, key, func, args, kwargs, tensors)
        onto_numbers = func._schema.is_mutable and not isinstance(
            tensors[0], FakeTensor
        )  # `FakeArithmetic` returns the tensor itself
        if expected is not None and not onto_numbers:
            assert comparable(self._recipes[key]) == comparable(expected), key
            compared.add(func)
        return result

    _mode_and_outputs.cache_clear()
    monkeypatch.setattr(OperatorOutputs, "_add", compare)
    try:
        model = shape_of(keep_layers(dict(load_model("Qwen2.5-0.5B").config), [0, 1]), id="two layers")
        dry_run(
            Candidate(
                **({"model": model, "tuning": "lora", "per_device_train_batch_size": 4, "dtype": "bfloat16"} | settings)
            )
        )
    finally:
        _mode_and_outputs.cache_clear()
    assert len(compared) > 15


@pytest.mark.parametrize(
    "reshaped",
    [lambda held: held[:, 1:].reshape(-1), lambda held: held.t().reshape(-1), lambda held: held[:, ::2].flatten()],
)
def test_a_large_real_tensor_that_is_reshaped_keeps_its_data(
    reshaped: Any,
) -> None:
    arithmetic = FakeArithmetic()
    with Tracker(arithmetic=arithmetic.result):
        held = torch.arange(12_000).view(3, 4000)
        assert held.untyped_storage().nbytes() > SMALL_BYTES
        assert reshaped(held).tolist() == reshaped(torch.arange(12_000).view(3, 4000)).tolist()


aten = torch.ops.aten
# Operators that the dry runs above do not call, with arguments from a floating-point, a boolean and an integer tensor.
OTHERS = {
    aten.bitwise_and.Tensor: lambda x, true, at: (true, true),
    aten.bitwise_not.default: lambda x, true, at: (true,),
    aten.bitwise_or.Tensor: lambda x, true, at: (true, true),
    aten.empty_like.default: lambda x, true, at: (x,),
    aten.eq.Scalar: lambda x, true, at: (x, 1),
    aten.native_dropout.default: lambda x, true, at: (x, 0.1, True),
    aten.sub_.Tensor: lambda x, true, at: (x, x),
    aten.where.ScalarOther: lambda x, true, at: (true, x, 0.0),
}


@pytest.mark.parametrize("func", OTHERS, ids=str)
def test_cached_outputs_of_operators_that_no_dry_run_calls_equal_those_of_the_fake_mode(func: Any) -> None:
    """Checked for several shapes, one with a dimension of size 1, and for tensors that are not contiguous."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    outputs = OperatorOutputs(mode)
    for shape, stride in (((3, 8), (8, 1)), ((5, 7), (7, 1)), ((1, 7), (7, 1)), ((4, 6), (1, 4))):
        tensors = [outputs.empty(shape, stride, dtype) for dtype in (torch.bfloat16, torch.bool, torch.int64)]
        for _ in range(2):
            cached, expected = (
                outputs.output(func, OTHERS[func](*tensors), {}),
                mode.dispatch(func, (), OTHERS[func](*tensors), {}),
            )
            assert shapes_of(cached) == shapes_of(expected)


def shapes_of(result: Any) -> list[Any]:
    each = result if isinstance(result, tuple) else (result,)
    return [
        (
            tensor.dtype,
            tuple(tensor.shape),
            comparable(operator_outputs.TensorRecipe(tensor.dtype, tuple(tensor.shape), tensor.stride())).stride,
        )
        for tensor in each
    ]
