"""Arguments, output and exit codes of the command, with a fake planner; tests/test_golden.py has the real one."""

import io
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from msgspec.structs import replace
from report_samples import ESTIMATE, NOTHING_FITS, PLAN

import planner.ask
import planner.training_stack
from planner.candidate import Candidate
from planner.commands.main import run
from planner.gpus.cluster import Cluster
from planner.jobs.job import Job
from planner.planning import Plan
from planner.quantities import Estimate
from planner.report.documents.schema import json_schema

ASKED = ["--model", "Qwen2.5-7B", "--gpus", "2xA100-40G", "--method", "grpo"]


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Job, Cluster]]:
    """Replace the planner by one that returns a plan written by hand and records its calls; nothing fits on a T4."""
    questions: list[tuple[Job, Cluster]] = []

    def plan(job: Job, cluster: Cluster, residuals: object = None) -> Plan:
        questions.append((job, cluster))
        return NOTHING_FITS if cluster.gpu.name == "T4" else PLAN

    def estimate(candidate: Candidate, cluster: Cluster, risk: float = 0.01) -> Estimate:
        return replace(ESTIMATE, candidate=candidate, fits=cluster.gpu.name != "T4")

    monkeypatch.setattr(planner.ask, "plan_job", plan)
    monkeypatch.setattr(planner.ask, "estimate_candidate", estimate)
    monkeypatch.setenv("COLUMNS", "100")
    return questions


def settings_printed(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    settings: dict[str, object] = json.loads(capsys.readouterr().out)["settings"]
    return settings


class TestSearch:
    def test_the_table_is_the_answer_and_nothing_else(self, capsys):
        assert run(ASKED) == 0
        out, err = capsys.readouterr()
        assert out.startswith("Qwen/Qwen2.5-7B · grpo · 2 x A100-40G")
        assert err == ""
        assert "\x1b" not in out

    def test_v_shows_the_memory_of_each_phase_and_every_note(self, capsys):
        assert run([*ASKED, "-v"]) == 0
        verbose = capsys.readouterr().out
        assert run(ASKED) == 0
        short = capsys.readouterr().out
        assert "optimizer step  █" in verbose and "why          " in verbose
        assert "optimizer step  █" not in short and len(short.splitlines()) < 24

    def test_json_is_one_document(self, capsys):
        assert run([*ASKED, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["verdict"] == "fits"

    def test_what_is_set_is_pinned(self, planned):
        flags = [
            "--max-length",
            "2048",
            "--batch-size",
            "4",
            "--lora-r",
            "8",
            "--prompt-length",
            "100",
            "--max-completion-length",
            "200",
            "--no-padded",
        ]
        assert run([*ASKED, *flags, "--set", "zero_stage=3", "--set", "dtype=auto"]) == 0
        ((job, _),) = planned
        assert job.pinned == {
            "max_length": 2048,
            "per_device_train_batch_size": 4,
            "lora_r": 8,
            "tuning": "lora",
            "prompt_length": 100,
            "max_completion_length": 200,
            "padded": False,
            "sharding": "zero3",
            "dtype": "bfloat16",
        }

    def test_the_job_and_the_cluster_are_what_was_asked(self, planned):
        flags = [
            "--tuning",
            "qlora",
            "--optimize",
            "max-length",
            "--risk",
            "0.05",
            "--effective-batch-size",
            "64",
            "--free-memory",
            "30GiB",
        ]
        assert run([*ASKED, *flags, "--trl-version", "1.15"]) == 0
        ((job, cluster),) = planned
        assert (job.tuning, job.optimize, job.risk, job.effective_batch_size, job.trl_version) == (
            "qlora",
            "max-length",
            0.05,
            64,
            "1.15",
        )
        assert (cluster.num_gpus, cluster.gpu.free_bytes) == (2, 30 * 2**30)

    def test_tokens_may_be_written_in_thousands(self, planned, capsys):
        assert run([*ASKED, "--prompt-length", "1k", "--max-completion-length", "4K"]) == 0
        pinned = planned[0][0].pinned
        assert (pinned["prompt_length"], pinned["max_completion_length"]) == (1024, 4096)
        assert run([*ASKED[:-1], "sft", "--max-length", "4x"]) == 2
        assert "'4x' is no number of tokens. Write it as 4096 or 4k." in capsys.readouterr().err

    def test_a_reward_model_is_loaded_by_its_name(self, planned):
        assert run([*ASKED, "--set", "reward_model_name_or_path=Qwen2.5-0.5B"]) == 0
        assert planned[0][0].pinned["reward_model"].id == "Qwen/Qwen2.5-0.5B"

    def test_nothing_fits_is_exit_3_with_the_nearest_on_stdout_and_the_reason_on_stderr(self, capsys):
        assert run(["--model", "Qwen2.5-7B", "--gpus", "1xT4", "--method", "sft"]) == 3
        out, err = capsys.readouterr()
        assert "nearest" in out
        assert err.startswith("Error: No candidate fits")
        assert err.count("\n") == 1

    def test_files_are_written_where_they_are_asked_for(self, tmp_path, capsys):
        assert run([*ASKED, "--out", str(tmp_path / "new"), "--html", str(tmp_path / "page.html"), "--json"]) == 0
        out, err = capsys.readouterr()
        assert (tmp_path / "new" / "plan.json").read_text() == out
        assert (tmp_path / "new" / "plan.txt").read_text().startswith("Qwen/Qwen2.5-7B")
        assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
        assert err.count("wrote ") == 3

    def test_quiet_says_nothing_about_files(self, tmp_path, capsys):
        assert run([*ASKED, "--out", str(tmp_path), "--quiet"]) == 0
        assert capsys.readouterr().err == ""


class TestEstimate:
    def test_one_candidate_is_trls_defaults_and_the_flags(self, capsys):
        assert run(["estimate", *ASKED, "--tuning", "qlora", "--json"]) == 0
        settings = settings_printed(capsys)
        assert (settings["use_peft"], settings["load_in_4bit"], settings["dtype"], settings["num_processes"]) == (
            True,
            True,
            "float32",
            2,
        )
        assert (settings["per_device_train_batch_size"], settings["distributed_type"]) == (8, "MULTI_GPU")

    def test_a_quantized_load_means_adapters(self, capsys):
        assert run(["estimate", *ASKED, "--set", "load_in_4bit=true", "--json"]) == 0
        assert settings_printed(capsys)["use_peft"] is True

    def test_pefts_own_targets_are_what_trl_calls_none(self, capsys):
        assert run(["estimate", *ASKED, "--set", "lora_target_modules=default", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["settings"]["lora_target_modules"] is None
        jsonschema.validate(report, json_schema())

    def test_the_effective_batch_is_kept_by_accumulation(self, capsys):
        assert run(["estimate", *ASKED, "--effective-batch-size", "64", "--json"]) == 0
        settings = settings_printed(capsys)
        assert (settings["gradient_accumulation_steps"], settings["steps_per_generation"]) == (4, 4)

    def test_a_server_takes_its_gpus_from_the_trainer(self, capsys):
        assert (
            run(
                [
                    "estimate",
                    *ASKED[:2],
                    "--gpus",
                    "8xH100",
                    "--method",
                    "grpo",
                    "--set",
                    "vllm_mode=server",
                    "--set",
                    "vllm_tensor_parallel_size=2",
                    "--json",
                ]
            )
            == 0
        )
        assert settings_printed(capsys)["num_processes"] == 6

    def test_a_config_file_is_read_and_flags_win_over_it(self, tmp_path, capsys):
        file = tmp_path / "train.yaml"
        file.write_text(
            "model_name_or_path: Qwen/Qwen2.5-7B\nuse_peft: true\nper_device_train_batch_size: 16\nlearning_rate: "
            "1.0e-5\nmax_completion_length: 64\n"
        )
        asked = [
            "estimate",
            "--config",
            str(file),
            "--gpus",
            "1xA100-40G",
            "--method",
            "grpo",
            "--max-completion-length",
            "128",
            "--json",
        ]
        assert run(asked) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["settings"]["per_device_train_batch_size"] == 16
        assert report["settings"]["max_completion_length"] == 128
        assert report["settings"]["lora_target_modules"] == ["q_proj", "v_proj"]
        assert report["warnings"][0] == "not used by the plan: learning_rate"

    def test_a_candidate_that_does_not_fit_is_exit_3_with_the_reason_on_stderr(self, capsys):
        assert run(["estimate", "--model", "Qwen2.5-0.5B", "--gpus", "1xT4", "--method", "sft"]) == 3
        assert capsys.readouterr().err.startswith("Error: The candidate does not fit: it peaks at ")

    def test_a_length_that_the_method_has_not_is_said(self, capsys):
        assert run(["estimate", *ASKED, "--max-length", "4096", "--json"]) == 0
        warnings = json.loads(capsys.readouterr().out)["warnings"]
        assert "max_length is not used: the rows of grpo are prompt_length and max_completion_length" in warnings

    def test_a_card_without_bfloat16_gets_fp16_and_a_word(self, capsys):
        assert run(["estimate", "--model", "Qwen2.5-0.5B", "--gpus", "1xV100-16G", "--method", "sft", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["settings"]["bf16"], report["settings"]["fp16"]) == (False, True)
        assert any("V100-16G has no bfloat16" in warning for warning in report["warnings"])

    def test_a_key_of_the_file_that_the_method_has_not_is_said_and_dropped(self, tmp_path, capsys):
        file = tmp_path / "train.yaml"
        file.write_text("model_name_or_path: Qwen/Qwen2.5-7B\npacking: true\nmax_seq_length: 4096\n")
        assert (
            run(
                [
                    "estimate",
                    "--config",
                    str(file),
                    "--gpus",
                    "1xA100-40G",
                    "--method",
                    "dpo",
                    "--max-length",
                    "512",
                    "--json",
                ]
            )
            == 0
        )
        report = json.loads(capsys.readouterr().out)
        assert report["warnings"][0] == "dpo has no packing: TRL stops at a config that sets it"
        assert report["settings"]["max_length"] == 512

    def test_the_tuning_flag_wins_over_the_file(self, tmp_path, capsys):
        file = tmp_path / "train.yaml"
        file.write_text("model_name_or_path: Qwen/Qwen2.5-7B\nlearning_rate: 1.0e-5\n")
        assert (
            run(
                [
                    "estimate",
                    "--config",
                    str(file),
                    "--gpus",
                    "1xA100-40G",
                    "--method",
                    "sft",
                    "--tuning",
                    "lora",
                    "--json",
                ]
            )
            == 0
        )
        assert settings_printed(capsys)["lora_target_modules"] == "all-linear"

    def test_an_estimate_has_a_page(self, tmp_path):
        assert run(["estimate", *ASKED, "--html", str(tmp_path / "page.html"), "--quiet"]) == 0
        assert "candidate" not in (tmp_path / "page.html").read_text().split("<body>")[0]


class TestWrongInput:
    def test_a_config_without_a_method_is_in_the_example(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "my sft.yaml").write_text("model_name_or_path: Qwen/Qwen2.5-0.5B\n")
        assert run(["--config", "my sft.yaml", "--gpus", "1x24GB"]) == 2
        example = "plan --config 'my sft.yaml' --gpus 1x24GB --method grpo. Methods are"
        assert f"--method is missing. For example: {example}" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                ["estimate"],
                "--model, --gpus and --method are missing. For example: plan --model Qwen2.5-7B --gpus 2xA100-40G "
                "--method grpo",
            ),
            (ASKED[:4], "--method is missing. For example: plan --model Qwen2.5-7B --gpus 2xA100-40G --method grpo"),
            (
                ["--model", "Llama-3.1-8B", "--gpus", "1x24GB"],
                "--method is missing. For example: plan --model Llama-3.1-8B --gpus 1x24GB --method grpo. Methods are",
            ),
            (["--modell", "x"], "No such option: --modell"),
            (["--model"], "Option '--model' requires an argument."),
            (["estimat"], "No such command 'estimat'."),
            (["--model", r"C:\models\Qwen2.5-7B", *ASKED[2:]], r"C:\models\Qwen2.5-7B/config.json does not exist. "),
            ([*ASKED[:5], "grop"], "Unknown method 'grop'. Did you mean"),
            ([*ASKED, "--tuning", "qlor"], "Unknown tuning class 'qlor'. Did you mean qlora"),
            ([*ASKED, "--optimize", "speed"], "Unknown goal 'speed'."),
            ([*ASKED, "--risk", "2"], "Invalid value for '--risk': Input should be less than or equal to 0.499999"),
            (
                [*ASKED, "--risk", "some"],
                "Invalid value for '--risk': Input should be a valid number",
            ),
            (
                [*ASKED, "--max-length", "0"],
                "Invalid value for '--max-length': 0 is not from 1 to 1,000,000,000",
            ),
            (
                [*ASKED, "--max-length", "-8"],
                "Invalid value for '--max-length': '-8' is no number of tokens",
            ),
            (
                [*ASKED, "--effective-batch-size", "0"],
                "Invalid value for '--effective-batch-size': Input should be greater than or equal to 1",
            ),
            ([*ASKED, "--max-length", "8", "--set", "max_length=9"], "max_length is set twice: 8 and 9."),
            ([*ASKED, "estimate"], "--model stands before estimate. Put it behind: plan estimate --model ..."),
            ([*ASKED[:2], "--gpus", "2xA100-41G", "--method", "sft"], "Unknown GPU 'A100-41G'."),
            (["--model", "Qwen2.5-7C", *ASKED[2:]], "Unknown model 'Qwen2.5-7C'. Did you mean"),
            (
                ["estimate", *ASKED, "--effective-batch-size", "7"],
                "--effective-batch-size 7 is not made of whole samples on 2 GPUs and groups of 8. Use 8.",
            ),
            (
                ["estimate", *ASKED, "--effective-batch-size", "24"],
                "--effective-batch-size 24 is no multiple of 8 samples on each of 2 data-parallel ranks.",
            ),
            (
                ["estimate", *ASKED, "--effective-batch-size", "24", "--set", "gradient_accumulation_steps=3"],
                "--effective-batch-size 24 contradicts gradient_accumulation_steps 3, which makes 48.",
            ),
            (
                ["estimate", *ASKED, "--config", "missing.yaml"],
                "missing.yaml cannot be read: No such file or directory.",
            ),
        ],
    )
    def test_wrong_input_is_one_line_and_exit_2(self, arguments, message, capsys):
        assert run(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"Error: {message}")
        assert err.count("\n") == 1

    @pytest.mark.parametrize(
        ("arguments", "ending"),
        [
            (["Qwen2.5-7B"], "and plan alone, with a model as --model NAME."),
            (ASKED[:4], "Methods are sft, dpo, kto, orpo, cpo, tpo, reward, grpo, rloo, gmpo, async-grpo, "
             "a2po, online-dpo, gkd, gold, iw-opd, distillation, server-distillation, "
             "async-distillation, sdft, sdpo, ppo."),
            (["--model", r"C:\models\Qwen2.5-7B", *ASKED[2:]], r"or a name. In WSL, C:\models is /mnt/c/models."),
        ],
    )  # fmt: skip
    def test_wrong_input_ends_with_what_can_be_given(self, arguments, ending, capsys):
        assert run(arguments) == 2
        assert capsys.readouterr().err.endswith(f"{ending}\n")

    @pytest.mark.parametrize("method", ["gkd", "ppo", "grpo"])
    def test_a_server_that_leaves_no_gpu_is_refused_in_one_line(self, method, capsys):
        server = ["--set", "use_vllm=true", "--set", "vllm_mode=server"]
        assert run(["estimate", "--model", "Qwen2.5-0.5B", "--gpus", "1xA10G", "--method", method, *server]) == 2
        assert "leaves none for the trainer" in capsys.readouterr().err

    def test_a_place_that_cannot_be_written_is_exit_2(self, tmp_path, capsys):
        (tmp_path / "file").write_text("")
        assert run([*ASKED, "--out", str(tmp_path / "file")]) == 2
        assert capsys.readouterr() == (
            "",
            f"Error: {tmp_path / 'file'} cannot be written: {tmp_path / 'file'} is no folder.\n",
        )

    def test_where_one_file_cannot_be_written_none_is(self, tmp_path, capsys):
        (tmp_path / "new" / "plan.json").mkdir(parents=True)
        assert run([*ASKED, "--out", str(tmp_path / "new"), "--html", str(tmp_path / "page.html")]) == 2
        assert capsys.readouterr().out == ""
        assert [path.name for path in tmp_path.rglob("*")] == ["new", "plan.json"]

    def test_a_bug_of_ours_keeps_its_traceback(self, monkeypatch):
        monkeypatch.setattr(planner.ask, "plan_job", lambda job, cluster, residuals=None: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            run(ASKED)


class TestNothingIsDroppedSilently:
    @pytest.mark.parametrize("command", [[], ["estimate"]])
    def test_files_of_a_plan_that_does_not_fit_need_a_flag(self, command, tmp_path, capsys):
        job = [*command, "--model", "Qwen2.5-7B", "--gpus", "1xT4", "--method", "sft", "--out", str(tmp_path)]
        assert run(job) == 3
        capsys.readouterr()
        folder = tmp_path / "run"
        assert run(["export", str(tmp_path), str(folder)]) == 2
        assert "does not fit its GPUs. Use --anyway" in capsys.readouterr().err
        assert not folder.exists()
        assert run(["export", str(tmp_path), str(folder), "--anyway"]) == 0
        assert (folder / "train.yaml").exists()


class TestCatalogues:
    def test_models_are_listed(self, capsys):
        assert run(["models"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["model", "parameters", "dtype", "model_type", "activations"]
        assert any(line.split() == ["Qwen/Qwen2.5-7B", "7.62", "B", "bfloat16", "qwen2", "formula"] for line in lines)

    def test_gpus_are_listed_with_what_their_driver_reports(self, capsys):
        assert run(["gpus"]) == 0
        assert any(
            line.startswith("A100-40G  ") and "39.49 GiB" in line for line in capsys.readouterr().out.splitlines()
        )

    @pytest.mark.parametrize(
        ("listed", "word", "found"),
        [
            ("models", "llama", {"meta-llama/Meta-Llama-3-8B", "meta-llama/Llama-3.1-8B"}),
            ("models", "QWEN 2.5 7b", {"Qwen/Qwen2.5-7B"}),
            ("gpus", "rtx 40", {"RTX-4090", "RTX-4060"}),
        ],
    )
    def test_a_word_leaves_the_entries_that_have_it_in_a_name(self, listed, word, found, capsys):
        assert run([listed]) == 0
        every = capsys.readouterr().out.splitlines()
        assert run([listed, word]) == 0
        some = capsys.readouterr().out.splitlines()
        assert found <= {line.split()[0] for line in some} and len(some) < len(every) / 3

    @pytest.mark.parametrize("listed", ["models", "gpus"])
    def test_lists_as_json_follow_the_schema(self, listed, capsys):
        assert run([listed, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        jsonschema.Draft202012Validator(json_schema()).validate(document)
        assert len(document[listed]) > 100

    def test_no_measurements_are_said_to_be_none(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setenv("PLAN_CACHE", str(tmp_path))
        assert run(["measurements"]) == 0
        assert capsys.readouterr().out.startswith("no measurements are kept yet")

    def test_the_schema_is_printed(self, capsys):
        assert run(["schema"]) == 0
        assert json.loads(capsys.readouterr().out)["$schema"] == "https://json-schema.org/draft/2020-12/schema"


class TestProcess:
    def test_importing_the_command_imports_nothing_heavy(self):
        heavy = (
            "torch",
            "transformers",
            "trl",
            "optuna",
            "pandas",
            "jinja2",
            "yaml",
            "huggingface_hub",
            "rich",
            "pydantic",
            "numpy",
        )
        code = f"import sys, planner.commands.main; print([name for name in {heavy!r} if name in sys.modules])"
        out = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
        ).stdout
        assert out.strip() == "[]"

    def test_an_ascii_terminal_still_gets_an_answer(self):
        code = "import sys; sys.argv = ['plan', 'gpus', '--wrong']; from planner.commands.main import main; main()"
        environment = {"PYTHONIOENCODING": "ascii", "PATH": ""}
        process = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[1],
            check=False,
        )
        assert (process.returncode, process.stdout) == (2, "")
        assert process.stderr.startswith("Error: No such option: --wrong")


@pytest.mark.parametrize("name", ["gpus", "models"])
def test_a_list_is_at_most_100_columns_wide(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("gpus", "shown"), [("1xL4", "searching"), ("1xL4,1xA10G", "1xA10G, 2 of 2")], ids=["plan", "compare"]
)
def test_a_terminal_shows_the_work_in_progress_with_the_elapsed_time(
    gpus: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert run(["--model", "Qwen2.5-0.5B", "--gpus", gpus, "--method", "sft"]) == 0
    assert shown in terminal.getvalue() and "0:00:0" in terminal.getvalue()


def test_without_a_terminal_no_progress_line_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--model", "Qwen2.5-0.5B", "--gpus", "1xL4,1xA10G", "--method", "sft"]) == 0
    assert "0:00:0" not in capsys.readouterr().err


@pytest.mark.parametrize(("words", "found"), [("plan est", "estimate"), ("plan --met", "--method")])
def test_a_shell_completes_commands_and_flags(words: str, found: str, monkeypatch, capsys) -> None:
    """By Typer's own completion, which `plan --install-completion` installs."""
    for name, value in {"_PLAN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        run([])
    assert capsys.readouterr().out.split() == [found]
