# Each target works from a fresh clone: it makes .venv, installs what it needs, and is quick the second time.
#   make demo PYTHON=python3.12      another interpreter
#   make test ARGS='-k ring -x'      more arguments for pytest
#   make test JOBS=0 ARGS='--pdb'    one test after the other
#   make chaos SEEDS=2000            so many drawn disasters
#   make bench ARGS='--against ../before'    this checkout against another one, with confidence bounds; writes no page

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Processes that run tests at a time: three keep two CPUs busy, because tests also wait. 0 runs all tests in one process,
# where --pdb works.
JOBS ?= 3
# Cases that `make chaos` draws.
SEEDS ?= 2000

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Without build isolation the editable install uses the pinned setuptools, and needs no second download. The warning
# switched off is setuptools' general advice about editable installs.
INSTALL := PYTHONWARNINGS=ignore::UserWarning $(PIP) install --quiet -c constraints.txt --no-build-isolation

.PHONY: help demo demo-remote demo-service test test-ci test-all test-rare test-integrations test-clients test-browser test-ray test-dataloader2-reference chaos bench check format docs targets clean
.DEFAULT_GOAL := help
.NOTPARALLEL: # two pips in one environment would trip over each other

help: ## this text
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-27s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.stamp-demo ## train a small network on handwritten digits, then compare the loaders
	$(BIN)/python docs/examples/digits.py

demo-remote: $(VENV)/.stamp-demo-remote ## train from a store that is far away, be killed half-way, and go on exactly
	$(BIN)/python docs/examples/remote_digits.py $(ARGS)

demo-service: $(VENV)/.stamp-demo-service ## two trainers read from two nodes, and one node is killed half-way
	$(BIN)/python docs/examples/served_digits.py $(ARGS)

PYTEST := $(BIN)/python -m tests --jobs $(JOBS)

test: $(VENV)/.stamp-test ## run the tests, each with every value of its parameters
	$(PYTEST) $(ARGS)

test-ci: $(VENV)/.stamp-test ## run what must pass before a change lands: make test, and all that must detect a planted bug
	$(PYTEST) --ci $(ARGS)

test-all: $(VENV)/.stamp-test ## run them with every pair of values, each on both loops, with all that is drawn, and the thorough ones
	$(PYTEST) --all $(ARGS)

test-rare: $(VENV)/.stamp-test ## run the tests that test-all leaves out: those marked slow or chaos, which take minutes
	$(PYTEST) --all -m 'slow or chaos' $(ARGS)

test-integrations: $(VENV)/.stamp-test-integrations ## run the tests with more frameworks that hold a loader (1 GB)
	$(BIN)/python -m pytest -m clients tests/clients/frameworks $(ARGS)

test-clients: $(VENV)/.stamp-test-clients ## compare libraries' batches inside install() with torch's (2 GB, Python 3.11)
	$(BIN)/python -m pytest -m clients -o faulthandler_timeout=590 tests/clients/libraries $(ARGS)

test-ray: $(VENV)/.stamp-test-ray ## read through RayWorkers in a Ray cluster of processes (300 MB)
	$(BIN)/python -m pytest -o faulthandler_timeout=290 tests/ray_cluster $(ARGS)

test-browser: $(VENV)/.stamp-test-browser ## read a loader's page in a browser; needs Chromium (apt-get install chromium)
	$(BIN)/python -m pytest -m clients tests/clients/browser $(ARGS)

# torchdata 0.9.0 has the last DataLoader2, and asks for an older torch, which it does not need: hence --no-deps.
REFERENCE_VENV := $(VENV)-dataloader2-reference
test-dataloader2-reference: ## compare DataLoader2 with that of torchdata 0.9.0, in an environment of its own (1 GB)
	$(MAKE) VENV=$(REFERENCE_VENV) $(REFERENCE_VENV)/.stamp-test
	$(REFERENCE_VENV)/bin/python -m pip install --quiet --no-deps torchdata==0.9.0
	$(REFERENCE_VENV)/bin/python -m pip install --quiet requests urllib3
	$(REFERENCE_VENV)/bin/python -m pytest --all -m clients tests/dataloader2_reference $(ARGS)

chaos: $(VENV)/.stamp-test ## kill, stop and starve workers at random; writes docs/reference/reliability.md
	$(BIN)/python -m tests.stress --seeds $(SEEDS) --save $(ARGS)

bench: $(VENV)/.stamp-bench ## measure against torch and the peers; writes docs/reference/benchmarks.md; ARGS='--against PATH': against another checkout
	$(BIN)/python -m tests.benchmarks --save $(ARGS)

check: $(VENV)/.stamp-check ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.stamp-check ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.stamp-docs ## build the pages into build/docs, and llms.txt with each as Markdown; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "built build/docs/index.html"

# Each in an empty environment of its own; the long ones are cut short. After it has passed, commit tests/targets.sha256:
# CI makes all targets as long as these files have other digests.
targets: ## make each target in a fresh copy, where only it has installed something
	PYTHON=$(PYTHON) $(PYTHON) -m tests.targets $(ARGS)

clean: ## remove everything that make made
	rm -rf $(VENV) $(REFERENCE_VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# Which extras and dependency groups each target installs. One stamp each: `make demo` must not wait for the linters.
$(VENV)/.stamp-demo: EXTRAS := demo
$(VENV)/.stamp-demo-remote: EXTRAS := demo,http
$(VENV)/.stamp-demo-service: EXTRAS := demo,service
$(VENV)/.stamp-test: EXTRAS := test,demo
$(VENV)/.stamp-test-integrations: EXTRAS := test
$(VENV)/.stamp-test-integrations: GROUP := test-integrations
$(VENV)/.stamp-test-clients: EXTRAS := test
$(VENV)/.stamp-test-clients: GROUP := test-clients
$(VENV)/.stamp-test-browser: EXTRAS := test
$(VENV)/.stamp-test-browser: GROUP := test-browser
$(VENV)/.stamp-test-ray: EXTRAS := test,demo,ray
$(VENV)/.stamp-test-ray: GROUP := test-ray
$(VENV)/.stamp-bench: EXTRAS := demo,http,litdata,ray,s3,service,shards
$(VENV)/.stamp-bench: GROUP := bench
$(VENV)/.stamp-check: EXTRAS := test,demo
$(VENV)/.stamp-check: GROUP := lint
$(VENV)/.stamp-docs: GROUP := docs
# What requires torchvision is installed alone: each torchvision requires one release of torch, and its wheel does not fit
# a CPU build. LitData does not need it; timm does.
$(VENV)/.stamp-test $(VENV)/.stamp-check $(VENV)/.stamp-bench: ALONE := litdata
$(VENV)/.stamp-test-clients: ALONE := litdata timm torchvision

$(VENV)/.stamp-%: $(VENV)/.stamp pyproject.toml constraints.txt
	$(INSTALL) -e '.$(if $(EXTRAS),[$(EXTRAS)])' $(if $(GROUP),--group $(GROUP))
	$(if $(ALONE),$(INSTALL) --no-deps $(ALONE))
	@touch $@

# The interpreter is asked before the environment is made, so that a wrong one leaves nothing behind.
$(VENV)/.stamp: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "asyncloader needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt --upgrade pip setuptools
	@touch $@
