# make demo: see the main job run. make test: lint, types, tests. make help: the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# With its progress where somebody looks on.
PIP = $(BIN)/python -m pip install $(if $(shell [ -t 2 ] && echo y),,--quiet) --disable-pip-version-check -c constraints.txt
# Workers for the tests: one a core.
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

# For make soak; an empty seed is drawn, and printed.
KILLS ?= 500
SEED ?=
SHARD ?= 1/1
REMOTE ?= local
# For make fuzz.
SECONDS ?= 60

.DEFAULT_GOAL := help
.PHONY: help demo test test-full fuzz soak lint types format clean

help: ## Show what there is to make.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or later is needed; name it with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/demo-installed: $(VENV)/python pyproject.toml constraints.txt
	@echo "installing what the demo needs into $(VENV), once: about 2.4 GB with torch, some minutes"
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/test-installed: $(VENV)/demo-installed
	$(PIP) -e '.[demo,test]'
	@touch $@

demo: $(VENV)/demo-installed ## Run the main job on this machine, in demo/.
	$(BIN)/syncd demo

test: lint types ## Lint, types and the tests (under ten minutes on two cores).
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not long"

test-full: lint types ## The tests with their long forms.
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

fuzz: $(VENV)/test-installed ## Fuzz each parser for SECONDS, guided by coverage.
	$(PIP) -e '.[fuzz]'
	$(BIN)/python tests/fuzz/fuzz.py --seconds $(SECONDS)

soak: $(VENV)/test-installed ## Kill it KILLS times (SEED=, SHARD=I/N, REMOTE=local or webdav).
	$(BIN)/python tests/soak/soak.py --kills $(KILLS) --seed "$(SEED)" --shard $(SHARD) --remote $(REMOTE)

lint: $(VENV)/test-installed ## Lint and check the format.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/test-installed ## Check the types, strictly.
	$(BIN)/mypy

format: $(VENV)/test-installed ## Format the sources.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove what was built, and the demo's folder.
	rm -rf $(VENV) demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
