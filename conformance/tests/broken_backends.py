"""A backend that sends its messages over TCP, with one fault that its config names: those that take processes, or memory of megabytes."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.api import BackendSpec, Deadline, LinkLost, Transfer, hookimpl
from manyhands.config.plugins import get_plugin_manager
from manyhands_tcp.backend import TcpBackend, TcpTransport
from manyhands_tcp.plugin import TcpConfig

__all__ = ["BrokenConfig", "create", "manyhands_register_backends", "register"]


@dataclass(frozen=True)
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

    def open_transport(self, channel: int) -> Any:
        return _Transport(self, channel)

    def close(self) -> None:
        if self.fault == "memory is left behind" and self.rank == 0:  # one MiB of each world
            _left.append(bytearray(b"x") * (1 << 20))
        super().close()


_left: list[Any] = []


class _Transport(TcpTransport):
    """Without mailboxes and streams, so that each message is one `send` and one `recv`."""

    streams = False

    def __init__(self, backend: _Backend, channel: int) -> None:
        super().__init__(backend, channel)
        self.backend = backend

    def mailbox(self, peer: int) -> Any:
        return None

    @contextlib.contextmanager
    def _late(self) -> Iterator[None]:
        """Where a link breaks, say so late."""
        try:
            yield
        except LinkLost:
            if self.backend.fault == "abort is ignored":
                threading.Event().wait(7)
            raise

    def send(self, peer: int, header: bytes, payload: memoryview) -> Any:
        if self.backend.fault == "the last byte is lost" and len(payload) > 3000:
            payload = memoryview(bytes(payload[:-1]) + b"\0")
        with self._late():
            return super().send(peer, header, payload)

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Any:
        with self._late():
            return super().recv(peer, header, payload)

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        with self._late():
            super().wait(transfers, deadline)
