"""Releases of TRL before 1.0: their own defaults, and the code of 1.0."""

import pytest
import yaml

from planner.candidate import Candidate, usual_values
from planner.commands.exit_codes import EXIT_NOTHING_FITS, EXIT_PLANNED
from planner.commands.main import run
from planner.gpus.parse import parse_cluster
from planner.jobs.base_candidate import single_candidate
from planner.jobs.job import Job
from planner.memory.parameters.kbit_preparation import prepared_bytes
from planner.methods import METHODS, Loss, MethodName, release
from planner.models.catalogue import load_model
from planner.units import GIB
from scripts.compare_published import Row, compared, outcome_job, outcome_rows

# The last release with a default that memory depends on, its value there, and the value in the next minor release.
# Source: the wheels of trl 0.9.6, 0.10.1, 0.11.4, 0.12.2, 0.13.0, 0.14.0 to 0.29.1 and 1.0.0, trainer/*_config.py, and
# trainer/*_trainer.py where the config has None (`max_length`).
CHANGED = [
    *((method, "0.18", "precision", "no", "bf16") for method in ("sft", "dpo", "kto", "orpo", "cpo", "reward", "grpo")),
    *((method, "0.18", "precision", "no", "bf16") for method in ("online-dpo", "gkd", "ppo")),
    *((method, "0.21", "gradient_checkpointing", False, True) for method in ("sft", "dpo", "kto", "orpo", "cpo")),
    *((method, "0.21", "gradient_checkpointing", False, True) for method in ("reward", "grpo", "online-dpo", "gkd")),
    *((method, "0.13", "max_length", 512, 1024) for method in ("dpo", "kto", "orpo", "cpo", "reward")),
    ("sft", "0.18", "packing_strategy", "wrapped", "bfd"),
    ("sft", "0.20", "optim", "adamw_torch", "adamw_torch_fused"),
    ("grpo", "0.14", "gradient_accumulation_steps", 8, 1),
    ("grpo", "0.18", "beta", 0.04, 0.0),
    ("online-dpo", "0.10", "max_completion_length", 53, 64),
]
# Those that no release before 1.0 changed.
KEPT = [
    ("sft", "max_length", 1024),
    ("sft", "per_device_train_batch_size", 8),
    ("sft", "packing", False),
    ("dpo", "beta", 0.1),
    ("dpo", "precompute_ref_log_probs", False),
    ("grpo", "num_generations", 8),
    ("grpo", "max_completion_length", 256),
    ("rloo", "num_generations", 2),
    ("rloo", "beta", 0.05),
    ("gkd", "max_completion_length", 128),
    ("ppo", "gradient_checkpointing", False),
    ("ppo", "max_completion_length", 53),
]
FREE = ["--model=Qwen2.5-0.5B", "--gpus=1xA100-80G", "--quiet"]


def after(version: str) -> str:
    major, minor = release(version)
    return f"{major}.{minor + 1}"


@pytest.mark.parametrize(("method", "last", "field", "before", "since"), CHANGED)
def test_a_release_has_the_defaults_of_its_own_configs(
    method: MethodName, last: str, field: str, before: object, since: object
) -> None:
    row = METHODS[method]
    assert usual_values(row, last)[field] == before
    assert usual_values(row, after(last))[field] == since


@pytest.mark.parametrize(("method", "field", "value"), KEPT)
def test_a_default_that_never_changed_is_that_of_1_0(method: MethodName, field: str, value: object) -> None:
    oldest = METHODS[method].first_trl
    first = "0.9.6" if oldest == "oldest" else oldest
    assert usual_values(METHODS[method], first)[field] == usual_values(METHODS[method], "1.0")[field] == value


@pytest.mark.parametrize(
    ("method", "version", "loss"),
    [
        ("sft", "0.14", "causal_lm"),  # accuracies since 0.15: `SFTTrainer.compute_loss`
        ("sft", "0.15", "logits_cross_entropy"),
        ("dpo", "0.11", "preference"),  # `concatenated_forward` returns the logits, `get_batch_logps` takes log_softmax
        ("dpo", "0.12", "log_softmax"),  # it returns their means
        ("dpo", "0.15", "logits"),  # `selective_log_softmax`
    ],
)
def test_a_release_computes_the_loss_of_its_own_trainer(method: MethodName, version: str, loss: Loss) -> None:
    assert Candidate(model=load_model("Qwen2.5-0.5B"), method=method, trl_version=version).loss == loss


def test_the_dpo_quick_start_of_0_16_does_not_fit_an_a100(capsys: pytest.CaptureFixture[str]) -> None:
    """huggingface/trl#3168: out of memory in the first step, with every setting at its default."""
    words = ["estimate", *FREE, "--method=dpo", "--tuning=full", "--trl-version=0.16"]
    assert run(words) == EXIT_NOTHING_FITS
    assert "Does not fit" in capsys.readouterr().out


def test_grpo_of_0_17_has_a_reference_and_no_checkpoints() -> None:
    """huggingface/trl#3456: prompts of 2,048 tokens, four completions of 1,024, the rest at its default."""
    pinned = {
        "per_device_train_batch_size": 4, "num_generations": 4, "prompt_length": 2048, "max_completion_length": 1024,
    }  # fmt: skip
    job = Job(model=load_model("Qwen3-0.6B"), method="grpo", trl_version="0.17", pinned=pinned)
    candidate = single_candidate(job, parse_cluster("1xA100-80G"))
    assert (candidate.precision, candidate.gradient_checkpointing, candidate.beta) == ("no", False, 0.04)


@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_a_search_for_an_older_release_writes_what_it_chooses(
    method: MethodName, capsys: pytest.CaptureFixture[str]
) -> None:
    """It trains in bfloat16, which the release does only if it is told so."""
    words = [*FREE, f"--method={method}", "--trl-version=0.16"]
    assert run([*words, "--format=yaml"]) == EXIT_PLANNED
    written = yaml.safe_load(capsys.readouterr().out)
    assert (written["bf16"], written["optim"]) == (True, "adamw_torch_fused")
    assert "gradient_checkpointing" in written
    assert run([*words, "--format=flags"]) == EXIT_PLANNED
    flags = capsys.readouterr().out.split()
    assert "--bf16" in flags
    assert ("--gradient_checkpointing" in flags) == written["gradient_checkpointing"]


@pytest.mark.parametrize(
    ("run_id", "allocated_gib"),
    [("Mistral-7B-v0.1", 19.25), ("Mistral-7B-v0.1-bs8", 34.461), ("PowerLM-3b", 16.926), ("PowerLM-3b-bs8", 31.83)],
)
def test_qlora_of_0_13_holds_norms_in_float32(run_id: str, allocated_gib: float) -> None:
    """With 1.0, which prepares no base, they come to 18 to 30 % less.

    Source: foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv (tests/data/outcomes.jsonl).
    """
    name, _, batch = run_id.partition("-bs")
    row = next(
        row
        for row in outcome_rows()
        if row["id"] == f"fms-{name}-qlora-baseline-n1-bs{batch or 4}"
        and row["figures_gib"]["allocated"] == allocated_gib
    )
    candidate, cluster = outcome_job({**row, "settings": {**row["settings"], "trl_version": "0.13"}})
    figure = Row(
        id=row["id"], source=row["source"], group=row["group"], quantity="allocated",
        measured_bytes=round(allocated_gib * GIB), candidate=candidate, cluster=cluster, assumptions=(), keeps="",
    )  # fmt: skip
    assert compared(figure).error == pytest.approx(0, abs=0.035)


@pytest.mark.parametrize(
    ("method", "last"),
    [("sft", "0.25"), ("reward", "0.25"), ("grpo", "0.25"), ("rloo", "0.26"), ("dpo", "0.28"), ("kto", "1.3")],
)
def test_a_trainer_prepared_a_4_bit_base_until_a_release(method: MethodName, last: str) -> None:
    def prepared(version: str) -> object:
        model = load_model("Qwen2.5-0.5B")
        return prepared_bytes(
            Candidate(
                model=model, method=method, trl_version=version, tuning="lora", quantization="nf4", dtype="bfloat16"
            )
        )

    assert prepared(last) is not None
    assert prepared(after(last)) is None


def test_sharded_4_bit_weights_of_an_older_release_are_not_prepared() -> None:
    pinned = {"sharding": "fsdp2", "quantization": "nf4", "tuning": "lora", "bnb_4bit_quant_storage": "bfloat16"}
    settings = {**pinned, "dtype": "bfloat16", "num_processes": 4, "precision": "bf16"}
    older, oldest = (
        Candidate(model=load_model("Llama-3.1-8B"), method="sft", trl_version=version, **settings)  # type: ignore[arg-type]
        for version in ("0.16", "1.0")
    )
    assert older.method_row.kbit_preparation == "embeddings_and_head"
    assert prepared_bytes(older) is prepared_bytes(oldest) is None


@pytest.mark.parametrize("command", [[], ["estimate"]])
def test_the_short_answer_says_that_the_code_of_1_0_is_planned(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run([*command, *FREE, "--method=dpo", "--batch-size=1", "--trl-version=0.16"])
    said = " ".join(capsys.readouterr().out.split())
    assert "trl 0.16 is planned with the code of 1.0, the oldest that is modelled" in said
    assert "Fits by the code of trl 1.0: " in said
    assert "likely to run" not in said


@pytest.mark.parametrize(("version", "leaves"), [("0.14", False), ("1.16", True)])
def test_ppo_left_trl_only_after_the_release_that_is_asked_for(
    version: str, leaves: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["estimate", *FREE, "--method=ppo", f"--trl-version={version}"])
    assert ("ppo left TRL after 1.12" in capsys.readouterr().out) == leaves
