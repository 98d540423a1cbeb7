# make lab    make .venv where needed and open JupyterLab on the quickstart
# make test   everything that checks the project: lint, types, unit tests, other ipykernels, notebooks, browser
# make gpu    the core checks on CUDA; needs only torch, numpy and pytest in $(PYTHON)
# make bench  what a session costs a training step, on this machine
# make docs   the API reference, from the docstrings, into build/docs
# make messages  renew the catalogues of texts from the sources; translations are kept
SHELL := bash
PYTHON ?= python3
LAB_ARGS ?=
TEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --no-compile -c constraints.txt
# One numerical thread: the tests' tensors are small, and the workers and the browser share the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TEST_ARGS)

.DEFAULT_GOAL := help
.PHONY: help lab test static lint types unit kernels notebooks browser browser-needs gpu bench messages lessons results docs freeze clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# --- environment -----------------------------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("amp_widgets needs Python 3.11 or newer; $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.11 ..." % v)'
	$(PYTHON) -m venv $(VENV)

# Both stamps also stand for the editable install, so they are renewed when the dependencies or the pins change.
$(VENV)/.lab: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing the tested versions into $(VENV); the first time takes some minutes"
	$(INSTALL) --editable '.[lab]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing the tested versions into $(VENV); the first time takes some minutes"
	@$(INSTALL) --editable '.[lab,dev,models]' || { echo "the models of other packages are not there: their tests are skipped"; \
	    $(INSTALL) --editable '.[lab,dev]'; }
	@touch $@ $(VENV)/.lab

$(VENV)/.docs: $(VENV)/.lab
	$(INSTALL) --editable '.[docs]'
	@touch $@

# One environment for each of the other ipykernels: tests/kernels.txt, and the tested versions of what these need.
KERNEL_VENVS := .venv-kernels
KERNELS ?= 6.31.0 7.0.1
.PRECIOUS: $(KERNEL_VENVS)/%/.ready
$(KERNEL_VENVS)/%/.ready: tests/kernels.txt constraints.txt | $(VENV)/.dev
	@echo "installing ipykernel $* into $(@D)"
	@rm -rf $(@D)
	@$(BIN)/python -m venv --without-pip $(@D)
	@grep -v '^ipykernel==' constraints.txt > $(@D)/constraints.txt
	@$(BIN)/python -m pip --python $(@D)/bin/python install -qq --disable-pip-version-check --no-input --no-compile \
	    -c $(@D)/constraints.txt -r tests/kernels.txt ipykernel==$*
	@touch $@

lab: $(VENV)/.lab
	$(BIN)/python -m jupyterlab notebooks/01_quickstart.ipynb $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS)

# --- checks ----------------------------------------------------------------------------------------------------------

# Every stage runs, also after one that failed, and the last line says which failed.
# What takes one core, or waits, is done beside something else that does: installing, types, and the other kernels.
STAGES := static unit notebooks browser
test:
	@$(MAKE) --no-print-directory -j 2 $(VENV)/.dev browser-needs
	@failed=; \
	for stage in $(STAGES); do \
	    printf '\n=== %s\n' $$stage; start=$$SECONDS; \
	    $(MAKE) --no-print-directory $$stage || failed+=" $$stage"; \
	    printf '=== %s: %d s\n' $$stage $$((SECONDS - start)); \
	done; \
	if [ -n "$$failed" ]; then echo "=== FAILED:$$failed"; exit 1; fi; \
	echo "=== all stages passed: $(STAGES)"

static:
	@$(MAKE) --no-print-directory -j 2 -k --output-sync=target types lint $(KERNELS:%=kernel-%)

lint: $(VENV)/.dev
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

# Some wait for processes that they have started: with a third worker the two cores wait less.
unit: $(VENV)/.dev
	$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder --ignore tests/browser --ignore tests/notebooks tests

# Controls in a busy cell on other ipykernels; `unit` has the pinned one. Two at a time, each with its output in one piece.
kernels: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j 2 -k $(KERNELS:%=kernel-%)

kernel-%: $(KERNEL_VENVS)/%/.ready
	@log=$(KERNEL_VENVS)/$*/test.log; \
	AMP_WIDGETS_KERNEL_PYTHON=$(KERNEL_VENVS)/$*/bin/python $(PYTEST) -q --maxfail 3 -p no:cacheprovider tests/test_kernel.py >$$log 2>&1; \
	status=$$?; printf '%s\n' '--- ipykernel $*' "$$(cat $$log)"; exit $$status

notebooks: $(VENV)/.dev
	$(PYTEST) -n 2 tests/notebooks

browser: $(VENV)/.dev browser-needs
	$(PYTEST) -n 2 --dist worksteal tests/browser

# Debian's Chromium, where it is missing and we may install it. Elsewhere the tests say what is missing.
browser-needs:
	@if ! command -v chromium >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing chromium for the browser tests"; export DEBIAN_FRONTEND=noninteractive; log=$$(mktemp); \
	    { apt-get -q update; apt-get -qy install --no-install-recommends chromium fonts-dejavu-core fonts-noto-cjk; } >$$log 2>&1 </dev/null \
	        || { tail -n 5 $$log; echo "chromium could not be installed"; }; \
	    rm -f $$log; \
	fi

# On a machine with a GPU, which may have no .venv, no Jupyter and other versions than the pinned ones: warnings are shown, not errors.
gpu:
	PYTHONPATH=. $(PYTHON) -m pytest -W default tests/gpu $(TEST_ARGS)

bench: $(VENV)/.lab
	@for script in tests/benchmarks/*.py; do echo "=== $$script"; $(BIN)/python $$script || exit 1; done

# --- upkeep ----------------------------------------------------------------------------------------------------------

# The notebooks, from what is in lessons/; and the pages of those that have changed, for which they are run. All of them anew:
# make results RESULTS_ARGS=--all
lessons: $(VENV)/.dev
	$(BIN)/python tools/build_lessons.py
	@$(MAKE) --no-print-directory results

results: $(VENV)/.dev browser-needs
	OMP_NUM_THREADS=1 $(BIN)/python tools/export_lessons.py $(RESULTS_ARGS)

docs: $(VENV)/.docs
	OMP_NUM_THREADS=1 $(BIN)/python tools/build_reference.py

messages: $(VENV)/.dev
	$(BIN)/python tools/messages.py

freeze: $(VENV)/.dev
	{ head -n 1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) $(KERNEL_VENVS) build dist artifacts .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
