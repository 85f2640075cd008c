# make demo    the main job in an environment of its own, on a fresh machine
# make test    lint, format, types, layers and tests: what CI runs
# make quick   lint, types, layers and the fast tests: for people at work
# make clean   removes what the above made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
ARGS ?=

QUICK := tests/unit/test_config.py tests/unit/test_driver.py tests/unit/test_runtime_slots.py \
	tests/unit/test_runtime_space.py tests/unit/test_nn_saved_weights.py tests/unit/test_nn_need.py \
	tests/unit/test_nn_training.py tests/unit/test_nn_modules.py tests/unit/test_optim_groups.py \
	tests/unit/test_optim_classes.py tests/unit/test_optim_overlap.py tests/unit/test_optim_errors.py \
	tests/property/test_core_*.py tests/meta/test_names.py

.PHONY: demo test run-tests quick lint style types env clean

demo: $(STAMP)
	$(BIN)/tiermem train $(ARGS)

# Tests run in as many processes as there are processors, eight at most.
# The types are checked meanwhile: that takes one processor a minute.
test: style
	$(MAKE) --jobs=2 types run-tests

run-tests: $(STAMP)
	$(BIN)/python -m pytest --numprocesses=logical --maxprocesses=8 --dist=worksteal $(ARGS)

quick: lint
	$(BIN)/python -m pytest --numprocesses=logical --maxprocesses=8 --dist=worksteal $(QUICK) $(ARGS)

lint: style types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(STAMP)
	$(BIN)/mypy

env: $(STAMP)

# torch goes first and exactly: left open, its dependencies weigh gigabytes. Nothing is compiled here:
# of 14,000 files most are never imported, and Python compiles those that are.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -c constraints.txt setuptools
	$(INSTALL) torch==2.13.0
	$(INSTALL) --no-build-isolation -c constraints.txt -e '.[test,hf,lightning,diffusers]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist demo-out *.egg-info .pytest_cache .mypy_cache .ruff_cache \
		.hypothesis .import_linter_cache
