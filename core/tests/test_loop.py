"""The background loop: how it ends where something in it fails."""

from __future__ import annotations

import logging
import selectors
import socket
import threading

import pytest
from support.waiting import PATIENCE_S

from oneaccord.net.loop import Loop


@pytest.mark.parametrize("has_words", [True, False])
def test_a_callback_that_fails_is_told_to_this_process_and_to_the_other_sides(
    monkeypatch: pytest.MonkeyPatch, has_words: bool
) -> None:
    if not has_words:

        def no_memory(*_: object, **__: object) -> None:
            raise MemoryError

        for name in ("error", "exception"):
            monkeypatch.setattr(logging.getLogger("oneaccord.network"), name, no_memory)
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
    told: list[Exception] = []
    loop = Loop("test", told.append)
    here, there = socket.socketpair()
    there.settimeout(PATIENCE_S)
    failure = MemoryError()

    def fail() -> None:
        raise failure

    loop.call(lambda: loop.watch(here, selectors.EVENT_READ, lambda _: None))
    loop.call(fail)
    assert there.recv(1) == b""
    loop._thread.join(PATIENCE_S)
    assert told == [failure]
    loop.call(fail)  # nothing happens any more
    loop.stop()
    here.close()
    there.close()


def test_what_fails_outside_of_a_callback_is_told_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Exception] = []
    loop = Loop("test", told.append)
    here, there = socket.socketpair()
    there.settimeout(PATIENCE_S)
    watched = threading.Event()

    def watch() -> None:
        loop.watch(here, selectors.EVENT_READ, lambda _: None)
        monkeypatch.setattr(loop._selector, "select", lambda _: next(iter(())))
        watched.set()

    loop.call(watch)
    assert watched.wait(PATIENCE_S)
    assert there.recv(1) == b""
    loop._thread.join(PATIENCE_S)
    assert [type(error) for error in told] == [StopIteration]
    here.close()
    there.close()
