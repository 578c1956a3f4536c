# Every target that needs Python sets up .venv first, and finds it again in no time until the lists of packages change.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PY := .venv/bin/python
READY := .venv/.ready
ARGS ?=

.PHONY: help train sweep claims test test-all slurm-check lint clean rebuild

help:
	@echo "make train      train a small GPT on real text on this machine (ARGS=\"parallel=tp2 ...\" to choose)"
	@echo "make sweep      layouts x number formats, a table and a page that compares them (ARGS=resume=true to continue)"
	@echo "make claims     put claims about training large models to the test, a table of what was found"
	@echo "make test       run the tests, without the slow ones"
	@echo "make test-all   run all tests"
	@echo "make slurm-check  run sweeps under a real SLURM of two virtual nodes on this machine"
	@echo "make lint       check style"
	@echo "make clean      remove caches; runs/ and .venv stay"

train: $(READY)
	@$(PY) train.py $(ARGS)

sweep: $(READY)
	@$(PY) train.py -m +sweep=laptop $(ARGS)

claims: $(READY)
	@$(PY) -m benchmarks.claims $(ARGS)

test: $(READY)
	@echo "Testing (make test-all adds the slow tests)."
	@$(PY) -m pytest -q -m "not slow" $(ARGS)

test-all: $(READY)
	@echo "Testing, slow tests included."
	@$(PY) -m pytest -q $(ARGS)

slurm-check: $(READY)
	@.ci/virtual-slurm $(abspath $(PY)) -m pytest -v tests/slurm_check.py $(ARGS)

lint: $(READY)
	@$(PY) -m ruff check .

clean:
	@rm -rf .pytest_cache .ruff_cache build *.egg-info
	@find . -path ./.venv -prune -o -path ./runs -prune -o -name __pycache__ -type d -print | xargs rm -rf
	@echo "Removed caches; runs/ and .venv are as they were."

# A moved or half-made .venv has no working Python in it: make it again.
ifeq ($(wildcard $(PY)),)
$(READY): rebuild
endif

$(READY): pyproject.toml constraints.txt .python-version
	@if ! $(PY) -c "import pip" 2>/dev/null; then \
	    python=$$(bash .ci/find-python) || exit 1; \
	    echo "Making .venv with $$python."; \
	    rm -rf .venv && "$$python" -m venv .venv || exit 1; \
	fi
	@echo "Installing the packages of pyproject.toml into .venv; the first time downloads PyTorch and takes minutes."
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@
	@echo "Ready: .venv is up to date."
