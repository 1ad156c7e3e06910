"""What the ucc backend says of itself, which library it takes, and what it offers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from pydantic import ValidationError

from oneaccord.api import BackendUnavailableError, Collective, CollectiveRequest
from oneaccord_ucc import finding, library
from oneaccord_ucc.config import UccConfig
from oneaccord_ucc.library import diagnose, load
from oneaccord_ucc.plugin import oneaccord_collective, oneaccord_register_backends


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A host without UCC: a library may be put into each of its places."""
    here = SimpleNamespace(home=tmp_path / "home", path=tmp_path / "path", prefix=tmp_path / "prefix")
    monkeypatch.setenv("UCC_HOME", str(here.home))
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{here.path}")
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.setattr(finding, "python_folders", lambda: [here.prefix / "lib"])
    load.cache_clear()
    return here


def put(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / finding.SONAME).touch()
    return str(folder / finding.SONAME)


def test_the_description_names_its_part():
    spec = oneaccord_register_backends()
    assert spec.parts is not None
    assert spec.parts(UccConfig(messages="shm")) == {"messages": "shm"}


def test_the_library_is_looked_for_in_ucc_home_first(places: Any, monkeypatch: pytest.MonkeyPatch):
    reason = oneaccord_register_backends().probe()
    assert reason is not None
    assert all(words in reason for words in ("libucc.so.1 was not found", "UCC_HOME"))
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.1")
    assert finding.find() == "libucc.so.1"
    for folder in (places.prefix / "lib", places.path, places.home / "lib64", places.home / "lib"):
        path = put(folder)
        assert finding.find() == path
    assert finding.missing() is None


def test_a_library_that_cannot_be_loaded_is_told_in_words(places: Any):
    with pytest.raises(BackendUnavailableError, match=r"libucc\.so\.1 was not found"):
        load()
    put(places.home / "lib")
    ((what, words),) = diagnose()
    assert (what, "UCC cannot be loaded" in words, "LD_LIBRARY_PATH" in words) == ("UCC", True, True)


def test_a_library_that_is_no_ucc_or_too_old_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(BackendUnavailableError, match=r"has no function ucc_collective_finalize: oneaccord needs UCC 1\.5"):
        library.Ucc("libc.so.6")

    class Old:
        def __init__(self, path: str) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            def get_version(major: Any, minor: Any, patch: Any) -> None:
                major._obj.value, minor._obj.value = 1, 4

            return get_version

    monkeypatch.setattr(library.ctypes, "CDLL", Old)
    with pytest.raises(BackendUnavailableError, match=r"is UCC 1\.4\.0, and oneaccord needs 1\.5 or newer"):
        library.Ucc("/old/libucc.so")


def test_doctor_names_the_versions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "load", lambda: SimpleNamespace(words="1.99.0", path="/opt/libucc.so.1"))
    monkeypatch.setattr(library, "loaded_libraries", lambda name: [f"/opt/{name}.0"])
    assert diagnose() == [("UCC", "1.99.0, /opt/libucc.so.1"), ("UCX", "/opt/libucs.so.0")]


@pytest.mark.parametrize("wrong", [{"spin_us": -1}, {"messages": ""}, {"tls": "tcp"}])
def test_a_wrong_setting_is_refused(wrong: dict[str, Any]):
    with pytest.raises(ValidationError):
        UccConfig(**wrong)


def test_ucc_performs_what_it_does_as_oneaccord_and_leaves_the_rest():
    def offered(collective: Collective, dtype: Any, op: str | None = None, **others: Any) -> bool:
        facts = {"backend": "ucc", "device": "cpu", "nbytes": 800, "world_size": 2, "digest": bytes(8)} | others
        made = CollectiveRequest(collective=collective, dtype=dtype and np.dtype(dtype), op=op, **facts)
        return oneaccord_collective(made) is not None

    reduce = Collective.ALL_REDUCE
    integers = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    assert all(offered(reduce, name, op) for name in integers for op in "sum product min max and or xor".split())
    assert all(offered(reduce, name, op) for name in ("float32", "float64") for op in ("sum", "mean", "product"))
    assert not any(offered(reduce, name, op) for name in ("float32", "float64") for op in ("min", "max", "minloc", "Op(f)"))
    others = ("bool", "float16", ml_dtypes.bfloat16, "longdouble", "complex64", "complex128", ">f8", "f8,i8")
    assert not any(offered(reduce, name, op) for name in others for op in ("sum", "product", "and"))
    moving = (Collective.BROADCAST, Collective.ALL_GATHER, Collective.ALL_TO_ALL)
    assert all(offered(collective, name) for collective in moving for name in others)
    assert not any(offered(each, "f8") for each in (Collective.GATHER, Collective.SCATTER, Collective.BARRIER))
    assert not offered(Collective.BARRIER, None, nbytes=0)
    assert not offered(Collective.SCAN, "f8", "sum")
    for other in ({"backend": "tcp"}, {"device": "cuda"}, {"nbytes": 0}, {"world_size": 1}, {"even": False}):
        assert not offered(reduce, "f8", "sum", **other)
