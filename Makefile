# Needs Python 3.11 or later with venv, git and make. Everything else is installed into .venv; for another torch than the pinned
# one (make test TORCH=2.15.0) into an environment of its own beside it; so with make test PYTHON=python3.14 VENV=.venv-3.14.
PINNED := torch==2.13.0
PYTHON ?= python3
TORCH  ?= $(PINNED)
ASKED  := $(if $(filter 2.%,$(TORCH)),torch==$(TORCH),$(TORCH))
VENV   := .venv$(if $(filter-out $(PINNED),$(ASKED)),-$(shell printf %s '$(ASKED)' | tr -cs '[:alnum:].' -))
BIN    := $(VENV)/bin
WORKERS ?= 2
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.DEFAULT_GOAL := help
.PHONY: help venv test quick slow gpu conformance mutants weigh demo lint types docs wheel image release check clean
.NOTPARALLEL:
unexport PYTHONDONTWRITEBYTECODE # hundreds of processes would compile every module anew

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/installed ## install torch, commpress (editable) and its tools into .venv

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit(f"$(PYTHON) is Python {v}, expected 3.11 or later; run: make PYTHON=python3.11 venv")'
	@echo 'installing $(ASKED) into $(VENV) (minutes on the first run)'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) '$(ASKED)'
	@$(PIP) '$(ASKED)' --editable '.[dev]'
	@touch $@

# demo and docs run in the environment above where it exists, else in a small one: .venv-demo, .venv-docs
SMALL = $$(test -e $(VENV)/installed && echo $(VENV) || echo .venv-$@)
small = @test -e $(VENV)/installed || $(MAKE) --silent .venv-$@/installed

.venv-demo/installed: pyproject.toml # with the torch that $(PYTHON) has, if it has one
	@echo 'making .venv-demo: commpress and torch (minutes, if $(PYTHON) has no torch)'
	@$(PYTHON) -m venv $$($(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages) .venv-demo
	@.venv-demo/bin/python -c 'import torch' 2>/dev/null || .venv-demo/bin/python -m pip --disable-pip-version-check install '$(ASKED)'
	@.venv-demo/bin/python -m pip --disable-pip-version-check install --quiet --editable '.[demo]'
	@touch $@

.venv-docs/installed: pyproject.toml # pages are built from text: no torch
	@echo 'making .venv-docs: mkdocs and its parts (a minute)'
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' >.venv-docs/needs
	@.venv-docs/bin/python -m pip --disable-pip-version-check install --quiet --requirement .venv-docs/needs
	@touch $@

test: venv ## run the tests; make test ARGS='-k sign' TORCH=2.15.0 WORKERS=8
	@$(BIN)/pytest --numprocesses=$(WORKERS) --dist=worksteal $(ARGS)

quick: venv ## run the tests that need no other process, few variants of each: a minute or two
	@$(BIN)/pytest --numprocesses=$(WORKERS) --dist=worksteal --quick $(ARGS)

slow: venv ## run the tests that take long; make slow PART=3 the third of eight parts
	@$(BIN)/pytest -m slow $(if $(PART),--part $(PART)) $(ARGS)

gpu: ## all that needs a GPU, nothing is installed; make gpu PART=2, or ARGS=--twin without a GPU
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks gpu --part $(or $(PART),1) $(ARGS)

conformance: venv ## torch's own tests of groups that change; make conformance TORCH=2.15.0 TORCH_SRC=FOLDER of torch's sources
	@$(BIN)/python tests/conformance.py '$(TORCH_SRC)' $(ARGS)

mutants: venv ## put small faults into copies of the package, one at a time: some test must notice each; PART=2 of three
	@$(BIN)/python tests/mutants.py $(if $(PART),--part $(PART)) $(ARGS)

weigh: venv ## tokens and lines of each room, options of each public call; make weigh ARGS=FOLDER beside another checkout
	@$(BIN)/python tests/weigh.py $(ARGS)

demo: ## train a GPT over a slow network in ten ways, each for the same time; make demo ARGS=--quick
	$(small)
	@$(SMALL)/bin/commpress demo $(ARGS)

lint: venv ## ruff: rules and layout
	@$(BIN)/ruff check --quiet && $(BIN)/ruff format --check --quiet

types: venv ## mypy
	@$(BIN)/mypy

docs: ## build the pages of docs/ as a static site into build/site
	$(small)
	@NO_MKDOCS_2_WARNING=1 $(SMALL)/bin/mkdocs build --strict --quiet
	@echo 'built: open $(CURDIR)/build/site/index.html'

wheel: venv ## build the wheel into dist/, try it in an empty environment with its runtime dependencies alone, say its size
	@rm -rf build/wheel dist && $(BIN)/python -m build --outdir dist . >/dev/null
	@$(PYTHON) -m venv build/wheel && build/wheel/bin/python -m pip --disable-pip-version-check install --quiet '$(ASKED)' dist/*.whl
	@cd build/wheel && bin/commpress --help >/dev/null && bin/commpress doctor --only torch
	@du -sh dist/*.whl build/wheel/lib/python*/site-packages/commpress build/wheel/lib/python*/site-packages

image: ## build the Dockerfile's image and run it; without Docker its steps, in a folder; make image ARGS='INDEX= EXTRA=hf'
	@$(PYTHON) tests/image.py $(ARGS)

release: check wheel ## check everything, build dist/ and tag the version that CHANGELOG.md dates; nothing is uploaded
	@$(BIN)/python tests/release.py

check: lint types docs test ## all of the above: what must pass before a change lands

clean: ## remove what builds and tools left behind; virtual environments stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name '.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
