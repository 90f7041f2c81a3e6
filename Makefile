# Needs make, a POSIX shell, and Python 3.11 or newer; scripts/setup.sh sees to the rest.

# The interpreter .venv is made with; empty: python3, or the first suitable python3.x.
PYTHON ?=
# Further arguments, as in: make test ARGS="-k matrix"; make bench ARGS=--quick
ARGS ?=
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint type format bench build clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv and install the pinned packages; the other targets do it by themselves
	@PYTHON='$(PYTHON)' sh scripts/setup.sh

demo: setup ## seal and extend a real model's layer: error, speed, memory
	$(BIN)/o1core demo

test: lint type ## ruff, mypy and pytest
	$(BIN)/python -m pytest $(ARGS)

lint: setup ## ruff: rules and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

type: setup ## mypy
	$(BIN)/mypy

format: setup ## let ruff format and fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: setup ## speed and memory beside a compiled loop, exact attention and the reference
	$(BIN)/python benchmarks/bench.py $(ARGS)

build: setup ## wheel and source distribution, in dist/
	$(BIN)/python -m build --no-isolation

clean: ## remove .venv, dist and all caches
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
