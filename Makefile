# What one runs in this repository; `make` alone lists it.
# Pass overrides with ARGS, as in: make tune ARGS="card=rtx4060 budget=full"

VENV        := .venv
PY          := $(VENV)/bin/python
CONSTRAINTS := constraints/py311-cpu.txt
PIP         := $(PY) -m pip --disable-pip-version-check install -q

# The first Python of 3.11 or later; expanded only where a virtual environment is made.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# The constraints were resolved on Python 3.11; other versions take what pyproject.toml allows. Run by the shell of a recipe.
CONSTRAIN := $$($(PY) -c 'import sys; print("-c $(CONSTRAINTS)" * (sys.version_info[:2] == (3, 11)))')

# Every tier but gpu and slow, which are asked for by hand: pytest -m gpu
CHROMIUM := $(shell for p in chromium chromium-browser google-chrome; do command -v $$p || true; done)
TIERS    := not gpu and not slow$(if $(CHROMIUM),, and not browser)
# Processes of tests; on two cores two run the Ray, fault and browser tiers in 389 s, one in 553.
# All tiers are one run: tests are collected once, in 10 s, and no process waits for the end of another tier.
JOBS ?= 2

.PHONY: help tune test check lint types tiers memory-check bench-samplers trace-check gpu-check clean
.DEFAULT_GOAL := help

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

tune: $(VENV)/.installed ## set up .venv once, then tune the nli workload; overrides in ARGS="..."
	@$(PY) -m tuning.run workload=nli $(ARGS)

# Types beside the tests: mypy without its cache takes one core for 50 s.
# Empty is off: the tests start a hundred processes, each of which would compile every module anew (69 s for 53).
test: export PYTHONDONTWRITEBYTECODE :=
test: lint ## what check does, and every test that needs no GPU
	@$(MAKE) --no-print-directory -j2 types tiers

check: lint types ## lint, format, import layers and types

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --no-logo

types: $(VENV)/.installed-dev
	$(VENV)/bin/mypy

tiers: $(VENV)/.installed-dev
	$(PY) -m pytest -q -n $(JOBS) --dist worksteal -m "$(TIERS)"

memory-check: $(VENV)/.installed-dev ## predicted peaks of 13 kinds of model against real ones: 3 to 10 minutes
	$(PY) -m benchmarks.memory_check $(ARGS)

bench-samplers: $(VENV)/.installed-dev ## ways of searching as shipped, and Ray Tune with OptunaSearch and ASHA: hours
	$(PY) -m benchmarks.samplers $(ARGS)

# What a card's kernels need is traced otherwise by a build with CUDA, which no CI has: PY=python of such an environment.
trace-check: ## predicted memory under a build of torch with CUDA; no card needed
	$(PY) -m pytest -q -m "not gpu" tests/tuning/memory

# With PY=python3 an environment that is there is used as it is: a machine with a card may have no network.
gpu-check: $(if $(filter $(VENV)/bin/python,$(PY)),$(VENV)/.installed-dev) ## what holds on the card at hand; ARGS="--device cpu": here
	$(PY) -m benchmarks.gpu_check $(ARGS)

clean: ## remove .venv, builds and caches; runs/ stays
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find tuning trainables search_spaces tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is touched last, so a failed or interrupted install is tried again.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(VENV)/pyvenv.cfg
	@echo "Installing into $(VENV): once, about 2 GB, some minutes" >&2
	@$(PIP) $(CONSTRAIN) -e '.[nli]'
	@touch $@

# Dependency groups need a newer pip than Python 3.11 brings.
$(VENV)/.installed-dev: $(VENV)/.installed
	@$(PIP) $(CONSTRAIN) 'pip>=25.1'
	@$(PIP) $(CONSTRAIN) -e '.[workloads,quant,transformers,lightning]' --group dev
	@touch $@

$(VENV)/pyvenv.cfg:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or later found; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
