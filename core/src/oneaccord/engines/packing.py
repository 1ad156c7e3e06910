"""Functions and values on their way to a rank and back: by pickle, or by cloudpickle if a name alone does not lead to them."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from oneaccord.common.installing import install_command
from oneaccord.errors import UsageError

__all__ = ["pack", "unpack"]

_OF_PROGRAM = frozenset({"__main__", "__mp_main__"})


class _NotByName(Exception):
    """A function or a class of the program itself, which has another ``__main__`` in a rank, or of a module that the user sends by value."""


class _Pickler(pickle.Pickler):
    """Refuses what pickle would send by a name that means something else in a rank."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        known = sys.modules.get("cloudpickle")
        # What `cloudpickle.register_pickle_by_value` was told: the ranks have no such module.
        self._by_value = _OF_PROGRAM | (set() if known is None else known.list_registry_pickle_by_value())

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (FunctionType, type)) and not self._by_value.isdisjoint(_and_parents(obj.__module__)):
            raise _NotByName(obj.__qualname__)
        return NotImplemented


def _and_parents(module: str | None) -> Iterator[str]:
    parts = (module or "").split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def pack(value: Any, what: str) -> bytes:
    """Return a value as bytes for another process.

    Parameters
    ----------
    value
        The value.
    what
        The value in words, for the error: ``"the function f"``.

    Raises
    ------
    UsageError
        It cannot be pickled, or only by cloudpickle, which is not installed.
    """
    file = io.BytesIO()
    try:
        _Pickler(file).dump(value)
        return file.getvalue()
    except Exception as error:  # noqa: BLE001 - objects of any kind raise what they like
        problem: Exception = error
    try:
        import cloudpickle
    except ImportError:
        reason = (
            f"{problem} is defined in the program itself, a notebook or an interactive session"
            if isinstance(problem, _NotByName)
            else f"pickle says {type(problem).__name__}: {problem}"
        )
        install = install_command("pip install 'oneaccord[launch]'")
        raise UsageError(
            f"{what} cannot be sent to the ranks by its name: {reason}. Install cloudpickle ({install}), or define it in a module that "
            "the ranks can import"
        ) from None
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise UsageError(
            f"{what} cannot be pickled ({type(error).__name__}: {error}): pass what can be, such as arrays, names of files and plain data, and open "
            "files and connections on the ranks"
        ) from error
    return data


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """Return the value of `pack`; only for bytes of the same job, because reading them runs code."""
    return pickle.loads(data)  # noqa: S301 - from the program that started this rank, or from a rank that it started
