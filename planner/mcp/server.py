"""The Model Context Protocol on stdin and stdout, as the package `mcp` speaks it (mcp 2.3, mcp/server/lowlevel)."""

import asyncio
from typing import TYPE_CHECKING, Any

from planner.errors import InputError

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server

INSTRUCTIONS = (
    "Plans fine-tuning with TRL before a GPU is rented. Settings have the libraries' own names; memory is in bytes, "
    "time in seconds. Every figure is an estimate with an interval: say both."
)


def run_mcp_server() -> None:
    """Answer on stdin and stdout until stdin closes.

    Raises:
        InputError: the extra mcp is not installed.
    """
    try:
        from mcp.server.stdio import stdio_server
    except ImportError as error:
        raise InputError(
            f"plan mcp needs {error.name}, which is in the mcp extra: pip install 'finetune-plan[mcp]'."
        ) from error

    async def serve() -> None:
        server = _server()
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())

    asyncio.run(serve())


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
