"""Seconds and memory of a whole `plan` in a new process: `python benchmarks/cold_start.py`."""

import os
import statistics
import subprocess
import sys
from time import perf_counter

COMMANDS = {
    "--model Qwen2.5-7B --gpus 2xA100-40G --method grpo": 1.0,  # most seconds allowed
    "--model Qwen2.5-7B --gpus 4x8xH100 --method grpo": 3.0,
}
RUNS = 5
LIMIT_BYTES = 200 * 10**6
KIB = 2**10


def wall_and_peak(arguments: list[str]) -> tuple[float, int]:
    """Run the command once in a new process; return its seconds and its peak of resident memory in bytes."""
    start = perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", "from planner.commands.main import main; main()", *arguments], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 3):
        sys.exit(f"plan {' '.join(arguments)} ended with {process.returncode}")
    return seconds, usage.ru_maxrss * KIB  # Linux counts in KiB


def main() -> None:
    slow = False
    for command, limit_seconds in COMMANDS.items():
        runs = [wall_and_peak(command.split()) for _ in range(RUNS)]
        seconds, peak_bytes = statistics.median(wall for wall, _ in runs), max(peak for _, peak in runs)
        time = f"{seconds:.2f} s (median of {RUNS}; at most {limit_seconds} s)"
        print(f"plan {command}: {time}, {peak_bytes / 10**6:.0f} MB (at most {LIMIT_BYTES // 10**6})")
        slow = slow or seconds > limit_seconds or peak_bytes > LIMIT_BYTES
    sys.exit(slow)


if __name__ == "__main__":
    main()
