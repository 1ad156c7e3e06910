"""JSON of unknown origin, read into fixed types."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

import msgspec

from oneaccord_parallel.checkpoint.errors import CheckpointFormatError

__all__ = ["Count", "Extents", "decode"]

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**63 - 1)]
"""A number of bytes or elements, or a place among them."""
Extents = Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]
"""A number for each axis; NumPy has no array of more axes."""

T = TypeVar("T")
_WORDS = 1000
"""The most characters of a fault that are shown; a key may be as long as the file."""


def decode(data: bytes, kind: type[T], file: str, what: str) -> T:
    """Return the content of a text.

    Raises
    ------
    CheckpointFormatError
        It is no JSON, or not of this kind, or an object in it has a key twice.
    """
    try:
        found = msgspec.json.decode(data, type=kind)
        json.loads(data, object_pairs_hook=_distinct)
    # Text that is no UTF-8 is a plain ValueError.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointFormatError(f"{file} {what}: {str(error)[:_WORDS]}", file=file) from error
    return found


def _distinct(pairs: list[tuple[str, Any]]) -> None:
    """Refuse a key that is there twice, of which msgspec takes the last one and other readers the first."""
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise ValueError(f"an object has the key {twice!r} twice")
