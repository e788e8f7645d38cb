"""Rows with images: the formulas of Gemma 3's vision tower against the trainer's step on fake tensors, and refusals."""

import json
from pathlib import Path

import pytest

from planner.candidate import Candidate
from planner.cli import run
from planner.estimate import estimate
from planner.gpus.parse import parse_cluster
from planner.models.catalogue import load_model
from planner.models.from_config import shape_of

GEMMA = load_model("google/gemma-3-4b-it")
CLUSTER = parse_cluster("1xA100-80G")
LAYERS = 3  # of the tower and of the language model: enough for a first, a middle and a last one


def few_layers() -> dict[str, object]:
    """The config of gemma-3-4b-it with three layers in both stacks."""
    config = json.loads(json.dumps(GEMMA.config))
    text = config["text_config"]
    text["num_hidden_layers"] = config["vision_config"]["num_hidden_layers"] = LAYERS
    text.pop("layer_types", None)
    return dict(config)


def candidate(**settings: object) -> Candidate:
    defaults: dict[str, object] = {
        "model": shape_of(few_layers(), id="gemma-3-few-layers", dtype="bfloat16"),
        "method": "sft",
        "tuning": "lora",
        "dtype": "bfloat16",
        "per_device_train_batch_size": 2,
        "images_per_row": 1,
    }
    return Candidate(**(defaults | settings))  # type: ignore[arg-type]


def states_bytes(case: Candidate) -> int:
    """Bytes of gradients and optimizer states in the optimizer's step."""
    last = estimate(case, CLUSTER).gpus[0].phases[-1].components
    return last["gradients"] + last["optimizer_states"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"images_per_row": 3},
        pytest.param({"gradient_checkpointing": False}, marks=pytest.mark.nightly),
        {"gradient_checkpointing": False, "lora_target_modules": ("gate_proj",)},
        {"tuning": "full", "gradient_accumulation_steps": 2},
        pytest.param(
            {"tuning": "full", "dtype": "float32", "gradient_checkpointing": False, "images_per_row": 2},
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["checkpointed", "not-checkpointed", "tower-without-adapters", "full", "full-float32"],
)
def test_a_step_with_images_needs_what_the_trainer_allocates(settings: dict[str, object]) -> None:
    pytest.importorskip("trl")
    from probes.dryrun.simulate import simulate

    expected = estimate(candidate(**settings), CLUSTER)
    simulated = simulate(expected)
    for mine, theirs in zip(simulated.estimated, simulated.simulated, strict=True):
        if mine.name in ("forward", "backward"):
            assert mine.total_bytes == pytest.approx(theirs.total_bytes, rel=0.02), mine.name


def test_images_cost_memory_and_time() -> None:
    text, images = (estimate(candidate(model=GEMMA, images_per_row=count), CLUSTER) for count in (0, 2))
    assert images.gpus[0].peak_bytes > text.gpus[0].peak_bytes
    assert images.throughput.step_seconds > text.throughput.step_seconds


def test_a_tower_that_images_pass_learns() -> None:
    """Its parameters and those of the projector have optimizer states, 4 bytes each in bfloat16, and gradients, 2."""
    text, images = (
        states_bytes(candidate(model=GEMMA, tuning="full", images_per_row=count, gradient_accumulation_steps=2))
        for count in (0, 1)
    )
    assert images - text == pytest.approx(6 * GEMMA.idle_params, rel=0.001)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=Qwen2.5-7B", "--method=sft"], "Qwen/Qwen2.5-7B has no vision tower. Use Gemma 3, such as"),
        (["--model=Qwen2.5-VL-7B-Instruct", "--method=sft"], "has a vision tower without formulas. Use Gemma 3"),
        (["--model=gemma-3-4b-it", "--method=dpo"], "images are counted for sft, not for dpo yet"),
        (
            ["--model=gemma-3-4b-it", "--method=sft", "--max-length=500"],
            "max_length 500 cuts the 512 tokens of 2 images",
        ),
        (["--model=gemma-3-4b-it", "--method=sft", "--set=packing=true"], "packing is not there for rows with images"),
    ],
)
def test_images_that_are_not_counted_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--gpus=1xA100-80G", "--images-per-row=2"]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_keeps_its_images_and_an_export_says_them(tmp_path: Path) -> None:
    folder = str(tmp_path / "plan")
    asked = ["--model=gemma-3-4b-it", "--gpus=1xA100-80G", "--method=sft", "--tuning=lora", "--images-per-row=1"]
    assert run([*asked, "--out", folder, "--quiet"]) == 0
    report = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert report["best"]["settings"]["images_per_row"] == 1
    assert report["best"]["settings"]["attn_implementation"] == "sdpa"  # FlashAttention drops the mask of images
    assert not any("images" in warning for warning in report["warnings"])
    assert run(["export", folder, str(tmp_path / "run")]) == 0
    assert "--images-per-row 1" in (tmp_path / "run" / "README.md").read_text()
