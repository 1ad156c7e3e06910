"""The compiled executor, if it is installed."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

__all__ = ["native", "why_not_native"]


def native() -> ModuleType | None:
    """Return the module ``oneaccord_native``; None if it is not installed or could not be built."""
    return _load()[0]


def why_not_native() -> str:
    """Return a text with the reason why `native` returns None; empty if it does not."""
    return _load()[1]


@cache
def _load() -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module("oneaccord_native"), ""
    except ModuleNotFoundError as error:
        if error.name == "oneaccord_native":
            return None, "not installed"
        return None, "installed without its compiled part, because there was no C compiler"
    except ImportError as error:
        return None, str(error)
