"""Work: the handle of a call that is still running, and waiting for several of them."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar

from oneaccord.calls.order.turns import Turns
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.runtime import Place
from oneaccord.errors import ClosedError, DeadlineError, UsageError

if TYPE_CHECKING:
    import asyncio

    from oneaccord.calls.post.status import Status

__all__ = ["Work", "as_completed", "wait_all", "wait_any", "wait_some"]

T = TypeVar("T")

_log = logging.getLogger("oneaccord.calls")

_TOLD = 4
"""How many calls are named one by one in messages to people."""


class Work(Generic[T]):
    """The handle of a call that runs in the background. The ``_async`` methods of `Group` return it.

    Until the work is done, do not write to the arrays given to the call, and do not touch ``out=``. You may drop a handle: the
    call continues and keeps its arrays alive. If it fails, every later call on the group raises its error.

    Collectives of one group run, and end, in the order in which they were issued. The same holds for sends to one rank, and for
    receives from one rank.

    `oneaccord.wait_all`, `oneaccord.wait_any` and `oneaccord.as_completed` wait for several works. A coroutine can ``await`` a
    work, and give it to ``asyncio.wait``, ``gather``, ``wait_for``, ``as_completed`` and ``shield``. It is no
    ``concurrent.futures.Future``.
    """

    __slots__ = (
        "_callbacks",
        "_ended",
        "_error",
        "_lock",
        "_on_failure_seen",
        "_places",
        "_process",
        "_result",
        "_takes_stock",
        "_trace",
        "_turns",
        "_what",
    )

    _waits_are_told: ClassVar[bool] = True
    """Whether the search for endless waits learns of each call that this may wait for."""
    _tells_waits: ClassVar[bool] = False
    """Whether it learns that only from those who wait for it, by `_wait_at`."""

    def __init__(self, what: str, turns: Turns, on_failure_seen: Callable[[], None] | None = None) -> None:
        self._what = what
        self._on_failure_seen = on_failure_seen
        self._turns = turns
        self._lock = threading.Lock()
        self._ended = False
        self._process = os.getpid()
        self._places: Sequence[Place] = ()
        self._trace: TracebackType | None = None
        self._callbacks: Sequence[tuple[Callable[[Work[T]], object], asyncio.AbstractEventLoop | None]] = ()
        self._takes_stock = False
        self._result: T
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        state = "running" if not self._ended else "done" if self._error is None else f"failed: {type(self._error).__name__}"
        return f"<oneaccord.Work {self._what}, {state}>"

    def wait(self, timeout_s: float | None = None) -> T:
        """Wait until the call is done, and return its result.

        With arrays on GPUs, the host waits only until the call has been enqueued behind earlier ones. The caller's current
        stream waits until the call is done, and may use the result from then on. `synchronize` waits on the host.

        Parameters
        ----------
        timeout_s
            The most seconds to wait. By default as long as the call takes, which its own deadline bounds.

        Returns
        -------
        ndarray or None
            The result of the call without ``_async``.

        Raises
        ------
        DeadlineError
            ``timeout_s`` passed. The call continues, the group stays usable, and you may call this again.
        OneAccordError
            The error of the call.
        ClosedError
            This process was forked from the one that made the call.
        UnsupportedError
            The caller's current stream is being captured.
        UsageError
            ``timeout_s`` is no number of seconds.
        """
        return self._finish(None if timeout_s is None else Deadline(timeout_s, self._turns.runtime.now))

    def _finish(self, deadline: Deadline | None) -> T:
        """Wait as `wait`."""
        if not self._ended and not self._ends_by(deadline):
            raise self._late(deadline)
        if self._error is not None:
            if self._on_failure_seen is not None:
                self._on_failure_seen()
            # Each raise adds to the traceback; every waiter gets that of the call alone.
            raise self._error.with_traceback(self._trace)
        return self._result

    def _ends_by(self, deadline: Deadline | None) -> bool:
        """Wait until the call has ended; return whether it has by the deadline. As `_first_done`, for one alone."""
        self._check_process()
        self._check_ends()
        self._expect_end()
        with self._lock:
            if self._ended:
                return True
            place = self._turns.runtime.place(for_good=deadline is None and self._waits_are_told)
            self._places = [*self._places, place]
        try:
            place.wait(None if deadline is None else deadline.remaining())
        finally:
            if not self._ended:
                self._leave(place)
        return self._ended

    def _leave(self, place: Place) -> None:
        """Let a thread be forgotten that no longer waits."""
        with self._lock:
            self._places = [each for each in self._places if each is not place]

    def synchronize(self, timeout_s: float | None = None) -> T:
        """Wait on the host until the call is done, and return its result.

        This differs from `wait` only for arrays on GPUs: there `wait` makes the caller's current stream wait, and the host goes
        on.

        Parameters
        ----------
        timeout_s
            As for `wait`; result and errors are the same as well.
        """
        return self.wait(timeout_s)

    def done(self) -> bool:
        """Return whether the call has ended, successfully or not. Never blocks.

        Raises
        ------
        ClosedError
            The call has not ended, and this process was forked from the one that made it. So it would never learn of the end.
        """
        if self._takes_stock:
            self._takes_stock = False
        elif not self._ended:
            self._check_process()
            self._turns.runtime.glance()
        return self._ended

    def exception(self) -> BaseException | None:
        """Return the call's error; None while it runs, and after success. Never blocks."""
        error = self._error if self.done() else None
        if error is not None and self._on_failure_seen is not None:
            self._on_failure_seen()
        return error

    def cancel(self) -> bool:
        """Take a call back, if it is a receive with a tag that has met no message yet; return whether that was so.

        Its ``wait()`` then raises a `UsageError`. All other calls continue.
        """
        return False

    def cancelled(self) -> bool:
        """Return whether `cancel` has taken the call back. ``asyncio.wait`` asks."""
        return False

    @property
    def status(self) -> Status | None:
        """The sender, tag and size of the message, if this is a receive with a tag that has ended well; else None."""
        return None

    def add_done_callback(self, callback: Callable[[Work[T]], object]) -> None:
        """Call ``callback(work)`` in a background thread once the call has ended; at once if it has already.

        The callbacks of a group run one after the other, in the order in which their calls ended, and may use the group. An
        exception that one raises is logged, and changes nothing.

        A callback that is added in a coroutine is called by its event loop, as those of asyncio's own futures are, and must not block.

        Parameters
        ----------
        callback
            It is called with this work; its return value is ignored.

        Raises
        ------
        ClosedError
            The call has not ended, and this process was forked from the one that made it.
        UsageError
            ``callback`` cannot be called.
        """
        if not callable(callback):
            raise UsageError(f"a callback must be a function of the work; {callback!r} cannot be called")
        loop = _running_loop()
        if not self._ended:
            self._check_process()
            if loop is not None:  # `asyncio.wait` comes here
                self._check_ends()
        with self._lock:
            pending = not self._ended
            if pending:
                self._callbacks = [*self._callbacks, (callback, loop)]
        if not pending:
            self._tell(callback, loop)

    def remove_done_callback(self, callback: Callable[[Work[T]], object]) -> int:
        """Take back callbacks that have not been called yet.

        Parameters
        ----------
        callback
            The argument of `add_done_callback`.

        Returns
        -------
        int
            How often it had been added.
        """
        with self._lock:
            # `asyncio.wait`, when it is notified, does this to each work and then checks whether it is done. If the simulated time moved
            # between one and the next, its findings would depend on the order of a set.
            self._takes_stock = self._turns.runtime.is_simulated
            before = len(self._callbacks)
            self._callbacks = [each for each in self._callbacks if each[0] != callback]
            return before - len(self._callbacks)

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in a coroutine, without blocking its event loop."""
        if not self._ended:
            self._check_process()
            self._check_ends()
        if not self._ended:
            # A program that awaits has imported asyncio; for all others it would be a tenth of the time that oneaccord takes to import.
            from asyncio import get_running_loop

            try:
                loop = get_running_loop()
            except RuntimeError:
                raise UsageError(
                    f"await of {self._what} needs a running event loop of asyncio: elsewhere, call work.wait(), in a separate thread if this one "
                    "must not block"
                ) from None
            ended: asyncio.Future[None] = loop.create_future()

            def wake(_: Work[T]) -> None:
                if not ended.done():
                    ended.set_result(None)

            self.add_done_callback(wake)
            try:
                yield from ended
            finally:
                self.remove_done_callback(wake)
        return self.wait()

    @property
    def _condition(self) -> NoReturn:
        """Explain the right way to `concurrent.futures.wait` and ``as_completed``, which begin with this of each of their futures."""
        raise UsageError(
            "a Work is not a concurrent.futures.Future: wait for several with oneaccord.wait_all(works), oneaccord.wait_any(works) or "
            "oneaccord.as_completed(works)"
        )

    def _wait_at(self, place: Place, works: Sequence[Work[Any]]) -> None:
        """Wait at a place until one of several works has ended, of which this is one."""
        place.wait(None)

    def _expect_end(self) -> None:
        """Prepare to be woken at the end; for DeviceWork, whose end must be looked for."""

    def _check_ends(self) -> None:
        """Refuse to wait for an end that never comes; for the works of a batch, which ends after its block."""

    def _late(self, deadline: Deadline | None) -> DeadlineError:
        seconds = 0.0 if deadline is None else deadline.timeout_s
        return DeadlineError(
            f"{self._what} was not done within {seconds:g} s of waiting; the call continues", operation=self._what
        )

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ClosedError(
                f"{self._what} was issued by the process that this one was forked from, which alone can wait for it: do that there, and "
                "hand the result over by a pipe or a queue"
            )

    def run(self, action: Callable[[], T]) -> None:
        """Make the call, and end it; for core."""
        try:
            self._result = action()
        except BaseException as error:  # noqa: BLE001 - the wait for the result raises it
            self._error = error
            self._trace = error.__traceback__
        self._conclude()

    def _conclude(self) -> None:
        """Let those continue that wait for the end."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, ()
            places, self._places = self._places, ()
            self._ended = True
            for place in places:
                place.wake()
        for callback, loop in callbacks:
            self._tell(callback, loop)

    def _tell(self, callback: Callable[[Work[T]], object], loop: asyncio.AbstractEventLoop | None) -> None:
        """Let a callback be called, by its event loop or when its turn comes."""
        if loop is None:
            self._turns.submit(lambda: self._call(callback))
            return
        # Not in turn: an earlier one may be waiting for this. If a loop is closed, nothing waits in it.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(callback, self)

    def _call(self, callback: Callable[[Work[T]], object]) -> None:
        try:
            callback(self)
        except BaseException:  # noqa: BLE001 - no caller could take it, and the callbacks after it must run
            _log.exception("oneaccord: a callback of %s failed", self._what)


def wait_all(works: Iterable[Work[T]], *, timeout_s: float | None = None) -> list[T]:
    """Wait until several calls are done, and return their results.

    The works may belong to several groups. For arrays on GPUs this waits as `Work.wait` does.

    Parameters
    ----------
    works
        Results of ``Group.*_async`` and of batches.
    timeout_s
        The most seconds to wait for all of them together. By default there is no limit.

    Returns
    -------
    list
        The results in the order of ``works``; an empty list for no works.

    Raises
    ------
    DeadlineError
        ``timeout_s`` passed. The calls continue, their groups stay usable, and you may call this again.
    OneAccordError
        A call failed. This is the error of the first failed one in the order of ``works``; the others continue.
    ClosedError
        This process was forked from the one that made the calls.
    UsageError
        ``works`` contains another object, or ``timeout_s`` is not a number of seconds.
    """
    chosen, deadline = _checked(works, timeout_s, "wait_all")
    return [work._finish(deadline) for work in chosen]


def wait_any(works: Iterable[Work[Any]], *, timeout_s: float | None = None) -> int:
    """Wait until one of several calls has ended. Its ``wait()`` then returns the result, or raises, at once.

    The works may belong to several groups, and to arrays on GPUs, which have ended when the GPU is done.

    Parameters
    ----------
    works
        Results of ``Group.*_async`` and of batches; at least one.
    timeout_s
        The most seconds to wait. By default there is no limit.

    Returns
    -------
    int
        Its index in ``works``; the first one if several have ended.

    Raises
    ------
    DeadlineError
        ``timeout_s`` passed. The calls continue, their groups stay usable, and you may call this again.
    ClosedError
        This process was forked from the one that made the calls.
    UsageError
        ``works`` is empty or contains another object, or ``timeout_s`` is not a number of seconds.
    """
    chosen, deadline = _checked(works, timeout_s, "wait_any")
    if not chosen:
        raise UsageError("wait_any got no works, and would wait forever: give at least one")
    place = _first_done(chosen, deadline)
    if place is None:
        raise _none_done(chosen, timeout_s)
    return place


def wait_some(works: Iterable[Work[Any]], *, timeout_s: float | None = None) -> list[int]:
    """Wait until at least one of several calls has ended. The ``wait()`` of each such call then returns the result, or raises, at once.

    Parameters
    ----------
    works
        As for `wait_any`.
    timeout_s
        As for `wait_any`.

    Returns
    -------
    list of int
        The indices in ``works`` of all that have ended, in order.

    Raises
    ------
    DeadlineError, ClosedError, UsageError
        As for `wait_any`.
    """
    chosen, _ = _checked(works, timeout_s, "wait_some")
    wait_any(chosen, timeout_s=timeout_s)
    return [index for index, work in enumerate(chosen) if work._ended]


def as_completed(works: Iterable[Work[T]], *, timeout_s: float | None = None) -> Iterator[Work[T]]:
    """Yield each work once its call has ended. Its ``wait()`` then returns the result, or raises, at once.

    The works may belong to several groups, and to arrays on GPUs, which have ended when the GPU is done. If several have ended,
    the first one in ``works`` comes first.

    Parameters
    ----------
    works
        Results of ``Group.*_async`` and of batches.
    timeout_s
        The most seconds until the last call has ended, counted from now. By default there is no limit.

    Returns
    -------
    iterator of Work
        Each of ``works`` once.

    Raises
    ------
    DeadlineError
        From the iterator: ``timeout_s`` passed before the next call had ended. The calls continue, and their groups stay usable.
    ClosedError
        From the iterator: this process was forked from the one that made the calls.
    UsageError
        At once: ``works`` contains another object, or ``timeout_s`` is not a number of seconds.
    """
    chosen, deadline = _checked(works, timeout_s, "as_completed")

    def completed() -> Iterator[Work[T]]:
        while chosen:
            place = _first_done(chosen, deadline)
            if place is None:
                raise _none_done(chosen, timeout_s)
            yield chosen.pop(place)

    return completed()


def _checked(works: Iterable[Work[T]], timeout_s: float | None, what: str) -> tuple[list[Work[T]], Deadline | None]:
    """Return the works, and until when to wait for them."""
    words = f"{what} takes a list of works, such as group.all_reduce_async() returns, but a"
    if not isinstance(works, Iterable):
        raise UsageError(f"{words} {type(works).__name__} was given")
    chosen: list[Any] = list(works)
    wrong = [type(each).__name__ for each in chosen if not isinstance(each, Work)]
    if wrong:
        raise UsageError(f"{words} {wrong[0]} was given")
    if timeout_s is None:
        return chosen, None
    return chosen, Deadline(timeout_s, chosen[0]._turns.runtime.now) if chosen else Deadline(timeout_s)


def _first_done(works: Sequence[Work[Any]], deadline: Deadline | None) -> int | None:
    """Wait until one of some works has ended; return the index of the first such, None if none had by the deadline."""
    are_told, speaker = True, None
    for work in works:
        if not work._ended:
            work._check_process()
            work._check_ends()
            work._expect_end()
            if work._tells_waits:
                speaker = work
        are_told = are_told and work._waits_are_told
    runtime = works[0]._turns.runtime
    # All locks: the thread counts as waiting from when its place is made, which must not be when one has ended already. Works may share one.
    with contextlib.ExitStack() as locks:
        for lock in sorted({work._lock for work in works}, key=id):
            locks.enter_context(lock)
        done = _first_ended(works)
        if done is not None:
            return done
        # A wait that will give up may still help others first.
        place = runtime.place(for_good=deadline is None and are_told and (speaker is None or runtime.is_simulated))
        for work in works:
            work._places = [*work._places, place]
    try:
        if speaker is None or deadline is not None:
            place.wait(None if deadline is None else deadline.remaining())
        else:
            speaker._wait_at(place, works)
    finally:
        for work in works:
            work._leave(place)
    return _first_ended(works)


def _first_ended(works: Sequence[Work[Any]]) -> int | None:
    for place, work in enumerate(works):
        if work._ended:
            return place
    return None


def _none_done(works: Sequence[Work[Any]], timeout_s: float | None) -> DeadlineError:
    names = [work._what for work in works]
    if len(names) > _TOLD:
        names[_TOLD:] = [f"{len(names) - _TOLD} more"]
    return DeadlineError(
        f"none of {len(works)} calls was done within {timeout_s or 0:g} s of waiting ({', '.join(names)}); the calls continue",
        operation=works[0]._what,
    )


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that the calling thread runs, if it does; asyncio is not imported for that."""
    module = sys.modules.get("asyncio")
    try:
        loop: asyncio.AbstractEventLoop | None = None if module is None else module.get_running_loop()
    except (RuntimeError, AttributeError):  # there is no loop; another thread is importing asyncio
        return None
    return loop
