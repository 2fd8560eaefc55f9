# Kenpo: two commands on a fresh machine are `make train` and `make test`; `make help` lists the rest.
#
#   PYTHON=python3.12   the interpreter to build .venv with (3.11 or newer)
#   ARGS="..."          further options for the command behind a target:
#                       make train ARGS="--seed 1 --out runs/seed1"     make test ARGS="-k grpo"

SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup setup-dev train test check format format-check lint types layering slow integration engine hosts mutants hostile docs clean

PY := .venv/bin/python
ARGS ?=
SETUP = PYTHON="$(PYTHON)" scripts/setup.sh

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1@\2/' | column -t -s @

setup:  ## .venv with Kenpo in it (done once)
	@$(SETUP) run

setup-dev:  ## the same with what the tests and the linters need
	@$(SETUP) dev

train: setup  ## the main job: runs/first, resumed if it is unfinished, else runs/first-2
	@$(PY) -m kenpo train --series runs/first $(ARGS)

test: setup-dev  ## the default tests
	@$(PY) -m pytest $(ARGS)

check: format-check lint types layering test  ## what has to pass before a change lands

format: setup-dev  ## write the sources in the house format
	@$(PY) -m ruff format .

format-check: setup-dev
	@$(PY) -m ruff format --check .

lint: setup-dev
	@$(PY) -m ruff check .

types: setup-dev
	@$(PY) -m mypy

layering: setup-dev  ## who may import whom
	@$(PY) -m pytest tests/test_layering.py

slow: setup-dev  ## the long tests
	@$(PY) -m pytest -m slow --timeout 3600 $(ARGS)

integration: setup-dev  ## tests with a real model from the package registry
	@$(PY) -m pytest -m integration --timeout 3600 $(ARGS)

engine: setup-dev  ## tests of --engine vllm on a real server, in an environment of its own under .peers/ (minutes)
	@scripts/engine.sh $(ARGS)

hosts:  ## Kenpo inside TRL and verl, each in an environment of its own under .peers/ (minutes)
	@scripts/hosts.sh $(ARGS)

hostile: setup-dev  ## the breaker's cases: bad input, signals, locks, disks, verifiers
	@$(PY) -m pytest -m hostile --timeout 600 $(ARGS)

mutants: setup-dev  ## plant each fault of tests/mutants/mutants.toml and see a test fail
	@$(PY) tests/mutants/run.py $(ARGS)

docs: setup-dev  ## write the catalogue's pages; check links, commands and examples of README, docs/ and the sources
	@$(PY) docs/build_pages.py
	@$(PY) -m pytest tests/test_docs.py tests/test_doctests.py tests/test_pages.py $(ARGS)

clean:  ## remove .venv and the caches; runs/ stays
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build
