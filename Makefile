# A fresh machine needs Python 3.11 or newer, make and git; everything else is installed into .venv by the first target.

.DEFAULT_GOAL := help
.PHONY: help train test test-fast lint format types test-py312 test-soak test-gpu-compile bench clean
SHELL := /bin/sh

# $(1): a minor version, $(2): interpreters. Prints the first that works and is Python 3 of that version or newer. A name
# on PATH may be a shim that refuses to run, so each is asked.
define first_python
for python in $(2); do \
    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, $(1)))' >/dev/null 2>&1 && { echo "$$python"; break; }; \
done
endef

PYTHON ?= $(shell $(call first_python,11,python3 python3.13 python3.12 python3.11 python))
PYTHON312 ?= $(shell $(call first_python,12,python3.12 python3.13 python3 \
    $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python $(HOME)/.pyenv/versions/3.13*/bin/python)))

# jax stopped supporting 3.11 at 0.10.2, so there are two sets of pins.
PINS = constraints/$(if $(1),$(shell $(1) -c 'import sys; print("py312" if sys.version_info >= (3, 12) else "py311")')).txt
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 4 ] && n=4; echo $$n)
# What depends most on jax: run with the newer one too, though slow.
NEWER_JAX = tests/test_collectives.py tests/test_trainer.py tests/test_jaxprs.py

PYTEST = .venv/bin/python -m pytest -q -n $(WORKERS) --dist loadgroup

comma := ,

# $(1): interpreter, $(2): environment, $(3): what to install. An environment of another Python version is made anew.
define install
@test -n "$(1)" || { echo "error: no Python 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; }
@test "$$($(2)/bin/python -V 2>/dev/null)" = "$$($(1) -V)" || $(1) -m venv --clear $(2) \
    || { echo "error: $(1) cannot make an environment; on Debian: apt-get install python3-venv" >&2; exit 1; }
@echo "installing $(3) into $(2)"
@$(2)/bin/python -m pip install --quiet --disable-pip-version-check -c $(call PINS,$(1)) -e '$(3)'
@touch $@
endef

help:  ## show the targets
	@sed -n 's/^\([a-z0-9-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | awk -F '\t' '{printf "  make %-12s %s\n", $$1, $$2}'

train: .venv/.run  ## train the example, examples/gpt_tiny.yaml
	.venv/bin/meshtrain train examples/gpt_tiny.yaml

test: .venv/.dev  ## all tests
	$(PYTEST)

test-fast: .venv/.dev  ## the tests that take seconds
	$(PYTEST) -m "not slow"

test-soak: .venv/.dev  ## what takes minutes: 100 starts and stops, 16 processes
	MESHTRAIN_SOAK=1 .venv/bin/python -m pytest -q -s tests/distributed/test_soak.py

lint: .venv/.dev  ## style and likely mistakes
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: .venv/.dev  ## let ruff fix what it can
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

types: .venv/.dev  ## mypy --strict
	.venv/bin/mypy

test-py312:  ## a shorter set once more, with Python 3.12 or newer and its newer jax
	@python="$(PYTHON312)"; \
	if [ -z "$$python" ]; then \
	    echo "####################################################################" >&2; \
	    echo "# NOT TESTED with Python 3.12 or newer: this machine has none.     #" >&2; \
	    echo "# Name one to test it: make test-py312 PYTHON312=/path/to/python   #" >&2; \
	    echo "####################################################################" >&2; \
	else \
	    $(MAKE) --no-print-directory PYTHON312="$$python" .venv312/.dev \
	    && .venv312/bin/python -m pytest -q -n $(WORKERS) --dist loadgroup -m "not slow" \
	    && .venv312/bin/python -m pytest -q -n $(WORKERS) --dist loadgroup -m slow $(NEWER_JAX); \
	fi

test-gpu-compile: .venvplan/.dev  ## compile the step for GPUs that are not there, and count its collectives
	JAX_PLATFORMS=cpu .venvplan/bin/python -m pytest -q tests/plan/test_gpu_compile.py tests/test_paper.py

bench: .venv/.run  ## every script in benchmarks/
	@for script in benchmarks/*.py; do \
	    test -e "$$script" || { echo "no scripts in benchmarks/"; break; }; \
	    echo "== $$script"; .venv/bin/python "$$script" || exit 1; \
	done

clean:  ## remove environments and caches; runs stay
	rm -rf .venv .venv312 .venvplan .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.run: pyproject.toml $(wildcard constraints/*.txt)
	$(call install,$(PYTHON),.venv,.)

.venv/.dev: pyproject.toml $(wildcard constraints/*.txt)
	$(call install,$(PYTHON),.venv,.[dev])
	@touch .venv/.run

.venv312/.dev: pyproject.toml $(wildcard constraints/*.txt)
	$(call install,$(PYTHON312),.venv312,.[dev])

# An environment of its own: with the CUDA plugin installed, jax looks for a GPU wherever JAX_PLATFORMS does not say cpu.
.venvplan/.dev: pyproject.toml $(wildcard constraints/*.txt)
	$(call install,$(PYTHON),.venvplan,.[dev$(comma)plan])
