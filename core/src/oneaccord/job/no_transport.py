"""The substitute for a transport in a world of one."""

from __future__ import annotations

from collections.abc import Sequence

from oneaccord.contract.backend import Transfer, Transport
from oneaccord.contract.deadline import Deadline
from oneaccord.errors import InternalError

__all__ = ["NoTransport"]


class NoTransport(Transport):
    """The transport of a world of one, in which there are no peers."""

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Refuse peers."""
        if peers:
            raise InternalError("a schedule of a world of one has peers")

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Refuse."""
        raise InternalError("a schedule of a world of one sends")

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Refuse."""
        raise InternalError("a schedule of a world of one receives")

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Refuse."""
        raise InternalError("a schedule of a world of one waits")
