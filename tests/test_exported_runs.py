"""Exported folders, started on the CPU: a tiny local model and dataset, two steps, an evaluation, a resume."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from planner.commands.main import app
from planner.launch.trl_config import Launcher
from planner.methods import METHODS, MethodName

PLAN = typer.main.get_command(app).main
CONFIG = Path(__file__).parent / "models" / "tiny-qwen2" / "config.json"
CHAT = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

QUESTION = [{"role": "user", "content": "What is one plus one?"}]
RIGHT, WRONG = [{"role": "assistant", "content": "Two."}], [{"role": "assistant", "content": "Eleven."}]
# The columns that TRL's documentation asks for: docs/source/dataset_formats.md, "Which dataset type to use?".
ROWS: dict[MethodName, list[dict[str, Any]]] = {
    "sft": [{"messages": QUESTION + RIGHT}],
    "dpo": [{"prompt": QUESTION, "chosen": RIGHT, "rejected": WRONG}],
    "reward": [{"chosen": QUESTION + RIGHT, "rejected": QUESTION + WRONG}],
    "grpo": [{"prompt": QUESTION}],
    "rloo": [{"prompt": QUESTION}],
    "gmpo": [{"prompt": QUESTION}],
    "kto": [
        {"prompt": QUESTION, "completion": RIGHT, "label": True},
        {"prompt": QUESTION, "completion": WRONG, "label": False},
    ],
    "orpo": [{"prompt": QUESTION, "chosen": RIGHT, "rejected": WRONG}],
    "cpo": [{"prompt": QUESTION, "chosen": RIGHT, "rejected": WRONG}],
    "tpo": [{"prompt": QUESTION, "chosen": RIGHT, "rejected": WRONG, "reference": RIGHT}],
    "sdft": [{"prompt": QUESTION, "privileged_context": "Two."}],
    "sdpo": [{"prompt": QUESTION}],
    "gkd": [{"messages": QUESTION + RIGHT}],
    "gold": [{"messages": QUESTION + RIGHT}],
    "iw-opd": [{"messages": QUESTION + RIGHT}],
    "a2po": [{"prompt": QUESTION}],
    "online-dpo": [{"prompt": QUESTION}],
}
STEPS = 2
EVALUATED = 4
GROUPS = ("--batch-size", "4", "--set", "num_generations=4", "--set", "max_completion_length=8")
# Groups are batches, and completions are short: TRL's defaults sample 8 of 512 tokens each.
SAMPLED: dict[MethodName, tuple[str, ...]] = {
    "grpo": GROUPS,
    "rloo": GROUPS,
    "gmpo": GROUPS,
    "sdft": GROUPS,
    "sdpo": GROUPS,
    "a2po": ("--set", "max_completion_length=8", "--set", "num_value_samples=2"),
    "online-dpo": ("--set", "max_new_tokens=8"),
    "gkd": ("--set", "max_new_tokens=8"),
    "gold": ("--set", "max_completion_length=8"),
    "iw-opd": ("--set", "max_completion_length=8"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), json.loads(CONFIG.read_text(encoding="utf-8")))


def tiny_model(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with a tiny Qwen2 of random weights, and a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    Qwen2ForCausalLM(Qwen2Config(**config | {"vocab_size": len(tokenizer)})).save_pretrained(folder)
    return folder


def exported(model: Path, method: MethodName, folder: Path, launcher: Launcher, *options: str) -> Path:
    """A folder of `plan export`, completed as its README.md says, with a dataset of 16 rows and 4 for tests."""
    data = folder / "data"
    data.mkdir(parents=True)
    rows = "".join(f"{json.dumps(row)}\n" for row in ROWS[method])
    (data / "train.jsonl").write_text(rows * (16 // len(ROWS[method])), encoding="utf-8")
    (data / "test.jsonl").write_text(rows * (EVALUATED // len(ROWS[method])), encoding="utf-8")
    saved, run = folder / "plan.json", folder / "run"
    chosen = [*SAMPLED.get(method, ()), *options]
    if METHODS[method].teacher:  # the plan's own teacher is the model itself, from which it has nothing to learn
        teacher = tiny_model(folder / "teacher", json.loads(CONFIG.read_text(encoding="utf-8")))
        chosen += ["--set", f"teacher_model_name_or_path={teacher}"]
    job = ["--model", str(model), "--method", method, "--quiet", "--out", str(saved), *chosen]
    assert PLAN(["estimate", *job], standalone_mode=False) == 0
    assert PLAN(["export", str(saved), str(run), "--launcher", launcher], standalone_mode=False) == 0
    train = run / "train.yaml"
    completed = train.read_text(encoding="utf-8").replace("your-organisation/your-dataset", str(data))
    train.write_text(completed, encoding="utf-8")
    return run


# Every completion is one to learn from: none of our reward function reaches the default, 1.0.
SUCCESS: dict[MethodName, tuple[str, ...]] = {"sdpo": ("--success_reward_threshold", "-1000")}


def started(run: Path, *arguments: str) -> None:
    """Start the folder's script for two steps, with TRL's own argument for the CPU."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", run / "launch.sh", "--use_cpu", "--max_steps", str(STEPS), *arguments],
        env=os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1", "HF_HOME": str(run.parent / "cache")},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


def assert_trained(run: Path, model: Path) -> None:
    """The optimizer made its steps, and the saved weights are not those it began with."""
    from safetensors.torch import load_file

    state = json.loads((run / "output" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == STEPS
    name = "model.embed_tokens.weight"
    before, after = (load_file(folder / "model.safetensors")[name] for folder in (model, run / "output"))
    assert not before.equal(after)


IN_CI = {("grpo", "torchrun")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "launcher"),
    [
        # CI starts one, of 15 to 30 seconds; the nightly run starts every method by both launchers.
        pytest.param(method, launcher, marks=() if (method, launcher) in IN_CI else pytest.mark.nightly)
        for launcher in ("accelerate", "torchrun")
        for method in ROWS
    ],
)
def test_the_start_script_of_an_exported_folder_trains(
    method: MethodName, launcher: Launcher, model: Path, tmp_path: Path
) -> None:
    run = exported(model, method, tmp_path, launcher, "--gpus", "1xL4")
    started(run, *SUCCESS.get(method, ()))
    assert_trained(run, model)


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
# accelerate shards on accelerators only: here FSDP's files start copies of the model; test_nodes.py shards.
@pytest.mark.parametrize("sharding", ["MULTI_GPU", "FSDP"])
def test_two_processes_train(sharding: str, launcher: Launcher, model: Path, tmp_path: Path) -> None:
    run = exported(
        model, "sft", tmp_path, launcher, "--gpus", "2xL4", "--batch-size", "2", "--set", f"distributed_type={sharding}"
    )
    started(run)
    assert_trained(run, model)


# Methods of one row or more, whose adapters two processes train: A2PO takes none.
ON_TWO: tuple[MethodName, ...] = ("tpo", "gold", "iw-opd", "sdft", "sdpo", "a2po")


@pytest.mark.nightly
@pytest.mark.parametrize("method", ON_TWO)
def test_adapters_train_on_two_processes_and_go_on_from_a_checkpoint(
    method: MethodName, model: Path, tmp_path: Path
) -> None:
    tuning = ("--tuning", "lora") if METHODS[method].takes_adapters else ()
    scheme = ("--batch-size", "2", "--set", "distributed_type=MULTI_GPU")
    run = exported(model, method, tmp_path, "torchrun", "--gpus", "2xL4", *scheme, *tuning)
    saved = (*SUCCESS.get(method, ()), "--save_strategy", "steps", "--save_steps", "1")
    started(run, *saved)
    if "resume_from_checkpoint" not in (run / "README.md").read_text(encoding="utf-8"):
        assert method == "sdpo"  # its second adapter is there twice
        return
    checkpoint = run / "output" / f"checkpoint-{STEPS}"
    started(run, *saved, "--max_steps", str(STEPS + 1), "--resume_from_checkpoint", str(checkpoint))
    state = json.loads((run / "output" / f"checkpoint-{STEPS + 1}" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == STEPS + 1


Kind = tuple[MethodName, tuple[str, ...]]
FP16_QLORA = ("--tuning", "qlora", "--set", "fp16=true", "--set", "bf16=false")
PREPARED = ("--tuning", "qlora", "--set", "prepare_model_for_kbit_training=true")
# One of each way in which train.py gets its models, trains and casts them, and one of TRL's own commands.
KINDS: tuple[Kind, ...] = (
    ("orpo", ()),
    ("gkd", ()),
    ("gmpo", ()),
    ("online-dpo", ("--tuning", "lora")),
    ("sft", FP16_QLORA),
    ("reward", PREPARED),
    ("sft", ()),
)
OTHERS: tuple[Kind, ...] = (
    ("cpo", ()),
    ("tpo", ()),
    ("a2po", ()),
    ("sdft", ()),
    *((method, tuning) for tuning in ((), ("--tuning", "lora")) for method in ("gold", "iw-opd", "sdpo")),
    ("sdft", ("--tuning", "lora")),
    *((method, FP16_QLORA) for method in ("dpo", "kto", "grpo", "rloo", "orpo", "reward")),
    *((method, PREPARED) for method in ("sft", "dpo", "kto", "grpo", "rloo")),
    *((method, tuning) for tuning in ((), ("--tuning", "lora")) for method in ("dpo", "kto", "grpo", "rloo", "reward")),
)
# The libraries' own use of names that they drop: trl 1.16, models/utils.py, `disable_gradient_checkpointing`,
# experimental/gkd/gkd_trainer.py, `generate_on_policy_outputs`; peft 0.21.2, peft_model.py and utils/other.py; torch.
OWN_USE = (
    "gradient_checkpointing_enable", "gradient_checkpointing_disable", "is_gradient_checkpointing", "torch.jit.",
    "Passing `generation_config`",
)  # fmt: skip


def starts_of(run: Path, method: MethodName) -> list[dict[str, Any]]:
    """Two steps with an evaluation, then a third step from the last checkpoint, and one from a named checkpoint."""
    script = "train.py" if (run / "train.py").exists() else f"trl.scripts.{method}"
    common = ["--use_cpu", "--fp16", "false", "--logging_steps", "1", "--save_steps", "1", "--report_to", "none"]
    if METHODS[method].evaluates:
        common += ["--eval_strategy", "steps", "--eval_steps", "2", "--per_device_eval_batch_size", str(EVALUATED)]
    named = ["--resume_from_checkpoint", f"output/checkpoint-{STEPS}", "--output_dir", "named"]
    given = [["--max_steps", "2"], ["--max_steps", "3", *named]]
    if script == "train.py":  # TRL's own commands take the text "true" for a path
        given.append(["--max_steps", "3", "--resume_from_checkpoint", "true"])
    return [{"folder": str(run), "script": script, "arguments": [*common, *each]} for each in given]


def history(folder: Path) -> list[dict[str, Any]]:
    """What the trainer logged until the third step."""
    state = json.loads((folder / "checkpoint-3" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == 3
    return list(state["log_history"])


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [KINDS, pytest.param(OTHERS, marks=pytest.mark.nightly)], ids=["kinds", "others"])
def test_a_script_evaluates_resumes_and_uses_no_name_that_is_dropped(kinds: tuple[Kind, ...], tmp_path: Path) -> None:
    """The libraries are imported once for all of them. bitsandbytes takes widths in multiples of 32."""
    widths = {"hidden_size": 128, "intermediate_size": 192}
    model = tiny_model(tmp_path / "model", json.loads(CONFIG.read_text(encoding="utf-8")) | widths)
    folders = [
        exported(model, method, tmp_path / str(index), "accelerate", "--gpus", "1xL4", *settings)
        for index, (method, settings) in enumerate(kinds)
    ]
    starts = [start for run, (method, _) in zip(folders, kinds, strict=True) for start in starts_of(run, method)]
    given = tmp_path / "starts.json"
    given.write_text(json.dumps(starts), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("started_scripts.py"), given],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
        capture_output=True, text=True, timeout=120 * len(kinds),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"error"')]
    for start, answer in zip(starts, answers, strict=True):
        assert not answer["error"], (start, answer["error"][-4000:])
        assert not [each for each in answer["deprecated"] if not any(own in each for own in OWN_USE)], start
    for run, (method, _) in zip(folders, kinds, strict=True):
        first = json.loads((run / "output" / "checkpoint-2" / "trainer_state.json").read_text(encoding="utf-8"))
        assert any("eval_runtime" in line for line in first["log_history"]) == METHODS[method].evaluates
        for folder in ("output", "named") if (run / "train.py").exists() else ("named",):
            # Seconds that were measured: those of the first run, or of no other.
            assert history(run / folder)[: len(first["log_history"])] == first["log_history"]
