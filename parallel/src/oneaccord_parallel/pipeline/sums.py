"""Sums of trees of arrays over microbatches, in the order in which they come."""

from __future__ import annotations

from typing import Any

import numpy as np

from oneaccord.errors import DTypeError, SizeMismatchError, UsageError
from oneaccord_parallel.arrays import dtype_of, namespace, readable, shape_of, summed_in
from oneaccord_parallel.trees import flatten, rebuild

__all__ = ["TreeSum"]


class TreeSum:
    """The sum of trees of arrays that are alike; those of 16 bits are summed in float32, and the result has their dtype."""

    def __init__(self) -> None:
        self._dtypes: dict[str, Any] = {}
        self._leaves: dict[str, Any] | None = None
        self._spec: Any = None

    def add(self, tree: Any) -> None:
        """Add a tree; that itself is never written to.

        Raises
        ------
        UsageError, SizeMismatchError, DTypeError
            Its names, shapes or dtypes are not those of the trees before.
        """
        leaves, spec = flatten(tree)
        if self._leaves is None:
            self._dtypes = {name: readable(leaf).dtype for name, leaf in leaves.items()}
            self._leaves, self._spec = {name: _own(leaf) for name, leaf in leaves.items()}, spec
            return
        if leaves.keys() != self._leaves.keys():
            odd = sorted(leaves.keys() ^ self._leaves.keys())
            raise UsageError(
                f"the gradients of all microbatches must have the same names, but {', '.join(map(repr, odd))} is not in all of them"
            )
        for name, leaf in leaves.items():
            total = self._leaves[name]
            more = leaf if _is_fixed(leaf) else readable(leaf)
            if shape_of(more) != shape_of(total):
                raise SizeMismatchError(
                    f"the gradient {name!r} has the shape {shape_of(more)}, and had {shape_of(total)} before"
                )
            if readable(leaf).dtype != self._dtypes[name]:
                raise DTypeError(
                    f"the gradient {name!r} is of {dtype_of(more)}, and was of {str(self._dtypes[name]).removeprefix('torch.')} before"
                )
            if _is_fixed(total):
                self._leaves[name] = total + more
            else:
                total += more

    def result(self, parts: int) -> Any:
        """Return the sum, divided by a number of parts; None if nothing was added."""
        if self._leaves is None:
            return None
        # A quotient of NumPy arrays without dimensions is not an array.
        means = {name: leaf if parts == 1 else namespace(leaf).asarray(leaf / parts) for name, leaf in self._leaves.items()}
        return rebuild(self._spec, {name: _cast(mean, self._dtypes[name]) for name, mean in means.items()})


def _is_fixed(array: Any) -> bool:
    """Return whether arrays of this library never change: JAX's."""
    return type(array).__module__.partition(".")[0] in ("jax", "jaxlib")


def _own(leaf: Any) -> Any:
    array = leaf if _is_fixed(leaf) else readable(leaf)
    xp, dtype = namespace(array), dtype_of(array)
    if "float" in dtype and summed_in(dtype) != dtype:
        return xp.astype(array, getattr(xp, summed_in(dtype)))
    return array if _is_fixed(leaf) else xp.asarray(array, copy=True)


def _cast(array: Any, dtype: Any) -> Any:
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):  # a sum that is too large becomes infinity, as with all arithmetic of gradients
        return namespace(array).astype(array, dtype)
