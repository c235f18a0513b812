# `make demo` and `make test` are all a fresh machine needs: Python 3.11 or newer, and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ckptmap-ready

export OMP_NUM_THREADS ?= 1
# Empty: bytecode is kept. Else each test process, and each that a test starts, compiles all modules anew.
export PYTHONDONTWRITEBYTECODE :=
# Test processes side by side; each test file stays with one of them, the longest first.
WORKERS ?= 2
# How many mutants the torture makes, and the seed that its cases are drawn by.
N ?= 10000
SEED ?= 1
TORTURE := torture
# Where `make gpu` writes, and what of it: names of steps with commas between them; empty for all.
OUT ?= benchmarks/results
STEPS ?=
SIZE ?= full
DEVICE ?= cuda

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-fast torture lint docs bench gpu format clean

help:  ## What there is to make
	@sed -n 's/^\([a-z-]*\):.*## /  make \1  \t/p' $(MAKEFILE_LIST)

demo: $(STAMP)  ## A Llama under FSDP1 on 4 ranks becomes NF4 under FSDP2 on 2
	@$(BIN)/python examples/demo.py

# Side by side: tests wait for a tenth of their time, in which lint and documentation are done.
test: $(STAMP)  ## Lint, types, the documentation, and every test
	@$(MAKE) --no-print-directory --jobs=3 lint docs test-all

test-all: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-fast: $(STAMP)  ## The quick tests, which start no ranks: about 2 minutes on 2 cores
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --hypothesis-profile=fast -m "not ranks and not slow"

torture: $(STAMP)  ## Attack the promise: N=10000 damaged sources, failing calls, power cuts, flipped bits
	@mkdir -p $(TORTURE)
	@for kind in mutants:$(N) flips:$$(($(N)/5)) faults:$$(($(N)/5)) power:$$(($(N)/5)); do \
	  $(BIN)/python -m tests.torture $${kind%%:*} --seed $(SEED) -n $${kind#*:} --corpus $(TORTURE)/corpus \
	    --findings $(TORTURE)/$${kind%%:*}.json 2> $(TORTURE)/stderr || failed=1; \
	done; test -z "$$failed"

lint: $(STAMP)  ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)  ## The documentation, as HTML in docs/_build/html; a warning is an error
	$(BIN)/python docs/generate.py --check
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs docs/_build/html

format: $(STAMP)  ## Apply the style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## Measure against cp and against other tools
	$(BIN)/python benchmarks/run.py

# A Python whose torch has CUDA is used as it is: a machine with a GPU is seldom ours to install on.
gpu:  ## On a machine with a GPU: is ckptmap right there, and how fast is it? At most 9 minutes
	@python=$(BIN)/python; \
	if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2> /dev/null; then python=$(PYTHON); \
	else $(MAKE) --no-print-directory $(STAMP) || exit; fi; \
	$$python -m benchmarks.gpu_session --out $(OUT) --size $(SIZE) --device $(DEVICE) --steps "$(STEPS)"

clean:  ## Remove what was made, the environment too
	rm -rf $(VENV) build dist demo torture docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch first and pinned: what follows finds it there and asks for no other build.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
