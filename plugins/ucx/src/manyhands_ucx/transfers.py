"""One message of manyhands as one or two of UCX.

A short message is one of UCX: header and payload together, into memory of the receiver's own, from which the payload is copied. A long
one is two: the header first; only when it has come and is the expected one is the payload's receive begun, into the user's
memory. So a mismatch is seen without waiting for a payload, and never writes there. The receiver always begins with room for a
short message, because a peer that does something else may send one. UCX keeps the order of messages with one tag.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod

import numpy as np

from manyhands.api import HEADER_BYTES, HeaderMismatch, LinkLost, Transfer
from manyhands_ucx.library import IN_PROGRESS, status_of
from manyhands_ucx.worker import Worker

__all__ = ["FIRST_BYTES", "Moving", "Receiving", "Sending"]

_SHORT_BYTES = 16384 - HEADER_BYTES
"""The longest payload that travels with its header; alike on all ranks."""

FIRST_BYTES = HEADER_BYTES + _SHORT_BYTES
"""How much the first message of UCX's may bring."""

_WHOLE_TAG = (1 << 64) - 1


def _address(memory: memoryview) -> int:
    """Return where bytes lie, which may be read-only."""
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address


class Moving(Transfer):
    """A message on its way to or from ``peer``, with the requests of UCX that it waits for."""

    __slots__ = ("_payload", "_requests", "_worker", "peer")

    def __init__(self, worker: Worker, peer: int, payload: memoryview) -> None:
        self.peer: int = peer
        self.done: bool = False
        self.moved: int = 0
        self._worker = worker
        self._payload = payload
        self._requests: list[int] = []
        worker.check(peer)
        worker.hold(self)

    def advance(self) -> bool:
        """Look whether the requests are done, and go on where they are; tell whether the transfer is. Under the worker's lock.

        Raises
        ------
        HeaderMismatch
            A message was not the expected one.
        LinkLost
            UCX gave up.
        """
        ucp = self._worker.ucp
        while not self.done:
            while self._requests:
                request = self._requests[-1]
                status = ucp.request_check_status(request)
                if status == IN_PROGRESS:
                    return False
                self._requests.pop()
                ucp.request_free(request)
                self._check(status)
            self._go_on()
        return True

    def give_up(self) -> bool:
        """Ask UCX to let go of the message; tell whether it has. Under the worker's lock."""
        ucp = self._worker.ucp
        for request in list(self._requests):
            if ucp.request_check_status(request) == IN_PROGRESS:
                ucp.request_cancel(self._worker.handle, request)
            else:
                self._requests.remove(request)
                ucp.request_free(request)
        return not self._requests

    def _began(self, pointer: int | None) -> None:
        """Remember what a function that starts something returned."""
        if pointer is None:
            return
        status = status_of(pointer)
        if status == IN_PROGRESS:
            self._requests.append(pointer)
        else:
            self._check(status)

    def _check(self, status: int) -> None:
        if status:
            self._worker.check(self.peer)  # with the reason why the connection broke
            raise LinkLost(self.peer, f"UCX: {self._worker.ucp.why(status)}")

    def _finish(self) -> None:
        self.moved = HEADER_BYTES + len(self._payload)
        self.done = True
        self._worker.release(self)

    @abstractmethod
    def _go_on(self) -> None:
        """Start what comes next, where no request is on its way any more."""


class Sending(Moving):
    """A message to ``peer``, begun at once."""

    __slots__ = ("_header",)

    def __init__(self, worker: Worker, peer: int, tag: int, header: bytes, payload: memoryview) -> None:
        super().__init__(worker, peer, payload)
        ucp, nbytes = worker.ucp, len(payload)
        endpoint = worker.endpoint(peer)
        self._header = header if nbytes > _SHORT_BYTES else b"".join((header, payload))
        self._began(ucp.tag_send_nbx(endpoint, self._header, len(self._header), tag, worker.request))
        if nbytes > _SHORT_BYTES:
            self._began(ucp.tag_send_nbx(endpoint, _address(payload), nbytes, tag, worker.request))

    def _go_on(self) -> None:
        self._finish()


class Receiving(Moving):
    """A message from ``peer``; ``first`` is memory for the first message of UCX's, of `FIRST_BYTES` bytes."""

    __slots__ = ("_expected", "_first", "_tag")

    def __init__(
        self, worker: Worker, peer: int, tag: int, header: bytes, payload: memoryview, first: ctypes.Array[ctypes.c_char]
    ) -> None:
        super().__init__(worker, peer, payload)
        self._tag = tag
        self._expected = header
        self._first: ctypes.Array[ctypes.c_char] | None = first
        self._receive(ctypes.addressof(first), FIRST_BYTES)

    def _receive(self, address: int, nbytes: int) -> None:
        worker = self._worker
        self._began(worker.ucp.tag_recv_nbx(worker.handle, address, nbytes, self._tag, _WHOLE_TAG, worker.request))

    def _go_on(self) -> None:
        first, nbytes = self._first, len(self._payload)
        if first is None:
            self._finish()
            return
        self._first = None
        came = memoryview(first).cast("B")
        if came[:HEADER_BYTES] != self._expected:
            self._worker.release(self)
            raise HeaderMismatch(self.peer, bytes(came[:HEADER_BYTES]))
        self.moved = HEADER_BYTES
        if nbytes <= _SHORT_BYTES:
            self._payload[:] = came[HEADER_BYTES : HEADER_BYTES + nbytes]
            self._finish()
        else:
            self._receive(_address(self._payload), nbytes)
