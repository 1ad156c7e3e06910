"""Work: the handle of a call that is still running."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from manyhands.deadline import Deadline
from manyhands.errors import ClosedError, DeadlineError, UsageError
from manyhands.lanes import Lane
from manyhands.runtime import Place

if TYPE_CHECKING:
    import asyncio

__all__ = ["Work"]

T = TypeVar("T")

_log = logging.getLogger("manyhands")


class Work(Generic[T]):
    """The handle of a call that runs in the background; what ``Group.*_async`` return.

    Until the work is done, the arrays given to the call must not be written to, and ``out=`` not be touched. A handle may be
    dropped: the call goes on all the same, keeps its arrays alive, and a failure of it is raised by every later call on the
    group.

    Collectives of one group run, and are done, in the order in which they were issued; sends to one rank, and receives from one
    rank, likewise.
    """

    __slots__ = (
        "_callbacks",
        "_ended",
        "_error",
        "_lane",
        "_lock",
        "_on_failure_seen",
        "_places",
        "_process",
        "_result",
        "_trace",
        "_wakers",
        "_what",
    )

    def __init__(self, what: str, lane: Lane, on_failure_seen: Callable[[], None] | None = None) -> None:
        self._what = what
        self._on_failure_seen = on_failure_seen
        self._lane = lane
        self._lock = threading.Lock()
        self._ended = False
        self._process = os.getpid()
        self._places: list[Place] = []
        self._wakers: list[Callable[[], object]] = []
        self._trace: TracebackType | None = None
        self._callbacks: list[Callable[[Work[T]], object]] = []
        self._result: T
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        state = "running" if not self._ended else "done" if self._error is None else f"failed: {type(self._error).__name__}"
        return f"<manyhands.Work {self._what}, {state}>"

    def wait(self, timeout_s: float | None = None) -> T:
        """Wait until the call is done, and return its result.

        Parameters
        ----------
        timeout_s
            The most seconds to wait. By default as long as the call takes, which its own deadline bounds.

        Returns
        -------
        ndarray or None
            What the call without ``_async`` returns.

        Raises
        ------
        DeadlineError
            ``timeout_s`` passed. The call goes on, the group is well, and this may be called again.
        ManyHandsError
            What the call raised.
        ClosedError
            This process was forked from the one that made the call.
        UsageError
            ``timeout_s`` is no number of seconds.
        """
        deadline = None if timeout_s is None else Deadline(timeout_s, self._lane.runtime.now)
        if not self._ended and not self._wait(deadline):
            raise DeadlineError(
                f"{self._what} was not done within {timeout_s:g} s of waiting; it goes on", operation=self._what
            )
        error = self.exception()
        if error is not None:
            # Each raise adds to the traceback; every waiter gets that of the call alone.
            raise error.with_traceback(self._trace)
        return self._result

    def synchronize(self, timeout_s: float | None = None) -> T:
        """Wait on the host until the call is done, and return its result.

        That is what `wait` does, except for arrays on GPUs: there `wait` makes the caller's current stream wait, and the host goes on.

        Parameters
        ----------
        timeout_s
            As for `wait`, whose result and errors this has, too.
        """
        return self.wait(timeout_s)

    def done(self) -> bool:
        """Tell whether the call has ended, well or badly. Never blocks."""
        if not self._ended:
            self._lane.runtime.glance()
        return self._ended

    def exception(self) -> BaseException | None:
        """Return what the call raised; None while it runs, and when it went well. Never blocks."""
        error = self._error if self.done() else None
        if error is not None and self._on_failure_seen is not None:
            self._on_failure_seen()
        return error

    def add_done_callback(self, callback: Callable[[Work[T]], object]) -> None:
        """Call ``callback(work)`` once the call has ended, at once if it has; in a background thread.

        The callbacks of a group run one after the other, in the order in which their calls ended, and may use the group. An
        exception that one raises is logged, and changes nothing.

        Parameters
        ----------
        callback
            It is called with this work; what it returns is not looked at.

        Raises
        ------
        UsageError
            ``callback`` cannot be called.
        """
        if not callable(callback):
            raise UsageError(f"a callback is called with the work, and {callback!r} cannot be called")
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        self._lane.submit(lambda: self._call(callback))

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in a coroutine, without blocking its event loop."""
        if self._lane.runtime.is_simulated:
            # The loop would wait on the computer's clock; so it is asked again and again, which lets the simulated time go on.
            while not self.done():
                yield
            return self.wait()
        # Whoever awaits has imported it; for all others it would be a tenth of the time that manyhands takes to import.
        from asyncio import get_running_loop

        loop = get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not ended.done():
                ended.set_result(None)

        def tell() -> None:
            # A loop that has been closed since has nobody who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(wake)

        # No callback: those run one after the other, and one of them may be waiting for this.
        with self._lock:
            pending = not self._ended
            if pending:
                self._wakers.append(tell)
        if pending:
            self._check_process()
            yield from ended
        return self.wait()

    def _wait(self, deadline: Deadline | None) -> bool:
        self._check_process()
        with self._lock:
            if self._ended:
                return True
            # Whoever will give up may still come to the rescue of others.
            place = self._lane.runtime.place(for_good=deadline is None)
            self._places.append(place)
        try:
            return place.wait(None if deadline is None else deadline.remaining()) or self._ended
        finally:
            with self._lock:
                if place in self._places:
                    self._places.remove(place)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ClosedError(
                f"{self._what} was issued by the process that this one was forked from, which alone can wait for it"
            )

    def run(self, action: Callable[[], T]) -> None:
        """Do what the call does, and end it; for core."""
        try:
            self._result = action()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever asks for the result
            self._error = error
            self._trace = error.__traceback__
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
            places, self._places = self._places, []
            self._ended = True
            wakers, self._wakers = self._wakers, []
            for place in places:
                place.wake()
        for waker in wakers:
            waker()
        for callback in callbacks:
            self._lane.submit(lambda callback=callback: self._call(callback))  # type: ignore[misc]

    def _call(self, callback: Callable[[Work[T]], object]) -> None:
        try:
            callback(self)
        except BaseException:  # noqa: BLE001 - nobody waits for a callback who could take it, and those after it must run
            _log.exception("manyhands: a callback of %s failed", self._what)
