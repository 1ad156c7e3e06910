"""The target's side of a window whose calls are requests: all of it under the lock of the office, in whichever thread drives."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np

from oneaccord.arrays.memory import NOTHING, Array, bytes_of
from oneaccord.calls.post.office import PostOffice
from oneaccord.calls.windows import wire
from oneaccord.calls.windows.locks import LockQueue
from oneaccord.calls.windows.places import Changer, Place, changer, swapped
from oneaccord.calls.windows.wire import Asked, Standing, asked, reply

__all__ = ["Server", "carry_out"]

_Changers = cache(changer)


class Server:
    """Serves the requests of other ranks to the window of this one.

    Parameters
    ----------
    office
        The office of this rank.
    number
        The number of the window.
    flat
        The window of this rank, flat.
    atomic
        Keeps others from changing elements atomically at the same time, if they can without this rank.

    Attributes
    ----------
    flat
        As above.
    """

    def __init__(
        self, office: PostOffice, number: int, flat: Array, atomic: AbstractContextManager[object] | None = None
    ) -> None:
        self.flat: Array = flat
        self._office = office
        self._number = number
        self._atomic = nullcontext() if atomic is None else atomic
        self._locks = LockQueue()
        self._standing: list[Standing] = []

    def begin(self, peers: tuple[int, ...], keeper: Any) -> None:
        """Serve these ranks of the world from now on, for ``keeper``, the path of the group."""
        office = self._office
        with office.lock:
            for peer in peers:
                standing = Standing(office, self._number, peer, self._serve)
                standing.path = keeper
                self._standing.append(standing)
                standing.begin()
                office.stand(standing)

    def end(self) -> None:
        """Serve nobody any more; nobody may ask."""
        with self._office.lock:
            for standing in self._standing:
                self._office.matching.withdraw(standing)
                self._office.withdraw(standing)
            self._standing.clear()

    def apply(self, kind: int, op: int, place: Place, values: Array, expected: Array = NOTHING) -> Array:
        """Carry out what reads or changes elements; return those that the call gets. Under the lock of the office."""
        if kind in (wire.PUT, wire.GET):
            return carry_out(self.flat, kind, op, place, values, expected)
        with self._atomic:
            return carry_out(self.flat, kind, op, place, values, expected)

    def _serve(self, peer: int, data: memoryview) -> None:
        it = asked(data)
        match it.kind:
            case wire.LOCK | wire.LOCK_SHARED:
                self._grant(self._locks.ask(peer, it.number, exclusive=it.kind == wire.LOCK))
            case wire.UNLOCK:
                granted = self._locks.give_back(peer)
                self._reply(peer, it.number)
                self._grant(granted)
            case wire.FLUSH:
                self._reply(peer, it.number)
            case _:
                self._elements(peer, it)

    def _elements(self, peer: int, it: Asked) -> None:
        values = np.frombuffer(it.data, self.flat.dtype) if it.data else self.flat[:0]
        expected = NOTHING
        if it.kind == wire.SWAP:
            expected, values = np.split(values, 2)
        old = self.apply(it.kind, it.op, it.place, values, expected)
        if it.number:
            self._reply(peer, it.number, bytes_of(np.ascontiguousarray(old)))

    def _grant(self, granted: list[tuple[int, int]]) -> None:
        for rank, number in granted:
            self._reply(rank, number)

    def _reply(self, peer: int, number: int, data: memoryview = memoryview(b"")) -> None:  # noqa: B008 - it has no bytes
        self._office.send(reply("the reply to a request", self._number, peer, number, data))


def carry_out(flat: Array, kind: int, op: int, place: Place, values: Array, expected: Array = NOTHING) -> Array:
    """Read or change elements of a window; return those that the call gets, which are its own."""
    view = place.of(flat)
    match kind:
        case wire.PUT:
            view[...] = values
            return NOTHING
        case wire.GET:
            return view.copy()
        case wire.SWAP:
            return swapped(view, expected, values)
        case _:
            change: Changer = _Changers(op, flat.dtype)
            return change(view, values)
