"""The server: its socket, its processes, and the end of both."""

import ipaddress
import math
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack

from msgspec import Struct

from planner.errors import InputError, PlanError
from planner.serve.requests import Allowed, RequestLimits

KEEP_ALIVE_SECONDS = 5  # in which a client begins its next request
DRAIN_SECONDS = 4  # in which open requests may end after a signal; then they are answered with an error
SHUTDOWN_SECONDS = DRAIN_SECONDS + 2  # in which their answers are sent
BACKLOG = 128  # connections that wait to be accepted; asyncio accepts as many at once


class ServerSettings(Struct, frozen=True, kw_only=True):
    """The address of a server and what its requests may do. `token`: what they must present; empty: none."""

    host: str
    port: int
    token: str
    limits: RequestLimits
    allowed: Allowed


def run_server(settings: ServerSettings, say: Callable[[str], None]) -> None:
    """Answer requests until a signal ends it; `say` the address first.

    Raises:
        InputError: the address cannot be listened on, or is open to the network without a token.
        PlanError: the extra serve is not installed.
    """
    try:
        import uvicorn

        from planner.serve.app import LOOPBACK_NAMES, Workers, application
        from planner.serve.protocol import DrainingServer, TimedProtocol
    except ImportError as error:
        raise PlanError(
            f"plan serve needs {error.name}, which is in the serve extra: pip install 'finetune-plan[serve]'."
        ) from error
    host, limits = settings.host, settings.limits
    is_loopback = _is_loopback(host)
    if not is_loopback and not settings.token:
        raise InputError(f"--host {host} opens the server to the network. Give a --token too.")
    hosts = frozenset({*LOOPBACK_NAMES, host.lower()}) if is_loopback else frozenset[str]()
    listening = _listening(host, settings.port)
    workers = Workers(limits, settings.allowed)
    try:
        try:
            workers.start()
        except KeyboardInterrupt:  # of SIGTERM, too (planner/commands/main.py, `_interrupt`)
            say("ended while it started")
            return
        # uvicorn stops at these signals and raises them again: nobody should be ended by that, nor start a traceback.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        config = uvicorn.Config(
            application(workers, limits, settings.token, hosts),
            http=TimedProtocol,
            timeout_keep_alive=math.ceil(min(KEEP_ALIVE_SECONDS, limits.seconds)),
            log_level="warning",
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            backlog=BACKLOG,
        )
        port = listening.getsockname()[1]
        say(f"plan answers at http://{f'[{host}]' if ':' in host else host}:{port}/ (Ctrl-C ends it)")
        DrainingServer(config, DRAIN_SECONDS, workers.refuse).run(sockets=[listening])
    finally:
        listening.close()
        workers.stop()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raise InputError if the address is not this machine's, or the port is taken."""
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
