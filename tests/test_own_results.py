"""The user's own measurements: saved by probes, read by later plans."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from test_measured import CANDIDATE, CLUSTER, EXPECTED, MODEL, PLANNED, SHORT, fake_measurement

from planner.candidate import Candidate
from planner.commands.main import run
from planner.errors import PlanError
from planner.estimation import estimate
from planner.files.database import make_folder_of
from planner.files.journal import append_line, lines_of
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.measurements.corrected_plan import correct_plan, plan_contradiction
from planner.measurements.own_results import (
    apply_own_results,
    catalogue_name,
    correct_by_own_probes,
    own_result_notes,
    read_own_results,
    results_file,
    save_new_results,
    save_result,
)
from planner.memory.runtime import context_bytes
from planner.models.catalogue import load_model
from planner.planning import plan
from planner.report.json import json_text, plan_report
from planner.report.sentences import sentence, sentences
from planner.units import GIB, MIB

GPU = CLUSTER.gpu
CARD = "NVIDIA GeForce RTX 3090"
IMPORTS = "import sys\nfrom pathlib import Path\nfrom planner.files.journal import append_line\n"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def forbid(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Refuse this path and what is in it, as the system does to others than root."""
    wanted = Path.stat

    def stat(path: Path, **how: bool) -> os.stat_result:
        if path.is_relative_to(folder) and path != folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return wanted(path, **how)

    opened = Path.open

    def open_(path: Path, *how: Any, **more: Any) -> Any:
        if path.is_relative_to(folder):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *how, **more)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(Path, "open", open_)


class TestTheFile:
    def test_it_is_in_the_users_cache(self, own_cache):
        assert results_file() == own_cache / "measurements" / "schema-1.jsonl"

    def test_saved_results_are_read_back(self):
        save_result(fake_measurement(), CARD, "probe")
        save_result(fake_measurement(more=MIB), CARD, "run")
        found = read_own_results()
        assert [result.source for result in found.results] == ["probe", "run"]
        assert [result.gpu for result in found.results] == ["RTX-3090", "RTX-3090"]
        first = found.results[0].decode()
        assert replace(first, candidate=CANDIDATE) == fake_measurement() and found.unread == 0

    def test_without_a_file_there_is_nothing(self):
        assert read_own_results().results == ()

    def test_an_emulated_measurement_is_never_saved(self):
        with pytest.raises(ValueError, match="only what was measured is kept"):
            save_result(fake_measurement(device="emulated"), CARD, "probe")
        assert not results_file().exists()

    def test_a_study_that_goes_on_adds_what_is_new(self):
        of_no_card = [
            fake_measurement(outcome="crashed"),
            fake_measurement(device="emulated"),
            fake_measurement(device="cpu"),
        ]
        assert save_new_results([fake_measurement(), *of_no_card], CARD) == 1
        assert save_new_results([fake_measurement(), fake_measurement(more=MIB)], CARD) == 1
        assert [result.source for result in read_own_results().results] == ["probe", "probe"]

    def test_lines_that_cannot_be_read_are_counted_and_the_others_read(self):
        save_result(fake_measurement(), CARD, "probe")
        with results_file().open("a", encoding="utf-8") as file:
            file.write('{"schema": 99}\n{"schema": 1}\nnot json\n{"torn": ')
        save_result(fake_measurement(), CARD, "probe")
        found = read_own_results()
        assert len(found.results) == 2 and found.unread == 4
        notes = own_result_notes(EXPECTED, GPU, found)
        assert [note.values["lines"] for note in notes if note.code == "own_lines_unread"] == [4]

    @pytest.mark.parametrize(
        ("field", "wrong"), [("ranks", None), ("ranks", "x"), ("step_seconds", float("nan")), ("candidate", [1])]
    )
    def test_a_wrong_measurement_is_counted_and_listed_and_can_be_forgotten(self, field, wrong, capsys):
        save_result(fake_measurement(), CARD, "probe")
        row = json.loads(results_file().read_text(encoding="utf-8"))
        row["measurement"][field] = wrong
        results_file().write_text(json.dumps(row) + "\n", encoding="utf-8")
        own = read_own_results()
        assert correct_by_own_probes(EXPECTED, GPU, own, 0.01) == EXPECTED
        assert [note.values["lines"] for note in own_result_notes(EXPECTED, GPU, own)] == [1]
        assert run(["measurements"]) == 0
        digest, outcome = capsys.readouterr().out.splitlines()[-1].split()
        assert outcome == "unreadable" and run(["measurements", "--forget", digest]) == 0
        assert results_file().read_text(encoding="utf-8") == ""

    def test_a_name_of_any_length_is_listed(self, capsys):
        save_result(fake_measurement(), "9" * 5000, "probe")
        assert run(["measurements"]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) < 160

    @pytest.mark.parametrize("part", ["measurements/schema-1.jsonl", "measurements", "."])
    def test_a_file_that_may_not_be_read_is_one_line(self, part, own_cache, monkeypatch, capsys):
        save_result(fake_measurement(), CARD, "probe")
        forbid(monkeypatch, own_cache / part)
        for command in (["estimate", "--model=Qwen2.5-0.5B", "--gpus=1xL4", "--method=sft"], ["measurements"]):
            assert run(command) == 1
            assert capsys.readouterr().err.endswith(
                "schema-1.jsonl cannot be read: Permission denied. Set PLAN_CACHE to a folder of yours.\n"
            )

    def test_a_cache_that_is_a_loop_of_links_is_one_line(self, own_cache):
        own_cache.symlink_to(own_cache)
        with pytest.raises(PlanError, match="cannot be written"):
            save_result(fake_measurement(), CARD, "probe")

    def test_lines_of_several_processes_do_not_mix(self, tmp_path):
        path = tmp_path / "lines"
        script = IMPORTS + "for _ in range(50): append_line(Path(sys.argv[1]), sys.argv[2] * 9000)"
        workers = [subprocess.Popen([sys.executable, "-c", script, str(path), letter]) for letter in "ab"]
        assert [worker.wait() for worker in workers] == [0, 0]
        assert sorted(path.read_text(encoding="utf-8").split()) == ["a" * 9000] * 50 + ["b" * 9000] * 50

    def test_a_writer_that_is_killed_costs_no_other_line(self, tmp_path):
        path = tmp_path / "lines"
        script = IMPORTS + "print('go', flush=True)\nwhile True: append_line(Path(sys.argv[1]), 'x' * 9000)"
        worker = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
        assert worker.stdout is not None and worker.stdout.readline() == b"go\n"
        while not path.exists():
            pass
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
        append_line(path, "after")
        assert list(lines_of(path))[-1] == "after"


class TestPlans:
    def test_a_candidate_that_was_probed_on_such_a_card_is_measured(self):
        save_result(fake_measurement(more=100 * MIB), CARD, "probe")
        found = apply_own_results(PLANNED, read_own_results())
        assert found.best.evidence == "measured" and found.verdict == "fits"
        assert found.best.gpus[0].peak_bytes == EXPECTED.gpus[0].peak_bytes + 100 * MIB
        assert sentence(found.warnings[0]).startswith("measured by 1 probe of your own on RTX-3090: ")

    def test_the_heaviest_of_several_probes_counts_in_whatever_order(self):
        for more in (MIB, 200 * MIB, 100 * MIB):
            save_result(fake_measurement(more=more), CARD, "probe")
        found = apply_own_results(PLANNED, read_own_results())
        assert found.best.gpus[0].peak_bytes == EXPECTED.gpus[0].peak_bytes + 200 * MIB
        assert "measured by 3 probes of your own" in sentence(found.warnings[0])

    @pytest.mark.parametrize(
        ("card", "candidate"),
        [
            ("NVIDIA A100-SXM4-40GB", CANDIDATE),
            (CARD, replace(CANDIDATE, max_length=1024)),
            (CARD, replace(CANDIDATE, trl_version="1.15")),
        ],
    )
    def test_another_card_candidate_or_release_is_not_used(self, card, candidate):
        save_result(replace(fake_measurement(), candidate=candidate), card, "probe")
        found = apply_own_results(PLANNED, read_own_results())
        assert found.best == EXPECTED and found.warnings == PLANNED.warnings

    def test_a_cpu_says_nothing_about_a_card(self):
        save_result(fake_measurement(device="cpu"), CARD, "probe")
        assert apply_own_results(PLANNED, read_own_results()).best == EXPECTED

    def test_a_run_with_the_users_data_is_a_note_and_no_figure(self):
        save_result(fake_measurement(more=-GIB), CARD, "run")
        found = apply_own_results(PLANNED, read_own_results())
        assert found.best == EXPECTED
        text = sentence(found.warnings[0])
        assert "1 run of your own on RTX-3090 needed" in text and "with your data" in text

    def test_out_of_memory_is_a_note_that_says_what_to_do(self):
        save_result(fake_measurement(), CARD, "probe")
        save_result(fake_measurement(outcome="out_of_memory", shortage=SHORT), CARD, "probe")
        found = apply_own_results(PLANNED, read_own_results())
        assert found.best == EXPECTED
        assert sentence(found.warnings[0]).startswith(
            "your own probe of this candidate on RTX-3090 ran out of memory in the backward"
        )

    def test_a_context_of_another_size_is_a_note(self):
        measurement = fake_measurement()
        phases = tuple(
            replace(peak, driver_bytes=peak.reserved_bytes + context_bytes(GPU) + 300 * MIB)
            for peak in measurement.ranks[0].phases
        )
        other = replace(
            measurement,
            candidate=replace(CANDIDATE, lora_r=8),
            ranks=(replace(measurement.ranks[0], phases=phases),),
        )
        save_result(other, CARD, "run")
        (note,) = sentences(own_result_notes(EXPECTED, GPU, read_own_results()))
        assert (
            note
            == "CUDA took 0.74 GiB beside PyTorch on your RTX-3090 (median of 1 measurement); 0.45 GiB are estimated"
        )

    def test_a_crash_is_not_used(self):
        save_result(fake_measurement(outcome="crashed"), CARD, "probe")
        assert correct_by_own_probes(EXPECTED, GPU, read_own_results(), 0.01) == EXPECTED

    def test_an_instruct_model_of_the_same_layers_is_the_same_candidate(self):
        save_result(fake_measurement(), CARD, "probe")
        instruct = estimate(replace(CANDIDATE, model=load_model("Qwen2.5-0.5B-Instruct")), CLUSTER)
        assert correct_by_own_probes(instruct, GPU, read_own_results(), 0.01).evidence == "measured"

    def test_the_same_measurements_make_the_same_report(self):
        save_result(fake_measurement(more=MIB), CARD, "probe")
        texts = {json_text(plan_report(apply_own_results(PLANNED, read_own_results()))) for _ in range(2)}
        assert len(texts) == 1

    def test_a_proof_is_compared_with_the_estimate_and_not_with_itself(self):
        reach = EXPECTED.gpus[0].interval_bytes[1] - EXPECTED.gpus[0].peak_bytes
        again = fake_measurement(more=reach + GIB)
        save_result(again, CARD, "probe")
        resumed = apply_own_results(PLANNED, read_own_results())
        assert resumed.best.evidence == "measured" and plan_contradiction(resumed, [again])
        proven = correct_plan(resumed, CANDIDATE, [again], [], {})
        assert proven.proof is not None and proven.proof.expected == EXPECTED.evidence
        assert proven.best == correct_plan(PLANNED, CANDIDATE, [again], [], {}).best

    def test_a_plan_itself_reads_no_measurements(self):
        job = Job(model=MODEL, method="sft", tuning="lora", pinned={"max_length": 512})
        before = plan(job, parse_cluster("1xRTX-3090"))
        candidate: Candidate = before.best.candidate
        save_result(replace(fake_measurement(), candidate=candidate), CARD, "probe")
        assert plan(job, parse_cluster("1xRTX-3090")) == before


def test_a_card_is_saved_under_the_catalogues_name() -> None:
    assert catalogue_name("NVIDIA A100-SXM4-40GB") == "A100-40G"
    assert catalogue_name("Some Card 3000") == "Some Card 3000"


class TestWithoutTheExtraStorage:
    @pytest.fixture(autouse=True)
    def core_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "sqlalchemy", None)
        monkeypatch.setitem(sys.modules, "sqlalchemy.engine", None)

    def test_a_plan_is_answered_and_says_that_the_database_is_not_read(self, monkeypatch, capsys):
        monkeypatch.setenv("PLAN_STORAGE", "postgresql+psycopg://u:p@h/db")
        assert run(["--model", "Qwen2.5-0.5B", "--gpus", "1xT4", "--method", "sft", "--quiet"]) == 0
        assert "$PLAN_STORAGE is not read: it needs the extra storage" in " ".join(capsys.readouterr().out.split())

    def test_a_database_that_is_asked_for_names_the_extra(self, capsys):
        assert run(["measurements", "--storage", "sqlite:///x.db"]) == 2
        assert capsys.readouterr().err == (
            "Error: --storage needs the extra storage: pip install 'finetune-plan[storage]'.\n"
        )


def test_the_cache_is_its_users_alone(own_cache):
    save_result(fake_measurement(), CARD, "run")
    assert own_cache.stat().st_mode & 0o777 == 0o700


def test_what_lies_in_a_cache_that_is_open_to_others_is_its_users_alone(own_cache):
    own_cache.mkdir(mode=0o755)
    save_result(fake_measurement(), CARD, "run")
    assert results_file().parent.stat().st_mode & 0o077 == 0


def test_a_study_in_a_cache_that_is_open_to_others_is_its_users_alone(own_cache):
    own_cache.mkdir(mode=0o755)
    make_folder_of(f"sqlite:///{own_cache / 'probes.db'}")
    assert (own_cache / "probes.db").stat().st_mode & 0o077 == 0
