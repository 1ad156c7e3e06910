"""Waiting for transfers, with patience first and a deadline in the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from manyhands.backend import Transfer, Transport
from manyhands.deadline import Deadline

__all__ = ["Overdue", "StallCallback", "Waiter"]

StallCallback = Callable[[list[int]], None]
"""Called with the peers waited for, when nothing has moved for a while."""

_FIRST_STALL_S = 0.2
_NEXT_STALL_S = 0.5


class Overdue(Exception):
    """The deadline of a call passed while it waited for ``peers``."""

    def __init__(self, peers: list[int]) -> None:
        super().__init__(peers)
        self.peers: list[int] = peers


class Waiter:
    """Wait on behalf of one call: report when nothing has moved for a while, give up at the deadline.

    ``deadline`` and ``on_stall``, None where nobody wants to know, are those that it was made with. The reports cost nothing on the way of a call that goes well: they begin when nothing has moved for a while.
    """

    __slots__ = ("_moved", "_patience", "_transport", "deadline", "on_stall")

    def __init__(self, transport: Transport, deadline: Deadline, on_stall: StallCallback | None) -> None:
        self._transport = transport
        self.deadline: Deadline = deadline
        self.on_stall: StallCallback | None = on_stall
        self._patience: Deadline | None = None
        self._moved = -1

    def wait(self, transfers: Sequence[Transfer], peers: Callable[[], list[int]]) -> None:
        """Return when one of ``transfers`` is done.

        Raises
        ------
        Overdue
            The deadline passed.
        LinkLost, HeaderMismatch
            As `Transport.wait`.
        """
        patience = self._patience
        if self.on_stall is None:
            patience = self.deadline
        elif patience is None:
            patience = self._patience = Deadline(_FIRST_STALL_S)
        while True:
            limit = patience if patience.at < self.deadline.at else self.deadline
            try:
                self._transport.wait(transfers, limit)
            except TimeoutError:
                if self.on_stall is None or self.deadline.passed():
                    raise Overdue(peers()) from None
                self._stalled(patience, transfers, peers)
            else:
                self._moved = -1
                return

    def finish(self, transfer: Transfer, peer: int, others: list[Transfer]) -> None:
        """Return when ``transfer``, to or from ``peer``, is done, while others go on; raises as `wait`."""
        while not transfer.done:
            self.wait([transfer, *(other for other in others if not other.done)], lambda: [peer])

    def _stalled(self, patience: Deadline, transfers: Sequence[Transfer], peers: Callable[[], list[int]]) -> None:
        now = time.monotonic()
        moved = sum(transfer.moved for transfer in transfers)
        if moved != self._moved:
            # The first look since something moved.
            self._moved = moved
            patience.at = now + _FIRST_STALL_S
            return
        assert self.on_stall is not None
        self.on_stall(peers())
        patience.at = now + _NEXT_STALL_S
