"""Libraries in C are found without loading them, and what is wrong with one is said in words."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import MappingProxyType

import pytest

from oneaccord.api import (
    BackendUnavailableError,
    CLibrary,
    find_library,
    load_library,
    loaded_libraries,
    loader_folders,
    python_folders,
)
from oneaccord.kit import libraries


class Libc(CLibrary):
    """The library that each process of Linux has."""

    name = "libc"
    file = "libc.so"
    oldest = (2, 1)
    functions = MappingProxyType({"gnu_get_libc_version": (ctypes.c_char_p, ())})

    def read_version(self) -> tuple[int, ...]:
        return tuple(map(int, self.get_libc_version().decode().split(".")))


class TooOld(Libc):
    oldest = (99,)
    why_oldest = "before, it counted wrongly"


class Lacking(Libc):
    functions = MappingProxyType({"gnu_no_such_function": (None, ())})


def test_find_library_takes_the_first_folder_then_asks_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setattr("ctypes.util.find_library", lambda short: f"lib{short}.so.7")
    assert find_library(["libpony.so.1"], [first, second]) is None
    assert find_library(["libpony.so.1"], [first, second], "pony") == "libpony.so.7"
    for folder, name in [(second, "libpony.so.2"), (second, "libpony.so.1"), (first, "libpony.so.2")]:
        folder.mkdir(exist_ok=True)
        (folder / name).touch()
        assert find_library(["libpony.so.1", "libpony.so.2"], [first, second], "pony") == str(folder / name)


def test_library_folders_are_those_of_the_loader_and_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join(["", str(tmp_path / "one"), "", str(tmp_path / "two")]))
    assert loader_folders() == [tmp_path / "one", tmp_path / "two"]
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert loader_folders() == []
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "base"))
    assert python_folders() == [tmp_path / "lib", tmp_path / "base" / "lib"]
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    assert python_folders() == [tmp_path / "lib"]


def test_loaded_libraries_are_read_from_the_map_of_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    maps = tmp_path / "maps"
    row = "7f4a-7f4b r-xp 00000000 08:01 99 "
    paths = ["/usr/lib/libc.so.6", "/opt/my libs/libucp.so.0.0.0", "/opt/my libs/libucp.so.0.0.0"]
    maps.write_text("\n".join([row, *(f"{row} {path}" for path in paths)]))
    monkeypatch.setattr(libraries, "Path", lambda _: maps)
    assert loaded_libraries("libucp.so") == ["/opt/my libs/libucp.so.0.0.0"]
    maps.unlink()
    assert loaded_libraries("libucp.so") == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs the C library of Linux")
def test_library_in_c_has_functions_version_and_path():
    libc = load_library(Libc, "libc", ["libnone.so.0", "libc.so.6"])
    assert libc.get_libc_version().decode() == libc.words
    assert libc.version > (2, 1)
    assert type("Oldest", (Libc,), {"oldest": libc.version})("libc.so.6").version == libc.version
    assert "/libc.so" in libc.path


@pytest.mark.skipif(sys.platform != "linux", reason="needs the C library of Linux")
def test_library_that_will_not_do_says_why():
    with pytest.raises(BackendUnavailableError, match=r"is libc 2\.\d+, and oneaccord needs 99 or newer: before, it counted"):
        load_library(TooOld, "libc", ["libc.so.6"])
    with pytest.raises(BackendUnavailableError, match=r"has no function gnu_no_such_function: oneaccord needs libc 2\.1 or"):
        load_library(Lacking, "libc", ["libc.so.6"])


def test_library_that_cannot_be_loaded_is_told_with_each_reason():
    with pytest.raises(BackendUnavailableError, match=r"^Pony cannot be loaded: libone.*; libtwo.*; buy one$") as caught:
        load_library(Libc, "Pony", ["libone.so.0", "libtwo.so.0"], "buy one")
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(BackendUnavailableError, match=r"^Pony cannot be loaded: buy one$"):
        load_library(Libc, "Pony", [], "buy one")
