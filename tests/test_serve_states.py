"""`plan serve` under random sequences of hostile bytes, clients that leave and killed workers: it goes on answering."""

import contextlib
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from test_serve import JOB, Server, processes_of, started

HEAD = b"POST /estimate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps(JOB).encode()
# What a client may send and then be silent, or be gone.
SENT = {
    "nothing": b"",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
    "half a head": HEAD[:40],
    "half a body": HEAD + b"Content-Length: 500\r\n\r\n" + BODY[:10],
    "too much body": HEAD + b"Content-Length: 10\r\n\r\n" + BODY,
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 7\r\n\r\n" + BODY,
    "negative length": HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
    "chunks without end": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{\"mod\r\n",
    "a chunk of no size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a long head": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000,
    "two requests": (HEAD + f"Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY) * 2,
    "an upgrade": b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
}  # fmt: skip
STEPS = st.one_of(
    st.tuples(st.just("send and stay"), st.sampled_from(sorted(SENT))),
    st.tuples(st.just("send and go"), st.sampled_from(sorted(SENT))),
    st.tuples(st.just("kill a worker"), st.just("")),
    st.tuples(st.just("ask and go"), st.sampled_from(["/plan", "/estimate"])),
)


class Clients:
    """The connections that are held open to a server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.held: list[socket.socket] = []

    def do(self, step: str, what: str) -> None:
        if step == "kill a worker":
            self._kill_a_worker()
            return
        if step == "ask and go":
            connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
            connection.request("POST", what, BODY, {"Content-Type": "application/json"})
            connection.close()
            return
        raw = socket.create_connection(("127.0.0.1", self.server.port), timeout=10)
        with contextlib.suppress(ConnectionError):  # it has refused what came first
            raw.sendall(SENT[what])
        self.held.append(raw)
        if step == "send and go":
            self.held.pop().close()

    def close(self) -> None:
        for each in self.held:
            each.close()
        self.held.clear()

    def _kill_a_worker(self) -> None:
        for pid in processes_of(self.server):
            try:
                if "spawn_main" in " ".join(psutil.Process(pid).cmdline()):
                    os.kill(pid, signal.SIGKILL)
                    return
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = started(tmp_path_factory.mktemp("states"), "--workers", "2")
    yield found
    processes = [psutil.Process(pid) for pid in processes_of(found)]
    begin = time.monotonic()
    found.process.send_signal(signal.SIGTERM)
    _, err = found.process.communicate(timeout=30)
    assert found.process.returncode == 0 and time.monotonic() - begin < 10
    assert psutil.wait_procs(processes, timeout=5)[1] == []
    said = set(err.splitlines()) - {"a worker process was ended; a new one starts"}
    assert not any("Traceback" in line for line in said), err


@pytest.mark.slow
@settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEPS, min_size=3, max_size=12))
def test_whatever_happens_the_next_request_is_answered(server: Server, steps: list[tuple[str, str]]) -> None:
    clients = Clients(server)
    try:
        for step, what in steps:
            clients.do(step, what)
        # Several workers that are killed at once may cost a request of that moment a 503.
        statuses = [server.post("/estimate", JOB).status for _ in range(3)]
    finally:
        clients.close()
    assert statuses[-1] == 200 and set(statuses) <= {200, 503}
