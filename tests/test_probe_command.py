"""`plan probe`, `plan --probe`, `plan validate` and `plan export`, on a device that returns at once."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import planner.training_stack
from planner.candidate import Candidate
from planner.commands.exit_codes import EXIT_OTHER, EXIT_PLANNED, EXIT_PROBE_CONTRADICTS, EXIT_WRONG_INPUT
from planner.commands.main import run
from planner.errors import PlanError
from planner.estimation import estimate
from planner.gpus.cluster import Cluster
from planner.gpus.parse import parse_cluster
from planner.measurements.documents import measurement_of
from planner.measurements.measurement import Measurement, Outcome, PhasePeak, RankMemory, Shortage
from planner.memory.runtime import context_bytes
from planner.training_stack import ProbeSettings

ONE = ["--model", "Qwen2.5-0.5B", "--gpus", "1xRTX-3090", "--method", "sft", "--tuning", "lora", "--max-length", "256"]
CLUSTER = parse_cluster("1xRTX-3090")
Device = Callable[[Candidate], Measurement]


def measured(candidate: Candidate, more_bytes: int = 0, outcome: Outcome = "fits") -> Measurement:
    """The measurement of a card that needs the estimate and `more_bytes`."""
    gpu = estimate(candidate, CLUSTER).gpus[0]
    context = context_bytes(CLUSTER.gpu)
    peaks = tuple(
        PhasePeak(
            name=phase.name, allocated_bytes=phase.total_bytes - context,
            reserved_bytes=phase.total_bytes - context + more_bytes, driver_bytes=phase.total_bytes + more_bytes,
            seconds=0.1,
        )
        for phase in gpu.phases
    )  # fmt: skip
    rank = RankMemory(rank=0, phases=peaks, state_bytes={}, capacity_bytes=CLUSTER.gpu.free_bytes, allocator={})
    short = Shortage(
        rank=0, phase="backward", tried_bytes=2**30, free_bytes=0, allocated_bytes=22 * 2**30, reserved_bytes=23 * 2**30
    )
    return Measurement(
        candidate=candidate, device="cuda", outcome=outcome, ranks=(rank,) if outcome == "fits" else (),
        shortage=short if outcome == "out_of_memory" else None, step_seconds=0.5, tokens_per_second=1000.0,
        wall_seconds=1.0, message="" if outcome == "fits" else "KeyError: 'q'", log="", versions={},
    )  # fmt: skip


TINY = Path(__file__).parent / "models" / "tiny-qwen2"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Device], None]:
    def use(answers: Device) -> None:
        def open_device(cluster: Cluster, settings: ProbeSettings, report_phase: object) -> Device:
            return answers

        monkeypatch.setattr(planner.training_stack, "open_device", open_device)

    monkeypatch.setenv("PLAN_CACHE", str(tmp_path / "cache"))
    return use


class TestProbe:
    def test_a_candidate_that_ran_is_measured(self, device, capsys):
        device(measured)
        assert run(["probe", *ONE, "--json"]) == EXIT_PLANNED
        report = json.loads(capsys.readouterr().out)
        assert report["evidence"] == "measured"
        assert report["throughput"]["tokens_per_second"] == 1000.0

    def test_what_was_expected_to_fit_and_ran_out_contradicts(self, device, capsys):
        device(lambda candidate: measured(candidate, outcome="out_of_memory"))
        assert run(["probe", *ONE]) == EXIT_PROBE_CONTRADICTS
        assert "Error: the candidate ran out of memory on the GPU in the backward" in capsys.readouterr().err

    def test_a_crash_is_no_answer_about_memory(self, device, capsys):
        device(lambda candidate: measured(candidate, outcome="crashed"))
        assert run(["probe", *ONE]) == EXIT_OTHER
        assert "says nothing about memory: crashed. KeyError: 'q'.\n" in capsys.readouterr().err

    def test_later_plans_know_what_was_measured(self, device, capsys):
        device(measured)
        run(["probe", *ONE, "--json"])
        capsys.readouterr()
        assert run(["estimate", *ONE, "--json"]) == EXIT_PLANNED
        report = json.loads(capsys.readouterr().out)
        assert report["evidence"] == "measured"
        assert any("probe of your own" in line for line in report["warnings"])

    @pytest.mark.parametrize("command", [["probe", *ONE], [*ONE, "--probe"]])
    def test_a_full_disk_costs_no_answer(self, command, device, monkeypatch, capsys):
        def fail(path, line):
            raise PlanError(f"{path} cannot be written: No space left on device.")

        pytest.importorskip("optuna")
        device(measured)
        monkeypatch.setattr("planner.measurements.own_results.append_line", fail)
        assert run([*command, "--json"]) == EXIT_PLANNED
        captured = capsys.readouterr()
        assert (json.loads(captured.out).get("best") or json.loads(captured.out))["evidence"] == "measured"
        assert "not kept for later plans: " in captured.err

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--device", "tpu"], "--device tpu is none of cuda, cpu, emulated."),
            (
                ["--time-limit", "soon"],
                "'soon' is not a duration. Write it in seconds, minutes or hours, such as 90s, 10m or 1h.",
            ),
            (["--time-limit", "0s"], "'0s' is not a duration."),
        ],
    )
    def test_bad_input_is_one_line(self, arguments, words, capsys):
        assert run(["probe", *ONE, *arguments]) == EXIT_WRONG_INPUT
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == 1

    def test_without_ray_its_extra_is_named(self, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "ray", None)
        monkeypatch.delitem(sys.modules, "probes.runner.ray_device", raising=False)
        monkeypatch.delattr("probes.runner.ray_device", raising=False)  # another test may have imported it
        assert run(["probe", *ONE, "--ray", "auto"]) == EXIT_WRONG_INPUT
        err = capsys.readouterr().err
        assert err.startswith("Error: --ray needs the extra ray (pip install 'finetune-plan[ray]'): ")
        assert err.count("\n") == 1


class TestProof:
    def test_a_plan_that_is_proven_says_so(self, device, capsys):
        pytest.importorskip("optuna")
        device(measured)
        assert run([*ONE, "--probe", "--json", "--quiet"]) == EXIT_PLANNED
        report = json.loads(capsys.readouterr().out)
        assert (report["best"]["evidence"], report["proof"]["device"]) == ("measured", "cuda")
        assert report["proof"]["report"]["holds"] is True

    def test_where_nothing_fits_the_probes_contradict_a_plan_that_fits(self, device, capsys):
        pytest.importorskip("optuna")
        device(lambda candidate: measured(candidate, outcome="out_of_memory"))
        assert run([*ONE, "--probe", "--set", "per_device_train_batch_size=8", "--quiet"]) == EXIT_PROBE_CONTRADICTS
        assert "The probes contradict the plan" in capsys.readouterr().err

    def test_probes_that_crash_leave_the_plan_unproven(self, device, capsys):
        pytest.importorskip("optuna")
        device(lambda candidate: measured(candidate, outcome="crashed"))
        assert run([*ONE, "--probe", "--quiet"]) == EXIT_OTHER
        assert "The probes ended early" in capsys.readouterr().err

    def test_a_budget_is_a_duration(self, device, capsys):
        pytest.importorskip("optuna")
        device(measured)
        assert run([*ONE, "--probe", "--budget", "a while"]) == EXIT_WRONG_INPUT

    def test_the_same_command_again_says_that_it_goes_on_and_repeats_nothing(self, device, capsys):
        pytest.importorskip("optuna")
        device(measured)
        for said in ("needed ", "of this study"):
            assert run([*ONE, "--probe"]) == EXIT_PLANNED
            assert said in capsys.readouterr().err
        device(lambda candidate: measured(candidate, outcome="crashed"))
        assert run([*ONE, "--probe"]) == EXIT_PLANNED

    @pytest.mark.parametrize(
        ("option", "value"), [("--budget", "5m"), ("--device", "cpu"), ("--storage", "sqlite:///a.db")]
    )
    def test_how_to_probe_is_no_answer_to_whether(self, option, value, capsys):
        assert run([*ONE, option, value]) == EXIT_WRONG_INPUT
        assert capsys.readouterr().err == f"Error: {option} says how to probe: give --probe too.\n"

    def test_a_dry_run_beside_a_probe_is_refused(self, capsys):
        assert run([*ONE, "--probe", "--dry-run"]) == EXIT_WRONG_INPUT
        assert capsys.readouterr().err == "Error: --probe runs more than --dry-run does: give one of them.\n"


class TestValidate:
    GRID = (
        '{"model": "Qwen2.5-0.5B", "method": "sft", "tuning": "lora", "max_length": 256}\n'
        '{"model": "Qwen2.5-0.5B", "method": "dpo", "max_length": 256}\n'
    )

    def test_a_grid_is_measured_once(self, device, tmp_path, capsys):
        asked: list[Candidate] = []

        def counted(candidate: Candidate) -> Measurement:
            asked.append(candidate)
            return measured(candidate, more_bytes=2**20)

        device(counted)
        grid, record = tmp_path / "grid.jsonl", tmp_path / "record.jsonl"
        grid.write_text(self.GRID)
        command = [
            "validate",
            str(grid),
            "--gpus",
            "1xRTX-3090",
            "--measure",
            "--record",
            str(record),
            "--json",
            "--quiet",
        ]
        assert run(command) == EXIT_PLANNED
        first = capsys.readouterr().out
        assert run(command) == EXIT_PLANNED
        assert capsys.readouterr().out == first
        assert len(asked) == 2
        assert [measurement_of(json.loads(line)).outcome for line in record.read_text().splitlines()] == [
            "fits",
            "fits",
        ]

    def test_measuring_needs_to_be_told_the_cards(self, tmp_path, capsys):
        (tmp_path / "grid.jsonl").write_text(self.GRID)
        assert run(["validate", str(tmp_path / "grid.jsonl"), "--measure"]) == EXIT_WRONG_INPUT
        assert "--measure needs --gpus" in capsys.readouterr().err

    def test_a_wrong_key_names_its_line(self, tmp_path, capsys):
        (tmp_path / "grid.jsonl").write_text('{"model": "Qwen2.5-0.5B", "metod": "sft"}\n')
        assert run(["validate", str(tmp_path / "grid.jsonl")]) == EXIT_WRONG_INPUT
        err = capsys.readouterr().err
        assert "1" in err and "method" in err and err.count("\n") == 1


class TestExport:
    def test_a_plan_becomes_files_that_run_it(self, tmp_path, capsys):
        assert run(["estimate", *ONE, "--out", str(tmp_path), "--quiet"]) == EXIT_PLANNED
        capsys.readouterr()
        assert run(["export", str(tmp_path / "plan.json"), str(tmp_path / "run")]) == EXIT_PLANNED
        written = {Path(line).name for line in capsys.readouterr().out.splitlines()}
        assert {"train.yaml", "accelerate.yaml", "launch.sh", "requirements.txt"} <= written

    def test_a_model_from_a_folder_is_found_again_from_anywhere(self, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(TINY.parent)
        assert (
            run(
                [
                    "estimate",
                    "--model",
                    f"./{TINY.name}",
                    "--gpus",
                    "1xT4",
                    "--method",
                    "sft",
                    "--out",
                    str(tmp_path),
                    "--quiet",
                ]
            )
            == 0
        )
        assert "tiny-qwen2 · sft" in capsys.readouterr().out
        monkeypatch.chdir(tmp_path)
        assert run(["export", "plan.json", "run"]) == EXIT_PLANNED
        assert f"model_name_or_path: {TINY}\n" in Path("run/train.yaml").read_text(encoding="utf-8")

    def test_nothing_of_the_users_is_overwritten_unasked(self, tmp_path, capsys):
        assert run(["estimate", *ONE, "--out", str(tmp_path), "--quiet"]) == EXIT_PLANNED
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "train.yaml").write_text("mine: true\n")
        assert run(["export", str(tmp_path / "plan.json"), str(tmp_path / "run")]) == EXIT_WRONG_INPUT
        assert "would be overwritten" in capsys.readouterr().err
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["train.yaml"]
        assert run(["export", str(tmp_path / "plan.json"), str(tmp_path / "run"), "--overwrite"]) == EXIT_PLANNED

    def test_a_file_that_is_no_report_is_refused(self, tmp_path, capsys):
        (tmp_path / "plan.json").write_text("{}")
        assert run(["export", str(tmp_path / "plan.json"), str(tmp_path / "run")]) == EXIT_WRONG_INPUT
        assert "is no report of plan" in capsys.readouterr().err
