"""Threads whose start cannot block forever."""

from __future__ import annotations

import threading

__all__ = ["Thread", "Timer"]

_START_S = 5.0
"""How long a thread may take to begin: far longer than any does that has the memory for it."""


class Thread(threading.Thread):
    """A thread that is found out not to begin.

    Python's own `start` waits until the new thread says that it runs. If the thread finds no memory for its first steps, it ends silently, and `start`
    waits forever (python/cpython#140746). This one raises `RuntimeError` then, as it does if the system refuses a thread.

    Parameters
    ----------
    *args, **kwargs
        Those of `threading.Thread`.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type] # as its base
        self._started: threading.Event = _Begun()


class Timer(Thread, threading.Timer):
    """A `threading.Timer` that is found out not to begin, as `Thread` is.

    Parameters
    ----------
    *args, **kwargs
        Those of `threading.Timer`.
    """


class _Begun(threading.Event):
    """Set when a thread has begun."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until then; raise `RuntimeError` if it takes too long and the caller knows no bound."""
        if not super().wait(_START_S if timeout is None else timeout) and timeout is None:
            raise RuntimeError("can't start new thread: there was no memory for its first steps")
        return self.is_set()
