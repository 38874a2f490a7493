# make demo      build the default engines and watch them decode
# make test      everything that CI runs
# make export    build engines; RECIPE=engines/NAME.toml picks others than the default
# make measure   print the figures that the README shows
# make lint, make clean

PYTHON ?= python3
RECIPE ?= engines/smollm2.toml
PROMPT ?= Explain in three sentences why the sky is blue.

VENV := .venv
BIN := $(VENV)/bin
ENGINES = $(RECIPE:.toml=)
SOURCES := runtime export tests

.PHONY: demo test export lint measure clean

demo: export
	$(BIN)/forerun generate $(ENGINES) "$(PROMPT)" --trace --max-new-tokens 96

test: lint export
	$(BIN)/pytest

export: $(VENV)/installed
	$(BIN)/forerun export $(RECIPE) --out $(ENGINES)

lint: $(VENV)/installed
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

measure: export
	$(BIN)/python -m forerun_export.measure $(ENGINES)

# torch comes first and pinned: a looser requirement would bring a CUDA build of several gigabytes.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[export,dev]'
	touch $@

# Engines that were built stay: they are the user's. engines/NAME can be removed by hand.
clean:
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +
