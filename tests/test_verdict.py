"""The verdict against published runs that ran or ran out of memory (`results/verdict.md`)."""

import json
from functools import lru_cache
from pathlib import Path

import msgspec

from planner.confidence import FIT, Fit, fit, outcomes
from scripts import compare_published, fit_verdict

ROOT = Path(__file__).resolve().parent.parent


@lru_cache(maxsize=1)
def evidence() -> fit_verdict.Evidence:
    return fit_verdict.read_evidence()


@lru_cache(maxsize=1)
def left_out() -> dict[str, float]:
    return fit_verdict.left_out(evidence())


def verdicts(ran: bool) -> list[str]:
    return [fit_verdict.verdict(fit_verdict.probability(run, fit())) for run in outcomes() if run.ran is ran]


def test_what_ran_is_not_refused() -> None:
    said = verdicts(ran=True)
    assert sum(word != "does not fit" for word in said) >= 0.97 * len(said) and len(said) > 200


def test_what_ran_out_of_memory_does_not_fit() -> None:
    said = verdicts(ran=False)
    assert sum(word == "fits" for word in said) <= 0.1 * len(said) and len(said) > 20


def test_probabilities_are_as_good_for_sources_that_they_do_not_rest_on() -> None:
    assert fit_verdict.brier(outcomes(), lambda run: fit_verdict.probability(run, fit())) < 0.045
    assert fit_verdict.brier(outcomes(), lambda run: left_out()[run.id]) < 0.045


def test_what_is_said_to_fit_runs_99_times_of_100() -> None:
    fitting = [run.ran for run in outcomes() if fit_verdict.verdict(fit_verdict.probability(run, fit())) == "fits"]
    assert sum(fitting) >= 0.99 * len(fitting)


def test_the_package_holds_the_fit_and_the_runs_of_the_script() -> None:
    assert msgspec.json.decode(FIT.read_bytes(), type=Fit) == fit_verdict.fit_of(evidence())
    assert outcomes() == evidence().outcomes


def test_the_report_and_the_diagram_are_those_that_the_script_writes() -> None:
    assert fit_verdict.REPORT.read_text(encoding="utf-8") == fit_verdict.report(evidence(), fit(), left_out())
    claims = {
        "fitted": lambda run: fit_verdict.probability(run, fit()),
        "source left out": lambda run: left_out()[run.id],
    }
    assert fit_verdict.DIAGRAM.read_text(encoding="utf-8") == fit_verdict.diagram(outcomes(), claims)


def test_every_run_has_a_source_and_says_what_was_assumed() -> None:
    lines = [json.loads(line) for line in compare_published.OUTCOMES.read_text(encoding="utf-8").splitlines()]
    assert all(line["source"] and line["assumptions"] for line in lines)
    assert len({line["id"] for line in lines}) == len(lines)
