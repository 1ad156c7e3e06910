"""One message of manyhands as one or two of Gloo.

A short message is one of Gloo: header and payload together, into memory of the receiver's own, from which the payload is copied. A
long one is two: the header first; only when it has come and is the expected one is the payload's receive begun, into the user's
memory. The receiver always begins with room for a short message, because a peer that does something else may send one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from manyhands.api import HEADER_BYTES, HeaderMismatch, LinkLost, Transfer

if TYPE_CHECKING:
    from manyhands_gloo.backend import GlooTransport

__all__ = ["Moving", "Receiving", "Sending", "reason"]

_SHORT_BYTES = 4096
"""The longest payload that travels with its header; alike on all ranks."""


class Moving(Transfer):
    """A message on its way to or from ``peer``; `run` moves it, in a thread that may block."""

    __slots__ = ("_payload", "_transport", "failure", "peer")

    def __init__(self, transport: GlooTransport, peer: int, payload: memoryview) -> None:
        self.peer: int = peer
        self.done: bool = False
        self.moved: int = 0
        self.failure: Exception | None = None
        self._transport = transport
        self._payload = payload

    def run(self) -> None:
        """Move the message to its end, and tell whoever waits for it."""
        try:
            self._move()
        except HeaderMismatch as mismatch:
            self.failure = mismatch
        except Exception as error:  # noqa: BLE001 - whatever ends it ends the connection, and is told where it is waited for
            self.failure = LinkLost(self.peer, reason(error))
        else:
            self.moved = HEADER_BYTES + len(self._payload)
            self._transport.finished(self)
            self.done = True
        self._transport.tell()

    @abstractmethod
    def _move(self) -> None:
        """Move the message."""


class Sending(Moving):
    """A message to ``peer``, begun at once."""

    __slots__ = ("_memory", "_works")

    def __init__(self, transport: GlooTransport, peer: int, header: bytes, payload: memoryview) -> None:
        super().__init__(transport, peer, payload)
        first = bytearray(header)
        if is_short := len(payload) <= _SHORT_BYTES:
            first += payload
        self._memory: list[Any] = [transport.tensors.of_payload(first)]
        if not is_short:
            self._memory.append(transport.tensors.of_payload(payload))
        self._works: list[Any] = [transport.send_tensor(tensor, peer) for tensor in self._memory]

    def _move(self) -> None:
        for work in self._works:
            work.wait()


class Receiving(Moving):
    """A message from ``peer``."""

    __slots__ = ("_expected", "_first", "_memory", "_work")

    def __init__(self, transport: GlooTransport, peer: int, header: bytes, payload: memoryview) -> None:
        super().__init__(transport, peer, payload)
        self._expected = header
        self._first = bytearray(HEADER_BYTES + _SHORT_BYTES)
        self._memory: Any = transport.tensors.of_payload(self._first)
        self._work: Any = transport.receive_tensor(self._memory, peer)

    def _move(self) -> None:
        self._work.wait()
        header = self._first[:HEADER_BYTES]
        if header != self._expected:
            raise HeaderMismatch(self.peer, bytes(header))
        self.moved = HEADER_BYTES
        if len(self._payload) <= _SHORT_BYTES:
            self._payload[:] = memoryview(self._first)[HEADER_BYTES : HEADER_BYTES + len(self._payload)]
            return
        self._memory = self._transport.tensors.of_payload(self._payload)
        self._work = self._transport.receive_tensor(self._memory, self.peer)
        self._work.wait()


def reason(error: Exception) -> str:
    """Return what an error of Gloo says, without the place in its source and without its advice."""
    lines = str(error).splitlines() or [type(error).__name__]
    text = lines[0].partition("] ")[2] if lines[0].startswith("[/") else lines[0]
    return text.partition(" This is typically")[0] or type(error).__name__
