"""The work of a request, in a process of its own: a body in, a status and a document out."""

import fcntl
import logging
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import TYPE_CHECKING, Literal

from msgspec import DecodeError, Struct, ValidationError
from msgspec.structs import asdict, replace

from planner.ask import compared, diagnosed, estimated, planned, silent
from planner.diagnose.log import reported_incidents
from planner.errors import ErrorCode, InputError, PlanError, one_line
from planner.files.cache import cache_root, make_folder
from planner.files.decode import decode_json
from planner.models.catalogue import load_model
from planner.report.diagnosis import diagnosis_report, diagnosis_table
from planner.report.documents.commands import ErrorDetails, ErrorDocument
from planner.report.json import estimate_report, json_text, plan_report
from planner.report.listing import comparison_report
from planner.report.spelling import spelled
from planner.requests.bodies import HINT, CompareRequest, EstimateRequest, PlanRequest
from planner.requests.machines import Pricing, cluster_names, pricing_of
from planner.requests.options import CandidateOptions, JobOptions, SearchOptions, names_a_job
from planner.requests.read_config import config_text
from planner.requests.read_options import JobRequest, read_options
from planner.serve.form import MOST_CLUSTERS, comparison_page, form_page, log_page, read_form, read_log
from planner.serve.requests import Allowed, DiagnoseRequest, read_request, refuse_files
from planner.training_stack import complete_models
from planner.units import KIB

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from planner.planning import Plan
    from planner.report.listing import Compared

TaskName = Literal["plan", "compare", "estimate", "diagnose", "form", "log"]
OK, BAD_REQUEST, UNPROCESSABLE, INTERNAL_ERROR, UNAVAILABLE = 200, 400, 422, 500, 503

MALFORMED = (DecodeError, UnicodeDecodeError)  # causes of errors about a body that is no JSON


class TaskAnswer(Struct, frozen=True, kw_only=True):
    """The status and the content of a response. `worker_bytes`: the most memory that its worker has had."""

    status: int
    content: bytes
    worker_bytes: int = 0


class TimeIsUp(BaseException):
    """Raised by the timer in the midst of the work; no `except Exception` on its way keeps it."""


class NeedsMeasuring(BaseException):
    """Raised in a worker before layers are measured: that takes torch, and longer than a request has."""


def error_answer(status: int, message: str) -> TaskAnswer:
    """Return an error of the request (4..) or the server as a response, in the form of the command's."""
    code: ErrorCode = "wrong_input" if status < INTERNAL_ERROR else "failed"
    return _refused(status, ErrorDetails(code=code, message=one_line(message), nearest=()))


def _refused(status: int, details: ErrorDetails) -> TaskAnswer:
    return TaskAnswer(status=status, content=json_text(ErrorDocument(error=details), indent=None).encode())


REPEAT_SECONDS = 0.05
LOG_WIDTH = 100  # columns of a log's answer on its page
MEASURING_SECONDS = 600  # in which layers are measured. Judged: on two busy cores a recipe took up to 160
MEASURING = "Layers of a model without formulas are being measured. Ask again in a minute."
SPAWN = multiprocessing.get_context("spawn")
_MAY_MEASURE = threading.Event()
MAXRSS_UNIT = 1 if sys.platform == "darwin" else KIB  # of `ru_maxrss`: bytes on macOS, KiB on Linux
WARM_UP_SECONDS = 60.0
# The methods whose memory differs most: a vLLM engine, a reference model.
WARM_UP: tuple[tuple[TaskName, bytes], ...] = (
    ("form", b"model=Qwen2.5-0.5B&gpus=1xL4&method=grpo"),
    ("estimate", b'{"model": "Qwen2.5-0.5B", "gpus": "1xL4", "method": "dpo", "tuning": "lora"}'),
)


def start_worker() -> None:
    """Prepare a worker process: Ctrl-C is for the server, which ends its workers; a timer ends work that is late.

    It ends with the server, also if that is killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    signal.signal(signal.SIGALRM, _time_is_up)
    logging.basicConfig()
    warm_up()


def _end_with_the_server() -> None:
    server = multiprocessing.parent_process()
    if server is not None:
        server.join()
        os.kill(os.getpid(), signal.SIGTERM)


def warm_up() -> None:
    """Do some work once, so that no request waits for imports, the catalogue and the page's template."""
    catalogue = Allowed(paths=False, hub=False)
    for task, body in WARM_UP:
        answer(task, body, time.monotonic() + WARM_UP_SECONDS, catalogue)


def measured_answer(task: TaskName, body: bytes, deadline: float, allowed: Allowed) -> TaskAnswer:
    """Do a task as `answer` does, and say how large the worker has become."""
    found = answer(task, body, deadline, allowed)
    return replace(found, worker_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_UNIT)


def answer(task: TaskName, body: bytes, deadline: float, allowed: Allowed) -> TaskAnswer:
    """Do a task and return its response.

    `deadline`: by the clock `time.monotonic`, after which the work stops; an error for which nobody planned is logged
    here and told without details.
    """
    try:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeIsUp
        # It rings again, as Python drops exceptions that are raised in a callback of the garbage collector.
        signal.setitimer(signal.ITIMER_REAL, left, REPEAT_SECONDS)
        try:
            return TASKS[task](body, allowed)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except TimeIsUp:
        return error_answer(UNAVAILABLE, "The answer takes longer than --time-limit allows.")
    except NeedsMeasuring:
        return _measured_apart(task, body, deadline, allowed)
    except PlanError as error:
        cause = error.__cause__
        malformed = isinstance(cause, MALFORMED) and not isinstance(cause, ValidationError)
        details = ErrorDetails(code=error.code, message=one_line(spelled(str(error), "json")), nearest=error.nearest)
        return _refused(BAD_REQUEST if malformed else UNPROCESSABLE, details)
    except Exception:
        logging.getLogger(__name__).error("a request failed:\n%s", traceback.format_exc())
        return error_answer(INTERNAL_ERROR, "The server failed. Its log says why.")


def _measured_apart(task: TaskName, body: bytes, deadline: float, allowed: Allowed) -> TaskAnswer:
    try:
        return APART.answer(task, body, deadline, allowed)
    except OSError as error:  # no process, pipe or memory for one
        logging.getLogger(__name__).error("no process to measure layers in: %s", error)
        return error_answer(UNAVAILABLE, "The layers of this model cannot be measured now. Ask again later.")


class _Apart:
    """One process beside a worker, which answers a request and keeps the layers that it measures for it.

    It goes on when the request's time is up, so that a later one finds the layers in the cache.
    """

    def __init__(self) -> None:
        self._process: SpawnProcess | None = None

    def answer(self, task: TaskName, body: bytes, deadline: float, allowed: Allowed) -> TaskAnswer:
        if self._process is not None:
            self._process.join(max(deadline - time.monotonic(), 0))
            if self._process.is_alive():
                return error_answer(UNAVAILABLE, MEASURING)
        receiver, sender = SPAWN.Pipe(duplex=False)
        self._process = SPAWN.Process(target=_measure, args=(sender, task, body, allowed))
        self._process.start()
        sender.close()
        with receiver:
            try:
                if receiver.poll(max(deadline - time.monotonic(), 0)):
                    found: TaskAnswer = receiver.recv()
                    return found
            except EOFError:
                return error_answer(UNAVAILABLE, "The layers of this model could not be measured here.")
        return error_answer(UNAVAILABLE, MEASURING)


def _measure(sender: "Connection", task: TaskName, body: bytes, allowed: Allowed) -> None:
    """Answer a request in this process, which may measure; one at a time on a machine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    signal.signal(signal.SIGALRM, _time_is_up)
    _MAY_MEASURE.set()
    make_folder(cache_root())
    with open(cache_root() / "measuring.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = answer(task, body, time.monotonic() + MEASURING_SECONDS, allowed)
    with suppress(OSError):  # no request waits any more
        sender.send(found)


def _permit_measuring() -> None:
    if not _MAY_MEASURE.is_set():
        raise NeedsMeasuring


def _time_is_up(number: int, frame: FrameType | None) -> None:
    raise TimeIsUp


def _requested(options: JobOptions, allowed: Allowed) -> JobRequest:
    load = partial(load_model, paths=allowed.paths, hub=allowed.hub)
    return read_options(options, complete_models(silent, _permit_measuring), load)


def _document(report: Struct) -> TaskAnswer:
    return TaskAnswer(status=OK, content=json_text(report, indent=None, door="json").encode())


def _plan(options: SearchOptions, allowed: Allowed) -> "Plan":
    return planned(_requested(options, allowed))


def _answer_plan(body: bytes, allowed: Allowed) -> TaskAnswer:
    options = read_request(decode_json(body, PlanRequest, "body", HINT), SearchOptions, allowed)
    return _document(plan_report(_plan(options, allowed), config_text(options)))


def _answer_compare(body: bytes, allowed: Allowed) -> TaskAnswer:
    asked = decode_json(body, CompareRequest, "body", HINT)
    options, given = read_request(asked, SearchOptions, allowed), asdict(asked)
    rows = _compared(options, pricing_of(given["prices"], given["tokens"]), allowed)
    return _document(comparison_report(rows))


def _answer_estimate(body: bytes, allowed: Allowed) -> TaskAnswer:
    options = read_request(decode_json(body, EstimateRequest, "body", HINT), CandidateOptions, allowed)
    request = _requested(options, allowed)
    return _document(estimate_report(*estimated(request), request.cluster, config_text(options)))


def _answer_diagnose(body: bytes, allowed: Allowed) -> TaskAnswer:
    asked = decode_json(body, DiagnoseRequest, "body", HINT)
    options = read_request(asked, CandidateOptions, allowed)
    log: str = getattr(asked, "log")  # noqa: B009 (the type is made at run time)
    found = reported_incidents(log)
    read = partial(_requested, options, allowed) if names_a_job(options) else None
    return _document(diagnosis_report(diagnosed(found, read)))


def _answer_form(query: bytes, allowed: Allowed) -> TaskAnswer:
    """Return the front page, with the report if a job was asked for; an error stands above the form."""
    given = read_form(query)
    try:
        if given.is_empty:
            return TaskAnswer(status=OK, content=form_page(given, None, "").encode())
        options = given.options()
        refuse_files(options, allowed)
        if given.compares:
            rows = _compared(options, given.pricing(), allowed)
            return TaskAnswer(status=OK, content=comparison_page(given, rows).encode())
        return TaskAnswer(status=OK, content=form_page(given, _plan(options, allowed), "").encode())
    except PlanError as error:
        return TaskAnswer(status=UNPROCESSABLE, content=form_page(given, None, str(error)).encode())


def _answer_log(body: bytes, allowed: Allowed) -> TaskAnswer:
    """Return the page of a log: what happened, and with its job what fits instead."""
    form, log = read_log(body)
    try:
        found = reported_incidents(log)
        options = form.candidate_options()
        refuse_files(options, allowed)
        diagnosis = diagnosed(found, None if form.is_empty else partial(_requested, options, allowed))
        text = diagnosis_table(diagnosis, LOG_WIDTH).plain
        error = diagnosis.job_error if diagnosis.misread else ""
        return TaskAnswer(status=OK, content=log_page(form, log, text, one_line(error)).encode())
    except PlanError as error:
        return TaskAnswer(status=UNPROCESSABLE, content=log_page(form, log, "", str(error)).encode())


def _compared(options: SearchOptions, pricing: Pricing, allowed: Allowed) -> "list[Compared]":
    """Return the job on each cluster of the options.

    Raises:
        InputError: there are too many clusters, or as `compared`.
    """
    if len(names := cluster_names(options)) > MOST_CLUSTERS:
        raise InputError(f"GPUs names {len(names)} clusters. A comparison has at most {MOST_CLUSTERS}.")
    return compared(options, pricing, partial(_requested, allowed=allowed))


APART = _Apart()
TASKS: dict[TaskName, Callable[[bytes, Allowed], TaskAnswer]] = {
    "plan": _answer_plan,
    "compare": _answer_compare,
    "estimate": _answer_estimate,
    "diagnose": _answer_diagnose,
    "form": _answer_form,
    "log": _answer_log,
}
