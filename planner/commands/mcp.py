"""`plan mcp`: the tools of coding agents, over the Model Context Protocol."""

from planner.commands.exit_codes import EXIT_PLANNED


def mcp() -> int:
    """Answer a coding agent on stdin and stdout (MCP): the tools plan, estimate, diagnose and export."""
    from planner.mcp.server import run_server

    run_server()
    return EXIT_PLANNED
