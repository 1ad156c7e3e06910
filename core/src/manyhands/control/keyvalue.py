"""Keys and values that the ranks of a job share: what they ask, and the table that one of them keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import msgspec

from manyhands.common.checks import UNREADABLE

__all__ = [
    "MAX_FRAME_BYTES",
    "MAX_VALUE_BYTES",
    "Action",
    "Add",
    "Answer",
    "Append",
    "Check",
    "CompareSet",
    "Count",
    "Delete",
    "Forget",
    "Get",
    "Query",
    "Set",
    "Table",
    "decode_answer",
    "decode_query",
]

MAX_VALUE_BYTES = 1 << 24
"""The largest value. The table is in the memory of one rank, and is for what ranks tell each other about their work, not for the work."""
MAX_FRAME_BYTES = 2 * MAX_VALUE_BYTES + 65536


class Set(msgspec.Struct, frozen=True, tag=True):
    """Keep a value."""

    key: str
    value: bytes


class Append(msgspec.Struct, frozen=True, tag=True):
    """Put bytes behind a value."""

    key: str
    value: bytes


class Get(msgspec.Struct, frozen=True, tag=True):
    """Answer when all of the keys are there: with the value of the first, or with nothing."""

    keys: list[str]
    wants_value: bool


class Check(msgspec.Struct, frozen=True, tag=True):
    """Tell whether all of the keys are there."""

    keys: list[str]


class Add(msgspec.Struct, frozen=True, tag=True):
    """Add to a counter, which begins with 0, and tell what it is then."""

    key: str
    amount: int


class CompareSet(msgspec.Struct, frozen=True, tag=True):
    """Keep a value if the one that is there is as expected, where nothing counts as empty; tell the one that is there then."""

    key: str
    expected: bytes
    value: bytes


class Delete(msgspec.Struct, frozen=True, tag=True):
    """Forget a value; tell whether there was one."""

    key: str


class Count(msgspec.Struct, frozen=True, tag=True):
    """Tell how many values are kept."""


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for the answer to the query of this number any more."""


Action = Set | Append | Get | Check | Add | CompareSet | Delete | Count | Forget


class Query(msgspec.Struct, frozen=True):
    """What a rank wants, and the number that its answer bears."""

    number: int
    action: Action


class Answer(msgspec.Struct, frozen=True):
    """An answer; ``flaw`` says in words why there is none."""

    number: int
    value: bytes | int | bool | None = None
    flaw: str = ""


_QUERY, _ANSWER = msgspec.msgpack.Decoder(Query), msgspec.msgpack.Decoder(Answer)


def decode_query(frame: bytes | None) -> Query | None:
    """Return what a frame asks; None for one that cannot be read."""
    try:
        return None if frame is None else _QUERY.decode(frame)
    except UNREADABLE:
        return None


def decode_answer(frame: bytes | None) -> Answer | None:
    """Return what a frame answers; None for one that cannot be read."""
    try:
        return None if frame is None else _ANSWER.decode(frame)
    except UNREADABLE:
        return None


class Table:
    """Keys and values; any thread may ask, and no query blocks: the answer to one that waits comes later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._waiting: dict[tuple[Hashable, int], tuple[Get, Callable[[Answer], None]]] = {}

    def ask(self, whose: Hashable, query: Query, answer: Callable[[Answer], None]) -> None:
        """Take a query.

        Parameters
        ----------
        whose
            Who asks.
        query
            The query; its number is new among those of the same asker.
        answer
            Called once with the answer, now or later, in any thread; it must not block. Not called for a query that is forgotten.
        """
        answers: list[tuple[Callable[[Answer], None], Answer]] = []
        with self._lock:
            action = query.action
            if isinstance(action, Forget):
                self._waiting.pop((whose, query.number), None)
            elif isinstance(action, Get):
                if self._has(action):
                    answers.append((answer, self._answer(query.number, action)))
                else:
                    self._waiting[whose, query.number] = action, answer
            else:
                answers.append((answer, self._do(query.number, action)))
                if not isinstance(action, Check | Count | Delete):
                    answers += self._served(action.key)
        for tell, words in answers:
            tell(words)

    def forget(self, whose: Hashable) -> None:
        """Give no more answers to somebody who has gone."""
        with self._lock:
            for place in [place for place in self._waiting if place[0] == whose]:
                del self._waiting[place]

    def _has(self, action: Get | Check) -> bool:
        return all(key in self._values for key in action.keys)

    def _served(self, key: str) -> list[tuple[Callable[[Answer], None], Answer]]:
        """Return the answers to the queries that have waited for a key last."""
        places = [place for place, (action, _) in self._waiting.items() if key in action.keys and self._has(action)]
        served = [(place[1], *self._waiting.pop(place)) for place in places]
        return [(answer, self._answer(number, action)) for number, action, answer in served]

    def _answer(self, number: int, action: Get) -> Answer:
        return Answer(number, self._values[action.keys[0]] if action.wants_value else None)

    def _do(self, number: int, action: Set | Append | Check | Add | CompareSet | Delete | Count) -> Answer:
        values = self._values
        match action:
            case Set(key, value):
                values[key] = value
                return Answer(number)
            case Append(key, value):
                whole = values.get(key, b"") + value
                if len(whole) > MAX_VALUE_BYTES:
                    return Answer(number, flaw=f"the value of {key!r} would be longer than {MAX_VALUE_BYTES} bytes")
                values[key] = whole
                return Answer(number)
            case Check():
                return Answer(number, self._has(action))
            case Add(key, amount):
                try:
                    total = int(values.get(key, b"0")) + amount
                except ValueError:
                    return Answer(number, flaw=f"the value of {key!r} is no number, so that nothing can be added to it")
                values[key] = b"%d" % total
                return Answer(number, total)
            case CompareSet(key, expected, value):
                if values.get(key, b"") == expected:
                    values[key] = value
                return Answer(number, values.get(key, expected))
            case Delete(key):
                return Answer(number, values.pop(key, None) is not None)
            case Count():
                return Answer(number, len(values))
