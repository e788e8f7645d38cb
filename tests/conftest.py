"""Settings of all tests: a cache folder of their own, one thread, and the same random examples each time."""

import atexit
import os
import shutil
import tempfile

from hypothesis import settings

os.environ["PLAN_CACHE"] = tempfile.mkdtemp(prefix="plan-tests-")
atexit.register(shutil.rmtree, os.environ["PLAN_CACHE"], ignore_errors=True)
# Small models: beside other test processes, threads wait for one another ten times as long as they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The laws' random examples are the same each time; PLAN_LAWS=2000 tries 2000 other ones.
settings.register_profile("same", derandomize="PLAN_LAWS" not in os.environ)
settings.load_profile("same")
