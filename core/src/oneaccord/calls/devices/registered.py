"""Memory of GPUs that the library which moves it knows beforehand, so that it needs no copy on the way.

A library that finds registered memory on one rank takes a way on which it expects it on all of them, at the same place, and nothing of the
library compares that: a rank that gives other memory makes the others hang, or gets wrong values. So where memory lies is a part of a call's kind, on
which the ranks agree. The places of the library are counted up on each rank by itself as well, so that all ranks must register and give back
in one order: what programs no longer use is given back when they meet the next time, once all of them have it no longer.
"""

from __future__ import annotations

import bisect
import weakref
from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING

from oneaccord.calls.failures import exchange_cards
from oneaccord.calls.request import Request
from oneaccord.contract.cards import write_card
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.device import DeviceChannel, DeviceFailure
from oneaccord.contract.header import CallSignature
from oneaccord.control.protocol import Report
from oneaccord.errors import OutOfMemoryError
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job
from oneaccord.schedule.steps import Collective

if TYPE_CHECKING:
    from oneaccord.arrays.libraries import DeviceArray

__all__ = ["Owner", "Place", "Registered", "said_place", "takes_registered"]

Place = tuple[int, int, int, int]
"""Where the input and the result of a call lie: the number of the registered memory and the offset in it, for each; -1 where that is other memory."""

_Table = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
_ELSEWHERE = (-1, -1)
_DONE, _CAPTURING = b"done", b"capturing"
"""What a rank tells of its device when memory is to be given back."""


def takes_registered(request: Request) -> bool:
    """Return whether a call uses registered memory as it is; the others copy.

    That is where each rank has an input and a result, of one size, and so can tell by its own what all of them must do.
    """
    if request.collective is Collective.ALL_REDUCE:
        return True
    if request.collective is Collective.ALL_TO_ALL:
        return request.uneven is None
    return request.collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) and len(set(request.counts)) == 1


def said_place(place: Place) -> str:
    """Return where the memory of a call lies, in words."""
    ways = (("input", *place[:2]), ("result", *place[2:]))
    return ", ".join(
        f"{way} elsewhere" if number < 0 else f"{way} in empty() number {number} at byte {offset}"
        for way, number, offset in ways
    )


class Owner:
    """What an array and its views hold: when it goes, no program can reach the memory any more."""

    __slots__ = ("__weakref__",)


class Registered:
    """The registered memory of one group on this rank.

    Parameters
    ----------
    job, members
        The job of the group, and its members.
    channel
        What moves the group's device memory; None if the backend moves none.
    """

    def __init__(self, job: Job, members: Members, channel: DeviceChannel | None) -> None:
        self._job = job
        self._members = members
        self._channel = channel
        self._table: _Table = (), (), ()
        self._count = 0
        self._known: dict[int, int] = {}
        self._dropped: deque[int] = deque()
        self._unused: set[int] = set()

    @property
    def is_empty(self) -> bool:
        """Whether there is none, so that no call need look."""
        return not self._table[0]

    def has(self, pointer: int) -> bool:
        """Return whether an address is in registered memory."""
        return self._find(pointer) is not _ELSEWHERE

    def place(self, source: int, target: int) -> Place | None:
        """Return where the memory of a call lies; None if none of it is registered."""
        found, to = self._find(source), self._find(target)
        return None if found is to is _ELSEWHERE else (*found, *to)

    def _find(self, pointer: int) -> tuple[int, int]:
        starts, ends, numbers = self._table
        index = bisect.bisect_right(starts, pointer) - 1
        if index < 0 or pointer >= ends[index]:
            return _ELSEWHERE
        return numbers[index], pointer - starts[index]

    def settled(
        self, request: Request, array: DeviceArray, target: DeviceArray | None, late: DeviceArray | None
    ) -> tuple[DeviceArray, DeviceArray | None, DeviceArray | None, Place | None]:
        """Return the input and the result of a call, where that is then copied to, and where the memory lies.

        For a call that uses no registered memory, others take the place of what lies there.
        """
        place = None if self.is_empty else self.place(array.pointer, 0 if target is None else target.pointer)
        if place is None or takes_registered(request):
            return array, target, late, place
        if self.has(array.pointer):
            apart = array.library.empty(array.shape, array.dtype, array.device)
            array.library.copy(apart, array)
            array = apart
        if target is not None and self.has(target.pointer):
            target, late = target.library.empty(target.shape, target.dtype, target.device), target
        return array, target, late, None

    def add(
        self, nbytes: int, signature: CallSignature, sequence: int, calls: bytes, deadline: Deadline
    ) -> tuple[int, Owner] | None:
        """Make and register memory, which all ranks do together; return its address, and what the array that is made of it must hold.

        Parameters
        ----------
        nbytes
            How much; at least 1.
        signature, sequence
            What all ranks must call alike, and the number of the call.
        calls
            What sums up the calls before it.
        deadline
            Until when.

        Returns
        -------
        tuple or None
            None if the library has no such memory.

        Raises
        ------
        CommError
            The first cause, alike on all ranks.
        OutOfMemoryError
            A rank has not so much memory; alike on all ranks, and the group stays as it was.
        DeviceFailure, TimeoutError
            From the channel.
        """
        channel = self._channel
        assert channel is not None
        call = signature, sequence
        name = f"{signature.operation} #{sequence} of {self._members.name} on GPUs"
        while self._dropped:
            self._unused.add(self._dropped.popleft())
        unused = sorted(number for number in self._unused if not channel.is_captured(self._known[number]))
        told = self._trade(name, write_card((signature.digest + calls, tuple(unused))), call, deadline)
        cards = self._job.read_cards(told, tuple[bytes, tuple[int, ...]], name, self._members.ranks)
        other = next(
            (rank for rank, card in zip(self._members.ranks, cards, strict=True) if card[0] != cards[self._members.rank][0]),
            None,
        )
        if other is not None:
            text = (
                f"the ranks did not make the same call on their GPUs at #{sequence}: every rank must make the same calls in the same order, "
                "with the same shape and dtype:"
            )
            report = Report(
                "mismatch", text, other, signature.operation, self._members.channel, sequence, list(self._members.ranks)
            )
            raise self._job.fail(report)
        gone = sorted(set(cards[0][1]).intersection(*(card[1] for card in cards)))
        if gone:
            # No rank takes its memory away from another one that still reads there.
            states = self._trade(f"{name}, done", self._settled(channel, deadline), call, deadline)
            if all(state == _DONE for state in states):
                self._free(gone)
        return self._make(channel, nbytes, name, call, deadline)

    def _settled(self, channel: DeviceChannel, deadline: Deadline) -> bytes:
        """Wait for the device; return what to tell the others of it."""
        try:
            channel.settle(deadline)
        except DeviceFailure as failure:
            if not failure.is_passing:
                raise
            return _CAPTURING
        return _DONE

    def _make(
        self, channel: DeviceChannel, nbytes: int, name: str, call: tuple[CallSignature, int], deadline: Deadline
    ) -> tuple[int, Owner] | None:
        problem, pointer = "", None
        try:
            pointer = channel.allocate(nbytes)
        except MemoryError as error:
            problem = str(error) or "no memory"
        problems = [card.decode(errors="replace") for card in self._trade(f"{name}, memory", problem.encode(), call, deadline)]
        failed = next((rank for rank, each in zip(self._members.ranks, problems, strict=True) if each), None)
        if failed is not None:
            if pointer is not None:
                channel.free([pointer])
            raise OutOfMemoryError(
                f"rank {failed} has no {nbytes} bytes for {call[0].operation}: {problems[self._members.ranks.index(failed)]}",
                rank=self._job.rank,
                peer=failed,
            )
        if pointer is None:
            return None
        try:
            channel.register(pointer, nbytes, deadline)
        except BaseException:
            channel.abandon(pointer)
            raise
        self._count = number = self._count + 1
        self._known[number] = pointer
        self._enter((pointer, pointer + nbytes, number))
        owner = Owner()
        weakref.finalize(owner, self._drop, number, pointer).atexit = False
        return pointer, owner

    def _trade(self, name: str, card: bytes, call: tuple[CallSignature, int], deadline: Deadline) -> list[bytes]:
        return exchange_cards(self._job, self._members, name, card, self._members.ranks, deadline, call)[0]

    def _enter(self, row: tuple[int, int, int]) -> None:
        rows = sorted([*zip(*self._table, strict=True), row])
        self._table = tuple(zip(*rows, strict=True))  # type: ignore[assignment]

    def _free(self, numbers: Collection[int]) -> None:
        assert self._channel is not None
        rows = [row for row in zip(*self._table, strict=True) if row[2] not in numbers]
        self._table = tuple(zip(*rows, strict=True)) if rows else ((), (), ())  # type: ignore[assignment]
        self._unused.difference_update(numbers)
        self._channel.free([self._known.pop(number) for number in numbers])

    def _drop(self, number: int, pointer: int) -> None:
        """Note that no program can reach a memory any more. Takes no lock, since garbage is collected in the midst of anything."""
        assert self._channel is not None
        # In this order: once it is among the dropped ones, another thread may free it, and get the same address anew.
        self._channel.abandon(pointer)
        self._dropped.append(number)
