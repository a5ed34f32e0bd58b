# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
HOROVOD := .venv-horovod
PIP_OPTIONS := --quiet --disable-pip-version-check --constraint constraints.txt
PIP_INSTALL := $(PY) -m pip install $(PIP_OPTIONS)

.PHONY: demo test lint types check bench clean horovod test-horovod
.DELETE_ON_ERROR:

demo: $(VENV)/.demo      ## train a real classifier with 2 workers, show a table and the curves
	PACELINE_PROGRESS=1 $(PY) examples/digits.py

test: $(VENV)/.test      ## the whole test suite
	$(PY) -m pytest --numprocesses=2 --dist=loadgroup
	@echo "Not among these: training with Horovod, which has to be compiled. make test-horovod does both."

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.lint $(VENV)/.test
	$(VENV)/bin/mypy

check: lint types test   ## what CI runs

bench: $(VENV)/.bench    ## us beside the peers, in one run, as ratios
	$(PY) -m benchmarks

horovod: $(HOROVOD)/.ready    ## compile Horovod, once for each version of torch, in an environment of its own

test-horovod: horovod    ## train with it for real: the suites that every backend passes, and the example
	$(HOROVOD)/bin/python -m pytest -k horovod tests/contract/test_backends.py tests/contract/test_backend_training.py \
		tests/unit/test_horovod_backend.py tests/unit/test_horovod_rendezvous.py tests/procs/horovod_for_real.py

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

# The wheel fits one torch only, and stays where it is when this project or other pins change. Of another torch it has the
# same version, and pip would leave what is installed.
HOROVOD_WHEEL := $(HOROVOD)/wheels/torch-$(shell sed -n 's/^torch==//p' constraints.txt)

$(HOROVOD)/bin/python:
	$(PYTHON) -m venv $(HOROVOD)

$(HOROVOD_WHEEL)/.built: tools/build_horovod.sh | $(HOROVOD)/bin/python
	$(HOROVOD)/bin/python -m pip install $(PIP_OPTIONS) torch
	tools/build_horovod.sh $(HOROVOD)/bin/python $(HOROVOD_WHEEL)
	touch $@

$(HOROVOD)/.ready: $(HOROVOD_WHEEL)/.built pyproject.toml constraints.txt
	$(HOROVOD)/bin/python -m pip install $(PIP_OPTIONS) torch $(HOROVOD_WHEEL)/horovod-*.whl
	$(HOROVOD)/bin/python -m pip install $(PIP_OPTIONS) --force-reinstall --no-deps $(HOROVOD_WHEEL)/horovod-*.whl
	$(HOROVOD)/bin/python -m pip install $(PIP_OPTIONS) --editable '.[horovod,ray,data]' hypothesis pytest pytest-timeout pytest-xdist
	touch $@
