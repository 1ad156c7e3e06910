"""Sockets that listen at a name or an address of this host."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from support.waiting import PATIENCE_S

from oneaccord.contract.deadline import Deadline
from oneaccord.errors import DeadlineError, RendezvousError
from oneaccord.net.network import bind


def test_a_port_in_use_and_a_foreign_address_are_told() -> None:
    with bind("127.0.0.1", 0) as first, pytest.raises(RendezvousError, match="in use"):
        bind("127.0.0.1", first.getsockname()[1])
    with pytest.raises(RendezvousError, match="no such address"):
        bind("198.51.100.7", 0)


def test_a_name_that_does_not_resolve_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # a real resolver may take as long as it likes
    with pytest.raises(
        DeadlineError, match=r"'no-such-host\.invalid' did not resolve within 0\.3 s \(Name or service not known\)"
    ):
        bind("no-such-host.invalid", 0, Deadline(0.3))


def test_bind_to_a_name_known_later_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    real = socket.getaddrinfo

    def known_later(*words: Any, **more: Any) -> Any:
        if not more["flags"] & socket.AI_NUMERICHOST:
            asked.append(words)
            if len(asked) < 3:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(*words, **more)

    monkeypatch.setattr(socket, "getaddrinfo", known_later)
    with bind("localhost", 0, Deadline(PATIENCE_S)) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
    assert len(asked) == 3
