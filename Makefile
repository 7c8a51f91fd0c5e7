PYTHON ?= python3.11
# make test TORCH=torch==2.14.1 tests with another PyTorch, in an environment of its own
DEFAULT_TORCH := torch==2.13.0
TORCH ?= $(DEFAULT_TORCH)
VENV := .venv$(if $(filter-out $(DEFAULT_TORCH),$(TORCH)),-$(subst ==,-,$(TORCH)))
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# Where PyTorch's own CPU builds are; the plain ones bring gigabytes of CUDA libraries. Empty on a machine with a GPU.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)
ARGS ?=
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help venv train test test-quick test-full test-release lint pages site clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

venv: $(STAMP) ## set up the environment with everything pinned

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@url=$(TORCH_INDEX); extra=; \
	if [ -n "$$url" ] && $(BIN)/python -c "import urllib.request as r; r.urlopen('$$url/torch/', timeout=10)" 2>/dev/null; \
	then extra="--extra-index-url $$url"; fi; \
	grep -vE '^(torch|triton|setuptools)==' constraints.txt > $(VENV)/constraints.txt; \
	set -x; $(BIN)/pip install -c $(VENV)/constraints.txt $$extra $(TORCH)
	$(BIN)/pip install -c $(VENV)/constraints.txt -e .[dev] $(TORCH)
	touch $@

train: $(STAMP) ## train the default job; make train ARGS="train.steps=20" overrides options
	$(BIN)/compiler-trainer $(ARGS)

test: $(STAMP) ## run the tests
	$(BIN)/pytest -n $(JOBS) --dist worksteal $(ARGS)

QUICK := tests/test_architecture.py tests/compiler_trainer/config tests/compiler_trainer/cli/test_verbs.py \
  tests/passes/ir tests/passes/ops tests/passes/trace tests/passes/check tests/compiler_trainer/data/test_fitting.py \
  tests/compiler_trainer/training/test_lr_schedule.py tests/compiler_trainer/step/test_fsdp.py

test-quick: $(STAMP) ## run a part in under three minutes: imports, options, verbs, graphs, the verifier, packing, FSDP
	$(BIN)/pytest -n $(JOBS) --dist worksteal $(QUICK) $(ARGS)

test-full: $(STAMP) ## run the tests and the long ones, about two hours on two cores; ARGS="--part 1/4" runs a quarter
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m "not release" $(ARGS)

test-release: $(STAMP) ## run all tests, with every case of the long sweeps; once a release
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m "release or not release" $(ARGS)

lint: $(STAMP) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/mypy

pages: $(STAMP) ## render the pictures and tables of the documentation anew (needs Chromium)
	$(BIN)/python -m tools.reference
	$(BIN)/python -m tools.screens

site: $(STAMP) ## build the documentation as a searchable site in build/site, which needs no server
	$(BIN)/mkdocs build -f tools/site/mkdocs.yml

clean: ## remove environments and caches, not runs/
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
