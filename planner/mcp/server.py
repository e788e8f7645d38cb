"""The Model Context Protocol on stdin and stdout, as the package `mcp` speaks it (mcp 2.3, mcp/server/lowlevel)."""

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

from planner.errors import InputError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    import mcp_types as types
    from anyio.streams.memory import MemoryObjectSendStream
    from mcp.server.lowlevel import Server
    from mcp.shared._stream_protocols import ReadStream, WriteStream
    from mcp.shared.message import SessionMessage

INSTRUCTIONS = (
    "Plans fine-tuning with TRL before a GPU is rented. Settings have the libraries' own names; memory is in bytes, "
    "time in seconds. Every figure is an estimate with an interval: say both."
)
# A key "id" with its value, any other string (also one without an end), or a bracket.
TOKENS = re.compile(r'"id"\s*:\s*(-?\d{1,18}(?![\d.eE])|"[^"\\]*")|"(?:[^"\\]|\\.)*"?|[][{}]')


def run_mcp_server() -> None:
    """Answer on stdin and stdout until stdin closes; raise InputError if the extra mcp is not installed."""
    try:
        from mcp.server.stdio import stdio_server
    except ImportError as error:
        raise InputError(
            f"plan mcp needs {error.name}, which is in the mcp extra: pip install 'finetune-plan[mcp]'."
        ) from error

    asyncio.run(answer_lines(stdio_server()))


async def answer_lines(
    streams: "AbstractAsyncContextManager[tuple[ReadStream[SessionMessage | Exception], WriteStream[SessionMessage]]]",
) -> None:
    """Answer the messages of a transport until it closes."""
    from anyio import create_memory_object_stream, create_task_group

    server = _server()
    passed, readable = create_memory_object_stream["SessionMessage | Exception"]()
    async with streams as (reading, writing), create_task_group() as tasks:
        tasks.start_soon(_answer_unreadable, reading, passed, writing)
        await server.run(readable, writing, server.create_initialization_options())


async def _answer_unreadable(
    reading: "ReadStream[SessionMessage | Exception]",
    passed: "MemoryObjectSendStream[SessionMessage | Exception]",
    writing: "WriteStream[SessionMessage]",
) -> None:
    """Pass on the messages of a stream, and answer with an error what `Server.run` drops: a line that is no message."""
    from mcp.shared.message import SessionMessage

    async with reading, passed:
        async for item in reading:
            if (error := _error_answer(item)) is None:
                await passed.send(item)
            else:
                await writing.send(SessionMessage(error))


def _error_answer(item: "SessionMessage | Exception") -> "types.JSONRPCError | None":
    """Return the answer to a line that is no message, with the id that can be read of it; None for a message."""
    import mcp_types as types
    from pydantic import ValidationError

    code, line, text = types.INVALID_REQUEST, "", "A request's id is an integer or a string"
    if isinstance(item, ValidationError):
        last = item.errors(include_url=False)[-1]  # its input is the line, or the object that is none of the messages
        line, text = last["input"], last["msg"]
        if last["type"] == "json_invalid":
            code = types.PARSE_ERROR
        else:
            line = json.dumps(line)
    elif isinstance(item, Exception):
        text = str(item)
    elif not isinstance(item.message, types.JSONRPCNotification) or item.message.method.startswith("notifications/"):
        return None
    data = types.ErrorData(code=code, message=f"This line is no message of JSON-RPC: {text}.")
    return types.JSONRPCError(jsonrpc="2.0", id=_request_id(line), error=data)


def _request_id(line: str) -> int | str | None:
    """Return the id of a request that may be no valid JSON; None if there is none."""
    depth = 0
    for token in TOKENS.finditer(line):
        if token[0] in ("{", "["):
            depth += 1
        elif token[0] in ("}", "]"):
            depth -= 1
        elif token[1] and depth == 1:
            return token[1].strip('"') if token[1].startswith('"') else int(token[1])
    return None


def _server() -> "Server[Any]":
    """Return the server with the tools of tools.py."""
    import mcp_types as types
    from mcp.server.lowlevel import Server

    from planner.files.installed import installed_version
    from planner.mcp.tools import TOOLS, call

    one_at_a_time = asyncio.Lock()  # planning holds the interpreter's lock

    async def list_tools(context: Any, asked: Any) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=name,
                    description=tool.description,
                    input_schema=tool.argument_schema(),
                    output_schema=tool.document_schema(),
                    annotations=types.ToolAnnotations(read_only_hint=not tool.writes),
                )
                for name, tool in TOOLS.items()
            ]
        )

    async def call_tool(context: Any, asked: types.CallToolRequestParams) -> types.CallToolResult:
        async with one_at_a_time:
            answer = await asyncio.to_thread(call, asked.name, asked.arguments or {})
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=answer.text)],
            structured_content=dict(answer.document),
            is_error=answer.is_error,
        )

    return Server(
        "plan",
        version=installed_version(),
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )
