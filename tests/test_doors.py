"""One input, four doors: the command, HTTP, an agent's tool and Python refuse it, each in its own words."""

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from planner import PlanError, parse_cluster, plan
from planner.commands.main import run
from planner.mcp.tools import call
from planner.report.spelling import NAMES, NOT_TEXT, Door, spelled
from planner.requests.options import CandidateOptions, SearchOptions
from planner.serve.answers import answer
from planner.serve.requests import Allowed

JOB = {"model": "Qwen2.5-7B", "gpus": "2xA100-40G", "method": "sft"}
GRPO, SEEING = {**JOB, "method": "grpo"}, {**JOB, "model": "Qwen2.5-VL-7B-Instruct"}
SERVER = {"use_vllm": True, "vllm_mode": "server", "vllm_data_parallel_size": 2}
REPLICAS = {**GRPO, "gpus": "4xA100-40G", "tuning": "lora", "trl_version": "1.10", "set": SERVER}
FUSED = {**JOB, "tuning": "lora", "set": {"lora_kernels": "mlp"}}
OPTION = re.compile(r"(?<![\w-])--(?!allow-paths)[a-z]")  # a flag of a job, not one that starts the server
# Input, what JSON says of it, and what Python says.
REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({}, "model, gpus and method are missing", "model, gpus and method are missing"),
    ({"model": "Qwen2.5-7B", "gpus": "1xL4"}, 'example: {"model": "Qwen2.5-7B", "gpus"', "plan(model='Qwen2.5-7B',"),
    ({**JOB, "model": "Qwen9-7B"}, "Did you mean Qwen/Qwen2-7B", "Did you mean Qwen/Qwen2-7B"),
    ({**JOB, "gpus": "2xA900"}, "Unknown GPU 'A900'", "Unknown GPU 'A900'"),
    ({**JOB, "gpus": "0xA100-40G"}, '"gpus": "0xA100-40G" has 0 GPUs', "gpus='0xA100-40G' has 0 GPUs"),
    ({**JOB, "gpus": "1x24"}, '"gpus": "24" is no card', "gpus='24' is no card"),
    ({**JOB, "method": "sftt"}, "Unknown method 'sftt'", "Unknown method 'sftt'"),
    ({**JOB, "tuning": "loraa"}, "Unknown tuning class 'loraa'", "Unknown tuning class 'loraa'"),
    ({**JOB, "set": {"zero_stag": 3}}, "Did you mean zero_stage", "Did you mean zero_stage"),
    ({**JOB, "set": {"lora_r": "many"}}, "lora_r must be a whole number", "lora_r must be a whole number"),
    ({**JOB, "effective_batch_size": 7, "batch_size": 2}, '"effective_batch_size": 7 ', "effective_batch_size=7 "),
    ({**JOB, "tuning": "full", "set": {"load_in_4bit": True}}, '"tuning": "full" cannot', "tuning='full' cannot"),
    ({**JOB, "tuning": "lora", "set": {"load_in_4bit": True}}, 'Use "tuning": "qlora"', "Use tuning='qlora'"),
    ({**JOB, "tuning": "full", "set": {"use_peft": True}}, '"tuning": "full" contradicts', "tuning='full' contradicts"),
    ({**GRPO, "effective_batch_size": 9}, '"effective_batch_size": ', "effective_batch_size="),
    ({**JOB, "host_memory": "1MiB"}, '"host_memory": "1MiB" is not', "host_memory='1MiB' is not"),
    ({**JOB, "free_memory": "900GiB"}, '"free_memory": "900GiB" is not', "free_memory='900GiB' is not"),
    ({**JOB, "network": "fast2"}, '"network": "fast2" is no speed', "network='fast2' is no speed"),
    ({**JOB, "trl_version": "new"}, "new", "new"),
    ({**JOB, "lengths": "p50=9,p10=99"}, '"lengths"', "lengths="),
    ({**JOB, "images_per_row": 1}, "images", "images"),
    ({**SEEING, "images_per_row": 1}, '"image_size": "1024x768"', "image_size='1024x768'"),
    ({**JOB, "set": {"use_vllm": True}}, "use_vllm", "use_vllm"),
    (FUSED, 'Use "set": {"lora_kernels": ""} instead', "Use lora_kernels='' instead"),
    # a number would be refused where it is pasted back
    (REPLICAS, '"trl_version": "1.11", whose server', "trl_version='1.11', whose server"),
)  # fmt: skip


def command_words(given: Mapping[str, Any]) -> list[str]:
    """The flags of an input."""
    settings = [f"--set={name}={str(value).lower()}" for name, value in given.get("set", {}).items()]
    return settings + [f"--{name.replace('_', '-')}={given[name]}" for name in given if name != "set"]


def over_http(given: Mapping[str, Any]) -> str:
    """The message of the answer to a body."""
    allowed = Allowed(paths=False, hub=False)
    found = answer("plan", json.dumps(given).encode(), time.monotonic() + 60, allowed)
    return str(json.loads(found.content)["error"]["message"])


@pytest.mark.parametrize(("given", "in_json", "in_python"), REFUSED, ids=[str(each[0])[-60:] for each in REFUSED])
def test_each_door_refuses_in_its_own_words(
    given: dict[str, Any], in_json: str, in_python: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command_words(given), "--json", "--quiet"]) == 2
    capsys.readouterr()
    http, agent = over_http(given), call("plan", given)
    assert agent.is_error and agent.document["error"]["message"] == agent.text
    settings = {**{name: value for name, value in given.items() if name != "set"}, **given.get("set", {})}
    with pytest.raises(PlanError) as refused:
        plan(**settings)
    for text, wanted in ((http, in_json), (agent.text, in_json), (str(refused.value), in_python)):
        assert wanted in text and not OPTION.search(text), text


def test_a_cluster_in_python_is_refused_in_pythons_words() -> None:
    with pytest.raises(PlanError, match=r"^gpus='0xL4' has 0 GPUs"):
        parse_cluster("0xL4")


def test_files_of_another_answer_are_refused_in_pythons_words(tmp_path: Path) -> None:
    answered = plan("gpt2", "1xL4", method="sft")
    (tmp_path / "train.yaml").write_text("x: 1")
    with pytest.raises(PlanError, match=r"Use overwrite=True\.$"):
        answered.export(tmp_path)


@pytest.mark.parametrize(
    ("door", "words"),
    [
        (
            "json",
            'Give a batch_size that divides it, or "tuning": "qlora"; "set": {"lora_r": 8, "bf16": true}. --out x',
        ),
        ("python", "Give a batch_size that divides it, or tuning='qlora'; lora_r=8, bf16=True. --out x"),
        (
            "page",
            "Give a “Samples of a micro-batch” that divides it, or “Tuning” qlora; lora_r=8 bf16=true. --out x",
        ),
    ],
)
def test_a_message_has_the_words_of_a_door(door: Door, words: str) -> None:
    message = "Give a --batch-size that divides it, or --tuning qlora; --set lora_r=8 --set bf16=true. --out x"
    assert spelled(message, door) == words


def test_options_that_are_no_text_are_those_of_the_types_of_the_options() -> None:
    hints = get_type_hints(SearchOptions) | get_type_hints(CandidateOptions)
    numbers = {name for name, hint in hints.items() if {int, float, bool} & {hint, *get_args(hint)}}
    assert numbers & NAMES == NOT_TEXT - {"overwrite"}  # a flag of `plan export`


LOG = (
    "Saving model checkpoint to x\nRuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9\n"
)
# Jobs whose answers advise flags: in warnings, remedies, levers, alternatives, and as advice for a log.
ADVISED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plan", {"model": "Qwen2.5-0.5B", "gpus": "1xRTX-3050-4G", "method": "sft", "effective_batch_size": 8}),
    ("plan", {"model": "Qwen2.5-72B", "gpus": "1xA100-40G", "method": "sft", "tuning": "full"}),
    ("plan", {"model": "Qwen2.5-7B", "gpus": "1xRTX-4090", "method": "sft", "tuning": "lora"}),
    ("estimate", {**JOB, "tuning": "lora"}),
    ("estimate", {**SEEING, "tuning": "lora"}),
    ("compare", {**JOB, "gpus": "1xL4,2xA100-40G,1xRTX-3050-4G"}),
    ("diagnose", {"log": "***** Running training *****\nKilled\n"}),
    ("diagnose", {**JOB, "tuning": "lora", "log": LOG}),
)


def texts(value: Any) -> list[str]:
    """The sentences of a document: all its texts but files, commands and settings."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, dict):
        inner = [each for key, each in value.items() if key not in ("launch", "settings", "values", "files")]
    return [text for each in inner for text in texts(each)]


@pytest.mark.parametrize(("task", "given"), ADVISED, ids=[f"{task} {given}"[:60] for task, given in ADVISED])
def test_no_answer_in_json_advises_a_flag(task: Any, given: dict[str, Any]) -> None:
    found = answer(task, json.dumps(given).encode(), time.monotonic() + 60, Allowed(paths=False, hub=False))
    told = call(task, given)
    assert found.status == 200 and not told.is_error
    said = [*texts(json.loads(found.content)), *texts(told.document), *told.text.split("\n")]
    assert [text for text in said if OPTION.search(text)] == []
