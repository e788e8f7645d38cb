"""A profile made of small traces gives the peak of sizes and depths that were never traced, to the byte."""

import random
import zlib
from dataclasses import replace
from pathlib import Path
from time import process_time

import pytest

from planner.candidate import Candidate
from planner.catalogue import load_model, parse_cluster
from planner.estimate import estimate
from planner.job import Job
from planner.model import ModelShape
from planner.plan import plan
from planner.report.table import plan_table
from planner.trace import store
from planner.trace.compose import OUTSIDE, STATES, without_states
from planner.trace.decide import decided
from planner.trace.fit import fit_profile
from planner.trace.profile import Expression, Moment, NoProfile, Profile, constant, profile_from_json, profile_to_json
from planner.trace.recipe import key_of, recipe_of
from planner.trace.samples import Ambiguous, Sample, Samples
from planner.trace.sizes import sizes_of
from planner.trace.store import load_profile, save_profile
from planner.trace.timeline import STAYS, Allocation, Trace

BLOCK_BYTES = 512
SIZES = ((7, 203), (3, 325), (5, 141))


def step(rows: int, tokens: int, layers: int, odd: int = 0) -> Trace:
    """A toy step: a weight and a saved activation a layer, a mask, and a gradient a layer while the activations go."""
    events: list[tuple[int, int]] = []
    births: list[tuple[int, str, str]] = []

    def born(size_bytes: int, phase: str, component: str) -> int:
        births.append((size_bytes, phase, component))
        events.append((len(births) - 1, 1))
        return len(births) - 1

    for _ in range(layers):
        born(4096, "load", "weights")
    born(rows * tokens * tokens + odd * tokens**3, "forward", "transients")
    saved = [born(2 * 64 * rows * tokens, "forward", "activations") for _ in range(layers)]
    logits = born(4 * 100 * rows * (tokens - 1), "loss", "loss")
    events.append((logits, -1))
    for activation in reversed(saved):
        moment = born(4 * 64 * rows * tokens, "backward", "transients")
        born(8192, "backward", "gradients")
        events += [(moment, -1), (activation, -1)]
    born(4 * layers, "optimizer_step", "transients")
    times: dict[int, list[int]] = {index: [0, STAYS] for index in range(len(births))}
    for time, (index, sign) in enumerate(events):
        times[index][0 if sign > 0 else 1] = time
    return Trace(
        allocations=tuple(
            Allocation(size_bytes=size, born=times[index][0], died=times[index][1], phase=phase, component=component, operator=component, module="")  # type: ignore[arg-type]
            for index, (size, phase, component) in enumerate(births)
        ),
        phase_starts=((0, "load"),),
    )


def alike(rows: int, tokens: int, layers: int, before: str) -> Sample:
    """Of a layer two allocations of one operator, of rows and of tokens; what is born before the second is `before`."""
    operators = [name for _ in range(layers) for name in ("mm", "add", before, "add")]
    made = (
        Allocation(size_bytes={"add": 4 * (rows, tokens)[index // 2 % 2]}.get(name, 512), born=index, died=STAYS, phase="forward", component="activations",
                   operator=name, module="m")
        for index, name in enumerate(operators)
    )  # fmt: skip
    return Sample(values=(("rows", rows), ("tokens", tokens)), layers=layers, trace=Trace(allocations=tuple(made), phase_starts=()))


def test_equal_sizes_of_one_operator_are_told_apart_by_what_is_born_around_them() -> None:
    samples = Samples(alike=tuple(alike(*size, 2, "cat") for size in ((8, 8), (3, 325), (5, 999))), deeper=alike(8, 8, 3, "cat"))
    profile = fit_profile(samples, (), 1)
    assert profile.peak_bytes({"rows": 11, "tokens": 700}, 6) == 6 * (4 * 11 + 4 * 700 + 2 * 512)


def test_equal_sizes_that_nothing_tells_apart_make_no_profile() -> None:
    samples = Samples(alike=tuple(alike(*size, 4, "mm") for size in ((8, 8), (3, 325), (5, 999))), deeper=alike(8, 8, 5, "mm"))
    with pytest.raises(Ambiguous, match=r"^Two sizes cannot be told apart: add of 32 bytes\.$"):
        fit_profile(samples, (), 1)


def sample(rows: int, tokens: int, layers: int, odd: int = 0) -> Sample:
    return Sample(values=(("rows", rows), ("tokens", tokens)), layers=layers, trace=step(rows, tokens, layers, odd))


def toy(odd: int = 0) -> Profile:
    samples = Samples(alike=tuple(sample(*size, 3, odd) for size in SIZES), deeper=sample(7, 203, 4, odd))
    return fit_profile(samples, (sample(4, 250, 7, odd),), BLOCK_BYTES)


def rounded(trace: Trace) -> Trace:
    blocks = tuple(replace(allocation, size_bytes=-(-allocation.size_bytes // BLOCK_BYTES) * BLOCK_BYTES) for allocation in trace.allocations)
    return replace(trace, allocations=blocks)


@pytest.mark.parametrize(("rows", "tokens", "layers"), [(2, 77, 3), (16, 300, 30), (3, 1001, 80), (64, 9, 12)])
def test_a_profile_peaks_where_a_trace_of_any_size_and_depth_does(rows: int, tokens: int, layers: int) -> None:
    trace = rounded(step(rows, tokens, layers))
    values = {"rows": rows, "tokens": tokens}
    assert toy().peak_bytes(values, layers) == trace.peak_bytes
    assert toy().phases(values, layers) == trace.phases


def test_moments_that_never_have_the_most_are_dropped() -> None:
    assert len(toy().moments) < len(step(7, 203, 3).events) // 2


def test_a_size_that_is_no_sum_of_terms_makes_no_profile() -> None:
    with pytest.raises(NoProfile, match=r"^Sizes \(.*\) are no product of terms nor the sum of two\. They are of transients in no module, forward\.$"):
        toy(odd=1)


def test_another_order_at_another_size_makes_no_profile() -> None:
    shorter = Sample(values=(("rows", 3), ("tokens", 325)), layers=3, trace=step(3, 325, 2))
    with pytest.raises(NoProfile, match=r"^The order of allocations differs between sizes, first before .* in no module, forward\.$"):
        fit_profile(Samples(alike=(sample(7, 203, 3), shorter), deeper=sample(7, 203, 4)), (), BLOCK_BYTES)


def test_a_further_micro_step_holds_its_batch_and_no_more() -> None:
    """The batches of a step are there before its first forward pass, and the next step's first."""

    def accumulated(rows: int, tokens: int, layers: int, steps: int) -> Sample:
        held = range(steps + 1)
        batches = tuple(
            Allocation(
                size_bytes=8 * rows * tokens, born=index, died=STAYS, phase="forward", component="activations", operator="batch", module=""
            ) for index in held
        )  # fmt: skip
        stepped = tuple(
            replace(allocation, born=allocation.born + len(held), died=min(allocation.died + len(held), STAYS))
            for allocation in step(rows, tokens, layers).allocations
        )
        values = (("rows", rows), ("tokens", tokens), ("accumulation", steps))
        return Sample(values=values, layers=layers, trace=Trace(allocations=batches + stepped, phase_starts=()))

    alike = tuple(accumulated(*size, 3, 2) for size in SIZES[:2])
    samples = Samples(alike=alike, deeper=accumulated(7, 203, 4, 2), longer=accumulated(5, 141, 3, 4))
    profile = fit_profile(samples, (accumulated(4, 250, 7, 3),), BLOCK_BYTES)
    assert profile.peak_bytes({"rows": 4, "tokens": 250, "accumulation": 9}, 7) == rounded(accumulated(4, 250, 7, 9).trace).peak_bytes


def rolled_out(rows: int, tokens: int, layers: int, steps: int) -> Sample:
    """A step for which all rows are generated at once: a tensor a row, a score a micro-step, and what each micro-step finds left over from the last."""
    generated, events, births = rows * steps, list[tuple[int, int]](), list[tuple[int, str, str]]()

    def born(size_bytes: int, phase: str, operator: str) -> int:
        births.append((size_bytes, phase, operator))
        events.append((len(births) - 1, 1))
        return len(births) - 1

    for _ in range(layers):
        born(4096, "load", "resident")
    each = [born(8 * tokens, "rollout", "tensor") for _ in range(generated)]
    born(8 * generated * tokens, "rollout", "pad")
    events += [(index, -1) for index in each]
    left_over: list[int] = []
    for _ in range(steps):
        hidden = [born(64 * rows * tokens, "score", "mm") for _ in range(layers)]
        born(4 * rows * tokens, "score", "gather")
        moment = born(2 * rows * tokens, "score", "mul")
        events += [(index, -1) for index in (*hidden, *left_over)]
        left_over = [moment]
    times: dict[int, list[int]] = {index: [0, STAYS] for index in range(len(births))}
    for time, (index, sign) in enumerate(events):
        times[index][0 if sign > 0 else 1] = time
    trace = Trace(
        allocations=tuple(
            Allocation(size_bytes=size, born=times[index][0], died=times[index][1], phase=phase, component="transients", operator=operator, module="")  # type: ignore[arg-type]
            for index, (size, phase, operator) in enumerate(births)
        ),
        phase_starts=((0, "load"),),
    )
    values = {
        "rows": rows, "tokens": tokens, "accumulation": steps, "generated": generated, "groups": 2, "prompt": 5, "completion": tokens - 5,
    }  # fmt: skip
    return Sample(values=tuple(values.items()), layers=layers, trace=trace)


@pytest.mark.parametrize(("rows", "tokens", "layers", "steps"), [(4, 77, 3, 2), (5, 300, 30, 7), (23, 101, 8, 3), (64, 90, 12, 16)])
def test_a_profile_peaks_where_a_trace_of_any_micro_steps_and_generated_rows_does(rows: int, tokens: int, layers: int, steps: int) -> None:
    samples = Samples(
        alike=(rolled_out(4, 203, 3, 2), rolled_out(4, 325, 3, 2)), deeper=rolled_out(4, 203, 4, 2), longer=rolled_out(9, 141, 3, 4)
    )  # fmt: skip
    profile = fit_profile(samples, (rolled_out(6, 250, 5, 3),), BLOCK_BYTES)
    asked = rolled_out(rows, tokens, layers, steps)
    assert profile.phases(asked.sizes, layers) == rounded(asked.trace).phases


def test_a_profile_survives_its_file() -> None:
    assert profile_from_json(profile_to_json(toy())) == toy()


def model(**changes: object) -> ModelShape:
    return replace(load_model("Qwen2.5-0.5B"), config=load_model("Qwen2.5-0.5B").config | changes)


def job(**changes: object) -> Candidate:
    settings: dict[str, object] = {"model": model(), "method": "sft", "tuning": "lora", "dtype": "bfloat16", "max_length": 512}
    return Candidate(**(settings | changes))  # type: ignore[arg-type]


ROLLOUT: dict[str, object] = {
    "method": "grpo", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 2, "num_generations": 8,
    "prompt_length": 256, "max_completion_length": 256,
}  # fmt: skip


def test_models_of_one_architecture_share_a_profile_whatever_their_widths_and_depth() -> None:
    larger = model(hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=4, num_hidden_layers=60, rope_theta=1e6)
    assert recipe_of(job(model=larger)) == recipe_of(job())


@pytest.mark.parametrize(
    "changes",
    [{"max_length": 500}, {"per_device_train_batch_size": 1}, {"gradient_accumulation_steps": 2}, {"max_length": 2048}, {"dtype": "float32"},
     ROLLOUT | {"per_device_train_batch_size": 3, "num_generations": 3}, ROLLOUT | {"steps_per_generation": 4}, ROLLOUT | {"num_generations": 16},
     {"model": model(num_key_value_heads=1)}, {"model": model(vocab_size=32000)}, {"model": model(attention_bias=True)}],
)  # fmt: skip
def test_another_regime_is_another_recipe(changes: dict[str, object]) -> None:
    own = ROLLOUT if "method" in changes else {}
    assert key_of(recipe_of(job(**changes))) != key_of(recipe_of(job(**own)))


@pytest.mark.parametrize(
    ("own", "changes"),
    [({}, {"per_device_train_batch_size": 5}), ({}, {"max_length": 480}), ({}, {"lora_r": 64}), ({}, {"num_processes": 8, "sharding": "ddp"}),
     ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 64}), ({"attn_implementation": "flash_attention_2"}, {"max_length": 500}),
     ({"sharding": "zero2", "num_processes": 2}, {"sharding": "zero2", "num_processes": 2, "offload_optimizer": True}),
     (ROLLOUT, {"gradient_accumulation_steps": 16, "steps_per_generation": 16}), (ROLLOUT, {"per_device_train_batch_size": 16}),
     (ROLLOUT, {"num_generations": 4})],
)  # fmt: skip
def test_one_recipe_answers_for_all_its_sizes(own: dict[str, object], changes: dict[str, object]) -> None:
    assert key_of(recipe_of(job(**(own | changes)))) == key_of(recipe_of(job(**own)))


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"quantization": "gptq"}, "quantized weights of that kind"), ({"offload_optimizer": True}, "states on the host"),
     ({"use_liger_kernel": True}, "Liger kernels"),
     ({"activation_offloading": True}, "activations on the host, which small ones do not go to"), ({"method": "ppo", "trl_version": "1.12"}, "PPO")],
)  # fmt: skip
def test_what_was_not_simulated_has_no_profile(changes: dict[str, object], what: str) -> None:
    with pytest.raises(NoProfile, match=f"^A profile does not stand for {what}\\.$"):
        recipe_of(job(**changes))
    assert load_profile(job(**changes)) is None


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLAN_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "none")
    return tmp_path


def test_a_saved_profile_is_loaded(cache: Path) -> None:
    assert load_profile(job()) is None
    path = save_profile(job(), toy())
    assert path.is_relative_to(cache)
    assert load_profile(job(max_length=496)) == toy()
    assert [found for found in path.parent.iterdir()] == [path]


@pytest.mark.parametrize("content", [b"", b"no profile", zlib.compress(b'{"schema": 1}'), zlib.compress(b"[]")])
def test_a_broken_file_is_no_profile(cache: Path, content: bytes) -> None:
    path = save_profile(job(), toy())
    path.write_bytes(content)
    assert load_profile(job()) is None


def test_a_profile_of_another_depths_pattern_says_nothing(cache: Path) -> None:
    answer = estimate(job(model=model(num_hidden_layers=2)), parse_cluster("1xH200", None))
    save_profile(answer.candidate, toy())
    assert load_profile(answer.candidate) == toy()
    assert decided(answer, 0.01) is answer


@pytest.mark.parametrize(
    ("gpus", "changes", "kept"),
    [("1xH200", {}, OUTSIDE), ("2xH200", {"sharding": "ddp", "num_processes": 2}, OUTSIDE),
     ("2xH200", {"sharding": "zero2", "num_processes": 2}, OUTSIDE | STATES)],
)  # fmt: skip
def test_a_profile_decides_where_there_is_one(cache: Path, gpus: str, changes: dict[str, object], kept: frozenset[str]) -> None:
    answer = estimate(job(**changes), parse_cluster(gpus, None))
    assert decided(answer, 0.01) is answer
    save_profile(job(**changes), toy())
    better = decided(answer, 0.01)
    assert better.evidence == "simulated"
    before, after = ({phase.name: phase.components for phase in each.gpus[0].phases} for each in (answer, better))
    replaced = ("load", "optimizer_step") if kept != OUTSIDE else ()
    for phase in toy().phases(sizes_of(job()), 24):
        around = {name: size for name, size in before.get(phase.name, before["forward"]).items() if name in kept}
        assert after[phase.name] == (before[phase.name] if phase.name in replaced else phase.components | around)
    assert better.gpus[0].interval_bytes[0] < better.gpus[0].peak_bytes < better.gpus[0].interval_bytes[1]
    assert better.fits and better.fit_probability > 0.99


def test_states_that_are_sharded_make_another_recipe_whose_weights_have_16_bits(cache: Path) -> None:
    sharded = job(sharding="zero2", num_processes=2)
    assert key_of(recipe_of(sharded)) == key_of(recipe_of(replace(sharded, sharding="zero3", dtype="float32", num_processes=8)))
    save_profile(sharded, toy())
    assert load_profile(job()) is None and load_profile(replace(sharded, sharding="ddp")) is None


def test_without_states_a_gradient_is_there_until_it_is_whole() -> None:
    def made(component: str, size_bytes: int, born: int, died: int, accumulated: int = STAYS) -> Allocation:
        return Allocation(
            size_bytes=size_bytes, born=born, died=died, accumulated=accumulated, phase="backward", component=component, operator="", module=""  # type: ignore[arg-type]
        )  # fmt: skip

    trace = Trace(allocations=(made("weights", 7, 0, STAYS), made("gradients", 5, 1, 4, 2), made("activations", 3, 2, 3)), phase_starts=())
    assert [size_bytes for _, size_bytes in without_states(trace).events] == [5, -5, 3, -3]
    assert without_states(trace).phases[0].components == {"transients": 5}


# -- the search --------------------------------------------------------------------------------------------------------


def heavy(bytes_per_row: int) -> Profile:
    """A profile that says: a constant and so many bytes a row, in every phase of a step."""
    born = {"forward": 1, "loss": 1, "backward": 1}
    return Profile(
        layers=2, block_bytes=BLOCK_BYTES, versions=(("torch", "2.13.0+cpu"), ("trl", "1.16.0")),
        expressions=(Expression(parts=(("rows", "1", bytes_per_row, 1),)), constant(2**30)),
        moments=tuple(Moment(phase=phase, alive=(("activations", 0, count, 0, 0, 0), ("weights", 1, 1, 0, 0, 0))) for phase, count in born.items()),
    )  # fmt: skip


def searched(**pinned: object) -> Job:
    return Job(model=model(), method="sft", tuning="lora", pinned={"gradient_checkpointing": True, "attn_implementation": "sdpa", "max_length": 512} | pinned)


def test_the_search_picks_by_the_profile_where_one_is_there(cache: Path) -> None:
    cluster = parse_cluster("1x24GiB", None)
    before = plan(searched(), cluster)
    assert (before.best.evidence, before.best.candidate.per_device_train_batch_size) == ("estimated", 8)
    for rows in (2, 4, 8):
        candidate = replace(before.best.candidate, per_device_train_batch_size=rows, gradient_accumulation_steps=8 // rows)
        save_profile(candidate, heavy(5 * 2**30))
    after = plan(searched(), cluster)
    assert (after.best.evidence, after.best.candidate.per_device_train_batch_size) == ("simulated", 4)
    assert after.best.gpus[0].peak.components["activations"] == 20 * 2**30
    assert after.versions["trl"] == "1.16.0"
    assert "simulated (profile of torch 2.13, trl 1.16)" in plan_table(after, 120).plain


def test_the_search_falls_back_to_the_estimate_where_there_is_no_profile_and_says_so(cache: Path) -> None:
    cluster = parse_cluster("1x24GiB", None)
    before = plan(searched(), cluster).best.candidate
    save_profile(before, heavy(2**30))
    answer = plan(replace(searched(), tuning="auto"), cluster)
    table = plan_table(answer, 120).plain
    assert answer.best.evidence == "estimated" and "estimated\n" in table and "(simulated)" in table


GENEROUS_SECONDS = 0.025  # the mission's 5 ms, on a machine that does other things meanwhile


def test_a_size_takes_milliseconds(cache: Path) -> None:
    save_profile(job(), toy())
    answers = [estimate(job(max_length=16 * length), parse_cluster("1xH200", None)) for length in range(4, 32)]
    decided(answers[0], 0.01)
    began = process_time()
    assert {decided(answer, 0.01).evidence for answer in answers} == {"simulated"}
    assert (process_time() - began) / len(answers) < GENEROUS_SECONDS


# A stratified few of what `scripts/compare_profiles.py` does with 200: models cut to a few layers, sizes drawn at random.
FEW = (
    {"model": "Qwen2.5-0.5B", "method": "sft", "tuning": "lora", "dtype": "bfloat16"},
    {"model": "Llama-3.2-1B", "method": "dpo", "tuning": "full", "gradient_checkpointing": False},
)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("settings", FEW)
def test_a_real_recipes_profile_gives_the_full_traces_peak(settings: dict[str, object]) -> None:
    pytest.importorskip("trl")
    from probes.dryrun import dry_run
    from probes.profiles import profile_of
    from probes.small_sizes import with_layers

    case = job(**(settings | {"model": load_model(str(settings["model"])), "per_device_train_batch_size": 3}))
    profile, draw = profile_of(case), random.Random(str(settings))
    for layers in (4, 9):
        size = replace(case, per_device_train_batch_size=draw.randint(2, 4), max_length=16 * draw.randint(9, 32), lora_r=draw.randint(4, 64))
        full = dry_run(with_layers(size, layers), steps=1)
        assert profile.peak_bytes(sizes_of(size), layers) == full.peak_bytes
        assert profile.phases(sizes_of(size), layers) == full.phases


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("vllm", ["off", "colocate"])
def test_a_real_rollouts_profile_gives_the_full_traces_peak_of_any_rows_and_micro_steps(vllm: str) -> None:
    pytest.importorskip("trl")
    from probes.dryrun import dry_run
    from probes.profiles import profile_of
    from probes.small_sizes import with_layers

    def rollout(rows: int, steps: int, generations: int, prompt: int, completion: int) -> Candidate:
        return job(
            model=load_model("Qwen2.5-0.5B"), method="grpo", per_device_train_batch_size=rows, gradient_accumulation_steps=steps, steps_per_generation=steps,
            num_generations=generations, prompt_length=prompt, max_completion_length=completion, max_length=prompt + completion, vllm=vllm,
        )  # fmt: skip

    asked, size = rollout(8, 2, 8, 64, 128), rollout(11, 5, 11, 48, 160)
    assert key_of(recipe_of(asked)) == key_of(recipe_of(size))
    assert profile_of(asked).phases(sizes_of(size), 4) == dry_run(with_layers(size, 4), steps=1).phases


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_rank_by_its_profile_is_a_rank_by_its_dry_run(cache: Path) -> None:
    pytest.importorskip("trl")
    from probes.profiles import simulated_answer
    from probes.simulate import simulate

    two, attention = {"sharding": "zero2", "num_processes": 2}, "flash_attention_2"
    answer = estimate(job(**two, model=model(num_hidden_layers=6), attn_implementation=attention), parse_cluster("2xA100-40G", None))
    by_profile = simulated_answer(answer, 0.01)
    assert by_profile.evidence == "simulated" and load_profile(answer.candidate) is not None
    shown, run = ({phase.name: phase.total_bytes for phase in phases} for phases in (by_profile.gpus[0].phases, simulate(answer).simulated))
    assert shown == run


def test_a_card_without_flash_attention_runs_other_kernels_than_were_traced() -> None:
    from planner.errors import DryRunUnsupported
    from planner.gpus import parse_cluster
    from planner.trace.compose import refuse_other_kernels

    alone = Candidate(model=load_model("Qwen2.5-0.5B"), method="sft", per_device_train_batch_size=1)
    with pytest.raises(DryRunUnsupported, match="which T4 does not have"):
        refuse_other_kernels(alone, parse_cluster("1xT4").gpu)
    refuse_other_kernels(replace(alone, per_device_train_batch_size=2), parse_cluster("1xT4").gpu)
    refuse_other_kernels(alone, parse_cluster("1xA100-40G").gpu)
