"""The origin's side of a window whose calls are requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from oneaccord.arrays.memory import NOTHING, Array, bytes_of
from oneaccord.calls.post.messages import Operation
from oneaccord.calls.windows import wire
from oneaccord.calls.windows.places import Place
from oneaccord.calls.windows.serving import Server
from oneaccord.calls.windows.wire import PIECE_BYTES, Reply, request
from oneaccord.contract.deadline import Deadline

__all__ = ["Asking", "Run"]

Run = Callable[[object, Sequence[Operation], float, int], None]
"""``run(what, operations, timeout_s, nbytes)`` begins operations, and waits until all have ended."""
_AT_ONCE = 8
"""How many requests with long replies are on their way at once."""


class Asking:
    """Makes the calls of one rank on a window by requests.

    Parameters
    ----------
    run
        Carries the messages.
    now
        The clock.
    number
        The number of the window.
    rank
        This rank of the world.
    server
        Serves the window of this rank.
    """

    def __init__(self, run: Run, now: Callable[[], float], number: int, rank: int, server: Server, lock: Any) -> None:
        self._run = run
        self._now = now
        self._number = number
        self._rank = rank
        self._server = server
        self._lock = lock
        self._serial = itertools.count(1)
        self._open: set[int] = set()

    def change(
        self,
        what: object,
        peer: int,
        kind: int,
        place: Place,
        values: Array,
        seconds: float,
        op: int = 0,
        expected: Array = NOTHING,
        out: Array | None = None,
    ) -> None:
        """Read or change elements of the window of a rank of the world; ``out``, flat and contiguous, gets what the call returns."""
        if peer == self._rank:
            with self._lock:
                old = self._server.apply(kind, op, place, values, expected)
            if out is not None:
                out[...] = old
            return
        until = Deadline(seconds, self._now)
        operations: list[Operation] = []
        moved = 0
        for first, count in _pieces(
            place.size, (out if out is not None else values).dtype.itemsize * (2 if kind == wire.SWAP else 1)
        ):
            part, number, data = slice(first, first + count), 0, b""
            if kind == wire.SWAP:
                data = expected[part].tobytes() + values[part].tobytes()
            elif kind != wire.GET:
                data = values[part].tobytes()
            if out is not None:
                number = next(self._serial)
                memory = np.frombuffer(bytes_of(out[part]), np.uint8)
                operations.append(Reply(what, self._number, peer, number, memory))
            operations.append(
                request(what, self._number, peer, kind, op=op, place=place.part(first, count), number=number, data=data)
            )
            moved += len(data) if out is None else out[part].nbytes
            if out is None or len(operations) >= 2 * _AT_ONCE:
                self._run(what, operations, _left(until), moved)
                operations, moved = [], 0
        if operations:
            self._run(what, operations, _left(until), moved)
        if out is None:
            self._open.add(peer)

    def flush(self, what: object, peers: Sequence[int], seconds: float) -> None:
        """Wait until what this rank has begun on the windows of some ranks of the world is complete."""
        left = [peer for peer in peers if peer in self._open]
        self._open.difference_update(left)  # before: another thread may begin more meanwhile
        self._ask(what, [(peer, wire.FLUSH) for peer in left], seconds)

    def lock(self, what: object, peer: int, seconds: float, exclusive: bool) -> None:
        """Wait for the lock of a window."""
        self._ask(what, [(peer, wire.LOCK if exclusive else wire.LOCK_SHARED)], seconds)

    def unlock(self, what: object, peers: Sequence[int], seconds: float) -> None:
        """Give the locks of windows back, when what this rank has begun there is complete."""
        self._open.difference_update(peers)
        self._ask(what, [(peer, wire.UNLOCK) for peer in peers], seconds)

    def _ask(self, what: object, asks: Sequence[tuple[int, int]], seconds: float) -> None:
        operations: list[Operation] = []
        for peer, kind in asks:
            number = next(self._serial)
            operations.append(Reply(what, self._number, peer, number))
            operations.append(request(what, self._number, peer, kind, number=number))
        if operations:
            self._run(what, operations, seconds, 0)


def _pieces(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the first element, and the number of elements, of each request; one at least."""
    most = max(1, PIECE_BYTES // size)
    for first in range(0, max(count, 1), most):
        yield first, min(most, count - first)


def _left(until: Deadline) -> float:
    return max(until.remaining(), 1e-6)
