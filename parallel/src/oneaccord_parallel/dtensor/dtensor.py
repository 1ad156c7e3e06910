"""Distributed arrays: made of whole ones or of parts, redistributed, and joined."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from oneaccord.errors import DTypeError, SizeMismatchError, UsageError
from oneaccord_parallel.agreement import same_on_all
from oneaccord_parallel.arrays import Array, dtype_of, itemsize, need_plain, oddity, readable, shape_of
from oneaccord_parallel.axes import flat, value
from oneaccord_parallel.dtensor.moves import Place, move
from oneaccord_parallel.dtensor.placements import Partial, Placement, Replicate, Shard, tuples
from oneaccord_parallel.dtensor.plan import Step, plan
from oneaccord_parallel.dtensor.spec import Spec
from oneaccord_parallel.sharded_arrays import Inert, ShardedArray

if TYPE_CHECKING:
    from oneaccord import DeviceMesh, Group

__all__ = ["DTensor", "distribute", "divided_axes", "from_local", "lie_alike"]


class DTensor(Inert):
    """An array that lies distributed on a mesh. Made by `distribute` and `from_local`; it does not change.

    It has no operators, and functions of NumPy and torch, ``==`` and ``if`` refuse it: compute with ``local``, and make the result a distributed array by
    `with_local`, or take the whole array by `full`. It has only the value of a torch tensor, without its history.

    Attributes
    ----------
    local
        The part of this rank: an array of NumPy, CuPy, torch or JAX.
    mesh
        The mesh, or the group.
    placements
        For each axis of the mesh the placement of the array on it. Axes of the array are counted from 0, and the counts of a `Shard` are None if they
        are the usual ones.
    shape
        The shape of the whole array.
    dtype
        The dtype, by name.
    offset
        The index of this rank's first element in the whole array.
    """

    _advice = "Compute with its local, and make the result one by with_local(); full() returns the whole array"

    def __init__(self, local: Array, mesh: DeviceMesh | Group, spec: Spec) -> None:
        self.local = local
        self.mesh = mesh
        self._spec = spec
        self._place = _place_of(mesh)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """For each axis of the mesh how the array lies on it."""
        return self._spec.placements

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self._spec.shape

    @property
    def dtype(self) -> str:
        """The dtype, by name."""
        return dtype_of(self.local)

    @property
    def offset(self) -> tuple[int, ...]:
        """The index of this rank's first element in the whole array."""
        return self._spec.box(self._place.coordinates).offset

    def __repr__(self) -> str:
        return f"DTensor({self.shape}, {self.dtype}, {list(self.placements)}, local {shape_of(self.local)} at {self.offset})"

    def redistribute(
        self,
        placements: Sequence[Placement],
        *,
        check: bool = True,
        reproducible: bool | None = True,
        timeout_s: float | None = None,
    ) -> DTensor:
        """Return the same array in another distribution. Every rank must call it.

        The steps are those that `explain` lists. They send, of an array of N bytes on p ranks, from each rank:

        - ``Shard -> Replicate``, by all_gather: ``(p - 1) / p * N`` bytes.
        - ``Partial -> Replicate``, by all_reduce, as reduce_scatter and all_gather: ``2 * (p - 1) / p * N``.
        - ``Partial -> Shard``, by reduce_scatter: ``(p - 1) / p * N``.
        - ``Shard(i) -> Shard(j)``, by all_to_all: ``(p - 1) / p**2 * N``.
        - ``Replicate -> Shard``, a slice: 0.
        - Any to ``Partial``, which is elsewhere zeros, or what the op does not notice: 0.

        If an all_to_all has parts of several sizes, the sizes travel as well: 8 bytes for each other rank. On four ranks
        or more, small parts of one size (on one host up to 64 KiB of a rank) go by Bruck's algorithm, about ``log2(p) / 2`` of a rank's bytes in
        fewer messages, unless the config says ``algorithms.all_to_all = "pairwise"``.

        Parameters
        ----------
        placements
            One for each axis of the mesh, the same on all ranks.
        check
            Whether the ranks compare their values first, in a small call. Without it, a difference ends in a `CollectiveMismatchError`, or, if no
            bytes are sent, is not found.
        reproducible
            Whether sums of floats have the same bits for every backend and size: see `Group.all_reduce`.
        timeout_s
            Seconds that each collective may last.

        Returns
        -------
        DTensor
            It may share memory with this one. A mean of floats that becomes a `Partial` is off by roundings later; all else that is moved keeps
            its bits.

        Raises
        ------
        UsageError
            On every rank: the placements do not fit the mesh or the array, or the ranks gave different ones, or have different arrays.
        DTypeError
            On every rank: the dtype does not have the reduction of a `Partial`.
        """
        if check:
            story = {"the array": f"{self.dtype}{list(self.shape)}", "from": _words(self.placements), "to": _words(placements)}
            same_on_all(self._place.parent, "redistribute", story, timeout_s=timeout_s)
        target = _checked(Spec.of(self.shape, self._place.shape, placements), self.dtype)
        local, before = self.local, self._spec
        for step in self._steps(target):
            local = move(local, before, step, self._place, reproducible=reproducible, timeout_s=timeout_s)
            before = step.after
        return DTensor(local, self.mesh, target)

    def explain(self, placements: Sequence[Placement]) -> list[Step]:
        """Return the steps that `redistribute` would take, each with the bytes that it sends. Nothing is sent.

        >>> d = mp.distribute(np.zeros((4, 6)), mesh, [mp.Shard(0), mp.Shard(1)])  # on 2 x 2 ranks
        >>> for step in d.explain([mp.Shard(0), mp.Replicate()]):
        ...     print(step)
        tp: Shard(1) -> Replicate() by all_gather, 48 bytes sent by each rank

        Of all ways that change the placement on one axis of the mesh at a time, it is the one that sends the fewest bytes. If several axes of the mesh
        shard the same axis of the array, only the last of them can change, so that a way may go round.

        Parameters
        ----------
        placements
            As for `redistribute`.

        Raises
        ------
        UsageError, DTypeError
            As for `redistribute`, on this rank.
        """
        return list(self._steps(_checked(Spec.of(self.shape, self._place.shape, placements), self.dtype)))

    def full(self, *, reproducible: bool | None = True, timeout_s: float | None = None) -> Array:
        """Return the whole array, on every rank. Every rank must call it.

        Parameters
        ----------
        reproducible, timeout_s
            As for `redistribute`.

        Returns
        -------
        ndarray
            If the array is replicated already, ``local`` itself.

        Raises
        ------
        UsageError
            On every rank: the ranks have different arrays.
        """
        return self.redistribute([Replicate()] * len(self.placements), reproducible=reproducible, timeout_s=timeout_s).local

    def with_local(self, local: Array) -> DTensor:
        """Return another array with the same placements: computed element by element from ``local``, or loaded. Nothing is sent.

        Parameters
        ----------
        local
            The part of this rank: the shape of ``self.local``, and on all ranks the same dtype.

        Raises
        ------
        SizeMismatchError
            The shape is another one.
        """
        local = value(local, takes_leaves=True)
        if shape_of(local) != shape_of(self.local):
            raise SizeMismatchError(f"this rank's part of {self!r} has shape {shape_of(self.local)}, not {shape_of(local)}")
        return DTensor(local, self.mesh, self._spec)

    def sharded_array(self) -> ShardedArray:
        """Return the form that checkpoints take: this rank's part as a piece of the whole array, in the same memory. Nothing is sent.

        Raises
        ------
        UsageError
            A placement is `Partial`.
        """
        self._need_sums("it is saved")
        return ShardedArray(self.shape, [(self.offset, self.local)])

    def with_sharded_array(self, array: ShardedArray) -> DTensor:
        """Return a distributed array with the same placements as this one, from the loaded content of its `sharded_array`. Nothing is sent.

        Parameters
        ----------
        array
            One piece, at the place of this rank's part.

        Raises
        ------
        SizeMismatchError
            The shape is another one, or the piece lies elsewhere.
        """
        mine = self._spec.box(self._place.coordinates)
        if array.shape != self.shape or [box for box, _ in array.pieces] != [mine]:
            raise SizeMismatchError(f"this rank has {mine} of {self!r}, not {array!r}")
        return self.with_local(array.pieces[0][1])

    def _need_sums(self, what: str) -> None:
        if any(isinstance(each, Partial) for each in self.placements):
            raise UsageError(
                f"{self!r} is a reduction that is not finished: redistribute it to Replicate() or Shard(dim) before {what}"
            )

    def _steps(self, target: Spec) -> tuple[Step, ...]:
        return plan(self._spec, target, itemsize(self.dtype), self._place.names)


def distribute(
    x: Array, mesh: DeviceMesh | Group, placements: Sequence[Placement], *, timeout_s: float | None = None
) -> DTensor:
    """Distribute an array that every rank has whole; each keeps its part. Every rank must call it.

    >>> d = mp.distribute(x, mesh, [mp.Shard(0), mp.Replicate()])

    Parameters
    ----------
    x
        The array, the same on all ranks. The ranks compare its shape and dtype, and if it is in the host's memory a checksum of its bytes.
        An array that one rank alone has goes through `Group.broadcast` first.
    mesh
        The mesh, or a group, which is a mesh of one axis.
    placements
        How it lies on each axis of the mesh, the same on all ranks. For `Partial` see `DTensor.redistribute`.
    timeout_s
        Seconds that each collective may last.

    Returns
    -------
    DTensor
        Its ``local`` is a copy, or ``x`` itself if that is whole.

    Raises
    ------
    UsageError
        On every rank: the placements do not fit the mesh or the array, or the ranks gave different arrays or placements; or a tensor of torch
        requires a gradient and is no parameter.
    DTypeError
        On every rank: the dtype does not have the reduction of a `Partial`, or ``x`` is no array of numbers.
    LayoutError
        On every rank: ``x`` is sparse, quantized, or without memory.
    """
    place = _place_of(mesh)
    array = f"{_kind(x)}{list(shape_of(x))}{_checksum(x)}" if _is_plain(x) else _kind(x)
    same_on_all(place.parent, "distribute", {"the array": array, "placements": _words(placements)}, timeout_s=timeout_s)
    need_plain("distribute", {"the array": x})
    x = value(x, takes_leaves=True)
    everywhere: list[Placement] = [Replicate()] * len(place.shape)
    whole = DTensor(x, mesh, Spec.of(shape_of(x), place.shape, everywhere))
    return whole.redistribute(placements, check=False)


def from_local(
    part: Array,
    mesh: DeviceMesh | Group,
    placements: Sequence[Placement],
    global_shape: Sequence[int] | None = None,
    *,
    timeout_s: float | None = None,
) -> DTensor:
    """Make a distributed array of the parts that the ranks have. Every rank must call it.

    The ranks exchange the shapes of their parts, in a small call, so that the sizes of shards are known and never guessed.

    >>> d = mp.from_local(part, mesh, [mp.Shard(0)])  # any number of rows on each rank

    Parameters
    ----------
    part
        The part of this rank.
    mesh
        The mesh, or a group, which is a mesh of one axis.
    placements
        How the parts lie on each axis of the mesh, the same on all ranks. The counts of a `Shard` are those that the ranks have; if they are given, they
        are checked.
    global_shape
        The shape of the whole array, to be checked.
    timeout_s
        Seconds that the call may last.

    Returns
    -------
    DTensor
        Its ``local`` is ``part``.

    Raises
    ------
    UsageError
        On every rank: the ranks gave different dtypes, placements or global shapes; the shapes of the parts do not fit together; they do not
        give ``global_shape`` or the counts; or a tensor of torch requires a gradient and is no parameter.
    DTypeError
        On every rank: the dtype does not have the reduction of a `Partial`, or ``part`` is no array of numbers.
    LayoutError
        On every rank: ``part`` is sparse, quantized, or without memory.
    """
    place = _place_of(mesh)
    try:
        wanted: Any = None if global_shape is None else [operator.index(extent) for extent in global_shape]
    except TypeError:
        wanted = f"{global_shape!r:.80}"
    axes = f"{len(shape_of(part))}" if _is_plain(part) else "none"
    story = {"the part": _kind(part), "axes": axes, "placements": _words(placements), "global_shape": str(wanted)}
    same_on_all(place.parent, "from_local", story, timeout_s=timeout_s)
    need_plain("from_local", {"the part": part})
    part = value(part, takes_leaves=True)
    told = place.parent.all_gather(np.array([shape_of(part)], np.int64), timeout_s=timeout_s)
    shapes = [tuple(int(extent) for extent in shape) for shape in told]
    given: list[Any] = [*placements] if isinstance(placements, list | tuple) else [placements]
    # Any array with these axes shows whether the placements fit at all.
    Spec.of(shape_of(part), place.shape, [Shard(each.dim) if isinstance(each, Shard) else each for each in given])
    spec = _joined(shapes, place, given)
    if wanted is not None and list(spec.shape) != wanted:
        raise UsageError(
            f"the parts of {place.parent.world_size} ranks make the shape {spec.shape}, not {wanted}: {_listed(shapes)}"
        )
    return DTensor(part, mesh, _checked(spec, dtype_of(part)))


def divided_axes(d: DTensor) -> frozenset[int]:
    """Return the axes of a distributed array's mesh along which ranks have different parts: those of a `Shard`, of more than one rank.

    Raises
    ------
    UsageError
        A placement is `Partial`, so that no rank has a part yet.
    """
    d._need_sums("it is counted")
    extents = zip(d.placements, d._place.shape, strict=True)
    return frozenset(axis for axis, (each, extent) in enumerate(extents) if isinstance(each, Shard) and extent > 1)


def lie_alike(one: DTensor, other: DTensor) -> bool:
    """Return whether each rank has the same elements of one distributed array as of the other. Nothing is sent."""
    return one._spec == other._spec and one._place.parent.ranks == other._place.parent.ranks


def _joined(shapes: list[tuple[int, ...]], place: Place, placements: Sequence[Placement]) -> Spec:
    """Return the spec of the array whose parts have these shapes, in the order of ranks."""
    ndim = len(shapes[0])
    table = np.array(shapes, np.int64).reshape(*place.shape, ndim)
    found, shape = list(placements), []
    for dim in range(ndim):
        sharding = [axis for axis, each in enumerate(placements) if isinstance(each, Shard) and each.dim % ndim == dim]
        others = tuple(axis for axis in range(len(place.shape)) if axis not in sharding)
        sizes = table[..., dim]
        if (sizes.max(axis=others, keepdims=True) != sizes).any():
            raise UsageError(
                f"axis {dim} of the array is not sharded along every axis of the mesh, but the parts differ in it: {_listed(shapes)}"
            )
        sizes = sizes.max(axis=others)
        shape.append(int(sizes.sum()))
        for axis in reversed(sharding):
            found[axis] = Shard(dim, tuples(sizes))
            sizes = sizes.sum(axis=-1)
    spec = Spec.of(tuple(shape), place.shape, found)
    if Spec.of(spec.shape, place.shape, [_given(a, b) for a, b in zip(placements, found, strict=True)]) != spec:
        raise UsageError(f"the parts do not have the counts of {placements!r}: {_listed(shapes)}")
    return spec


def _given(wanted: Placement, found: Placement) -> Placement:
    return wanted if isinstance(wanted, Shard) and wanted.counts is not None else found


def _place_of(mesh: DeviceMesh | Group) -> Place:
    from oneaccord import DeviceMesh, Group

    if isinstance(mesh, DeviceMesh):
        groups = tuple(mesh.group(axis) for axis in range(mesh.ndim))
        return Place(mesh.parent, groups, mesh.names, mesh.shape, mesh.coordinates)
    if isinstance(mesh, Group):
        return Place(mesh, (mesh,), ("group",), (mesh.world_size,), (mesh.rank,))
    raise UsageError(f"a distributed array needs a DeviceMesh or a Group, not a {type(mesh).__qualname__}")


def _checked(spec: Spec, dtype: str) -> Spec:
    """Check that a dtype is one of numbers, and that it has the reductions of a spec."""
    if not any(kind in dtype for kind in ("bool", "int", "float", "complex")):
        raise DTypeError(f"a distributed array must hold numbers, but its dtype is {dtype}")
    ops = {each.op for each in spec.placements if isinstance(each, Partial)}
    floats = "float" in dtype or "complex" in dtype
    wrong = {
        "sum": dtype == "bool",
        "mean": not floats,
        "min": "complex" in dtype or "float8" in dtype,
        "max": "complex" in dtype or "float8" in dtype,
    }
    for op in sorted(ops):
        if wrong[op]:
            raise DTypeError(f"{dtype} has no {op}, which {list(spec.placements)} asks for")
    return spec


def _listed(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(f"{shape} on rank {rank}" for rank, shape in enumerate(shapes))


def _is_plain(x: Any) -> bool:
    """Return whether something is an array whose elements can be sent."""
    return hasattr(x, "shape") and not oddity(x)


def _kind(x: Any) -> str:
    """Return the dtype of an array, and any fault of it; the type of another value."""
    try:
        value(x, takes_leaves=True)
    except DTypeError:
        return type(x).__qualname__
    except UsageError:
        return "a tensor that requires a gradient: give x.detach()"
    return oddity(x) or (dtype_of(x) if hasattr(x, "dtype") else type(x).__qualname__)


def _words(placements: Any) -> str:
    return repr([*placements] if isinstance(placements, list | tuple) else placements)


def _checksum(x: Array) -> str:
    """Return a checksum of an array's bytes in words; of one on a GPU nothing, since it would have to come to the host."""
    try:
        buffer = readable(x)
    except DTypeError:
        return ""  # its type says the rest
    if hasattr(buffer, "untyped_storage") and buffer.device.type == "cpu":
        import torch

        buffer = flat(buffer.resolve_conj().resolve_neg()).view(torch.uint8).numpy()
    if not isinstance(buffer, np.ndarray) or buffer.dtype.hasobject:
        return ""
    return f" with the checksum {zlib.crc32(np.ascontiguousarray(buffer).view(np.uint8).data):08x}"
