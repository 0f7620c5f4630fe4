# `make demo` and `make test` need nothing but python3 (3.11 or newer): each builds its own environment in .venv first.
#
#   make demo [PAIR=smollm2|qwen2.5-coder]   three prompts, plain beside speculative
#   make test                                the fast suites, under ten minutes on two cores
#   make test-slow                           real models and long suites, then parity under the oldest transformers
#   make check                               format, lint, types, import order, rendered documents; runs no tests
#   make render                              tables in the documents, from code and benchmarks/results

PYTHON ?= python3
PAIR ?= smollm2
# May carry pip options, for another build.
TORCH ?= torch==2.13.0
WORKERS ?= 2
OLDEST ?= 5.17.0

VENV := .venv
OLD_VENV := .venv-$(OLDEST)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
CODE := hf_specdec tests examples benchmarks
FAST := not slow and not real and not gpu
# One thread per worker: two workers on two cores, and sums that do not depend on the number of threads.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q

export TOKENIZERS_PARALLELISM := false

.PHONY: help demo models test test-slow test-oldest test-gpu check render format clean
help:
	@sed -n 's/^#   //p' Makefile

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hf_specdec needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + ". Set PYTHON=python3.11.")'
	@test -x $(PY) || { echo "Creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing $(firstword $(TORCH))"
	@$(PIP) install $(TORCH)
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "Installing hf_specdec and what the demo needs"
	@$(PIP) install -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "Installing hf_specdec and what the tests need"
	@$(PIP) install -c constraints.txt -e '.[dev,bitsandbytes,report]'
	@touch $@

# The oldest supported transformers, with the Hub client it asks for, in front of the environment's own.
$(OLD_VENV)/.done: $(VENV)/.dev
	@echo "Installing transformers $(OLDEST) beside it"
	@rm -rf $(OLD_VENV)
	@$(PIP) install --no-deps --target $(OLD_VENV) transformers==$(OLDEST) 'huggingface_hub<2' 'httpx<1' 'httpcore<2'
	@touch $@

demo: $(VENV)/.demo
	@$(VENV)/bin/specdec demo --pair $(PAIR)

models: $(VENV)/.demo
	@$(PY) examples/fetch_models.py --pair $(PAIR)

test: $(VENV)/.dev
	$(PYTEST) -n $(WORKERS) -m "$(FAST)"

test-slow: $(VENV)/.dev
	@$(PY) examples/fetch_models.py smollm2-135m smol-draft
	$(PYTEST) -n $(WORKERS) -m "(slow or real) and not gpu"
	@$(MAKE) --no-print-directory test-oldest

test-oldest: $(OLD_VENV)/.done
	PYTHONPATH=$(OLD_VENV) $(PYTEST) -n $(WORKERS) -m "$(FAST)" tests/parity tests/integration

test-gpu: $(VENV)/.dev
	$(PYTEST) -m gpu

check: $(VENV)/.dev
	$(VENV)/bin/ruff format --check $(CODE)
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports
	$(PY) benchmarks/render.py --check

render: $(VENV)/.dev
	$(PY) benchmarks/render.py

format: $(VENV)/.dev
	$(VENV)/bin/ruff format $(CODE)
	$(VENV)/bin/ruff check --fix $(CODE)

clean:
	rm -rf $(VENV) .venv-* .pytest_cache .ruff_cache .hypothesis .import_linter_cache
