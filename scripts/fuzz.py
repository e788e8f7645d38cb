"""Run the command on random hostile input for long; write what breaks it to tests/corpus, one file a kind of fault.

python -m scripts.fuzz --cases 10000
python -m scripts.fuzz --minutes 60     guided by the coverage of planner/, with the package atheris
"""

import argparse
import hashlib
import importlib
import pkgutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

import planner
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


def fuzz_by_coverage(attempt: Callable[[bytes], object], minutes: int) -> None:
    """Call `attempt` with bytes that libFuzzer changes where that reaches new lines of planner/; ends the process."""
    import atheris

    with atheris.instrument_imports(include=["planner"]):
        for module in pkgutil.walk_packages(planner.__path__, "planner."):
            if ".migrations." not in module.name:  # alembic runs these
                importlib.import_module(module.name)
    atheris.Setup([sys.argv[0], f"-max_total_time={60 * minutes}", "-max_len=8192", "-timeout=120"], attempt)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=int, help="Fuzz so long, guided by coverage, instead of a number of cases.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, int] = {}
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
        kind = kind_of_fault(case)
        if kind and kind not in found:
            path = CORPUS / f"{hashlib.sha256(kind.encode()).hexdigest()[:8]}.json"
            path.write_text(case.to_json() + "\n", encoding="utf-8")
            print(f"{tried}: {kind} -> {path.name}", flush=True)
        if kind:
            found[kind] = found.get(kind, 0) + 1

    CORPUS.mkdir(exist_ok=True)
    if options.minutes is not None:
        fuzz_by_coverage(attempt.hypothesis.fuzz_one_input, options.minutes)
    attempt()
    print(f"{tried} cases of seed {options.seed}, {len(found)} kinds of faults: {found}")


if __name__ == "__main__":
    main()
