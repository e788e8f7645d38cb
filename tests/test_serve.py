"""`plan serve`: a real server in a process of its own, with answers that are the command's and limits that hold."""

import asyncio
import base64
import gzip
import html
import http.client
import json
import multiprocessing
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import psutil
import pytest
from msgspec import Struct
from msgspec.structs import fields

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from planner.commands.main import run
from planner.report.json import in_words
from planner.report.page.template import page_script
from planner.report.spelling import LABELS, spelled
from planner.requests.bodies import PlanRequest
from planner.requests.options import SearchOptions
from planner.serve.answers import MEASURING, TaskAnswer, answer, measured_answer
from planner.serve.app import Workers
from planner.serve.form import read_form
from planner.serve.openapi import OPERATIONS, openapi
from planner.serve.requests import Allowed, RequestLimits, read_request

PAGE = Path(__file__).parents[1] / "docs" / "serve.md"
START = "from planner.commands.main import main\nif __name__ == '__main__': main()"
JOB = {"model": "Qwen2.5-0.5B", "gpus": "1xRTX-3090", "method": "sft", "tuning": "lora"}
TOKEN = "a-token-of-the-tests"
SLOW_BODY = b"POST /plan HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n"
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB "
    "of which 1.00 GiB is free. Including non-PyTorch memory, this process has 22.69 GiB memory in use. Of the "
    "allocated memory 21.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
)


class Reply(Struct, frozen=True, kw_only=True):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"]["message"])


class Server(Struct, frozen=True, kw_only=True):
    process: "subprocess.Popen[str]"
    port: int

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        given = {"Content-Type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
        connection.request(method, path, body, given)
        response = connection.getresponse()
        found = {name.lower(): text for name, text in response.getheaders()}
        reply = Reply(status=response.status, headers=found, body=response.read())
        connection.close()
        return reply

    def post(self, path: str, job: object) -> Reply:
        return self.ask("POST", path, json.dumps(job).encode())


def started(folder: Path, *options: str, most_files: int = 0) -> Server:
    def set_limits() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, which tests may run under, ignores it
        if most_files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))

    process = subprocess.Popen(
        [sys.executable, "-c", START, "serve", "--port", "0", "--workers", "1", *options],
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        preexec_fn=set_limits,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    assert re.match(r"plan answers at http://(127\.0\.0\.1|0\.0\.0\.0):", line), line
    return Server(process=process, port=int(line.split(":")[2].split("/")[0]))


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    found = started(tmp_path_factory.mktemp("server"))
    yield found
    found.process.send_signal(signal.SIGTERM)
    found.process.communicate(timeout=60)
    assert found.process.returncode == 0


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[Server]:
    """A server with a token, small bodies and one second for a request; Ctrl-C ends it."""
    folder = tmp_path_factory.mktemp("guarded")
    found = started(folder, "--token", TOKEN, "--max-body", "4kib", "--time-limit", "1s", "--allow-paths")
    yield found
    found.process.send_signal(signal.SIGINT)
    _, err = found.process.communicate(timeout=60)
    assert (found.process.returncode, err) == (0, "")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Iterator[Server]:
    """A server that works on one request at a time and refuses others."""
    found = started(tmp_path_factory.mktemp("small"), "--concurrency", "1")
    yield found
    found.process.terminate()
    _, err = found.process.communicate(timeout=60)
    assert (found.process.returncode, err) == (0, "a worker process was ended; a new one starts\n")


class TestAnswers:
    @pytest.mark.parametrize("command", ["", "estimate"])
    def test_the_answer_is_the_commands(self, server, command, capsys):
        reply = server.post(f"/{command or 'plan'}", {**JOB, "set": {"lora_r": 32, "gradient_checkpointing": True}})
        flags = [f"--{name}={value}" for name, value in JOB.items()]
        settings = ["--set", "lora_r=32", "--set", "gradient_checkpointing=true"]
        assert run([*command.split(), *flags, *settings, "--json", "--quiet"]) == 0
        printed = in_words(json.loads(capsys.readouterr().out), "json")
        assert (reply.status, json.loads(reply.body)) == (200, printed)

    def test_a_log_is_diagnosed_and_its_job_planned_anew(self, server):
        reply = server.post("/diagnose", {**JOB, "log": OUT_OF_MEMORY})
        document = json.loads(reply.body)
        assert document["incidents"][0]["bytes"]["tried"] == 2 * 2**30
        assert document["instead"]["fits"]

    def test_a_log_alone_is_enough(self, server):
        assert json.loads(server.post("/diagnose", {"log": OUT_OF_MEMORY}).body)["expected"] is None

    def test_several_clusters_are_compared_by_cost(self, server):
        """POST /plan refused them, and no other path took prices."""
        job = {**JOB, "gpus": "1xT4,1xRTX-3090", "optimize": "cost", "tokens": "300M"}
        reply = server.post("/compare", {**job, "prices": {"T4": 0.4, "RTX-3090": 0.2}})
        rows = json.loads(reply.body)["clusters"]
        assert [row["gpus"] for row in rows] == ["1xRTX-3090", "1xT4"] and rows[0]["cost"] < rows[1]["cost"]
        assert server.post("/compare", job).status == 422
        crowd = server.post("/compare", {**JOB, "gpus": ",".join(["1xT4"] * 9)})
        assert crowd.status == 422 and "has at most 8" in crowd.error

    def test_a_job_that_does_not_fit_is_an_answer(self, server):
        reply = server.post("/plan", {"model": "Llama-3.1-70B", "gpus": "1xT4", "method": "sft", "tuning": "full"})
        assert (reply.status, json.loads(reply.body)["verdict"]) == (200, "does_not_fit")

    @pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
    def test_the_requests_of_the_page_are_answered(self, server):
        lines = [line.strip() for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("    curl ")]
        assert len(lines) == 2
        for line in lines:
            command = [*shlex.split(line.replace(":8642/", f":{server.port}/")), "--silent", "--fail", "--noproxy", "*"]
            report = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=30).stdout)
            assert report.get("best", report)["fits"]


class TestErrors:
    @pytest.mark.parametrize(
        ("body", "status", "message"),
        [
            (b"", 400, "body: Input data was truncated"),
            (b'{"model": "Qwen2.5-0.5B"', 400, "body: Input data was truncated"),
            (b'{"model": "\xff"}', 400, "body: "),
            (b"[" * 100_000 + b"]" * 100_000, 422, "body: Expected `object`, got `array`"),
            (b'{"set":' * 100_000, 422, "body: "),
            (b"null", 422, "body: Expected `object`, got `null`"),
            (b'{"max_length": 0}', 422, "body: Expected `int` >= 1 - at `$.max_length`"),
            (b'{"max_length": 1e999}', 422, "body: "),
            (b'{"effective_batch_size": ' + b"9" * 5000 + b"}", 422, "body: "),
            (b'{"set": {"lora_r": ' + b"9" * 5000 + b"}}", 422, ""),
            (b'{"modell": "x"}', 422, "Unknown field of body 'modell'. Did you mean model?"),
            (b"{}", 422, "model, gpus and method are missing."),
            (b'{"model": "Qwen2.5-0.6B", "gpus": "1xT4", "method": "sft"}', 422, "Unknown model 'Qwen2.5-0.6B'. Did"),
            (b'{"model": "\\ud800", "gpus": "1xT4", "method": "sft"}', 400, "body: "),
        ],
    )
    def test_a_hostile_body_gets_one_line(self, server, body, status, message):
        for path in ("/plan", "/estimate", "/diagnose"):
            reply = server.ask("POST", path, body)
            assert reply.status == status
            assert len(reply.error) < 1100 and "\n" not in reply.error
            assert path == "/diagnose" or reply.error.startswith(message)

    def test_an_error_has_the_form_of_the_commands(self, server):
        reply = server.ask("POST", "/plan", b'{"model": "Qwen2.5-7B", "gpus": "1xL4", "method": "grp"}')
        error = json.loads(reply.body)["error"]
        assert (reply.status, error["code"], error["nearest"][0]) == (422, "unknown_name", "grpo")
        assert json.loads(server.ask("GET", "/nothing").body)["error"]["code"] == "wrong_input"

    @pytest.mark.parametrize(
        "changes",
        [
            {"model": "/etc/passwd"},
            {"model": "."},
            {"model": "some-org/some-model"},
            {"set": {"reward_model": "./folder"}, "method": "ppo", "tuning": "auto"},
            {"config": "train.yaml"},
            {"accelerate_config": "zero3"},
            {"deepspeed_config": "/dev/zero"},
        ],
    )
    def test_files_and_the_hub_are_out_of_reach(self, server, changes):
        reply = server.post("/plan", {**JOB, **changes})
        assert reply.status == 422
        assert "without --allow-paths" in reply.error or "Only the models of the catalogue are known" in reply.error

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"price_per_hour": 3.0}, "Unknown field of body 'price_per_hour'"),
            ({"tokens": "300M"}, "Unknown field of body 'tokens'"),
            ({"max_cost": 500.0}, "Unknown field of body 'max_cost'"),
            ({"optimize": "cost"}, "Unknown goal 'cost'. It can be throughput, max-length, batch-size, or cost"),
            ({"gpus": "1xL4,1xT4"}, '"gpus": "1xL4,1xT4" is not one cluster of one kind of card.'),
        ],
    )
    def test_a_comparison_of_clusters_or_prices_is_refused_by_name(self, server, change, named):
        reply = server.post("/plan", {**JOB, **change})
        assert (reply.status, named in reply.error) == (422, True)

    @pytest.mark.parametrize(
        ("method", "path", "status"), [("GET", "/plan", 405), ("POST", "/", 415), ("GET", "/x", 404)]
    )
    def test_other_paths_and_methods_are_refused(self, server, method, path, status):
        assert server.ask(method, path, b"{}").status == status

    def test_a_body_must_be_sent_as_json(self, server):
        assert server.ask("POST", "/plan", b"{}", Content_Type="text/plain").status == 415

    def test_a_compressed_body_is_refused_by_its_header(self, server):
        body = gzip.compress(json.dumps(JOB).encode())
        reply = server.ask("POST", "/estimate", body, Content_Encoding="gzip")
        assert (reply.status, "without Content-Encoding" in reply.error) == (415, True)
        assert server.ask("POST", "/estimate", json.dumps(JOB).encode(), Content_Encoding="identity").status == 200

    def test_ten_megabytes_are_too_large(self, server):
        reply = server.ask("POST", "/plan", b" " * 10 * 2**20)
        assert (reply.status, reply.error) == (
            413,
            "The body has more than 4,194,304 bytes, which --max-body allows.",
        )

    def test_a_name_that_points_here_is_not_this_server(self, server):
        assert server.ask("GET", "/", Host="evil.example").status == 400


class TestGuard:
    @pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer wrong", "Basic !", f"Basic {TOKEN}", "Bearer é"])
    def test_without_the_token_nothing_is_answered(self, guarded, authorization):
        for path in ("/", "/openapi.json", "/nowhere"):
            reply = guarded.ask("GET", path, Authorization=authorization)
            assert (reply.status, reply.headers["www-authenticate"].split()[0]) == (401, "Basic")
            assert TOKEN not in reply.body.decode()

    def test_the_token_is_taken_as_a_password_too(self, guarded):
        for authorization in (f"Bearer {TOKEN}", "Basic OmEtdG9rZW4tb2YtdGhlLXRlc3Rz"):
            assert guarded.ask("GET", "/openapi.json", Authorization=authorization).status == 200

    def test_a_body_without_a_length_is_counted_as_it_arrives(self, guarded):
        connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
        connection.request("POST", "/plan", iter([b" " * 1024] * 9), headers, encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()

    def test_a_path_may_be_named_where_that_is_allowed(self, guarded):
        body = json.dumps({**JOB, "model": "./nowhere"}).encode()
        reply = guarded.ask("POST", "/estimate", body, Authorization=f"Bearer {TOKEN}")
        assert (reply.status, "nowhere/config.json does not exist" in reply.error) == (422, True)

    def test_every_response_has_the_security_headers(self, guarded):
        for reply in (guarded.ask("GET", "/"), guarded.ask("GET", "/", Authorization=f"Bearer {TOKEN}")):
            assert reply.headers["content-security-policy"].startswith("default-src 'none'; ")
            assert reply.headers["x-content-type-options"] == "nosniff"


class TestLimits:
    def test_a_late_answer_is_given_up(self):
        from planner.serve.answers import start_worker

        old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
        start_worker()
        reply = answer("plan", json.dumps(JOB).encode(), 0.0, Allowed(paths=False, hub=False))
        for number, handler in old.items():
            signal.signal(number, handler)
        assert (reply.status, b"--time-limit" in reply.content) == (503, True)

    def test_an_error_of_ours_is_logged_and_not_told(self, monkeypatch, caplog):
        from planner.serve import answers

        def fail(body: bytes, allowed: Allowed) -> Any:
            raise ZeroDivisionError("a secret")

        monkeypatch.setitem(answers.TASKS, "plan", fail)
        old = signal.signal(signal.SIGALRM, signal.SIG_IGN)
        reply = answers.answer("plan", b"", time.monotonic() + 60, Allowed(paths=False, hub=False))
        signal.signal(signal.SIGALRM, old)
        assert (reply.status, b"secret" in reply.content) == (500, False)
        assert "a secret" in caplog.text

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--host", "0.0.0.0"], "Error: --host 0.0.0.0 opens the server to the network. Give a --token too.\n"),
            (["--port", "{taken}"], "Error: Cannot listen on 127.0.0.1 port {taken}: Address already in use. Give "),
            (["--max-body", "many"], "Error: 'many' is not a size."),
            (["--time-limit", "0"], "Error: '0' is not a duration."),
            (["--time-limit", "2h"], "Error: --time-limit 2h is more than an hour. Give 1h or less.\n"),
        ],
    )
    def test_a_server_that_cannot_start_says_so_in_one_line(self, options, message, capsys):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            assert run(["serve", *(option.format(taken=port) for option in options)]) == 2
        err = capsys.readouterr().err
        assert err.startswith(message.format(taken=port)) and err.count("\n") == 1


class TestHostileClients:
    """The server `guarded` gives a body one second, and two to the head of a request."""

    def sent_slowly(self, port: int, head: bytes) -> tuple[float, bytes]:
        """Send a head and then a byte every 0.2 seconds; return the seconds until the server closes, and its answer."""
        begin, answer = time.monotonic(), b""
        with socket.create_connection(("127.0.0.1", port), timeout=0.2) as connection:
            connection.sendall(head)
            while time.monotonic() - begin < 90:
                try:
                    if not (part := connection.recv(65536)):
                        break
                    answer += part
                except TimeoutError:
                    connection.sendall(b"G")
                except ConnectionError:
                    break
        return time.monotonic() - begin, answer

    def test_a_body_that_comes_byte_by_byte_is_cut_at_the_time_limit(self, guarded):
        head = f"POST /plan HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        body = "Content-Type: application/json\r\nContent-Length: 4000\r\n\r\n"
        seconds, answer = self.sent_slowly(guarded.port, (head + body).encode())
        assert answer.startswith(b"HTTP/1.1 408 ") and b"The body did not arrive in 1 seconds." in answer
        assert 1 <= seconds < 60

    @pytest.mark.parametrize(
        ("head", "status"),
        [
            (b"", b""),
            (b"GET / HTTP/1.1\r\nHost: localhost\r\nX:", b""),
            # Without the token it is answered at once, and its body would come later.
            (b"POST /plan HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000\r\n\r\n", b"HTTP/1.1 401 "),
        ],
    )
    def test_a_client_that_sends_a_byte_now_and_then_loses_its_connection(self, guarded, head, status):
        seconds, answer = self.sent_slowly(guarded.port, head)
        assert (answer.startswith(status), seconds < 60) == (True, True)

    def test_more_requests_than_the_concurrency_are_told_to_come_again(self, small):
        with ThreadPoolExecutor(9) as pool:
            health = pool.submit(small.ask, "GET", "/openapi.json")
            replies = list(pool.map(lambda _: small.post("/plan", {**JOB, "method": "grpo"}), range(8)))
        refused = [reply for reply in replies if reply.status == 503]
        assert {reply.status for reply in replies} == {200, 503}
        assert health.result().status == 200  # needs no worker
        assert {reply.headers["retry-after"] for reply in refused} == {"1"}
        assert "--concurrency" in refused[0].error

    def test_a_worker_that_is_killed_is_replaced(self, small):
        listed = subprocess.run(
            ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(small.process.pid)], capture_output=True
        )
        (worker,) = [line.split()[0] for line in listed.stdout.splitlines() if b"spawn_main" in line]
        os.kill(int(worker), signal.SIGKILL)
        assert small.post("/estimate", JOB).status == 200

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            (b'{"model": ' + b"[" * 5000 + b"]" * 5000 + b"}", 422),
            (b'{"risk": NaN}', 400),
            (b'{"risk": Infinity}', 400),
            (b'{"risk": 1e400}', 422),
            (b'{"max_length": 1.5}', 422),
            (b'{"batch_size": true}', 422),
            (b'{"set": []}', 422),
            (b'{"set": {"lora_target_modules": [1]}}', 422),
            (b'{"model": 7}', 422),
            (b"\xff\xfe{\x00}\x00", 400),
            (b"\x00", 400),
        ],
    )
    def test_bodies_of_the_wrong_kind_are_the_clients_errors(self, server, body, status):
        for path in ("/plan", "/estimate", "/diagnose"):
            assert server.ask("POST", path, body).status == status


LIMITS = RequestLimits(body_bytes=2**20, seconds=300.0, concurrency=8, workers=1)


class FragilePool(ProcessPoolExecutor):
    """A pool whose first workers are killed by each task."""

    def __init__(self, kills: Iterator[bool]) -> None:
        self._kills = kills

    def submit(self, task: Callable[..., Any], /, *given: Any) -> "Future[Any]":  # type: ignore[override]
        ended: Future[Any] = Future()
        if task is measured_answer and next(self._kills):
            ended.set_exception(BrokenProcessPool())
        else:
            ended.set_result(TaskAnswer(status=200, content=b"{}", worker_bytes=1))
        return ended

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass


class TestKilledWorkers:
    def test_a_request_that_comes_before_the_server_knows_that_its_worker_ended_is_answered(self):
        async def ask() -> TaskAnswer:
            before = {*multiprocessing.active_children()}
            workers = Workers(LIMITS, Allowed(paths=False, hub=False))
            try:
                workers.start()
                for process in {*multiprocessing.active_children()} - before:
                    process.kill()
                # This thread goes on before the one that waits for the worker's end.
                return await workers.answer("estimate", json.dumps(JOB).encode())
            finally:
                workers.refuse()  # no other worker starts
                workers.stop()

        assert asyncio.run(ask()).status == 200

    @pytest.mark.parametrize(("kills", "status"), [(0, 200), (1, 200), (2, 503)])
    def test_a_request_is_worked_on_again_if_its_worker_is_killed_once(self, kills, status, monkeypatch):
        killing = iter([*[True] * kills, *[False] * 9])
        monkeypatch.setattr("planner.serve.app._new_pool", lambda: FragilePool(killing))

        async def ask() -> TaskAnswer:
            workers = Workers(LIMITS, Allowed(paths=False, hub=False))
            workers.start()
            return await workers.answer("estimate", b"")

        assert asyncio.run(ask()).status == status

    def test_a_worker_that_has_grown_is_renewed_and_its_request_is_answered(self, monkeypatch, caplog):
        monkeypatch.setattr("planner.serve.app.LARGEST_WORKER_BYTES", 0)
        pools: list[ProcessPoolExecutor] = []

        def new_pool() -> ProcessPoolExecutor:
            pools.append(FragilePool(iter([False] * 9)))
            return pools[-1]

        async def ask() -> list[int]:
            workers = Workers(LIMITS, Allowed(paths=False, hub=False))
            workers.start()
            return [(await workers.answer("estimate", b"")).status for _ in range(3)]

        monkeypatch.setattr("planner.serve.app._new_pool", new_pool)
        assert asyncio.run(ask()) == [200, 200, 200]
        assert len(pools) == LIMITS.workers + 3 and caplog.text == ""

    @pytest.mark.slow
    def test_layers_are_measured_beside_the_worker_and_kept(self, tmp_path, monkeypatch):
        pytest.importorskip("transformers", reason="the extra training is not installed")
        monkeypatch.setenv("PLAN_CACHE", str(tmp_path / "cache"))
        targets = {"lora_target_modules": ["query_key_value"]}  # no layers of BLOOM ship with these alone
        job = {"model": "bigscience/bloom-560m", "gpus": "1xH100", "method": "sft", "tuning": "lora", "set": targets}
        server = started(tmp_path, "--time-limit", "2")
        try:
            late = server.post("/estimate", job)
            assert (late.status, late.error) == (503, MEASURING)
            wait_until(lambda: server.post("/estimate", job).status == 200)
            worker = next(
                process
                for process in psutil.Process(server.process.pid).children()
                if "spawn_main" in " ".join(process.cmdline())
            )
            assert "libtorch" not in " ".join(file.path for file in worker.memory_maps())
        finally:
            server.process.send_signal(signal.SIGTERM)
            _, err = server.process.communicate(timeout=60)
        assert (server.process.returncode, err) == (0, "")

    def test_an_answer_says_how_large_its_worker_is(self):
        given = ("estimate", json.dumps(JOB).encode(), time.monotonic() + 60, Allowed(paths=False, hub=False))
        assert measured_answer(*given).worker_bytes > 30 * 10**6
        assert answer(*given).content == measured_answer(*given).content


class TestForm:
    def test_the_front_page_asks_and_answers(self, server):
        empty = server.ask("GET", "/").body.decode()
        assert "<form" in empty and "Memory by phase" not in empty and "<h1>plan</h1>" in empty
        full = server.ask(
            "GET", "/?model=Qwen2.5-0.5B&gpus=1xRTX-3090&method=sft&settings=lora_r%3D32%0D%0A"
        ).body.decode()
        assert "Memory by phase" in full and 'value="1xRTX-3090"' in full and "lora_r=32" in full

    def test_a_log_in_the_page_has_the_answer_of_the_command(self, server, tmp_path, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "100")
        log = tmp_path / "train.log"
        log.write_text(f"step 1\n{OUT_OF_MEMORY}\n")
        job = {"model": "Qwen2.5-0.5B", "gpus": "1xRTX-3090", "method": "sft", "tuning": "lora"}
        for fields_of_job in ({}, job):
            body = urlencode({"log": log.read_text().replace("\n", "\r\n"), **fields_of_job}).encode()
            reply = server.ask("POST", "/", body, Content_Type="application/x-www-form-urlencoded")
            shown = html.unescape(re.search(r'<pre id="diagnosis">([^<]*)</pre>', reply.body.decode())[1])
            flags = [text for name, value in fields_of_job.items() for text in (f"--{name}", value)]
            assert run(["diagnose", str(log), *flags]) == 0
            assert (reply.status, shown.split()) == (200, spelled(capsys.readouterr().out, "page").split())
            assert "with --" not in shown

    @pytest.mark.parametrize(
        ("fields_of_form", "status", "said"),
        [
            ({"log": "all well"}, 422, "reports no out-of-memory error"),
            ({}, 422, "reports no out-of-memory error"),
            ({"log": OUT_OF_MEMORY, "model": "<b>", "gpus": "1xT4"}, 200, "Unknown model"),
            ({"log": OUT_OF_MEMORY, "model": "Qwen2.5-0.5B", "gpus": "1xT4", "config": "x.yaml"}, 200, "What happened"),
        ],
    )
    def test_a_log_or_job_that_cannot_be_read_is_said_on_the_page(self, server, fields_of_form, status, said):
        body = urlencode(fields_of_form).encode()
        reply = server.ask("POST", "/", body, Content_Type="application/x-www-form-urlencoded")
        assert reply.status == status and said in html.unescape(reply.body.decode()) and b"<b>" not in reply.body

    def test_an_error_stands_above_the_form_that_keeps_its_fields(self, server):
        reply = server.ask("GET", "/?model=%3Cb%3E&gpus=1xT4&max_length=x&method=nothing")
        page = reply.body.decode()
        assert reply.status == 422
        assert "max_length is no number from 1 on: x." in page
        assert "<b>" not in page and "&lt;b&gt;" in page

    def test_each_example_of_the_landing_page_is_answered(self, server):
        landing = server.ask("GET", "/").body.decode()
        addresses = [html.unescape(found) for found in re.findall(r'<li><a href="([^"]+)"', landing)]
        pages = [server.ask("GET", address) for address in addresses]
        assert [page.status for page in pages] == [200, 200, 200]
        texts = [page.body.decode() for page in pages]
        assert 'class="verdict fits"' in texts[0] and "Download the files" in texts[0]
        assert "To make it fit" in texts[1]
        assert [texts[2].count(f">{gpus}</a>") for gpus in ("1xL4", "2xA100-40G", "8xH100")] == [1, 1, 1]

    @pytest.mark.parametrize(
        "query",
        [
            {"model": "Qwen2.5-7B", "gpus": "2xA100-40G", "method": "grpo"},
            {"model": "Llama-3.1-70B", "gpus": "2xRTX-4090", "method": "sft", "max_length": "8192"},
            {"model": "Qwen2.5-0.5B", "gpus": "1xT4", "method": "dpo"},
            {"model": "Qwen2.5-0.5B", "gpus": "1xL4", "method": "sft", "batch_size": "3", "effective_batch_size": "16"},
        ],
        ids=["GRPO", "does not fit", "T4", "refused"],
    )
    def test_no_sentence_of_the_page_names_a_flag(self, server, query):
        """A reader of the page has fields, whose labels stand there instead; settings stand as in their field."""
        whole = server.ask("GET", f"/?{urlencode(query)}").body.decode()
        told = re.sub(r"(?s)<(script|style|pre)[^>]*>.*?</\1>", "", whole)
        assert not re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"<[^>]+>", " ", told))
        assert any(f"“{label}”" in html.unescape(told) for label in LABELS.values())

    def test_the_what_if_table_varies_beside_an_engine_that_sleeps(self, server):
        """Each cell showed the engine's share, which it takes while it samples, whatever the length."""
        query = {
            "model": "Qwen2.5-7B", "gpus": "1xA100-80G", "method": "grpo",
            "settings": "use_vllm=true\nvllm_mode=colocate\nvllm_enable_sleep_mode=true",
        }  # fmt: skip
        text = server.ask("GET", f"/?{urlencode(query)}").body.decode()
        needs = re.findall(r">([\d.]+) [✓✗]<small>", text[text.index('class="grid"') :])
        assert len(needs) == 20 and len({*needs}) > 15
        assert re.search(r"while it trains \([\d.]+ while the engine samples\)", text)

    def test_prices_and_tokens_are_compared_and_the_cheapest_stands_first(self, server):
        query = {
            "model": "Qwen2.5-0.5B", "gpus": "1xT4,1xRTX-3090", "method": "sft", "optimize": "cost", "tokens": "300M",
            "prices": "T4=0.4, RTX-3090=0.2",
        }  # fmt: skip
        reply = server.ask("GET", f"/?{urlencode(query)}")
        text = html.unescape(reply.body.decode())
        assert reply.status == 200 and text.index(">1xRTX-3090</a>") < text.index(">1xT4</a>")
        assert re.search(r"300,000,000 tokens: [\d.]+ hours, cost [\d.]+", text)
        assert "--tokens 300M --prices prices.toml" in text
        wrong = server.ask("GET", f"/?{urlencode({**query, 'prices': 'T4=cheap'})}")
        assert wrong.status == 422 and "no price for an hour" in html.unescape(wrong.body.decode())

    def test_every_field_reaches_the_plan_and_its_command_gives_the_same_answer(self, server, capsys):
        query = {
            "model": "Qwen2.5-0.5B", "gpus": "2xRTX-3090", "method": "grpo", "tuning": "lora", "prompt_length": "300",
            "max_completion_length": "200", "effective_batch_size": "32", "lora_r": "8", "batch_size": "2",
            "free_memory": "20GiB", "host_memory": "100GiB", "network": "100Gb", "risk": "0.02",
            "optimize": "batch-size", "settings": "beta=0.1\ngradient_checkpointing=true", "nothing": "x",
        }  # fmt: skip
        reply = server.ask("GET", f"/?{urlencode(query)}")
        page = reply.body.decode()
        assert reply.status == 200
        command = html.unescape(re.search(r'<pre class="wrap" id="command"[^>]*>([^<]*)</pre>', page)[1])
        shown = json.loads(base64.b64decode(re.search(r'application/json;base64,([^"]+)"', page)[1]))
        assert run([*shlex.split(command)[1:], "--json", "--quiet"]) == 0
        assert json.loads(capsys.readouterr().out) == shown
        address = html.unescape(re.search(r'<a id="link" href="([^"]+)"', page)[1])
        again = server.ask("GET", address).body.decode()
        assert html.unescape(re.search(r'<a id="link" href="([^"]+)"', again)[1]) == address
        assert shown["job"]["risk"] == 0.02 and "tuning=lora" in address and "nothing" not in address

    def test_a_form_of_defaults_has_a_short_address(self):
        form = read_form(b"model=Qwen2.5-0.5B&gpus=1xL4&method=sft&tuning=auto&optimize=throughput&risk=&lengths=")
        assert form.address == "/?model=Qwen2.5-0.5B&gpus=1xL4"

    @pytest.mark.parametrize("field", ["lengths=lengths.txt", "settings=lengths%3Dlengths.txt"])
    def test_the_form_reads_no_file_of_the_server(self, server, field):
        reply = server.ask("GET", f"/?model=Qwen2.5-0.5B&gpus=1xL4&method=sft&{field}")
        assert (reply.status, "without --allow-paths" in reply.body.decode()) == (422, True)

    @pytest.mark.parametrize(
        ("query", "message"),
        [
            ("gpus=1xL4", "“Model” is missing"),
            ("model=Qwen2.5-0.5B&gpus=" + ",".join(["1xL4"] * 9), "GPUs names 9 clusters. A comparison has at most 8."),
            ("model=Qwen2.5-0.5B&gpus=1xL4,1xL44", "Unknown GPU"),
            ("model=Qwen2.5-0.6C&gpus=1xL4,1xT4", "Unknown model"),
            ("model=Qwen2.5-0.5B&gpus=1xL4&risk=often", "risk is no number: often."),
            ("model=Qwen2.5-0.5B&gpus=1xL4&risk=2", "risk"),
            ("model=Qwen2.5-0.5B&gpus=1xL4&settings=lora_r", "The setting lora_r has no value."),
            ("model=Qwen2.5-0.5B&gpus=1xL4&settings=lora_r%3D8%0Alora_r%3D16", "lora_r is set twice: 8 and 16."),
        ],
    )
    def test_a_field_that_is_wrong_is_named(self, server, query, message):
        reply = server.ask("GET", f"/?{query}")
        alert = re.search(r'<p class="error" role="alert">([^\n]*)</p>', reply.body.decode())
        assert (reply.status, message in html.unescape(alert[1])) == (422, True)

    def test_an_endless_query_is_refused(self, server):
        assert server.ask("GET", "/?" + "a=1&" * 40).status == 422
        assert server.ask("GET", "/?model=" + "a" * 9000).status == 414

    def test_the_page_has_the_one_script_that_the_headers_allow(self, server):
        reply = server.ask("GET", "/")
        assert reply.body.decode().count("<script") == 1
        assert f"<script>{page_script()}</script>" in reply.body.decode()


class TestOpenApi:
    def test_every_operation_is_described_by_the_types_of_the_documents(self, server):
        document = json.loads(server.ask("GET", "/openapi.json").body)
        assert set(document["paths"]) == set(OPERATIONS)
        assert "security" not in document and openapi(with_token=True)["security"] == [{"token": []}]
        properties = document["components"]["schemas"]["PlanRequest"]["properties"]
        assert properties["max_length"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 10**9}

    def test_every_option_of_a_job_is_a_field_of_the_body(self):
        assert {*PlanRequest.__struct_fields__} == {entry.name for entry in fields(SearchOptions)}

    def test_settings_keep_the_types_that_json_has(self):
        body = b'{"set": {"lora_target_modules": ["q_proj", "v_proj"], "packing": true, "lora_r": 16, "beta": null}}'
        options = read_request(
            msgspec.json.decode(body, type=PlanRequest), SearchOptions, Allowed(paths=False, hub=False)
        )
        assert options.set == {
            "lora_target_modules": ("q_proj", "v_proj"), "packing": True, "lora_r": 16, "beta": None,
        }  # fmt: skip


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(600):
        if true():
            return
        time.sleep(0.1)
    raise AssertionError("it never became true")


def sleeps(server: Server) -> bool:
    """Return True if a server has nothing to do for a tenth of a second."""
    for _ in range(5):
        time.sleep(0.02)
        if psutil.Process(server.process.pid).status() != psutil.STATUS_SLEEPING:
            return False
    return True


def processes_of(server: Server) -> list[int]:
    return [child.pid for child in psutil.Process(server.process.pid).children(recursive=True)]


@pytest.mark.slow
class TestTheEnd:
    @pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="/proc names the children of a process")
    def test_ctrl_c_while_it_starts_ends_it_without_a_traceback(self, tmp_path):
        """The workers got it in the midst of their imports, and the server said that a pool is broken."""
        command = [sys.executable, "-c", "from planner.commands.main import main\nmain()", "serve", "--port", "0"]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "PLAN_CACHE": str(tmp_path)},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's `&` ignores it
        )  # fmt: skip
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while len(children.read_text().split()) < 2:  # the tracker of multiprocessing, and a worker
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "ended while it started\n")

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
    def test_no_process_outlives_a_server_that_is_killed(self, number, tmp_path):
        server = started(tmp_path, "--workers", "2")
        processes = processes_of(server)
        assert len(processes) >= 2
        server.process.send_signal(number)
        server.process.communicate(timeout=60)
        wait_until(lambda: not any(psutil.pid_exists(process) for process in processes))

    def test_requests_that_run_at_a_signal_are_answered_and_nothing_is_logged(self, tmp_path):
        server = started(tmp_path)
        slow = json.dumps({"model": "Llama-3.1-70B", "gpus": "16x8xH100", "method": "grpo"}).encode()
        head = "POST /plan HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
        with ExitStack() as closing:
            asked = []
            for _ in range(4):
                client = closing.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
                client.sendall(f"{head}Content-Length: {len(slow)}\r\n\r\n".encode())
                assert client.recv(1024).startswith(b"HTTP/1.1 100 ")  # it is worked on
                client.sendall(slow)
                asked.append(client)
            server.process.send_signal(signal.SIGTERM)
            statuses = {client.recv(1024).split()[1] for client in asked}
        _, err = server.process.communicate(timeout=60)
        assert statuses <= {b"200", b"503"}
        assert (server.process.returncode, err) == (0, "")


MOST_FILES = 384  # half of them are the most connections, and as many as the server's backlog wait to be accepted
CONNECTIONS = MOST_FILES // 2 + 40


@pytest.mark.slow
class TestManyConnections:
    def test_idle_connections_beyond_the_most_do_not_stop_the_server(self, tmp_path):
        server = started(tmp_path, most_files=MOST_FILES)
        held = []
        try:
            for _ in range(CONNECTIONS):
                connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
                held.append(connection)
            assert server.post("/estimate", JOB).status == 200
            open_files = psutil.Process(server.process.pid).num_fds()
            assert open_files < CONNECTIONS
        finally:
            for connection in held:
                connection.close()
            server.process.send_signal(signal.SIGTERM)
            _, err = server.process.communicate(timeout=60)
        assert (server.process.returncode, err) == (0, "")

    @pytest.mark.parametrize(
        ("options", "sent", "then"),
        [
            (["--host", "0.0.0.0", "--token", TOKEN], b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 1000, b""),
            (["--host", "0.0.0.0", "--token", TOKEN], SLOW_BODY, b"{"),
            ([], b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 60, b""),
            ([], SLOW_BODY, b"{"),
        ],
        ids=["pipelined without a token", "slow bodies without a token", "unread answers", "slow bodies"],
    )
    def test_clients_that_do_not_go_on_silence_nobody(self, options, sent, then, tmp_path):
        server = started(tmp_path, *options, most_files=MOST_FILES)
        held: list[socket.socket] = []
        try:
            for _ in range(CONNECTIONS):
                connection = socket.socket()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(("127.0.0.1", server.port))
                connection.setblocking(False)
                with suppress(OSError):  # it may be closed again already
                    connection.send(sent)
                held.append(connection)
            for _ in range(3):
                wait_until(lambda: sleeps(server))  # a starved server has not come to each connection yet
                for slow in held if then else ():
                    with suppress(OSError):
                        slow.send(then)
                headers = {"Authorization": f"Bearer {TOKEN}"}
                assert server.ask("POST", "/estimate", json.dumps(JOB).encode(), **headers).status == 200
        finally:
            for connection in held:
                connection.close()
            server.process.send_signal(signal.SIGTERM)
            _, err = server.process.communicate(timeout=60)
        assert (server.process.returncode, err) == (0, "")

    def test_an_answer_that_is_not_read_ends_with_its_time(self, tmp_path):
        server = started(tmp_path, "--time-limit", "1")
        try:
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
            process = psutil.Process(server.process.pid)
            wait_until(lambda: len(process.net_connections()) == 2)
            wait_until(lambda: [each.status for each in process.net_connections()] == ["LISTEN"])
            connection.close()
        finally:
            server.process.send_signal(signal.SIGTERM)
            server.process.communicate(timeout=60)

    def test_a_worker_that_is_killed_costs_no_other_request(self, tmp_path):
        server = started(tmp_path, "--workers", "2")
        try:
            children = [psutil.Process(process) for process in processes_of(server)]
            next(child for child in children if "spawn_main" in " ".join(child.cmdline())).kill()
            assert [server.post("/estimate", JOB).status for _ in range(3)] == [200, 200, 200]
        finally:
            server.process.send_signal(signal.SIGTERM)
            server.process.communicate(timeout=60)
