"""`plan serve`: the command's answers over HTTP, and a form. `plan mcp`: the same for coding agents."""

import os
import signal
import sys

from planner.commands.exit_codes import EXIT_PLANNED
from planner.commands.options import ServeOptions, grouped
from planner.errors import InputError

MOST_SECONDS = 3600  # for a request


@grouped
def serve(options: ServeOptions) -> int:
    """Answer over HTTP: POST /plan, /compare, /estimate and /diagnose (GET /openapi.json), and a form as front page.
    Ctrl-C ends it."""
    from planner.serve.requests import Allowed, RequestLimits
    from planner.serve.server import ServerSettings, run_server
    from planner.units import parse_bytes

    def say(line: str) -> None:
        if not options.quiet:
            print(line, file=sys.stderr, flush=True)

    settings = ServerSettings(
        host=options.host,
        port=options.port,
        token=options.token or "",
        limits=RequestLimits(
            body_bytes=parse_bytes(options.max_body),
            seconds=_time_limit(options.time_limit),
            concurrency=options.concurrency,
            workers=options.workers or os.cpu_count() or 1,
        ),
        allowed=Allowed(paths=options.allow_paths, hub=options.allow_hub),
    )
    run_server(settings, say)
    return EXIT_PLANNED


def mcp() -> int:
    """Answer a coding agent on stdin and stdout (MCP): plan, compare, estimate, diagnose, export, lists."""
    from planner.mcp.server import run_mcp_server

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a thread waits for stdin, which no exception ends
    run_mcp_server()
    return EXIT_PLANNED


def _time_limit(text: str) -> float:
    from planner.units import parse_seconds

    seconds = parse_seconds(text)
    if seconds > MOST_SECONDS:
        raise InputError(f"--time-limit {text} is more than an hour. Give 1h or less.")
    return seconds
