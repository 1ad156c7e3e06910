"""The arguments of a group's calls, checked before any byte moves."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import SupportsIndex

from oneaccord.arrays.libraries import DeviceArray
from oneaccord.arrays.memory import Array
from oneaccord.common.checks import whole
from oneaccord.contract.header import MAX_DIMENSIONS, can_describe
from oneaccord.errors import InvalidRankError, SelfSendError, SizeMismatchError, UsageError
from oneaccord.job.group_ranks import Members

__all__ = ["LARGEST_TAG", "Arguments", "extents", "integer", "tag_number"]

LARGEST_TAG: int = (1 << 63) - 1


class Arguments:
    """The arguments that one rank of a group may give.

    Parameters
    ----------
    members
        The ranks of the group, and which of them this one is.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._rank = members.rank
        self._world_size = members.size

    def rank(self, given: int, what: str, *, or_nobody: bool = False) -> int:
        """Return a rank of the group; ``or_nobody`` says that None would have been right too.

        Raises
        ------
        InvalidRankError
            It is not one.
        """
        number = whole(given)
        if number is None or not 0 <= number < self._world_size:
            nobody = ", or None for no rank" if or_nobody else ""
            shown = repr(given)
            if getattr(given, "ndim", 0):  # as in MPI, where the result goes into the second argument
                shown, nobody = f"<{type(given).__name__}>", f"{nobody} (did you mean out=, which takes the result?)"
            raise InvalidRankError(
                f"{what}={shown} is not in the group: its ranks are 0 to {self._world_size - 1}{nobody}",
                rank=self._members.ranks[self._rank],
                peer=number,
            )
        return number

    def peer(self, given: int, what: str, *, or_nobody: bool = False) -> int:
        """Return another rank of the group; ``or_nobody`` as for `rank`.

        Raises
        ------
        InvalidRankError
            It is not in the group.
        SelfSendError
            It is this rank.
        """
        number = self.rank(given, what, or_nobody=or_nobody)
        if number == self._rank:
            raise SelfSendError(
                f"{what}={given} is this rank itself, which cannot exchange a message with itself: copy the array instead",
                rank=self._members.ranks[self._rank],
                peer=self._members.ranks[number],
            )
        return number

    def peer_or_nobody(self, given: int | None, what: str) -> int | None:
        """Return another rank of the group, or None if None was given; raises as `peer`."""
        return None if given is None else self.peer(given, what, or_nobody=True)

    def partners(self, dest: int | None, source: int | None) -> tuple[int | None, int | None]:
        """Return the rank to send to and the rank to receive from, each None for no rank.

        Raises
        ------
        InvalidRankError
            One is not in the group.
        SelfSendError
            One is this rank, and the other is not.
        """
        to = None if dest is None else self.rank(dest, "dest", or_nobody=True)
        whence = None if source is None else self.rank(source, "source", or_nobody=True)
        if (to == self._rank) != (whence == self._rank):
            own = "dest" if to == self._rank else "source"
            me = self._members.ranks[self._rank]
            raise SelfSendError(
                f"{own}={self._rank} is this rank itself, but the other is not: give this rank as both dest and source, which copies, or None "
                "for no rank",
                rank=me,
                peer=me,
            )
        return to, whence

    def counts(self, given: Sequence[int], name: str = "counts") -> tuple[int, ...]:
        """Return one count per rank; ``name`` is that of the argument.

        Raises
        ------
        SizeMismatchError
            The given value is not.
        """
        numbers = [whole(n) for n in given] if hasattr(given, "__iter__") else []
        checked = tuple(n for n in numbers if n is not None and n >= 0)
        if len(checked) != self._world_size or len(numbers) != self._world_size:
            raise SizeMismatchError(
                f"{name} must be {self._world_size} integers of at least 0, one for each rank, not {given!r}"
            )
        return checked

    def divide(self, length: int, counts: Sequence[int] | None, name: str = "counts") -> tuple[int, ...]:
        """Return how many of ``length`` rows each rank gets; ``name`` is that of the argument which says so.

        Raises
        ------
        SizeMismatchError
            They cannot be shared evenly, or ``counts`` does not add up to them.
        """
        if counts is not None:
            per_rank = self.counts(counts, name)
            if sum(per_rank) != length:
                raise SizeMismatchError(f"{name}={list(per_rank)} add up to {sum(per_rank)}, and axis 0 has {length} rows")
            return per_rank
        each, rest = divmod(length, self._world_size)
        if rest:
            raise SizeMismatchError(
                f"axis 0 has {length} rows, which {self._world_size} ranks cannot share evenly: give {name}, such as "
                f"{name}={[each + (rank < rest) for rank in range(self._world_size)]}"
            )
        return (each,) * self._world_size

    def blocks(
        self, source: Array | DeviceArray, counts: Sequence[int] | None, operation: str
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the rows and the elements of each rank's part of axis 0.

        Raises
        ------
        SizeMismatchError
            As `divide`, or ``source`` is 0-d.
        """
        if source.ndim == 0:
            raise SizeMismatchError(f"{operation} divides axis 0 between the ranks, and a 0-d array has none")
        per_rank = self.divide(source.shape[0], counts, "send_counts" if operation == "all_to_all" else "counts")
        row = math.prod(source.shape[1:])
        return per_rank, tuple(n * row for n in per_rank)

    def own_rows(self, source: Array | DeviceArray, counts: Sequence[int] | None) -> tuple[int, ...]:
        """Return how many rows each rank gives, of which ``source`` is this rank's.

        Raises
        ------
        SizeMismatchError
            ``counts`` is wrong, or says another number for this rank.
        """
        if counts is None:
            return (source.shape[0],) * self._world_size
        per_rank = self.counts(counts)
        if per_rank[self._rank] != source.shape[0]:
            raise SizeMismatchError(
                f"counts says that rank {self._rank} gives {per_rank[self._rank]} rows, and its array has shape {source.shape}"
            )
        return per_rank

    def check_dimensions(self, array: Array | DeviceArray) -> None:
        """Refuse an array that cannot be described to another rank.

        Raises
        ------
        SizeMismatchError
            It has too many dimensions, or too many fields.
        """
        if array.ndim > MAX_DIMENSIONS:
            raise SizeMismatchError(
                f"an array of {array.ndim} dimensions cannot be sent: reshape it to at most {MAX_DIMENSIONS}", rank=self._rank
            )
        if array.dtype.names is not None and not can_describe(array.dtype, array.ndim):
            raise SizeMismatchError(
                f"an array of {array.ndim} dimensions and {len(array.dtype.names or ())} fields cannot be described to another rank: use fewer or "
                "shorter names, fewer dimensions, or send x.view(np.uint8)",
                rank=self._rank,
            )


def tag_number(tag: object) -> int:
    """Return the tag of a message.

    Raises
    ------
    UsageError
        It is no integer from 0 on that 63 bits hold.
    """
    number = whole(tag)
    if number is None or not 0 <= number <= LARGEST_TAG:
        raise UsageError(f"tag must be an integer from 0 to {LARGEST_TAG}, not {tag!r}")
    return number


def extents(shape: SupportsIndex | Sequence[SupportsIndex]) -> tuple[int, ...]:
    """Return a shape, given as NumPy's functions take it.

    Raises
    ------
    SizeMismatchError
        It is not one.
    """
    try:
        given = shape if isinstance(shape, Sequence) else [shape]
        found = tuple(operator.index(extent) for extent in given)
    except TypeError:
        found = (-1,)
    if any(extent < 0 for extent in found):
        raise SizeMismatchError(f"shape must be an integer of at least 0, or a sequence of them, not {shape!r}")
    return found


def integer(value: int | None, what: str) -> int | None:
    """Return an integer of 64 bits, or None if None was given.

    Raises
    ------
    UsageError
        It is neither.
    """
    number = None if value is None else whole(value)
    if (value is not None and number is None) or (number is not None and not -(1 << 63) <= number < 1 << 63):
        raise UsageError(f"{what} must be an integer of 64 bits or None, not {value!r}")
    return number
