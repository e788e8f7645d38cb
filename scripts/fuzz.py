"""Run the command, the server's work, `plan mcp` and the Python functions on random hostile input for long.

Writes what breaks the first three to tests/corpus, one file a kind of fault; prints calls that raise another exception
than `PlanError`.

python -m scripts.fuzz --cases 10000 --calls 1500
"""

import argparse
import hashlib
import resource
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from planner import PlanError
from planner.errors import shortened
from planner.units import GIB
from tests.fuzz_calls import call, calls
from tests.fuzz_cases import CORPUS, FuzzCase, any_case, fault


def kind_of_fault(case: FuzzCase) -> str:
    """Return how a case breaks the command: the innermost line of a traceback, or the fault; "" if it does not."""
    try:
        return fault(case).split(":")[0]
    except Exception as error:
        frame = next(
            (each for each in reversed(traceback.extract_tb(error.__traceback__)) if "/planner/" in each.filename),
            traceback.extract_tb(error.__traceback__)[-1],
        )
        return f"{type(error).__name__} in {Path(frame.filename).name} {frame.name}"


def record_fault(case: FuzzCase, found: Counter[str], tried: int) -> None:
    """Run a case; write it to tests/corpus if it is the first of its kind of fault, and count it."""
    kind = kind_of_fault(case)
    if kind and kind not in found:
        path = CORPUS / f"{hashlib.sha256(kind.encode()).hexdigest()[:8]}.json"
        path.write_text(case.to_json() + "\n", encoding="utf-8")
        print(f"{tried}: {kind} -> {path.name}", flush=True)
    if kind:
        found[kind] += 1


def count_faults_of_calls(seed_of_calls: int, count: int) -> int:
    """Call the Python functions with wrong types; print and count calls that raise another error than `PlanError`."""
    faults = 0
    for name, wrong in calls(seed_of_calls, count):
        try:
            call(name, wrong)
        except PlanError:
            pass
        except Exception as error:
            faults += 1
            print(f"{name}({[*wrong]}, {[shortened(value) for value in wrong.values()]}) raised {error!r}", flush=True)
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--calls", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = Counter[str]()
    tried = 0

    @seed(options.seed)
    @settings(
        max_examples=options.cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=any_case())
    def attempt(case: FuzzCase) -> None:
        nonlocal tried
        tried += 1
        record_fault(case, found, tried)

    attempt()
    print(f"{tried} cases of seed {options.seed}, {len(found)} kinds of faults: {dict(found)}")
    faults = count_faults_of_calls(options.seed, options.calls)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{options.calls} calls of seed {options.seed}, {faults} faults; peak memory {peak / GIB:.2f} GiB")


if __name__ == "__main__":
    main()
