"""Random input of the command for `test_fuzz.py` and `scripts/fuzz.py`: valid arguments and files, made hostile."""

import asyncio
import contextlib
import copy
import io
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import fields

from planner.commands.main import run
from planner.jobs.dialects.axolotl import AXOLOTL
from planner.jobs.dialects.llama_factory import LLAMA_FACTORY
from planner.jobs.settings import setting_names
from planner.models.architectures.table import architecture_of
from planner.models.catalogue import _lines
from planner.requests.launch_config import DEEPSPEED_UNMODELLED, IN_SECTIONS, UNMODELLED
from planner.requests.options import SearchOptions
from planner.requests.train_config import NESTED_KEYS
from planner.serve.answers import INTERNAL_ERROR, TASKS, _time_is_up, answer
from planner.serve.requests import Allowed

CORPUS = Path(__file__).parent / "corpus"
LOGS = Path(__file__).parent / "logs"
DATA = Path(__file__).parent / "data"
POST = "POST"  # the first argument of a case that is a request over HTTP: a task, and the file BODY
MCP = "MCP"  # the same of a line that `plan mcp` reads: the file BODY
BODY = "body"
NOTHING_ALLOWED = Allowed(paths=False, hub=False)
EXIT_CODES = (0, 2, 3, 4)
MOST_ERROR_CHARACTERS = 1_200  # of a line of stderr: the longest message of our own, and its prefix
MOST_SECONDS = 10.0  # of one case, of CPU time


class FuzzCase(Struct, frozen=True, kw_only=True):
    """A command line, POST and a task of the server, or MCP, and the files of its folder. Bytes are Latin-1 text, so
    that a case is JSON.
    """

    arguments: tuple[str, ...]
    files: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> str:
        return json.dumps({"arguments": self.arguments, "files": dict(self.files)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "FuzzCase":
        read = json.loads(text)
        return cls(arguments=tuple(read["arguments"]), files=tuple(read["files"].items()))


def fault(case: FuzzCase) -> str:
    """Run a case in an empty folder; return what is wrong with its outcome, "" if nothing is.

    An exception that leaves `run` is a traceback for the user, and is not caught.
    """
    out, err = io.StringIO(), io.StringIO()
    begin = time.process_time()
    with (
        tempfile.TemporaryDirectory() as folder,
        _inside(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        for name, text in case.files:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(text.encode("latin-1"))
        doors = {POST: _posted, MCP: _told}
        code = doors.get(case.arguments[0], lambda command: run(list(command.arguments)))(case)
    seconds = time.process_time() - begin
    if code not in EXIT_CODES:
        return f"exit code {code}: {err.getvalue()[-500:]}"
    if seconds > MOST_SECONDS:
        return f"{seconds:.1f} s"
    if "\x1b" in out.getvalue() + err.getvalue():
        return "a terminal escape in the output"
    if code == 2 and max(map(len, err.getvalue().splitlines()), default=0) > MOST_ERROR_CHARACTERS:
        return f"an error of {len(err.getvalue())} characters"
    return ""


def _posted(case: FuzzCase) -> int:
    """Do a task of the server in this process; return 1 if it failed, else 0."""
    before = signal.signal(signal.SIGALRM, _time_is_up)  # as a worker of the server has it
    try:
        body = Path(BODY).read_bytes()
        found = answer(case.arguments[1], body, time.monotonic() + MOST_SECONDS, NOTHING_ALLOWED)  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGALRM, before)
    return int(found.status == INTERNAL_ERROR)


HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "fuzz", "version": "1"}}


class _Client:
    """A client of `plan mcp`, in this process: its lines, and the answers as text. What it waits for has a limit."""

    def __init__(self, line: str) -> None:
        requests = [
            {"jsonrpc": "2.0", "id": "hello", "method": "initialize", "params": HELLO},
            {"jsonrpc": "2.0", "method": "notifications/initialized"},
            {"jsonrpc": "2.0", "id": "last", "method": "ping"},
        ]
        self._lines = [*map(json.dumps, requests[:2]), line, json.dumps(requests[2])]
        self.answers: list[str] = []
        self._last = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[str]:
        for line in self._lines:
            yield line + "\n"
        async with asyncio.timeout(6 * MOST_SECONDS):  # of a loaded machine
            await self._last.wait()

    async def write(self, text: str) -> None:
        text.encode()
        self.answers.append(text)
        if len(self.answers) == 3:
            self._last.set()

    async def flush(self) -> None:
        pass


def _told(case: FuzzCase) -> int:
    """Give a line to `plan mcp` between two others, in this process; return 1 if one of the three has no answer."""
    from mcp.server.stdio import stdio_server

    from planner.mcp.server import answer_lines

    async def talk() -> int:
        client = _Client(Path(BODY).read_text("utf-8", "replace").replace("\n", " "))
        with contextlib.suppress(TimeoutError):
            await answer_lines(stdio_server(client, client))  # type: ignore[arg-type]
        return int(sorted(json.loads(each).get("id") in ("hello", "last") for each in client.answers) != [0, 1, 1])

    return asyncio.run(talk())


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    """Work in a folder; models without formulas are not measured, the cache is empty, and the Hub is off."""
    before, variables = Path.cwd(), dict(os.environ)
    os.chdir(folder)
    os.environ |= {"PLAN_CACHE": folder + "/cache", "HF_HUB_OFFLINE": "1"}
    modules = dict(sys.modules)
    sys.modules["probes.layers.coefficients"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.modules.pop("probes.layers.coefficients")
        sys.modules.update(modules)
        os.chdir(before)
        os.environ.clear()
        os.environ.update(variables)


# -- values ------------------------------------------------------------------------------------------------------------

NUMBERS: tuple[Any, ...] = (
    0,
    1,
    -1,
    2,
    3,
    7,
    64,
    10**6,
    2**31,
    2**63,
    2**64,
    10**30,
    10**400,
    -(10**400),
    0.5,
    -0.0,
    1e-300,
    1e300,
    float("nan"),
    float("inf"),
    float("-inf"),
)
TEXTS = (
    "",
    " ",
    "x",
    "auto",
    "none",
    "null",
    "true",
    "NaN",
    "1e400",
    "1e5",
    "-1",
    "0x10",
    "1" * 5000,
    "a" * 5000,
    "a b " * 2000,
    "\x1b]0;x\x07",
    "\n",
    "a\nb",
    "\0",
    "\udcff",
    "\u202e",
    "漢字🙂",
    "../..",
    "/",
    "gpt2",
    "sft",
    "all-linear",
    "{}",
    "$(id)",
    "%s",
)
scalars = st.one_of(st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.text(max_size=20))
HOSTILE = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a document, its own included."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += paths_of(inner, (*path, key))
    return found


# Values that a key may well take: a document that has them is refused less often, and goes further.
USUAL = (
    True,
    False,
    None,
    1,
    2,
    8,
    0.5,
    4096,
    "auto",
    "bf16",
    "adamw_torch",
    "sdpa",
    "cpu",
    [],
    ["q_proj"],
    {},
    "2",
    "",
)


@st.composite
def changed(draw: st.DrawFn, document: Any, keys: Sequence[str] = ()) -> Any:
    """A document with a few values replaced, and with a few further keys of `keys`."""
    values = draw(st.sampled_from([HOSTILE, HOSTILE, st.sampled_from(USUAL).map(copy.deepcopy)]))
    result = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths_of(result)))
        if path == ():
            if keys and isinstance(result, dict):
                result[draw(st.sampled_from(keys))] = draw(values)
            continue
        *outer, last = path
        parent = result
        for key in outer:
            parent = parent[key]
        parent[last] = draw(values)
    return result


@st.composite
def texts_of(draw: st.DrawFn, documents: st.SearchStrategy[Any]) -> str:
    """A document as JSON text, now and then cut or with a byte replaced."""
    text = json.dumps(draw(documents))
    kind = draw(st.integers(0, 19))
    if kind == 0:
        return text[: draw(st.integers(0, len(text)))]
    if kind == 1:
        index = draw(st.integers(0, len(text)))
        return text[:index] + draw(st.characters(max_codepoint=255)) + text[index:]
    return text


# -- cases -------------------------------------------------------------------------------------------------------------

JOB = ("--gpus", "1xA100-80G", "--method", "sft")
MODEL_TYPES = {json.loads(line)["config"]["model_type"]: json.loads(line)["config"] for line in _lines()}
# Models whose layers are measured are refused here (`_inside`).
CONFIGS = tuple(MODEL_TYPES[name] for name in sorted(MODEL_TYPES) if architecture_of(name).has_formulas)
YAML_KEYS = (*setting_names(), *NESTED_KEYS, "deepspeed", "fsdp", "learning_rate", "quantization_config")
TRAIN = {"model_name_or_path": "gpt2", "max_length": 512, "use_peft": True, "lora_r": 8, "bf16": True}
YAML_TEXTS = (
    "a: 2001-99-99",
    "a: !!int x",
    "a: !!float x",
    "a: !!timestamp x",
    "a: !!binary x",
    "? [a]\n: 1",
    "1: a\nb: 2\nnull: 3",
    "a: &a [*a]",
    "a: " + "[" * 5000,
    "deepspeed: " + "a" * 3000,
    "env: {1: a, b: 2}",
    "max_length: 1" + "0" * 5000,
    "<<: 1",
    "<<: [*x]",
    "!!set {a, b}",
    "a: !!omap [1]",
    "a: !!pairs x",
    "--- a\n--- b",
    "%YAML 9.9\n---\na: 1",
    "a: 0b",
    "a: 0x",
    "a: 1:99:99",
    "a: .inf",
    "max_length: .nan",
    "=: 1",
)
CASE_LINES = (
    {"model": "gpt2", "max_length": 256, "per_device_train_batch_size": 2, "extra": {"lora_r": 8}},
    {"model": "gpt2", "settings": {"method": "sft", "max_length": 128}, "quantity": "allocated", "measured_gib": 1.5},
    {
        "point": {"model": "gpt2", "layers": 2},
        "outcome": "fits",
        "gpu": "A100-80G",
        "peak_allocated": 5,
        "peak_reserved": 9,
    },
    {"model": "x", "settings": {"tuning": "full"}, "quantity": "over", "config": MODEL_TYPES["llama"]},
    {"left_out": "why"},
)
OPTIONS = (
    "--model",
    "--gpus",
    "--method",
    "--tuning",
    "--optimize",
    "--risk",
    "--max-length",
    "--batch-size",
    "--lora-r",
    "--effective-batch-size",
    "--free-memory",
    "--host-memory",
    "--trl-version",
    "--prompt-length",
    "--max-completion-length",
    "--images-per-row",
    "--image-size",
    "--set",
    "--config",
    "--accelerate-config",
    "--deepspeed-config",
    "--network",
    "--out",
    "--html",
    "--free",
    "--prices",
    "--price-per-hour",
    "--tokens",
    "--max-cost",
)
WRITTEN = ("--out", "--html")  # options that name what is written
DEEPSPEED = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": 5e7,
        "overlap_comm": True,
    },
    "bf16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
}
ACCELERATE = {
    "distributed_type": "DEEPSPEED",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 2,
    "deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu"},
    "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": False},
    "parallelism_config": {"parallelism_config_cp_size": 1},
}
ACCELERATE_KEYS = (*IN_SECTIONS, *UNMODELLED, "deepspeed_config_file", "zero_stage", "env")
LAUNCH_FILES = (
    ("deepspeed", DEEPSPEED, tuple(name.split(".")[-1] for name in DEEPSPEED_UNMODELLED)),
    ("accelerate", ACCELERATE, ACCELERATE_KEYS),
    ("accelerate", {**ACCELERATE, "distributed_type": "FSDP"}, ACCELERATE_KEYS),
    ("accelerate", {**ACCELERATE, "deepspeed_config": {"deepspeed_config_file": "accelerate"}}, ACCELERATE_KEYS),
)
PINNED = ("--model", "gpt2", "--method", "sft", "--tuning", "lora", "--batch-size", "1", "--max-length", "128")
PRICE_LINES = (
    *(f"T4 = {number!r}" for number in (0, -1, 1e-300, 1e300, 10**400, 2**63, float("nan"), float("inf"), True)),
    "A100-80G = 1",
    "T4 = 1" + "0" * 5000,
    "T4 = '1'",
    "T4 = [1]",
    "[L4]",
    "T4 = 2026-01-01",
    "L4.x = 1",
    "'' = 1",
    '"\x1b[31m" = 1',
    "x" * 5000 + " = 1",
    "a = " + "[" * 5000,
    "1xL4 = 2",
)
LOG_TEXTS = (
    *(path.read_text(encoding="utf-8") for path in sorted(LOGS.glob("*.log"))),
    *(json.loads(line)["text"] for line in (DATA / "diagnosed_logs.jsonl").read_text(encoding="utf-8").splitlines()),
)
OPTION_NAMES = tuple(entry.name for entry in fields(SearchOptions))
BODY_OF_A_JOB = {"model": "gpt2", "gpus": "1xL4", "method": "sft", "tuning": "lora", "set": {"lora_r": 8}}
TOOLS_CONFIGS = tuple(
    (dialect, tuple(json.loads(line)["settings"] for line in (DATA / file).read_text(encoding="utf-8").splitlines()))
    for dialect, file in ((AXOLOTL, "axolotl_configs.jsonl"), (LLAMA_FACTORY, "llama_factory_configs.jsonl"))
)
OWN_RESULT = json.loads((DATA / "own_measurement.json").read_text(encoding="utf-8"))
RESULTS_FILE = "cache/measurements/schema-1.jsonl"
IMAGES = ((), (), ("--images-per-row", "1"), ("--images-per-row", "2", "--image-size", "90x60"))


def _given(text: str) -> str:
    """Text as an argument of a process can be: without null characters."""
    return text.replace("\0", "")


def _inside_the_folder(path: str) -> bool:
    return not path.startswith(("/", ".."))


words = (
    st.sampled_from(TEXTS).map(_given)
    | st.text(max_size=20).map(_given)
    | st.sampled_from(NUMBERS).map(lambda number: repr(number))
)
assignments = st.tuples(st.sampled_from(setting_names()), words).map("=".join)


@st.composite
def arguments(draw: st.DrawFn) -> FuzzCase:
    options = {"--model": "gpt2", "--gpus": "1xA100-80G", "--method": draw(st.sampled_from(["sft", "grpo", "dpo"]))}
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(OPTIONS))
        kind = assignments if name == "--set" else words.filter(_inside_the_folder) if name in WRITTEN else words
        options[name] = draw(kind)
    command = draw(st.sampled_from([()] + 9 * [("estimate",)]))
    flags = ("--json",) if draw(st.booleans()) else ()
    return FuzzCase(arguments=(*command, *(part for pair in options.items() for part in pair), *flags))


@st.composite
def configs(draw: st.DrawFn) -> FuzzCase:
    config = draw(st.sampled_from(CONFIGS))
    text = draw(texts_of(changed(config, tuple(config))))
    images = draw(st.sampled_from(IMAGES))
    return FuzzCase(arguments=("estimate", "--model", "./m", *JOB, *images), files=(("m/config.json", text),))


@st.composite
def train_files(draw: st.DrawFn) -> FuzzCase:
    text = draw(st.sampled_from(YAML_TEXTS) | texts_of(changed(TRAIN, YAML_KEYS)))
    return FuzzCase(
        arguments=("estimate", "--model", "gpt2", *JOB, "--config", "t.yaml"),
        files=(("t.yaml", text.encode("utf-8", "replace").decode("latin-1")),),
    )


@st.composite
def reports(draw: st.DrawFn, report: Any) -> FuzzCase:
    text = draw(texts_of(changed(report)))
    command = draw(st.sampled_from([("export", "p.json", "out"), ("probe", "p.json", "--device", "none")]))
    return FuzzCase(arguments=command, files=(("p.json", text),))


@st.composite
def case_files(draw: st.DrawFn) -> FuzzCase:
    text = draw(texts_of(changed(draw(st.sampled_from(CASE_LINES)), YAML_KEYS)))
    return FuzzCase(arguments=("validate", "c.jsonl"), files=(("c.jsonl", text),))


@st.composite
def launch_files(draw: st.DrawFn) -> FuzzCase:
    """DeepSpeed's JSON, or accelerate's file, of which JSON is a part of YAML."""
    name, document, keys = draw(st.sampled_from(LAUNCH_FILES))
    text = draw(texts_of(changed(document, keys)))
    arguments = ("estimate", "--model", "gpt2", "--gpus", "2xA100-80G", "--method", "sft", f"--{name}-config", name)
    return FuzzCase(arguments=arguments, files=((name, text.encode("utf-8", "replace").decode("latin-1")),))


@st.composite
def dialect_files(draw: st.DrawFn) -> FuzzCase:
    """A config of axolotl or LLaMA-Factory."""
    dialect, configs = draw(st.sampled_from(TOOLS_CONFIGS))
    keys = (*dialect.names, *sorted(dialect.read | dialect.unmodelled), *dialect.refused)
    text = draw(texts_of(changed(draw(st.sampled_from(configs)), keys)))
    return FuzzCase(
        arguments=("estimate", "--config", "c.yaml", "--gpus", "2xA100-80G"),
        files=(("c.yaml", text.encode("utf-8", "replace").decode("latin-1")),),
    )


@st.composite
def own_results(draw: st.DrawFn) -> FuzzCase:
    """Measurements in the user's cache, one of them altered; listed, exported, forgotten, and beside their estimate."""
    altered = draw(texts_of(changed(OWN_RESULT)))
    text = "\n".join(draw(st.permutations([json.dumps(OWN_RESULT), altered]))) + "\n"
    job = (
        "--model",
        "Qwen2.5-0.5B",
        "--gpus",
        "1xRTX-3090",
        "--method",
        "sft",
        "--tuning",
        "lora",
        "--batch-size",
        "4",
    )
    uses = (("measurements",), ("measurements", "--export"), ("measurements", "--forget", "all"))
    return FuzzCase(
        arguments=draw(st.sampled_from([*uses, ("estimate", *job, "--max-length", "2048")])),
        files=((RESULTS_FILE, text.encode("utf-8", "replace").decode("latin-1")),),
    )


@st.composite
def lengths(draw: st.DrawFn) -> FuzzCase:
    """Lengths of rows, in words or in a file of counts."""
    name, value = draw(st.sampled_from(["--lengths", "--completion-lengths"])), "counts.txt"
    lines = draw(st.lists(words | st.integers(0, 10**6).map(str), max_size=4))
    if draw(st.booleans()):
        keys = st.sampled_from(["p0", "p5", "p50", "p95", "p99.99", "p100", "min", "max", "rows", "mean", "x"])
        value = ",".join(draw(st.lists(st.tuples(keys, words).map("=".join), min_size=1, max_size=4)))
    method = "sft" if name == "--lengths" else "grpo"
    return FuzzCase(
        arguments=("estimate", "--model", "gpt2", "--gpus", "1xL4", "--method", method, "--set", f"{name[2:]}={value}")
        if draw(st.integers(0, 4)) == 0
        else ("estimate", "--model", "gpt2", "--gpus", "1xL4", "--method", method, name, value),
        files=(("counts.txt", "\n".join(lines).encode("utf-8", "replace").decode("latin-1")),),
    )


@st.composite
def releases(draw: st.DrawFn) -> FuzzCase:
    """Two sets of releases to compare: a release of TRL, or a file of requirements."""
    pins = st.sampled_from(["trl==1.12", "torch==2.9.1", "trl>=1.0", "torch", "trl==1.12.*", "-r x.txt", "trl @ git+x"])
    text = "\n".join(draw(st.lists(pins | words, max_size=4)))
    named = st.sampled_from(["1.12", "1.16", "0.9", "r.txt", "1", "1.12rc1", "v1.12"]) | words
    arguments = ("diff", draw(named), draw(named), "--model", "gpt2", "--gpus", "1xL4", "--method", "sft")
    return FuzzCase(arguments=arguments, files=(("r.txt", text.encode("utf-8", "replace").decode("latin-1")),))


@st.composite
def price_files(draw: st.DrawFn) -> FuzzCase:
    lines = ["L4 = 1.5", *draw(st.lists(st.sampled_from(PRICE_LINES) | st.text(max_size=20), min_size=1, max_size=2))]
    text = "\n".join(draw(st.permutations(lines))).encode("utf-8", "replace").decode("latin-1")
    further = draw(st.sampled_from([(), ("--optimize", "cost"), ("--max-cost", "5"), ("--tokens", "1.5B")]))
    return FuzzCase(
        arguments=("--gpus", "1xL4,1xT4", *PINNED, "--prices", "p.toml", *further), files=(("p.toml", text),)
    )


@st.composite
def logs(draw: st.DrawFn) -> FuzzCase:
    """A log with lines that are gone, cut, repeated, or with another number; with and without its job."""
    lines = draw(st.sampled_from(LOG_TEXTS)).splitlines()
    for _ in range(draw(st.integers(1, 3))):
        index = draw(st.integers(0, len(lines) - 1))
        lines[index] = draw(_altered_lines(lines[index]))
    job = draw(st.sampled_from([(), ("--gpus", "1xL4", *PINNED)]))
    text = "\n".join(lines).encode("utf-8", "replace").decode("latin-1")
    return FuzzCase(arguments=("diagnose", "run.log", *job), files=(("run.log", text),))


@st.composite
def _altered_lines(draw: st.DrawFn, line: str) -> str:
    kind = draw(st.sampled_from(["gone", "cut", "twice", "other text", "number", "number"]))
    numbers = list(re.finditer(r"\d+(\.\d+)?", line))
    if kind == "number" and numbers:
        found = draw(st.sampled_from(numbers))
        return line[: found.start()] + draw(words) + line[found.end() :]
    cut = line[: draw(st.integers(0, len(line)))]
    return {"gone": "", "cut": cut, "twice": f"{line}\n{line}"}.get(kind, draw(st.sampled_from(TEXTS)))


@st.composite
def _jobs(draw: st.DrawFn, document: dict[str, Any]) -> dict[str, Any]:
    """The body of a job with values replaced, or with settings or an option that it may have."""
    kind = draw(st.sampled_from(["replaced", "settings", "settings", "option"]))
    if kind == "replaced" or "model" not in document:
        return draw(changed(document, OPTION_NAMES))
    if kind == "option":
        return {**document, draw(st.sampled_from(OPTION_NAMES)): draw(words | scalars)}
    names = st.sampled_from(sorted(setting_names()))
    return {**document, "set": draw(st.dictionaries(names, scalars | words, min_size=1, max_size=3))}


@st.composite
def bodies(draw: st.DrawFn) -> FuzzCase:
    """A request over HTTP: JSON, or the fields of the form."""
    task = draw(st.sampled_from(["estimate", "estimate", "diagnose", "plan", "form"]))
    if task == "form":
        given = {"model": "gpt2", "gpus": "1xL4", "method": "sft", draw(st.sampled_from(OPTION_NAMES)): draw(words)}
        text = "&".join(f"{name}={value}" for name, value in given.items())
    else:
        further = {"log": LOG_TEXTS[0]} if task == "diagnose" else {}
        text = draw(texts_of(_jobs({**BODY_OF_A_JOB, **further})))
    assert task in TASKS
    return FuzzCase(arguments=(POST, task), files=((BODY, text.encode("utf-8", "replace").decode("latin-1")),))


TOOLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("estimate", BODY_OF_A_JOB),
    ("plan", BODY_OF_A_JOB),
    ("compare", {**BODY_OF_A_JOB, "gpus": "1xL4,1xT4", "prices": {"L4": 1, "T4": 0.5}, "tokens": "1M"}),
    ("diagnose", {"log": LOG_TEXTS[0]}),
    ("diagnose", {"log": LOG_TEXTS[1], **BODY_OF_A_JOB}),
    ("models", {"word": "a"}),
    ("gpus", {"word": "a"}),
)


@st.composite
def lines(draw: st.DrawFn) -> FuzzCase:
    """A line to `plan mcp`: a call of a tool."""
    name, arguments = draw(st.sampled_from(TOOLS))
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}
    if draw(st.integers(0, 9)):
        call["params"] = {"name": name, "arguments": draw(_jobs(arguments))}
        text = json.dumps(call)
    else:
        text = draw(texts_of(changed(call)))
    return FuzzCase(arguments=(MCP,), files=((BODY, text.encode("utf-8", "replace").decode("latin-1")),))


def any_case() -> st.SearchStrategy[FuzzCase]:
    """Return the strategy of all kinds of cases."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run(["estimate", "--model", "gpt2", *JOB, "--json", "--quiet"])
    saved = reports(json.loads(out.getvalue()))
    files = (configs(), train_files(), dialect_files(), saved, case_files(), launch_files(), price_files(), logs())
    kinds = (arguments(), *files, own_results(), lengths(), releases(), bodies())
    return st.one_of(*kinds, *([lines()] if find_spec("mcp") else []))
