"""One message of manyhands as one or two of MPI.

A short message is one of MPI: header and payload together, into memory of the receiver's own, from which the payload is copied. A long
one is two: the header first; only when it has come and is the expected one is the payload's receive begun, into the user's
memory. So a mismatch is seen without waiting for a payload, and never writes there. The receiver always begins with room for a
short message, because a peer that does something else may send one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from manyhands.api import HEADER_BYTES, HeaderMismatch, LinkLost, Transfer
from manyhands_mpi import library
from manyhands_mpi.world import MpiWorld

__all__ = ["Moving", "Receiving", "Sending"]

_SHORT_BYTES = 4096
"""The longest payload that travels with its header; alike on all ranks."""


class Moving(Transfer):
    """A message on its way to or from ``peer``."""

    __slots__ = ("_payload", "_requests", "_world", "nbytes", "peer")

    def __init__(self, world: MpiWorld, peer: int, payload: memoryview) -> None:
        self.peer: int = peer
        self.nbytes: int = len(payload)
        self.done: bool = False
        self.moved: int = 0
        self._world = world
        self._payload = payload
        self._requests: list[Any] = []

    def advance(self) -> bool:
        """Let MPI work; tell whether the transfer is done.

        Raises
        ------
        HeaderMismatch
            A message was not the expected one.
        LinkLost
            MPI gave up.
        """
        while not self.done:
            try:
                with self._world.lock:
                    arrived = self._requests[-1].Test()
            except self._world.mpi.Exception as error:
                raise LinkLost(self.peer, library.words(error)) from None
            if not arrived:
                return False
            self._requests.pop()
            if not self._requests:
                self._arrived()
        return True

    def _finish(self) -> None:
        self.moved = HEADER_BYTES + self.nbytes
        self.done = True
        self._world.release(self)

    @abstractmethod
    def _arrived(self) -> None:
        """Go on: nothing that was begun is on its way any more."""


class Sending(Moving):
    """A message to ``peer``."""

    __slots__ = ("_header",)

    def __init__(self, world: MpiWorld, peer: int, tag: int, header: bytes, payload: memoryview) -> None:
        super().__init__(world, peer, payload)
        comm, byte = world.comm, world.mpi.BYTE
        is_short = len(payload) <= _SHORT_BYTES
        self._header = header + payload if is_short else header
        with world.lock:
            self._requests.append(comm.Isend((self._header, len(self._header), byte), peer, tag))
            if not is_short:
                self._requests.append(comm.Isend((payload, len(payload), byte), peer, tag))

    def _arrived(self) -> None:
        self._finish()


class Receiving(Moving):
    """A message from ``peer``."""

    __slots__ = ("_expected", "_first", "_tag")

    def __init__(self, world: MpiWorld, peer: int, tag: int, header: bytes, payload: memoryview) -> None:
        super().__init__(world, peer, payload)
        self._tag = tag
        self._expected = header
        self._first: bytearray | None = bytearray(HEADER_BYTES + _SHORT_BYTES)
        with world.lock:
            self._requests.append(world.comm.Irecv((self._first, len(self._first), world.mpi.BYTE), peer, tag))

    def _arrived(self) -> None:
        first, world = self._first, self._world
        if first is None:
            self._finish()
            return
        self._first = None
        header = first[:HEADER_BYTES]
        if header != self._expected:
            raise HeaderMismatch(self.peer, bytes(header))
        self.moved = HEADER_BYTES
        if self.nbytes <= _SHORT_BYTES:
            self._payload[:] = memoryview(first)[HEADER_BYTES : HEADER_BYTES + self.nbytes]
            self._finish()
        else:
            with world.lock:
                request = world.comm.Irecv((self._payload, self.nbytes, world.mpi.BYTE), self.peer, self._tag)
            self._requests.append(request)
