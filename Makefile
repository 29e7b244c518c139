# qbench: `make help` lists what can be done.
PYTHON ?= python3
VENV ?= .venv
ORACLES ?= .venv-oracles
PEERS ?= .venv-peers
BIN := $(VENV)/bin
RUN := runs/quickstart

.DEFAULT_GOAL := help
.PHONY: help demo test check fix schema wheel clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# One environment, made again only when what it is made from changes.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("qbench needs Python 3.11 or newer, found " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,oracles]'
	@touch $@

# Another environment for the judges that change torch and transformers when they are imported.
$(ORACLES)/.installed: export/oracle-gptq.txt
	$(PYTHON) -m venv $(ORACLES)
	$(ORACLES)/bin/pip install --quiet --upgrade pip
	$(ORACLES)/bin/pip install --quiet --requirement export/oracle-gptq.txt
	$(ORACLES)/bin/pip install --quiet --no-deps gptqmodel==7.7.0
	@touch $@

# And one for the libraries that a recipe's `with` runs; gptqmodel is in the other.
$(PEERS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --upgrade pip
	$(PEERS)/bin/pip install --quiet --constraint constraints.txt torch
	$(PEERS)/bin/pip install --quiet --constraint constraints.txt '.[peers]'
	@touch $@

demo: $(VENV)/.installed ## install, fetch the default model and its data, run recipes/quickstart.yaml
	$(BIN)/qbench run recipes/quickstart.yaml --out $(RUN)

test: $(VENV)/.installed $(ORACLES)/.installed $(PEERS)/.installed ## run all tests, those judged by other tools included
	QBENCH_ORACLES_PYTHON=$(abspath $(ORACLES))/bin/python \
	$(foreach library,AUTO_ROUND BITSANDBYTES HQQ LLMCOMPRESSOR MODELOPT,QBENCH_PEER_PYTHON_$(library)=$(abspath $(PEERS))/bin/python) \
	$(BIN)/python -m pytest -m "not gpu"

check: $(VENV)/.installed ## lint, format check and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: $(VENV)/.installed ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: $(VENV)/.installed ## write recipes/schema.json from the recipe model
	$(BIN)/python -m qbench.recipe_schema

wheel: $(VENV)/.installed ## build the wheel into dist/
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## remove the environment, builds and runs
	rm -rf $(VENV) $(ORACLES) $(PEERS) dist build runs
