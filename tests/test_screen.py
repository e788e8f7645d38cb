"""The short answer: 24 lines of 80 columns, with flags that TRL reads and the notes that change what the user does."""

import importlib
import re
import shlex
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import replace
from report_samples import CLUSTER, ESTIMATE, NOTHING_FITS, PLAN

from planner.candidate import Candidate
from planner.commands.main import run
from planner.confidence import SPEED_RATIOS
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.jobs.settings import trl_arguments
from planner.launch.trl_config import NEWER_NAMES, trl_config
from planner.methods import METHODS
from planner.models.catalogue import load_model
from planner.planning import Plan, plan
from planner.quantities import BACKGROUND, NOTE_RANKS, RANKED_NOTES, Note, NoteCode
from planner.report.screen import MIN_LINES, Screen, estimate_screen, plan_screen
from planner.report.shown_settings import flags, launch_settings

ROOT = Path(__file__).resolve().parents[1]
GRPO = "--model Qwen2.5-7B --gpus 2xA100-40G --method grpo"
REWARD = "--model gemma-3-4b-it --gpus 1xA100-80G --method reward --tuning lora --lora-r 8"
LARGE = "--model Qwen2.5-32B --gpus 4xRTX-3090 --set zero_stage=3 --method"
SITUATIONS = {
    "4 GB": "--model Qwen2.5-0.5B --gpus 1xRTX-3050-4G --method sft --tuning qlora --effective-batch-size 8",
    "grpo": GRPO,
    "grpo qlora": f"{GRPO} --tuning qlora",
    "grpo gptq": "--model Qwen2.5-7B-Instruct-GPTQ-Int4 --gpus 2xA100-40G --method grpo --tuning lora",
    "grpo colocated": "--model Qwen2.5-7B-Instruct --gpus 2xA100-40G --method grpo --tuning qlora --set use_vllm=true "
    "--set vllm_mode=colocate --set vllm_gpu_memory_utilization=0.2 --set vllm_max_model_length=2500",
    "reward 8k": f"{REWARD} --max-length 8192",
    "reward longest": f"{REWARD} --optimize max-length",
    "server": "--model Qwen2.5-7B --gpus 8xH100 --method grpo --tuning lora --set zero_stage=3 --set use_vllm=true "
    "--set vllm_mode=server",
    "rloo": f"{LARGE} rloo",
    "online-dpo": f"{LARGE} online-dpo",
    "nothing fits": "--model Llama-3.1-70B --gpus 2xA100-40G --method sft --tuning full",
    "one candidate": "estimate --model Llama-3.1-8B --gpus 8xH100 --method dpo --tuning full --set zero_stage=3",
}


def screen(width: int = 80, lines: int = MIN_LINES, out: str = "") -> Screen:
    return Screen(width=width, lines=lines, out=out)


def on_terminal(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    run(command.split())
    captured = capsys.readouterr()
    return [
        *captured.out.splitlines(),
        *(line[at : at + 80] for line in [captured.err] for at in range(0, len(line), 80)),
    ]


@pytest.mark.parametrize("command", SITUATIONS.values(), ids=SITUATIONS)
def test_an_answer_fits_a_terminal_of_24_lines_and_80_columns(command, capsys, monkeypatch):
    lines = on_terminal(command, capsys, monkeypatch)
    assert len(lines) < 24  # one is the shell's
    assert max(map(len, lines)) <= 80


def test_what_nobody_would_train_with_does_not_begin_with_fits(capsys, monkeypatch):
    lines = on_terminal("--model DeepSeek-V3 --gpus 2x8xH200 --method grpo", capsys, monkeypatch)
    assert any(line.startswith("Impractical: an optimizer step of 64 samples takes 71 minutes.") for line in lines)
    assert not any(line.startswith("Fits") for line in lines)


class TestScreen:
    def test_it_has_the_verdict_the_settings_the_memory_and_the_speed(self):
        text = plan_screen(PLAN, screen()).plain
        assert "Fits, 99 % likely to run: 4.3 GiB (11 %) to spare." in text
        assert "settings  --" in text and "--per_device_train_batch_size" not in text
        assert "defaults  per_device_train_batch_size 8" in text
        assert "memory    peak 35.2 of 39.5 GiB, between 34.0 and 37.0, in the rollout" in text
        assert "speed     about 2,900 tokens/s (typically -31 to +13 %), 32 samples in 14 s" in text

    def test_it_ends_with_what_to_do_next(self):
        assert "next      add --export run: the files that start it" in plan_screen(PLAN, screen()).plain
        assert "next      plan export mine mine/files: the files" in plan_screen(PLAN, screen(out="mine")).plain
        assert "export" not in plan_screen(NOTHING_FITS, screen()).plain

    def test_what_does_not_fit_has_remedies_and_no_settings(self):
        text = plan_screen(NOTHING_FITS, screen()).plain
        assert "Does not fit: up to 18.5 GiB over." in text
        assert "to fit    --tuning lora: fits, about 2,900 tokens/s" in text
        assert "settings" not in text and "speed" not in text

    def test_a_plan_at_the_edge_is_yellow_one_that_fits_green_another_red(self):
        def colours(answer: Plan) -> set[str]:
            return {str(span.style) for span in plan_screen(answer, screen()).spans if "bold " in str(span.style)}

        assert "bold green" in colours(PLAN)
        assert "bold yellow" in colours(replace(PLAN, best=replace(ESTIMATE, tight=True)))
        assert "bold red" in colours(NOTHING_FITS)

    def test_the_picture_gives_way_before_the_notes(self):
        assert "▏" in plan_screen(PLAN, screen()).plain
        notes = tuple(Note("model_source", {"model": "m", "remark": "word " * 40}) for _ in range(5))
        text = plan_screen(replace(PLAN, warnings=notes), screen()).plain
        assert "▏" not in text and "m: word" in text

    def test_a_larger_terminal_shows_more(self):
        notes = tuple(Note("model_source", {"model": "m", "remark": "word " * 40}) for _ in range(5))
        small, large = (plan_screen(replace(PLAN, warnings=notes), screen(lines=lines)).plain for lines in (24, 60))
        assert "▏" in large and large.count("m: word") == 3 > small.count("m: word")

    def test_notes_are_chosen_by_rank_and_the_rest_is_counted(self):
        background = tuple(Note("segments_left_out") for _ in range(4))
        urgent = Note("rounds_small_updates")
        text = plan_screen(replace(PLAN, warnings=(*background, urgent)), screen()).plain
        assert "note      16-bit weights" in text
        assert "launch without" not in text
        assert "6 more remarks" in text  # four notes, a reason and what lies beyond the batch

    def test_changes_to_a_config_stand_for_its_settings(self):
        changes = tuple(
            Note("config_change", {"setting": name, "before": 1, "after": 2}) for name in ("a", "b", "c", "d", "e")
        )
        text = plan_screen(replace(PLAN, warnings=changes), screen()).plain
        assert "config    a: 1 -> 2 · b: 1 -> 2 · c: 1 -> 2 · d: 1 -> 2 · e: 1 -> 2" in text
        assert "settings" not in text  # the others are in the user's file

    def test_a_checked_answer_does_not_point_at_the_dry_run(self):
        agrees = Note("dry_run", {"trl": "1.16", "needed_bytes": 2**30, "phase": "loss", "expected_bytes": 2**30})
        assert "--dry-run" in plan_screen(PLAN, screen()).plain
        assert "--dry-run" not in plan_screen(replace(PLAN, warnings=(agrees,)), screen()).plain

    def test_a_measured_speed_has_no_error(self):
        speed = replace(ESTIMATE.throughput, evidence="measured")
        text = estimate_screen(replace(ESTIMATE, throughput=speed), CLUSTER, (), screen()).plain
        assert "typically" not in text

    @pytest.mark.parametrize("width", [40, 62, 80, 100, 300])
    def test_no_line_is_wider_than_the_screen(self, width):
        for answer in (PLAN, NOTHING_FITS):
            lines = plan_screen(answer, screen(width=width)).plain.splitlines()
            assert max(map(len, lines)) <= min(max(width, 62), 100)


class TestRanks:
    def test_each_ranked_code_is_a_note_and_has_one_rank(self):
        codes = [code for _, codes in RANKED_NOTES for code in codes]
        assert len(codes) == len(set(codes)) == len(NOTE_RANKS)
        assert set(codes) <= set(get_args(NoteCode))

    def test_a_note_without_a_rank_is_background(self):
        assert Note("model_prepared").rank == BACKGROUND


def test_the_error_of_speeds_is_that_of_the_results():
    row = next(
        line
        for line in (ROOT / "results" / "throughput.md").read_text(encoding="utf-8").splitlines()
        if "no constant read from them" in line
    )
    assert re.search(r"\((0\.\d+) to (1\.\d+)\)", row).groups() == tuple(f"{ratio:.2f}" for ratio in SPEED_RATIOS)


QWEN = load_model("Qwen2.5-0.5B")
LORA = Candidate(model=QWEN, method="sft", tuning="lora", dtype="bfloat16", lora_r=8, num_processes=2, sharding="ddp")
CANDIDATES = {
    "lora": LORA,
    "full": Candidate(model=QWEN, method="sft", optim="adamw_bnb_8bit", packing=True),
    "qlora": replace(LORA, quantization="nf4-double", gradient_checkpointing=False, attn_implementation="eager"),
    "modules": replace(LORA, lora_target_modules=("q_proj", "v_proj"), checkpoint_every_n_layers=2),
    "dpo": replace(LORA, method="dpo", beta=0.2, sharding="zero3", offload_optimizer=True, reduce_bucket_size=10**6),
    "grpo": replace(LORA, method="grpo", vllm="colocate", vllm_max_model_length=2048, steps_per_generation=4),
}


class TestFlags:
    def test_settings_of_accelerate_deepspeed_and_the_environment_are_no_flags(self):
        candidate = replace(CANDIDATES["dpo"], expandable_segments=True)
        assert launch_settings(candidate) == [
            "num_processes 2",
            "zero_stage 3",
            "offload_optimizer_device cpu",
            "reduce_bucket_size 1000000",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ]
        assert not any("zero_stage" in flag for flag in flags(candidate))

    def test_a_server_s_settings_are_those_of_its_command(self):
        served = replace(CANDIDATES["grpo"], vllm="server")
        assert not any("gpu_memory_utilization" in flag for flag in flags(served))
        text = estimate_screen(replace(ESTIMATE, candidate=served), CLUSTER, (), screen()).plain
        assert "server    trl vllm-serve --model Qwen/Qwen2.5-0.5B" in text

    def test_lines_of_flags_are_joined_as_a_shell_joins_them(self):
        lines = plan_screen(PLAN, screen()).plain.splitlines()
        first = next(number for number, line in enumerate(lines) if line.startswith("settings"))
        last = next(number for number, line in enumerate(lines) if line.startswith("defaults"))
        assert all(line.endswith(" \\") for line in lines[first : last - 1])
        pasted = "\n".join(lines[first:last]).removeprefix("settings").replace("\\\n", " ")
        assert sorted(shlex.split(pasted)) == sorted(shlex.split(" ".join(flags(PLAN.best.candidate))))

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore::FutureWarning")
    @pytest.mark.parametrize("candidate", CANDIDATES.values(), ids=CANDIDATES)
    def test_trl_reads_from_the_flags_what_it_reads_from_the_file(self, candidate, tmp_path, monkeypatch):
        """Flags leave out what TRL's defaults are; the exported train.yaml writes all."""
        import yaml

        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
        needed = {"dataset_name": "d", "output_dir": str(tmp_path), "model_name_or_path": "m", "use_cpu": True}
        if candidate.method == "grpo":
            needed["bf16"] = False  # this machine has no GPU
        file = tmp_path / "train.yaml"
        config = {name: value for name, value in trl_config(candidate).items() if name not in ("env", "bf16", "fp16")}
        file.write_text(yaml.safe_dump(config | needed), encoding="utf-8")
        given = [f"--{name}={value}" for name, value in needed.items()]
        parser = importlib.import_module(f"trl.scripts.{candidate.method}").make_parser()
        from_file = parser.parse_args_and_config(["--config", str(file)])
        from_flags = parser.parse_args_and_config([*shlex.split(" ".join(flags(candidate))), *given])

        def values(parsed: object) -> dict[str, object]:
            return {name: value for part in parsed for name, value in vars(part).items() if name in config}

        assert values(from_flags) == values(from_file)


# What TRL's code decides where an argument is left out: bf16 by the dtype, the kernel of attention, and others.
DECIDED = {"bf16", "steps_per_generation", "gradient_checkpointing_kwargs", "attn_implementation", "model_name_or_path"}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "method", [name for name, row in METHODS.items() if row.last_trl == "current" and not row.asynchronous]
)
def test_flags_are_the_arguments_that_differ_from_trls_defaults(method: str) -> None:
    """Sizes, lora_r and beta were pasted with TRL's own values."""
    trl = pytest.importorskip("trl")
    row = METHODS[method]
    parts = [
        part
        for each in (trl.ModelConfig, getattr(importlib.import_module(row.module), row.config))
        for part in fields(each)
    ]
    usual = {part.name: part.default if part.default is not MISSING else part.default_factory() for part in parts}
    older = {now: name for name, now in NEWER_NAMES.items()}
    for tuning in ("qlora", "full") if row.takes_adapters else ("full",):
        candidate = plan(Job(model=QWEN, method=method, tuning=tuning), parse_cluster("2xA100-40G")).best.candidate
        arguments = {name: value for name, value in trl_arguments(candidate).items() if name not in DECIDED}
        names = (flag.partition(" ")[0].removeprefix("--") for flag in flags(candidate))
        pasted = {older.get(name, name) for name in names} - DECIDED
        differing = {
            name for name, value in arguments.items() if value not in (None, usual[name]) and [value] != usual[name]
        }
        assert pasted == differing


def test_every_situation_of_the_flags_is_planned():
    answer = plan(Job(model=QWEN, method="sft"), parse_cluster("1xT4"))
    assert "--fp16" in flags(answer.best.candidate)


def test_a_faster_way_that_is_not_taken_says_its_cost_in_its_line() -> None:
    """QLoRA stood below LoRA as 1.1 times as fast, and nothing said why it was not taken."""
    job = Job(model=load_model("Llama-3.1-8B"), method="sft")
    shown = plan_screen(plan(job, parse_cluster("1xRTX-4090")), screen()).plain
    assert "QLoRA: fits, about 2,800 tokens/s; it rounds the base to 4 bits\n" in shown


def test_a_narrow_terminal_keeps_the_notes() -> None:
    """At 60 columns the settings took the lines of all notes."""
    job = Job(model=load_model("Qwen2.5-7B"), method="grpo")
    found = plan(job, parse_cluster("2xA100-40G"))
    for width in (60, 80):
        assert "\nnote      prompts are taken" in plan_screen(found, screen(width)).plain
    assert len(plan_screen(found, screen()).plain.splitlines()) < MIN_LINES
