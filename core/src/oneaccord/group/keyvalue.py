"""A key-value store of a group, as bridges to other libraries need it: one rank keeps the values, and only ranks reach it."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from oneaccord.calls.failures import exchange_cards, guarded
from oneaccord.contract.cards import write_card
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.header import CallSignature
from oneaccord.control.keyvalue import (
    MAX_FRAME_BYTES,
    MAX_VALUE_BYTES,
    Action,
    Add,
    Answer,
    Append,
    Check,
    CompareSet,
    Count,
    Delete,
    Forget,
    Get,
    Query,
    Set,
    Table,
    decode_answer,
    decode_query,
)
from oneaccord.control.protocol import Report
from oneaccord.errors import DeadlineError, OneAccordError, UnsupportedError, UsageError
from oneaccord.group.group import Group
from oneaccord.job.job import Job
from oneaccord.net.frames import FrameConnection

__all__ = ["KeyValueStore"]

_encode = msgspec.msgpack.encode


class KeyValueStore:
    """Keys and values that the ranks of a group share, for bridges to libraries that need such a store. Every rank of the group must make it.

    The group's rank 0 keeps the values. The other ranks reach it by a connection that proves the job's secret, bears seals, and is encrypted with
    ``security.tls``. So no other process reads or writes a value. Any thread may call the methods. They take no part in the group's calls,
    and end with the job.

    Parameters
    ----------
    group
        The ranks; more than one of them must be processes.
    timeout_s
        Seconds that making it may last; by default the config's ``timeout_s``.

    Raises
    ------
    UnsupportedError
        The ranks are threads of one process, which need no such store. The group stays as it was.
    ClosedError
        The group is closed.
    CommError
        The group's first failure, the same on every rank, such as a rank that does not come.
    """

    def __init__(self, group: Group, *, timeout_s: float | None = None) -> None:
        group._check_open("KeyValueStore")
        self._group, self._job = group, group._job
        if group.world_size > 1 and self._job.meeting is None:
            raise UnsupportedError(
                "a KeyValueStore needs ranks that are processes, but these are threads: let them share a dict"
            )
        self._root: int = group.ranks[0]
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._flaw = ""
        self._table = Table()
        self._connections: set[FrameConnection] = set()
        self._connection: FrameConnection | None = None
        stores = self._job.part(_Stores)
        if group.world_size > 1:
            deadline = group._begin(timeout_s)
            self._meet(f"key-value store #{stores.next(group)} of {group._members.name}", deadline)
        stores.add(self)
        self._job.control.on_failure(self._wake)

    def _meet(self, name: str, deadline: Deadline) -> None:
        job, members = self._job, self._group._members
        whom = f"rank {self._root} ({name})"
        address = job.listen(job.control.host, self._take, whom) if members.rank == 0 else None
        cards, _ = exchange_cards(job, members, name, write_card(address), members.ranks, deadline)
        where = job.read_cards(cards, tuple[str, int] | None, name, members.ranks)[0]  # type: ignore[arg-type]
        if address is not None:
            return
        if where is None:
            raise job.fail(Report("protocol", f"rank {self._root} sent no address for the {name}", self._root))

        def dial() -> None:
            sock = job.dial(self._root, where, b"key-value", deadline, whom, members.ranks[0])
            self._connection = job.frames(sock, self._answered, self._lost, MAX_FRAME_BYTES)

        guarded(job, members, 0, CallSignature("key-value store"), deadline, dial, name)

    def set(self, key: str, value: bytes, *, timeout_s: float | None = None) -> None:
        """Keep a value.

        Parameters
        ----------
        key, value
            The value, of at most 16 MiB, and its name.
        timeout_s
            Seconds that the call may last; by default the config's ``timeout_s``.

        Raises
        ------
        UsageError
            The value is too large. Nothing has changed.
        DeadlineError
            There was no answer in time. Whether the call has an effect is open; the group stays usable.
        ClosedError, CommError
            The group is closed, or has failed.
        """
        self._ask(Set(key, self._checked(key, value)), timeout_s)

    def append(self, key: str, value: bytes, *, timeout_s: float | None = None) -> None:
        """Put bytes behind a value, which begins empty.

        Parameters
        ----------
        key, value
            The name of the value, and the bytes.
        timeout_s
            Seconds that the call may last; by default the config's ``timeout_s``.

        Raises
        ------
        UsageError
            The value would be longer than 16 MiB. Nothing has changed.
        DeadlineError
            There was no answer in time. Whether the call has an effect is open; the group stays usable.
        ClosedError, CommError
            The group is closed, or has failed.
        """
        self._ask(Append(key, self._checked(key, value)), timeout_s)

    def get(self, key: str, *, timeout_s: float | None = None) -> bytes:
        """Wait until a key is there, and return its value.

        Parameters
        ----------
        key
            The name of the value.
        timeout_s
            Seconds that the call may last; by default the config's ``timeout_s``.

        Returns
        -------
        bytes
            The value.

        Raises
        ------
        DeadlineError
            It did not come in time; the message names the key. The group stays usable.
        ClosedError, CommError
            The group is closed, or has failed.
        """
        value: bytes = self._ask(Get([key], True), timeout_s)
        return value

    def wait(self, keys: Sequence[str], *, timeout_s: float | None = None) -> None:
        """Wait until all of some keys are there.

        Parameters
        ----------
        keys
            The keys.
        timeout_s
            The most seconds to wait; by default the config's ``timeout_s``.

        Raises
        ------
        DeadlineError
            Not all of them came in time; the message names them. The group stays usable.
        ClosedError, CommError
            The group is closed, or has failed.
        """
        self._ask(Get(list(keys), False), timeout_s)

    def check(self, keys: Sequence[str], *, timeout_s: float | None = None) -> bool:
        """Return whether all of some keys are there.

        Parameters
        ----------
        keys
            The keys.
        timeout_s
            Seconds that the call may last; by default the config's ``timeout_s``.

        Returns
        -------
        bool
            Whether they are.

        Raises
        ------
        DeadlineError
            There was no answer in time. The group stays usable.
        ClosedError, CommError
            The group is closed, or has failed.
        """
        return bool(self._ask(Check(list(keys)), timeout_s))

    def add(self, key: str, amount: int, *, timeout_s: float | None = None) -> int:
        """Add to a counter, and return it.

        Parameters
        ----------
        key, amount
            The name of the counter, which counts as 0 if it is not there, and the number to add.
        timeout_s
            Seconds that the call may last; by default the config's ``timeout_s``.

        Returns
        -------
        int
            The new value.

        Raises
        ------
        UsageError
            The key has a value that is no number. It stays as it was.
        DeadlineError
            There was no answer in time. Whether the call has an effect is open; the group stays usable.
        ClosedError, CommError
            The group is closed, or has failed.
        """
        return int(self._ask(Add(key, amount), timeout_s))

    def compare_set(self, key: str, expected: bytes, value: bytes, *, timeout_s: float | None = None) -> bytes:
        """Keep a value if the present one is ``expected``; no value counts as empty.

        Parameters
        ----------
        key, expected, value
            The name of the value, its value before, and its value after.
        timeout_s
            Seconds that the call may last; by default the config's ``timeout_s``.

        Returns
        -------
        bytes
            The value that is there then; ``expected`` if there is none.

        Raises
        ------
        UsageError
            The value is too large. Nothing has changed.
        DeadlineError
            There was no answer in time. Whether the call has an effect is open; the group stays usable.
        ClosedError, CommError
            The group is closed, or has failed.
        """
        given: bytes = self._ask(CompareSet(key, self._checked(key, expected), self._checked(key, value)), timeout_s)
        return given

    def delete(self, key: str, *, timeout_s: float | None = None) -> bool:
        """Forget a value.

        Parameters
        ----------
        key
            The name of the value.
        timeout_s
            Seconds that the call may last; by default the config's ``timeout_s``.

        Returns
        -------
        bool
            Whether there was one.

        Raises
        ------
        DeadlineError
            There was no answer in time. Whether the call has an effect is open; the group stays usable.
        ClosedError, CommError
            The group is closed, or has failed.
        """
        return bool(self._ask(Delete(key), timeout_s))

    def count(self, *, timeout_s: float | None = None) -> int:
        """Return how many values are kept.

        Parameters
        ----------
        timeout_s
            Seconds that the call may last; by default the config's ``timeout_s``.

        Returns
        -------
        int
            Their number.

        Raises
        ------
        DeadlineError
            There was no answer in time. The group stays usable.
        ClosedError, CommError
            The group is closed, or has failed.
        """
        return int(self._ask(Count(), timeout_s))

    # A query, from its beginning

    def _checked(self, key: str, value: bytes) -> bytes:
        if len(value) > MAX_VALUE_BYTES:
            raise UsageError(
                f"the value of {key!r} has {len(value)} bytes, but a key-value store takes at most {MAX_VALUE_BYTES}: send it with a call of the group"
            )
        return bytes(value)

    def _ask(self, action: Action, timeout_s: float | None) -> Any:
        deadline = self._group._begin(timeout_s)
        pending = _Pending()
        with self._lock:
            number = next(self._numbers)
            self._pending[number] = pending
        try:
            self._raise_if_over()
            query = Query(number, action)
            if len(frame := _encode(query)) > MAX_FRAME_BYTES:
                raise UsageError(
                    f"a query of the key-value store has {len(frame)} bytes, but at most {MAX_FRAME_BYTES} are allowed: use fewer or shorter keys"
                )
            self._send(query)
            pending.ended.wait(deadline.remaining())
            if pending.answer is None:
                self._raise_if_over()
                raise DeadlineError(self._overdue(action, deadline.timeout_s), rank=self._job.rank, peer=self._root)
        finally:
            with self._lock:
                del self._pending[number]
            if pending.answer is None and isinstance(action, Get):
                self._send(Query(number, Forget()))
        if pending.answer.flaw:
            raise UsageError(pending.answer.flaw, rank=self._job.rank)
        return pending.answer.value

    def _send(self, query: Query) -> None:
        if self._connection is not None:
            self._connection.send(_encode(query))
        elif self._group.rank == 0:
            self._table.ask(self, query, self._take_answer)

    def _raise_if_over(self) -> None:
        self._group._check_open("a query of the key-value store")
        if self._flaw:
            self._group._saw()
            raise self._lost_error()

    def _lost_error(self) -> OneAccordError:
        text = f"rank {self._job.rank} has lost the key-value store of rank {self._root}: {self._flaw}"
        return self._job.fail(Report("lost", text, self._root))

    def _overdue(self, action: Action, seconds: float) -> str:
        if isinstance(action, Get):
            return f"no rank set {', '.join(map(repr, action.keys))} in the key-value store within {seconds:g} s"
        return f"rank {self._root}, which keeps the key-value store, did not answer within {seconds:g} s"

    # Answers, in the loop's thread or in the thread that sets a value

    def _take_answer(self, answer: Answer) -> None:
        with self._lock:
            pending = self._pending.get(answer.number)
        if pending is not None:
            pending.answer = answer
            pending.ended.set()

    def _answered(self, frame: bytes | None) -> None:
        answer = decode_answer(frame)
        if answer is None:
            connection = self._connection
            self._lost((connection.flaw if connection is not None else "") or "its answer cannot be read")
        else:
            self._take_answer(answer)

    def _lost(self, reason: str) -> None:
        self._flaw = self._flaw or reason
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            for pending in self._pending.values():
                pending.ended.set()

    # The store of the values

    def _take(self, sock: socket.socket, _: bytes) -> None:
        connection: FrameConnection

        def asked(frame: bytes | None) -> None:
            query = decode_query(frame)
            if query is None:
                gone("")
                connection.close()
            else:
                self._table.ask(connection, query, lambda answer: connection.send(_encode(answer)))

        def gone(_: str) -> None:
            self._table.forget(connection)
            self._connections.discard(connection)

        connection = self._job.frames(sock, asked, gone, MAX_FRAME_BYTES)
        self._connections.add(connection)

    def _end(self) -> None:
        for connection in (*self._connections, self._connection):
            if connection is not None:
                connection.close()
        self._flaw = self._flaw or "this rank has given up its part of the job"
        self._wake()


class _Pending:
    """A query that has no answer yet."""

    __slots__ = ("answer", "ended")

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.ended = threading.Event()


class _Stores:
    """The key-value stores of a job."""

    def __init__(self, job: Job) -> None:
        self._counts: dict[int, int] = {}
        self._stores: list[KeyValueStore] = []

    def next(self, group: Group) -> int:
        """Return how many stores of a group this is, alike on all its ranks."""
        number = group._members.number
        self._counts[number] = count = self._counts.get(number, 0) + 1
        return count

    def add(self, store: KeyValueStore) -> None:
        """End a store with the job."""
        self._stores.append(store)

    def close(self) -> Sequence[object]:
        """End them."""
        for store in self._stores:
            store._end()
        return ()
