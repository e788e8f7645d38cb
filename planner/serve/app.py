"""The application: limits, headers and the token around the work, which is done in other processes."""

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import multiprocessing
import os
import re
import signal
import time
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import resource_tracker
from typing import TypeAlias

from msgspec.json import encode
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planner.report.page.template import page_script
from planner.serve.answers import UNAVAILABLE, TaskAnswer, TaskName, error_answer, measured_answer, start_worker
from planner.serve.openapi import openapi
from planner.serve.requests import Allowed, RequestLimits

JSON, HTML = "application/json", "text/html; charset=utf-8"
FORM = "application/x-www-form-urlencoded"
BODY_SECONDS = 10  # in which a body must have arrived, or in --time-limit if that is less
MOST_QUERY = 8192  # characters of the form's fields
MOST_ATTEMPTS = 2  # at a request whose worker is killed
RESTART_SECONDS = 1.0  # before another worker starts in place of one that ended while it started
# Of a worker, beyond which it is renewed: caches grow with the models and settings that are asked for, and layers that
# are measured bring torch. Judged: a warm worker has 40 MB, one that was asked for the whole catalogue had 1,150.
LARGEST_WORKER_BYTES = 400 * 10**6
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
Working: TypeAlias = "asyncio.Future[TaskAnswer]"


class Workers:
    """The processes that plan. Planning holds the interpreter's lock, so that threads would share one core.

    Each process is a pool of its own: the request of one that is killed goes to another, and the others answer while a
    new one starts.
    """

    def __init__(self, limits: RequestLimits, allowed: Allowed) -> None:
        self._limits, self._allowed = limits, allowed
        self._active = 0
        self._idle: asyncio.Queue[ProcessPoolExecutor] = asyncio.Queue()
        self._ending = asyncio.Event()
        self._starting: set[asyncio.Task[None]] = set()
        self._pools = {_new_pool() for _ in range(limits.workers)}

    async def answer(self, task: TaskName, body: bytes) -> TaskAnswer:
        """Do a task in a worker; refuse it if there are too many, or if the server ends before it is done."""
        if self._active >= self._limits.concurrency:
            return error_answer(UNAVAILABLE, "The server has more requests than --concurrency allows. Ask again later.")
        self._active += 1
        work = asyncio.ensure_future(self._work(task, body))
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait({work, ending}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else error_answer(UNAVAILABLE, "The server ends. Ask again later.")
        finally:
            work.cancel()
            ending.cancel()
            self._active -= 1

    def start(self) -> None:
        """Start every process and wait until each has done its first task.

        Raises:
            BrokenProcessPool: a process ended before that.
        """
        for pool, started in [(pool, _begun(pool)) for pool in self._pools]:
            started.result()
            self._idle.put_nowait(pool)

    def refuse(self) -> None:
        """Answer every open request with an error: the server ends."""
        self._ending.set()

    def stop(self) -> None:
        """End the processes, whatever they do."""
        for process in multiprocessing.active_children():
            process.terminate()
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)

    async def _work(self, task: TaskName, body: bytes) -> TaskAnswer:
        """Do a task in the first worker that is free, and once more in another if that one was killed meanwhile.

        A task has no effect but its answer. A second worker that ends at it, such as for its memory, ends it.
        """
        deadline = time.monotonic() + self._limits.seconds
        for _ in range(MOST_ATTEMPTS):
            try:
                pool, work = await self._started(task, body, deadline)
            except asyncio.TimeoutError:  # in Python 3.10 it is no TimeoutError
                return error_answer(UNAVAILABLE, "No worker was free within --time-limit. Ask again later.")
            try:
                found = await asyncio.shield(work)
            except BrokenProcessPool:
                self._replace(pool)  # killed while it worked, or while it was idle and this process was not told yet
                continue
            except asyncio.CancelledError:
                work.add_done_callback(partial(self._give_back, pool))
                raise
            except Exception:
                self._replace(pool)  # a fault of ours, after which the worker's state is unknown
                raise
            if found.worker_bytes > LARGEST_WORKER_BYTES:
                self._renew(pool)
            else:
                self._idle.put_nowait(pool)
            return found
        return error_answer(UNAVAILABLE, "The processes that worked on this were ended. Ask for less.")

    async def _started(self, task: TaskName, body: bytes, deadline: float) -> tuple[ProcessPoolExecutor, Working]:
        """Wait for a worker and start a task in it; replace workers that were killed while they were idle.

        Raises:
            TimeoutError: no worker was free before the deadline.
        """
        while True:
            pool = await asyncio.wait_for(self._idle.get(), max(0.0, deadline - time.monotonic()))
            try:
                return pool, asyncio.wrap_future(pool.submit(measured_answer, task, body, deadline, self._allowed))
            except BrokenProcessPool:
                self._replace(pool)

    def _give_back(self, pool: ProcessPoolExecutor, ended: Working) -> None:
        """Take back a worker whose request was given up, once it has ended the work."""
        if ended.cancelled() or ended.exception() is not None:
            self._replace(pool)
        else:
            self._idle.put_nowait(pool)

    def _replace(self, pool: ProcessPoolExecutor) -> None:
        logging.getLogger(__name__).warning("a worker process was ended; a new one starts")
        self._renew(pool)

    def _renew(self, pool: ProcessPoolExecutor) -> None:
        """Start a worker in place of one that ended, or of one that its caches have made large."""
        pool.shutdown(wait=False)
        self._pools.discard(pool)
        starting = asyncio.ensure_future(self._start_another())
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)

    async def _start_another(self) -> None:
        while not self._ending.is_set():
            pool = _new_pool()
            self._pools.add(pool)
            try:
                await asyncio.wrap_future(_begun(pool))
            except BrokenProcessPool:
                self._pools.discard(pool)
                await asyncio.sleep(RESTART_SECONDS)
            else:
                self._idle.put_nowait(pool)
                return


def _begun(pool: ProcessPoolExecutor) -> Future[int]:
    """Start the process of a pool, which does not get Ctrl-C: it would end in the midst of its imports, and say so.

    A blocked signal stays so in a process that is started meanwhile; this process gets it afterwards. The tracker that
    multiprocessing starts with its first process would unblock it (CPython 3.11, multiprocessing/resource_tracker.py).
    """
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(os.getpid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _new_pool() -> ProcessPoolExecutor:
    """Return a pool of one process. It is not forked: this process has threads."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=start_worker)


def application(workers: Workers, limits: RequestLimits, token: str, hosts: frozenset[str]) -> ASGIApp:
    """Return the ASGI application.

    Args:
        token: what requests must present; "": none.
        hosts: names that a `Host` header may have; empty: any.
    """
    document = encode(openapi(bool(token)))

    async def show_form(request: Request) -> Response:
        query = request.scope["query_string"]
        if len(query) > MOST_QUERY:
            raise HTTPException(414, "The form's fields are too long.")
        return _response(await workers.answer("form", query))

    async def explain_log(request: Request) -> Response:
        return _response(await workers.answer("log", await _body(request, limits, FORM)))

    async def show_openapi(request: Request) -> Response:
        return Response(document, media_type=JSON)

    def posted(task: TaskName) -> Route:
        async def post(request: Request) -> Response:
            return _response(await workers.answer(task, await _body(request, limits)))

        return Route(f"/{task}", post, methods=["POST"])

    app = Starlette(
        routes=[
            Route("/", show_form),
            Route("/", explain_log, methods=["POST"]),
            Route("/openapi.json", show_openapi),
            posted("plan"),
            posted("compare"),
            posted("estimate"),
            posted("diagnose"),
        ],
        exception_handlers={HTTPException: _refusal},
    )
    return Guard(app, token, hosts)


class Guard:
    """Checks the token and the host before a request is read, and adds the security headers to every response."""

    def __init__(self, app: ASGIApp, token: str, hosts: frozenset[str]) -> None:
        self._app, self._token, self._hosts = app, token.encode(), hosts
        self._headers = security_headers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        refused = self._refused(Headers(scope=scope)) if scope["type"] == "http" else None
        await (refused or self._app)(scope, receive, send_with_headers)

    def _refused(self, headers: Headers) -> Response | None:
        """Return the response to a request that may not be read; None: it may."""
        # A page of another site could have its own name point to the loopback address and read the answers.
        host = re.sub(r":\d*$", "", headers.get("host", "")).lower()
        if self._hosts and host not in self._hosts:
            return _response(error_answer(400, f"The host {host!r} is not this server's."))
        if self._token and not hmac.compare_digest(_presented(headers.get("authorization", "")), self._token):
            refused = _response(error_answer(401, "The token is missing or wrong: send Authorization: Bearer TOKEN."))
            refused.headers["connection"] = "close"  # of requests that follow in one piece none is read
            refused.headers["www-authenticate"] = 'Basic realm="plan: the token is the password", charset="UTF-8"'
            return refused
        return None


def security_headers() -> dict[str, str]:
    """Return the headers of every response: a page may run its own script only, and load nothing."""
    digest = base64.b64encode(hashlib.sha256(page_script().encode()).digest()).decode()
    policy = (
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        f"script-src 'sha256-{digest}'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
    return {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
    }


def _presented(authorization: str) -> bytes:
    """Return the token of a header: Bearer, or Basic with the token as password, which browsers ask for."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode()
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2] if scheme.lower() == "basic" else b""
    except (binascii.Error, ValueError):
        return b""


def _refuse_other_encodings(headers: Headers, kind: str) -> None:
    """Raise HTTPException if a body is of another type, or compressed."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
        raise HTTPException(415, f"The body must be sent as {kind}.")
    if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise HTTPException(415, "The body must be sent without Content-Encoding: it is not decompressed.")


async def _body(request: Request, limits: RequestLimits, kind: str = JSON) -> bytes:
    """Return the body of a request.

    Raises:
        HTTPException: it is not of this kind by its type, compressed, too large, too slow, or cut off.
    """
    _refuse_other_encodings(request.headers, kind)
    most_bytes, most_seconds = limits.body_bytes, min(BODY_SECONDS, limits.seconds)
    too_large = HTTPException(413, f"The body has more than {most_bytes:,} bytes, which --max-body allows.")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and (len(length) > 18 or int(length) > most_bytes):
        raise too_large
    parts = bytearray()

    async def read() -> None:
        async for part in request.stream():
            parts.extend(part)
            if len(parts) > most_bytes:
                raise too_large

    try:
        await asyncio.wait_for(read(), most_seconds)
    except asyncio.TimeoutError as error:  # in Python 3.10 it is no TimeoutError
        message = f"The body did not arrive in {most_seconds:g} seconds."
        raise HTTPException(408, message, {"connection": "close"}) from error
    except ClientDisconnect as error:
        raise HTTPException(400, "The body is cut off.") from error
    return bytes(parts)


async def _refusal(request: Request, error: Exception) -> Response:
    """Return an HTTP error, such as of an unknown path, as a document."""
    assert isinstance(error, HTTPException)
    response = _response(error_answer(error.status_code, error.detail))
    response.headers.update(error.headers or {})
    return response


def _response(found: TaskAnswer) -> Response:
    retry = {"retry-after": "1"} if found.status == UNAVAILABLE else {}
    kind = HTML if found.content.startswith(b"<!doctype") else JSON
    return Response(found.content, found.status, retry, media_type=kind)
