"""HTTP/1.1 as uvicorn speaks it, with limits for the time in which a client sends and reads, and for connections."""

import asyncio
import resource
import socket
from asyncio import TimerHandle, Transport
from collections import Counter
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

# Most connections at once: half of the files that this process may open, which the accepted ones, the workers' pipes
# and files that are read stay within.
MOST_CONNECTIONS = min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class TimedProtocol(H11Protocol):  # type: ignore[misc]
    """Closes a connection whose client takes too long to send the head of a request, or to read a response.

    uvicorn 0.54 ends its keep-alive timer with the first byte that arrives (h11_impl.py, `data_received`) and starts it
    with the first response: a client that sends a byte a second would keep its connection without end. A client has
    `timeout_keep_alive` to begin a request and as long again for its head, and twice that to read what fills its
    buffers; the body has a limit of its own (`planner.serve.app`).

    Each new connection beyond `MOST_CONNECTIONS` closes an older one: from the address with the most connections, the
    one that has waited longest for its client. Requests that are being worked on are never cut off.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._late: TimerHandle | None = None
        self._unread: TimerHandle | None = None
        self.waits_since = 0.0

    def connection_made(self, transport: Transport) -> None:
        super().connection_made(transport)
        self._start_timer()
        if len(self.connections) > MOST_CONNECTIONS:
            waiting = [each for each in self.connections if each.waits and not each.transport.is_closing()]
            of_address = Counter(each.address for each in waiting)
            longest = min(waiting, key=lambda each: (-of_address[each.address], each.waits_since), default=self)
            longest.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._start_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.waits_since = self.loop.time()
        self._unread = self.loop.call_later(2 * self.timeout_keep_alive, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._late, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    @property
    def address(self) -> str:
        """The client's host; empty if it is not known."""
        return str(self.client[0]) if self.client else ""

    @property
    def is_idle(self) -> bool:
        """True between requests: no response is owed."""
        return self.cycle is None or bool(self.cycle.response_complete)

    @property
    def waits(self) -> bool:
        """True if the client is to act: to send a request, the rest of its body, or to read a response."""
        return self.is_idle or bool(self.cycle.more_body) or self.flow.write_paused

    def _start_timer(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self.waits_since = self.loop.time()
        self._late = self.loop.call_later(2 * self.timeout_keep_alive, self._close_if_idle)

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
