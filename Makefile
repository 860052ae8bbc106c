# What README and CI call. `make serve` and `make test` do their own set-up.
PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
INSTALL := $(PIP) --constraint constraints.txt
# What is served with is checked by its hash; HASHES= leaves that out, for an index with files of its own.
HASHES := --require-hashes
REQUIREMENTS := deploy/requirements

.PHONY: install serve test kserve check requirements sbom format bench bench-http demo figures chaos dashboard dashboard-picture explorer-picture image-test

install: $(VENV)/.serve

# The serving part only: no torch.
$(VENV)/.serve: pyproject.toml constraints.txt $(REQUIREMENTS)/service.txt $(REQUIREMENTS)/build.txt
	$(PYTHON) -m venv $(VENV)
ifdef HASHES
	$(PIP) $(HASHES) --requirement $(REQUIREMENTS)/service.txt --requirement $(REQUIREMENTS)/build.txt
	$(PIP) --no-deps --no-build-isolation --editable .
else
	$(INSTALL) --editable .
endif
	$(BIN)/python -m service.engine.kernels # compiles the engine's loops, once
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	# Compiles what is rarely served, but tested, while packages are downloaded.
	$(BIN)/python -m service.engine.kernels --all & compiling=$$!; \
	$(INSTALL) --editable '.[train,baselines,otel,signing,dev]' && wait $$compiling
	touch $@

serve: $(VENV)/.serve
	$(BIN)/dss serve --models models --port $(PORT)

test: $(VENV)/.dev
	$(BIN)/pytest --numprocesses 2 --dist worksteal

# kserve's client and its downloader, which need older libraries than this project.
kserve: $(VENV)/.dev $(VENV)-kserve/.storage
	KSERVE_PYTHON=$(VENV)-kserve/bin/python $(BIN)/pytest tests/serving/api/test_kserve.py tests/deployment/test_pod_life.py

$(VENV)-kserve/.storage:
	$(PYTHON) -m venv $(VENV)-kserve
	$(VENV)-kserve/bin/pip install --quiet --disable-pip-version-check 'kserve[storage]==0.21.0'
	touch $@

# Builds the service's image and runs it confined, without a container engine; as root, needs apt's
# buildah and debootstrap. IMAGE_TEST_DIR keeps what can be used again.
image-test:
	PYTHON=$(PYTHON) deploy/image/test.sh service

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

# After a change of constraints.txt or of a dependency: hashes of what is served with, then its bill of materials.
requirements: $(VENV)/.dev
	$(BIN)/python -m deploy.requirements

sbom: $(VENV)/.dev
	$(BIN)/python -m deploy.requirements.sbom

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.engines.demo

# Needs wrk; makes the peers' environments under .venv-peers on first use.
bench-http: $(VENV)/.dev
	$(BIN)/python -m benchmarks.http
	$(BIN)/python -m benchmarks.http --tables docs/performance.md
	$(BIN)/python -m benchmarks.http --head-cache

# Abuse and faults: 10 minutes, and a soak of 30. Some of it needs root and apt's faketime.
chaos: $(VENV)/.dev
	$(BIN)/python -m benchmarks.chaos; status=$$?; \
	$(BIN)/python -m benchmarks.chaos --tables docs/chaos.md; exit $$status

# How the committed demo bundle was made; DEMO names where a new one goes.
DEMO ?= models/demo/2
demo: $(VENV)/.dev
	$(BIN)/dss train --task synthetic --size 100x100 --out runs/demo
	$(BIN)/dss export runs/demo $(DEMO)

# The synthetic table and pictures of README: 3 seeds of both sizes and the ablations.
figures: $(VENV)/.dev
	$(BIN)/python -m benchmarks.training.synthetic

# After a change of deploy/grafana/*.py.
dashboard: $(VENV)/.dev
	$(BIN)/python -m deploy.grafana.dashboard

# What the dashboard looks like, without Grafana: a service, a Prometheus (apt's) and MINUTES of traffic.
MINUTES ?= 3
dashboard-picture: $(VENV)/.dev
	$(BIN)/python -m deploy.pictures.dashboard --minutes $(MINUTES)

# What the page at / looks like: a service with the demo model, some traffic, and Chromium (apt's).
explorer-picture: $(VENV)/.dev
	$(BIN)/python -m deploy.pictures.explorer
