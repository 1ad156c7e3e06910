"""A backend that sends its messages over TCP, with one fault that its config names; for tests that see checks fail."""

from __future__ import annotations

import functools
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from manyhands.api import BackendSpec, Deadline, LinkLost, Transfer, hookimpl
from manyhands.config.plugins import get_plugin_manager
from manyhands_tcp.backend import TcpBackend, TcpTransport
from manyhands_tcp.plugin import TcpConfig

__all__ = ["BrokenConfig", "create", "manyhands_register_backends", "register"]


class BrokenConfig(TcpConfig):
    """The table ``[backends.broken]``."""

    fault: str = ""


@hookimpl
def manyhands_register_backends() -> BackendSpec:
    return BackendSpec(name="broken", summary="", factory="broken_backends:create", config=BrokenConfig)


@functools.cache
def register() -> None:
    """Let this process know the backend."""
    get_plugin_manager().register(sys.modules[__name__], "broken")


def create(bootstrap: Any) -> Any:
    return _Backend(bootstrap)


class _Backend(TcpBackend):
    def __init__(self, bootstrap: Any) -> None:
        super().__init__(bootstrap)
        self.fault = bootstrap.config.fault
        self.leaked: list[Any] = []
        self.later: list[Any] = []

    def open_transport(self, channel: int) -> Any:
        return _Transport(self, channel)

    def close(self) -> None:
        if self.fault == "close of a second time fails" and self.leaked:
            raise RuntimeError("closed already")
        self.leaked.append(None)
        if self.fault == "sockets are left behind":
            _left.extend(socket.socketpair())
        elif self.fault == "threads are left behind":
            threading.Thread(target=threading.Event().wait, args=(20,), daemon=True).start()
        elif self.fault == "memory is left behind":
            _left.append(bytearray(b"x") * (1 << 20))
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

    def flush(self) -> None:
        """Send what was said to be sent, in any channel."""
        while self.backend.later:
            plain, peer, header, payload = self.backend.later.pop(0)
            transfer = plain.send(peer, header, payload)
            while not transfer.done:
                plain.wait([transfer], Deadline(5.0))

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
        elif fault == "headers are not compared":
            header = bytes(len(header))
        elif fault == "sends end too early" and len(payload) > 3000:
            self.backend.later.append((super(), peer, bytes(header), payload))
            return _Done(len(payload))
        return super().send(peer, header, payload)

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Any:
        self.flush()
        if self.backend.fault == "empty messages are not waited for" and not payload:
            return _Done(0)
        if self.backend.fault == "headers are not compared":
            header = bytes(len(header))
        return super().recv(peer, header, payload)

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        if self.backend.fault == "deadlines are ignored":
            deadline = Deadline(3600.0)
        elif self.backend.fault == "waiting takes long":
            time.sleep(0.02)
        try:
            super().wait(transfers, deadline)
        except LinkLost:
            if self.backend.fault == "abort is ignored":
                threading.Event().wait(12)
            raise
