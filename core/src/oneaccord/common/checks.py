"""Checks of users' values."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any, Final

__all__ = ["UNREADABLE", "is_number", "is_success", "safe_str", "whole"]


UNREADABLE: Final = (ValueError, TypeError, ArithmeticError, LookupError, RecursionError, MemoryError)
"""The exceptions of decoders for bytes that they cannot read: of msgspec, JSON, TOML and text, for bytes and structures of any kind and depth."""


def is_success(error: BaseException) -> bool:
    """Return whether an exception is only ``sys.exit()`` with nothing wrong."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def safe_str(error: BaseException) -> str:
    """Return the words of an exception, which may come from anywhere, and may have none that can be had."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the exception whose text fails matters more
        return "(its words cannot be shown)"


def is_number(value: Any) -> bool:
    """Return whether this is a real number: Python's, NumPy's or another one's."""
    return isinstance(value, Real)


def whole(value: Any) -> int | None:
    """Return a Python or NumPy integer as an int; None for anything else, True and False included."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
