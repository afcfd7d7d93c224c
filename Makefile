# `make` prints what there is. Every target sets up what it needs in .venv; a second run is quick.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WHEEL := build/wheel-test
SPARK := build/spark
TORCH27 := build/torch27
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all gpu test-steady test-torch test-mutants simulate stress soak exits chaos fuzz lint docs bench bench-cost wheel-test test-torch27 spark clean types

# Where Python may keep no bytecode every process compiles commlib anew: half of what it takes to import it.
unexport PYTHONDONTWRITEBYTECODE

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## */  make \1\t/' | expand -t 20

# Tests at a time, twice as many as two cores: many wait for processes of their own, or for a deadline. WORKERS=0 runs them in pytest's own process, as for --pdb.
WORKERS ?= 4

demo: $(READY)  ## train a small network on two processes: uncompressed, and with three codecs
	$(BIN)/commlib train --task digits --ranks 2 --comm none --comm onebit --comm topk:ratio=0.01 --comm powersgd:rank=4

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: $(READY)  ## the fast tier of the tests, some minutes; with what ARGS adds: make test ARGS="-k onebit"
	$(PYTEST) -m "not full" $(ARGS)

test-all: $(READY)  ## both tiers of the tests; hypothesis searches anew. What takes longer: test-torch, simulate, stress, soak, exits
	$(PYTEST) -m "not long" --hypothesis-profile=fresh $(ARGS)

test-steady: $(READY)  ## the fast tier ten times while other processes want the cores: is a test ever red by chance?
	$(BIN)/python -m tests.support.steady --workers $(WORKERS) $(ARGS)

gpu: $(READY)  ## all that only a GPU can tell, in some minutes; without one, what can run on the CPU
	$(BIN)/commlib bench gpu $(ARGS)

test-torch: $(READY)  ## PyTorch's own tests of DDP, with every model attached, and of collectives, over zmq
	$(PYTEST) tests/integration/test_torch_suite.py $(ARGS)

test-mutants: $(READY)  ## put faults into the core one by one, and see that the fast tier finds each; ARGS="FILE …"
	$(BIN)/python -m tests.support.mutants $(ARGS)

simulate: $(READY)  ## simulated histories of whole jobs, with faults; ARGS="--seed N --histories N --minutes M"
	$(BIN)/python -m tests.support.simulation $(ARGS)

STRESS := $(patsubst %,tests/%.py,integration/test_replicas integration/test_sparse_ddp integration/test_live_delays \
	commlib/exchange/test_fusion commlib/exchange/test_chunking commlib/exchange/factors/test_factors_stress \
	transports/process_group/test_futures)

stress: $(READY)  ## 200 steps or models whose rounds are late at random, and 50 of every codec over every exchange
	$(PYTEST) -m long $(STRESS) $(ARGS)

soak: $(READY)  ## memory of trainings of 12,000 steps, on every route over Gloo and zmq: a table
	$(BIN)/python -m tests.support.soak 12000 $(ARGS)

exits: $(READY)  ## 100 jobs of each kind that come to the end of their script, or lose a rank: how do they exit? ARGS="ROUTE …"
	$(BIN)/python -m tests.support.clean_exits $(ARGS) 100

chaos: $(READY)  ## 100 trainings whose processes are killed at random moments; ARGS="--runs N --seed S"
	$(BIN)/python -m commlib.bench.chaos --runs 100 $(ARGS)

fuzz: $(READY)  ## a million damaged inputs for all that reads bytes from outside; ARGS="--messages N --seed S"
	$(BIN)/python -m tests.support.fuzz $(ARGS)

lint: $(READY) types  ## ruff check, ruff format --check, mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY) types  ## the documentation as a site, build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html; with search: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

# Where there are no emulated hosts: make bench AT="--ranks 2"
AT ?= --hosts 4 --rate 200mbit
FIGURES := build/bench

bench: $(READY)  ## measure link, codecs, exchanges and training on emulated hosts (AT); some minutes, one page
	$(BIN)/commlib bench link $(AT) --save $(FIGURES)
	$(BIN)/commlib bench codec --save $(FIGURES)
	$(BIN)/commlib bench exchange $(AT) --save $(FIGURES)
	$(BIN)/commlib bench train $(AT) --save $(FIGURES)
	$(BIN)/commlib bench report $(FIGURES)

bench-cost: $(READY)  ## what routes cost a process beyond plain DDP: memory, first steps, attaching, time of cores
	$(BIN)/commlib bench cost --save $(FIGURES) $(ARGS)

# The wheel goes into a venv of its own that borrows the dependencies from .venv but not the editable
# install (Python reads no .pth file of a folder that a .pth file names). The tests are copied away
# from the sources: whatever they import is the wheel's or is not there. Every module is imported; then the fast tests
# run of all that is read at run time (entry points, commands, pages) or meets a user, with few examples of each
# property: what is right is for `make test` to say, what is missing for this.
WHEEL_TESTS := tests/commlib/test_exports.py tests/commlib/cli/test_main.py tests/commlib/codecs/test_registry.py \
	tests/integration/test_third_party.py tests/bench/report/test_report_page.py tests/bench/plan/test_plan_command.py

wheel-test: $(READY)  ## build the wheel, and run fast tests against it, away from the checkout
	@rm -rf $(WHEEL) build/lib && mkdir -p $(WHEEL)
	@echo "building the wheel"
	@$(BIN)/python -m build --wheel --no-isolation --outdir $(WHEEL)/dist . > $(WHEEL).log 2>&1 || { cat $(WHEEL).log; exit 1; }
	@$(BIN)/python -m venv $(WHEEL)/venv
	@$(WHEEL)/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-index $(WHEEL)/dist/*.whl
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		$(BIN)/python -c "$$site" > "$$($(WHEEL)/venv/bin/python -c "$$site")/dependencies.pth"
	@mkdir $(WHEEL)/elsewhere && cp -r pyproject.toml README.md CONTRIBUTING.md docs examples tests $(WHEEL)/elsewhere/
	@cd $(WHEEL)/elsewhere && export PYTHONSAFEPATH=1 && \
		../venv/bin/python -c 'import importlib, pkgutil, sys, commlib; from pathlib import Path; \
		names = [m.name for m in pkgutil.walk_packages(commlib.__path__, "commlib.") if not m.name.endswith("__main__")]; \
		found = [Path(importlib.import_module(n).__file__) for n in names]; \
		stray = [str(p) for p in found if Path(sys.prefix) not in p.parents]; \
		sys.exit(f"not from the wheel: {stray}" if stray else None)' && \
		../venv/bin/commlib doctor && \
		../venv/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not full and not checkout" --hypothesis-profile=few \
		$(WHEEL_TESTS) $(ARGS)

spark: $(SPARK)/.ready  ## train inside Spark (examples/spark_train.py) and look at the results; needs Java
	$(SPARK)/bin/python -m pytest tests/examples/test_spark_train.py $(ARGS)

# A venv of its own, for pyspark is large; it borrows all else from .venv, torch above all, as that of wheel-test does.
$(SPARK)/.ready: $(READY)
	@echo "setting up $(SPARK) (pyspark is a large download the first time)"
	@rm -rf $(SPARK) && $(BIN)/python -m venv $(SPARK)
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		$(BIN)/python -c "$$site" > "$$($(SPARK)/bin/python -c "$$site")/dependencies.pth"
	@$(SPARK)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[spark]'
	@touch $@

# The oldest torch that pyproject.toml promises. What it has is written down, for tests/repository/test_torch_names.py; then a fast part of the suite runs.
# Left out: kernels for GPUs, for its Triton is refused by name (docs/gpu.md), and test_buffers.py, which counts what the pinned torch allocates.
TORCH27_TESTS := $(patsubst %,tests/commlib/%,checkpoint/test_state_dict.py ddp/test_live.py exchange server) \
	$(patsubst %,tests/integration/test_%.py,non_finite peer_lost replicas) tests/compressors \
	$(patsubst %,--ignore=tests/%,compressors/kernels/gpu commlib/exchange/test_buffers.py)

test-torch27: $(TORCH27)/.ready  ## a fast part of the tests under torch 2.7.1; writes tests/repository/torch_2.7.txt anew
	$(TORCH27)/bin/python -m tests.support.torch_names
	$(TORCH27)/bin/python -m pytest -n $(WORKERS) --dist worksteal --hypothesis-profile=few $(TORCH27_TESTS) $(ARGS)

# Without constraints.txt, which pins another torch.
$(TORCH27)/.ready: pyproject.toml
	@echo "setting up $(TORCH27) (torch 2.7.1 is a large download the first time)"
	@rm -rf $(TORCH27) && $(PYTHON) -m venv $(TORCH27)
	@$(TORCH27)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.7.1 -e '.[filters,numba]' tensorboard \
		"pytest>=8" "pytest-timeout>=2.3" "pytest-xdist>=3.6" "hypothesis>=6.100"
	@touch $@

clean:  ## remove what was built, and the caches; .venv stays
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# The package as it is installed, for mypy: see CONTRIBUTING.md.
types:
	@rm -rf build/typed && mkdir -p build/typed/commlib
	@cd build/typed/commlib && ln -s ../../../commlib/* ../../../compressors ../../../transports ../../../bench .

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo "commlib needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1 || true)." >&2; \
		echo "Name another one: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments: apt install python3-venv" >&2; exit 1; }
	@echo "setting up $(VENV) (torch is a large download the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
