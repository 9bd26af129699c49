# make demo: set everything up and answer a prompt on the real default pair.
# make test: set everything up and run the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := $(if $(filter Darwin,$(shell uname -s)),dev,dev,cpu)

.PHONY: demo test check audit bench tree chaos soak clean

demo: $(VENV)/.pair
	"$(BIN)/ssd" generate "Explain in three sentences why the sky is blue." --max-tokens 128 --stats

# Two at a time: most tests wait for processes; those of a file stay together.
test: $(VENV)/.pair
	"$(BIN)/python" -m pytest --numprocesses 2 --dist loadfile --durations 12

check: $(VENV)/.installed
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy"
	"$(BIN)/pyright" --pythonpath "$(BIN)/python"

# Known holes in the dependencies, where the public list can be reached.
audit: $(VENV)/.installed
	"$(BIN)/python" -m tests.support.audit

# docs/modules.md: a line for each module, the first of its docstring.
tree:
	$(PYTHON) -m tests.support.module_listing

bench: $(VENV)/.pair
	"$(BIN)/ssd" bench

# The environment, rebuilt when the project's dependencies change.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	"$(BIN)/python" -m pip install --quiet --upgrade pip
	"$(BIN)/python" -m pip install --quiet --editable ".[$(EXTRAS)]"
	touch $@

# The default pair: real weights, converted once per machine.
$(VENV)/.pair: $(VENV)/.installed $(wildcard launch/models/default_drafter/*)
	"$(BIN)/ssd" models add default
	touch $@

# Faults against a running stack under load; a long load. FLAGS="--help" shows what can be set.
chaos soak: $(VENV)/.pair
	"$(BIN)/python" -m tests.chaos $@ $(FLAGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
