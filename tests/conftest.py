"""Settings of all tests: a cache folder of their own, one thread, and the same random examples each time."""

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Generator

import pytest
from hypothesis import settings

os.environ["PLAN_CACHE"] = tempfile.mkdtemp(prefix="plan-tests-")
atexit.register(shutil.rmtree, os.environ["PLAN_CACHE"], ignore_errors=True)
# Small models: beside other test processes, threads wait for one another ten times as long as they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The laws' random examples are the same each time; PLAN_LAWS=2000 tries 2000 other ones.
settings.register_profile("same", derandomize="PLAN_LAWS" not in os.environ)
settings.load_profile("same")

SLOW_SECONDS = 3.0  # of processor time, a busy machine's too; a test that takes more is to be marked slow
STARTED = pytest.StashKey[float]()


def cpu_seconds() -> float:
    """Processor time of this process and of the children that have ended."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave imported modules and collected tests out of garbage collections.

    They are never garbage. Trainers call `gc.collect` in each run, which took a second and more for these objects.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[STARTED] = cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the processor time of a test without a mark to its report if it is long, fixtures included."""
    taken = cpu_seconds() - item.stash.get(STARTED, cpu_seconds())
    if call.when == "call" and taken > SLOW_SECONDS and not item.get_closest_marker("slow"):
        item.user_properties.append(("cpu_seconds", taken))
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that should be marked slow."""
    reports = (each for group in terminalreporter.stats.values() for each in group)
    for report in reports:
        for name, value in getattr(report, "user_properties", ()):
            if name == "cpu_seconds" and report.when == "teardown":
                terminalreporter.write_line(f"not marked slow, {value:.0f} s of processor time: {report.nodeid}")
