"""How sure an estimate is: the probability that it runs, the headroom that a risk asks for, and tight plans."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.commands.main import run
from planner.confidence import (
    KINDS,
    Fit,
    JobKind,
    PublishedOutcome,
    compared,
    fit,
    interval_bytes,
    kind_of,
    margin_units,
    nvidia_smi_miss,
    outcomes,
    quantile,
    reach,
    run_probability,
    runs_like,
    shown_probability,
    unit_bytes,
    worst_miss,
)
from planner.estimation import accepted, estimate
from planner.gpus.cluster import Cluster
from planner.gpus.parse import parse_cluster
from planner.jobs.job import LARGEST_RISK, SMALLEST_RISK, Job
from planner.methods import MethodName
from planner.models.catalogue import load_model
from planner.planning import plan
from planner.quantities import DEFAULT_RISK, Estimate, PhaseMemory
from planner.report.json import plan_report
from planner.report.words import describe_fit, describe_probability, describe_runs, published_like
from planner.units import GIB

SMALL = Candidate(model=load_model("Qwen2.5-0.5B"), method="sft", tuning="lora", dtype="bfloat16")
RISKS = (0.2, 0.05, 0.01)
# One row alone has no mask and may need more than several; a whole optimizer step may need less than two micro-steps.
JOBS = [
    ("Qwen2.5-7B", "1xT4", "sft", {"max_length": 4096}),
    ("Qwen2.5-1.5B", "1xA100-40G", "rloo", {}),
    ("Qwen3-8B", "2xRTX-4090", "dpo", {}),
    ("Llama-3.2-3B", "1xL4", "kto", {}),
]
MODELS = ("Qwen2.5-0.5B", "Qwen2.5-7B", "Llama-3.2-3B", "Qwen3-8B")


def with_free_memory(free_bytes: float, candidate: Candidate = SMALL, risk: float = DEFAULT_RISK) -> Estimate:
    cluster = parse_cluster("1xH100", None)
    return estimate(candidate, replace(cluster, gpu=replace(cluster.gpu, free_bytes=int(free_bytes))), risk)


def random_candidates(count: int) -> list[Candidate]:
    draw = random.Random(32)
    return [
        replace(
            SMALL,
            model=load_model(draw.choice(MODELS)),
            tuning=draw.choice(("full", "lora")),
            per_device_train_batch_size=draw.choice((1, 2, 4, 8)),
            max_length=draw.choice((512, 1024, 4096)),
            gradient_checkpointing=draw.random() < 0.5,
            **draw.choice(({}, {"sharding": "zero3", "num_processes": 4}, {"sharding": "zero2", "num_processes": 2})),
        )
        for _ in range(count)
    ]


class TestProbability:
    @given(margin=st.floats(-1e6, 1e6), more=st.floats(0, 1e3))
    def test_more_margin_is_never_less_sure(self, margin: float, more: float) -> None:
        assert 0 <= run_probability(margin) <= run_probability(margin + more) <= 1

    @given(share=st.floats(0.5, 3), more=st.floats(0, 1))
    def test_more_free_memory_is_never_less_sure(self, share: float, more: float) -> None:
        need = with_free_memory(80e9).gpus[0].peak_bytes
        less, most = with_free_memory(share * need), with_free_memory((share + more) * need)
        assert less.fit_probability <= most.fit_probability
        assert less.fits <= most.fits

    @given(share=st.floats(0.8, 1.5), risk=st.floats(SMALLEST_RISK, LARGEST_RISK))
    def test_a_candidate_fits_if_it_runs_with_the_accepted_risk(self, share: float, risk: float) -> None:
        need = with_free_memory(80e9).gpus[0].peak_bytes
        answer = with_free_memory(share * need, risk=risk)
        assert answer.fits == (answer.gpus[0].interval_bytes[1] <= answer.gpus[0].capacity_bytes)
        assert (
            answer.fits == pytest.approx(answer.fit_probability >= 1 - risk)
            or abs(answer.fit_probability - (1 - risk)) < 1e-6
        )  # the interval ends at whole bytes

    @given(probability=st.floats(0, 1))
    def test_what_is_shown_is_never_more_than_what_is_known(self, probability: float) -> None:
        rounding = 1e-12  # 100 x 0.58 is 57.999...
        assert min(probability, 0.999) - 0.01 - rounding < shown_probability(probability) <= min(probability, 0.99)

    def test_two_fillings_of_a_card_are_not_equally_sure(self) -> None:
        need = with_free_memory(80e9).gpus[0].peak_bytes
        fuller, emptier = with_free_memory(need / 0.93), with_free_memory(need / 0.75)
        assert shown_probability(fuller.fit_probability) < shown_probability(emptier.fit_probability) == 0.99


class TestHeadroom:
    def test_less_risk_asks_for_more_headroom_in_200_jobs(self) -> None:
        for candidate in random_candidates(200):
            cluster = parse_cluster(f"{candidate.num_processes}xH200", None)
            rooms = [estimate(candidate, cluster, risk).gpus[0].headroom_bytes for risk in RISKS]
            assert 0 < rooms[0] < rooms[1] < rooms[2]

    def test_the_first_job_of_the_readme_gets_three_headrooms(self) -> None:
        job = Job(model=load_model("Qwen2.5-7B"), method="grpo")
        answers = [plan(replace(job, risk=risk), parse_cluster("2xA100-40G", None)).best for risk in RISKS]
        rooms = [answer.gpus[0].headroom_bytes / answer.gpus[0].peak_bytes for answer in answers]
        assert rooms[0] < rooms[1] < rooms[2]
        assert all(answer.fit_probability >= 1 - risk for answer, risk in zip(answers, RISKS, strict=True))
        spare = [answer.gpus[0].capacity_bytes - answer.gpus[0].peak_bytes for answer in answers]
        assert spare[0] <= spare[1] < spare[2]

    @pytest.mark.parametrize(("model", "gpus", "method", "pinned"), JOBS)
    def test_less_risk_never_leaves_less_free(
        self, model: str, gpus: str, method: MethodName, pinned: dict[str, int]
    ) -> None:
        job = Job(model=load_model(model), method=method, pinned=dict(pinned))
        answers = [plan(replace(job, risk=risk), parse_cluster(gpus, None)).best for risk in RISKS]
        spare = [answer.gpus[0].capacity_bytes - answer.gpus[0].peak_bytes for answer in answers]
        assert all(answer.fits for answer in answers)
        assert spare == sorted(spare)

    def test_a_lighter_phase_that_is_less_certain_can_set_the_upper_end(self) -> None:
        rollout = PhaseMemory(name="rollout", components={"engine": 75 * GIB})
        backward = PhaseMemory(name="backward", components={"activations": 74 * GIB})
        alone = interval_bytes([backward], "whole", 0.01)
        assert unit_bytes(rollout, "whole") < unit_bytes(backward, "whole")
        assert interval_bytes([rollout, backward], "whole", 0.01)[1] == alone[1]
        assert alone[1] > interval_bytes([rollout], "whole", 0.01)[1]

    def test_an_emulated_probe_leaves_what_it_does_not_see(self) -> None:
        phase = PhaseMemory(name="backward", components={"weights": 10 * GIB, "activations": 20 * GIB})
        assert 0 < unit_bytes(phase, "unseen") < unit_bytes(phase, "whole") < unit_bytes(phase, "gathered")

    def test_gathered_layers_are_a_kind_of_their_own(self) -> None:
        job = Candidate(model=load_model("Qwen2.5-7B"), method="sft", sharding="zero3", num_processes=8)
        assert kind_of(job) == "gathered"
        assert kind_of(Candidate(model=job.model, method="sft", sharding="zero2", num_processes=8)) == "whole"


class TestTight:
    def tight(self) -> tuple[Candidate, Cluster]:
        job = replace(SMALL, model=load_model("Llama-3.2-3B"))
        cluster = parse_cluster("1xL4", None)
        need = estimate(job, cluster).gpus[0].peak_bytes
        return job, replace(cluster, gpu=replace(cluster.gpu, free_bytes=round(1.04 * need)))

    def test_a_candidate_at_the_edge_is_tight_and_runs_rather_than_not(self) -> None:
        answer = estimate(*self.tight())
        assert (answer.fits, answer.tight) == (False, True)
        assert 0.5 <= answer.fit_probability < 1 - DEFAULT_RISK
        assert accepted(answer).fits and accepted(answer).tight
        assert describe_fit(answer).startswith("tight, 0.")

    def test_a_candidate_beyond_the_edge_is_refused(self) -> None:
        candidate, cluster = self.tight()
        full = replace(cluster, gpu=replace(cluster.gpu, free_bytes=round(cluster.gpu.free_bytes / 1.05)))
        answer = estimate(candidate, full)
        assert (answer.fits, answer.tight, accepted(answer)) == (False, False, answer)

    def test_a_plan_takes_a_tight_candidate_only_where_nothing_safer_fits(self) -> None:
        candidate, cluster = self.tight()
        pinned = {
            name: getattr(candidate, name)
            for name in ("per_device_train_batch_size", "max_length", "gradient_checkpointing", "dtype")
        }
        pinned |= {"gradient_accumulation_steps": 1, "attn_implementation": "sdpa", "use_liger_kernel": False}
        job = Job(model=candidate.model, method="sft", tuning="lora", pinned=pinned)
        found = plan(job, cluster)
        report = plan_report(found)
        assert (found.verdict, report.best.fits) == ("fits", True)
        roomy = plan(job, parse_cluster("1xH100", None)).best
        assert (roomy.fits, roomy.tight) == (True, False)

    def test_a_tight_plan_says_so_to_machines_too_and_is_no_failure(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The JSON said "fits" where the screen said tight."""
        pins = (
            "gradient_checkpointing=true",
            "activation_offloading=false",
            "optim=adamw_torch_fused",
            "distributed_type=NO",
        )
        command = [
            "--model=Llama-3.2-3B", "--gpus=1xL4", "--free-memory=7.2GiB", "--method=sft", "--tuning=lora",
            "--batch-size=1", "--max-length=1024", *(f"--set={pin}" for pin in (*pins, "offload=false")), "--quiet",
        ]  # fmt: skip
        assert run([*command, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["verdict"], report["best"]["fits"], report["best"]["tight"]) == ("tight", True, True)
        assert report["best"]["launch"] is not None
        assert run(command) == 0
        assert "\nTight, " in capsys.readouterr().out
        assert run([*command, "--risk=0.45", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["verdict"] == "fits"

    def test_a_gpu_with_much_room_is_not_tight(self) -> None:
        answer = with_free_memory(80e9)
        assert (answer.fits, answer.tight) == (True, False)


class TestWhatPublishedRunsSay:
    def test_the_fit_is_of_three_units_and_a_location(self) -> None:
        units = fit().units
        assert set(units) == {"whole", "gathered", "engine", "unseen"}
        assert all(0.005 < unit < 0.1 for unit in units.values())
        assert reach(0.5) == fit().location

    @pytest.mark.parametrize("kind", KINDS)
    def test_some_published_run_needed_more(self, kind: str) -> None:
        assert worst_miss(kind) > 0  # type: ignore[arg-type]

    @given(spare=st.floats(-0.5, 1), more=st.floats(0, 0.5))
    def test_fewer_runs_have_more_to_spare(self, spare: float, more: float) -> None:
        assert runs_like(spare + more, False).runs <= runs_like(spare, False).runs <= len(outcomes())
        assert runs_like(spare, False).runs >= 100
        assert (runs_like(spare, False).at_least, runs_like(spare, True).at_least) == (True, False)

    def test_text_and_json_say_the_same_numbers(self) -> None:
        found = plan(Job(model=load_model("Qwen2.5-7B"), method="sft"), parse_cluster("1xA100-40G", None))
        report, like = plan_report(found).best, published_like(found.best)
        assert (report.comparable_runs, report.comparable_ran) == (like.runs, like.ran)
        assert f"of {like.runs} published runs with" in describe_runs(found.best)
        assert f"{like.ran} ran" in describe_runs(found.best)
        assert describe_probability(found.best) == f"{round(100 * report.fit_probability)} %"


# Misses of published nvidia-smi figures of a kind: twenty.
MISSES = tuple(each / 100 for each in range(-5, 15))


@pytest.fixture
def misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put `MISSES` in place of the published ones."""
    path = tmp_path / "comparisons.jsonl"
    rows = [
        {"id": f"{kind} {miss}", "source": "", "kind": kind, "figure": "nvidia_smi", "miss": miss}
        for kind in KINDS
        for miss in (MISSES if kind == "whole" else (-0.02, -0.01))
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    monkeypatch.setattr("planner.confidence.COMPARISONS", path)
    for cached in (compared, nvidia_smi_miss):
        cached.cache_clear()
    yield
    for cached in (compared, nvidia_smi_miss):
        cached.cache_clear()


@pytest.mark.usefixtures("misses")
def test_nine_tenths_of_the_runs_show_less_in_nvidia_smi() -> None:
    """Of twenty misses from -5 to 14 % the ceil(0.9 x 21) = 19th is 13 %; of two below zero none is left."""
    assert nvidia_smi_miss("whole") == 0.13
    assert nvidia_smi_miss("gathered") == 0.0


@pytest.mark.parametrize(
    ("sharding", "processes", "kind"),
    [("zero3", 2, "gathered"), ("fsdp2", 2, "gathered"), ("zero3", 1, "whole"), ("zero1", 2, "whole")],
)
def test_only_several_gpus_gather(sharding: Any, processes: int, kind: JobKind) -> None:
    candidate = Candidate(model=load_model("Qwen2.5-0.5B"), method="sft", sharding=sharding, num_processes=processes)
    assert kind_of(candidate) == kind


class TestByHand:
    @pytest.fixture(autouse=True)
    def round_numbers(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Units of 2, 5 and 1 % and a location of a half."""
        units = {"whole": 0.02, "gathered": 0.05, "engine": 0.01, "unseen": 0.015}
        monkeypatch.setattr("planner.confidence.fit", lambda: Fit(location=0.5, units=units, pass_unit=0.04))
        reach.cache_clear()
        yield
        reach.cache_clear()

    def test_each_kind_of_memory_has_its_unit(self) -> None:
        phase = PhaseMemory(name="backward", components={"weights": 30 * GIB, "engine": 10 * GIB})
        assert unit_bytes(phase, "whole") == pytest.approx(0.02 * 30 * GIB + 0.01 * 10 * GIB)
        assert unit_bytes(phase, "gathered") == pytest.approx(0.05 * 30 * GIB + 0.01 * 10 * GIB)
        assert unit_bytes(phase, "unseen") == pytest.approx(0.015 * 40 * GIB)
        assert unit_bytes(phase, "server") == 2**20

    def test_a_margin_of_the_location_is_even(self) -> None:
        assert run_probability(0.5) == 0.5
        assert run_probability(0.5 + math.log(19)) == pytest.approx(0.95)  # odds of 19 to 1
        assert reach(0.05) == pytest.approx(0.5 + math.log(19))

    def test_an_interval_reaches_to_both_sides_of_the_location(self) -> None:
        """100 GiB with units of 2 GiB: 1 GiB of location, and ln 19 = 2.944 units to both sides."""
        phase = PhaseMemory(name="backward", components={"activations": 100 * GIB})
        low, high = interval_bytes([phase], "whole", 0.05)
        assert low / GIB == pytest.approx(100 + 1 - 5.889, abs=0.001)
        assert high / GIB == pytest.approx(100 + 1 + 5.889, abs=0.001)
        assert margin_units([phase], "whole", 104 * GIB) == pytest.approx(2.0)

    def test_a_quantile_of_a_normal_distribution(self) -> None:
        assert quantile(0.01) == pytest.approx(2.3263, abs=1e-4)


def test_the_spare_memory_of_a_run_is_a_share_of_its_card() -> None:
    run = PublishedOutcome(id="run", source="paper", kind="whole", need_bytes=30, card_bytes=40, ran=True)
    assert run.spare == 0.25
