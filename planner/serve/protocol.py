"""HTTP/1.1 as uvicorn speaks it, with limits for the time in which a client sends a request and for connections."""

import asyncio
import resource
import socket
from asyncio import TimerHandle, Transport
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

# Most connections at once: half of the files that this process may open, which the accepted ones, the workers' pipes
# and files that are read stay within.
MOST_CONNECTIONS = min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class TimedProtocol(H11Protocol):  # type: ignore[misc]
    """Closes a connection whose client takes too long to send the head of a request, or what follows a response.

    uvicorn 0.54 ends its keep-alive timer with the first byte that arrives (h11_impl.py, `data_received`) and starts it
    with the first response: a client that sends a byte a second would keep its connection without end. A client has
    `timeout_keep_alive` to begin a request and as long again for its head; the body has a limit of its own
    (`planner.serve.app`). Beyond `MOST_CONNECTIONS` the one that has been idle for longest is closed for a new one.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._late: TimerHandle | None = None
        self.idle_since = 0.0

    def connection_made(self, transport: Transport) -> None:
        super().connection_made(transport)
        self._start_timer()
        if len(self.connections) > MOST_CONNECTIONS:
            idle = (each for each in self.connections if each.is_idle and not each.transport.is_closing())
            min(idle, key=lambda each: each.idle_since, default=self).transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """True between requests: no response is owed."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def _start_timer(self) -> None:
        self._stop_timer()
        self.idle_since = self.loop.time()
        self._late = self.loop.call_later(2 * self.timeout_keep_alive, self._close_if_idle)

    def _stop_timer(self) -> None:
        if self._late is not None:
            self._late.cancel()

    def _close_if_idle(self) -> None:
        # Between the head of a request and the end of its response the application decides.
        if self.is_idle:
            self.transport.close()


class DrainingServer(uvicorn.Server):  # type: ignore[misc]
    """A server whose open requests may end after a signal, and are answered with an error after `seconds`."""

    def __init__(self, config: uvicorn.Config, seconds: float, refuse: Callable[[], None]) -> None:
        super().__init__(config)
        self._seconds, self._refuse = seconds, refuse

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._seconds, self._refuse)
        await super().shutdown(sockets)
