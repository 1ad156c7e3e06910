"""Keys and values that the ranks of a job share: the queries, and the table that one rank keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import msgspec

from oneaccord.common.checks import UNREADABLE

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
"""The largest value. The table is in the memory of one rank. It is for notes about the work, not for its data."""
MAX_FRAME_BYTES = 2 * MAX_VALUE_BYTES + 65536


class Set(msgspec.Struct, frozen=True, tag=True):
    """Keep a value."""

    key: str
    value: bytes


class Append(msgspec.Struct, frozen=True, tag=True):
    """Append bytes to a value."""

    key: str
    value: bytes


class Get(msgspec.Struct, frozen=True, tag=True):
    """Answer when all keys are there, with the value of the first, or with nothing."""

    keys: list[str]
    wants_value: bool


class Check(msgspec.Struct, frozen=True, tag=True):
    """Return whether all keys are there."""

    keys: list[str]


class Add(msgspec.Struct, frozen=True, tag=True):
    """Add to a counter, which begins at 0, and return its new value."""

    key: str
    amount: int


class CompareSet(msgspec.Struct, frozen=True, tag=True):
    """Keep a value if the present one is as expected; a missing value counts as empty. Return the value that is there then."""

    key: str
    expected: bytes
    value: bytes


class Delete(msgspec.Struct, frozen=True, tag=True):
    """Delete a value; return whether there was one."""

    key: str


class Count(msgspec.Struct, frozen=True, tag=True):
    """Return how many values are kept."""


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Cancel the query of this number."""


Action = Set | Append | Get | Check | Add | CompareSet | Delete | Count | Forget


class Query(msgspec.Struct, frozen=True):
    """A query of a rank; its answer bears the same number."""

    number: int
    action: Action


class Answer(msgspec.Struct, frozen=True):
    """An answer; ``flaw`` says why there is none."""

    number: int
    value: bytes | int | bool | None = None
    flaw: str = ""


_QUERY, _ANSWER = msgspec.msgpack.Decoder(Query), msgspec.msgpack.Decoder(Answer)


def decode_query(frame: bytes | None) -> Query | None:
    """Return the query in a frame; None if the frame cannot be read."""
    try:
        return None if frame is None else _QUERY.decode(frame)
    except UNREADABLE:
        return None


def decode_answer(frame: bytes | None) -> Answer | None:
    """Return the answer in a frame; None if the frame cannot be read."""
    try:
        return None if frame is None else _ANSWER.decode(frame)
    except UNREADABLE:
        return None


class Table:
    """Keys and values. Any thread may ask. No query blocks: the answer may come later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._waiting: dict[tuple[Hashable, int], tuple[Get, Callable[[Answer], None]]] = {}

    def ask(self, whose: Hashable, query: Query, answer: Callable[[Answer], None]) -> None:
        """Take a query.

        Parameters
        ----------
        whose
            The client.
        query
            The query; its number is new among those of the same client.
        answer
            Called once with the answer, now or later, in any thread; it must not block. Not called for a query that is cancelled.
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
        """Drop the queries of a client that has gone."""
        with self._lock:
            for place in [place for place in self._waiting if place[0] == whose]:
                del self._waiting[place]

    def _has(self, action: Get | Check) -> bool:
        return all(key in self._values for key in action.keys)

    def _served(self, key: str) -> list[tuple[Callable[[Answer], None], Answer]]:
        """Return the answers to the queries for which this key was the last one missing."""
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
