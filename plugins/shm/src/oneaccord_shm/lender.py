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

from oneaccord_shm import kernel
from oneaccord_shm.order import fence
from oneaccord_shm.segment import TOKEN_BYTES, Segment

__all__ = ["Lender", "can_lend", "withdraw"]


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
    may_borrow
        Whether this rank may read all of its process.
    """

    def __init__(self, pid: int, pledge_at: int, token: bytes, segment: Segment) -> None:
        self._pid = pid
        self._pledge_at = pledge_at
        self._token = token
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
        return self._segment.page()[:TOKEN_BYTES] == self._token

    def borrow(self, address: int, into: memoryview) -> bool:
        """Copy the bytes at ``address`` in its process; return whether they are the message that it had sent."""
        pledge = bytearray(TOKEN_BYTES)
        return kernel.read_process(self._pid, (address, into), (self._pledge_at, memoryview(pledge))) and pledge == self._token


def withdraw(page: memoryview) -> None:
    """Take this rank's pledge back: peers do not read the rest of its messages."""
    page[:TOKEN_BYTES] = bytes(TOKEN_BYTES)
    fence()


def can_lend(payload: memoryview) -> bool:
    """Return whether the system lets processes read this memory: it is not that of a device."""
    first, last = memoryview(bytearray(1)), memoryview(bytearray(1))
    address = kernel.address_of(payload)
    return kernel.read_process(os.getpid(), (address, first), (address + len(payload) - 1, last))
