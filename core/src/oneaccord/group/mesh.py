"""The device mesh: the ranks of a group laid out on a grid of any number of axes, with a group along each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from oneaccord.arrays.memory import Array
from oneaccord.common.checks import whole
from oneaccord.errors import InvalidRankError, InvalidWorldSizeError, SizeMismatchError, UsageError
from oneaccord.group.group import Group

__all__ = ["DeviceMesh"]


class DeviceMesh:
    """The ranks of a group on a grid with named axes, and a group along each axis. Every rank of the group must make it.

    Ranks fill the grid in row-major order, as elements fill a NumPy array: neighbours along the last axis have neighbouring
    ranks. So put the axis with the most traffic last.

    >>> with oa.init() as group, oa.DeviceMesh(group, (2, -1), ("dp", "tp")) as mesh:
    ...     mesh.group("tp").all_reduce(activations)
    ...     mesh.group("dp").all_reduce(gradients, op="mean")

    Parameters
    ----------
    group
        The group that is laid out.
    shape
        The number of ranks along each axis. One of them may be -1: it becomes the number of ranks divided by the product of the
        others. ``"auto"`` makes a grid whose axes are as equally long as possible, the longest first: of as many axes as there are ``names``, or two.
    names
        The name of each axis, unique; by default ``"axis0"``, ``"axis1"`` and so on. All methods take an axis by name, or by
        number, which may count from the end.
    periodic
        Whether the ranks along an axis form a ring, so that `shift` wraps around at its end: one bool for all axes, or one for
        each.
    timeout_s
        Seconds that each step of making the groups may last.

    Attributes
    ----------
    parent
        The group that is laid out.
    shape
        The number of ranks along each axis.
    names
        The name of each axis.
    ndim
        The number of axes.
    periodic
        Whether each axis is a ring.
    ranks
        The ranks of ``parent`` on the grid: integers, read-only, of shape ``shape``.
    coordinates
        The place of this rank: one number for each axis.

    Raises
    ------
    InvalidWorldSizeError
        The grid does not have one place for each rank.
    UsageError
        ``shape``, ``names`` or ``periodic`` is wrong, or differs between ranks. If it differs, every rank raises the error. The
        group stays usable.
    """

    def __init__(
        self,
        group: Group,
        shape: Sequence[int] | Literal["auto"],
        names: Sequence[str] | None = None,
        *,
        periodic: bool | Sequence[bool] = False,
        timeout_s: float | None = None,
    ) -> None:
        if not isinstance(group, Group):
            raise UsageError(f"a mesh is made of a group, such as oa.init() returns, not of a {type(group).__name__}")
        self.parent: Group = group
        if isinstance(shape, str) and shape == "auto":
            shape = _balanced(group.world_size, 2 if names is None else max(1, len(names)))
        self.shape: tuple[int, ...] = _checked_shape(shape, group.world_size)
        self.names: tuple[str, ...] = _checked_names(names, len(self.shape))
        self.ndim: int = len(self.shape)
        self.periodic: tuple[bool, ...] = _checked_periodic(periodic, self.ndim)
        self.ranks: npt.NDArray[np.int64] = np.arange(group.world_size, dtype=np.int64).reshape(self.shape)
        self.ranks.flags.writeable = False
        self.coordinates: tuple[int, ...] = self.coordinates_of(group.rank)
        self._owns_parent = False
        rings = f", periodic={self.periodic}" if any(self.periodic) else ""
        mine = f"shape={self.shape}, names={self.names}{rings}"
        _same_on_all(group, mine, "shape and names, and the same periodic", timeout_s)
        self._groups: list[Group] = [self._split((axis,), timeout_s) for axis in range(self.ndim)]

    def __repr__(self) -> str:
        return f"<oneaccord.DeviceMesh {_words(self.shape, self.names)}, rank {self.parent.rank} at {self.coordinates}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return self._layout == other._layout

    def __hash__(self) -> int:
        return hash(self._layout)

    @property
    def _layout(self) -> tuple[object, ...]:
        return self.parent.ranks, self.shape, self.names, self.periodic

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # After a failure of this rank's program there is nothing to wait for: the group of all ranks ends those of the mesh.
        if error is None:
            self.close()

    def close(self, *, timeout_s: float | None = None) -> None:
        """Close the groups along the axes, but not the group that was laid out. Calling it twice is fine.

        Parameters
        ----------
        timeout_s
            Seconds that each group may wait for its calls in flight.

        Raises
        ------
        CommError
            The job failed, and no call on this rank has raised the error yet.
        """
        for group in self._groups:
            group.close(timeout_s=timeout_s)
        if self._owns_parent:
            self.parent.close(timeout_s=timeout_s)

    def size(self, axis: str | int | None = None) -> int:
        """Return the number of ranks along an axis.

        Parameters
        ----------
        axis
            Its name or number. By default all axes: the number of ranks of the mesh.

        Raises
        ------
        UsageError
            There is no such axis.
        """
        return self.parent.world_size if axis is None else self.shape[self.axis(axis)]

    def axis(self, axis: str | int) -> int:
        """Return the number of an axis, counted from 0.

        Parameters
        ----------
        axis
            Its name, or its number, which may count from the end.

        Raises
        ------
        UsageError
            There is no such axis.
        """
        if isinstance(axis, str):
            if axis in self.names:
                return self.names.index(axis)
            import difflib  # only a mistake needs it

            near = difflib.get_close_matches(axis, self.names, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise UsageError(f"the mesh has no axis {axis!r}{hint}: its axes are {_words(self.shape, self.names)}")
        number = whole(axis)
        if number is None or not -self.ndim <= number < self.ndim:
            raise UsageError(
                f"the mesh has no axis {axis!r}: its {self.ndim} axes are {_words(self.shape, self.names)}, numbered from 0"
            )
        return number % self.ndim

    def group(self, axis: str | int) -> Group:
        """Return the group along an axis: the ranks that differ from this one in that coordinate alone.

        This rank's number in the group is its coordinate along the axis.

        Parameters
        ----------
        axis
            Its name, or its number.

        Returns
        -------
        Group
            It belongs to the mesh, which closes it.

        Raises
        ------
        UsageError
            There is no such axis.
        """
        return self._groups[self.axis(axis)]

    def shift(self, axis: str | int, steps: int = 1) -> tuple[int | None, int | None]:
        """Return the ranks to receive from and to send to if all ranks shift an array ``steps`` further along an axis.

        >>> source, dest = mesh.shift("x")
        >>> ghost = mesh.group("x").sendrecv(right_edge, dest, source)

        Parameters
        ----------
        axis
            Its name, or its number.
        steps
            How far; a negative number goes the other way.

        Returns
        -------
        source, dest
            Ranks of the group along the axis, for its `Group.sendrecv`. None beyond the end of an axis that is not periodic.

        Raises
        ------
        UsageError
            There is no such axis, or ``steps`` is no integer.
        """
        number, distance = self.axis(axis), whole(steps)
        if distance is None:
            raise UsageError(f"a shift takes an integer number of steps, not {steps!r}")
        extent, place = self.shape[number], self.coordinates[number]

        def at(coordinate: int) -> int | None:
            if self.periodic[number]:
                return coordinate % extent
            return coordinate if 0 <= coordinate < extent else None

        return at(place - distance), at(place + distance)

    @property
    def neighbors(self) -> tuple[int | None, ...]:
        """The ranks of ``parent`` next to this one: for each axis the one before and the one after; None beyond an end."""
        found: list[int | None] = []
        for axis in range(self.ndim):
            for place in self.shift(axis):
                coordinates = list(self.coordinates)
                if place is not None:
                    coordinates[axis] = place
                found.append(None if place is None else self.rank_at(*coordinates))
        return tuple(found)

    def neighbor_all_gather(self, array: npt.ArrayLike, *, timeout_s: float | None = None) -> list[Array | None]:
        """Give an array to each neighbour, and return theirs. Every rank of the mesh must call it.

        Parameters
        ----------
        array
            This rank's array; those of the ranks may differ in shape and dtype.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        list of ndarray or None
            In the order of `neighbors`; None where there is none.
        """
        return self._exchange([array] * (2 * self.ndim), "neighbor_all_gather", timeout_s)

    def neighbor_all_to_all(self, arrays: Sequence[npt.ArrayLike], *, timeout_s: float | None = None) -> list[Array | None]:
        """Give each neighbour an array of its own, and return those that they give to this rank. Every rank of the mesh must call it.

        Parameters
        ----------
        arrays
            An array for each of `neighbors`, in their order; what stands where there is none is ignored.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        list of ndarray or None
            In the order of `neighbors`; None where there is none.

        Raises
        ------
        SizeMismatchError
            ``arrays`` does not have one entry for each neighbour.
        """
        given = list(arrays)
        if len(given) != 2 * self.ndim:
            raise SizeMismatchError(
                f"neighbor_all_to_all takes {2 * self.ndim} arrays, for the neighbours before and after along each axis, not {len(given)}"
            )
        return self._exchange(given, "neighbor_all_to_all", timeout_s)

    def _exchange(self, arrays: list[Any], name: str, timeout_s: float | None) -> list[Array | None]:
        # What goes to the rank before comes to it from the rank after.
        tags = [place ^ 1 for place in range(2 * self.ndim)]
        given = [0 if peer is None else array for array, peer in zip(arrays, self.neighbors, strict=True)]
        return self.parent._exchange_neighbors(given, list(self.neighbors), tags, name, timeout_s)

    def coordinates_of(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank: one number for each axis.

        Parameters
        ----------
        rank
            A rank of ``parent``.

        Raises
        ------
        InvalidRankError
            There is no such rank.
        """
        number = whole(rank)
        if number is None or not 0 <= number < self.parent.world_size:
            raise InvalidRankError(
                f"rank {rank!r} is not in the mesh: its ranks are 0 to {self.parent.world_size - 1}", peer=number
            )
        return tuple(int(place) for place in np.unravel_index(number, self.shape))

    def rank_at(self, /, *coordinates: int, **named: int) -> int:
        """Return the rank of ``parent`` at some coordinates.

        Parameters
        ----------
        coordinates
            One number for each axis.
        named
            Or the coordinates of some axes by name; the other coordinates are this rank's: ``mesh.rank_at(pp=stage + 1)``.

        Raises
        ------
        InvalidRankError
            A coordinate is not on the grid. Coordinates do not count from the end.
        UsageError
            The number of coordinates differs from the number of axes, or an axis does not exist.
        """
        if (coordinates and named) or (coordinates and len(coordinates) != self.ndim) or (not coordinates and not named):
            raise UsageError(
                f"rank_at takes {self.ndim} coordinates ({', '.join(self.names)}), or some of them by name, such as "
                f"rank_at({self.names[0]}=0); {len(coordinates)} and {len(named)} by name were given"
            )
        place: list[Any] = list(coordinates or self.coordinates)
        for name, coordinate in named.items():
            place[self.axis(name)] = coordinate
        for axis, coordinate in enumerate(place):
            number = whole(coordinate)
            if number is None or not 0 <= number < self.shape[axis]:
                raise InvalidRankError(
                    f"{self.names[axis]}={coordinate!r} is not in the mesh: that axis goes from 0 to {self.shape[axis] - 1}"
                )
        return int(self.ranks[tuple(place)])

    def submesh(self, *axes: str | int, timeout_s: float | None = None) -> DeviceMesh:
        """Make the mesh of some axes: the ranks that share this rank's coordinates on all others. Every rank must call it.

        Its ``parent`` is the group of all its ranks, so that ``mesh.submesh("dp", "tp").parent`` is the group over both axes.

        Parameters
        ----------
        axes
            Names or numbers of axes, each once; the new mesh has them in this order.
        timeout_s
            Seconds that each step of making the groups may last.

        Returns
        -------
        DeviceMesh
            Close it on its own; that closes its ``parent`` too.

        Raises
        ------
        UsageError
            An axis does not exist or is given twice, no axis is given, or the ranks gave different axes.
        """
        chosen = tuple(self.axis(axis) for axis in axes)
        if not chosen or len(set(chosen)) != len(chosen):
            raise UsageError(f"submesh takes at least one axis, and each only once; {list(axes)} was given")
        names = [self.names[axis] for axis in chosen]
        _same_on_all(self.parent, f"submesh{tuple(names)}", "axes", timeout_s)
        part = self._split(chosen, timeout_s)
        shape, periodic = [self.shape[axis] for axis in chosen], [self.periodic[axis] for axis in chosen]
        mesh = DeviceMesh(part, shape, names, periodic=periodic, timeout_s=timeout_s)
        mesh._owns_parent = True
        return mesh

    def _split(self, axes: tuple[int, ...], timeout_s: float | None) -> Group:
        """Make the group of the ranks that share this rank's coordinates on all axes but these, in the order of these."""
        color = key = 0
        for axis, (coordinate, extent) in enumerate(zip(self.coordinates, self.shape, strict=True)):
            if axis not in axes:
                color = color * extent + coordinate
        for axis in axes:
            key = key * self.shape[axis] + self.coordinates[axis]
        names = [repr(self.names[axis]) for axis in axes]
        along = f"along {'axis' if len(names) == 1 else 'axes'} {' and '.join(names)} of a mesh"
        group = self.parent._split(color, key, along, timeout_s)
        assert group is not None
        return group


def _same_on_all(group: Group, mine: str, what: str, timeout_s: float | None) -> None:
    """Compare the arguments of the ranks of a group.

    Raises
    ------
    UsageError
        It differs, on every rank.
    """
    given = group.all_gather_object(mine, type=str, timeout_s=timeout_s)
    if len(set(given)) > 1:
        stories = "".join(f"\n  rank {rank}: {story}" for rank, story in enumerate(given))
        raise UsageError(f"the ranks made different meshes; every rank must give the same {what}:{stories}", rank=group.rank)


def _balanced(places: int, ndim: int) -> tuple[int, ...]:
    """Return the most equal extents whose product is ``places``, the longest first."""
    best: tuple[int, ...] = (places,) + (1,) * (ndim - 1)

    def extend(extents: tuple[int, ...], left: int) -> None:
        nonlocal best
        if len(extents) == ndim - 1:
            found = (left, *extents)
            if left >= extents[0] if extents else True:
                best = min(best, found, key=lambda each: (each[0] - each[-1], each))
            return
        least = 1 if not extents else extents[0]
        for extent in range(least, math.isqrt(left) + 1):
            if left % extent == 0:
                extend((extent, *extents), left // extent)

    extend((), places)
    return best


def _checked_shape(shape: Any, world_size: int) -> tuple[int, ...]:
    given = list(shape) if isinstance(shape, Sequence | np.ndarray) and not isinstance(shape, str | bytes) else []
    extents = [whole(extent) for extent in given]
    known = [extent for extent in extents if extent is not None and extent > 0]
    left = extents.count(-1)
    if not extents or left > 1 or len(known) + left != len(extents):
        raise UsageError(
            f"the shape of a mesh is a sequence of positive integers, one of which may be -1, such as (2, -1); {shape!r} was given"
        )
    product = math.prod(known)
    if world_size % product if left else product != world_size:
        places = f"a multiple of {product}" if left else f"{' x '.join(map(str, known))} = {product}"
        raise InvalidWorldSizeError(
            f"a mesh of shape {tuple(extents)} has {places} places, and the group has {world_size} ranks: give extents whose product "
            f"is {world_size}"
        )
    return tuple(world_size // product if extent == -1 else int(extent or 0) for extent in extents)


def _checked_names(names: Any, ndim: int) -> tuple[str, ...]:
    if names is None:
        return tuple(f"axis{axis}" for axis in range(ndim))
    given = tuple(names) if isinstance(names, Sequence) and not isinstance(names, str) else ()
    if len(given) != ndim or not all(isinstance(name, str) and name for name in given):
        raise UsageError(f"names must be {ndim} strings, one for each axis of the shape, not {names!r}")
    repeated = sorted({name for name in given if given.count(name) > 1})
    if repeated:
        raise UsageError(f"axis names must differ, and {', '.join(map(repr, repeated))} is given more than once in {names!r}")
    return given


def _checked_periodic(periodic: Any, ndim: int) -> tuple[bool, ...]:
    given = list(periodic) if isinstance(periodic, Sequence | np.ndarray) else [periodic] * ndim
    if len(given) != ndim or not all(isinstance(each, bool | np.bool_) for each in given):
        raise UsageError(f"periodic must be True or False, or {ndim} of these, one for each axis, not {periodic!r}")
    return tuple(bool(each) for each in given)


def _words(shape: tuple[int, ...], names: tuple[str, ...]) -> str:
    """Return a layout in words, such as ``dp=2 x tp=4``."""
    return " x ".join(f"{name}={extent}" for name, extent in zip(names, shape, strict=True))
