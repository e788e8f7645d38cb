"""`plan mcp` in a process of its own, asked by the package's own client: the tools, their types and their answers."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from planner.commands.main import run
from planner.errors import InputError
from planner.files.decode import decode_json
from planner.report.documents.schema import json_schema
from planner.report.json import in_words
from planner.requests.bodies import EstimateRequest

mcp = pytest.importorskip("mcp", reason="the extra mcp is not installed")

ROOT = Path(__file__).resolve().parents[1]
START = "from planner.commands.main import main\nmain()"
JOB = {"model": "Qwen2.5-0.5B", "gpus": "1xRTX-3090", "method": "sft", "tuning": "lora"}
FLAGS = [word for name, value in JOB.items() for word in (f"--{name}", value)]
LOG = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB "
    "of which 1.00 GiB is free. Including non-PyTorch memory, this process has 22.69 GiB memory in use. Of the "
    "allocated memory 21.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
)
SECONDS = 120  # for a session, on a machine that does other work too


def session(work: Callable[[Any], Awaitable[Any]]) -> Any:
    """What `work` returns of a client that is connected to a server in a process of its own."""
    own = {name: os.environ[name] for name in ("PLAN_CACHE", "PYTHONPATH") if name in os.environ}
    server = mcp.StdioServerParameters(command=sys.executable, args=["-c", START, "mcp"], env=own, cwd=ROOT)

    async def connected() -> Any:
        async with mcp.Client(server, read_timeout_seconds=SECONDS) as client:
            return await work(client)

    return asyncio.run(asyncio.wait_for(connected(), SECONDS))


def called(name: str, arguments: dict[str, Any]) -> Any:
    return session(lambda client: client.call_tool(name, arguments))


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """The document that a command prints, in the words of a tool."""
    assert run([*arguments, "--json", "--quiet"]) in (0, 3)
    return in_words(json.loads(capsys.readouterr().out), "json")


def test_the_tools_are_listed_with_the_types_of_their_arguments_and_answers() -> None:
    tools = {tool.name: tool for tool in session(lambda client: client.list_tools()).tools}
    assert list(tools) == ["plan", "compare", "estimate", "diagnose", "export", "models", "gpus"]
    for tool in tools.values():
        for schema in (tool.input_schema, tool.output_schema):
            jsonschema.Draft202012Validator.check_schema(schema)
            assert schema["type"] == "object"
    assert {"model", "gpus", "method", "set"} <= tools["plan"].input_schema["properties"].keys()
    assert tools["plan"].input_schema["required"] == ["gpus"]
    assert tools["export"].input_schema["required"] == ["folder", "gpus"]
    assert [name for name, tool in tools.items() if not tool.annotations.read_only_hint] == ["export"]


def test_the_schemas_together_are_short() -> None:
    """They were 160 KB, which an agent reads before the first question."""
    from planner.mcp.tools import TOOLS

    schemas = [schema for tool in TOOLS.values() for schema in (tool.argument_schema(), tool.document_schema())]
    assert sum(len(json.dumps(schema)) for schema in schemas) < 30_000


def test_several_clusters_are_compared_with_prices_and_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from planner.mcp.tools import call

    job = {**JOB, "gpus": "1xT4,1xRTX-3090"}
    answer = call("compare", {**job, "prices": {"T4": 0.4, "RTX-3090": 0.2}, "tokens": "300M", "optimize": "cost"})
    (tmp_path / "prices.toml").write_text('T4 = 0.4\n"RTX-3090" = 0.2\n')
    flags = [word for name, value in job.items() for word in (f"--{name}", value)]
    priced = ["--prices", str(tmp_path / "prices.toml"), "--tokens", "300M", "--optimize", "cost"]
    assert json.loads(json.dumps(answer.document)) == printed([*flags, *priced], capsys)
    assert [cluster["gpus"] for cluster in answer.document["clusters"]] == ["1xRTX-3090", "1xT4"]
    assert "cost" in answer.text and not answer.is_error
    listed = call(
        "compare", {**job, "gpus": ["1xT4", "1xRTX-3090"], "tokens": "300M"}
    )  # a list was an error of its type
    assert [cluster["gpus"] for cluster in listed.document["clusters"]] == ["1xT4", "1xRTX-3090"]
    refused = call("compare", {**job, "optimize": "cost"})
    assert refused.is_error and "needs the prices" in refused.text


@pytest.mark.parametrize(("tool", "word", "field"), [("models", "smollm3", "models"), ("gpus", "L40S", "gpus")])
def test_models_and_cards_are_listed(tool: str, word: str, field: str, capsys: pytest.CaptureFixture[str]) -> None:
    from planner.mcp.tools import call

    assert run([tool, word, "--json"]) == 0
    assert json.loads(json.dumps(call(tool, {"word": word}).document)) == json.loads(capsys.readouterr().out)
    assert len(call(tool, {}).document[field]) > 50 and call(tool, {"word": "zzz"}).is_error


def test_a_plan_and_an_estimate_are_the_documents_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    async def both(client: Any) -> tuple[Any, Any]:
        return await client.call_tool("plan", JOB), await client.call_tool("estimate", {**JOB, "max_length": 512})

    plan, estimate = session(both)
    assert plan.structured_content == printed(FLAGS, capsys)
    assert estimate.structured_content == printed(["estimate", *FLAGS, "--max-length", "512"], capsys)
    assert "recommended" in plan.content[0].text and not plan.is_error


@pytest.mark.parametrize("given", ["text", "file"])
def test_a_log_is_diagnosed_as_text_and_as_a_file(
    given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.log"
    path.write_text(LOG)
    answer = called("diagnose", {"log": LOG} if given == "text" else {"log_file": str(path), **JOB})
    flags = [] if given == "text" else FLAGS
    assert answer.structured_content == printed(["diagnose", str(path), *flags], capsys)


def test_an_export_writes_files_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    async def both(client: Any) -> tuple[Any, Any]:
        fits = await client.call_tool("export", {**JOB, "folder": str(tmp_path / "run")})
        too_large = {"model": "Llama-3.1-70B", "gpus": "1xT4", "method": "sft", "tuning": "full"}
        return fits, await client.call_tool("export", {**too_large, "folder": str(tmp_path / "none")})

    written, refused = session(both)
    jsonschema.Draft202012Validator(json_schema()).validate(written.structured_content)
    assert sorted(written.structured_content["files"]) == sorted(map(str, (tmp_path / "run").iterdir()))
    assert refused.is_error and refused.structured_content["error"]["code"] == "nothing_fits"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("name", "arguments", "code", "message"),
    [
        ("plan", {**JOB, "method": "sftt"}, "unknown_name", "Did you mean sft"),
        ("plan", {**JOB, "max_length": "many"}, "wrong_input", "`$.max_length`"),
        ("plan", {**JOB, "zero_stage": 3}, "unknown_name", "'zero_stage'. Settings of the libraries stand in `set`."),
        ("plan", {**JOB, "max_lenght": 3}, "unknown_name", "Did you mean max_length?"),
        (
            "plan",
            {**JOB, "set": {"optim": "sgd", "zero_stage": {}}},
            "wrong_input",
            "got `object` - at `$.set[zero_stage]`",
        ),
        ("plan", {**JOB, "set": {"zero_stage": [2]}}, "wrong_input", "`$.set[zero_stage][0]`"),
        ("plan", {**JOB, "set": {"max_length": 10**30}}, "wrong_input", "at most 1,000,000,000, not 10000000"),
        ("plan", {**JOB, "set": {"PYTORCH_CUDA_ALLOC_CONF": "x"}}, "wrong_input", "can be empty, expandable_segments"),
        ("diagnose", {}, "wrong_input", "log_file"),
        ("diagnose", {"log_file": "-"}, "wrong_input", "log_file"),
        ("explain", {}, "unknown_name", "Unknown tool"),
    ],
)
def test_an_error_is_an_answer_of_the_tool(name: str, arguments: dict[str, Any], code: str, message: str) -> None:
    from planner.mcp.tools import call

    answer = call(name, arguments)
    assert answer.is_error and message in answer.text
    assert (answer.document["error"]["code"], answer.document["error"]["message"]) == (code, answer.text)


@pytest.mark.parametrize("rest", ["", ', "x": ' + "[" * 100_000, ', "set": 3}', "}}", ', "x": "\\ud800"}'])
def test_a_body_is_refused_whatever_stands_behind_a_wrong_setting(rest: str) -> None:
    with pytest.raises(InputError, match=r"got `object` - at `\$\.set\[\.\.\.\]`"):
        decode_json('{"set": {"zero_stage": {}}' + rest, EstimateRequest, "body")


def test_a_wrong_name_reaches_the_agent_as_an_error_of_the_tool() -> None:
    answer = called("estimate", {**JOB, "gpus": "1xRTX-3091"})
    assert answer.is_error and "RTX-3090" in answer.structured_content["error"]["nearest"]


def test_without_its_extra_it_names_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.stdio", None)
    assert run(["mcp"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "finetune-plan[mcp]" in err


def answered_lines(lines: list[str]) -> list[Any]:
    """What a server answers to lines on its stdin, sent one after the other's answer: a line that gets none hangs."""
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    opening = json.dumps({"jsonrpc": "2.0", "id": "opening", "method": "initialize", "params": hello})
    server = subprocess.Popen(
        [sys.executable, "-c", START, "mcp"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    assert server.stdin is not None and server.stdout is not None
    timer = threading.Timer(SECONDS, server.kill)
    timer.start()
    try:
        answers = []
        for line in [opening, *lines]:
            server.stdin.write(line.encode("utf-8", "surrogatepass") + b"\n")
            server.stdin.flush()
            answers.append(json.loads(server.stdout.readline()))
        return answers[1:]
    finally:
        timer.cancel()
        server.kill()
        server.communicate()


def request_line(model: str, number: str = "7") -> str:
    """The line of a request that estimates a model, given as JSON text."""
    call = f'"method": "tools/call", "params": {{"name": "estimate", "arguments": {{"model": {model}}}}}'
    return f'{{"jsonrpc": "2.0", "id": {number}, {call}}}'


def test_a_line_that_is_no_message_is_answered_with_an_error_and_its_id() -> None:
    deep = "[" * 900 + "]" * 900
    deeper = "[" * 100_000 + "]" * 100_000
    last = '{"jsonrpc": "2.0", "params": {"id": 1, "name": "\\"id\\": 2"}, "list": ' + deeper + ', "id": "a"}'
    lines = {
        request_line('"\\ud800"'): 7,
        request_line(deep): 7,
        last: "a",
        request_line('"Qwen'): 7,
        '{"jsonrpc": "2.0", "id": 8}': 8,
        '{"jsonrpc": "2.0", "id": 8, "method": "tools/list", "params": 5}': 8,
        request_line("7", "1.5"): None,
        request_line("7", "[1]"): None,
        "[" + request_line("7") + "]": None,
        "nonsense": None,
        "": None,
    }
    answers = answered_lines([*lines, request_line('"Qwen2.5-0.5B"')])
    assert [answer["id"] for answer in answers] == [*lines.values(), 7]
    assert [answer["error"]["code"] for answer in answers[:-1]] == [-32700] * 4 + [-32600] * 5 + [-32700] * 2
    assert "result" in answers[-1]


@pytest.mark.parametrize(
    ("name", "text"), [("config", 'output_dir: "\\udfff"'), ("deepspeed_config", '{"zero_optimization": "\\uDFFF"}')]
)
def test_half_a_surrogate_pair_in_a_file_is_an_error_of_the_tool(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "own"
    path.write_text(text)
    call = {"name": "estimate", "arguments": {**JOB, name: str(path)}}
    line = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": call})
    (answer,) = answered_lines([line])
    assert answer["result"]["isError"] and "surrogates" in answer["result"]["content"][0]["text"]


def test_a_server_that_waits_for_stdin_ends_at_once_when_it_is_terminated() -> None:
    code = "from planner.mcp import server\nserver.run_mcp_server = lambda: print('up', flush=True) or input()\n"
    server = subprocess.Popen(
        [sys.executable, "-c", code + START, "mcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert server.stdout is not None and server.stdout.readline() == b"up\n"
    server.terminate()
    assert server.wait(SECONDS) == -signal.SIGTERM
    server.communicate()
