"""One message of manyhands as one or two of Gloo.

A short message is one of Gloo: header and payload together, into memory of the receiver's own, from which the payload is copied. A
long one is two: the header first; only when it has come and is the expected one is the payload's receive begun, into the user's
memory. The receiver always begins with room for a short message, because a peer that does something else may send one.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

from manyhands.api import HEADER_BYTES, Deadline, HeaderMismatch, LinkLost, Transfer, Transport
from manyhands_gloo.process_group import ProcessGroup, reason
from manyhands_gloo.tensors import Tensors

__all__ = ["GlooTransport"]

_SHORT_BYTES = 4096
"""The longest payload that travels with its header; alike on all ranks."""


class _Moving(Transfer):
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


class _Sending(_Moving):
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


class _Receiving(_Moving):
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


class GlooTransport(Transport):
    """Messages of one channel; `close` calls ``forget`` with it."""

    def __init__(self, group: ProcessGroup, channel: int, forget: Callable[[GlooTransport], None]) -> None:
        self._group = group
        self._forget = forget
        self._channel = channel
        self._changed = threading.Condition()
        self.tensors: Tensors = group.tensors

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Nothing to do: Gloo connects all ranks when it begins."""

    def close(self) -> None:
        """Forget this channel."""
        self._forget(self)

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to send."""
        return self._begun(lambda: _Sending(self, peer, header, payload), peer)

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to receive."""
        return self._begun(lambda: _Receiving(self, peer, header, payload), peer)

    def _begun(self, make: Callable[[], _Moving], peer: int) -> _Moving:
        self._group.check()
        try:
            transfer = make()
        except RuntimeError as error:
            raise LinkLost(peer, reason(error)) from None
        self._group.hold(transfer)
        self._group.waiters.start(transfer.run)
        return transfer

    def send_tensor(self, tensor: Any, peer: int) -> Any:
        """Start to send a tensor; return Gloo's handle."""
        return self._group.living().send([tensor], peer, self._channel)

    def receive_tensor(self, tensor: Any, peer: int) -> Any:
        """Start to receive a tensor; return Gloo's handle."""
        return self._group.living().recv([tensor], peer, self._channel)

    def finished(self, transfer: _Moving) -> None:
        """Let go of the memory of a transfer that is done."""
        self._group.release(transfer)

    def tell(self) -> None:
        """Wake whoever waits for a transfer."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Wait until a thread has moved a message to its end."""
        moving = cast("Sequence[_Moving]", transfers)  # made by send and recv
        with self._changed:
            while True:
                failure = next((transfer.failure for transfer in moving if transfer.failure is not None), None)
                if failure is not None:
                    raise failure
                if any(transfer.done for transfer in moving):
                    return
                if self._group.ended:
                    raise LinkLost(moving[0].peer, self._group.ended)
                remaining = deadline.remaining()
                if not remaining:
                    raise TimeoutError("the deadline passed")
                self._changed.wait(remaining)
