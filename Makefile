# make demo      build the default engines and see what they are for; PROMPT=".." asks something else
# make test      everything that CI runs
# make export    build engines; RECIPE=engines/NAME.toml picks others than the default
# make measure   print the figures that the README shows
# make bench     measure against other libraries, to bench.html and bench.json; PROMPTS="FILE .." picks others
# make lint, make clean

PYTHON ?= python3
RECIPE ?= engines/smollm2.toml

VENV := .venv
BIN := $(VENV)/bin
ENGINES = $(RECIPE:.toml=)
SOURCES := runtime export tests
PROMPTS ?= default

.PHONY: demo test export lint measure bench clean

demo: export
	$(BIN)/forerun demo $(ENGINES) $(if $(PROMPT),-- "$(PROMPT)")

# A process a core; the tests of a file stay together, and share its fixtures.
test: lint export
	$(BIN)/pytest --numprocesses auto --dist loadfile

export: $(VENV)/installed
	$(BIN)/forerun export $(RECIPE) --out $(ENGINES)

lint: $(VENV)/installed
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

measure: export
	$(BIN)/python -m forerun_export.measure $(ENGINES)

bench: export
	$(BIN)/forerun bench $(ENGINES) $(PROMPTS:%=--prompts %) --max-new-tokens 32 --sweep 0,1,2,4 \
		--json bench.json --plot bench.html

# torch comes first and pinned: a looser requirement would bring a CUDA build of several gigabytes.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[export,bench,dev]'
	touch $@

# Engines that were built stay: they are the user's. engines/NAME can be removed by hand.
clean:
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +
