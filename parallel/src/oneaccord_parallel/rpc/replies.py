"""The reply to a call: a handle like `oneaccord.Work`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from oneaccord.errors import DeadlineError, UsageError
from oneaccord_parallel.rpc.exchange import Exchange

__all__ = ["Reply", "seconds_of"]

T = TypeVar("T")
_log = logging.getLogger("oneaccord_parallel.rpc")


class Reply(Generic[T]):
    """The handle of a call on another rank. `Service.call` returns it; its words are those of `oneaccord.Work`.

    You may drop it: the call continues. A coroutine can ``await`` it.
    """

    def __init__(self, exchange: Exchange, peer: int, what: str, timeout_s: float, read: Callable[[Any], T]) -> None:
        self._exchange = exchange
        self._peer = peer
        self._what = what
        self._timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s
        self._read = read
        self._answer: Any = None
        self._error: BaseException | None = None
        self._is_done = False
        self._callbacks: list[Callable[[Reply[T]], object]] = []
        # Held until the call has ended, and until its answer is there. No conditions: these are made of locks, and cost ten times as much.
        self._ended = threading.Lock()
        self._ended.acquire()
        self._answered = threading.Lock()
        self._answered.acquire()

    def __repr__(self) -> str:
        state = "running" if not self._is_done else "done" if self._error is None else f"failed: {type(self._error).__name__}"
        return f"<oneaccord_parallel.Reply {self._what}, {state}>"

    def wait(self, timeout_s: float | None = None) -> T:
        """Wait for the reply, and return the result of the function.

        Parameters
        ----------
        timeout_s
            The most seconds to wait. By default as long as the call may last.

        Returns
        -------
        object
            The result of the function, of the type given as ``type=``. If you wait again, large arrays in it are the same memory.

        Raises
        ------
        RemoteError
            The function raised an exception.
        DeadlineError
            The time of the call is up, or ``timeout_s`` has passed; then you may wait again. The function continues, and so does the service.
        UsageError
            The arguments do not fit the function, or the result does not fit ``type=`` or cannot travel; or ``timeout_s`` is no number of
            seconds.
        SizeMismatchError
            The result is larger than ``max_bytes``.
        CommError
            The group failed, for example because the rank died: `PeerLostError`.
        """
        until = self._until if timeout_s is None else min(self._until, time.monotonic() + seconds_of(timeout_s))
        if not self._wait_until(until):
            if until < self._until:
                raise DeadlineError(
                    f"{self._what} was not done within {timeout_s:g} s of waiting; the call continues",
                    peer=self._peer,
                    operation=self._what,
                )
            self._expire()
        return self._finish()

    def done(self) -> bool:
        """Return whether the call has ended, successfully or not. Never blocks."""
        if not self._is_done and time.monotonic() >= self._until:
            self._expire()
        return self._is_done

    def exception(self) -> BaseException | None:
        """Return the error of the call; None while it runs, and after success. Never blocks."""
        return self._error if self.done() else None

    def add_done_callback(self, callback: Callable[[Reply[T]], object]) -> None:
        """Call ``callback(reply)`` in a thread of the service when the call has ended. An exception that it raises is logged.

        Parameters
        ----------
        callback
            It may use the service. A deadline that passes calls it only during a wait.
        """
        with self._exchange.lock:
            if not self._is_done:
                self._callbacks.append(callback)
                return
        _call(callback, self)

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in a coroutine, without blocking its event loop."""
        return self._awaited().__await__()

    async def _awaited(self) -> T:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(ended.set)

        self.add_done_callback(wake)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ended.wait(), max(0.0, self._until - time.monotonic()))
        return self.wait()

    def _wait_until(self, until: float) -> bool:
        """Wait; return whether the call has ended by then."""
        return self._is_done or _wait_for(self._ended, until) or self._is_done

    def _wait_for_answer(self, until: float) -> bool:
        """Wait for the answer, even if the call is late; return whether it is there by then."""
        return _wait_for(self._answered, until)

    def _finish(self) -> T:
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._read(self._answer)

    def _expire(self) -> None:
        """End the call on this rank, since its time is up."""
        text = f"{self._what} had no reply within {self._timeout_s:g} s; the function may still run there"
        with self._exchange.lock:
            if not self._is_done:
                self._end(None, DeadlineError(text, peer=self._peer, operation=self._what))

    def _answered_by(self, answer: Any, error: BaseException | None) -> None:
        """Take the answer; called under the lock of the exchange."""
        self._answered.release()
        self._end(answer, error)

    def _end(self, answer: Any, error: BaseException | None) -> None:
        """End the call, if it has not ended before; called under the lock of the exchange."""
        if self._is_done:
            return
        self._answer, self._error, self._is_done = answer, error, True
        self._ended.release()
        for callback in self._callbacks:
            self._exchange.submit(partial(_call, callback, self))
        self._callbacks = []


def seconds_of(timeout_s: Any) -> float:
    """Return the seconds that a timeout has.

    Raises
    ------
    UsageError
        It is no positive, finite number.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float | np.number) or not 0 < timeout_s < math.inf:
        raise UsageError(f"timeout_s must be a positive, finite number of seconds, not {timeout_s!r}")
    return float(timeout_s)


def _wait_for(lock: Any, until: float) -> bool:
    """Wait until a lock is free; return whether it is."""
    seconds = min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX)
    if lock.acquire(timeout=seconds):
        lock.release()
        return True
    return False


def _call(callback: Callable[[Reply[Any]], object], reply: Reply[Any]) -> None:
    try:
        callback(reply)
    except BaseException:  # noqa: BLE001 - no caller could take it
        _log.exception("oneaccord_parallel: a callback of %s failed", reply._what)
