# `make` is what CI runs. `make test` is for while you work: about two minutes on two cores.
WORKERS ?= 2
# Files are long and short, and one worker takes over what the other has left.
PYTEST = pytest -q -n $(WORKERS) --dist worksteal

.PHONY: all format lint types moves test emulated nightly golden docs bench

# Types and lint keep one core busy while the emulated environment is downloaded and unpacked beside them.
MAKEFLAGS += -j2

# Emulated GPUs are for Linux on x86-64.
all: lint types moves $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),emulated)
	$(PYTEST) -m "not nightly"

format:
	ruff format .
	ruff check --fix .

lint:
	ruff format --check .
	ruff check .

types:
	mypy --strict planner probes

# What is predicted otherwise than at the newest commit that is three hours older than HEAD: a commit message names it.
moves:
	python -m scripts.compare_commits --jobs 600

test:
	$(PYTEST) -m "not slow and not nightly"

# The real CUDA stack on an emulated GPU. PyTorch's CUDA build lies over this environment, without NVIDIA's libraries.
EMULATED ?= build/emulated
emulated: $(EMULATED)
	$(EMULATED)/bin/python -m pytest -q -n $(WORKERS) -m "not nightly" tests/test_emulated_gpu.py tests/test_emulated_starts.py
	$(EMULATED)/bin/python -m pytest -q -n $(WORKERS) -m "not nightly" -k "Contract and emulated" tests/test_devices.py

$(EMULATED): scripts/emulated_environment.sh constraints.txt
	rm -rf $(EMULATED)
	scripts/emulated_environment.sh $(EMULATED) --over python

# Every combination of settings, where `make` tries each pair of them; changed formulas, which a test must notice; half an
# hour of load on the server; and jobs of the emulated grid with the newest releases (results/releases.md).
nightly: $(EMULATED)
	$(PYTEST)
	$(EMULATED)/bin/python -m pytest -q -n $(WORKERS) tests/test_emulated_starts.py
	python -m scripts.mutate
	python -m scripts.soak_server
	rm -rf build/releases && mkdir -p build/releases
	python -m scripts.releases $(EMULATED) build/releases

# Rewrites the golden files, the estimates among them, the pages that tests compute anew and the outputs of the notebooks;
# commit them alone, and say which formula moved them.
golden:
	python -m scripts.compare_published
	python -m scripts.fit_verdict
	python -m scripts.freeze_estimates
	PLAN_REWRITE_GOLDEN=1 pytest -q tests/test_golden.py tests/test_docs.py tests/test_json_page.py tests/test_results.py \
		tests/test_diff.py tests/test_stops.py
	python -m scripts.growth table
	python -m scripts.notebooks

# The documentation as a site, in build/site; a warning is an error. Needs the extra docs.
docs:
	python -m scripts.docs_site

bench:
	python benchmarks/estimator.py
	python benchmarks/cold_start.py
