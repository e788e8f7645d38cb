"""What all tests share: the command does not dry-run by itself, which takes seconds, and no profile of whoever runs the tests answers."""

import atexit
import os
import shutil
import tempfile

from hypothesis import settings

os.environ["PLAN_CACHE"] = tempfile.mkdtemp(prefix="plan-tests-")
atexit.register(shutil.rmtree, os.environ["PLAN_CACHE"], ignore_errors=True)
# Real steps of small models: beside other workers, threads wait for one another ten times as long as they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Random examples of the laws are the same each time; PLAN_LAWS=2000 tries so many others.
settings.register_profile("same", derandomize="PLAN_LAWS" not in os.environ)
settings.load_profile("same")
