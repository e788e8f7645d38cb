"""The study's probes, posterior and certificate, on cards with offsets that it does not know."""

import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median

import pytest
from msgspec.structs import replace

optuna = pytest.importorskip("optuna", minversion="5.0")
contract = pytest.importorskip("optuna.testing.pytest_samplers")

import hidden_study  # noqa: E402
from hidden_cards import HiddenProbe, exhaustive_best, formulas_alone, hidden_card, truly_fits  # noqa: E402
from hidden_study import CARD, VERSIONS, problem, proven, run, space  # noqa: E402
from optuna.trial import TrialState  # noqa: E402
from random_jobs import random_questions  # noqa: E402

from planner.candidate import Candidate  # noqa: E402
from planner.errors import InputError, PlanError  # noqa: E402
from planner.jobs.job import Job  # noqa: E402
from planner.measurements.measurement import Measurement, PhasePeak  # noqa: E402
from planner.planning import plan  # noqa: E402
from probes.study.certificate import MOST_OFF, certificate, certificate_lines, certificate_report  # noqa: E402
from probes.study.posterior import PRIORS, Observation, belief_from, draw_samples, normal_cdf, prior_belief  # noqa: E402
from probes.study.sampler import MEASUREMENT, PlanSampler, distributions_of  # noqa: E402
from probes.study.space import GridPoint, Space, space_of  # noqa: E402
from probes.study.state import knowledge_of, next_point, open_points  # noqa: E402
from probes.study.storage import study_name  # noqa: E402
from probes.study.study import problem_of  # noqa: E402
from probes.study.trials import BYTES_OVER  # noqa: E402


def storage(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}"


# -- what is certified -------------------------------------------------------------------------------------------------


def test_the_certified_candidate_is_the_best_that_truly_fits(tmp_path: Path) -> None:
    answer = proven(storage(tmp_path))
    candidates = space(problem())
    best = exhaustive_best(candidates, lambda point: truly_fits(CARD, candidates, point))
    assert answer.ending == "certified" and answer.certificate.holds
    assert best is not None and answer.best is not None and answer.best.candidate == candidates.candidate(best)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [10, pytest.param(20, marks=pytest.mark.nightly)])
def test_no_candidate_of_more_merit_that_truly_fits_is_excluded_by_a_certificate_of_random_jobs(jobs: int) -> None:
    """The best is found by `exhaustive_best`; in small spaces every candidate is tried, too."""
    runs = []
    for number, candidates in islice(random_spaces(seed=11), jobs):
        card = hidden_card(CARDS + number)
        best = exhaustive_best(candidates, lambda point: truly_fits(card, candidates, point))  # noqa: B023
        if len(points := all_points(candidates, FEW_CANDIDATES)) < FEW_CANDIDATES:
            fitting = [candidates.merit(point) for point in points if truly_fits(card, candidates, point)]
            assert (best is None) == (not fitting)
            assert best is None or candidates.merit(best) == max(fitting)
        runs.append(run(candidates, card, best, room=1))
    assert all(each.right for each in runs)
    assert median(each.probes for each in runs) <= 2
    assert max(each.probes for each in runs[:10]) <= 8  # one of the others takes 12


CARDS = 1_100_000  # a seed of the hidden cards
FEW_CANDIDATES = 400  # spaces with fewer are searched one by one as well


def random_spaces(seed: int) -> Iterator[tuple[int, Space]]:
    """Random questions that some candidate answers by its estimate, so that somebody would probe."""
    for number, asked in random_questions(seed):
        with suppress(PlanError):
            candidates = space_of(asked, "cuda", formulas_alone)
            if candidates.lines and exhaustive_best(candidates, partial(estimated_to_fit, candidates)) is not None:
                yield number, candidates


def estimated_to_fit(candidates: Space, point: GridPoint) -> bool:
    answer = candidates.estimate(point) if candidates.starts(point) else None
    return answer is not None and answer.fits


def all_points(candidates: Space, most: int) -> list[GridPoint]:
    """The first candidates of a space."""
    points = (
        GridPoint(line, size, share)
        for line in range(len(candidates.lines))
        for size in range(len(candidates.lines[line].sizes))
        for low, high in (candidates.shares(line, size),)
        for share in range(low, high + 1)
    )
    return list(islice(points, most))


def test_a_certificate_says_of_each_larger_neighbour_how_it_is_known_not_to_fit(tmp_path: Path) -> None:
    found = proven(storage(tmp_path)).certificate
    assert found.neighbours[0].knob == "max_length"
    assert {each.verdict for each in found.neighbours} <= {"probe", "belief", "no start", "limit", "no gain"}
    for each in found.neighbours:
        if each.verdict == "belief":
            assert each.interval_bytes[0] > each.capacity_bytes
    assert found.excluded_by_probe + found.excluded_by_belief > 0 and found.still_open == 0
    assert json.loads(json.dumps(certificate_report(found)))["holds"] is True
    lines = certificate_lines(found)
    assert lines[0] == f"proven: this configuration ran, and none that is better fits; {found.probes} probes"
    jargon = ("belief", "excluded", "learned", "to spare", "structure", "open", "set aside")
    assert [word for word in jargon for line in lines if word in line] == []


def test_a_certificate_of_an_emulated_device_says_so() -> None:
    candidates = space_of(problem(), "emulated", formulas_alone)
    point = GridPoint(0, 0, 0)
    measured = replace(HiddenProbe(card=CARD, space=candidates).at(point), device="emulated")
    assert certificate_lines(certificate(knowledge_of(candidates, {point: measured}, {})))[0].startswith(
        "not proven (emulated): "
    )


def on_a_cpu(candidates: Space, point: GridPoint, kept_logits: float) -> Measurement:
    """The measurement of a CPU whose loss keeps a multiple of a micro-batch's logits beyond the estimate."""
    measured = HiddenProbe(card=CARD, space=candidates).at(point)
    peaks = tuple(
        PhasePeak(
            name=phase.phase,
            allocated_bytes=int(phase.allocated_bytes + kept_logits * phase.coefficients.get("logits", 0)),
            reserved_bytes=0,
            driver_bytes=0,
            seconds=0.0,
        )
        for phase in candidates.phase_models(point)
    )
    rank = replace(measured.ranks[0], phases=peaks)
    return replace(measured, device="cpu", outcome="fits", shortage=None, ranks=(rank,))


@pytest.mark.parametrize(("kept_logits", "said"), [(0.0, " "), (4.0, "% from the estimate, more than 10%")])
def test_a_cpu_whose_peak_is_not_the_estimates_certifies_nothing(kept_logits: float, said: str) -> None:
    candidates = space_of(problem(), "cpu", formulas_alone)
    point = GridPoint(0, 15, 0)
    knowledge = knowledge_of(candidates, {point: on_a_cpu(candidates, point, kept_logits)}, {})
    found = certificate(knowledge)
    assert said in certificate_lines(found)[0]
    assert (abs(found.off_share) > MOST_OFF) == (kept_logits > 0)
    assert not (found.holds and kept_logits)


def test_of_a_cpu_nothing_is_sure_before_a_probe_and_other_sizes_after_one() -> None:
    candidates = space_of(problem(), "cpu", formulas_alone)
    probed, larger = GridPoint(0, 7, 0), GridPoint(0, 15, 0)
    before = knowledge_of(candidates, {}, {})
    after = knowledge_of(candidates, {probed: on_a_cpu(candidates, probed, 4.0)}, {})
    heaviest = max(candidates.phase_models(larger), key=lambda phase: phase.coefficients.get("logits", 0))
    true = heaviest.total_bytes + 4.0 * heaviest.coefficients["logits"]
    for knowledge, spread in ((before, 0.02), (after, 0.02)):
        mean, deviation = knowledge.belief.needs(heaviest)
        assert abs(mean - true) < 3 * deviation
        assert (deviation < spread * true) == (knowledge is after)


def test_where_nothing_fits_the_study_ends_and_says_so(tmp_path: Path) -> None:
    asked = replace(
        problem(),
        cluster=replace(problem().cluster, gpu=replace(problem().cluster.gpu, total_bytes=2**33, free_bytes=2**33)),
    )
    candidates = space_of(asked, "cuda", formulas_alone)
    knowledge = knowledge_of(candidates, {}, {})
    assert open_points(knowledge) == [] and next_point(knowledge) is None
    assert certificate_lines(certificate(knowledge)) == ("nothing fits: no configuration is left that could",)


def test_no_candidate_is_probed_that_a_node_cannot_hold() -> None:
    host = replace(problem().cluster.host, total_bytes=2**30)
    candidates = space_of(replace(problem(), cluster=replace(problem().cluster, host=host)), "cuda", formulas_alone)
    assert open_points(knowledge_of(candidates, {}, {})) == []


# -- trials ------------------------------------------------------------------------------------------------------------


def test_out_of_memory_is_a_completed_trial_that_breaks_a_constraint(tmp_path: Path) -> None:
    answer = proven(storage(tmp_path))
    trials = optuna.load_study(study_name=answer.study_name, storage=answer.storage).trials
    short = [trial for trial in trials if json.loads(trial.user_attrs[MEASUREMENT])["outcome"] == "out_of_memory"]
    assert short and {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert all(trial.constraints[BYTES_OVER] > 0 and trial.value == 0 for trial in short)
    assert all(trial.constraints[BYTES_OVER] <= 0 for trial in trials if trial not in short)


def test_optunas_best_trial_is_the_certified_candidate(tmp_path: Path) -> None:
    answer = proven(storage(tmp_path))
    best = optuna.load_study(study_name=answer.study_name, storage=answer.storage).best_trial
    assert answer.best is not None
    assert best.params["max_length"] == best.value == answer.best.candidate.max_length
    assert best.params["attn_implementation"] == answer.best.candidate.attn_implementation


def test_a_trials_parameters_are_the_settings_of_its_candidate(tmp_path: Path) -> None:
    answer = proven(storage(tmp_path))
    params = optuna.load_study(study_name=answer.study_name, storage=answer.storage).trials[0].params
    assert set(params) == {
        "gradient_checkpointing", "attn_implementation", "sharding", "per_device_train_batch_size",
        "gradient_accumulation_steps", "max_length", "checkpoint_every_n_layers",
    }  # fmt: skip


def test_every_candidate_is_found_again_by_its_settings() -> None:
    asked = replace(
        problem(),
        job=Job(model=problem().job.model, method="grpo", pinned={"max_completion_length": 512}),
        cluster=problem().cluster,
    )
    candidates = space_of(asked, "cuda", formulas_alone)
    distributions = distributions_of(candidates)
    draw = random.Random(0)
    for _ in range(50):
        line = draw.randrange(len(candidates.lines))
        size = draw.randrange(len(candidates.lines[line].sizes))
        low, high = candidates.shares(line, size)
        point = GridPoint(line, size, draw.randint(low, max(high, low)))
        knobs = candidates.knobs(point)
        assert candidates.point(knobs) == point
        assert all(
            distributions[name]._contains(distributions[name].to_internal_repr(value)) for name, value in knobs.items()
        )


def test_a_trial_that_somebody_queued_is_probed_first(tmp_path: Path) -> None:
    answer = proven(storage(tmp_path), budget_seconds=-1.0)
    assert answer.ending == "budget" and answer.probes == 0
    queued = {"max_length": 1024}
    optuna.load_study(study_name=answer.study_name, storage=answer.storage).enqueue_trial(queued)
    assert proven(storage(tmp_path)).measurements[0].candidate.max_length == 1024


# -- going on ----------------------------------------------------------------------------------------------------------


def test_the_same_question_again_probes_nothing(tmp_path: Path) -> None:
    first, second = proven(storage(tmp_path)), proven(storage(tmp_path))
    assert (first.probes > 1, second.probes) == (True, 0)
    assert second.best == first.best or (
        second.best is not None
        and first.best is not None
        and second.best.candidate.max_length == first.best.candidate.max_length
    )
    assert certificate_report(second.certificate) == certificate_report(first.certificate)


def test_other_libraries_are_another_study() -> None:
    names = {study_name(problem(), "cuda", versions) for versions in (VERSIONS, {"torch": "2.13"}, {"torch": "2.14"})}
    assert len(names) == 3
    assert study_name(problem(), "cuda", VERSIONS) == study_name(problem(), "cuda", VERSIONS)
    assert all(name.startswith("Qwen2.5-7B-sft-1xA100-40G-lora-max-length-cuda-") for name in names)


def test_on_the_cpu_nothing_is_asked_that_needs_a_gpus_kernels() -> None:
    assert {line.structure.attn_implementation for line in space(problem()).lines} == {"sdpa", "flash_attention_2"}
    assert {line.structure.attn_implementation for line in space_of(problem(), "cpu", formulas_alone).lines} == {"sdpa"}
    pinned = replace(problem(), job=replace(problem().job, pinned={"attn_implementation": "flash_attention_2"}))
    with pytest.raises(
        InputError,
        match=r"^Nothing that this asks for runs on the cpu device\. Remove a --set, or give another --device\.$",
    ):
        space_of(pinned, "cpu", formulas_alone)


def test_a_study_is_kept_with_what_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAN_CACHE", str(tmp_path / "own"))
    answer = proven("", budget_seconds=-1.0)
    assert answer.storage == f"sqlite:///{tmp_path / 'own' / 'probes.db'}" and (tmp_path / "own" / "probes.db").exists()


def test_a_spent_budget_leaves_the_best_so_far(tmp_path: Path) -> None:
    now = [0.0]
    asked = problem()
    card = HiddenProbe(card=CARD, space=space(asked))

    def probe(candidate: Candidate) -> Measurement:
        now[0] += 60.0
        return card(candidate)

    short = proven(storage(tmp_path), probe, budget_seconds=130.0, clock=lambda: now[0])
    assert (short.ending, short.probes) == ("budget", 2)
    assert not short.certificate.holds and short.certificate.still_open > 0
    assert proven(storage(tmp_path), probe, clock=lambda: now[0]).ending == "certified"


def test_a_probe_that_the_budget_ends_says_nothing_about_its_candidate(tmp_path: Path) -> None:
    now, asked = [0.0], problem()
    card = HiddenProbe(card=CARD, space=space(asked))

    def slow(candidate: Candidate) -> Measurement:
        now[0] += 60.0
        return replace(card(candidate), outcome="hung", message="the time for all probes was over")

    short = proven(storage(tmp_path), slow, budget_seconds=60.0, clock=lambda: now[0])
    assert (short.ending, short.probes) == ("budget", 0)
    assert short.certificate.set_aside == ()
    again = proven(storage(tmp_path), card, clock=lambda: now[0])
    assert again.ending == "certified"


def test_ctrl_c_leaves_the_best_so_far_and_a_study_that_goes_on(tmp_path: Path) -> None:
    asked, calls = problem(), []
    card = HiddenProbe(card=CARD, space=space(asked))

    def interrupted(candidate: Candidate) -> Measurement:
        calls.append(candidate.max_length)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return card(candidate)

    stopped = proven(storage(tmp_path), interrupted)
    assert (stopped.ending, stopped.probes, len(stopped.measurements)) == ("interrupted", 1, 1)
    whole = proven(storage(tmp_path))
    assert whole.ending == "certified" and whole.measurements[0].candidate.max_length == calls[0]
    assert whole.measurements[1].candidate.max_length == calls[1]  # an interrupted candidate is no observation


def test_a_plan_is_asked_about_the_class_that_it_recommends() -> None:
    job = Job(model=problem().job.model, method="sft", pinned={"max_length": 1024}, lora_ranks=(16, 64))
    answer = plan(job, problem().cluster)
    asked = problem_of(answer)
    assert (asked.tuning_class, asked.offload, asked.job.lora_ranks) == ("lora", False, ())
    assert asked.job.pinned["lora_r"] == answer.best.candidate.lora_r


# -- the belief --------------------------------------------------------------------------------------------------------


def test_an_equality_leaves_its_noise_of_a_constant() -> None:
    belief = belief_from([Observation(kind="equal", coefficients={"runtime": 1.0}, value=1e8, noise=1e6)])
    mean, deviation = belief.constant("runtime")
    assert abs(mean - 1e8) < 1e6 and 0.9e6 < deviation <= 1e6


def test_what_two_constants_share_is_left_undecided_between_them() -> None:
    belief = belief_from(
        [Observation(kind="equal", coefficients={"activations": 1e10, "kernel:sdpa": 1e10}, value=5e8, noise=1e6)]
    )
    activations, kernel = belief.constant("activations"), belief.constant("kernel:sdpa")
    assert math.isclose(activations[0] + kernel[0], 0.05, rel_tol=1e-3)
    assert activations[0] > kernel[0] > 0 and activations[1] > 0.01
    assert belief.predict({"activations": 1e10, "kernel:sdpa": 1e10})[1] < 1.1e6


@pytest.mark.parametrize(("kind", "sign"), [("at_least", 1), ("at_most", -1)])
def test_an_inequality_cuts_the_normal_distribution(kind: str, sign: int) -> None:
    """Cut at its mean: the mean moves by sqrt(2 / pi) deviations, the variance becomes 1 - 2 / pi of itself."""
    prior = PRIORS["activations"]
    at_mean = Observation(kind=kind, coefficients={"activations": 1.0}, value=prior.mean, noise=1e-9)  # type: ignore[arg-type]
    mean, deviation = belief_from([at_mean]).constant("activations")
    assert math.isclose(mean, prior.mean + sign * math.sqrt(2 / math.pi) * prior.deviation, rel_tol=1e-6)
    assert math.isclose(deviation, math.sqrt(1 - 2 / math.pi) * prior.deviation, rel_tol=1e-6)


def test_a_surprise_is_believed_and_leaves_everything_else_less_certain() -> None:
    prior, value = PRIORS["activations"], 2.0
    belief = belief_from([Observation(kind="equal", coefficients={"activations": 1.0}, value=value, noise=1e-6)])
    assert math.isclose(belief.constant("activations")[0], value, rel_tol=1e-3)
    scale = (value - prior.mean) / prior.deviation / 4
    assert math.isclose(belief.constant("slack")[1], scale * PRIORS["slack"].deviation, rel_tol=1e-3)


def test_a_device_that_is_wholly_another_is_searched_by_halving() -> None:
    """Twice the estimated activations: no probe's result is predicted, and still few probes are needed."""
    candidates = space(problem())
    card = replace(CARD, activations=1.0)
    measured: dict[GridPoint, Measurement] = {}
    while (point := next_point(knowledge_of(candidates, measured, {}))) is not None and len(measured) < 20:
        measured[point] = HiddenProbe(card=card, space=candidates).at(point)
    best = exhaustive_best(candidates, lambda point: truly_fits(card, candidates, point))
    assert best is not None and candidates.merit(knowledge_of(candidates, measured, {}).ran[0]) == candidates.merit(
        best
    )
    assert len(measured) <= 10


def test_nothing_seen_is_the_prior() -> None:
    assert prior_belief().constant("slack") == (PRIORS["slack"].mean, PRIORS["slack"].deviation)


UNKNOWN = Observation(
    kind="at_least", coefficients={"activations": 1e10, "slack": 1e10, "counted:0": 1.0}, value=0.0, noise=1e7
)


@pytest.mark.parametrize("beside", [(), (UNKNOWN,)], ids=["alone", "beside 256 GiB of doubt"])
def test_samples_have_the_mean_and_the_spread_of_the_belief(beside: tuple[Observation, ...]) -> None:
    belief = belief_from(
        [Observation(kind="equal", coefficients={"activations": 1e10, "runtime": 1.0}, value=5e8, noise=1e7), *beside]
    )
    samples = draw_samples(belief, 20_000, 0)
    for name in ("activations", "runtime", "slack"):
        mean, deviation = belief.constant(name)
        assert abs(float(samples.values(name).mean()) - mean) < 0.05 * deviation
        assert abs(float(samples.values(name).std()) / deviation - 1) < 0.05


def test_a_probe_teaches_the_context_and_the_activations_of_the_card() -> None:
    candidates = space(problem())
    best = exhaustive_best(candidates, lambda point: truly_fits(CARD, candidates, point))
    assert best is not None
    knowledge = knowledge_of(candidates, {best: HiddenProbe(card=CARD, space=candidates).at(best)}, {})
    runtime, kernel = knowledge.belief.constant("runtime"), f"kernel:{candidates.candidate(best).attn_implementation}"
    assert abs(runtime[0] - CARD.context_bytes) < 16 * 2**20
    seen = knowledge.belief.predict({"activations": 1.0, kernel: 1.0})
    assert abs(seen[0] - CARD.activations - CARD.kernel(kernel.partition(":")[2])) < 3 * max(seen[1], 0.01)


def test_what_the_prior_excludes_fits_on_hardly_any_card() -> None:
    """The likeliest excluded candidate of each structure fits on less than one of a hundred hidden cards."""
    candidates = space(problem())
    knowledge = knowledge_of(candidates, {}, {})
    points = [
        next(GridPoint(line, size, 0) for size in range(512) if not knowledge.may_fit(GridPoint(line, size, 0)))
        for line in range(len(candidates.lines))
    ]
    cards = [hidden_card(seed) for seed in range(300)]
    assert (
        sum(truly_fits(card, candidates, point) for card in cards for point in points) < len(cards) * len(points) / 100
    )
    assert normal_cdf(0.0) == 0.5


# -- Optuna's own contract for samplers --------------------------------------------------------------------------------


def make() -> PlanSampler:
    return PlanSampler(space(problem()))


class TestSampler(contract.BasicSamplerTestCase, contract.RelativeSamplerTestCase, contract.SingleOnlySamplerTestCase):  # type: ignore[misc]
    @pytest.fixture
    def sampler(self) -> Callable[[], PlanSampler]:
        return make


def test_the_script_of_the_faults_asks_the_same_question() -> None:
    assert study_name(hidden_study.problem(), "cuda", VERSIONS) == study_name(problem(), "cuda", VERSIONS)


def test_the_password_of_a_storage_is_not_shown() -> None:
    from probes.study.storage import hide_password

    assert hide_password("mysql://me:secret@host:3306/db") == "mysql://me:***@host:3306/db"
    assert hide_password("sqlite:////home/me/probes.db") == "sqlite:////home/me/probes.db"
    with pytest.raises(InputError, match=r"^--storage has a password with an @\. Write %40 in its place\.$"):
        hide_password("mysql://me:sec@ret@host/db")
