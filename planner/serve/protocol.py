"""HTTP/1.1 as uvicorn speaks it, with a limit for the time in which a client sends a request."""

from asyncio import TimerHandle, Transport
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedProtocol(H11Protocol):  # type: ignore[misc]
    """Closes a connection whose client takes too long to send the head of a request, or what follows a response.

    uvicorn 0.54 ends its keep-alive timer with the first byte that arrives (h11_impl.py, `data_received`) and starts it
    with the first response: a client that sends a byte a second would keep its connection without end. A client has
    `timeout_keep_alive` to begin a request and as long again for its head; the body has a limit of its own
    (`planner.serve.app`).
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._late: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:
        super().connection_made(transport)
        self._start_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._stop_timer()
        self._late = self.loop.call_later(2 * self.timeout_keep_alive, self._close_if_idle)

    def _stop_timer(self) -> None:
        if self._late is not None:
            self._late.cancel()

    def _close_if_idle(self) -> None:
        # Between the head of a request and the end of its response the application decides.
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
