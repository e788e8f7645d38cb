"""An estimate corrected by a measurement, and a plan corrected by its probes."""

import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from report_samples import ESTIMATE, PLAN, TOO_LARGE

from planner.candidate import Candidate
from planner.errors import PlanError
from planner.estimation import estimate
from planner.gpus.cluster import Cluster
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.measurements.corrected_estimate import (
    LEAST_SURE_FIRST,
    RUN_TO_RUN_BYTES,
    correct_estimate,
    lacking_bytes,
    needed_bytes,
    needed_peak_bytes,
    phase_differences,
)
from planner.measurements.corrected_plan import changed_settings, contradiction, correct_plan, plan_contradiction
from planner.measurements.documents import candidate_of_report, candidate_report
from planner.measurements.fingerprint import candidate_key
from planner.measurements.measurement import DeviceName, Measurement, Outcome, PhasePeak, RankMemory, Shortage
from planner.models.catalogue import load_model
from planner.planning import Plan
from planner.quantities import Component, Estimate, Note, PhaseMemory
from planner.report.documents.schema import json_schema
from planner.report.json import estimate_report, json_text, plan_report
from planner.report.page.answer import plan_html
from planner.report.sentences import sentence, sentences
from planner.report.table import estimate_table, plan_table
from planner.search.variations import Variation
from planner.units import GIB, MIB

VALIDATOR = jsonschema.Draft202012Validator(json_schema())
MODEL = load_model("Qwen2.5-0.5B")
CANDIDATE = Candidate(
    model=MODEL, method="sft", tuning="lora", dtype="bfloat16", per_device_train_batch_size=4, max_length=2048
)
CLUSTER: Cluster = parse_cluster("1xRTX-3090")
EXPECTED: Estimate = estimate(CANDIDATE, CLUSTER)
CAPACITY = CLUSTER.gpu.free_bytes


def peak_of(
    phase: PhaseMemory, *, more: int = 0, spare: int = 0, driver: bool = True, reserved: bool = True
) -> PhasePeak:
    """Return a phase's peak with `more` bytes of tensors than expected and `spare` bytes in the allocator's cache."""
    outside, slack = phase.components["runtime"], phase.components.get("fragmentation", 0)
    allocated = phase.total_bytes - outside - slack + more
    kept = allocated + slack + spare
    return PhasePeak(
        name=phase.name,
        allocated_bytes=allocated,
        reserved_bytes=kept if reserved else 0,
        driver_bytes=kept + outside if driver else 0,
        seconds=0.25,
    )


def fake_measurement(
    answer: Estimate = EXPECTED,
    *,
    device: DeviceName = "cuda",
    outcome: Outcome = "fits",
    more: int = 0,
    spare: int = 0,
    capacity: int = CAPACITY,
    shortage: Shortage | None = None,
) -> Measurement:
    phases = tuple(
        peak_of(phase, more=more, spare=spare, driver=device == "cuda", reserved=device != "cpu")
        for phase in answer.gpus[0].phases
    )
    return Measurement(
        candidate=answer.candidate,
        device=device,
        outcome=outcome,
        ranks=(RankMemory(rank=0, phases=phases, state_bytes={}, capacity_bytes=capacity, allocator={}),),
        shortage=shortage,
        step_seconds=0.5,
        tokens_per_second=16_000.0,
        wall_seconds=30.0,
        message="",
        log="",
        versions={"torch": "2.13.0", "trl": "1.16.0"},
    )


SHORT = Shortage(
    rank=0, phase="backward", tried_bytes=2 * GIB, free_bytes=GIB, allocated_bytes=20 * GIB, reserved_bytes=22 * GIB
)
PLANNED = Plan(
    job=Job(model=MODEL, method="sft"),
    cluster=CLUSTER,
    best=EXPECTED,
    alternatives=(),
    remedies=(),
    more=(),
    warnings=(Note("rounds_small_updates"),),
    versions={"trl": "1.16"},
)


class TestCorrectEstimate:
    def test_a_measurement_equal_to_the_estimate_changes_no_phase(self):
        answer = correct_estimate(EXPECTED, fake_measurement())
        assert answer.gpus[0].phases == EXPECTED.gpus[0].phases
        assert answer.evidence == answer.throughput.evidence == "measured"
        assert answer.throughput.step_seconds == 0.5 and answer.throughput.tokens_per_second == 16_000.0

    def test_the_total_is_the_drivers_figure(self):
        answer = correct_estimate(EXPECTED, fake_measurement(more=GIB, spare=GIB))
        assert answer.gpus[0].peak_bytes == EXPECTED.gpus[0].peak_bytes + 2 * GIB

    def test_more_than_expected_is_unexplained_and_spare_is_fragmentation(self):
        before, after = (
            EXPECTED.gpus[0].peak.components,
            correct_estimate(EXPECTED, fake_measurement(more=GIB, spare=GIB)).gpus[0].peak.components,
        )
        assert after["unexplained"] == GIB
        assert after["fragmentation"] == before["fragmentation"] + GIB
        assert {name: size for name, size in after.items() if name not in ("unexplained", "fragmentation")} == {
            name: size for name, size in before.items() if name != "fragmentation"
        }

    def test_less_than_expected_is_cut_from_the_least_sure_component(self):
        before, after = (
            EXPECTED.gpus[0].peak.components,
            correct_estimate(EXPECTED, fake_measurement(more=-MIB)).gpus[0].peak.components,
        )
        first = next(name for name in LEAST_SURE_FIRST if before.get(name))
        assert after[first] == before[first] - MIB
        assert "unexplained" not in after and after["weights"] == before["weights"]

    @given(st.integers(-2 * GIB, 2 * GIB), st.integers(0, GIB), st.sampled_from(["cuda", "cpu", "emulated"]))
    def test_components_sum_to_the_total_and_none_is_negative(self, more, spare, device):
        measurement = fake_measurement(device=device, more=more, spare=spare)
        for phase in correct_estimate(EXPECTED, measurement).gpus[0].phases:
            assert sum(phase.components.values()) == phase.total_bytes and all(
                size > 0 for size in phase.components.values()
            )
            assert phase.total_bytes >= next(
                peak.allocated_bytes for peak in measurement.ranks[0].phases if peak.name == phase.name
            )

    def test_every_component_can_be_cut(self):
        assert set(LEAST_SURE_FIRST) == set(Component.__args__)

    def test_the_interval_is_the_run_to_run_difference_within_the_card(self):
        gpu = correct_estimate(EXPECTED, fake_measurement()).gpus[0]
        assert gpu.interval_bytes == (gpu.peak_bytes - RUN_TO_RUN_BYTES, gpu.peak_bytes + RUN_TO_RUN_BYTES)
        full = correct_estimate(EXPECTED, fake_measurement(spare=CAPACITY - EXPECTED.gpus[0].peak_bytes - MIB))
        assert full.gpus[0].interval_bytes[1] == CAPACITY and full.fits and full.fit_probability == 1.0

    def test_the_allocators_cache_on_a_larger_card_does_not_count(self):
        roomy = fake_measurement(spare=30 * GIB, capacity=80 * GIB)
        answer = correct_estimate(EXPECTED, roomy)
        assert answer.fits and answer.gpus[0].peak_bytes == EXPECTED.gpus[0].peak_bytes
        assert not correct_estimate(EXPECTED, fake_measurement(more=30 * GIB, capacity=80 * GIB)).fits

    def test_out_of_memory_is_a_measured_answer_that_does_not_fit(self):
        answer = correct_estimate(EXPECTED, fake_measurement(outcome="out_of_memory", shortage=SHORT))
        gpu = answer.gpus[0]
        assert (answer.fits, answer.fit_probability, answer.evidence) == (False, 0.0, "measured")
        assert (gpu.peak_phase, gpu.peak_bytes) == ("backward", CAPACITY + GIB)
        assert answer.over_bytes == GIB

    def test_out_of_memory_whose_message_is_lost_is_over_by_a_byte_at_least(self):
        lost = replace(fake_measurement(outcome="out_of_memory"), ranks=())
        gpu = correct_estimate(EXPECTED, lost).gpus[0]
        assert (gpu.peak_bytes, gpu.peak_phase) == (CAPACITY + 1, EXPECTED.gpus[0].peak_phase)

    @pytest.mark.parametrize(
        "outcome", ["hung", "killed", "crashed", "disk_full", "garbage", "gpu_in_use", "host_out_of_memory"]
    )
    def test_a_probe_that_ended_otherwise_measures_nothing(self, outcome):
        with pytest.raises(PlanError, match="says nothing about memory"):
            correct_estimate(EXPECTED, fake_measurement(outcome=outcome))

    def test_out_of_memory_on_a_smaller_card_says_nothing_about_this_one(self):
        with pytest.raises(PlanError, match="smaller card"):
            correct_estimate(EXPECTED, fake_measurement(outcome="out_of_memory", shortage=SHORT, capacity=8 * GIB))

    def test_out_of_memory_on_a_card_that_others_share_needs_what_the_process_held(self):
        """79.2 GiB of which others hold 66.2; the plan was made for the 13.0 that are free."""
        runtime = EXPECTED.gpus[0].phases[0].components["runtime"]
        usable, card = 13 * GIB, 79 * GIB
        short = replace(SHORT, tried_bytes=3 * GIB, free_bytes=2 * GIB, reserved_bytes=usable - 2 * GIB - runtime)
        ran_out = fake_measurement(outcome="out_of_memory", shortage=short, capacity=card)
        planned = replace(EXPECTED.gpus[0], capacity_bytes=usable)
        assert lacking_bytes(planned, ran_out) == usable + GIB
        assert lacking_bytes(replace(planned, capacity_bytes=10 * GIB), ran_out) == usable + GIB
        with pytest.raises(PlanError, match=r"others share: it could use 13.0 GiB of 23.\d GiB"):
            correct_estimate(EXPECTED, ran_out)

    def test_cards_that_differ_by_their_drivers_memory_are_of_one_kind(self):
        for capacity in (CAPACITY - CAPACITY // 200, CAPACITY + CAPACITY // 200):
            assert not correct_estimate(
                EXPECTED, fake_measurement(outcome="out_of_memory", shortage=SHORT, capacity=capacity)
            ).fits
            assert (
                correct_estimate(EXPECTED, fake_measurement(spare=GIB, capacity=capacity)).gpus[0].peak_bytes
                == EXPECTED.gpus[0].peak_bytes + GIB
            )

    def test_phases_are_in_the_order_of_a_run(self):
        rank = fake_measurement().ranks[0]
        backwards = replace(fake_measurement(), ranks=(replace(rank, phases=rank.phases[::-1]),))
        assert correct_estimate(EXPECTED, backwards).gpus == correct_estimate(EXPECTED, fake_measurement()).gpus
        assert phase_differences(EXPECTED, backwards) == phase_differences(EXPECTED, fake_measurement())

    def test_the_heaviest_process_counts(self):
        light, heavy = fake_measurement().ranks[0], replace(fake_measurement(more=GIB).ranks[0], rank=1)
        answer = correct_estimate(EXPECTED, replace(fake_measurement(), ranks=(light, heavy)))
        assert answer.gpus[0].peak_bytes == EXPECTED.gpus[0].peak_bytes + GIB

    def test_an_unexpected_phase_has_the_components_that_stay(self):
        save = PhasePeak(
            name="save", allocated_bytes=30 * GIB, reserved_bytes=30 * GIB, driver_bytes=31 * GIB, seconds=1.0
        )
        rank = replace(fake_measurement().ranks[0], phases=(save,))
        components = correct_estimate(EXPECTED, replace(fake_measurement(), ranks=(rank,))).gpus[0].phases[0].components
        assert components["weights"] == EXPECTED.gpus[0].peak.components["weights"] and components["unexplained"] > 0

    def test_a_servers_cards_keep_their_estimate(self):
        server = replace(
            TOO_LARGE.gpus[0],
            role="vllm",
            phases=(PhaseMemory(name="rollout", components={"engine": GIB, "runtime": MIB}),),
        )
        expected = replace(EXPECTED, gpus=(*EXPECTED.gpus, server))
        answer = correct_estimate(expected, fake_measurement())
        assert answer.gpus[1] is server and "the vLLM server's cards are still estimated" in sentences(answer.reasons)


class TestOtherDevices:
    def test_an_emulated_probe_never_looks_measured(self):
        plan = correct_plan(PLANNED, CANDIDATE, [fake_measurement(device="emulated")], ["it fits"], {})
        report = json.loads(json_text(plan_report(plan)))
        best, proof = report["best"], report["proof"]
        assert best["evidence"] == proof["evidence"] == "emulated" and best["throughput"]["evidence"] == "estimated"
        for text in (plan_table(plan, 100).plain, plan_html(plan)):
            assert "measured" not in text.replace("no GPU was measured", "")
            assert "no GPU was measured: the probes ran the CUDA stack on emulated cards" in text

    def test_what_ran_on_an_emulated_card_is_an_answer_however_little_was_left(self):
        full = fake_measurement(device="emulated", more=CAPACITY - EXPECTED.gpus[0].peak_bytes - 64 * MIB)
        answer = correct_estimate(EXPECTED, full)
        assert answer.tight and answer.fit_probability < 0.5
        assert correct_plan(PLANNED, CANDIDATE, [full], [], {}).best.fits
        more = fake_measurement(device="emulated", more=CAPACITY - EXPECTED.gpus[0].peak_bytes + MIB, capacity=80 * GIB)
        assert not correct_estimate(EXPECTED, more).tight
        left = CAPACITY - EXPECTED.gpus[0].peak_bytes
        real = fake_measurement(device="cuda", more=left - 10 * MIB, capacity=80 * GIB)
        assert not correct_estimate(EXPECTED, real).tight  # a larger card, whose own figures are known

    def test_the_cpu_measures_tensors_and_nothing_else(self):
        answer = correct_estimate(EXPECTED, fake_measurement(device="cpu", capacity=0))
        assert answer.gpus[0].peak_bytes == EXPECTED.gpus[0].peak_bytes
        assert answer.throughput is EXPECTED.throughput
        assert (
            0
            < answer.gpus[0].interval_bytes[1] - answer.gpus[0].peak_bytes
            < EXPECTED.gpus[0].interval_bytes[1] - EXPECTED.gpus[0].peak_bytes
        )
        assert "the probe ran on the CPU, where tensors' bytes are counted" in sentence(answer.reasons[-1])
        assert "measured on the CPU (torch 2.13, trl 1.16)" in estimate_table(answer, CLUSTER, (), 120).plain
        plan = correct_plan(PLANNED, CANDIDATE, [fake_measurement(device="cpu", capacity=0)], ["it ran"], {})
        assert "no GPU was measured: the probes ran on the CPU" in plan_table(plan, 120).plain
        assert " of tensors, its peak in the " in sentence(plan.warnings[0])


class TestDifferences:
    def test_on_the_cpu_tensors_are_compared_with_tensors(self):
        found = phase_differences(EXPECTED, fake_measurement(device="cpu"))
        assert all(each.error == 0.0 for each in found)
        assert "load" not in {each.name for each in found}  # the file's tensors lie on the device too
        heaviest = max(found, key=lambda each: each.expected_bytes)
        unseen = sum(EXPECTED.gpus[0].peak.components[name] for name in ("runtime", "fragmentation"))
        assert heaviest.expected_bytes == EXPECTED.gpus[0].peak_bytes - unseen

    def test_the_allocators_cache_is_measured_and_not_needed(self):
        heaviest = max(phase_differences(EXPECTED, fake_measurement(spare=GIB)), key=lambda each: each.expected_bytes)
        assert heaviest.measured_bytes == heaviest.needed_bytes + GIB
        assert heaviest.error == 0.0

    def test_too_little_expected_is_negative(self):
        assert all(each.error < 0 for each in phase_differences(EXPECTED, fake_measurement(more=GIB)))

    def test_need_is_tensors_slack_and_what_is_outside_pytorch(self):
        expected = PhaseMemory(name="backward", components={"weights": 100, "fragmentation": 10, "runtime": 7})
        peak = PhasePeak(name="backward", allocated_bytes=120, reserved_bytes=125, driver_bytes=130, seconds=0.0)
        assert needed_bytes(peak, expected) == 120 + 5 + 5
        assert needed_bytes(replace(peak, reserved_bytes=0, driver_bytes=0), expected) == 120 + 10 + 7
        assert needed_bytes(replace(peak, reserved_bytes=200, driver_bytes=0), expected) == 120 + 10 + 7

    def test_a_run_out_of_memory_has_no_differences(self):
        assert phase_differences(EXPECTED, fake_measurement(outcome="out_of_memory", shortage=SHORT)) == ()

    def test_a_teachers_pass_is_a_part_of_the_loss_where_the_estimate_has_it_so(self):
        """GKD of OLMo-2-1B on an emulated H200 needed 66.6 GiB in it; a probe said 54.7, of the backward pass."""
        measured = fake_measurement()
        (rank,) = measured.ranks
        loss = next(peak for peak in rank.phases if peak.name == "loss")
        teacher = replace(loss, name="score", allocated_bytes=loss.allocated_bytes + 9 * GIB)
        measured = replace(measured, ranks=(replace(rank, phases=(*rank.phases, teacher)),))
        found = {each.name: each for each in phase_differences(EXPECTED, measured)}
        expected = next(phase for phase in EXPECTED.gpus[0].phases if phase.name == "loss")
        assert "score" not in found
        assert found["loss"].needed_bytes == needed_bytes(teacher, expected)
        assert needed_peak_bytes(EXPECTED.gpus[0], measured) == found["loss"].needed_bytes


class TestContradiction:
    def test_out_of_memory_contradicts_a_plan_that_fits(self):
        assert plan_contradiction(PLANNED, [fake_measurement(outcome="out_of_memory", shortage=SHORT)])

    def test_more_than_the_interval_contradicts(self):
        reach = EXPECTED.gpus[0].interval_bytes[1] - EXPECTED.gpus[0].peak_bytes
        assert not plan_contradiction(PLANNED, [fake_measurement(more=reach)])
        assert plan_contradiction(PLANNED, [fake_measurement(more=reach + 2)])

    def test_the_allocators_cache_does_not_contradict(self):
        assert not plan_contradiction(PLANNED, [fake_measurement(spare=2 * GIB)])

    def test_fitting_contradicts_a_plan_that_had_denied_it(self):
        denied = replace(EXPECTED, fits=False)
        wrong = contradiction(denied, fake_measurement())
        assert wrong is not None and sentence(wrong) == "the candidate fits on the GPU, which the plan had denied"
        assert not contradiction(denied, fake_measurement(outcome="out_of_memory", shortage=SHORT))

    def test_a_probe_on_the_cpu_contradicts_no_plan_for_a_gpu(self):
        assert not contradiction(replace(EXPECTED, fits=False), fake_measurement(device="cpu"))
        assert not plan_contradiction(PLANNED, [fake_measurement(device="cpu", more=4 * GIB)])

    @pytest.mark.parametrize("outcome", ["hung", "crashed"])
    def test_an_undecided_probe_does_not_contradict(self, outcome):
        assert not plan_contradiction(PLANNED, [fake_measurement(outcome=outcome)])

    def test_a_probe_of_another_candidate_does_not_contradict(self):
        other = replace(
            fake_measurement(outcome="out_of_memory", shortage=SHORT),
            candidate=replace(CANDIDATE, max_length=4096),
        )
        assert not plan_contradiction(PLANNED, [other])


class TestCorrectPlan:
    def test_the_best_is_measured_and_the_proof_is_kept(self):
        plan = correct_plan(PLANNED, CANDIDATE, [fake_measurement(more=100 * MIB)], ["1 probe"], {"probes": 1})
        assert plan.best.evidence == "measured" and plan.verdict == "fits"
        assert plan.proof is not None and plan.proof.lines == ("1 probe",) and plan.proof.expected == "estimated"
        assert sentence(plan.warnings[0]).startswith("the probe on the GPU needed ")
        assert plan.warnings[-1] == Note("rounds_small_updates")
        assert plan.versions["torch"] == "2.13.0"

    def test_the_proven_candidate_takes_the_place_of_one_that_ran_out(self):
        smaller = replace(CANDIDATE, per_device_train_batch_size=2)
        measurements = [
            fake_measurement(outcome="out_of_memory", shortage=SHORT),
            fake_measurement(estimate(smaller, CLUSTER)),
        ]
        plan = correct_plan(PLANNED, smaller, measurements, [], {})
        assert plan.best.candidate == smaller and plan.best.evidence == "measured"
        assert "ran out of memory on the GPU in the backward" in sentence(plan.warnings[0])
        assert plan.warnings[1] == Note("proven_instead", {"settings": {"per_device_train_batch_size": 2}})

    def test_where_nothing_was_proven_the_plan_says_that_it_does_not_fit(self):
        plan = correct_plan(PLANNED, None, [fake_measurement(outcome="out_of_memory", shortage=SHORT)], [], {})
        assert plan.verdict == "does_not_fit" and not plan.best.fits

    def test_a_crash_leaves_the_estimate(self):
        plan = correct_plan(PLANNED, None, [fake_measurement(outcome="crashed")], ["the probe crashed"], {})
        assert plan.best == EXPECTED and plan.proof is not None and plan.proof.evidence == "estimated"

    def test_an_alternative_that_was_probed_is_measured_too(self):
        other = estimate(replace(CANDIDATE, tuning="full"), CLUSTER)
        full = Variation(change=Note("tuning_class", {"tuning": "full"}), estimate=other)
        plan = replace(PLANNED, alternatives=(full,))
        shown = correct_plan(plan, CANDIDATE, [fake_measurement(), fake_measurement(other)], [], {})
        assert shown.alternatives[0].estimate.evidence == "measured"

    def test_a_measurement_from_another_process_is_of_the_same_candidate(self):
        read = candidate_of_report(json.loads(json.dumps(candidate_report(CANDIDATE))))
        assert read != CANDIDATE and candidate_key(read) == candidate_key(CANDIDATE)
        assert (
            correct_plan(PLANNED, read, [replace(fake_measurement(), candidate=read)], [], {}).best.evidence
            == "measured"
        )


def test_settings_that_a_method_does_not_read_are_no_change():
    grouped = replace(CANDIDATE, steps_per_generation=4, gradient_accumulation_steps=4)
    assert changed_settings(CANDIDATE, grouped) == {"gradient_accumulation_steps": 4}


class TestReports:
    PROVEN = correct_plan(
        PLANNED,
        CANDIDATE,
        [fake_measurement(more=GIB, spare=GIB)],
        ["3 probes: the next larger batch ran out of memory"],
        {"probes": 3, "learned": {"runtime": 1}},
    )

    def test_the_json_follows_the_schema(self):
        VALIDATOR.validate(json.loads(json_text(plan_report(self.PROVEN))))
        VALIDATOR.validate(json.loads(json_text(estimate_report(self.PROVEN.best))))

    def test_the_table_shows_evidence_proof_and_difference(self):
        text = plan_table(self.PROVEN, 120).plain
        assert "measured (torch 2.13, trl 1.16)" in text
        assert "fits, as a probe showed" in text
        assert "proof        3 probes: the next larger batch ran out of memory" in text
        assert "GiB measured and 1.00 GiB cached; " in text and "GiB estimated (-" in text

    def test_the_page_shows_the_proof(self):
        page = plan_html(self.PROVEN)
        assert "Proof (measured)" in page and "3 probes: the next larger batch ran out of memory" in page

    def test_a_plan_without_probes_has_no_proof(self):
        assert "proof" not in json.loads(json_text(plan_report(PLAN)))
        assert "device" not in json.loads(json_text(estimate_report(ESTIMATE)))
        assert "Proof" not in plan_html(PLAN)


class TestSameCandidate:
    def test_the_name_of_a_checkpoint_makes_no_difference(self):
        instruct = load_model("Qwen2.5-0.5B-Instruct")
        assert candidate_key(replace(CANDIDATE, model=instruct)) == candidate_key(CANDIDATE)

    def test_another_depth_or_setting_makes_a_difference(self):
        shallow = {**MODEL.config, "num_hidden_layers": 2, "max_window_layers": 2}
        from planner.models.from_config import shape_of

        others = [
            replace(CANDIDATE, model=shape_of(shallow, id="x")),
            replace(CANDIDATE, lora_r=8),
            replace(CANDIDATE, max_length=1024),
        ]
        assert len({candidate_key(each) for each in (CANDIDATE, *others)}) == 4

    def test_a_setting_that_the_method_does_not_read_makes_no_difference(self):
        assert candidate_key(replace(CANDIDATE, num_generations=4)) == candidate_key(CANDIDATE)
