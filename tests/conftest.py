"""What all tests share: the command does not dry-run by itself, which takes seconds, and no profile of whoever runs the tests answers."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("PLAN_DRY_RUN", "0")
os.environ["PLAN_CACHE"] = tempfile.mkdtemp(prefix="plan-tests-")
atexit.register(shutil.rmtree, os.environ["PLAN_CACHE"], ignore_errors=True)
# Real steps of small models: beside other workers, threads wait for one another ten times as long as they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
