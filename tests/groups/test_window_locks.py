"""Locks of windows: who gets one, and in what order."""

from __future__ import annotations

import pytest

from oneaccord.calls.windows.bakery import Bakery
from oneaccord.calls.windows.locks import LockQueue


def test_lock_goes_to_those_who_asked_first() -> None:
    queue = LockQueue()
    assert queue.ask(0, 1, exclusive=False) == [(0, 1)]
    assert queue.ask(1, 2, exclusive=True) == []
    assert queue.ask(2, 3, exclusive=False) == []  # it does not overtake the one that waits
    assert queue.ask(3, 4, exclusive=False) == []
    assert queue.give_back(0) == [(1, 2)]
    assert queue.give_back(1) == [(2, 3), (3, 4)]
    assert queue.ask(0, 5, exclusive=True) == []
    assert queue.give_back(3) == []
    assert queue.give_back(2) == [(0, 5)]


def test_bakery_excludes_and_keeps_the_order() -> None:
    words = memoryview(bytearray(Bakery.nbytes(3))).cast("Q")
    ranks = [Bakery(words, 3, place) for place in range(3)]

    class Waits(Exception):
        pass

    def waits(tries: int, owner: int) -> None:
        raise Waits(owner)

    ranks[0].take(1, waits, exclusive=False)
    ranks[2].take(1, waits, exclusive=False)
    ranks[1].take(0, waits)  # another place
    with pytest.raises(Waits, match="0"):
        ranks[1].take(1, waits)
    ranks[0].give_back(1)
    with pytest.raises(Waits, match="2"):
        ranks[1].take(1, waits)
    ranks[0].take(1, waits, exclusive=False)  # the one that gave up holds up nobody
    ranks[0].give_back(1)
    ranks[2].give_back(1)
    ranks[1].take(1, waits)
    for other in (0, 2):
        with pytest.raises(Waits, match="1"):
            ranks[other].take(1, waits, exclusive=False)
    ranks[1].give_back(1)
    ranks[1].give_back(0)
    assert not any(words)
