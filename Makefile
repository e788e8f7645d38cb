# `make` is what CI runs. `make test` is for while you work: under two minutes on two cores.
WORKERS ?= 2
# Tests of one group share a fixture that takes long, and so one process.
PYTEST = pytest -q -n $(WORKERS) --dist loadgroup

.PHONY: all format lint types test nightly golden bench

all: lint types
	$(PYTEST) -m "not nightly"

format:
	ruff format .
	ruff check --fix .

lint:
	ruff format --check .
	ruff check .

types:
	mypy --strict planner probes

test:
	$(PYTEST) -m "not slow and not nightly"

# Every combination of settings, where `make` tries each pair of them.
nightly:
	$(PYTEST)

# Rewrites the golden files; commit them alone, and say which formula moved them.
golden:
	PLAN_REWRITE_GOLDEN=1 pytest -q tests/test_golden.py tests/test_docs.py

bench:
	python benchmarks/estimator.py
	python benchmarks/cold_start.py
