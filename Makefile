# Everyday commands. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PY := .venv/bin/python
DEVCLUSTER := $(PY) -m devcluster
PACKAGES := operator connector devcluster tests
FAST := tests/repo tests/unit tests/property tests/http tests/chart

.PHONY: help
help: ## Show this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

# The environment is made again when the lock file is newer than it.
.venv/.stamp: uv.lock pyproject.toml devcluster/bootstrap.sh
	@devcluster/bootstrap.sh >/dev/null
	@touch $@

.PHONY: venv
venv: .venv/.stamp ## Make the locked Python environment in .venv.

.PHONY: demo
demo: venv ## Install, build and start everything, then show a refusal and equal tokens.
	@$(PY) -m devcluster.demo

.PHONY: demo-down
demo-down: cluster-down ## Remove everything that the demo started.

.PHONY: cluster-up
cluster-up: venv ## Start the local Kubernetes node (idempotent).
	@$(DEVCLUSTER) up

.PHONY: cluster-down
cluster-down: venv ## Stop it and remove what it left, except the cache.
	@$(DEVCLUSTER) down

.PHONY: cluster-status
cluster-status: venv ## Say what runs, where, and since when.
	@$(DEVCLUSTER) status

.PHONY: image
image: cluster-up ## Build the operator image and load it into the local cluster.
	@$(PY) -m devcluster.image

.PHONY: test
test: test-fast ## Run every test: lint, unit, property, repo, chart, cluster, end to end.
	@$(DEVCLUSTER) up --with-engine
	@$(PY) -m devcluster.image
	@$(PY) -m pytest tests/contract tests/differential tests/cluster tests/e2e
	@$(PY) -m pytest tests/teardown

.PHONY: test-fast
test-fast: venv lint ## Run the tests that need no cluster and no engine.
	@$(PY) -m pytest $(FAST)

.PHONY: test-cluster
test-cluster: venv image ## Run the tests that need the local cluster.
	@$(PY) -m pytest tests/cluster

.PHONY: test-e2e
test-e2e: venv image ## Run the end-to-end tests: real cluster, real engines.
	@$(PY) -m pytest tests/e2e

.PHONY: test-gpu
test-gpu: venv ## The byte oracle on a GPU; says so where there is none.
	@$(PY) -m tests.gpu

.PHONY: fuzz
fuzz: venv ## A million frames, and 900,000 inputs for all else that peers send (10 minutes; `test` fuzzes for one).
	@$(PY) -m tests.fuzz --inputs 1000000

.PHONY: soak
soak: venv ## 2,000 requests through real engines that are killed meanwhile (about 5 minutes).
	@$(PY) -m tests.soak

# In this order whatever `-j` says: they time things, and engines need the memory.
.PHONY: nightly
nightly: venv ## What takes too long for `test`: fuzz, soak, bench-connector, one after the other.
	@$(MAKE) --no-print-directory fuzz
	@$(MAKE) --no-print-directory soak
	@$(MAKE) --no-print-directory bench-connector

.PHONY: lint
lint: venv ## Check style, types and layers.
	@$(PY) -m ruff check $(PACKAGES)
	@$(PY) -m ruff format --check $(PACKAGES)
	@.venv/bin/basedpyright
	@.venv/bin/lint-imports

.PHONY: fmt
fmt: venv ## Format the code.
	@$(PY) -m ruff check --fix $(PACKAGES)
	@$(PY) -m ruff format $(PACKAGES)

.PHONY: generate
generate: venv ## Write the generated files again (CRD, reference pages).
	@$(PY) -m devcluster.generate

.PHONY: bench
bench: bench-operator bench-admission bench-connector ## Run every bench; tables here, figures in build/bench/.

.PHONY: bench-operator
bench-operator: venv ## Time, writes, memory and rollouts beside plain Deployments, on fake nodes (15 minutes).
	@$(PY) -m tests.bench.operator

.PHONY: bench-admission
bench-admission: venv ## Webhook latency over HTTPS with 50 clients; no cluster needed.
	@$(PY) -m tests.bench.admission

.PHONY: bench-connector
bench-connector: venv ## Transfer rates beside one large TransferEngine transfer.
	@$(PY) -m tests.bench.connector
