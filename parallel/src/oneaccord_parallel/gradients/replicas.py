"""The same values on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from oneaccord_parallel.agreement import same_on_all, stories
from oneaccord_parallel.arrays import Array, like, need_plain, place_of, readable, shape_of, writable
from oneaccord_parallel.layout import Layout, by_dtype
from oneaccord_parallel.scaling import copy_to, empty_like
from oneaccord_parallel.trees import flatten, rebuild

if TYPE_CHECKING:
    from oneaccord import Group

__all__ = ["broadcast", "give"]

T = TypeVar("T")

_TOGETHER = 4 << 20
"""Bytes of a message that holds several arrays. One that is larger goes alone, without being copied."""


def broadcast(tree: T, group: Group, root: int = 0, *, timeout_s: float | None = None) -> T:
    """Give the arrays of one rank to all ranks: parameters before the first step, running statistics.

    Parameters
    ----------
    tree
        Any tree of arrays, of any dtypes, and numbers; names, shapes and dtypes alike on all ranks. Small arrays travel together.
    group
        Every rank of it must call this.
    root
        The rank whose values they are.
    timeout_s
        Seconds that each message may last.

    Returns
    -------
    tree
        The same tree. Arrays that can be written (NumPy, CuPy, torch) are written in place and returned; for the others (JAX, read-only
        arrays, numbers) there are new arrays or numbers.

    Raises
    ------
    UsageError
        The trees of the ranks differ, or the root; every rank raises it and says which leaf differs. Nothing has changed, and the group
        stays usable.
    InvalidRankError
        ``root`` is not in the group.
    DTypeError
        A leaf is no array.
    LayoutError
        A leaf is sparse, quantized, or without memory.
    """
    leaves, spec = flatten(tree)
    same_on_all(group, "broadcast", {**stories(leaves), "(root)": str(root)}, timeout_s=timeout_s)
    need_plain("broadcast", leaves)
    buffers = {name: readable(leaf) for name, leaf in leaves.items()}
    targets = {name: buffer if writable(leaves[name]) else _copy(buffer) for name, buffer in buffers.items()}
    give(targets, group, root, timeout_s=timeout_s)
    result: T = rebuild(spec, {name: leaf if writable(leaf) else _new(targets[name], leaf) for name, leaf in leaves.items()})
    return result


def give(buffers: Mapping[str, Array], group: Group, root: int, *, timeout_s: float | None = None) -> None:
    """Write the root's values into buffers that are alike on all ranks, as `broadcast` does."""
    for alike in by_dtype(buffers):
        together: dict[str, Array] = {}
        held = 0
        for name, buffer in alike.items():
            nbytes = buffer.nbytes
            if nbytes >= _TOGETHER:
                group.broadcast(buffer, root, out=buffer, timeout_s=timeout_s)
                continue
            if held + nbytes > _TOGETHER:
                _give_together(together, group, root, timeout_s)
                together, held = {}, 0
            together[name] = buffer
            held += nbytes
        _give_together(together, group, root, timeout_s)


def _give_together(buffers: dict[str, Array], group: Group, root: int, timeout_s: float | None) -> None:
    if not buffers:
        return
    layout = Layout.of(buffers)
    flat = empty_like(next(iter(buffers.values())), (layout.size,))
    if group.rank == root:
        layout.pack({name: _brought(buffer, flat) for name, buffer in buffers.items()}, flat)
    group.broadcast(flat, root, out=flat, timeout_s=timeout_s)
    if group.rank != root:
        for name, view in layout.views(flat).items():
            buffers[name][...] = _brought(view, buffers[name])


def _brought(array: Array, where: Array) -> Array:
    """Return an array in the library and the memory of another one: those of one dtype travel together, whatever their memory."""
    return array if place_of(array) == place_of(where) else copy_to(where, array)


def _copy(buffer: Array) -> Array:
    copy = empty_like(buffer, shape_of(buffer))
    copy[...] = buffer
    return copy


def _new(target: Array, leaf: Any) -> Any:
    """Return the value for the tree in place of ``leaf``, which cannot be written."""
    if isinstance(leaf, np.generic):
        return target[()]
    return target.item() if isinstance(leaf, bool | int | float | complex) else like(target, leaf)
