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

.PHONY: demo demo-megatron test pytest test-machines test-etcd test-kubernetes test-mindspore test-ray test-slurm test-engines test-versions lint style types \
	imports sim mutants chaos soak attack prove nightly-engines nightly-megatron nightly-machines bench peers docs clean

demo: $(INSTALLED)  ## kill ranks and nodes of a small training job and watch it recover (two minutes)
	$(BIN)/midstep demo $(DEMO)

demo-megatron: $(INSTALLED)  ## the same on megatron-core, with a second kill in each of two recoveries (a minute)
	$(BIN)/midstep demo --megatron $(DEMO)

test: $(INSTALLED)  ## lint, types, import contracts, and all tests but the long ones
	$(MAKE) --no-print-directory -j 2 pytest types style imports

# Without torch's compiler, which Megatron asks for when it is imported: 2 s of CPU less in each of its jobs. The soak has it.
pytest:
	TORCHDYNAMO_DISABLE=1 $(BIN)/python -m pytest -m "not soak and not machines and not etcd and not kubernetes and not mindspore and not ray and not slurm" \
		-n $(TEST_WORKERS) $(SPREAD) --hypothesis-profile ci $(TESTS)

test-machines: $(INSTALLED)  ## training on several machines, made of Linux namespaces: iproute2 and util-linux, root or user namespaces. CABLES=bad
	MIDSTEP_BAD_CABLES=$(CABLES) $(BIN)/python -m pytest -m "not nightly" -n $(WORKERS) $(SPREAD) tests/machines $(TESTS)

test-etcd: $(INSTALLED)  ## controllers of a job in a real etcd: needs its program (Debian: etcd-server, etcd-client)
	$(BIN)/python -m pytest -n $(WORKERS) $(SPREAD) tests/etcd $(TESTS)

test-kubernetes: $(INSTALLED)  ## pods on real kubelets, on machines of namespaces: root; builds Kubernetes once, for 5 to 20 minutes
	$(BIN)/python -m tests.kubernetes.cluster build
	$(BIN)/python -m pytest -m "$(or $(MARKED),not nightly)" --durations=0 --durations-min=5 tests/kubernetes $(TESTS)

test-mindspore: $(INSTALLED)  ## real MindSpore on the CPU, killed in every mode, in an environment without torch: 3 GB. MINDSPORE=2.9.0
	MIDSTEP_REQUIRE_MINDSPORE=1 $$($(BIN)/python -m tests.mindspore.environment $(MINDSPORE))/python -m pytest tests/mindspore $(TESTS)

test-ray: $(INSTALLED)  ## jobs on a real Ray, whose raylets are on machines of namespaces (root, or user namespaces): 2 GB
	MIDSTEP_REQUIRE_RAY=1 $$($(BIN)/python -m tests.ray.environment)/python -m pytest --durations=0 --durations-min=5 tests/ray $(TESTS)

test-slurm: $(INSTALLED)  ## jobs under a real Slurm, on machines of namespaces: root; Debian: munge, slurmctld, slurmd, slurm-client
	MIDSTEP_REQUIRE_SLURM=1 MIDSTEP_REQUIRE_MACHINES=1 $(BIN)/python -m pytest --durations=5 tests/slurm $(TESTS)

test-engines: test-kubernetes test-ray  ## both engines, as above

nightly-engines: $(INSTALLED)  ## tests on Kubernetes that tell again what another test tells
	$(MAKE) --no-print-directory test-kubernetes MARKED=nightly

test-versions: $(INSTALLED)  ## contract tests and demos with the oldest, the newest and two torch between: 25 GB. VERSIONS="2.7.1" for one
	$(BIN)/python -m tests.versions.run $(VERSIONS)

lint: $(INSTALLED)  ## style, types and who may import whom
	$(MAKE) --no-print-directory -j 2 types style imports

style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

imports:
	$(BIN)/lint-imports

sim: $(INSTALLED)  ## the recovery machine under a simulated, seeded cluster; INCIDENTS=200000 for more
	MIDSTEP_SIM_INCIDENTS=$(or $(INCIDENTS),50000) $(BIN)/python -m pytest -s tests/simulation $(TESTS)

prove: $(INSTALLED)  ## every order of events in worlds of 2 and 3 ranks; goes on where it was stopped. TESTS="lost" for some
	$(BIN)/python -m tests.exploration.prove $(TESTS)

mutants: $(INSTALLED)  ## break the product on purpose, piece by piece: exploration or simulation has to see each break
	$(BIN)/python -m tests.mutants $(TESTS)

chaos: $(INSTALLED)  ## real processes, really killed; the long ones too. TESTS="--device fake" for all on the fake device
	$(BIN)/python -m pytest -m "not nightly" tests/chaos $(TESTS)

soak: $(INSTALLED)  ## the tests that take too long for `make test`, but not the night's: a quarter of an hour; KILLS=60 in one job
	MIDSTEP_SIM_SEEDS=1000000:2000000 MIDSTEP_SIM_INCIDENTS=6500 $(BIN)/python -m pytest tests/simulation/test_campaign.py
	MIDSTEP_ATTACK_KILLS=$(or $(KILLS),60) $(BIN)/python -m pytest -m "soak and not nightly" -n $(WORKERS) \
		$(SPREAD) tests/chaos tests/attack tests/simulation $(TESTS)

attack: $(INSTALLED)  ## every attack of docs/security.md; CASES=100000 for each fuzzer and KILLS=1000 in one job are the defaults
	MIDSTEP_ATTACK_KILLS=$(or $(KILLS),1000) $(BIN)/python -m pytest -vs tests/attack/test_thousand_kills.py $(TESTS)
	MIDSTEP_FUZZ_CASES=$(or $(CASES),100000) $(BIN)/python -m pytest -v -n $(WORKERS) $(SPREAD) \
		--durations=20 tests/attack --ignore tests/attack/test_thousand_kills.py $(TESTS)

nightly-megatron: $(INSTALLED)  ## every shape of Megatron job, every rank killed at every moment; TESTS="-k 'expert'" for some
	$(BIN)/python -m pytest -v -m nightly -n $(WORKERS) --dist load --max-worker-restart 0 tests/chaos/megatron $(TESTS)

nightly-machines: $(INSTALLED)  ## each machine powered off in each phase, and FAULTS=100 random faults of seed SEED in one job
	MIDSTEP_BAD_CABLES=$(CABLES) MIDSTEP_STORM_FAULTS=$(FAULTS) MIDSTEP_STORM_SEED=$(SEED) $(BIN)/python -m pytest -vs -m nightly tests/machines $(TESTS)

bench: $(INSTALLED)  ## recovery, overhead, repair, controller, beside what was kept last: status 1 if worse. BENCH="--keep" keeps it
	$(BIN)/python -m benchmarks.regression --json out/bench.json $(BENCH)

peers: $(INSTALLED)  ## midstep beside torchrun, NVRx, torchft and DLRover: hours, and 2 GB; goes on where it was stopped. PEERS="--ranks 4 --keep"
	mkdir -p out
	$(BIN)/python -m benchmarks.peers --json out/peers.json --picture out/peers.svg $(PEERS)

docs: $(INSTALLED)  ## refresh the generated parts of the docs, and write the API reference to out/api
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
