# `make demo` and `make test` need Python >= 3.11 and nothing else.
PYTHON ?= python3
# Test processes; 0 runs in this one.
JOBS ?= 2
ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: help demo docs test test-ci test-slow test-flower test-torch wheels accelerators faults mutants lint check bench clean

help:
	@echo "make demo       pretrain, FedAvg and FedFR on rendered faces; minutes on 2 cores"
	@echo "make docs       this documentation as a site in build/site; fails on a broken link"
	@echo "make test       the fast tests; under ten minutes on 2 cores"
	@echo "make test-ci    those that train whole runs or compile for many devices; as long again"
	@echo "make test-slow  the slow ones, minutes each and hours together; nightly"
	@echo "make test-flower  with Flower's processes, in an environment of their own; minutes"
	@echo "make test-torch  PyTorch modules and bases, in an environment of their own; minutes"
	@echo "make wheels     wheel and sdist in nine empty environments; needs Python 3.11 to 3.13; ten minutes"
	@echo "make accelerators  every system for TPUs and GPUs without one; 8 GB of packages, three hours"
	@echo "make faults     kills, damage and 100,000 damaged inputs; an hour"
	@echo "make mutants    mutmut over the files that differ from main, or ARGS=FILES; ten minutes for a small one"
	@echo "make lint       ruff, and types by basedpyright"
	@echo "make check      lint, test and test-ci, what CI runs"
	@echo "make bench      speed and memory beside peers"
	@echo "make clean      remove $(VENV) and caches; runs/ stays"
	@echo "Settings: PYTHON=$(PYTHON) JOBS=$(JOBS) ARGS=..."

# Built from nothing again whenever what it is built from changes; .ready says what that
# was.
$(READY): requirements.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, %s is %s: make PYTHON=..." % (sys.executable, sys.version.split()[0]))'
	$(PYTHON) -m venv --clear $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@cp requirements.txt $@

demo: $(READY)
	$(RUN) -m fedfr_jax demo --workdir=runs/demo --overwrite $(ARGS)

docs: $(READY)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict $(ARGS)

test: $(READY)
	$(RUN) -m pytest -m "not slow and not ci" -n $(JOBS) --dist=worksteal $(ARGS)

test-ci: $(READY)
	$(RUN) -m pytest -m "ci and not slow" -n $(JOBS) --dist=worksteal $(ARGS)

test-slow: $(READY)
	$(RUN) -m pytest -m slow $(ARGS)

# Flower's pins differ from those of requirements.txt.
test-flower:
	test -d $(VENV)-flower || $(PYTHON) -m venv $(VENV)-flower
	$(VENV)-flower/bin/python -m pip install --quiet --disable-pip-version-check -e ".[flower,privacy,test]"
	FLWR_TELEMETRY_ENABLED=0 $(VENV)-flower/bin/python -m pytest tests/test_flower.py $(ARGS)

# PyTorch is larger than all of requirements.txt; torchvision, timm and transformers build
# the originals of the bases, without a download.
test-torch:
	test -d $(VENV)-torch || $(PYTHON) -m venv $(VENV)-torch
	$(VENV)-torch/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -e ".[torch]" torchvision timm transformers peft
	$(VENV)-torch/bin/python -m pytest tests/models/test_torch_module.py tests/models/test_bases.py tests/models/test_peft_folder.py $(ARGS)

# uv resolves the lowest dependencies too, which pip does not.
wheels: $(READY)
	$(RUN) -m pip install --quiet --disable-pip-version-check uv
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(RUN) -m tests.wheels $(ARGS)

accelerators: $(READY)
	$(RUN) experiments/benchmarks/accelerators.py $(ARGS)

faults: $(READY)
	$(RUN) -m tests.faults $(ARGS)

mutants: $(READY)
	$(RUN) experiments/benchmarks/mutants.py $(ARGS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m basedpyright --pythonpath $(RUN) --level error

check: lint test test-ci

bench: $(READY)
	$(RUN) experiments/benchmarks/run.py $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .ruff_cache build mutants dist *.egg-info
	find fedfr_jax tests configs experiments -name __pycache__ -type d -prune -exec rm -rf {} +
