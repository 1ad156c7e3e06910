"""The leaves of trees of gradients: arrays, numbers, and this rank's part of distributed arrays."""

from __future__ import annotations

from typing import Any

import array_api_compat

from oneaccord.errors import DTypeError, UsageError
from oneaccord_parallel.arrays import dtype_of, namespace, place_of, readable, shape_of, summed_in
from oneaccord_parallel.dtensor.dtensor import DTensor, divided_axes
from oneaccord_parallel.gradients.buckets import Leaf

__all__ = ["emptied", "leaf_of", "local_part", "part_in_words"]


def emptied(leaf: DTensor) -> DTensor:
    """Return how a distributed array lies, without its memory."""
    return DTensor(None, leaf.mesh, leaf._spec)


def part_in_words(leaf: DTensor) -> str:
    """Return which part of a distributed array this rank has: the ranks that average must have the same one."""
    part = f"{leaf.dtype}{list(shape_of(leaf.local))} at {list(leaf.offset)}"
    return f"{part} of a DTensor of shape {leaf.shape}, {list(leaf.placements)}"


def local_part(name: str, leaf: Any) -> Any:
    """Return the local part of a distributed array, and anything else as it is."""
    if not isinstance(leaf, DTensor):
        return leaf
    try:
        divided_axes(leaf)
    except UsageError as error:
        raise UsageError(f"leaf {name!r}: {error}") from None
    return leaf.local


def leaf_of(name: str, leaf: Any, reduce_dtype: str | None) -> Leaf:
    """Return the facts about a leaf before there is a gradient of it.

    Raises
    ------
    DTypeError
        It is not of floats or complex numbers, or ``reduce_dtype`` is no dtype of floats.
    """
    buffer = readable(leaf)
    dtype = dtype_of(buffer)
    if not dtype.startswith(("float", "bfloat", "complex")):
        raise DTypeError(
            f"gradients must be floats or complex numbers, but the leaf {name!r} is {dtype}; leave it out of like="
        )
    wire = dtype
    if not dtype.startswith("complex"):
        wire = summed_in(dtype, reduce_dtype)
        if not wire.startswith(("float", "bfloat")):
            raise DTypeError(f"reduce_dtype must be a dtype of floats, such as 'float32', not {reduce_dtype!r}")
    if not hasattr(leaf, "dtype"):
        leaf = buffer
    template = namespace(leaf).empty((0,), dtype=leaf.dtype, device=array_api_compat.device(leaf))
    return Leaf(shape_of(leaf), dtype, wire, place_of(leaf), template)
