# `make` checks everything; each target checks one thing.
WORKERS ?= 2

.PHONY: all format lint types test golden bench

all: lint types test

format:
	ruff format .
	ruff check --fix .

lint:
	ruff format --check .
	ruff check .

types:
	mypy --strict planner probes

test:
	pytest -q -n $(WORKERS)

# Rewrites the golden files; commit them alone, and say which formula moved them.
golden:
	PLAN_REWRITE_GOLDEN=1 pytest -q tests/test_golden.py tests/test_docs.py

bench:
	python benchmarks/estimator.py
	python benchmarks/cold_start.py
