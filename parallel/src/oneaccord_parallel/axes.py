"""Arrays that are divided along an axis, and the collectives that divide, join and exchange them.

A group's collectives work along axis 0. Here the parts travel in their own C order, one behind the other, so that any axis costs one copy, and
axis 0 none. They are given to the group as rows of the other axes' shape, which it compares between the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import array_api_compat

from oneaccord_parallel.arrays import Array, namespace, need_no_graph, readable, shape_of

if TYPE_CHECKING:
    from oneaccord import Group

__all__ = ["all_gather", "chunks", "exchange", "flat", "part", "reduce_scatter", "value"]

Shape = tuple[int, ...]


def chunks(size: int, parts: int) -> tuple[int, ...]:
    """Return how many rows each part gets if ``size`` rows are divided as `torch.chunk` does: equal parts, the last ones smaller or empty."""
    step = -(-size // parts)
    return tuple(max(0, min(step, size - step * part)) for part in range(parts))


def value(array: Array, *, takes_leaves: bool = False) -> Array:
    """Return an array of its own library; of a torch tensor the value alone. One whose history would be lost is refused; see `need_no_graph`."""
    need_no_graph(array, takes_leaves=takes_leaves)
    return array if array_api_compat.is_jax_array(array) else readable(array)


def flat(array: Array) -> Array:
    """Return the elements in C order, as an array of one axis."""
    return namespace(array).reshape(array, (math.prod(shape_of(array)),))


def part(array: Array, axis: int, counts: Sequence[int], number: int) -> Array:
    """Return one part of an array that ``counts`` divides along an axis, as a view if possible."""
    start = sum(counts[:number])
    return array[(*(slice(None),) * axis, slice(start, start + counts[number]))]


def all_gather(array: Array, group: Group, axis: int, counts: Sequence[int], *, timeout_s: float | None = None) -> Array:
    """Join the arrays of all ranks along an axis, of which rank r has ``counts[r]`` rows."""
    if group.world_size == 1:
        return array
    shapes = [_resized(shape_of(array), axis, count) for count in counts]
    joined = group.all_gather(_rows(array, axis), counts=counts, timeout_s=timeout_s)
    return _concat(_unpack(flat(joined), shapes), axis)


def reduce_scatter(
    array: Array,
    group: Group,
    axis: int,
    counts: Sequence[int],
    op: str = "sum",
    *,
    reproducible: bool | None = True,
    timeout_s: float | None = None,
) -> Array:
    """Combine the arrays of all ranks, and give rank r its ``counts[r]`` rows of an axis."""
    if group.world_size == 1:
        return array
    parts = range(len(counts))
    packed = array if axis == 0 else _concat([_rows(part(array, axis, counts, number), axis) for number in parts], 0)
    mine = group.reduce_scatter(packed, op, counts=counts, reproducible=reproducible, timeout_s=timeout_s)
    return namespace(mine).reshape(mine, _resized(shape_of(array), axis, counts[group.rank]))


def exchange(
    parts: Sequence[Array], shapes: Sequence[Shape], even: bool, group: Group, *, timeout_s: float | None = None
) -> list[Array]:
    """Give ``parts[r]`` to rank r, and return the parts that came from each rank, of ``shapes``.

    ``even`` says whether all parts of all ranks have one size; then no sizes travel.
    """
    packed = _concat([flat(each) for each in parts], 0)
    send, receive = [math.prod(shape_of(each)) for each in parts], [math.prod(shape) for shape in shapes]
    if even:
        return _unpack(group.all_to_all(packed, timeout_s=timeout_s), shapes)
    return _unpack(group.all_to_all(packed, send_counts=send, receive_counts=receive, timeout_s=timeout_s), shapes)


def _rows(array: Array, axis: int) -> Array:
    """Return the elements in the same order, under the shape of as many rows as the axis has."""
    shape = shape_of(array)
    return namespace(array).reshape(array, (shape[axis], *shape[:axis], *shape[axis + 1 :]))


def _resized(shape: Shape, axis: int, extent: int) -> Shape:
    return (*shape[:axis], extent, *shape[axis + 1 :])


def _unpack(packed: Array, shapes: Sequence[Shape]) -> list[Array]:
    """Return arrays that lie one behind the other, as views if the library has them."""
    xp, done, found = namespace(packed), 0, []
    for shape in shapes:
        size = math.prod(shape)
        found.append(xp.reshape(packed[done : done + size], shape))
        done += size
    return found


def _concat(arrays: list[Array], axis: int) -> Array:
    return arrays[0] if len(arrays) == 1 else namespace(arrays[0]).concat(arrays, axis=axis)
