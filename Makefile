# make demo: set everything up and show what speculation gains, in four minutes; with a small model
# FLAGS=--small.
# make test: set everything up and run the tests of a change, in four minutes on two cores.
# make test-all: these, then the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Errors only: warnings about the index or about pip itself help nobody here.
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 "$(BIN)/python" -m pip install --quiet --quiet
EXTRA := $(if $(filter Darwin,$(shell uname -s)),,cpu)
COMMA := ,

.PHONY: demo test test-all test-gpu check audit bench gate gate-gpu chaos soak hostile clean

demo: $(VENV)/.plain
	@"$(BIN)/ssd" demo $(FLAGS)

# The tests of a file stay together, and the files come in the order of tests/conftest.py. Both print
# the slowest tests and the time of all. What pytest makes of the tests' assertions is kept.
PYTEST := PYTHONDONTWRITEBYTECODE= "$(BIN)/python" -m pytest --dist loadfile --no-loadscope-reorder --durations 12
MARKED := processes or model or kernel or wide or real

test: $(VENV)/.pair
	$(PYTEST) --numprocesses 2 -m "not ($(MARKED))"

# What is marked, three at a time, as most wait for processes. HYPOTHESIS_PROFILE=many tries more
# examples of each property.
test-all: test
	$(PYTEST) --numprocesses 3 -m "$(MARKED)"

# What computes with MLX, on a CUDA device; its products in whole float32 there, as on a CPU.
test-gpu: EXTRA := cuda
test-gpu: $(VENV)/.installed
	@"$(BIN)/python" -c 'import mlx.core as mx, sys; sys.exit(0 if mx.cuda.is_available() else "no CUDA device that MLX can use: pip install -e .[dev,cuda]")'
	MLX_ENABLE_TF32=0 "$(BIN)/python" -m pytest tests/services/mlx tests/services/kernels \
		tests/services/sampling tests/services/kv tests/services/engine tests/services/verifier tests/services/drafter

check: $(VENV)/.installed
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy"
	"$(BIN)/pyright" --pythonpath "$(BIN)/python"

# Known holes in the dependencies, where the public list can be reached.
audit: $(VENV)/.installed
	"$(BIN)/python" -m tests.tools.audit

bench: $(VENV)/.pair
	"$(BIN)/ssd" bench

# The speed of this checkout beside another commit's, in turn; FLAGS="--old REV" names it.
gate: $(VENV)/.pair
	"$(BIN)/python" -m tests.tools.gate $(FLAGS)

# The same with target and drafter on a card each.
gate-gpu: EXTRA := cuda
gate-gpu: $(VENV)/.pair
	"$(BIN)/python" -m tests.tools.gate --flags="--target-device cuda:0 --draft-device cuda:1" $(FLAGS)

# The environment of a user, rebuilt when the project's dependencies change; and what tests need.
$(VENV)/.plain: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	@$(PYTHON) -m venv $(VENV)
	@echo "installing the packages into $(VENV)"
	@$(PIP) --upgrade pip
	@$(PIP) --editable ".$(if $(EXTRA),[$(EXTRA)])"
	@touch $@

$(VENV)/.installed: $(VENV)/.plain
	@$(PIP) --editable ".[dev$(addprefix $(COMMA),$(EXTRA))]"
	@touch $@

# The default pair: real weights, converted once per machine.
$(VENV)/.pair: $(VENV)/.installed $(wildcard launch/models/default_drafter/*)
	@"$(BIN)/ssd" models add default
	@touch $@

# Faults against a running stack under load; a long load. FLAGS="--help" shows what can be set.
chaos soak hostile: $(VENV)/.pair
	"$(BIN)/python" -m tests.chaos $@ $(FLAGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
