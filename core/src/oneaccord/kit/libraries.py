"""Libraries in C: where one is, found out without loading it, and its functions with their types."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from oneaccord.errors import BackendUnavailableError

__all__ = ["CLibrary", "find_library", "load_library", "loaded_libraries", "loader_folders", "python_folders"]


def loader_folders() -> list[Path]:
    """Return the folders of ``LD_LIBRARY_PATH``."""
    return [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]


def python_folders() -> list[Path]:
    """Return the folders of libraries in the environment of this Python, where wheels and conda put them."""
    return [Path(prefix) / "lib" for prefix in dict.fromkeys((sys.prefix, sys.base_prefix))]


def find_library(files: Iterable[str], folders: Iterable[Path], short: str | None = None) -> str | None:
    """Return where a library is, without loading it.

    Parameters
    ----------
    files
        The names that its file may have, such as ``"libucp.so.0"``.
    folders
        Where to look, the first one first, such as `loader_folders` and `python_folders`.
    short
        Its name for the linker, such as ``"ucp"``, by which the system may know it, too; None not to ask the system.

    Returns
    -------
    str or None
        The path, or the name by which the loader finds it; None if there is none.
    """
    names = list(files)
    for path in (folder / name for folder in folders for name in names):
        if path.exists():
            return str(path)
    if short is None:
        return None
    from ctypes.util import find_library as ask_system  # it imports subprocess, which most callers do not need

    return ask_system(short)


def loaded_libraries(file: str) -> list[str]:
    """Return the paths of a library that this process has loaded.

    Parameters
    ----------
    file
        How the name of its file begins, such as ``"libucp.so"``.

    Returns
    -------
    list of str
        The paths, in order; empty also where the system does not tell.
    """
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return sorted({line.split(maxsplit=5)[5] for line in lines if f"/{file}" in line})


class CLibrary:
    """The functions of a library in C, as attributes, by their names without the library's prefix.

    A subclass says which library it is. An object of it holds the library for as long as it lives.

    Parameters
    ----------
    path
        What the loader is given.

    Attributes
    ----------
    name
        The library's name in errors.
    file
        How the name of its file begins, such as ``"libucp.so"``.
    oldest
        The oldest version that will do.
    why_oldest
        What is wrong with older ones; may be empty.
    functions
        The result and the arguments of each function, by its whole name: ``{"ucp_cleanup": (None, (c_void_p,))}``. Among them are
        ``PREFIX_status_string`` and, unless `read_version` is overridden, ``PREFIX_get_version``.
    handle
        The library as ctypes has it.
    path
        Where the loader found it.
    version
        Its version.

    Raises
    ------
    OSError
        The library, or one that it needs, cannot be loaded. See `load_library`.
    BackendUnavailableError
        It lacks a function, or is too old.
    """

    name: ClassVar[str]
    file: ClassVar[str]
    oldest: ClassVar[tuple[int, ...]]
    why_oldest: ClassVar[str] = ""
    functions: ClassVar[Mapping[str, tuple[Any, tuple[Any, ...]]]]

    def __init__(self, path: str) -> None:
        self.handle: ctypes.CDLL = ctypes.CDLL(path)
        oldest = ".".join(map(str, self.oldest))
        for name, (result, arguments) in self.functions.items():
            try:
                function = getattr(self.handle, name)
            except AttributeError:
                raise BackendUnavailableError(
                    f"{path} has no function {name}: oneaccord needs {self.name} {oldest} or newer"
                ) from None
            function.restype, function.argtypes = result, arguments
            setattr(self, name.partition("_")[2], function)
        self.path: str = next(iter(loaded_libraries(self.file)), path)
        self.version: tuple[int, ...] = self.read_version()
        if self.version < self.oldest:
            why = f": {self.why_oldest}" if self.why_oldest else ""
            raise BackendUnavailableError(
                f"{self.path} is {self.name} {self.words}, and oneaccord needs {oldest} or newer{why}"
            )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def read_version(self) -> tuple[int, ...]:
        """Return the version of the library: by default the three numbers that ``PREFIX_get_version`` writes."""
        numbers = [ctypes.c_uint() for _ in range(3)]
        self.get_version(*map(ctypes.byref, numbers))
        return tuple(number.value for number in numbers)

    @property
    def words(self) -> str:
        """The version in words, such as ``"1.21.0"``."""
        return ".".join(map(str, self.version))

    def why(self, status: int) -> str:
        """Return what a status says in words, by ``PREFIX_status_string``.

        Parameters
        ----------
        status
            What a function returned.

        Returns
        -------
        str
            The words of the library.
        """
        words: bytes = self.status_string(status)
        return words.decode("utf-8", "replace")


L = TypeVar("L")


def load_library(make: Callable[[str], L], name: str, paths: Iterable[str], hint: str = "") -> L:
    """Return the first of some libraries that can be loaded.

    Parameters
    ----------
    make
        Loads a path, such as a subclass of `CLibrary`; raises OSError where it cannot.
    name
        The library's name for the error.
    paths
        What the loader is given, in turn.
    hint
        What may help, for the end of the error.

    Returns
    -------
    object
        What ``make`` returned.

    Raises
    ------
    BackendUnavailableError
        None can be loaded; the error has the reason for each. Or the one that was loaded will not do.
    """
    reasons: list[str] = []
    cause: OSError | None = None
    for path in paths:
        try:
            return make(path)
        except OSError as error:
            reasons.append(str(error))
            cause = error
    reasons += [hint] if hint else []
    raise BackendUnavailableError(f"{name} cannot be loaded: {'; '.join(reasons)}") from cause
