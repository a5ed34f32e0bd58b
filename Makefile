# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint types check bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo      ## train a real classifier with 2 workers, show a table and the curves
	PACELINE_PROGRESS=1 $(PY) examples/digits.py

test: $(VENV)/.test      ## the whole test suite
	$(PY) -m pytest --numprocesses=2 --dist=loadgroup

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.lint $(VENV)/.test
	$(VENV)/bin/mypy

check: lint types test   ## what CI runs

bench: $(VENV)/.bench    ## us beside the peers, in one run, as ratios
	$(PY) -m benchmarks

clean:
	rm -rf $(VENV) demo_results

$(PY):
	$(PYTHON) -m venv $(VENV)

# torch is named so that pip takes the pinned build before anything else can ask for another.
$(VENV)/.demo: $(PY) pyproject.toml constraints.txt
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --editable '.[demo]'
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP_INSTALL) --editable '.[test]'
	touch $@

$(VENV)/.lint: $(PY) pyproject.toml constraints.txt
	$(PIP_INSTALL) --editable '.[lint]'
	touch $@

$(VENV)/.bench: $(VENV)/.demo
	$(PIP_INSTALL) --editable '.[bench]'
# It asks for torchvision, which it does not need to read, and which breaks with a torch of another build.
	$(PIP_INSTALL) --no-deps litdata
	touch $@
