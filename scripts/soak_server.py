"""Load `plan serve` for long: clients, idle connections, and a worker that is killed now and then.

    python -m scripts.soak_server --minutes 30 --clients 8 --idle 2000 --kill-seconds 60

Prints the slowest answers, requests a second and memory of each minute. Ends with 1 if an answer is not 200, if a
connection is lost, if memory grows, if a process is left, or if the server logs anything but the end of a worker.
"""

import argparse
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
from msgspec import Struct, field

ROOT = Path(__file__).parents[1]
START = "from planner.commands.main import main\nif __name__ == '__main__': main()"
JOB = {"model": "Qwen2.5-0.5B", "gpus": "1xRTX-3090", "method": "sft", "tuning": "lora"}
JOBS = {"/estimate": JOB, "/plan": {**JOB, "max_length": 1024}}
WORKER_ENDED = "a worker process was ended; a new one starts"
GROWTH = 1.2  # of the memory of all processes after the first minute: each worker's caches fill
MINUTE = 60.0
MOST_SECONDS_TO_END = 10.0  # after SIGTERM


class Seen(Struct, kw_only=True):
    """What the clients saw since the last report."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    statuses: Counter[int] = field(default_factory=Counter)
    lost: int = 0  # requests whose connection the server closed
    seconds: dict[str, list[float]] = field(default_factory=lambda: {path: [] for path in JOBS})

    def add(self, path: str, status: int, seconds: float) -> None:
        with self.lock:
            self.statuses[status] += 1
            self.seconds[path].append(seconds)

    def take(self) -> dict[str, list[float]]:
        """Return the times since the last call, and forget them."""
        with self.lock:
            taken, self.seconds = self.seconds, {path: [] for path in JOBS}
        return taken


def work(port: int, path: str, seen: Seen, ended: threading.Event) -> None:
    """Ask again and again over one connection; a connection that the server closes is opened again."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps(JOBS[path])
    while not ended.is_set():
        begin = time.monotonic()
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            seen.lost += not ended.is_set()
            time.sleep(0.1)
            continue
        seen.add(path, response.status, time.monotonic() - begin)


def stay_idle(port: int, count: int, ended: threading.Event) -> None:
    """Hold connections that send nothing; those that the server closes are opened again."""
    held: list[socket.socket] = []
    while not ended.is_set():
        try:
            held.append(socket.create_connection(("127.0.0.1", port), timeout=5))
        except OSError:
            time.sleep(0.1)
        if len(held) > count:
            held.pop(0).close()
        time.sleep(0.005)
    for each in held:
        each.close()


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def memory_bytes(process: psutil.Process) -> int:
    """Return the resident memory of a process and its children; one that ends meanwhile counts nothing."""
    total = 0
    for each in family(process):
        try:
            total += each.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def is_worker(process: psutil.Process) -> bool:
    try:
        return "spawn_main" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return False


def kill_workers(process: psutil.Process, seconds: float, ended: threading.Event) -> None:
    """Kill the worker that is the oldest, every so many seconds."""
    while not ended.wait(seconds):
        workers = [each for each in family(process) if is_worker(each)]
        if workers:
            workers[0].kill()


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else float("nan")


def faults_at_the_end(server: "subprocess.Popen[str]", seen: Seen, memory: list[int]) -> list[str]:
    """End the server by SIGTERM; return what was wrong, before and at the end."""
    processes = family(psutil.Process(server.pid))
    begin = time.monotonic()
    server.send_signal(signal.SIGTERM)
    _, log = server.communicate(timeout=60)
    passed = time.monotonic() - begin
    _, left = psutil.wait_procs(processes, timeout=5)
    lines = [line for line in log.splitlines() if line != WORKER_ENDED]
    print(f"{log.count(WORKER_ENDED)} workers were replaced")
    return [
        *([f"the server ended after {passed:.0f} s"] if passed > MOST_SECONDS_TO_END else []),
        *(f"{len(left)} processes are left" for _ in left[:1]),
        *(f"the log has: {line}" for line in lines[:5]),
        *(f"{count} answers with status {status}" for status, count in seen.statuses.items() if status != 200),
        *([f"{seen.lost} requests whose connection was closed"] if seen.lost else []),
        *(["memory grew"] if len(memory) > 2 and memory[-1] > GROWTH * memory[1] else []),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--kill-seconds", type=float, default=MINUTE)
    asked = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [sys.executable, "-c", START, "serve", "--port", "0"], stderr=subprocess.PIPE, text=True, cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PLAN_CACHE": folder},
        )  # fmt: skip
        assert server.stderr is not None
        port = int(server.stderr.readline().split(":")[2].split("/")[0])
        process, seen, ended, memory = psutil.Process(server.pid), Seen(), threading.Event(), list[int]()
        paths = list(JOBS)
        threads = [
            *(
                threading.Thread(target=work, args=(port, paths[number % 2], seen, ended))
                for number in range(asked.clients)
            ),
            threading.Thread(target=stay_idle, args=(port, asked.idle, ended)),
            threading.Thread(target=kill_workers, args=(process, asked.kill_seconds, ended)),
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + MINUTE * asked.minutes
        while (left := end - time.monotonic()) > 0:
            began = time.monotonic()
            time.sleep(min(left, MINUTE))
            passed = time.monotonic() - began
            memory.append(memory_bytes(process))
            for path, seconds in seen.take().items():
                slowest = f"p50 {quantile(seconds, 0.5):.3f} s, p99 {quantile(seconds, 0.99):.3f} s"
                print(f"{path}: {len(seconds) / passed:.1f} a second, {slowest}", flush=True)
            load = os.getloadavg()[0]
            print(
                f"memory {memory[-1] / 2**20:,.0f} MiB, load {load:.1f}, {dict(seen.statuses)}, {seen.lost} lost",
                flush=True,
            )
        ended.set()
        for thread in threads:
            thread.join()
        faults = faults_at_the_end(server, seen, memory)
    print("\n".join(faults) or "no fault")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
