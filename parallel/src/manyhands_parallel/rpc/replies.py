"""The reply to a call: a handle like `manyhands.Work`."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Generic, TypeVar

from manyhands.errors import DeadlineError
from manyhands_parallel.rpc.exchange import Exchange

__all__ = ["Reply"]

T = TypeVar("T")
_log = logging.getLogger("manyhands_parallel.rpc")


class Reply(Generic[T]):
    """The handle of a call on another rank. `Service.call` returns it; its words are those of `manyhands.Work`.

    You may drop it: the call goes on. A coroutine can ``await`` it.
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
        self._is_answered = False
        self._is_local = exchange.is_own(peer)
        self._callbacks: list[Callable[[Reply[T]], object]] = []
        self._there = threading.Lock()
        """Held until the answer is there; only calls of a rank on itself wait for it."""
        self._there.acquire()

    def __repr__(self) -> str:
        state = "running" if not self._is_done else "done" if self._error is None else f"failed: {type(self._error).__name__}"
        return f"<manyhands_parallel.Reply {self._what}, {state}>"

    def wait(self, timeout_s: float | None = None) -> T:
        """Wait for the reply, and return the result of the function.

        Parameters
        ----------
        timeout_s
            The most seconds to wait. By default as long as the call may last.

        Returns
        -------
        object
            What the function returned, of the type given as ``type=``.

        Raises
        ------
        RemoteError
            The function raised an exception.
        DeadlineError
            The time of the call is up, or ``timeout_s`` has passed; then you may wait again. The function goes on, and so does the service.
        UsageError
            The arguments do not fit the function, or the result does not fit ``type=`` or cannot travel.
        SizeMismatchError
            The result is larger than ``max_bytes``.
        CommError
            The group failed, for example because the rank died: `PeerLostError`.
        """
        until = self._until if timeout_s is None else min(self._until, time.monotonic() + timeout_s)
        if not self._wait_until(until):
            if until < self._until:
                raise DeadlineError(
                    f"{self._what} was not done within {timeout_s:g} s of waiting; it goes on",
                    peer=self._peer,
                    operation=self._what,
                )
            self._expire()
        return self._finish()

    def done(self) -> bool:
        """Tell whether the call has ended, successfully or not. Never blocks."""
        if not self._is_done:
            self._exchange.glance(self._peer)
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
            It may use the service. A deadline that passes calls it only if somebody waits.
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
        while True:
            with self._exchange.lock:
                work = None if self._is_done else self._exchange.receive_of(self._peer)
                is_done = self._is_done
            if is_done:
                return self._finish()
            if work is None:  # a call of this rank on itself
                return await asyncio.get_running_loop().run_in_executor(None, self.wait)
            works: list[Any] = [work]  # asyncio takes works for futures of its own
            ended, _ = await asyncio.wait(works, timeout=max(0.0, self._until - time.monotonic()))
            if ended:
                self._exchange.take_from(self._peer, work)
            else:
                self._expire()

    def _wait_until(self, until: float, *, answered: bool = False) -> bool:
        """Wait until the call has ended, or until it is answered, which may be later; tell whether it has by then."""

        def is_over() -> bool:
            return self._is_answered if answered else self._is_done

        while not is_over():
            if self._is_local:
                if not self._there.acquire(timeout=max(0.0, until - time.monotonic())):
                    return is_over()
                self._there.release()
            elif not self._exchange.step(self._peer, is_over, until):
                return is_over()
        return True

    def _finish(self) -> T:
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._read(self._answer)

    def _expire(self) -> None:
        """End the call on this rank, since its time is up."""
        text = f"{self._what} had no reply within {self._timeout_s:g} s; the function may go on there"
        with self._exchange.lock:
            if not self._is_done:
                self._end(None, DeadlineError(text, peer=self._peer, operation=self._what))
        self._exchange.nudge()

    def _answered_by(self, answer: Any, error: BaseException | None) -> None:
        """Take the answer; called under the lock of the exchange."""
        self._is_answered = True
        self._there.release()
        self._end(answer, error)

    def _end(self, answer: Any, error: BaseException | None) -> None:
        """End the call, if it has not ended before; called under the lock of the exchange."""
        if self._is_done:
            return
        self._answer, self._error, self._is_done = answer, error, True
        for callback in self._callbacks:
            self._exchange.submit(partial(_call, callback, self))
        self._callbacks = []


def _call(callback: Callable[[Reply[Any]], object], reply: Reply[Any]) -> None:
    try:
        callback(reply)
    except BaseException:  # noqa: BLE001 - nobody waits for a callback who could take it
        _log.exception("manyhands_parallel: a callback of %s failed", reply._what)
