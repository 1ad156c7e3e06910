"""Frozen data that costs little to make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

__all__ = ["as_dataclass"]

_T = TypeVar("_T", bound=type)


def as_dataclass(struct: _T) -> _T:
    """Let `dataclasses.replace`, `fields` and `asdict` take the objects of a ``msgspec.Struct``, and return it.

    To declare a struct, and to make, compare or hash one, takes a fraction of the time of a dataclass with slots, and no Python call.
    """
    assert struct.__doc__, "a dataclass without a docstring makes one up, which takes long"
    adorned: _T = dataclass(init=False, repr=False, eq=False, match_args=False)(struct)  # type: ignore[assignment]
    return adorned
