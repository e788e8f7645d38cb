"""Predictions compared with measurements: the lines of a file of cases, the compared bytes, and the signed errors."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from test_measured import SHORT, fake_measurement

from planner.candidate import Candidate
from planner.commands.main import run
from planner.errors import InputError, PlanError, ProbeFailed
from planner.estimation import estimate
from planner.files.journal import append_line, lines_of
from planner.gpus.parse import parse_cluster
from planner.measurements.cases import Case, Cases, LeftOut, case_of_measurement, read_cases
from planner.measurements.documents import measurement_line
from planner.measurements.grid import point_candidate
from planner.measurements.measurement import Measurement
from planner.measurements.validate import ComparedFigure, counted_bytes, predicted_bytes, summaries, validate
from planner.memory.runtime import CUBLAS_WORKSPACE_BYTES, context_bytes
from planner.models.catalogue import load_model
from planner.report.json import json_text
from planner.report.validation import validation_csv, validation_report, validation_table
from planner.units import GIB

GRID = Path(__file__).parent / "data" / "grid.jsonl"
PUBLISHED = Path(__file__).parent / "data" / "published.jsonl"
CLUSTER = parse_cluster("1xA100-80G")
SMALL = {"model": "Qwen/Qwen2.5-0.5B", "layers": 2}


POINT = {
    "point": {**SMALL, "dtype": "bfloat16"},
    "outcome": "fits",
    "gpu": "NVIDIA A100-SXM4-80GB",
    "total_bytes": 85_000_000_000,
}


def write_lines(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "cases.jsonl"
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def write_and_read(tmp_path: Path, *rows: object) -> Cases:
    return read_cases(write_lines(tmp_path, *rows))


def measure_estimate(candidate: Candidate) -> Measurement:
    """Measure every candidate as its estimate with 1 % more tensors."""
    answer = estimate(candidate, CLUSTER)
    return fake_measurement(answer, more=answer.gpus[0].peak_bytes // 100, capacity=CLUSTER.gpu.free_bytes)


class TestLines:
    def test_every_point_of_a_grid_is_a_case(self):
        cases = read_cases(GRID)
        assert len(cases.cases) == 18 and cases.left_out == ()
        assert {case.outcome for case in cases.cases} == {"not measured"}

    def test_a_point_is_the_candidate_of_its_trainer(self):
        candidate = point_candidate(
            {
                **SMALL,
                "method": "grpo",
                "max_length": 512,
                "max_completion_length": 200,
                "gradient_accumulation_steps": 2,
            }
        )
        assert (
            candidate.prompt_length,
            candidate.max_completion_length,
            candidate.num_generations,
            candidate.steps_per_generation,
        ) == (312, 200, 2, 2)
        assert candidate.model.num_layers == 2 and candidate.dtype == "float32" and not candidate.padded

    def test_a_point_without_beta_has_its_trainers(self):
        assert point_candidate({**SMALL, "method": "rloo", "max_length": 512}).beta == 0.05
        assert point_candidate({**SMALL, "method": "dpo", "beta": 0.2}).beta == 0.2

    def test_a_distillation_has_a_teacher(self):
        candidate = point_candidate({**SMALL, "method": "distillation", "max_length": 512})
        assert candidate.teacher_model is candidate.model

    def test_further_settings_are_read_by_their_own_names(self):
        candidate = point_candidate(
            {**SMALL, "extra": {"packing": True, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
        )
        assert candidate.packing and candidate.quantization == "nf4"
        assert point_candidate({**SMALL, "use_liger_kernel": True}).use_liger_kernel

    def test_published_figures_with_settings_are_cases(self):
        cases = read_cases(PUBLISHED)
        assert len(cases.cases) == 102 and len(cases.left_out) == 138
        assert {case.outcome for case in cases.cases} == {"fits", "out_of_memory"}

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ("{", r"line 2: That is no JSON object: Input data was truncated"),
            ("[1]", r"line 2: That is no JSON object: Expected `object`, got `array`"),
            ({}, r"line 2: it is an empty object"),
            ({"modle": "x"}, r"line 2: Unknown key 'modle'. Did you mean model"),
            (
                {**SMALL, "per_device_batch_size": 2},
                r"'per_device_batch_size'. Did you mean per_device_eval_batch_size or per_device_train_batch_size",
            ),
            ({**SMALL, "extra": {"packin": True}}, r"line 2: Unknown key 'packin'. Did you mean packing"),
            ({**SMALL, "method": "grop"}, r"line 2: Unknown method 'grop'. Did you mean grpo"),
            ({**SMALL, "model": "Qwen2.5-0.6B"}, r"line 2: Unknown model"),
            (
                {**SMALL, "optim": "adamw_torch_fusde"},
                r"line 2: Unknown optim 'adamw_torch_fusde'. Did you mean adamw_torch_fused",
            ),
            ({**SMALL, "method": "grpo", "max_length": 100}, r"line 2: max_length 100 leaves no room for a prompt"),
            (
                {**SMALL, "per_device_train_batch_size": "two"},
                r"line 2: That is no point: Expected `int`, got `str` - at `\$\.per_device_train_batch_size`",
            ),
            ({"schema": 2, "candidate": {}}, r"line 2: A measurement of schema 2"),
            (
                {"model": "Qwen2.5-0.5B", "settings": {"method": "sft", "max_lenght": 3}, "quantity": "reserved"},
                r"line 2: Unknown setting 'max_lenght'",
            ),
        ],
    )
    def test_a_bad_line_is_named_with_the_nearest_key(self, tmp_path, row, message):
        with pytest.raises(InputError, match=message):
            write_and_read(tmp_path, SMALL, row)

    def test_a_file_that_is_not_there_is_wrong_input(self, tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_cases(tmp_path / "none.jsonl")

    def test_prose_is_left_out_with_a_reason(self, tmp_path):
        (left,) = write_and_read(
            tmp_path, {"model": "x", "config": {"precision": "bf16"}, "measured": {"value_gib": 3}}
        ).left_out
        assert left.line == 1 and "prose" in left.why

    def test_empty_lines_and_comments_are_no_cases(self, tmp_path):
        (case,) = write_and_read(tmp_path, "# a grid", "", SMALL).cases
        assert case.line == 3


class TestMeasuredLines:
    def test_a_measured_point_has_both_figures_of_the_allocator(self, tmp_path):
        (case,) = write_and_read(
            tmp_path, {**POINT, "peak_allocated": 3 * GIB, "peak_reserved": 4 * GIB, "phases": []}
        ).cases
        assert case.measured == {"allocated": 3 * GIB, "reserved": 4 * GIB}
        assert case.gpu is not None and case.gpu.total_bytes == 85_000_000_000

    def test_a_point_that_ran_out_of_memory_has_no_figures(self, tmp_path):
        (case,) = write_and_read(tmp_path, {**POINT, "outcome": "oom", "message": "CUDA out of memory."}).cases
        assert case.outcome == "out_of_memory" and case.measured == {}

    @pytest.mark.parametrize("outcome", ["error", "crash", "timeout"])
    def test_a_point_that_ended_otherwise_is_left_out(self, tmp_path, outcome):
        (left,) = write_and_read(tmp_path, {**POINT, "outcome": outcome, "message": "a word"}).left_out
        assert left.why.startswith(outcome)

    def test_a_measurement_is_a_case_of_its_device(self, tmp_path):
        on_gpu, on_cpu = fake_measurement(), fake_measurement(device="cpu", capacity=0)
        first, second = write_and_read(
            tmp_path,
            measurement_line(replace(on_gpu, versions={"gpu": "NVIDIA GeForce RTX 3090"})),
            measurement_line(on_cpu),
        ).cases
        assert first.measured.keys() == {"allocated", "reserved", "driver"} and second.measured.keys() == {"tensors"}
        assert first.gpu is not None and first.gpu.name == "RTX-3090"


class TestComparison:
    def test_each_quantity_contains_what_its_counter_counts(self):
        candidate = point_candidate({**SMALL, "dtype": "bfloat16"})
        phase = estimate(candidate, CLUSTER).gpus[0].peak
        sizes = [
            counted_bytes(phase, quantity, candidate, CLUSTER.gpu)
            for quantity in ("driver", "reserved", "allocated", "tensors")
        ]
        assert sizes[0] == phase.total_bytes
        assert sizes[0] - sizes[1] == context_bytes(CLUSTER.gpu)
        assert sizes[1] - sizes[2] == phase.components["fragmentation"]
        assert sizes[2] - sizes[3] == 2 * CUBLAS_WORKSPACE_BYTES

    def test_a_figure_equal_to_the_estimate_has_no_error(self, tmp_path):
        answer = estimate(point_candidate({**SMALL, "dtype": "bfloat16"}), CLUSTER)
        figures = {
            name: predicted_bytes(answer.gpus[0], name, answer.candidate, CLUSTER.gpu)
            for name in ("allocated", "reserved")
        }
        line = {**POINT, **{f"peak_{name}": size for name, size in figures.items()}}
        del line["total_bytes"]
        validation = validate(write_and_read(tmp_path, line))
        assert [row.error("estimated") for row in validation.figures] == [0.0, 0.0]

    def test_errors_are_signed_and_summed_up_by_method_and_tuning(self, tmp_path):
        lines = [{**POINT, "peak_allocated": size} for size in (GIB // 4, 100 * GIB)]
        lines.append({**POINT, "point": {**SMALL, "tuning": "full"}, "peak_allocated": 100 * GIB})
        validation = validate(write_and_read(tmp_path, *lines))
        found = {summary.group: summary for summary in summaries(validation) if summary.evidence == "estimated"}
        assert found.keys() == {"sft lora", "sft full", "all"}
        errors = [row.error("estimated") for row in validation.figures]
        assert errors[0] > 0 > errors[1]
        assert (found["all"].count, found["all"].under, found["sft lora"].under) == (3, 2, 1)
        assert found["all"].worst == max(errors, key=abs)
        assert found["sft lora"].mean == pytest.approx(sum(errors[:2]) / 2)

    def test_a_case_without_a_card_asks_for_one(self, tmp_path):
        cases = write_and_read(tmp_path, {**POINT, "gpu": None, "peak_allocated": GIB})
        with pytest.raises(InputError, match=r"Line 1 names no GPU\. Say which one with --gpus"):
            validate(cases)
        assert validate(cases, CLUSTER).figures[0].quantity == "allocated"

    def test_tensors_need_no_card(self, tmp_path):
        assert (
            len(
                validate(write_and_read(tmp_path, measurement_line(fake_measurement(device="cpu", capacity=0)))).figures
            )
            == 1
        )

    def test_out_of_memory_is_foreseen_or_not(self, tmp_path):
        large = {**POINT["point"], "per_device_train_batch_size": 512, "max_length": 32768, "tuning": "full"}
        validation = validate(
            write_and_read(tmp_path, *({**POINT, "point": point, "outcome": "oom"} for point in (large, SMALL)))
        )
        assert [ending.foreseen["estimated"] for ending in validation.out_of_memory] == [True, False]
        text = validation_table(validation).plain
        assert "out of memory: 1 of 2 were estimated not to fit" in text and "estimated to fit" in text

    def test_a_dry_run_that_refuses_leaves_the_estimate(self, tmp_path):
        messages: list[str] = []

        def refuses(answer, cluster):
            raise ProbeFailed("no such kernel")

        lines = {**POINT, "point": {**SMALL, "use_liger_kernel": True}, "peak_allocated": GIB}
        (row,) = validate(write_and_read(tmp_path, lines), dry_run=refuses, say=messages.append).figures
        assert row.predicted.keys() == {"estimated"} and "line 1 is not emulated: no such kernel" in messages

    def test_a_dry_run_stands_beside_the_estimate(self, tmp_path):
        def runs(answer, cluster):
            return replace(fake_measurement(answer), device="emulated")

        validation = validate(write_and_read(tmp_path, {**POINT, "point": SMALL, "peak_allocated": GIB}), dry_run=runs)
        (row,) = validation.figures
        assert row.predicted.keys() == {"estimated", "emulated"}
        assert "emulated" in validation_table(validation).plain


class TestMeasuring:
    def test_each_measured_point_of_a_grid_is_recorded(self, tmp_path):
        record = tmp_path / "out" / "measured.jsonl"
        cases = write_and_read(tmp_path, SMALL, {**SMALL, "lora_r": 8})
        validation = validate(cases, CLUSTER, probe=measure_estimate, record=record)
        assert len(list(lines_of(record))) == 2
        assert {row.quantity for row in validation.figures} == {"allocated", "reserved", "driver"}
        assert all(-0.011 < row.error("estimated") < 0.01 for row in validation.figures if row.quantity == "driver")

    def test_a_point_in_the_record_is_not_measured_again(self, tmp_path):
        record = tmp_path / "measured.jsonl"
        cases = write_and_read(tmp_path, SMALL, {**SMALL, "lora_r": 8})
        probed: list[Candidate] = []

        def interrupted(candidate: Candidate) -> Measurement:
            probed.append(candidate)
            if len(probed) == 2:
                raise KeyboardInterrupt
            return measure_estimate(candidate)

        first = validate(cases, CLUSTER, probe=interrupted, record=record)
        assert first.interrupted and len(first.figures) == 3 and "interrupted" in validation_table(first).plain
        again = validate(cases, CLUSTER, probe=interrupted, record=record)
        assert [candidate.lora_r for candidate in probed] == [16, 8, 8]
        assert again == validate(cases, CLUSTER, record=record) and not again.interrupted

    def test_a_line_that_was_cut_off_is_measured_again(self, tmp_path):
        record = tmp_path / "measured.jsonl"
        cases = write_and_read(tmp_path, SMALL)
        validate(cases, CLUSTER, probe=measure_estimate, record=record)
        record.write_text(record.read_text(encoding="utf-8")[:-100], encoding="utf-8")
        assert len(validate(cases, CLUSTER, probe=measure_estimate, record=record).figures) == 3
        assert len(list(lines_of(record))) == 2  # the line that was cut off is ended, and is no measurement

    def test_a_record_of_something_else_is_not_added_to(self, tmp_path):
        record = tmp_path / "notes.jsonl"
        record.write_text('{"a": 1}\n', encoding="utf-8")
        with pytest.raises(InputError, match=r"notes\.jsonl, line 1: That is no measurement"):
            validate(write_and_read(tmp_path, SMALL), CLUSTER, probe=measure_estimate, record=record)
        assert record.read_text(encoding="utf-8") == '{"a": 1}\n'

    def test_a_crash_is_recorded_and_a_card_in_use_is_probed_again(self, tmp_path):
        record = tmp_path / "measured.jsonl"

        def ends(outcome):
            return lambda candidate: replace(measure_estimate(candidate), outcome=outcome, message="a word")

        (left,) = validate(write_and_read(tmp_path, SMALL), CLUSTER, probe=ends("gpu_in_use"), record=record).left_out
        assert left.why == "gpu in use: a word" and not record.exists()
        validate(write_and_read(tmp_path, SMALL), CLUSTER, probe=ends("crashed"), record=record)
        (left,) = validate(write_and_read(tmp_path, SMALL), CLUSTER, probe=measure_estimate, record=record).left_out
        assert left.why == "crashed: a word"

    def test_without_a_device_points_are_left_out(self, tmp_path):
        validation = validate(write_and_read(tmp_path, SMALL), CLUSTER)
        assert validation.left_out == (LeftOut(line=1, why="not measured"),)
        assert "left out: 1 (line 1): not measured" in validation_table(validation).plain

    def test_a_device_that_runs_out_of_memory_gives_no_figure(self, tmp_path):
        validation = validate(
            write_and_read(tmp_path, SMALL),
            CLUSTER,
            probe=lambda candidate: replace(measure_estimate(candidate), outcome="out_of_memory", shortage=SHORT),
        )
        assert len(validation.out_of_memory) == 1 and validation.figures == ()


class TestReports:
    @pytest.fixture
    def validation(self, tmp_path):
        return validate(write_and_read(tmp_path, SMALL, {**SMALL, "tuning": "full"}), CLUSTER, probe=measure_estimate)

    def test_the_table_shows_every_group_and_case(self, validation):
        text = validation_table(validation).plain
        assert "2 cases measured" in text and "under 3%" in text
        for line in ("sft lora", "sft full", "all", "line 2 Qwen/Qwen2.5-0.5B of 2 layers sft full 1 x 1024: "):
            assert line in text

    def test_the_json_is_one_document_with_integers(self, validation):
        report = json.loads(json_text(validation_report(validation)))
        assert report["schema"] == 1 and len(report["rows"]) == 6
        assert all(
            isinstance(row["measured_bytes"], int) and isinstance(row["predicted"]["estimated"]["bytes"], int)
            for row in report["rows"]
        )

    def test_the_csv_has_a_row_for_each_measured_figure(self, validation):
        rows = list(csv.DictReader(io.StringIO(validation_csv(validation))))
        measured = [row["measured_bytes"] for row in json.loads(json_text(validation_report(validation)))["rows"]]
        assert [int(row["measured_bytes"]) for row in rows] == measured
        assert {"estimated_error", "estimated_bytes", "line", "label", "group", "quantity"} <= set(rows[0])


class TestJournal:
    def test_a_line_after_a_cut_off_one_is_whole(self, tmp_path):
        path = tmp_path / "lines"
        path.write_text("whole\ntor", encoding="utf-8")
        assert list(lines_of(path)) == ["whole"]
        append_line(path, "next")
        assert list(lines_of(path)) == ["whole", "tor", "next"]

    def test_a_file_that_cannot_be_written_is_the_users_to_change(self, tmp_path):
        (tmp_path / "file").write_text("", encoding="utf-8")
        with pytest.raises(PlanError, match="cannot be written"):
            append_line(tmp_path / "file" / "lines", "x")


def test_an_error_is_predicted_over_measured_minus_one() -> None:
    case = Case(line=1, label="", candidate=point_candidate(SMALL), gpu=None, measured={}, outcome="fits")
    assert ComparedFigure(case=case, quantity="driver", measured_bytes=100, predicted={"estimated": 97}).error(
        "estimated"
    ) == pytest.approx(-0.03)


def test_a_figure_of_an_emulated_card_is_never_called_measured() -> None:
    found = measure_estimate(Candidate(model=load_model("Qwen2.5-0.5B"), method="sft"))
    case = case_of_measurement(replace(found, device="emulated"), 1, CLUSTER.gpu)
    assert isinstance(case, Case) and case.evidence == "emulated"


def test_the_published_figures_of_the_results_are_cases(capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(__file__).parents[1] / "results" / "published.jsonl"
    assert len(read_cases(file).cases) > 90


def test_the_lines_that_the_help_shows_are_cases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["validate", "--help"]) == 0
    shown = re.findall(r"^    (\{.*?\})$", capsys.readouterr().out, flags=re.DOTALL | re.MULTILINE)
    file = tmp_path / "cases.jsonl"
    file.write_text("".join(" ".join(each.split()) + "\n" for each in shown), encoding="utf-8")
    read = read_cases(file)
    assert [case.outcome for case in read.cases] == ["not measured", "fits"]
