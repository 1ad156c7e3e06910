"""What UCC does not compare: whether all ranks make the same call, before it, and whether it ended well on all, after it.

A round of empty messages over the other backend, by dissemination (Hensgen, Finkel and Manber 1988): after it each rank has heard of each
other one, and all had the same header. A rank that died, or whose collective failed, sends none, so that nobody takes a wrong result
for a right one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

from oneaccord.api import HEADER_BYTES, Deadline, HeaderMismatch, Mailbox, StallCallback, Transfer, Transport, wait_until

__all__ = ["Agreement"]

_LOOKS_S = (1e-3, 16e-3)
"""How long the first look, and the longest, may last where something is to be done meanwhile."""
_QUIET_LOOK_S = 0.1


class Agreement:
    """Rounds of messages between all ranks.

    Parameters
    ----------
    transport
        What nobody else sends on.
    rank, size
        The identity of this rank.
    """

    def __init__(self, transport: Transport, rank: int, size: int) -> None:
        self._transport = transport
        distances = [1 << step for step in range((size - 1).bit_length())]
        self._rounds = [((rank + distance) % size, (rank - distance) % size) for distance in distances]
        self._boxes: dict[int, Mailbox | None] = {}
        self._number = 0

    def reach(
        self, what: bytes, deadline: Deadline, on_stall: StallCallback, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Return when every rank has come with the same ``what``.

        Parameters
        ----------
        what
            At most 48 bytes.
        deadline, on_stall
            As for a `NativeCollective`.
        meanwhile
            Called again and again while this rank waits.

        Raises
        ------
        HeaderMismatch
            A rank makes another call; it names one of those that this rank heard of.
        LinkLost, TimeoutError
            As `Transport.wait`.
        """
        if not self._boxes:
            peers = sorted({peer for pair in self._rounds for peer in pair})
            self._transport.connect(peers, deadline)
            self._boxes = {peer: self._transport.mailbox(peer) for peer in peers}
        self._number += 1
        header = (b"agree " + self._number.to_bytes(8, "little") + what).ljust(HEADER_BYTES, b"\0")
        for to, whence in self._rounds:
            try:
                outgoing, incoming = self._boxes[to], self._boxes[whence]
                sending = outgoing.post(header, 0) if outgoing else self._transport.send(to, header, memoryview(b""))
                receiving = (
                    incoming.fetch(header, 0) if incoming else self._transport.recv(whence, header, memoryview(bytearray()))
                )
                self._wait([(sending, to), (receiving, whence)], deadline, on_stall, meanwhile)
            except HeaderMismatch as mismatch:
                raise HeaderMismatch(mismatch.peer, b"") from None  # core cannot read this header

    def _wait(
        self,
        begun: Sequence[tuple[Transfer | None, int]],
        deadline: Deadline,
        on_stall: StallCallback,
        meanwhile: Callable[[], None] | None,
    ) -> None:
        left = [(transfer, peer) for transfer, peer in begun if transfer is not None and not transfer.done]
        look_s, longest_s = _LOOKS_S if meanwhile else (_QUIET_LOOK_S, _QUIET_LOOK_S)

        def all_are_done() -> bool:
            nonlocal left, look_s
            if left:
                with contextlib.suppress(TimeoutError):
                    self._transport.wait(
                        [transfer for transfer, _ in left], Deadline(max(1e-6, min(look_s, deadline.remaining())))
                    )
                left = [(transfer, peer) for transfer, peer in left if not transfer.done]
                look_s = min(2 * look_s, longest_s)
            return not left

        wait_until(all_are_done, meanwhile or (lambda: None), deadline, math.inf, lambda: on_stall([peer for _, peer in left]))
