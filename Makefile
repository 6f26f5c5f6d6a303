# make serve: set up and run the server.  make test: set up and pass the tests.  make check: format, lint, types, tests.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin

.PHONY: install serve test check format lint types clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@

install: $(VENV)/.installed

serve: install
	$(BIN)/minisgl serve

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff format --check .
	$(MAKE) lint types test

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: install
	$(BIN)/ruff check .

types: install
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
