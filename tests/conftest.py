"""What all tests share: the command does not dry-run by itself, which takes seconds; the tests of the dry run ask for it."""

import os

os.environ.setdefault("PLAN_DRY_RUN", "0")
