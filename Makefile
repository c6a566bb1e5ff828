# SPDX-License-Identifier: Apache-2.0
# What one does with a checkout; `make help` lists it. PYTHON names the interpreter of a new venv.

PYTHON ?= python3
BIN := .venv/bin
PROTOS := .venv-protos/bin
PYTEST_ARGS ?=
GUARD ?=
FUZZ_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv demo test fuzz guards chaos soak bench bench-quick lint format protos check clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 13

venv: ## create .venv with the project and a vLLM in it (once: 4 GB, some minutes)
	@$(PYTHON) tools/install.py

demo: venv ## two engines, two daemons and a router on this machine, compared with a plain engine
	$(BIN)/kvpushctl demo

test: venv ## the default tests; PYTEST_ARGS="tests/core -x" narrows them
	$(BIN)/python -m pytest $(PYTEST_ARGS)

guards: venv ## take each guard out of a copy and require its tests to fail; GUARD=name for one
	$(BIN)/python -m testing.guards $(GUARD)

fuzz: venv ## nonsense at every listener, other things each time: about ten minutes; FUZZ_ARGS="-k peer" narrows it
	$(BIN)/python -m pytest tests/fuzz -m "long or not long" $(FUZZ_ARGS)

bench: venv ## kvpushd beside vLLM's own connectors, in about 35 minutes (root): benchmarks/results/latest/
	$(BIN)/python -m benchmarks

bench-quick: venv ## the same in about 9 minutes, with fewer rounds and cases
	$(BIN)/python -m benchmarks --quick

chaos: venv ## processes killed, stopped, cut off in each phase (root): SCENARIOS=n SEED=n; chaos-results/
	$(BIN)/python -m testing.chaos $(if $(SCENARIOS),--scenarios $(SCENARIOS)) $(if $(SEED),--seed $(SEED))

soak: venv ## 30 minutes of mixed load, MINUTES=n for less: nothing wrong, nothing grown; soak-results/
	$(BIN)/python -m testing.soak $(if $(MINUTES),--minutes $(MINUTES))

lint: venv .venv-protos/installed ## style, types, import rules, protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PROTOS)/buf lint protos
	$(PROTOS)/python tools/protos.py --check

format: venv ## mend what can be mended by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: .venv-protos/installed ## generate client/kvpush_client/_proto from protos/
	$(PROTOS)/python tools/protos.py

check: lint ## what CI runs: lint, then test
	@$(MAKE) --no-print-directory test

clean: ## remove what was built here, the venvs too
	rm -rf .venv .venv-protos .venv-mooncake build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv-protos/installed: tools/protos.txt
	$(PYTHON) -m venv .venv-protos
	$(PROTOS)/python -m pip install --quiet --requirement tools/protos.txt
	@touch $@
