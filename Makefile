# `make` is what CI runs. `make test` is for while you work: about two minutes on two cores.
WORKERS ?= 2
# A file runs in one process: its tests share fixtures that take long.
PYTEST = pytest -q -n $(WORKERS) --dist loadfile

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

# Rewrites the golden files and the outputs of the notebooks; commit them alone, and say which formula moved them.
golden:
	PLAN_REWRITE_GOLDEN=1 pytest -q tests/test_golden.py tests/test_docs.py
	python -m scripts.notebooks

bench:
	python benchmarks/estimator.py
	python benchmarks/cold_start.py
