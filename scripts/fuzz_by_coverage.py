"""Run the command on hostile input that reaches new lines of planner/; as scripts/fuzz.py, with the package atheris.

python -m scripts.fuzz_by_coverage MINUTES
"""

import importlib
import pkgutil
import sys
import warnings
from collections import Counter

import atheris

with atheris.instrument_imports(include=["planner"]):
    import planner

    for module in pkgutil.walk_packages(planner.__path__, "planner."):
        if ".migrations." not in module.name:  # alembic runs these
            importlib.import_module(module.name)

from hypothesis import HealthCheck, given, settings

from scripts.fuzz import record_fault
from tests.fuzz_cases import FuzzCase, any_case


def main() -> None:
    warnings.simplefilter("ignore")
    found, tried = Counter[str](), 0

    @settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=any_case())
    def attempt(case: FuzzCase) -> None:
        nonlocal tried
        tried += 1
        record_fault(case, found, tried)

    limits = [f"-max_total_time={60 * int(sys.argv[1])}", "-max_len=8192", "-timeout=120"]
    atheris.Setup([sys.argv[0], *limits], attempt.hypothesis.fuzz_one_input)
    atheris.Fuzz()  # ends the process


if __name__ == "__main__":
    main()
