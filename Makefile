# make demo | test | test-peers | check | prove | bench-startup | clean     Each makes the virtual environment .venv first, where it is missing or stale.
PYTHON ?= python3
BIN := .venv/bin
# Node comes with the pinned pyright; another one on this machine must not change what it finds. It asks `python` on the PATH
# where packages are, so that .venv comes first there.
PYRIGHT := PATH="$(CURDIR)/$(BIN):$$PATH" PYRIGHT_PYTHON_GLOBAL_NODE=0 PYRIGHT_PYTHON_IGNORE_WARNINGS=1 pyright

.PHONY: help demo test test-peers check prove bench-startup clean venv venv-dev

help:
	@echo "make demo           train a small network on handwritten digits, on 4 processes over TCP"
	@echo "make test           run all tests"
	@echo "make test-peers     run the tests that need a real MPI (Open MPI, then MPICH) and torch, in environments of their own"
	@echo "make check          lint, formatting, types, and the rules of the repository"
	@echo "make prove          prove every algorithm for all worlds up to 33 and every root (ten minutes)"
	@echo "make bench-startup  what it costs to import and to start manyhands, next to MPI and torch; installs those in environments of their own"
	@echo "make venv-dev       make .venv with all distributions, and with the tools that develop them"
	@echo "make clean          remove the environments and what the tools leave behind"

demo: venv
	$(BIN)/manyhands run -n 4 --config examples/manyhands.toml examples/train_digits.py

test: venv-dev
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

# The wheels of the two MPIs have files of the same names, so that each has its environment.
test-peers:
	@$(PYTHON) tools/make_venv.py requirements-peers.txt .venv-peers
	@$(PYTHON) tools/make_venv.py requirements-peers-mpich.txt .venv-peers-mpich
	.venv-peers/bin/python -m pytest -m peers plugins/gloo/tests plugins/mpi/tests tests/test_bench_backends.py core/tests/test_libraries_real.py tests/test_arrays_of_others.py $(PYTEST_ARGS)
	.venv-peers-mpich/bin/python -m pytest -m peers plugins/mpi/tests $(PYTEST_ARGS)

check: venv-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYRIGHT) --verifytypes manyhands --ignoreexternal
	$(PYRIGHT) --verifytypes manyhands_gloo --ignoreexternal
	$(PYRIGHT) --verifytypes manyhands_hybrid --ignoreexternal
	$(PYRIGHT) --verifytypes manyhands_mpi --ignoreexternal
	$(PYRIGHT) --verifytypes manyhands_nccl --ignoreexternal
	$(PYRIGHT) --verifytypes manyhands_shm --ignoreexternal
	$(PYRIGHT) --verifytypes manyhands_simulated --ignoreexternal
	$(PYRIGHT) --verifytypes manyhands_tcp --ignoreexternal
	$(BIN)/python tools/check_imports.py
	$(BIN)/python tools/check_versions.py

prove: venv
	$(BIN)/python tools/prove.py

bench-startup: venv
	@$(PYTHON) tools/make_venv.py requirements-peers.txt .venv-peers
	@$(PYTHON) tools/make_venv.py requirements-peers-mpich.txt .venv-peers-mpich
	$(BIN)/python benchmarks/startup.py

venv:
	@$(PYTHON) tools/make_venv.py requirements.txt

venv-dev:
	@$(PYTHON) tools/make_venv.py requirements-dev.txt

clean:
	rm -rf .venv .venv-peers .venv-peers-mpich .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
