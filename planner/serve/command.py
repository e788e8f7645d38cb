"""`plan serve`: the command's answers over HTTP, and a form."""

import ipaddress
import math
import os
import signal
import socket
import sys
from contextlib import ExitStack

from planner.commands.options import ServeOptions, grouped
from planner.errors import EXIT_PLANNED, InputError, PlanError
from planner.units import parse_bytes, parse_seconds

KEEP_ALIVE_SECONDS = 5  # in which a client begins its next request
SHUTDOWN_SECONDS = 5  # in which open requests may end
BACKLOG = 512  # connections that wait to be accepted
MOST_SECONDS = 3600  # for a request


@grouped
def serve(options: ServeOptions) -> int:
    """Answer over HTTP: POST /plan, /estimate and /diagnose (GET /openapi.json), and a form as front page. Ctrl-C ends
    it."""
    try:
        import uvicorn

        from planner.serve.app import LOOPBACK_NAMES, Limits, Workers, application
        from planner.serve.protocol import TimedProtocol
    except ImportError as error:
        raise PlanError(
            f"plan serve needs {error.name}, which is in the serve extra: pip install 'finetune-plan[serve]'."
        ) from error
    from planner.serve.requests import Allowed

    limits = Limits(
        body_bytes=parse_bytes(options.max_body),
        seconds=_time_limit(options.time_limit),
        concurrency=options.concurrency,
        workers=options.workers or os.cpu_count() or 1,
    )
    token = options.token or ""
    is_loopback = _is_loopback(options.host)
    if not is_loopback and not token:
        raise InputError(f"--host {options.host} opens the server to the network. Give a --token too.")
    hosts = frozenset({*LOOPBACK_NAMES, options.host.lower()}) if is_loopback else frozenset[str]()
    listening = _listening(options.host, options.port)
    # uvicorn stops at these signals and then raises them again: nobody should be ended by that, nor start a traceback.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    workers = Workers(limits, Allowed(paths=options.allow_paths, hub=options.allow_hub))
    try:
        workers.start()
        config = uvicorn.Config(
            application(workers, limits, token, hosts),
            http=TimedProtocol,
            timeout_keep_alive=math.ceil(min(KEEP_ALIVE_SECONDS, limits.seconds)),
            log_level="warning",
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        if not options.quiet:
            port = listening.getsockname()[1]
            host = f"[{options.host}]" if ":" in options.host else options.host
            print(f"plan answers at http://{host}:{port}/ (Ctrl-C ends it)", file=sys.stderr, flush=True)
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        listening.close()
        workers.stop()
    return EXIT_PLANNED


def _time_limit(text: str) -> float:
    seconds = parse_seconds(text)
    if seconds > MOST_SECONDS:
        raise InputError(f"--time-limit {text} is more than an hour. Give 1h or less.")
    return seconds


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        InputError: the address is not this machine's, or the port is taken.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with ExitStack() as closing:
            listening = closing.enter_context(socket.socket(family))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port whose last connections just ended
            listening.bind(address)
            listening.listen(BACKLOG)
            closing.pop_all()
        return listening
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"Cannot listen on {host} port {port}: {reason}. Give another --host or --port.") from error
