# `make` alone lists the targets. Everything runs in .venv, made from constraints.txt when it is missing.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help

# PYTHON=3.12 or PYTHON=/path/to/python; without it the first of these that is 3.11 or newer.
CANDIDATES := python3 python3.13 python3.12 python3.11 python3.14
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
ifdef PYTHON
  HOST_PYTHON := $(if $(filter 3.%,$(PYTHON)),python$(PYTHON),$(PYTHON))
else
  HOST_PYTHON = $(or $(shell for p in $(CANDIDATES); do $$p -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$p && break; done),$\
    $(error no Python 3.11 or newer found: install one, or name it with PYTHON=))
endif

BIN := .venv/bin
STAMP := .venv/.installed
JOBS ?= 2
ARGS ?=
WHEELS := $(if $(WHEELHOUSE),--wheelhouse '$(WHEELHOUSE)')

.PHONY: help env lock wheelhouse model doctor lab test unit nbtest lint fix cuda sanitize emulate fixtures report \
  compare baseline clean

help: ## this list
	@echo 'make report   measure this host and write its page;  make test   check the suite itself'
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'Variables: PYTHON=3.12 or a path, WHEELHOUSE=dir (install without a network), ARGS="..." (passed on), JOBS=2'
	@echo 'make itself ends with 2 whatever failed and prints the exit code of the command: "Error 5" is no GPU.'

env: $(STAMP) ## .venv with everything in it

$(STAMP): constraints.txt pyproject.toml scripts/make_env.py
	$(HOST_PYTHON) scripts/make_env.py $(WHEELS)
	@touch $@

lock: ## pin again; PYTHONS="python3.11 python3.12 python3.13" and ARGS=--upgrade
	$(HOST_PYTHON) scripts/lock.py $(ARGS) $(or $(PYTHONS),python3.11 python3.12 python3.13)

wheelhouse: ## wheels for a host without a network: PYTHON=3.12 [DIR=wheelhouse] [HAVE=freeze.txt] [TORCH=1]
	$(or $(shell python3 -c '$(NEW_ENOUGH)' 2>/dev/null && echo python3),$(HOST_PYTHON)) scripts/wheelhouse.py \
	  --python '$(or $(PYTHON),$(shell $(HOST_PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'))' \
	  $(if $(DIR),--dir '$(DIR)') $(if $(HAVE),--have '$(HAVE)') $(if $(TORCH),--torch) $(if $(MODEL),--model) $(ARGS)

model: $(STAMP) ## add the language model that fixtures/sources was captured from
	$(HOST_PYTHON) scripts/make_env.py --model

doctor: ## say what works on this machine and what to do about the rest
	@$(if $(wildcard $(STAMP)),$(BIN)/python,$(HOST_PYTHON)) -m kdtree doctor $(ARGS)

lab: $(STAMP) ## JupyterLab on notebooks/
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS) notebooks

report: $(STAMP) ## run the notebooks on this host and write reports/<host>/<run>/index.html
	$(BIN)/python -m kdtree report $(ARGS)

compare: $(STAMP) ## set two runs side by side: A=host[/run] B=host[/run]
	$(BIN)/python -m kdtree compare $(A) $(B) $(ARGS)

baseline: $(STAMP) ## check a run against accepted times: RUN=host[/run]; ACTION=store accepts them
	$(BIN)/python -m kdtree baseline $(or $(ACTION),check) $(RUN) $(ARGS)

fixtures: $(STAMP) ## make the test cases in fixtures/ again
	$(BIN)/python -m kdtree fixtures $(ARGS)

test: $(STAMP) ## lint, unit tests, notebooks: what has to pass before a commit
	@code=0; for part in lint unit nbtest; do $(MAKE) --no-print-directory $$part || code=$$?; done; exit $$code

unit: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

# Cells tagged nbval-check-output print exact text; of the others it counts that they run. A notebook's cells need
# one kernel, hence loadscope.
nbtest: $(STAMP) ## run the committed notebooks and compare the outputs that are tagged for it
	$(BIN)/python -m pytest -n $(JOBS) --dist loadscope --nbval-lax --nbval-current-env --nbval-cell-timeout 300 \
	  -p no:cacheprovider notebooks

lint: $(STAMP) ## style of code and notebooks
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python scripts/check_notebooks.py

fix: $(STAMP) ## what lint can mend by itself
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/python scripts/check_notebooks.py --fix

cuda: ## the CUDA C++ library, if this version has one
	@if [ -x cuda/build.sh ]; then cuda/build.sh $(ARGS); else echo 'cuda: nothing to build in this version'; fi

sanitize: $(STAMP) ## every kernel under memcheck, racecheck and synccheck; needs a GPU and compute-sanitizer
	$(BIN)/python -m kdtree.measure.sanitize $(ARGS)

emulate: $(STAMP) ## the tensor-core kernels on this CPU: right, and free of races?
	$(BIN)/python -m kdtree.emulator $(ARGS)

clean: ## remove .venv, caches and build products; reports stay
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
