"""Faults of a study: killed at any moment, storage locked, probes that crash, a second process at it."""

import contextlib
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

optuna = pytest.importorskip("optuna", minversion="5.0")

from hidden_study import CARD, STAGES, HiddenProbe, problem, proven, space  # noqa: E402
from optuna.trial import TrialState  # noqa: E402

import planner.files.database  # noqa: E402
import probes.study.storage  # noqa: E402
from planner.candidate import Candidate  # noqa: E402
from planner.errors import InputError, PlanError  # noqa: E402
from planner.measurements.measurement import Measurement, Outcome  # noqa: E402
from probes.study.certificate import certificate_report  # noqa: E402
from probes.study.sampler import MEASUREMENT, OWNER, REASON  # noqa: E402
from probes.study.storage import alive, this_process  # noqa: E402

SCRIPT = Path(__file__).with_name("hidden_study.py")
SIGKILL = -9


KNOBS = (
    "max_length",
    "per_device_train_batch_size",
    "attn_implementation",
    "gradient_checkpointing",
)  # settings that identify the problem's candidates


class Card:
    """The hidden card, which records the probed candidates."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self._probe = HiddenProbe(card=CARD, space=space(problem()))

    def __call__(self, candidate: Candidate) -> Measurement:
        self.asked.append(tuple(getattr(candidate, name) for name in KNOBS))
        return self._probe(candidate)


def ends_as(outcome: Outcome, message: str) -> Measurement:
    card = HiddenProbe(card=CARD, space=space(problem()))
    fits = card(space(problem()).candidate(space(problem()).with_smallest_share(0, 0)))
    return replace(fits, outcome=outcome, ranks=(), message=message, tokens_per_second=0.0, step_seconds=0.0)


def trials(storage: str, name: str) -> list[optuna.trial.FrozenTrial]:
    return list(optuna.load_study(study_name=name, storage=storage).trials)


def storage(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    answer = proven(storage(tmp_path_factory.mktemp("undisturbed")))
    assert answer.ending == "certified" and answer.probes >= 3
    return certificate_report(answer.certificate)


# -- killed ------------------------------------------------------------------------------------------------------------


CI_STAGES = {"created", "before it was written", "told"}


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", ["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize(
    "stage", [stage if stage in CI_STAGES else pytest.param(stage, marks=pytest.mark.nightly) for stage in STAGES]
)
def test_a_study_ended_at_any_stage_goes_on_repeats_nothing_and_answers_the_same(
    stage: str, ended_by: str, tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    arguments = [sys.executable, str(SCRIPT), storage(tmp_path), stage, "2", ended_by]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    expected = (SIGKILL, "") if ended_by == "SIGKILL" else (0, "interrupted\n")
    assert (ended.returncode, ended.stdout) == expected, ended.stderr
    (name,) = optuna.study.get_all_study_names(storage(tmp_path))
    written = [
        tuple(trial.params[knob] for knob in KNOBS)
        for trial in trials(storage(tmp_path), name)
        if MEASUREMENT in trial.user_attrs
    ]
    card = Card()
    answer = proven(storage(tmp_path), card)
    assert certificate_report(answer.certificate) == undisturbed
    assert not set(written) & set(card.asked)
    assert len(card.asked) == len(set(card.asked))
    assert {trial.state for trial in trials(storage(tmp_path), name)} <= {TrialState.COMPLETE, TrialState.FAIL}


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.4, 1.2])
def test_a_study_killed_from_outside_goes_on(seconds: float, tmp_path: Path, undisturbed: dict[str, object]) -> None:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), storage(tmp_path), "told", "1000", "SIGKILL"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(seconds)
    process.kill()
    process.wait()
    assert certificate_report(proven(storage(tmp_path)).certificate) == undisturbed


# -- storage -----------------------------------------------------------------------------------------------------------


def locked(path: Path, seconds: float) -> threading.Thread:
    """Lock the file for some seconds, in a thread; returns once it is locked."""
    holds = threading.Event()

    def hold() -> None:
        connection = sqlite3.connect(path)
        connection.execute("BEGIN EXCLUSIVE")
        holds.set()
        time.sleep(seconds)
        connection.rollback()
        connection.close()

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    return thread


def test_a_locked_storage_is_waited_for(tmp_path: Path) -> None:
    proven(storage(tmp_path), budget_seconds=-1.0)
    thread = locked(tmp_path / "study.db", 1.0)
    assert proven(storage(tmp_path)).ending == "certified"
    thread.join()


def test_a_storage_that_stays_locked_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner.files.database, "LOCK_SECONDS", 0.2)
    proven(storage(tmp_path), budget_seconds=-1.0)
    thread = locked(tmp_path / "study.db", 1.0)
    said = (
        r"^The study in sqlite:///\S+ is locked by another process, for more than 0 s\. "
        r"End that one, or give another --storage\.$"
    )
    with pytest.raises(PlanError, match=said):
        proven(storage(tmp_path))
    thread.join()


@pytest.mark.parametrize("url", ["nosuch://x", "redis://localhost:1/0"])
def test_a_storage_that_is_none_is_wrong_input(url: str) -> None:
    with pytest.raises(InputError, match=rf"^--storage {url} is no storage that Optuna can open: "):
        proven(url)


@pytest.mark.parametrize("url", ["nonsense", " mysql://me:secret@host/db", "mysql://me:secret@host:port/db"])
def test_a_storage_url_that_cannot_be_parsed_is_not_shown(url: str) -> None:
    with pytest.raises(
        InputError, match=r"^--storage is no URL that SQLAlchemy can parse\. Try sqlite:///probes\.db\.$"
    ):
        proven(url)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        PlanError, match=r"^The study in sqlite:///\S+ cannot be read or written: File exists: \S+/file\.$"
    ):
        proven(f"sqlite:///{tmp_path / 'file' / 'study.db'}")


def test_a_file_that_is_no_database_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_text("not a database, " * 100, encoding="utf-8")
    with pytest.raises(PlanError, match=r"^The study in sqlite:///\S+ cannot be read or written: .*not a database"):
        proven(storage(tmp_path))


ALTERATIONS = {
    "a state": "UPDATE trials SET state = 'x' WHERE number = 1",
    "a time": "UPDATE trials SET datetime_start = 'x'",
    "a number": "UPDATE trials SET number = 'x' WHERE number = 1",
    "a value's kind": "UPDATE trial_values SET value_type = 'x'",
    "a setting": "UPDATE trial_params SET param_value = 10000 WHERE param_name = 'attn_implementation'",
    "a setting without an end": "UPDATE trial_params SET param_value = 9e999",
    "a device": "UPDATE trial_user_attributes SET value_json = replace(value_json, 'cuda', 'tuba')",
    "a column": "ALTER TABLE trial_params RENAME COLUMN param_value TO value",
    "an older release's tables": "UPDATE alembic_version SET version_num = 'v2.4.0.a'",
    "a newer release's tables": "UPDATE alembic_version SET version_num = 'v99.0.0.a'",
    "two releases of its tables": "INSERT INTO alembic_version VALUES ('v2.4.0.a')",
    "no JSON": "UPDATE trial_user_attributes SET value_json = '{'",
    "no text": "UPDATE trial_user_attributes SET value_json = '[]'",
    "no measurement": "UPDATE trial_user_attributes SET value_json = '\"[]\"' WHERE key = 'measurement'",
    "the goal": "DELETE FROM study_directions",
    "a trial that is gone": "DELETE FROM trials WHERE number = 1",
    "the tables' release": "UPDATE alembic_version SET version_num = 'x'",
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    proven(storage(folder))
    return folder / "study.db"


@pytest.mark.parametrize("alteration", ALTERATIONS.values(), ids=ALTERATIONS)
def test_a_study_that_somebody_altered_is_one_line(
    alteration: str, measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(measured, tmp_path / "study.db")
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as connection, connection:
        connection.execute(alteration)
    with pytest.raises(PlanError, match=r"^(The study|Trial \d+ of|A stored trial) .*\.$") as raised:
        proven(storage(tmp_path))
    assert "\n" not in str(raised.value)
    assert capsys.readouterr().err == ""


def test_an_owner_that_somebody_altered_is_one_line(measured: Path, tmp_path: Path) -> None:
    shutil.copy(measured, tmp_path / "study.db")
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as connection, connection:
        connection.execute("UPDATE trials SET state = 'RUNNING' WHERE number = (SELECT max(number) FROM trials)")
        connection.execute("DELETE FROM trial_user_attributes WHERE key = 'measurement'")
        connection.execute("UPDATE trial_user_attributes SET value_json = '\"a:b\"'")
    with pytest.raises(PlanError, match=r"is still running this study\. Wait for it"):
        proven(storage(tmp_path))


# -- probes that say nothing -------------------------------------------------------------------------------------------


def test_a_candidate_that_crashes_twice_is_set_aside_and_the_certificate_says_so(tmp_path: Path) -> None:
    card = Card()

    def probe(candidate: Candidate) -> Measurement:
        measured = card(candidate)
        return (
            replace(measured, outcome="crashed", ranks=(), shortage=None, message="RuntimeError: boom")
            if card.asked[0] == card.asked[-1]
            else measured
        )

    answer = proven(storage(tmp_path), probe)
    assert answer.ending == "set aside" and not answer.certificate.holds
    (aside,) = answer.certificate.set_aside
    assert aside.endswith("crashed RuntimeError: boom") and f"max_length={card.asked[0][0]}" in aside
    failed = [trial for trial in trials(storage(tmp_path), answer.study_name) if trial.state == TrialState.FAIL]
    assert [trial.user_attrs[REASON] for trial in failed] == ["crashed RuntimeError: boom"] * 2


def test_where_a_package_is_missing_what_needs_it_is_not_asked_again(tmp_path: Path) -> None:
    card = Card()

    def probe(candidate: Candidate) -> Measurement:
        measured = card(candidate)
        missing = "ImportError: the package for FlashAttention2 doesn't seem to be installed."
        return (
            replace(measured, outcome="crashed", ranks=(), shortage=None, message=missing)
            if "flash" in candidate.attn_implementation
            else measured
        )

    answer = proven(storage(tmp_path), probe)
    assert answer.ending == "certified" and answer.certificate.holds
    assert answer.best is not None and answer.best.candidate.attn_implementation == "sdpa"
    (reason,) = answer.certificate.unavailable
    assert reason.startswith("crashed ImportError: the package for FlashAttention2")
    failed = [trial for trial in trials(storage(tmp_path), answer.study_name) if trial.state == TrialState.FAIL]
    assert len(failed) == 1


def test_probes_that_always_crash_end_the_study(tmp_path: Path) -> None:
    broken = ends_as("crashed", "RuntimeError: no luck")
    answer = proven(storage(tmp_path), lambda candidate: replace(broken, candidate=candidate))
    assert (answer.ending, answer.probes, answer.best) == ("failing", 6, None)
    assert answer.reason == "6 probes said nothing about memory; the last one: crashed RuntimeError: no luck"


@pytest.mark.parametrize("outcome", ["gpu_in_use", "disk_full"])
def test_what_would_happen_to_every_candidate_ends_the_study_at_once(outcome: Outcome, tmp_path: Path) -> None:
    answer = proven(
        storage(tmp_path), lambda candidate: replace(ends_as(outcome, "somebody has it"), candidate=candidate)
    )
    assert (answer.ending, answer.probes) == ("environment", 1)
    assert answer.reason.endswith(": somebody has it")


def test_a_bug_in_the_probe_is_raised_and_the_study_goes_on_later(
    tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    def broken(candidate: Candidate) -> Measurement:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match=r"^a bug$"):
        proven(storage(tmp_path), broken)
    assert certificate_report(proven(storage(tmp_path)).certificate) == undisturbed


# -- somebody else -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_are_not_at_one_study(tmp_path: Path) -> None:
    name = proven(storage(tmp_path), budget_seconds=-1.0).study_name
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        began = probes.study.storage._start_time(other.pid)
        trial = optuna.load_study(study_name=name, storage=storage(tmp_path)).ask()
        trial.set_user_attr(OWNER, f"{socket.gethostname()}:{other.pid}:{began}")
        with pytest.raises(
            PlanError,
            match=rf"^Process {other.pid} on \S+ is still running this study\. Wait for it, "
            r"end it, or give another --storage\.$",
        ):
            proven(storage(tmp_path))
    finally:
        other.kill()
        other.wait()
    assert proven(storage(tmp_path)).ending == "certified"


def test_a_process_is_not_taken_for_another_one_of_its_number() -> None:
    host, process, began = this_process().split(":")
    assert alive(this_process())
    assert not alive(f"{host}:{process}:{began}1")
    assert alive(f"elsewhere:{process}:{began}")
