"""Which message meets which receive: MPI's rules.

A message meets the receive that was posted first of those that it fits. A receive meets the message that came first of those that fit. So
messages of one rank to one other in one group never overtake each other, if both fit the same receive. Each step takes the same time
however many receives and messages wait: a message can only meet receives of four kinds (this rank and tag, any rank, any tag, or both), and
each kind has a queue of its own, in which each receive is found by its number.

C keeps the receives that it has posted to itself, and lets messages meet them, as long as nothing is unusual. They were posted after all that
wait here. Before this is looked through, or gets another receive, it takes over all of them, in order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from oneaccord.calls.post.envelopes import NO_RANK, NO_TAG
from oneaccord.calls.post.messages import Letter, Receive

__all__ = ["Matching"]

_Key = tuple[int, int, int]
"""The group, the rank of the world, and the tag."""


class Matching:
    """Receives that wait for messages, and messages that wait for receives, of all groups of a rank.

    Attributes
    ----------
    numbers
        The places of receives and messages among those that wait.
    wild
        How many receives take messages of any rank or tag.
    take_over
        Moves the receives here that C keeps.
    """

    def __init__(self) -> None:
        self._receives: dict[_Key, OrderedDict[int, Receive]] = {}
        self._letters: dict[_Key, OrderedDict[int, Letter]] = {}
        self.numbers: Iterator[int] = count(1)
        self.wild: int = 0
        self.take_over: Callable[[], object] = _nothing

    def __len__(self) -> int:
        """Return the number of receives that wait."""
        self.take_over()
        return sum(map(len, self._receives.values()))

    @property
    def waiting(self) -> tuple[dict[_Key, Any], dict[_Key, Any]]:
        """The receives and the messages that wait, by all that they fit; these dictionaries stay the same."""
        return self._receives, self._letters

    def post(self, receive: Receive) -> None:
        """Let a receive wait for its message."""
        self.take_over()
        receive.number = next(self.numbers)
        if receive.key[1] == NO_RANK or receive.key[2] == NO_TAG:
            self.wild += 1
        waiting = self._receives.get(receive.key)
        if waiting is None:
            waiting = self._receives[receive.key] = OrderedDict()
        waiting[receive.number] = receive

    def withdraw(self, receive: Receive) -> bool:
        """Let a receive wait no longer; return whether it did."""
        self.take_over()
        waiting = self._receives.get(receive.key)
        if waiting is None or waiting.get(receive.number) is not receive:
            return False
        del waiting[receive.number]
        if not waiting:
            del self._receives[receive.key]
        if receive.key[1] == NO_RANK or receive.key[2] == NO_TAG:
            self.wild -= 1
        return True

    def receive_for(self, context: int, source: int, tag: int) -> Receive | None:
        """Return the receive that a message meets, which waits no longer; None if there is none."""
        self.take_over()
        if not self._receives:
            return None
        first: Receive | None = None
        for key in _keys(context, source, tag):
            waiting = self._receives.get(key)
            if waiting:
                receive = next(iter(waiting.values()))
                if first is None or receive.number < first.number:
                    first = receive
        if first is not None:
            self.withdraw(first)
        return first

    def add(self, letter: Letter) -> None:
        """Let a message wait for its receive."""
        letter.place = next(self.numbers)
        for key in _keys(letter.context, letter.source, letter.tag):
            self._letters.setdefault(key, OrderedDict())[letter.place] = letter

    def letter_for(self, key: _Key) -> Letter | None:
        """Return the message that a receive meets, which still waits; None if there is none."""
        waiting = self._letters.get(key)
        return next(iter(waiting.values())) if waiting else None

    def letters_for(self, key: _Key) -> list[Letter]:
        """Return, for each rank from which one has come, the message that a receive could meet."""
        found: dict[int, Letter] = {}
        for letter in self._letters.get(key, {}).values():
            found.setdefault(letter.source, letter)
        return list(found.values())

    def remove(self, letter: Letter) -> None:
        """Let a message wait no longer."""
        for key in _keys(letter.context, letter.source, letter.tag):
            waiting = self._letters[key]
            del waiting[letter.place]
            if not waiting:
                del self._letters[key]

    def letters(self, context: int | None = None) -> Iterator[Letter]:
        """Yield the messages that wait, of one group or of all."""
        for (where, source, tag), waiting in list(self._letters.items()):
            if source == NO_RANK and tag == NO_TAG and context in (None, where):
                yield from list(waiting.values())


def _keys(context: int, source: int, tag: int) -> tuple[_Key, _Key, _Key, _Key]:
    return (context, source, tag), (context, NO_RANK, tag), (context, source, NO_TAG), (context, NO_RANK, NO_TAG)


def _nothing() -> None:
    pass
