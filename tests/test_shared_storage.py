"""A team's database: studies and measurements of several processes at once, a server that dies, migrations."""

import contextlib
import gc
import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("alembic")
optuna = pytest.importorskip("optuna", minversion="5.0")

from hidden_study import CARD, HiddenProbe, problem, proven, space  # noqa: E402
from optuna.trial import TrialState  # noqa: E402
from sqlalchemy import text  # noqa: E402
from test_measured import CLUSTER, EXPECTED, fake_measurement  # noqa: E402

import probes.study.storage  # noqa: E402
from planner.commands.exit_codes import EXIT_WRONG_INPUT  # noqa: E402
from planner.commands.main import run  # noqa: E402
from planner.errors import InputError, PlanError  # noqa: E402
from planner.files.database import make_folder_of, new_engine  # noqa: E402
from planner.measurements.own_results import (  # noqa: E402
    correct_by_own_probes,
    listed_results,
    read_own_results,
    results_file,
    save_new_results,
    save_result,
)
from planner.measurements.team_results import add_lines, line_digest, migrate, team_lines  # noqa: E402
from planner.units import MIB  # noqa: E402
from probes.study.sampler import MEASUREMENT, OWNER  # noqa: E402
from probes.study.storage import Heartbeats, database_settings, open_study  # noqa: E402
from probes.study.trials import adopt  # noqa: E402

CARD_NAME = "NVIDIA GeForce RTX 3090"
WRITERS = 4
LINES = [json.dumps({"gpu": "A", "key": str(number), "source": "probe"}) for number in range(12)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PLAN_STORAGE", raising=False)


def in_processes(function: Callable[[int], object]) -> list[object]:
    """Call a function in four processes at once, with their numbers; return what they return."""
    context = multiprocessing.get_context("fork")  # without the seconds of imports
    ends = [context.Pipe(duplex=False) for _ in range(WRITERS)]

    def work(number: int) -> None:
        ends[number][1].send(function(number))

    started = [context.Process(target=work, args=(number,)) for number in range(WRITERS)]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
    assert [process.exitcode for process in started] == [0] * WRITERS
    return [end.recv() for end, _ in ends]


# -- on SQLite ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'team' / 'team.db'}"


FIRST_INSERT = """
INSERT INTO plan_measurements (digest, source, gpu, candidate, line) VALUES (:digest, 'probe', 'L4', 'key', :line)
"""


def check_migrations(url: str) -> None:
    make_folder_of(url)
    migrate(url, "v1")
    with new_engine(url).begin() as connection:
        for line in LINES:
            connection.execute(text(FIRST_INSERT), {"digest": line_digest(line), "line": line})
    assert team_lines(url) == LINES  # brings the tables up
    assert add_lines(url, [*LINES, LINES[0].replace("A", "B")]) == 1


@pytest.mark.slow
def test_a_migration_keeps_the_rows(file: str) -> None:
    check_migrations(file)


def test_tables_of_a_newer_release_are_refused_in_one_line(file: str) -> None:
    add_lines(file, LINES)
    with sqlite3.connect(file.removeprefix("sqlite:///")) as connection:
        connection.execute("UPDATE plan_alembic_version SET version_num = 'v99'")
    connection.close()
    with pytest.raises(InputError, match=r"was written by a newer release .* Update finetune-plan\.$"):
        team_lines(file)


def altered(file: str, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(file.removeprefix("sqlite:///"))) as connection, connection:
        connection.execute(statement)


def test_a_database_whose_revision_somebody_emptied_is_one_line(file: str) -> None:
    add_lines(file, LINES)
    altered(file, "UPDATE plan_alembic_version SET version_num = ''")
    with pytest.raises(PlanError, match=r"was altered: its table plan_alembic_version has no revision\.$"):
        team_lines(file)


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE plan_measurements DROP COLUMN line",
        "UPDATE plan_alembic_version SET version_num = 'v1'",
        "DROP TABLE plan_alembic_version",
        "DROP TABLE plan_measurements",
    ],
)
def test_tables_that_lack_a_part_are_one_line(statement: str, file: str) -> None:
    add_lines(file, LINES)
    altered(file, statement)
    with pytest.raises(PlanError, match=r"cannot be read or written: .*\.$"):
        team_lines(file)


def test_a_damaged_schema_is_one_line(file: str) -> None:
    add_lines(file, LINES)
    path = Path(file.removeprefix("sqlite:///"))
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE plan", b"CREATE T\xffBLE plan"))
    with pytest.raises(PlanError, match=r"cannot be read or written: .*\.$"):
        team_lines(file)


def test_a_database_that_is_a_loop_of_links_is_one_line(file: str) -> None:
    path = Path(file.removeprefix("sqlite:///"))
    path.parent.mkdir()
    path.symlink_to(path)
    with pytest.raises(PlanError, match=r"cannot be read or written: .*\.$"):
        team_lines(file)


def test_a_line_that_is_no_utf_8_costs_that_line_alone(file: str) -> None:
    add_lines(file, LINES)
    altered(file, "UPDATE plan_measurements SET line = CAST(x'7b22ff227d' AS TEXT) WHERE id = 1")
    assert team_lines(file) == ['{"\\xff"}', *LINES[1:]]


def test_a_line_that_is_no_text_is_one_that_cannot_be_read(file: str) -> None:
    add_lines(file, LINES)
    altered(file, "UPDATE plan_measurements SET line = x'ff' WHERE id = 1")
    assert read_own_results(file).unread == len(LINES)
    assert len(list(listed_results(file))) == len(LINES)


def test_measurements_go_to_the_database_instead_of_the_cache_and_later_plans_read_them(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = [fake_measurement(), fake_measurement(more=MIB)]
    assert save_new_results(measured, CARD_NAME, file) == 2 and save_new_results(measured, CARD_NAME, file) == 0
    assert not results_file().exists() and read_own_results().results == ()
    monkeypatch.setenv("PLAN_STORAGE", file)
    corrected = correct_by_own_probes(EXPECTED, CLUSTER.gpu, read_own_results(), 0.01)
    assert corrected.evidence == "measured"


@pytest.mark.parametrize("shared", [False, True])
def test_measurements_are_listed_exported_and_forgotten(
    shared: bool, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = file if shared else ""
    where = ["--storage", file] if shared else []
    save_result(fake_measurement(), CARD_NAME, "probe", storage)
    save_result(fake_measurement(more=MIB), CARD_NAME, "run", storage)
    assert run(["measurements", *where]) == 0
    first, second, *_ = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "RTX-3090" in line]
    assert run(["measurements", "--export", *where]) == 0
    assert [json.loads(line)["source"] for line in capsys.readouterr().out.splitlines()] == ["probe", "run"]
    assert run(["measurements", "--forget", first, *where]) == 0
    assert [result.source for result in read_own_results(storage).results] == ["run"]
    assert run(["measurements", "--forget", first, *where]) == EXIT_WRONG_INPUT
    assert run(["measurements", "--forget", "all", *where]) == 0
    assert read_own_results(storage).results == () and second


def test_a_trial_of_another_host_is_given_up_when_its_heart_has_stopped(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes.study.storage, "HEARTBEAT_SECONDS", 1)
    make_folder_of(file)
    study = open_study(file, "study", optuna.samplers.RandomSampler())
    dead, living = study.ask(), study.ask()
    beats = Heartbeats(file)
    for trial in (dead, living):
        trial.set_user_attr(OWNER, "elsewhere:1:1")
        beats.beat(trial)
    with sqlite3.connect(file.removeprefix("sqlite:///")) as connection:
        connection.execute("UPDATE trial_heartbeats SET heartbeat = '2020-01-01 00:00:00' WHERE trial_id = 1")
    connection.close()
    adopt(study, space(problem()), lambda _: None, beats)
    assert [trial.state for trial in study.trials] == [TrialState.RUNNING] * 2  # its process may wait for the server
    time.sleep(1.05)
    adopt(study, space(problem()), lambda _: None, beats)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL, TrialState.RUNNING]


# -- on PostgreSQL -----------------------------------------------------------------------------------------------------


class Server:
    """A PostgreSQL server on a socket in a folder of its own."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"postgresql+psycopg://plan:secret@/postgres?host={folder}"

    def create(self) -> None:
        options = ["-D", "data", "-U", "plan", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        self._start("initdb", *options).wait(timeout=60)

    def _start(self, program: str, *options: str) -> "subprocess.Popen[bytes]":
        # PostgreSQL refuses to run as root.
        user = "nobody" if os.getuid() == 0 else None
        return subprocess.Popen(
            [str(self._programs / program), *options],
            cwd=self._folder, user=user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={"LC_ALL": "C"},
        )  # fmt: skip

    def start(self) -> None:
        options = ["-D", "data", "-k", str(self._folder), "-c", "listen_addresses=", "-c", "fsync=off"]
        for _ in range(50):
            self._process = self._start("postgres", *options)
            try:
                self._process.wait(timeout=0.3)  # processes of the killed server still end
            except subprocess.TimeoutExpired:
                return

    def wait(self) -> None:
        import psycopg

        for _ in range(100):
            try:
                psycopg.connect(host=str(self._folder), user="plan", dbname="postgres").close()
                return
            except psycopg.OperationalError:
                time.sleep(0.1)
        pytest.skip("PostgreSQL cannot be started")

    def end(self, by: signal.Signals = signal.SIGINT) -> None:
        if self._process is not None:
            self._process.send_signal(by)
            self._process.wait(timeout=20)
        self._process = None


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    pytest.importorskip("psycopg")
    found = shutil.which("postgres") or next(map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))), "")
    if not found:
        pytest.skip("PostgreSQL is not installed")
    folder = Path(tempfile.mkdtemp(prefix="plan-pg-", dir="/tmp"))  # a socket's path has at most 107 characters
    if os.getuid() == 0:
        shutil.chown(folder, "nobody")
    made = Server(Path(found).parent, folder)
    made.create()
    made.start()
    made.wait()
    yield made
    made.end()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def url(server: Server) -> str:
    """The URL of a schema without tables."""
    import psycopg

    with psycopg.connect(host=server.url.rpartition("=")[2], user="plan", dbname="postgres") as connection:
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    return server.url


def test_migrations_of_postgresql_down_and_up_keep_the_rows(url: str) -> None:
    check_migrations(url)


def test_four_processes_write_the_same_measurements_and_each_is_there_once(url: str) -> None:
    added = in_processes(
        lambda number: sum(add_lines(url, [line]) for line in (LINES if number % 2 else reversed(LINES)))
    )
    assert sum(added) == len(LINES)
    assert sorted(team_lines(url)) == sorted(LINES)


def trials(url: str) -> "list[optuna.trial.FrozenTrial]":
    storage = optuna.storages.RDBStorage(url, engine_kwargs=database_settings(url))
    (name,) = optuna.study.get_all_study_names(storage)
    return list(optuna.load_study(study_name=name, storage=storage).trials)


@pytest.mark.slow
def test_four_processes_run_one_study_and_measure_nothing_twice(url: str) -> None:
    card = HiddenProbe(card=CARD, space=space(problem()))

    def one_probe(_: int) -> str:
        asked: list[object] = []

        def probe(candidate):
            asked.append(candidate)
            time.sleep(0.5)
            return card(candidate)

        return proven(url, probe, budget_seconds=1.0, clock=lambda: float(len(asked))).ending

    assert set(in_processes(one_probe)) <= {"budget", "certified"}
    found = trials(url)
    assert all(MEASUREMENT in trial.user_attrs and trial.state.is_finished() for trial in found)
    assert len({str(sorted(trial.params.items())) for trial in found}) == len(found)
    assert len({trial.user_attrs[OWNER] for trial in found}) == len(found) > 1


@pytest.mark.slow
def test_a_study_outlasts_a_process_that_is_killed_beside_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes.study.storage, "HEARTBEAT_SECONDS", 1)
    context = multiprocessing.get_context("fork")
    begun = context.Event()

    def stuck(candidate):
        begun.set()
        time.sleep(60)

    other = context.Process(target=lambda: proven(url, stuck))
    other.start()
    assert begun.wait(60)
    threading.Timer(0.5, other.kill).start()
    assert proven(url).ending == "certified"
    other.join(60)
    found = trials(url)
    measured = [str(sorted(trial.params.items())) for trial in found if MEASUREMENT in trial.user_attrs]
    assert len(set(measured)) == len(measured) > 1
    assert sorted(trial.state for trial in found) == [TrialState.COMPLETE] * len(measured) + [TrialState.FAIL]


def test_a_server_that_refuses_a_statement_answers(url: str) -> None:
    """A study waited ten minutes for a server whose disk was full, or that ends long statements."""
    limited = url + "&options=-c%20statement_timeout=1"
    with pytest.raises(
        PlanError, match=r"cannot be read or written: .*canceling statement due to statement timeout\.$"
    ):
        add_lines(limited, LINES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE alembic_version SET version_num = 'v2.4.0.a'",
        "INSERT INTO alembic_version VALUES ('v2.4.0.a')",
        "ALTER TABLE trial_params RENAME COLUMN param_value TO value",
    ],
)
def test_tables_of_another_release_are_one_line(statement: str, url: str, server: Server) -> None:
    import psycopg

    assert proven(url).ending == "certified"
    with psycopg.connect(host=server.url.rpartition("=")[2], user="plan", dbname="postgres") as connection:
        connection.execute(statement)
    with pytest.raises(
        PlanError, match=r"^The study in postgresql\+psycopg://plan:\*\*\*@/postgres\S+ (was|cannot) .*\.$"
    ):
        proven(url)
    gc.collect()  # Optuna's session, whose open transaction holds the tables


@pytest.mark.slow
def test_a_study_outlasts_a_server_that_is_killed_and_repeats_nothing(
    url: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes.study.storage, "RETRY_SECONDS", 0.2)
    card, asked, said = HiddenProbe(card=CARD, space=space(problem())), [], []

    def probe(candidate):
        asked.append(candidate)
        if len(asked) == 2:
            server.end(signal.SIGKILL)
        return card(candidate)

    def say(line: str) -> None:
        said.append(line)
        if "does not answer" in line:
            server.start()

    assert proven(url, probe, say=say).ending == "certified"
    assert len(asked) == len(set(map(repr, asked))) == len(trials(url))
    assert [line for line in said if "does not answer" in line and "secret" not in line]


def test_a_server_that_does_not_answer_is_one_line_without_the_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("psycopg")
    url = f"postgresql+psycopg://plan:secret@/postgres?host={tmp_path}&sslpassword=hidden"
    with pytest.raises(InputError, match=r"^The database postgresql\+psycopg://plan:\*\*\*@/\S+ does not answer: "):
        proven(url)
    assert run(["measurements", "--storage", url]) == EXIT_WRONG_INPUT
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "secret" not in error and "hidden" not in error
