# install: the environment in .venv · demo: both ends on this machine · test: what a change must pass
# test-engines: the engines that need gigabytes more · docs: the documentation site, in site/

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# llama.cpp without AMX: GCC before 14 miscompiles it (GCC PR 114098), and passes crash.
ifeq ($(shell uname -m),x86_64)
NO_AMX := -mno-amx-tile -mno-amx-int8 -mno-amx-bf16
export CMAKE_ARGS ?= -DCMAKE_C_FLAGS='$(NO_AMX)' -DCMAKE_CXX_FLAGS='$(NO_AMX)'
endif

.PHONY: install demo test test-fast test-engines lint format bench models docs diagrams clean

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing; llama.cpp is compiled once, which takes some minutes."
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[llama,bench,dev]'
	@touch $@

models: install
	$(BIN)/e2sci models fetch qwen2.5-coder

demo: models
	$(BIN)/e2sci demo

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-fast: install
	$(BIN)/python -m pytest -m "not models"

test: lint models
	$(BIN)/python -m pytest

# The engines that need gigabytes more: torch here, a vLLM server in an environment of its own. And
# the evaluation harness.
test-engines: models
	$(BIN)/python -m pip install --quiet -e '.[transformers,gateway,harness]'
	E2SCI_ENGINES=1 $(BIN)/python -m pytest -m engines

bench: models
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/acceptance.py
	$(BIN)/python benchmarks/strict.py
	$(BIN)/python benchmarks/wall_clock.py

# A warning is an error; `make test` builds it too (tests/test_site.py).
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The pictures of the pages' mermaid diagrams, which are kept: only when a diagram has changed.
diagrams: install
	$(BIN)/python -m pip install --quiet 'mermaidx>=0.10,<1'
	$(BIN)/python docs/_hooks/diagrams.py

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
