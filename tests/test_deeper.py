"""A dry run of many layers from dry runs of a few is the dry run of all of them, to the byte and in the order of all births and deaths."""

from dataclasses import replace
from typing import Any

import pytest

from planner.candidate import Candidate
from planner.catalogue import load_model
from planner.trace.deeper import REPEATED, Repeating, same_step
from planner.trace.profile import NoProfile
from planner.trace.timeline import STAYS, Allocation, Trace

LAYERS = 12
BASE: dict[str, Any] = {"tuning": "lora", "dtype": "bfloat16", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
ROLLOUT = {"prompt_length": 40, "max_completion_length": 60, "num_generations": 4}
CASES: tuple[dict[str, Any], ...] = (
    {"method": "sft", "max_length": 96, "checkpoint_every_n_layers": 2},
    {"method": "sft", "max_length": 96, "tuning": "full", "dtype": "float32", "padded": True, "optim": "adamw_8bit"},
    {"method": "sft", "max_length": 96, "quantization": "nf4", "gradient_checkpointing": False, "optim": "paged_adamw_8bit"},
    {"method": "reward", "max_length": 96, "tuning": "full"},
    {"method": "dpo", "max_length": 96, "gradient_checkpointing": False},
    {"method": "grpo", "beta": 0.1, **ROLLOUT},
    {"method": "rloo", "vllm": "colocate", "tuning": "full", **ROLLOUT},
)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("settings", "ways"), [(CASES[0], "cpu"), *((settings, "cuda") for settings in CASES)], ids=str)
def test_few_layers_tell_what_all_allocate(settings: dict[str, Any], ways: Any) -> None:
    pytest.importorskip("trl")
    from probes.deepened import deepened
    from probes.dryrun import dry_run
    from probes.small_sizes import with_layers

    layers = LAYERS + 4 * (settings.get("checkpoint_every_n_layers", 1) - 1)  # more have to be traced where more make a period
    candidate = with_layers(Candidate(**({"model": load_model("Qwen2.5-0.5B")} | BASE | settings)), layers)
    told, run = deepened(candidate, ways), dry_run(candidate, ways, steps=1)
    assert same_step(told, run)
    assert told.phases == run.phases and told.holdings_at_peak() == run.holdings_at_peak() and told.peak_event == run.peak_event
    assert told.substitutions == (*run.substitutions, REPEATED)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_layers_that_are_not_alike_or_few_are_all_run() -> None:
    pytest.importorskip("trl")
    from probes.deepened import deepened
    from probes.simulate import traced
    from probes.small_sizes import with_layers

    deep = with_layers(Candidate(**({"model": load_model("Qwen2.5-0.5B"), "method": "sft", "max_length": 48} | BASE)), LAYERS)
    first, second = deep.model.layers[:2]
    unlike = (replace(first, residual_scaled=True), second, *deep.model.layers[2:])
    for case in (with_layers(deep, 5), replace(deep, activation_offloading=True), replace(deep, model=replace(deep.model, layers=unlike))):
        with pytest.raises(NoProfile):
            deepened(case, "cuda")
    assert REPEATED not in traced(with_layers(deep, 5)).substitutions and REPEATED in traced(deep).substitutions


def made(born: int, died: int, size_bytes: int, operator: str) -> Allocation:
    return Allocation(size_bytes=size_bytes, born=born, died=died, phase="forward", component="transients", operator=operator, module="")


def step(layers: int, size_bytes: int = 8) -> Trace:
    """Every layer makes what its backward pass frees, the last layer's first, and what the next layer frees; then a number of all layers'."""
    events: list[tuple[str, str]] = [("born", "input")]
    for layer in range(layers):
        events += [("born", f"saved.{layer}"), ("born", f"stream.{layer}"), ("dies", f"stream.{layer - 1}" if layer else "input")]
    events += [("born", "loss")]
    for layer in reversed(range(layers)):
        events += [("born", f"gradient.{layer}"), ("dies", f"saved.{layer}")]
    events += [("born", "norms"), ("dies", "loss")]
    at = {event: time for time, event in enumerate(events)}
    sizes = {"saved": size_bytes, "norms": 4 * layers}
    births = [(time, name) for (kind, name), time in at.items() if kind == "born"]
    return Trace(
        allocations=tuple(made(born, at.get(("dies", name), STAYS), sizes.get(name.partition(".")[0], 16), name.partition(".")[0]) for born, name in births),
        phase_starts=(),
    )


@pytest.mark.parametrize("layers", [3, 5, 40])
def test_what_dies_in_the_next_layer_or_in_a_mirrored_one_does_so_at_any_depth(layers: int) -> None:
    assert same_step(Repeating(step(2), step(4)).trace(layers - 2), step(layers))


def test_sizes_are_rounded_up_after_they_have_grown() -> None:
    expected = tuple(replace(each, size_bytes=-(-each.size_bytes // 512) * 512) for each in step(200).allocations)
    assert same_step(Repeating(step(2), step(4)).trace(198, 512), replace(step(200), allocations=expected))


def test_what_grows_in_another_way_is_refused() -> None:
    with pytest.raises(NoProfile):
        Repeating(step(2), step(5))
    with pytest.raises(NoProfile):
        Repeating(step(2), step(4, size_bytes=9)).trace(3)
    assert not same_step(Repeating(step(2), step(4)).trace(3), step(5, size_bytes=9))
