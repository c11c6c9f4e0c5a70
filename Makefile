# Everything runs in a virtual environment that the first target makes: nothing but Python, make and pip is needed.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
CONSTRAINTS ?= constraints.txt
WORKERS ?= 2
# For two cores: much of a test is waiting for processes.
TEST_WORKERS ?= 4
# A worker that crashes ends the run: with its file among the last ones, the run would wait for ever.
SPREAD := --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# Modules stay compiled, whatever the environment says: a test run starts hundreds of Pythons that import midstep.
export PYTHONDONTWRITEBYTECODE :=

PYTEST := $(BIN)/python -m pytest
# A Python with torch-npu's wheel on a CANN of ours, which c++ builds; CANN=2.7.1 for another release.
ON_CANN := $(BIN)/python -m tests.cann.environment $(if $(CANN),--release $(CANN)) python
# What is kept by every device and every communicator; with `--device npu` by those of torch-npu.
CONTRACTS := tests/contract/devices tests/contract/gloo
ON_DEVICES := tests/cann/test_device.py tests/contract/devices
# Test files that are named, of which none belongs to the suite: nothing to run is no failure.
NONE := || [ $$? -eq 5 -a -n "$(FILES)" ]
# The tests of `make test`; each of the other suites has a folder of its own, or a mark.
QUICK := not soak and not machines and not etcd and not kubernetes and not mindspore and not cann and not ray and not torchtitan and not accelerate and not slurm and not prometheus and not page and not mindspeed and not mindcluster
DECISIONS := tests/unit tests/typing tests/simulation tests/exploration tests/mutants
# Other seeds with each change of the controller.
SEEDS ?= $(shell printf %d 0x$$(git rev-parse --short=7 HEAD:controller 2>/dev/null || echo f4240)):1000000000
SUITES := unit contract chaos soak devices campaign attack prove mutants etcd prometheus page machines slurm mindspore \
	cann cann-releases versions ray torchtitan accelerate mindspeed mindcluster \
	kubernetes cuda nightly-fsdp nightly-kubernetes nightly-machines nightly-megatron

.PHONY: demo test lint ci-all bench peers docs clean pytest style types imports $(addprefix suite-,$(SUITES))

demo: $(INSTALLED)  ## kill ranks and nodes of a small training job and watch it recover (two minutes); DEMO=--megatron for megatron-core
ifneq ($(filter cann,$(DEMO)),)
	$(ON_CANN) -m midstep.cli.main demo --steps 40 $(patsubst cann,npu,$(DEMO))
else
	$(BIN)/midstep demo $(DEMO)
endif

test: $(INSTALLED)  ## lint and all tests but the slow ones; SUITE=ray for one suite (CONTRIBUTING.md has them), TESTS="-k mailbox" for some tests
ifdef SUITE
	$(MAKE) --no-print-directory suite-$(SUITE)
else
	$(MAKE) --no-print-directory -j 2 pytest types style imports
endif

lint: $(INSTALLED)  ## style, types and who may import whom
	$(MAKE) --no-print-directory -j 2 types style imports

ci-all: $(INSTALLED)  ## everything that CI can run, whatever has changed, and what a release needs; LANES="ray soak" for some (tests/lanes.toml)
	$(BIN)/python -m tests.lanes $(or $(LANES),--all)

bench: $(INSTALLED)  ## recovery, overhead, repair, controller, beside what was kept last: status 1 if worse. BENCH="--keep" keeps it
	$(BIN)/python -m benchmarks.regression --json out/bench.json $(BENCH)

peers: $(INSTALLED)  ## midstep beside torchrun, NVRx, torchft and DLRover: hours, and 2 GB; goes on where it was stopped. PEERS="--ranks 4 --keep"
	mkdir -p out
	$(BIN)/python -m benchmarks.peers --json out/peers.json --picture out/peers.svg $(PEERS)

docs: $(INSTALLED)  ## refresh the generated parts of the docs, and write the API reference to out/api
	$(BIN)/python tests/unit/test_decisions.py
	$(BIN)/python tests/unit/test_docs.py
	$(BIN)/python tests/unit/test_reference.py

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[dev]"
	touch $@

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .versions .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis midstep.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

# --- parts of `make test` and of `make lint` ---------------------------------------------------------------------------

# Without torch's compiler, which Megatron asks for when it is imported: 2 s of CPU less in each of its jobs. The soak has it.
# And without the slow tests of suite-chaos (tests/slow.txt).
pytest:
	TORCHDYNAMO_DISABLE=1 $(PYTEST) -m "$(QUICK)" --without-slow -n $(TEST_WORKERS) $(SPREAD) --hypothesis-profile ci $(TESTS)

style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

imports:
	$(BIN)/lint-imports

# --- make test SUITE=... -----------------------------------------------------------------------------------------------

# What decides, and everything that needs no process: the part of `make test` that is quick to run and to fail.
suite-unit:
	TORCHDYNAMO_DISABLE=1 $(PYTEST) -m "not soak" -n $(WORKERS) $(SPREAD) --hypothesis-profile ci $(or $(FILES),$(DECISIONS)) $(TESTS)

# What stands behind an interface, against the real thing.
suite-contract:
	$(PYTEST) -m "not soak" -n $(TEST_WORKERS) $(SPREAD) $(or $(FILES),tests/contract) $(TESTS)

# Real processes, really killed. The long tests of the same folders: soak. TESTS="--device fake" for all on the fake device.
suite-chaos:
	TORCHDYNAMO_DISABLE=1 $(PYTEST) -m "not soak" -n $(TEST_WORKERS) $(SPREAD) $(or $(FILES),tests/chaos tests/attack) $(TESTS) $(NONE)

# KILLS=60 in one job.
suite-soak:
	MIDSTEP_ATTACK_KILLS=$(or $(KILLS),20) $(PYTEST) -m "soak and not second_device and not nightly" -n 3 \
		$(SPREAD) $(or $(FILES),tests/chaos tests/attack tests/contract tests/unit tests/simulation) $(TESTS) $(NONE)

# The tests that are marked `both_devices`, on the second one.
suite-devices:
	$(PYTEST) -m "second_device and soak and not nightly" -n 3 $(SPREAD) $(or $(FILES),tests/chaos) $(TESTS) $(NONE)

# The recovery machine in a simulated cluster: INCIDENTS=50000, SEEDS=7:8.
suite-campaign:
	MIDSTEP_SIM_SEEDS=$(SEEDS) MIDSTEP_SIM_INCIDENTS=$(or $(INCIDENTS),1500) $(PYTEST) -s tests/simulation/test_campaign.py $(TESTS)

# Every attack of docs/security.md: CASES=100000 for each fuzzer, KILLS=1000 in one job.
suite-attack:
	MIDSTEP_ATTACK_KILLS=$(or $(KILLS),1000) $(PYTEST) -vs tests/attack/test_thousand_kills.py $(TESTS)
	MIDSTEP_FUZZ_CASES=$(or $(CASES),100000) $(PYTEST) -v -n $(WORKERS) $(SPREAD) \
		--durations=20 tests/attack --ignore tests/attack/test_thousand_kills.py $(TESTS)

# Every order of events in worlds of 2 and 3 ranks; goes on where it was stopped. TESTS="lost" for some.
suite-prove:
	$(BIN)/python -m tests.exploration.prove $(TESTS)

# Break the product on purpose, piece by piece: exploration or simulation has to see each break. Goes on where it was stopped.
suite-mutants:
	$(BIN)/python -m tests.mutants $(TESTS)

# Controllers of a job in a real etcd: Debian's etcd-server and etcd-client.
suite-etcd:
	$(PYTEST) -n $(WORKERS) $(SPREAD) $(or $(FILES),tests/etcd) $(TESTS)

# Training on several machines, made of Linux namespaces: iproute2 and util-linux, root or user namespaces. CABLES=bad
suite-machines:
	MIDSTEP_BAD_CABLES=$(CABLES) $(PYTEST) -m "not nightly" -n $(WORKERS) $(SPREAD) $(or $(FILES),tests/machines) $(TESTS) $(NONE)

# The shipped alerts in a real Prometheus, which scrapes real jobs; Debian's prometheus.
suite-prometheus:
	MIDSTEP_REQUIRE_PROMETHEUS=1 $(PYTEST) $(or $(FILES),tests/prometheus) $(TESTS)

# The page in a real browser, of a real job and of played ones, one of 10,000 ranks; Debian's chromium. Screenshots in out/page.
suite-page:
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) playwright
	MIDSTEP_REQUIRE_CHROMIUM=1 $(PYTEST) $(or $(FILES),tests/page) $(TESTS)

# Jobs under a real Slurm, on machines of namespaces: root; Debian's munge, slurmctld, slurmd, slurm-client.
suite-slurm:
	MIDSTEP_REQUIRE_SLURM=1 MIDSTEP_REQUIRE_MACHINES=1 $(PYTEST) --durations=5 $(or $(FILES),tests/slurm) $(TESTS)

# Real MindSpore on the CPU, killed in every mode, in an environment without torch: 3 GB. MINDSPORE=2.9.0
suite-mindspore:
	MIDSTEP_REQUIRE_MINDSPORE=1 $$($(BIN)/python -m tests.mindspore.environment $(MINDSPORE))/python -m pytest $(or $(FILES),tests/mindspore) $(TESTS)

# MindSpeed-LLM's own program, where checkouts are named (tests/mindspeed/test_pretrain.py): 6 GB.
suite-mindspeed:
	$$($(BIN)/python -m tests.mindspeed.environment)/python -m pytest $(or $(FILES),tests/mindspeed) $(TESTS)

# A job beside MindCluster's own ClusterD, over a real API server, where its program and a checkout are named: root.
suite-mindcluster:
	$(PYTEST) --durations=0 --durations-min=5 $(or $(FILES),tests/mindcluster) $(TESTS)

# The contracts and jobs on torch-npu's own wheel, over a CANN of ours, which is built by c++: 150 MB. A real NPU is not needed, and not used.
# What is about one device runs with 2.7.1 and 2.6.0 as well, each with its torch: 6 GB. CANN=2.7.1 for one other release.
suite-cann:
	$(ON_CANN) -m pytest -m "$(or $(MARKED),not soak)" --device npu $(or $(FILES),tests/cann $(CONTRACTS)) $(TESTS) $(NONE)
ifeq ($(CANN)$(MARKED)$(FILES),)
	$(MAKE) --no-print-directory suite-cann CANN=2.7.1 FILES="$(ON_DEVICES)"
	$(MAKE) --no-print-directory suite-cann CANN=2.6.0 FILES="$(ON_DEVICES)"
endif

# The contracts on the other releases of torch-npu that these tests know, and the long jobs on the newest.
suite-cann-releases:
	$(MAKE) --no-print-directory suite-cann MARKED=soak FILES="$(or $(FILES),tests/cann)"
	$(MAKE) --no-print-directory suite-cann CANN=2.14.0 FILES="$(or $(FILES),tests/cann/test_device.py $(CONTRACTS))"
	$(MAKE) --no-print-directory suite-cann CANN=2.12.0 FILES="$(or $(FILES),tests/cann/test_device.py $(CONTRACTS))"
	$(MAKE) --no-print-directory suite-cann CANN=2.10.0 FILES="$(or $(FILES),tests/cann/test_device.py $(CONTRACTS))"
	$(MAKE) --no-print-directory suite-cann CANN=2.9.0 FILES="$(or $(FILES),tests/cann/test_device.py $(CONTRACTS))"
	$(MAKE) --no-print-directory suite-cann CANN=2.7.1 FILES="$(or $(FILES),tests/cann/test_device.py $(CONTRACTS))"
	$(MAKE) --no-print-directory suite-cann CANN=2.6.0 FILES="$(or $(FILES),tests/cann/test_device.py $(CONTRACTS))"

# Contract tests and demos with the oldest, the newest and two torch between: 25 GB. VERSIONS="2.7.1" for one.
suite-versions:
	$(BIN)/python -m tests.versions.run $(VERSIONS)

# Jobs on a real Ray, whose raylets are on machines of namespaces (root, or user namespaces): 2 GB.
suite-ray:
	MIDSTEP_REQUIRE_RAY=1 $$($(BIN)/python -m tests.ray.environment)/python -m pytest --durations=0 --durations-min=5 $(or $(FILES),tests/ray) $(TESTS)

# torchtitan's own program on the CPU, its debug model killed: 1 GB. TITAN=0.2.2; MARKED=soak for all twelve moments.
suite-torchtitan:
	MIDSTEP_REQUIRE_TORCHTITAN=1 TORCHDYNAMO_DISABLE=1 $$($(BIN)/python -m tests.torchtitan.environment $(TITAN))/python -m pytest \
		-m "$(or $(MARKED),not soak)" $(or $(FILES),tests/torchtitan) $(TESTS) $(NONE)

# A script with Hugging Face Accelerate, its ranks killed: 1 GB.
suite-accelerate:
	MIDSTEP_REQUIRE_ACCELERATE=1 TORCHDYNAMO_DISABLE=1 $$($(BIN)/python -m tests.accelerate.environment)/python -m pytest \
		$(or $(FILES),tests/accelerate) $(TESTS)

# Pods on real kubelets, on machines of namespaces: root; builds Kubernetes once, for 5 to 20 minutes.
suite-kubernetes:
	$(BIN)/python -m tests.kubernetes.cluster build
	$(PYTEST) -m "$(or $(MARKED),not nightly)" --durations=0 --durations-min=5 $(or $(FILES),tests/kubernetes) $(TESTS) $(NONE)

# Real GPUs, one is enough: each part is a job or two, really killed. TESTS="PART" for some.
suite-cuda:
	$(BIN)/python -m tests.cuda.run $(TESTS)

# Every rank of four meshes, lost at every moment of a step.
suite-nightly-fsdp:
	$(PYTEST) -v -m nightly -n $(WORKERS) --dist load --max-worker-restart 0 tests/chaos/fsdp $(TESTS)

# Tests on Kubernetes that tell again what another test tells.
suite-nightly-kubernetes:
	$(MAKE) --no-print-directory suite-kubernetes MARKED=nightly

# Each machine powered off in each phase, and FAULTS=100 random faults of seed SEED in one job.
suite-nightly-machines:
	MIDSTEP_BAD_CABLES=$(CABLES) MIDSTEP_STORM_FAULTS=$(FAULTS) MIDSTEP_STORM_SEED=$(SEED) $(PYTEST) -vs -m nightly tests/machines $(TESTS)

# Every shape of Megatron job, every rank killed at every moment; TESTS="-k 'expert'" for some.
suite-nightly-megatron:
	$(PYTEST) -v -m nightly -n $(WORKERS) --dist load --max-worker-restart 0 tests/chaos/megatron $(TESTS)
