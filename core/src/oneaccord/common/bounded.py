"""Calls into foreign code that may never return."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar, cast

from oneaccord.common.threads import Thread

__all__ = ["Stuck", "bounded"]

T = TypeVar("T")


class Stuck(Exception):
    """An action did not end in time, and was left to itself."""


def bounded(action: Callable[[], T], timeout_s: float, name: str, too_late: Callable[[T], object] = lambda _: None) -> T:
    """Return the result of an action, or raise its exception, after at most ``timeout_s`` seconds.

    It runs in a daemon thread of its own, with the context variables of the calling thread.

    Parameters
    ----------
    action
        The function to call.
    timeout_s
        Seconds that it may last.
    name
        The thread's name.
    too_late
        Takes the function's result if the caller no longer waits for it; it must not raise.

    Raises
    ------
    Stuck
        The action did not end in time, and is left to itself.
    """
    done: list[tuple[T | None, BaseException | None]] = []
    turn = threading.Lock()
    ended = threading.Event()
    abandoned = interrupted = False

    def run() -> None:
        value: T | None = None
        error: BaseException | None = None
        try:
            value = action()
        except BaseException as raised:  # noqa: BLE001 - the caller raises it
            error = raised
        with turn:
            done.append((value, error))
            late = abandoned
        ended.set()
        if late and error is None:
            too_late(cast("T", value))

    thread = Thread(target=contextvars.copy_context().run, args=(run,), name=name, daemon=True)
    thread.start()
    try:
        ended.wait(timeout_s)
    except BaseException:
        interrupted = True
        raise
    finally:
        with turn:
            abandoned = not done
        if interrupted and done and done[0][1] is None:
            too_late(cast("T", done.pop()[0]))
    if abandoned:
        raise Stuck(f"{name} did not end within {timeout_s:g} s")
    value, error = done.pop()
    if error is not None:
        try:
            raise error
        finally:
            del error  # it would keep itself alive by the frames that it has come through
    return cast("T", value)
