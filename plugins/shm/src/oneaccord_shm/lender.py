"""The memory of a peer that this rank reads in place: its heap, which both have mapped, and all other memory of its process.

The system copies from one process to another (`process_vm_readv`), so that a long message is copied once, not into slots and out again.
It needs the right to look into the other process, which the kernel's security settings may refuse: ranks try it when they meet, and say
to whom they may lend.

The lender does not know when its memory is read, and its program may write to that memory as soon as its call has failed. So each rank has a
*pledge* in the first page of its memory, the token of the meeting. `withdraw` takes it back before the program continues, and a reader looks
at the pledge after it has read: if it is gone, the read bytes are not the message. The pledge is read in the same system call as the
message, at its place in the lender's process, so that a stranger that got the number of a dead process is found, too.
"""

from __future__ import annotations

import os
import threading
import time

from oneaccord_shm import kernel
from oneaccord_shm.order import fence
from oneaccord_shm.segment import TOKEN_BYTES, Segment

__all__ = ["Lender", "can_lend", "measured_bytes", "withdraw"]

_BOUNCE_BYTES = 64 << 10
_LEAST_LENT_BYTES, _MOST_LENT_BYTES = 64 << 10, 16 << 20
_TRIED_BYTES = 256 << 10
_TRIES = 5
_WORTH = 6.0
"""A message is lent if a copy by the system takes less than so many copies of the program's own. Ranks copy a lent message in halves."""


class Lender:
    """One peer, as its reader sees it.

    Parameters
    ----------
    pid
        The number of its process.
    pledge_at
        The address of its pledge in that process, 0 if no rank may read there.
    token
        Its pledge.
    segment
        The memory that it shares.

    Attributes
    ----------
    pid, pledge_at, token
        The parameters.
    may_borrow
        Whether this rank may read all of its process.
    """

    def __init__(self, pid: int, pledge_at: int, token: bytes, segment: Segment) -> None:
        self.pid: int = pid
        self.pledge_at: int = pledge_at
        self.token: bytes = token
        self._segment = segment
        self._heap: memoryview | None = None
        self._mapping = threading.Lock()
        self.may_borrow: bool = pledge_at > 0 and self.borrow(pledge_at, memoryview(bytearray(TOKEN_BYTES)))

    def heap(self, offset: int, nbytes: int) -> memoryview:
        """Return a part of its heap."""
        with self._mapping:
            if self._heap is None:
                self._heap = self._segment.heap().toreadonly()
        return self._heap[offset : offset + nbytes]

    def stands(self) -> bool:
        """Return whether the bytes read in its heap until now are the ones that it had sent."""
        fence()
        return self._segment.page()[:TOKEN_BYTES] == self.token

    def borrow(self, address: int, into: memoryview) -> bool:
        """Copy the bytes at ``address`` in its process; return whether they are the message that it had sent."""
        if self._read(address, into):
            return True
        # The system may not write to this memory for others, such as that of a device; this process can.
        bounce = memoryview(bytearray(min(len(into), _BOUNCE_BYTES)))
        for start in range(0, len(into), _BOUNCE_BYTES):
            part = bounce[: len(into) - start]
            if not self._read(address + start, part):
                return False
            into[start : start + len(part)] = part
        return True

    def _read(self, address: int, into: memoryview) -> bool:
        pledge = bytearray(TOKEN_BYTES)
        return kernel.read_process(self.pid, (address, into), (self.pledge_at, memoryview(pledge))) and pledge == self.token


def withdraw(page: memoryview) -> None:
    """Take this rank's pledge back: peers do not read the rest of its messages."""
    page[:TOKEN_BYTES] = bytes(TOKEN_BYTES)
    fence()


def measured_bytes() -> int:
    """Return the length from which on messages are to be lent, as some tries on this machine say; it takes a fraction of a millisecond.

    What counts is the time of this thread on its processor, which other work on the machine changes little. A copy by the system finds the pages of the other process one by one, which some systems do slowly. A message through slots is copied twice, but
    by two ranks at once.
    """
    source, into, rest = (memoryview(bytearray(nbytes)) for nbytes in (_TRIED_BYTES, _TRIED_BYTES, 1))
    pid, address = os.getpid(), kernel.address_of(source)
    read_s = copied_s = float("inf")
    for _ in range(_TRIES):
        started = time.thread_time()
        if not kernel.read_process(pid, (address, into), (address, rest)):
            return _MOST_LENT_BYTES
        between = time.thread_time()
        into[:] = source
        read_s = min(read_s, between - started)
        copied_s = min(copied_s, time.thread_time() - between)
    return _LEAST_LENT_BYTES if read_s < _WORTH * copied_s else _MOST_LENT_BYTES


def can_lend(payload: memoryview) -> bool:
    """Return whether the system lets processes read this memory: it is not that of a device."""
    first, last = memoryview(bytearray(1)), memoryview(bytearray(1))
    address = kernel.address_of(payload)
    return kernel.read_process(os.getpid(), (address, first), (address + len(payload) - 1, last))
