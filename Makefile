# Everything a person does with this repository: `make help` lists it.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
ROOMS := magics engines backends widgets
SOURCES := rankscope $(ROOMS) notebooks tests tools bench

# The rooms lie at the top of the repository and are mapped into the package by
# an import hook that mypy does not follow: links make the tree it can read,
# and its messages get the true paths back.
TYPING := build/typing
MYPY := MYPYPATH=$(TYPING) $(BIN)/mypy
TRUE_PATHS := sed -E 's|^$(TYPING)/(rankscope/[^/]*:)|\1|; s|^$(TYPING)/rankscope/||'

# IPython, Jupyter and matplotlib all want to write under the home folder.
ifeq ($(shell test -n "$$HOME" -a -d "$$HOME" -a -w "$$HOME" && echo usable),)
export HOME := $(CURDIR)/build/home
endif

# Hundreds of processes of a run import the same modules: each compiled them anew.
unexport PYTHONDONTWRITEBYTECODE

# Four workers for two cores, as tests also wait; PYTEST_ARGS="-n 0" for none, as
# --pdb wants it. Tests of one file share what its fixtures start; those of make check
# start nothing.
WORKERS := -n 4
BY_FILE := $(WORKERS) --dist loadfile --no-loadscope-reorder
BY_TEST := $(WORKERS) --dist worksteal
# With SOAK=1 one run has the long tests too, and begins with them: two runs would both
# start and collect, and each have workers without work at its end.
SOAK :=
WHICH := $(if $(SOAK),,-m "not soak")
LAST_FAILED := --last-failed --last-failed-no-failures none -n 0 -v
ONCE_MORE := == once more, one at a time: the tests that failed. What passes now is flaky; mend it.

# Those of PyTorch, in the environment that has it; TORCH=2.14.1 for one with another
# release of it. A record of failures of its own.
TORCH :=
OTHER_TORCH := $(TORCH:%=-%)
TORCH_TESTS := .venv-torch$(OTHER_TORCH)/bin/python -m pytest \
    -o cache_dir=build/pytest-torch$(OTHER_TORCH) tests/with_torch

# What needs namespaces of the network, with a real sshd and the daemons of a real Slurm.
CLUSTER_TESTS := $(addprefix tests/engines/cluster/test_,\
    ssh_hosts.py slurm.py partition.py two_hosts_ucx.py) tests/notebooks/test_several_hosts.py

.PHONY: help demo lab check collect test test-torch test-cluster test-pythons retest retest-torch soak soak-torch lint style contracts docs \
    pictures notebooks types format bench clean distclean environment other-environments torch-environment typing

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: environment ## run the quickstart notebook for real and print what each rank got
	@$(BIN)/python -m tools.demo

NOTEBOOK_DIR := lab

lab: environment ## open copies of the notebooks, in lab/ (NOTEBOOK_DIR=.., LAB_ARGS="--no-browser --port 8888")
	@$(BIN)/python -m tools.kernelspec build/jupyter
	@$(BIN)/python -m tools.lab
	@JUPYTER_PATH="$(CURDIR)/build/jupyter" $(BIN)/python -m jupyterlab --notebook-dir=$(NOTEBOOK_DIR) \
	    $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS)

check: lint ## all of lint, and the tests that start no process: in a minute (PYTEST_ARGS)
	@$(BIN)/python -m pytest --no-processes $(BY_TEST) $(PYTEST_ARGS)

collect: environment ## compile the tests, once for all workers of make test
	@mkdir -p build
	@$(BIN)/python -m pytest --collect-only -qq >build/collected || { cat build/collected; exit 1; }

test: lint ## linter, type checker and tests (PYTEST_ARGS="-k tcp" for some, SOAK=1 for make soak too)
	@$(BIN)/python -m pytest $(WHICH) $(BY_FILE) $(PYTEST_ARGS)

retest: environment ## run what failed last once more, a test at a time
	@echo "$(ONCE_MORE)"
	@$(BIN)/python -m pytest $(LAST_FAILED) $(PYTEST_ARGS)

test-torch: torch-environment ## the tests with PyTorch, in .venv-torch, made at first use (PYTEST_ARGS, TORCH=2.14.1)
	@$(TORCH_TESTS) $(WHICH) $(BY_FILE) $(PYTEST_ARGS)

soak-torch: torch-environment ## the long tests with PyTorch: hangs in a row
	@$(TORCH_TESTS) -m soak $(BY_FILE) $(PYTEST_ARGS)

retest-torch: torch-environment ## make retest for make test-torch
	@echo "$(ONCE_MORE)"
	@$(TORCH_TESTS) $(LAST_FAILED) $(PYTEST_ARGS)

soak: environment ## the long tests: faults in a row, leaks, two hosts, Slurm, other front ends, MPICH
	@$(BIN)/python -m pytest -m soak $(BY_FILE) $(PYTEST_ARGS)

test-cluster: environment ## those of make soak on several hosts: ssh, Slurm, cuts, in network namespaces
	@$(BIN)/python -m pytest $(CLUSTER_TESTS) $(BY_FILE) $(PYTEST_ARGS)

test-pythons: environment ## install the wheel for every other Python found; run demo and some tests there
	@$(BIN)/python -m tools.other_pythons $(PYTHONS)

lint: style contracts types ## linter, formatter (check only), import contracts, type checker

style: environment
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)

# From the tree of links, which it would not see from here.
contracts: environment typing
	@cd $(TYPING) && $(CURDIR)/$(BIN)/lint-imports --config $(CURDIR)/pyproject.toml --no-cache --no-logo

types: environment typing
	@$(MYPY) -p rankscope | $(TRUE_PATHS)
	@$(MYPY) $(wildcard tests tools bench) | $(TRUE_PATHS)

format: environment ## format the code and mend what the linter can mend
	@$(BIN)/ruff check --fix $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

docs: environment ## build the site in build/docs/html; every warning is an error
	@$(BIN)/python -m tools.site

pictures: environment ## take the pictures of the docs anew, in Chromium
	@$(BIN)/python -m tools.pictures

notebooks: environment ## execute the notebooks, keep their outputs for the docs (NOTEBOOKS="05 07")
	@$(BIN)/python -m tools.notebook_outputs $(NOTEBOOKS)

bench: environment ## measure against bare gloo, torch.distributed and ipyparallel (BENCH_ARGS=--quick)
	@$(BIN)/python -m bench $(BENCH_ARGS)

other-environments: environment ## make .venv-torch, -mpich, -notebook and -nccl, for bench and tests
	@$(BIN)/python -m tools.other_environments

torch-environment: environment
	@$(BIN)/python -m tools.other_environments torch$(TORCH:%===%)

clean: ## remove caches and everything built or written by the targets above
	rm -rf build dist .artifacts .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf notebooks/dummy_backend/build notebooks/dummy_backend/*.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove the environments too
	rm -rf $(VENV) .venv-torch* .venv-mpich .venv-notebook .venv-nccl rankscope.egg-info

environment:
	@mkdir -p "$$HOME"
	@tools/environment.sh

typing:
	@mkdir -p $(TYPING)/rankscope
	@find $(TYPING) -xtype l -delete
	@ln -sfn $(addprefix ../../../,$(ROOMS) $(wildcard rankscope/*.py rankscope/py.typed)) $(TYPING)/rankscope/
