"""Clip gradients by their norm over all ranks, for any division among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NoReturn

import numpy as np

from oneaccord import DeviceMesh, Group
from oneaccord.errors import DTypeError, UsageError
from oneaccord_parallel.arrays import Array, dtype_of, like, namespace, need_plain, readable, writable
from oneaccord_parallel.dtensor.dtensor import DTensor, divided_axes
from oneaccord_parallel.overlaps import memory_of, need_apart
from oneaccord_parallel.sharded_arrays import ShardedArray
from oneaccord_parallel.trees import flatten, named, rebuild

__all__ = ["clip_by_global_norm"]

Placement = str | AbstractSet[str]
Placements = Placement | Mapping[str, Any] | Callable[[str, Any], Placement] | Any

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64", "complex64", "complex128"})
_CHUNK = 1 << 20
"""Elements that are converted at once, so that a norm needs little memory."""
_SCALES = (2.0**600, 1.0, 2.0**-600)
"""Numbers whose squares float64 cannot hold are squared when multiplied by the first or the last of these (Anderson, "Algorithm 978: Safe
scaling in the level 1 BLAS", ACM TOMS 44, 2017). Sums that have a common scale add up, so that all ranks need one all_reduce."""
_LEAST = 2.0**-900
"""Below it, a sum of squares may have lost some that were too small, and above its inverse, several sums may overflow."""


def clip_by_global_norm(
    grads: Any,
    max_norm: float,
    group: Group | DeviceMesh | None = None,
    placements: Placements = None,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    timeout_s: float | None = None,
) -> tuple[Any, float]:
    """Scale gradients so that the norm of all of them together, over all ranks, is at most ``max_norm``.

    The norm is that of one process that holds every gradient once. It is computed in float64, by one all_reduce of a few numbers if a group is
    given, and is the same on all ranks, bit for bit. Gradients with a larger norm are multiplied by ``max_norm / norm``.

    Parameters
    ----------
    grads
        A tree of arrays of floats, real or complex: final gradients, after all reductions. An array that occurs at several places
        of the tree counts once, also as several views that have the same elements in the same shape, such as ``x`` and ``x[:]``, whether they can be
        written to or not. Arrays that share memory otherwise, such as ``x`` and ``x.reshape(-1)`` or ``x[::-1]``, are refused if one of them
        can be written to. Arrays that repeat an element, as broadcast and expanded ones do, are values: the same object counts once. A
        `ShardedArray` is a part that only this rank holds. Of a `DTensor` each element counts once, as its placements say.
    max_norm
        The largest norm that stays as it is; infinity to compute the norm alone. The same on all ranks.
    group
        The ranks that hold parts, or a `DeviceMesh`. By default the mesh of the `DTensor`, if there is any; else this rank holds everything. The
        group must carry host arrays.
    placements
        The way in which the ranks hold the arrays: ``"replicated"``, the same array as on the other ranks, which counts once; ``"sharded"``, a part that no other
        rank holds; on a mesh of several axes, instead of that, the axis along which the array is divided, or the set of axes. One of these for
        all arrays, a tree like ``grads`` (or a dict by names such as ``"layers.0.w"``), or a function of name and array. By default, a
        `ShardedArray` is sharded, a `DTensor` is placed as it says, and all else is replicated. If all ranks say ``"replicated"`` for all arrays, no
        message is sent.
    norm_type
        2, or infinity for the largest magnitude.
    error_if_nonfinite
        Whether a norm that is infinite or NaN is an error. Otherwise, as in torch, NaN makes all gradients NaN, and infinity makes them 0,
        but infinite ones NaN.
    timeout_s
        Seconds that the all_reduce may last.

    Returns
    -------
    tuple
        The tree of gradients, and the norm before clipping, a float. Arrays that can be written are scaled in place; for others, such as
        those of JAX, the tree holds new ones.

    Raises
    ------
    UsageError
        ``max_norm`` is negative or NaN, ``norm_type`` is another, a placement is missing or unknown, is ``"sharded"`` on a mesh of several axes
        of more than one rank, or is not that of a `DTensor`; a `DTensor` is `Partial` or on other ranks; an array is sharded and there is no
        group; or arrays share some of their memory. With ``error_if_nonfinite``, on all ranks: the norm is not finite. The gradients are then unchanged.
        If a message is sent, an error of one rank is raised on all: on the others as a `UsageError` that names the rank.
    DTypeError
        A gradient is no array, or not one of float16, bfloat16, float32, float64, complex64 and complex128.
    LayoutError
        A gradient is sparse, quantized, or without memory.
    """
    leaves, spec = flatten(grads)
    meshes = [leaf.mesh for leaf in leaves.values() if isinstance(leaf, DTensor)]
    if group is None and meshes:
        group = meshes[0]
    ranks = _ranks(group) if group is not None and _asks(placements, meshes) else None
    parts: dict[str, list[Array]] = {}
    counted: dict[Hashable, Array] = {}
    failure: Exception | None = None
    try:  # an error of one rank travels with the norm, because the others wait for that
        _check_numbers(max_norm, norm_type)
        parts = {name: _arrays(name, leaf) for name, leaf in leaves.items()}
        counts = _counted(leaves, group, placements)
        # The same array may be there several times, or views of the same memory; those that overlap in part would be scaled twice.
        need_apart({f"{name}, piece {number}": array for name, arrays in parts.items() for number, array in enumerate(arrays)})
        counted = {
            memory_of(array): array for name, arrays in parts.items() if counts[name] or ranks is None for array in arrays
        }
    except Exception as error:  # noqa: BLE001 - such as one of a placement function; it is raised below
        failure = error
    norm, failed = _norm(list(counted.values()), norm_type, failure is not None, ranks, timeout_s)
    if failed:
        _refuse(failure, ranks, timeout_s)
    if error_if_nonfinite and not math.isfinite(norm):
        raise UsageError(f"the norm of the gradients is {norm}, and error_if_nonfinite is given; nothing was scaled")
    if norm <= max_norm:
        return grads, norm
    done: dict[Hashable, Any] = {}
    with np.errstate(invalid="ignore"):  # 0 times infinity
        # First the new ones, as long as what can be written, and may be the same memory, is as it was.
        for array in sorted((array for arrays in parts.values() for array in arrays), key=writable):
            _scaled(array, max_norm / norm, done)
        return rebuild(spec, {name: _scaled(leaf, max_norm / norm, done) for name, leaf in leaves.items()}), norm


def _asks(placements: Placements, meshes: list[DeviceMesh | Group]) -> bool:
    """Return whether the ranks communicate: always, unless all say that everything is replicated, because their arrays may differ."""
    return bool(meshes) or not (placements == "replicated" if isinstance(placements, str) else placements == frozenset())


def _check_numbers(max_norm: float, norm_type: float) -> None:
    if not max_norm >= 0:
        raise UsageError(f"max_norm must be a number of at least 0, not {max_norm!r}")
    if norm_type not in (2, math.inf):
        raise UsageError(f"norm_type must be 2 or infinity, not {norm_type!r}")


def _refuse(failure: Exception | None, group: Group | None, timeout_s: float | None) -> NoReturn:
    """Raise the error of this rank, or else report that of another one."""
    said = (
        []
        if group is None
        else group.all_gather_object(None if failure is None else str(failure) or repr(failure), timeout_s=timeout_s)
    )
    if failure is not None:
        raise failure
    rank, text = next((rank, text) for rank, text in enumerate(said) if text is not None)
    raise UsageError(f"clip_by_global_norm was refused on rank {rank}, and nothing was scaled: {text}", peer=rank)


def _counted(leaves: Mapping[str, Any], group: Group | DeviceMesh | None, placements: Placements) -> dict[str, bool]:
    """Return whether this rank counts each array.

    Raises
    ------
    UsageError
        A placement is wrong or missing, or something is sharded and there is no group.
    """
    found: dict[str, frozenset[str]] = {}
    if callable(placements):
        found = {name: _axes(group, placements(name, leaf), name) for name, leaf in leaves.items()}
    elif isinstance(placements, str | AbstractSet):
        found = dict.fromkeys(leaves, _axes(group, placements, "all"))
    elif placements is not None:
        found = {name: _axes(group, placement, name) for name, placement in named(placements).items()}
        missing = [name for name, leaf in leaves.items() if name not in found and not isinstance(leaf, ShardedArray | DTensor)]
        if missing:
            raise UsageError(
                f'no placement is given for {", ".join(map(repr, missing))}; say "replicated" or "sharded" for each gradient'
            )
    counted: dict[str, bool] = {}
    for name, leaf in leaves.items():
        own = _own_axes(name, leaf, group, found.get(name))
        if own is not None:
            counted[name] = _is_first(leaf.mesh, own)
            continue
        default = _axes(group, "sharded", name) if isinstance(leaf, ShardedArray) and name not in found else frozenset()
        own = found.get(name, default)
        if own and group is None:
            raise UsageError(
                "some gradients are sharded, but no group is given; give group= with the ranks that hold the parts"
            )
        counted[name] = _is_first(group, own)
    return counted


def _grid(group: Group | DeviceMesh | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the names of a mesh's axes, and the place of this rank; a group is a mesh with a single axis."""
    if isinstance(group, DeviceMesh):
        return group.names, group.coordinates
    return ("sharded",), (group.rank if group is not None else 0,)


def _axes(group: Group | DeviceMesh | None, placement: Any, name: str) -> frozenset[str]:
    """Return the axes along which an array is divided."""
    names = _grid(group)[0]
    if placement == "replicated":
        return frozenset()
    if placement == "sharded":
        if isinstance(group, DeviceMesh) and sum(extent > 1 for extent in group.shape) > 1:
            raise UsageError(
                f'"sharded" does not say along which axes of {names} the array {name!r} is divided, and along the others copies would count '
                f"as parts: give an axis, such as {names[-1]!r}, or the set of them, such as {set(names)}"
            )
        return frozenset(names)
    axes = frozenset({placement} if isinstance(placement, str) else placement if isinstance(placement, AbstractSet) else {None})
    if not axes <= set(names):
        known = "" if names == ("sharded",) else f", an axis of {names} or a set of them"
        raise UsageError(f'the placement of {name!r} must be "replicated", "sharded"{known}, and is {placement!r}')
    return axes


def _own_axes(name: str, leaf: Any, group: Group | DeviceMesh | None, given: frozenset[str] | None) -> frozenset[str] | None:
    """Return the axes of its own mesh along which a `DTensor` is divided; None for all else, and on other ranks than the group's.

    Raises
    ------
    UsageError
        It is a reduction that has not been made, it has another placement than was given, or it is on other ranks and no placement was given.
    """
    if not isinstance(leaf, DTensor):
        return None
    own = divided_axes(leaf)
    names = _grid(leaf.mesh)[0]
    axes = frozenset(names[axis] for axis in own)
    if group is None or _ranks(leaf.mesh).ranks != _ranks(group).ranks:
        if given is None:
            raise UsageError(
                f"the gradient {name!r} is {leaf!r}, on the ranks {list(_ranks(leaf.mesh).ranks)}, and the norm is that over the ranks "
                f"{'of no group' if group is None else list(_ranks(group).ranks)}: give group= with the mesh of the array, or say in placements= "
                "how its local part lies on the group"
            )
        return None
    is_same = _layout(group) == _layout(leaf.mesh)
    trivial = {each for each, extent in zip(*_layout(leaf.mesh), strict=True) if extent == 1}
    if is_same and given is not None and given - trivial != axes:
        raise UsageError(
            f"the placement given for {name!r} is {sorted(given) or 'replicated'}, and it is {leaf!r}; leave it out, because a DTensor has its own placements"
        )
    return axes


def _ranks(group: Group | DeviceMesh) -> Group:
    return group.parent if isinstance(group, DeviceMesh) else group


def _layout(group: Group | DeviceMesh) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the names and the extents of the axes of a mesh, of which a group has one."""
    return (group.names, group.shape) if isinstance(group, DeviceMesh) else (("sharded",), (group.world_size,))


def _is_first(group: Group | DeviceMesh | None, axes: frozenset[str]) -> bool:
    """Return whether this rank is the first of those that hold the same array, which is the one that counts it."""
    return all(axis in axes or coordinate == 0 for axis, coordinate in zip(*_grid(group), strict=True))


def _arrays(name: str, leaf: Any) -> list[Array]:
    arrays = [array for _, array in leaf.pieces] if isinstance(leaf, ShardedArray) else [leaf]
    if isinstance(leaf, DTensor):
        arrays = [leaf.local]
    for array in arrays:
        need_plain("clip_by_global_norm", {name: array})
        if (dtype := dtype_of(readable(array))) not in _FLOATS:
            raise DTypeError(
                f"gradients must be floats, but {name or 'the only leaf'} is an array of dtype {dtype}; leave it out of the tree"
            )
    return arrays


def _norm(
    arrays: list[Array], norm_type: float, has_failed: bool, group: Group | None, timeout_s: float | None
) -> tuple[float, bool]:
    """Return the norm of some arrays, and of those of all other ranks; and whether any rank has failed."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if norm_type == math.inf:
            # NumPy's maximum keeps a NaN, Python's does not.
            told = np.array([np.max([0.0, *(_largest(array) for array in arrays)]), has_failed])
            if group is not None:
                told = group.all_reduce(told, "max", timeout_s=timeout_s)
            return float(told[0]), bool(told[1])
        told = np.zeros(len(_SCALES) + 1)
        told[-1] = has_failed
        for array in arrays:
            place, total = _sum_of_squares(array)
            told[place] += total
        if group is not None:
            told = group.all_reduce(told, reproducible=True, timeout_s=timeout_s)
        sums = told[:-1]
        # hypot takes infinity for larger than NaN.
        return math.nan if np.isnan(sums).any() else math.hypot(*(np.sqrt(sums) / _SCALES).tolist()), bool(told[-1])


def _sum_of_squares(array: Array) -> tuple[int, float]:
    """Return the sum of the squares of an array, and the place in `_SCALES` of the factor of its elements."""

    def total(scale: float) -> float:
        # One float() at the end, for which a GPU must be waited for.
        return float(sum(((part * scale) ** 2).sum() for part in _magnitudes(array)))

    middle = total(1.0)
    if middle > 1 / _LEAST:
        return 2, total(_SCALES[2])
    if middle < _LEAST:
        return 0, total(_SCALES[0])
    return 1, middle


def _largest(array: Array) -> float:
    return float(np.max([0.0, *(float(part.max()) for part in _magnitudes(array))]))


def _magnitudes(array: Array) -> Iterator[Array]:
    """Yield the magnitudes of an array's elements in float64, some at a time."""
    flat = readable(array).reshape(-1)
    xp = namespace(flat)
    wide = xp.complex128 if dtype_of(flat).startswith("complex") else xp.float64
    for start in range(0, flat.shape[0], _CHUNK):
        yield xp.abs(xp.astype(flat[start : start + _CHUNK], wide))


def _scaled(leaf: Any, factor: float, done: dict[Hashable, Any]) -> Any:
    """Return a leaf multiplied by a factor: itself, if its memory can be written. ``done`` has the result for each array so far."""
    if isinstance(leaf, ShardedArray):
        pieces = [(box.offset, _scaled(array, factor, done)) for box, array in leaf.pieces]
        return leaf if all(writable(array) for _, array in leaf.pieces) else ShardedArray(leaf.shape, pieces, leaf.dtype)
    if isinstance(leaf, DTensor):
        local = _scaled(leaf.local, factor, done)
        return leaf if writable(leaf.local) else leaf.with_local(local)
    key = writable(leaf), memory_of(leaf)
    if key not in done:
        done[key] = _product(leaf, factor)
    return leaf if writable(leaf) else done[key]


def _product(leaf: Array, factor: float) -> Array:
    buffer = readable(leaf)
    xp = namespace(buffer)
    # The factor itself would be rounded too much, or become zero, in a dtype of 16 bits.
    narrow = dtype_of(buffer) in {"float16", "bfloat16"}
    if not writable(leaf):
        product = (xp.astype(buffer, xp.float32) if narrow else buffer) * factor
        return like(xp.astype(product, buffer.dtype), leaf)
    if narrow:
        buffer[...] = xp.astype(buffer, xp.float32) * factor
    else:
        buffer *= factor
    return leaf
