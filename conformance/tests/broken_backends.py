"""A backend that sends its messages over TCP, with one fault that its config names; for tests that see checks fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manyhands.api import BackendSpec, Deadline, LinkLost, Transfer, hookimpl
from manyhands_tcp.backend import TcpBackend, TcpTransport
from manyhands_tcp.plugin import TcpConfig

__all__ = ["BrokenConfig", "create", "manyhands_register_backends"]


class BrokenConfig(TcpConfig):
    """The table ``[backends.broken]``."""

    fault: str = ""


@hookimpl
def manyhands_register_backends() -> BackendSpec:
    return BackendSpec(name="broken", summary="", factory="broken_backends:create", config=BrokenConfig)


def create(bootstrap: Any) -> Any:
    return _Backend(bootstrap)


class _Backend(TcpBackend):
    def __init__(self, bootstrap: Any) -> None:
        super().__init__(bootstrap)
        self.fault = bootstrap.config.fault
        self.leaked: list[Any] = []

    def open_transport(self, channel: int) -> Any:
        return _Transport(self, channel)

    def close(self) -> None:
        if self.fault == "close of a second time fails" and self.leaked:
            raise RuntimeError("closed already")
        self.leaked.append(None)
        if self.fault == "sockets are left behind":
            import socket

            _left.extend(socket.socketpair())
        super().close()


_left: list[Any] = []


class _Done(Transfer):
    """A transfer that says that it is over."""

    __slots__ = ()

    def __init__(self, moved: int) -> None:
        self.done, self.moved = True, moved


class _Transport(TcpTransport):
    """Without mailboxes and streams, so that each message is one `send` and one `recv`."""

    streams = False

    def __init__(self, backend: _Backend, channel: int) -> None:
        super().__init__(backend, channel)
        self.backend = backend

    def mailbox(self, peer: int) -> Any:
        return None

    def send(self, peer: int, header: bytes, payload: memoryview) -> Any:
        fault = self.backend.fault
        if fault == "zeros are sent":
            payload = memoryview(bytes(len(payload)))
        elif fault == "the last byte is lost" and len(payload) > 3000:
            payload = memoryview(bytes(payload[:-1]) + b"\0")
        elif fault == "long messages arrive backwards" and len(payload) > 3000:
            payload = memoryview(bytes(payload)[::-1])
        return super().send(peer, header, payload)

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Any:
        if self.backend.fault == "empty messages are not waited for" and not payload:
            return _Done(0)
        return super().recv(peer, header, payload)

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        if self.backend.fault == "deadlines are ignored":
            deadline = Deadline(3600.0)
        try:
            super().wait(transfers, deadline)
        except LinkLost:
            if self.backend.fault == "abort is ignored":
                import threading

                threading.Event().wait(12)
            raise
