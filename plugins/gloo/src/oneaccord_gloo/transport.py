"""Messages of one channel over Gloo.

A message of Gloo cannot be tested, and a wait for it that runs out of time breaks its connection. So each is waited for without a
limit by a thread of its own, and a caller with a deadline waits for that thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oneaccord.api import LinkLost, ThreadedTransport
from oneaccord_gloo.process_group import ProcessGroup, reason

__all__ = ["GlooTransport"]


class GlooTransport(ThreadedTransport):
    """Messages of one channel; `close` calls ``forget`` with it."""

    def __init__(self, group: ProcessGroup, channel: int, forget: Callable[[GlooTransport], None]) -> None:
        super().__init__(group, group.calls)
        self._group = group
        self._channel = channel
        self._forget = forget

    def close(self) -> None:
        """Forget this channel."""
        self._forget(self)

    def start_send(self, peer: int, memory: bytes | memoryview) -> Any:
        """Start to send; return Gloo's handle, and the tensor."""
        return self._started("send", peer, memory)

    def start_receive(self, peer: int, memory: Any) -> Any:
        """Start to receive; return Gloo's handle, and the tensor."""
        return self._started("recv", peer, memory)

    def _started(self, how: str, peer: int, memory: Any) -> Any:
        tensor = self._group.tensors.of_payload(memory)
        try:
            return getattr(self._group.living(), how)([tensor], peer, self._channel), tensor
        except RuntimeError as error:
            raise LinkLost(peer, reason(error)) from None

    def test(self, request: Any, peer: int) -> bool:
        """Wait until a request is done."""
        try:
            request[0].wait()
        except Exception as error:  # noqa: BLE001 - whatever ends it ends the connection
            self._group.hold(request)  # Gloo may still use it
            raise LinkLost(peer, reason(error)) from None
        return True
