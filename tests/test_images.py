"""Rows with images: the formulas of vision towers, the trainer's step on an emulated card, and refusals."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.commands.main import run
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.launch.requirements import requirements
from planner.launch.trl_config import trl_config
from planner.methods import MethodName
from planner.models.architectures.table import ARCHITECTURES
from planner.models.catalogue import load_model
from planner.models.from_config import shape_of
from planner.models.image_tower import image_sides, image_tower
from planner.quantities import Note
from planner.search.explain import NOT_MEASURED, shortage
from planner.units import MIB
from scripts.emulated_grid import torch_bytes
from scripts.emulated_jobs import Job

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


@pytest.mark.parametrize(("size", "tokens"), [("1024x768", 37 * 27), ("28x28", 1), ("20x2000", 71), ("504x280", 180)])
def test_an_image_has_the_tokens_that_the_processor_makes(size: str, tokens: int) -> None:
    tower = image_tower(load_model("Qwen/Qwen2.5-VL-3B-Instruct"), size)
    assert tower is not None
    assert tower.text_tokens == tokens
    resize = pytest.importorskip("transformers.models.qwen2_vl.image_processing_qwen2_vl").smart_resize
    width, height = image_sides(size)
    rows, columns = resize(height, width, factor=28, min_pixels=1, max_pixels=10**8)
    assert tower.grid == (rows // 14, columns // 14)


@pytest.mark.parametrize(("size", "rows", "columns"), [("1024x768", 28, 37), ("28x28", 1, 1), ("300x20", 1, 11)])
def test_an_image_of_mistral_3_has_a_token_after_each_row(size: str, rows: int, columns: int) -> None:
    tower = image_tower(load_model("mistralai/Ministral-3-3B-Instruct-2512"), size)
    assert tower is not None
    assert (tower.text_tokens, tower.feature_tokens) == (rows * (columns + 1), rows * columns)
    processing = pytest.importorskip("transformers.models.pixtral.image_processing_pixtral")
    width, height = image_sides(size)
    image = np.zeros((3, height, width), dtype=np.uint8)
    resized = processing.get_resize_output_image_size(image, size=(10**5, 10**5), patch_size=(28, 28))
    assert resized == (28 * rows, 28 * columns)


def test_a_batch_that_is_not_measured_is_not_said_to_want_an_engine() -> None:
    assert shortage(None, candidate()) == NOT_MEASURED
    engine = replace(candidate(), method="grpo", vllm="colocate")
    assert shortage(None, engine) == Note("engine_does_not_start")


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
        (
            ["--model=Qwen2.5-7B", "--method=sft"],
            "no vision tower. Use Qwen2-VL, 2.5-VL, 3-VL, 3.5, Gemma 3 or Mistral 3",
        ),
        (["--model=llava-1.5-7b-hf", "--method=sft"], "has a vision tower without formulas. Use Qwen2-VL"),
        (["--model=Qwen2.5-VL-7B-Instruct", "--method=sft"], "add it in pixels, such as --image-size 1024x768"),
        (["--model=Qwen2.5-VL-7B-Instruct", "--method=sft", "--image-size=big"], "An image size is WIDTHxHEIGHT"),
        (["--model=Qwen2.5-VL-7B-Instruct", "--method=sft", "--image-size=9x99999"], "No processor takes"),
        (["--model=gemma-3-4b-it", "--method=sft", "--image-size=640x480"], "resizes every image to one size"),
        (["--model=gemma-3-4b-it", "--method=online-dpo"], "grpo, rloo, gmpo; not for online-dpo yet"),
        (["--model=gemma-3-4b-it", "--method=reward"], "TRL's RewardTrainer takes no images"),
        (
            ["--model=gemma-3-4b-it", "--method=grpo", "--prompt-length=600", "--set=vllm_mode=colocate"],
            "and vLLM expands them again (huggingface/trl#6294)",
        ),
        (
            ["--model=gemma-3-4b-it", "--method=grpo", "--prompt-length=500"],
            "A prompt of 500 tokens (prompt_length) does not hold the 512 tokens of 2 images. Use --prompt-length 1024",
        ),
        (
            ["--model=gemma-3-4b-it", "--method=dpo", "--set=precompute_ref_log_probs=true"],
            "precompute_ref_log_probs is not there for rows with images",
        ),
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


def rollout_bytes(**settings: object) -> int:
    """What PyTorch allocates in the rollout of 16 prompts of 1,536 tokens, by the formulas."""
    sampled = {
        "model": "Qwen2.5-VL-3B-Instruct", "method": "grpo", "tuning": "lora", "dtype": "bfloat16",
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 4,
        "num_generations": 8, "prompt_length": 1536, "max_completion_length": 128, "beta": 0.04,
        "gradient_checkpointing": True,
    }  # fmt: skip
    case, card = Job(kind="", gpus="1xH200", settings=sampled | settings).candidate, parse_cluster("1xH200")
    phases = {phase.name: phase for phase in estimate(case, card).gpus[0].phases}
    return torch_bytes(case, card, phases["rollout"])


@pytest.mark.parametrize(
    ("settings", "emulated_mib"),
    [
        ({"max_completion_length": 64}, 12162),  # float32 copies of inputs, which PEFT's adapters get without autocast
        ({"images_per_row": 1, "image_size": "1024x768"}, 13105),  # the same on an emulated H200
    ],
)
def test_a_rollout_of_measured_layers_needs_what_an_emulated_one_does(
    settings: dict[str, object], emulated_mib: int
) -> None:
    assert rollout_bytes(**settings) == pytest.approx(emulated_mib * MIB, rel=0.01)


def test_pixels_of_a_rollout_stay_until_the_next_one_is_scored() -> None:
    small, large = (rollout_bytes(images_per_row=1, image_size=size, vllm="server") for size in ("448x448", "896x448"))
    tower = image_tower(load_model("Qwen2.5-VL-3B-Instruct"), "448x448")
    assert tower is not None
    assert large - small == 16 * tower.pixels * 4  # float32, of twice as many


def test_a_plan_with_images_does_not_colocate_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model=gemma-3-4b-it", "--method=grpo", "--tuning=lora", "--images-per-row=1", "--json"]
    assert run([*asked, "--gpus=1xA100-80G"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["best"]["settings"].get("use_vllm", False) is False
    assert any("huggingface/trl#6294" in warning for warning in alone["warnings"])
    assert run([*asked, "--gpus=2xA100-80G"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["settings"]["vllm_mode"] == "server"


def test_a_plan_keeps_its_images_and_an_export_says_them(tmp_path: Path) -> None:
    folder = str(tmp_path / "plan")
    asked = ["--model=gemma-3-4b-it", "--gpus=1xA100-80G", "--method=sft", "--tuning=lora", "--images-per-row=1"]
    assert run([*asked, "--out", folder, "--quiet"]) == 0
    report = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert report["best"]["settings"]["images_per_row"] == 1
    assert report["best"]["settings"]["attn_implementation"] == "sdpa"  # FlashAttention drops the mask of images
    assert not any("images" in warning for warning in report["warnings"])
    assert run(["export", folder, str(tmp_path / "run")]) == 0
    assert " images_per_row=1" in (tmp_path / "run" / "train.yaml").read_text().splitlines()[1]


def tiny(name: str, folder: Path, **outer: object) -> str:
    """A folder with the config of a tiny model of tests/models, changed."""
    config = json.loads((Path(__file__).parent / "models" / name / "config.json").read_text())
    config["vision_config"] |= outer.pop("vision_config", {})
    (folder / "config.json").write_text(json.dumps(config | outer))
    return str(folder)


def test_a_job_without_images_can_say_so(capsys):
    assert (
        run(
            [
                "--model",
                "Qwen2.5-0.5B",
                "--gpus",
                "1xT4",
                "--method",
                "sft",
                "--images-per-row",
                "0",
                "--json",
                "--quiet",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["job"]["pinned"]["images_per_row"] == 0


def test_an_export_with_images_installs_what_reads_them() -> None:
    text = Candidate(model=GEMMA, method="sft", images_per_row=1)
    assert {"pillow", "torchvision"} <= set(requirements(text).split())
    assert not {"pillow", "torchvision"} & set(requirements(replace(text, images_per_row=0)).split())


@pytest.mark.parametrize("method", ["grpo", "rloo", "gmpo"])
def test_prompts_of_several_lengths_are_not_stacked_by_a_processor_that_makes_tensors(method: MethodName) -> None:
    """Draw 7-77 of results/emulated_starts.md stopped: "Unable to create tensor, you should probably activate ..."."""
    ministral = Candidate(model=load_model("Ministral-3-3B-Instruct-2512"), method=method, images_per_row=1)
    assert trl_config(ministral)["chat_template_kwargs"] == {"return_tensors": None}
    for other in ({"images_per_row": 0}, {"method": "sft"}, {"model": GEMMA}):
        assert "chat_template_kwargs" not in trl_config(replace(ministral, **other))


def test_processors_that_make_tensors_of_texts_are_those_of_transformers() -> None:
    """Read in the text of the modules: a processor is imported with torchvision only."""
    folder = Path(find_spec("transformers").origin).parent / "models"  # type: ignore[union-attr, arg-type]
    modules = {name: name for name, row in ARCHITECTURES.items() if row.tower} | {"mistral3": "pixtral"}
    modules = {
        name: module for name, module in modules.items() if (folder / module / f"processing_{module}.py").exists()
    }
    texts = {
        name: (folder / each / f"processing_{each}.py").read_text(encoding="utf-8") for name, each in modules.items()
    }
    found = {name for name, text in texts.items() if re.search(r'text_kwargs = \{[^}]*"return_tensors": "pt"', text)}
    assert found == {name for name, row in ARCHITECTURES.items() if row.stacks_texts}
