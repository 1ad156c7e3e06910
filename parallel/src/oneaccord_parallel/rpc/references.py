"""References to objects that another rank owns."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload

from oneaccord_parallel.rpc.replies import Reply

__all__ = ["Objects", "Ref", "Sweeper"]

T = TypeVar("T")


class _Home(Protocol):
    """The service of a reference."""

    def _get(self, ref: Ref, kind: Any, timeout_s: float | None) -> Any: ...

    def _call_method(
        self, ref: Ref, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Any, timeout_s: float | None
    ) -> Reply[Any]: ...


class Ref:
    """A reference to an object that lives on one rank, its owner. `Service.remote` returns it.

    The owner keeps the object until the last reference to it is gone, on whatever rank. A reference can be an argument of a call, and a
    function can return one. On the owner, the function gets the object itself; on other ranks, it gets a reference of its own.
    A reference inside a list or another object cannot travel.

    Attributes
    ----------
    owner
        The rank that has the object.
    """

    def __init__(self, service: _Home, sweeper: Sweeper, owner: int, number: int) -> None:
        self._service = service
        self._number = number
        self.owner: int = owner
        weakref.finalize(self, sweeper.drop, owner, number).atexit = False

    def __repr__(self) -> str:
        return f"<oneaccord_parallel.Ref {self._number} on rank {self.owner}>"

    @overload
    def get(self, *, type: type[T], timeout_s: float | None = None) -> T: ...
    @overload
    def get(self, *, type: Any = None, timeout_s: float | None = None) -> Any: ...
    def get(self, *, type: Any = None, timeout_s: float | None = None) -> Any:  # noqa: A002 - as in core
        """Return a copy of the object, which must be one that can travel; on its owner, the object itself.

        Parameters
        ----------
        type
            The type of the copy, as for `Service.call`.
        timeout_s
            Seconds that it may last.

        Raises
        ------
        UsageError
            The object cannot travel, or is of another type.
        OneAccordError
            As for `Service.call`.
        """
        return self._service._get(self, type, timeout_s)

    @overload
    def call(self, method: str, /, *args: Any, type: type[T], timeout_s: float | None = None, **kwargs: Any) -> Reply[T]: ...
    @overload
    def call(
        self, method: str, /, *args: Any, type: Any = None, timeout_s: float | None = None, **kwargs: Any
    ) -> Reply[Any]: ...
    def call(self, method: str, /, *args: Any, type: Any = None, timeout_s: float | None = None, **kwargs: Any) -> Reply[Any]:  # noqa: A002
        """Call a method of the object, on the rank of the object.

        Parameters
        ----------
        method
            Its name, which does not begin with an underscore.
        args, kwargs, type, timeout_s
            As for `Service.call`; errors are the same as well.
        """
        return self._service._call_method(self, method, args, kwargs, type, timeout_s)


class Objects:
    """The objects of a rank, and the number of references to each: `Ref` objects on any rank, and those on their way."""

    def __init__(self) -> None:
        self._objects: dict[int, list[Any]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._objects)

    def keep(self, value: object) -> int:
        """Keep an object for one reference; return its number."""
        self._next += 1
        self._objects[self._next] = [value, 1]
        return self._next

    def get(self, number: int) -> object:
        """Return an object; KeyError if it is not here."""
        return self._objects[number][0]

    def add(self, number: int) -> None:
        """Count one more reference; KeyError if it is not here."""
        self._objects[number][1] += 1

    def release(self, number: int, count: int) -> object:
        """Reduce the count by this number; return the object if that was the last reference, to be released without a lock."""
        entry = self._objects.get(number)
        if entry is not None:
            entry[1] -= count
            if entry[1] <= 0:
                del self._objects[number]
                return entry[0]
        return None

    def clear(self) -> list[Any]:
        """Forget all; return it, to be released without a lock."""
        objects, self._objects = self._objects, {}
        return [objects]


class Sweeper:
    """Informs owners which references are gone, in a thread of its own.

    A reference may die at any moment, in the middle of anything, so that its end does nothing but wake the thread.

    Parameters
    ----------
    release
        It is called with an owner, the number of an object, and how many references are gone.
    """

    def __init__(self, release: Callable[[int, int, int], None]) -> None:
        self._release = release
        self._dropped: deque[tuple[int, int]] = deque()
        self._news = threading.Lock()
        self._news.acquire()
        self._is_over = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, at the first reference; it is called under a lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._sweep, name="rpc-sweeper", daemon=True)
            self._thread.start()

    def drop(self, owner: int, number: int) -> None:
        """Take note that a reference is gone."""
        self._dropped.append((owner, number))
        self._wake()

    def stop(self) -> None:
        """End the thread."""
        self._is_over = True
        self._wake()
        if self._thread is not None:
            self._thread.join()

    def _wake(self) -> None:
        try:  # noqa: SIM105 - a context manager is made of more lines, between which a collection may begin
            self._news.release()
        except RuntimeError:  # it has been woken already
            pass

    def _sweep(self) -> None:
        while not self._is_over:
            self._news.acquire()
            gone: Counter[tuple[int, int]] = Counter()
            while self._dropped:
                gone[self._dropped.popleft()] += 1
            for (owner, number), count in gone.items():
                self._release(owner, number, count)
