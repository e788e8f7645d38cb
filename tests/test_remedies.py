"""A remedy in a refusal works: added to the command, without what it says it replaces, the refusal is gone."""

import random
import re
from collections.abc import Iterator

import pytest

from planner.commands.main import run
from planner.jobs.settings import settings_flags, settings_of_fields
from planner.quantizations import QUANTIZATIONS
from planner.settings.table import SETTINGS
from tests.test_bad_input import CONTRADICTIONS, asked
from tests.test_stops import EXAMPLES, USUAL

FLAGS = r"((?:--[\w-]+ \S+ ?)+)"
REMEDY = re.compile(rf"{FLAGS}(?:instead of {FLAGS})?")
CONTRADICTED = re.compile(r"contradict|set twice")
# What draws of settings are made of, beside all that spells a field: in pairs they contradict each other.
OTHERS = (
    "dtype=float16", "dtype=bfloat16", "attn_implementation=flash_attention_2", "optim=adamw_8bit", "cp_size=2",
    "sp_size=2", "dp_replicate_size=2", "num_processes=3", "lora_target_modules=all-linear", "use_dora=true",
    "gradient_checkpointing=false", "every_n_layers=2", "offload=true", "vllm_tensor_parallel_size=3", "packing=true",
    "vllm_enable_sleep_mode=true", "prepare_model_for_kbit_training=true", "bnb_4bit_quant_storage=bfloat16",
    "activation_offloading=true", "max_length=1001", "per_device_train_batch_size=1", "gradient_accumulation_steps=1",
    "num_generations=3", "expandable_segments=true", "fsdp_offload_params=true", "eval_strategy=steps",
    "per_device_eval_batch_size=3", "stage3_prefetch_bucket_size=5", "lora_r=8", "use_liger_kernel=true",
)  # fmt: skip


def spelled() -> list[str]:
    """Every setting of the libraries that spells a field together with others, with each of its values."""
    rows = [row for row in SETTINGS if row.values and row.file != "environment"]
    values = [{name: value} for row in rows for settings in row.values.values() for name, value in settings.items()] + [
        {row.field: value} for row in rows for value in row.values
    ]
    flags = [settings_flags(value).removeprefix("--set ") for value in values]
    return [*dict.fromkeys(flags), *OTHERS]


def command_of(question: list[str], settings: list[str]) -> list[str]:
    return ["estimate", *question, *(part for setting in settings for part in ("--set", setting))]


def commands_of_stops() -> Iterator[list[str]]:
    """The examples of the stops, by the libraries' names and by the fields'."""
    for gpus, example in EXAMPLES.values():
        fields = {**USUAL, **example}
        question = asked(fields.pop("model"), gpus, fields.pop("method"))
        if QUANTIZATIONS[fields.get("quantization", "none")].bitsandbytes:
            question += ["--tuning", "qlora"]
        for settings in (settings_of_fields(fields), fields):
            yield command_of(question, settings_flags(settings).removeprefix("--set ").split(" --set "))


def drawn_commands(number: int) -> Iterator[list[str]]:
    draw, settings = random.Random(4), spelled()
    models = ("gemma-3-4b-it", "gpt-oss-20b", "Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen2.5-0.5B")
    for _ in range(number):
        question = asked(draw.choice(models), draw.choice(("2xA100-80G", "4xT4")), draw.choice(("sft", "grpo", "dpo")))
        question += ["--tuning", draw.choice(("full", "lora", "qlora"))] if draw.random() < 0.5 else []
        question += ["--max-length", "9999999"] if draw.random() < 0.1 else []
        yield command_of(question, draw.sample(settings, draw.randint(1, 4)))


def refusal(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a command that is refused, else an empty text."""
    code = run(command)
    said = capsys.readouterr().err
    return said.removeprefix("Error: ").strip() if code == 2 else ""


def without(command: list[str], replaced: list[str]) -> list[str]:
    """The command without the settings of some flags, each of which it has."""
    for setting in replaced[1::2]:
        place = command.index(setting)
        command = [*command[: place - 1], *command[place + 1 :]]
    return command


def mended(command: list[str], message: str) -> Iterator[list[str]]:
    """The command with each remedy of a message."""
    _, _, advice = message.rstrip(".").rpartition(". Use ")
    for way in re.split(r",? or ", advice.removesuffix(", or drop it")):
        if found := REMEDY.fullmatch(way):
            flags, replaced = (part.split() if part else [] for part in found.groups())
            yield [*without(command, replaced), *flags]
        elif way.startswith("leave out "):
            name = way.removeprefix("leave out ")
            yield without(command, ["--set", *(each for each in command if each.startswith(f"{name}="))])


def assert_remedies_work(command: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Check each remedy of the command's refusal; return how many there are."""
    message = refusal(command, capsys)
    better = list(mended(command, message))
    for each in better:
        after = refusal(each, capsys)
        assert after != message, (command, each)
        assert not CONTRADICTED.search(after) or CONTRADICTED.search(message), (command, message, each, after)
    return len(better)


@pytest.mark.parametrize(
    ("question", "settings", "message"),
    [
        (
            asked(gpus="2xT4", method="sft"), "bf16=true",
            "T4 has no bfloat16 (compute capability 7.5; it needs 8.0). Use --set fp16=true instead of --set "
            "bf16=true, or leave out bf16.",
        ),
        (
            asked(gpus="2xT4", method="sft"), "dtype=bfloat16 fp16=true",
            "T4 has no bfloat16, so dtype=bfloat16 cannot be had there. Use --set dtype=float16 instead of --set "
            "dtype=bfloat16, or leave out dtype.",
        ),
        (
            asked("Qwen2.5-7B-Instruct-GPTQ-Int4", method="sft"), "lora_target_modules=all-linear",
            "all-linear finds no layer of Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4: GPTQ layers are not nn.Linear. Use --set "
            "lora_target_modules=down_proj,gate_proj,k_proj,o_proj,q_proj,up_proj,v_proj instead of --set "
            "lora_target_modules=all-linear, or leave out lora_target_modules.",
        ),
        (
            asked("gemma-3-4b-it", method="sft"), "distributed_type=MULTI_GPU",
            "DDP stops at google/gemma-3-4b-it in full, whose vision tower gets no gradients from text. Use --set "
            "zero_stage=2 instead of --set distributed_type=MULTI_GPU, or --set gradient_checkpointing=false.",
        ),
        (
            [*asked(method="sft"), "--tuning", "qlora"], "load_in_8bit=true use_dora=true",
            "use_dora is planned on 4-bit and 16-bit weights, not on int8 ones. Use --set load_in_4bit=true instead of "
            "--set load_in_8bit=true, or leave out load_in_8bit.",
        ),
        (
            asked(method="sft"), "bits=8",
            "Qwen/Qwen2.5-7B is no 8-bit GPTQ checkpoint, and is not made one at load. Use --tuning qlora --set "
            "load_in_8bit=true instead of --set bits=8, or a model that was published so.",
        ),
        (asked(method="sft"), "zero_stage=3 fsdp_version=1", "zero_stage=3 and fsdp_version=1 contradict each other."),
        (
            asked(method="sft"), "zero_stage=2 fsdp_offload_params=true",
            "Only ZeRO-3 and FSDP move parameters to the host (here: ZeRO-2). Use --set zero_stage=3 instead of --set "
            "zero_stage=2.",
        ),
    ],
)  # fmt: skip
def test_a_remedy_says_which_setting_it_replaces(
    question: list[str], settings: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(command_of(question, settings.split()), capsys) == message


@pytest.mark.parametrize(("question", "settings", "message"), CONTRADICTIONS)
def test_the_remedies_of_a_contradiction_work(
    question: list[str], settings: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_remedies_work(command_of(question, settings.split()), capsys)


@pytest.mark.slow
def test_the_remedies_of_stops_work(capsys: pytest.CaptureFixture[str]) -> None:
    found = [assert_remedies_work(command, capsys) for command in commands_of_stops()]
    assert sum(found) >= 90


@pytest.mark.slow
def test_the_remedies_of_drawn_commands_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert sum(assert_remedies_work(command, capsys) for command in drawn_commands(100)) >= 50
