"""Error messages in the words of each interface (here: door), in place of the command's flags.

JSON (HTTP and MCP) has keys, Python has arguments, the page has the labels of its form:

command   Give a --batch-size that divides it. Use --tuning qlora --set lora_r=8.
json      Give a batch_size that divides it. Use "tuning": "qlora" "set": {"lora_r": 8}.
python    Give a batch_size that divides it. Use tuning='qlora' lora_r=8.
page      Give a “Samples of a micro-batch” that divides it. Use “Tuning” qlora lora_r=8.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from planner.errors import PlanError
from planner.jobs.job import Goal
from planner.methods import METHODS

Door = Literal["json", "python", "page"]

# The label of each option in the form, which a page names where a command names its flag.
LABELS = {
    "model": "Model",
    "gpus": "GPUs",
    "method": "Method",
    "tuning": "Tuning",
    "max_length": "Tokens of a row",
    "prompt_length": "Tokens of a prompt",
    "max_completion_length": "Tokens of a completion",
    "effective_batch_size": "Effective batch size",
    "lora_r": "LoRA rank",
    "batch_size": "Samples of a micro-batch",
    "lengths": "Lengths of your rows",
    "completion_lengths": "Lengths of completions",
    "free_memory": "Usable memory of a GPU",
    "host_memory": "Host memory of a node",
    "network": "Network of a node",
    "risk": "Accepted risk",
    "optimize": "Prefer",
    "prices": "Price of a GPU and hour",
    "tokens": "Tokens to train on",
}
FACTS = ("images_per_row", "image_size", "padded")  # options that are settings too
SWITCHES = ("overwrite", "padded")  # options without a value on a command line
NAMES = {*LABELS, *FACTS, *SWITCHES, "config", "accelerate_config", "deepspeed_config", "trl_version", "free"}
# Options whose values are no text.
NOT_TEXT = {
    "max_length", "prompt_length", "max_completion_length", "effective_batch_size", "lora_r", "batch_size", "risk",
    "images_per_row", *SWITCHES,
}  # fmt: skip
CHOICES = {*METHODS, *get_args(Goal), "full", "lora", "qlora", "auto", "local", "hf-jobs"}
VALUE = r"(?:'[^']*'|[^\s'][^\s']*[^\s'.,;:)]|\w)"
SETTINGS = rf"((?:--set [\w.]+={VALUE}? ?)+(?<! ))"  # of `lora_kernels=`, none
COMMAND = re.compile(rf"\bplan((?: --(?:set [\w.]+=|[a-z-]+ ){VALUE})+)")
FLAG = re.compile(rf"{SETTINGS}|(--set)\b|(?<![\w-])--([a-z][a-z-]*[a-z])(?:[ =]({VALUE}))?")


def spelled(message: str, door: Door) -> str:
    """Return a message in a door's words; a flag that the door does not have stays."""
    if door != "page":
        message = COMMAND.sub(lambda found: _call(found[1], door), message)
    return FLAG.sub(lambda found: _words(found, door), message)


@contextmanager
def errors_spelled(door: Door) -> Iterator[None]:
    """Raise a PlanError of the body in a door's words."""
    try:
        yield
    except PlanError as error:
        error.args = (spelled(str(error), door),)
        raise


def _call(flags: str, door: Door) -> str:
    """Return a command as a body of a request, or as a call: `plan(model='Qwen2.5-7B', gpus='1xL4')`."""
    words = [word.partition("=" if word.startswith("set ") else " ") for word in flags.split(" --")[1:]]
    values = {name.removeprefix("set ").replace("-", "_"): text for name, _, text in words}
    if door == "python":
        return f"plan({_python(values)})"
    read = {name: _value(name, text) for name, text in values.items()}
    settings = {name: value for name, value in read.items() if name not in NAMES}
    own = {name: value for name, value in read.items() if name in NAMES}
    return json.dumps(own | ({"set": settings} if settings else {}))


def _words(found: re.Match[str], door: Door) -> str:
    if found[1]:
        return SET[door](dict(each.rstrip().split("=", 1) for each in found[1].split("--set ") if each))
    if found[2]:
        return "set" if door == "json" else "settings"
    negated, text = found[3].startswith("no-"), found[4] or ""
    name = found[3].removeprefix("no-").replace("-", "_")
    rest = found[0][len(found[3]) + 2 :]  # the value, or the next word
    if name not in NAMES:
        return found[0]
    if name in SWITCHES and door != "page":
        return ONE[door](name, str(not negated)) + rest
    if door != "page" and (any(map(str.isdigit, text)) or text.startswith(("'", "./")) or text in CHOICES):
        return ONE[door](name, text)
    return (f"“{LABELS[name]}”" if door == "page" and name in LABELS else name) + rest


def _value(name: str, text: str) -> object:
    """Return a value as Python has it: a number, true, false, none, or text without its quotes, such as a version."""
    if name in NAMES - NOT_TEXT:
        return text.strip("'")
    words: dict[str, object] = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip("'")


def _json(values: dict[str, str]) -> str:
    return json.dumps({name: _value(name, text) for name, text in values.items()})


def _python(values: dict[str, str]) -> str:
    return ", ".join(f"{name}={_value(name, text)!r}" for name, text in values.items())


# A setting, or an option, with its value in a door's words.
SET: dict[Door, Callable[[dict[str, str]], str]] = {
    "json": lambda values: f'"set": {_json(values)}',
    "python": _python,
    "page": lambda values: " ".join(f"{name}={text}" for name, text in values.items()),
}
ONE: dict[Door, Callable[[str, str], str]] = {
    "json": lambda name, text: _json({name: text})[1:-1],
    "python": lambda name, text: _python({name: text}),
}
