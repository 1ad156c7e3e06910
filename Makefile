# make demo | docs | test | test-all | test-docs-site | test-flaky | mutants | test-faults | test-elastic | test-fuzz | soak | test-peers | test-peers-faults | test-engines | test-native | test-gpu | test-install | check | prove | bench-startup | bench-gpu | lock | wheels | sbom | audit | workflows | clean     Each makes the virtual environment .venv first, where it is missing or stale.
PYTHON ?= python3
BIN := .venv/bin
# Node comes with the pinned pyright; another one on this machine must not change what it finds. It asks `python` on the PATH
# where packages are, so that .venv comes first there.
PYRIGHT := PATH="$(CURDIR)/$(BIN):$$PATH" PYRIGHT_PYTHON_GLOBAL_NODE=0 PYRIGHT_PYTHON_IGNORE_WARNINGS=1 pyright
# How often `make test-flaky` runs the tests, beside how many busy processes in turn.
RUNS ?= 20
LOADS ?= 0 4 8
# CUDA=13 for a driver of CUDA 13: the wheels of the two have files of the same names, so that each has its environment.
CUDA ?= 12
GPU_SUFFIX := $(if $(filter 13,$(CUDA)),-cuda13)
GPU_VENV := .venv-gpu$(GPU_SUFFIX)

define SAY_DEMO_FAILED
	echo; \
	echo "The demo failed. The first error above names the rank and the cause; 'make demo' runs it again."; \
	echo "What this computer can run tells '$(BIN)/oneaccord doctor'. Please attach its page and all lines above to a report."
endef

# Tests start Python many times; what it compiles is kept, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo docs test test-all test-docs-site test-flaky mutants test-faults test-elastic test-fuzz soak test-peers test-peers-faults test-engines test-native test-gpu test-install check prove bench-startup bench-parallel bench-gpu lock wheels sbom audit workflows clean venv-audit venv-docs venv-gpu venv venv-dev

help:
	@echo "make demo           train a small network on handwritten digits, on 4 processes over TCP"
	@echo "make docs           build the site of the documentation into build/site, in an environment of its own; a warning is an error"
	@echo "make test           run the tests, but those that take long by nature: nine minutes on two cores, longer if they are busy"
	@echo "make test-all       run all tests"
	@echo "make test-flaky     run the tests of make test 60 times beside none, 4 and 8 busy processes (hours), and list those that did not always pass; FLAKY_ARGS='--runs 5 --loads 0,4 --tests plugins/simulated'"
	@echo "make mutants        change 200 lines of the source, one at a time, and see which of the changes no test finds (hours); MUTANTS_ARGS='--count 20 --only core/src/oneaccord/control'"
	@echo "make test-faults    run a campaign of 1,000 faults on real processes (twenty minutes), and of 100 of the network (ten); FAULTS_ARGS='--cases 50'"
	@echo "make test-elastic   train while a rank is killed every few steps, 2,000 times (ten minutes); ELASTIC_ARGS='--kills 100'"
	@echo "make test-fuzz      give every reader of bytes what nobody wrote, in an environment of its own with atheris (ten minutes); FUZZ_ARGS='--runs 10000000 --minutes 200'"
	@echo "make soak           use groups for an hour, while ranks die and others come: memory, descriptors and threads must stay as they are; SOAK_ARGS='--minutes 5'"
	@echo "make test-peers     run the tests that need a real MPI (Open MPI, then MPICH), torch (its own suite included), UCX and, where there is one, UCC, and compare the fakes of CuPy and NCCL with the real bindings, in environments of their own"
	@echo "make test-engines   run the tests that need a real Ray, Dask, Slurm or sshd, in an environment of their own; what is missing is skipped, with the reason"
	@echo "make test-peers-faults  measure what torch with Gloo, Open MPI, MPICH and oneaccord do when something goes wrong (twenty minutes)"
	@echo "make test-docs-site build the site, and use it in Chromium at two widths: search, tabs, dark mode, links, contrast; needs a Chromium on this computer"
	@echo "make test-native    run the tests of the compiled executor under sanitizers, and those of calls without it"
	@echo "make test-gpu       run the tests that need a GPU, in an environment of their own with CuPy and NCCL; CUDA=13 for CUDA 13"
	@echo "make test-install   install each distribution in clean environments, with each Python that is here, and test it there (twenty minutes)"
	@echo "make check          lint, formatting, types, and the rules of the repository"
	@echo "make prove          prove every algorithm for all worlds up to 33 and every root (ten minutes)"
	@echo "make bench-startup  what it costs to import and to start oneaccord, next to MPI and torch; installs those in environments of their own"
	@echo "make bench-parallel what training layers cost, next to torch's; installs that in an environment of its own"
	@echo "make bench-gpu      what a call on a GPU costs, next to NCCL's raw binding, cupyx and torch; CUDA=13 for CUDA 13"
	@echo "make venv-dev       make .venv with all distributions, and with the tools that develop them"
	@echo "make lock           write the versions and hashes of all that the tools install (requirements-*.lock), after a change of a requirement; LOCK_ARGS=--upgrade for the newest"
	@echo "make wheels         build the wheel and the sdist of each distribution twice, from the last commit, and compare them; they land in dist/"
	@echo "make sbom           write dist/sbom.cdx.json (CycloneDX): what an installation of all of dist/ consists of"
	@echo "make audit          ask the package index which of the locked versions have known vulnerabilities"
	@echo "make workflows      check the workflows of .github: their form by a schema, and their weaknesses by zizmor"
	@echo "make clean          remove the environments and what the tools leave behind"

demo: venv
	@echo "Four processes train a network on handwritten digits, for a few seconds. The last lines should say that it is right"
	@echo "for at least 95 % of the images it has not seen, and that all four hold the same bits."
	@$(BIN)/oneaccord run -n 4 --config examples/oneaccord.toml examples/gallery/digits.py || { code=$$?; [ $$code = 130 ] || { $(SAY_DEMO_FAILED); }; exit $$code; }

# Everything is read anew: of a page that has not changed, Sphinx would not repeat the warnings.
docs: venv-docs
	@.venv-docs/bin/sphinx-build -q -E -W --keep-going -j auto -d .venv-docs/doctrees docs build/site
	@echo "The site is built: build/site/index.html"

# What failed, and how to repeat it, conftest.py says.
test: venv-dev
	@echo "The tests run on three processes, for about nine minutes on two cores, longer if they are busy. Some are skipped, as the last lines explain."
	@$(BIN)/python -m pytest -n 3 -m "not peers and not gpu and not engines and not site and not long" --hypothesis-profile=short $(PYTEST_ARGS)

test-all: venv-dev
	@echo "All tests run on three processes, those that take long by nature as well, and Hypothesis with more examples."
	@$(BIN)/python -m pytest -n 3 $(PYTEST_ARGS)

test-flaky: venv-dev
	@$(BIN)/python tools/test_flaky.py --runs $(RUNS) --loads "$(LOADS)" $(FLAKY_ARGS)

mutants: venv-dev
	@$(BIN)/python tools/mutants.py $(MUTANTS_ARGS)

test-faults: venv-dev
	PYTHONPATH=tests $(BIN)/python tests/campaigns/campaign_faults.py $(FAULTS_ARGS)
	PYTHONPATH=tests $(BIN)/python tests/campaigns/campaign_network.py $(NETWORK_ARGS)

test-elastic: venv-dev
	PYTHONPATH=tests $(BIN)/python tests/campaigns/campaign_elastic.py $(ELASTIC_ARGS)

test-fuzz:
	@$(PYTHON) tools/make_venv.py requirements-fuzz.txt .venv-fuzz
	PYTHONPATH=tests .venv-fuzz/bin/python tests/campaigns/campaign_fuzz.py $(FUZZ_ARGS)

soak: venv-dev
	PYTHONPATH=tests $(BIN)/python tests/campaigns/campaign_soak.py $(SOAK_ARGS)

# The wheels of the two MPIs have files of the same names, so that each has its environment; likewise those of CuPy for each CUDA.
test-peers:
	@$(PYTHON) tools/make_venv.py requirements-peers.txt .venv-peers
	@$(PYTHON) tools/make_venv.py requirements-peers-mpich.txt .venv-peers-mpich
	.venv-peers/bin/python -m pytest -m peers conformance/tests plugins/gloo/tests plugins/mpi/tests plugins/torch/tests plugins/ucc/tests plugins/ucx/tests tests/workspace/test_bench_backends.py tests/workspace/test_bench_parallel.py core/tests/test_libraries_real.py tests/groups/test_arrays_of_others.py tests/elastic/test_elastic_state.py tests/docs/test_docs_recipes.py parallel/tests tests/docs/test_examples_digits.py tests/docs/test_examples_transformer.py $(PYTEST_ARGS)
	.venv-peers-mpich/bin/python -m pytest -m peers -k mpi conformance/tests plugins/mpi/tests $(PYTEST_ARGS)
	@$(PYTHON) tools/make_venv.py requirements-peers-cuda12.txt .venv-cuda12
	@$(PYTHON) tools/make_venv.py requirements-peers-cuda13.txt .venv-cuda13
	.venv-cuda12/bin/python -m pytest -m peers tests/devices/test_fakes_real.py $(PYTEST_ARGS)
	.venv-cuda13/bin/python -m pytest -m peers tests/devices/test_fakes_real.py $(PYTEST_ARGS)

test-peers-faults: venv-dev
	@$(PYTHON) tools/make_venv.py requirements-peers.txt .venv-peers
	@$(PYTHON) tools/make_venv.py requirements-peers-mpich.txt .venv-peers-mpich
	PYTHONPATH=tests $(BIN)/python tests/campaigns/campaign_peers.py $(PEERS_ARGS)

# One at a time: each starts many processes, and there is one Slurm for all.
# What pip does not bring is skipped, with the reason: Slurm (as root, after apt-get install slurm-wlm munge) and sshd.
test-engines:
	@$(PYTHON) tools/make_venv.py requirements-engines.txt .venv-engines
	.venv-engines/bin/python -m pytest -m engines plugins $(PYTEST_ARGS)

test-docs-site: docs
	.venv-docs/bin/python -m pytest -m site tests/docs/test_docs_site.py tests/docs/test_docs_site_pictures.py $(PYTEST_ARGS)

test-native: venv-dev
	$(BIN)/python tools/test_native.py $(NATIVE_ARGS)

test-gpu: venv-gpu
	$(GPU_VENV)/bin/python -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

test-install:
	@$(PYTHON) tools/make_venv.py requirements-install.txt .venv-install
	.venv-install/bin/python tools/test_install.py $(INSTALL_ARGS)

check: venv-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYRIGHT) --verifytypes oneaccord --ignoreexternal
	$(PYRIGHT) --verifytypes oneaccord_conformance --ignoreexternal
	$(PYRIGHT) --verifytypes oneaccord_dask --ignoreexternal
	$(PYRIGHT) --verifytypes oneaccord_gloo --ignoreexternal
	$(PYRIGHT) --verifytypes oneaccord_hybrid --ignoreexternal
	$(PYRIGHT) --verifytypes oneaccord_kubernetes --ignoreexternal
	$(PYRIGHT) --verifytypes oneaccord_lab --ignoreexternal
	$(PYRIGHT) --verifytypes oneaccord_mpi --ignoreexternal
	$(PYRIGHT) --verifytypes oneaccord_native --ignoreexternal
	$(PYRIGHT) --verifytypes oneaccord_nccl --ignoreexternal
	$(PYRIGHT) --verifytypes oneaccord_parallel --ignoreexternal
	$(PYRIGHT) --verifytypes oneaccord_ray --ignoreexternal
	$(PYRIGHT) --verifytypes oneaccord_shm --ignoreexternal
	$(PYRIGHT) --verifytypes oneaccord_simulated --ignoreexternal
	$(PYRIGHT) --verifytypes oneaccord_slurm --ignoreexternal
	$(PYRIGHT) --verifytypes oneaccord_ssh --ignoreexternal
	$(PYRIGHT) --verifytypes oneaccord_tcp --ignoreexternal
	$(PYRIGHT) --verifytypes oneaccord_torch --ignoreexternal
	$(PYRIGHT) --verifytypes oneaccord_ucc --ignoreexternal
	$(PYRIGHT) --verifytypes oneaccord_ucx --ignoreexternal
	$(BIN)/python tools/check_imports.py
	$(BIN)/python tools/check_variables.py
	$(BIN)/python tools/check_versions.py
	$(BIN)/python tools/check_name.py

prove: venv
	$(BIN)/python tools/prove.py

bench-startup: venv
	@$(PYTHON) tools/make_venv.py requirements-peers.txt .venv-peers
	@$(PYTHON) tools/make_venv.py requirements-peers-mpich.txt .venv-peers-mpich
	$(BIN)/python benchmarks/startup.py

bench-parallel:
	@$(PYTHON) tools/make_venv.py requirements-peers.txt .venv-peers
	.venv-peers/bin/python benchmarks/parallel.py --json docs/measured/parallel.json $(BENCH_ARGS)

bench-gpu: venv-gpu
	$(GPU_VENV)/bin/python benchmarks/gpu.py --json docs/measured/gpu.json $(BENCH_ARGS)

lock:
	@$(PYTHON) tools/make_venv.py requirements-install.txt .venv-install
	.venv-install/bin/python tools/lock.py $(LOCK_ARGS)

wheels:
	@$(PYTHON) tools/make_venv.py requirements-install.txt .venv-install
	.venv-install/bin/python tools/build_wheels.py $(WHEELS_ARGS)

sbom: venv-audit
	.venv-audit/bin/python tools/sbom.py

audit: venv-audit
	.venv-audit/bin/pip-audit --strict --disable-pip --require-hashes $(foreach lock,$(wildcard requirements-*.lock),-r $(lock)) $(AUDIT_ARGS)

# Without a network, so that the result depends on the files alone.
workflows: venv-audit
	.venv-audit/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	.venv-audit/bin/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	.venv-audit/bin/zizmor --offline --quiet .github

venv-audit:
	@$(PYTHON) tools/make_venv.py requirements-audit.txt .venv-audit

venv-docs:
	@$(PYTHON) tools/make_venv.py requirements-docs.txt .venv-docs

venv-gpu:
	@$(PYTHON) tools/make_venv.py requirements-gpu$(GPU_SUFFIX).txt $(GPU_VENV)

venv:
	@$(PYTHON) tools/make_venv.py requirements.txt

venv-dev:
	@$(PYTHON) tools/make_venv.py requirements-dev.txt

clean:
	rm -rf .venv .venv-* build/site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
