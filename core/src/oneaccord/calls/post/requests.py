"""The handles of sends and receives with tags that a program waits for later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from oneaccord.calls.order.turns import Turns
from oneaccord.calls.post.account import Account
from oneaccord.calls.post.messages import Letter, Operation, Receive
from oneaccord.calls.post.status import Status
from oneaccord.calls.work import Work
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.runtime import Place
from oneaccord.errors import CommError, UsageError

__all__ = ["Cancelled", "Persistent", "Receiving", "Request", "Sent", "TaggedWork"]

T = TypeVar("T")


class Path(Protocol):
    """The path of a group's messages, as far as a request needs it.

    Attributes
    ----------
    turns, on_failure_seen
        As for `Work`.
    process
        The process of the group.
    office
        What moves its messages.
    """

    turns: Turns
    on_failure_seen: Callable[[], None]
    process: int

    @property
    def office(self) -> object:
        """As above."""

    def status_of(self, letter: Letter, status: Status | None = None) -> Status:
        """Return what is known of a message."""

    def cancel(self, receive: Receive) -> bool:
        """Take a receive back."""

    def poll(self, operations: Callable[[], Sequence[Operation]]) -> None:
        """Move what can be moved now."""

    def wait_for(self, operations: Sequence[Operation], deadline: Deadline | None) -> None:
        """Wait until some operations have ended, or until a deadline of the caller's."""

    def wait_at(self, place: Place, operations: Sequence[Operation]) -> None:
        """Wait at a place until one of several requests has ended."""

    def has_ended(self, request: Any) -> bool:
        """Return whether a request has ended, when no thread is about to end it."""

    def concluded(self, request: Any, error: BaseException | None, account: Account | None) -> None:
        """Take note that a request has ended."""

    def took(self, operations: Sequence[Operation]) -> None:
        """Note that the program has the messages of some receives."""


class TaggedWork(Work[T], Generic[T]):
    """The handle of a send or a receive with a tag. No thread waits for it before the program does.

    It is a `Work`, and may be given to all that takes one. Requests end in any order.

    Attributes
    ----------
    operations
        Its sends and receives.
    """

    __slots__ = ()

    _tells_waits = True

    _path: Path
    operations: tuple[Operation, ...]
    _account: Account | None = None

    # What is the same for all requests of a group, its path knows.

    @property
    def _turns(self) -> Turns:  # type: ignore[override]
        return self._path.turns

    @property
    def _on_failure_seen(self) -> Callable[[], None]:  # type: ignore[override]
        return self._path.on_failure_seen

    @property
    def _process(self) -> int:  # type: ignore[override]
        return self._path.process

    @property
    def _what(self) -> str:  # type: ignore[override]
        return " and ".join(str(each.what) for each in self.operations)

    @property
    def status(self) -> Status | None:
        """As for `Work`."""
        receive = self.operations[-1]
        return self._path.status_of(receive.letter) if self._ended and isinstance(receive, Receive) and receive.letter else None

    def cancel(self) -> bool:
        """As for `Work`."""
        receive = self.operations[-1]
        return len(self.operations) == 1 and isinstance(receive, Receive) and self._path.cancel(receive)

    def cancelled(self) -> bool:
        """As for `Work`."""
        return self._ended and isinstance(self._error, Cancelled)

    def done(self) -> bool:
        """Return whether the call has ended, successfully or not. Moves what can be moved now, and never blocks."""
        if not self._ended:
            self._check_process()
            self._path.poll(lambda: self.operations)
        return super().done()

    def exception(self) -> BaseException | None:
        """As for `Work`; also the error of a message that has come, and that the caller cannot have as it asked."""
        if self.done() and self._error is None:
            with suppress(Exception):  # which is its error from then on
                self._finish(None)
        return super().exception()

    @property
    def calls_back(self) -> bool:
        """Whether its end calls a function of the program."""
        return bool(self._callbacks)

    def end(self) -> None:
        """Take note that an operation has ended; under the lock of the office."""
        for each in self.operations:
            if not each.done:
                return
        for each in self.operations:
            if each.error is not None:
                self._error = each.error
                break
        if self._ended:
            return
        if self._error is None:
            self._path.took(self.operations)
        self._path.concluded(self, self._error, self._account)
        self._conclude()

    def _finish(self, deadline: Deadline | None) -> T:
        if not self._ended and not self._ends_by(deadline):
            raise self._late(deadline)
        if self._error is not None:
            if isinstance(self._error, CommError):
                self._on_failure_seen()
            raise self._error.with_traceback(self._trace)
        return self._made()

    def _made(self) -> T:
        """Return the result, once all has ended well."""
        raise NotImplementedError

    def _ends_by(self, deadline: Deadline | None) -> bool:
        self._check_process()
        self._path.wait_for(self.operations, deadline)
        return self._ended or self._path.has_ended(self)

    def _expect_end(self) -> None:
        """Let the office move it while this thread waits for several works."""
        self._path.poll(lambda: self.operations)

    def _wait_at(self, place: Place, works: Sequence[Work[Any]]) -> None:
        """As for `Work`; the store learns which messages the thread waits for, if it waits for nothing else."""
        office, pending = self._path.office, [each for each in works if not each._ended]
        requests = [each for each in pending if isinstance(each, TaggedWork) and each._path.office is office]
        if requests and len(requests) == len(pending):
            self._path.wait_at(place, [operation for each in requests for operation in each.operations])
        else:
            place.wait(None)


class Request(TaggedWork[T], Generic[T]):
    """Such a handle that Python makes.

    Parameters
    ----------
    path
        The path of its group.
    operations
        As above.
    make
        Returns the result, once they have ended well.
    """

    # Most requests leave these as they are: what each has of its own is made when it is needed.
    _ended: bool = False
    _error: BaseException | None = None
    _make: Callable[[], T] | None = None
    _trace: TracebackType | None = None
    _takes_stock: bool = False
    _places: Sequence[Place] = ()
    _callbacks: Sequence[Any] = ()
    _result: T = None  # type: ignore[assignment]

    def __init__(self, path: Path, operations: tuple[Operation, ...], make: Callable[[], T]) -> None:
        self._lock = Lock()
        self._path = path
        self.operations = operations
        self._make = make

    def begin(self, account: Account | None) -> None:
        """Take note of the operations that have ended at once; under the lock of the office. Those of the ``account`` learn of its end."""
        self._account = account
        for each in self.operations:
            each.request = self
        self.end()

    def _made(self) -> T:
        make = self._make
        if make is not None:
            try:
                self._result, self._make = make(), None
            except BaseException as error:
                self._error, self._trace = error, error.__traceback__
                raise
        return self._result


class Receiving(TaggedWork[Any]):
    """A receive of one array into new memory or a plain NumPy array: what Python does of the handles that C makes, and that have all attributes.

    Its operation is one that C makes when it is first asked for.
    """

    __slots__ = ()

    def _made(self) -> Any:
        receive = self.operations[0]
        assert isinstance(receive, Receive)
        return receive.array


class Sent(TaggedWork[None]):
    """A send that ended when it began: what Python does of the handles that C makes, which have ``_path`` and ``_what``."""

    __slots__ = ()

    _ended = True
    _error = None
    _takes_stock = False
    _lock = Lock()
    operations: tuple[Operation, ...] = ()

    @property
    def status(self) -> None:
        """As for `Work`."""

    def cancel(self) -> bool:
        """As for `Work`."""
        return False

    def remove_done_callback(self, callback: Callable[[Work[None]], object]) -> int:
        """As for `Work`; none waits here."""
        return 0

    def _finish(self, deadline: Deadline | None) -> None:
        pass


class Cancelled(UsageError):
    """A receive was taken back."""


class Persistent(Generic[T]):
    """A send or a receive that is made again and again: see `Group.persistent_send` and `Group.persistent_recv`.

    Parameters
    ----------
    begin
        Begins it.
    """

    __slots__ = ("_begin", "_work")

    def __init__(self, begin: Callable[[], Work[T]]) -> None:
        self._begin = begin
        self._work: Work[T] | None = None

    def start(self) -> Work[T]:
        """Begin it once more, and return the handle of this time.

        Raises
        ------
        UsageError
            The time before has not ended: wait for it first.
        """
        if self._work is not None and not self._work.done():
            raise UsageError(f"{self._work!r} was started and has not ended: wait() for it before you start it again")
        self._work = work = self._begin()
        return work
