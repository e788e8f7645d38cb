"""A dry run of many layers from dry runs of a few is the dry run of all of them, to the byte and in the order of all births and deaths."""

from dataclasses import replace
from typing import Any

import pytest

from planner.candidate import Candidate
from planner.catalogue import load_model, model_rows
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
    {"method": "sft", "max_length": 96, "model": "DeepSeek-V2-Lite"},  # a dense layer before those of experts
    {"method": "sft", "max_length": 96, "model": "gpt-oss-20b"},  # every other layer has a window
    {"method": "dpo", "max_length": 96, "model": "gpt2", "tuning": "full"},  # whose config has other names
)
UNUSUAL_LAYERS = {"DeepSeek-V2-Lite": 16, "gpt-oss-20b": 16}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("settings", "ways"), [(CASES[0], "cpu"), *((settings, "cuda") for settings in CASES)], ids=str)
def test_few_layers_tell_what_all_allocate(settings: dict[str, Any], ways: Any) -> None:
    pytest.importorskip("trl")
    from probes.deepened import deepened
    from probes.dryrun import dry_run
    from probes.layers.few_layers import with_layers

    name = settings.get("model", "Qwen2.5-0.5B")
    layers = UNUSUAL_LAYERS.get(name, LAYERS) + 4 * (settings.get("checkpoint_every_n_layers", 1) - 1)  # more have to be traced where more make a period
    model = load_model(name)
    candidate = Candidate(**(BASE | settings | {"model": replace(model, config=with_layers(dict(model.config), list(range(layers))))}))
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
    unlike = {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["sliding_attention", "full_attention"] * 4}
    alone = replace(deep, model=replace(deep.model, config=deep.model.config | unlike))
    for case in (with_layers(deep, 5), with_layers(deep, 2), replace(deep, activation_offloading=True), alone):
        with pytest.raises(NoProfile):
            deepened(case, "cuda")
    assert REPEATED not in traced(with_layers(deep, 5)).substitutions and REPEATED in traced(deep).substitutions


@pytest.mark.parametrize(
    ("kinds", "every", "found"),
    [([7] * 12, 1, (0, 12, 0, 1)), ([7] * 12, 2, (0, 12, 0, 2)), ([1, 1, 1] + [2] * 20, 1, (3, 20, 0, 1)), ([2] * 9 + [1], 1, (0, 9, 1, 1)),
     ([1, 1, 1, 2] * 5 + [1], 1, (0, 21, 0, 4)), ([3, *[1, 2] * 8], 1, (1, 16, 0, 2)), ([3, *[1, 2] * 8], 3, (1, 16, 0, 6))],
)  # fmt: skip
def test_the_pattern_of_layers_that_repeat_between_others(kinds: list[int], every: int, found: tuple[int, ...]) -> None:
    pytest.importorskip("trl")
    from probes.deepened import shortest_pattern

    pattern = shortest_pattern(kinds, every)
    assert (pattern.before, pattern.repeating, pattern.after, pattern.period) == found
    assert pattern.kept(pattern.copies) == list(range(len(kinds)))
    for copies in range(pattern.copies):
        kept = [kinds[index] for index in pattern.kept(copies)]
        assert kept == kinds[: len(kept) - pattern.after] + kinds[len(kinds) - pattern.after :]
        assert kept[len(kept) - pattern.after - 1] == kinds[len(kinds) - pattern.after - 1]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_layers_that_the_formulas_tell_apart_the_configs_tell_apart_too() -> None:
    """A pattern is of what the config says; the layers that were not run are no other ones."""
    pytest.importorskip("trl")
    from probes.layers.few_layers import layer_kinds

    models = {model.model_type: model for model in map(load_model, (row.id for row in model_rows())) if model.known}
    assert models
    for model in models.values():
        for places in layer_kinds(dict(model.config)):
            assert len({model.layers[place] for place in places}) == 1, model.id


def test_layers_of_which_none_repeats_have_no_pattern() -> None:
    pytest.importorskip("trl")
    from probes.deepened import shortest_pattern

    with pytest.raises(NoProfile, match="do not repeat"):
        shortest_pattern([1, 2, 3, 4])


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
