"""Threads of a program that outlive the run of their world, such as those of a pool that a module keeps.

When a run ends, such a thread may wait for a lock, or an item of a queue. From then on it looks for itself, on the computer's clock,
whether it can continue. A world that begins meanwhile takes it in, and so finds it as the run before has left it, however fast the machine is.
"""

from __future__ import annotations

import _thread
import os
import time
from collections.abc import Callable

from oneaccord_simulated.task import Task

__all__ = ["claim", "keep", "outlive"]

_LOOK_S, _LOOK_AT_MOST_S = 0.001, 0.05
"""How long, on the computer's clock, a thread waits before it looks first, and at most before it looks again."""

_lock = _thread.allocate_lock()
_left: dict[Task, None] = {}
"""The threads that the next world takes in."""


def keep(task: Task) -> None:
    """Let the next world take in the thread of a task, which waits."""
    with _lock:
        task.world = None
        _left[task] = None


def claim(world: object) -> list[Task]:
    """Let a world take in the threads that are left of earlier runs; return them in an order that does not depend on the machine."""
    with _lock:
        claimed = sorted(_left, key=lambda task: (task.rank, task.number))
        _left.clear()
        for task in claimed:
            task.world = world
    return claimed


def outlive(task: Task, test: Callable[[], bool]) -> bool | None:
    """Wait in the calling thread, whose run is over.

    Parameters
    ----------
    task
        The calling thread's, which says when to give up.
    test
        Returns whether it can continue.

    Returns
    -------
    bool or None
        Whether it can continue; None if another world has taken it in, and it is its turn there.
    """
    pause = _LOOK_S
    while not task.take_baton(max(0.0, min(pause, task.gives_up_at - time.monotonic()))):
        pause = min(2 * pause, _LOOK_AT_MOST_S)
        is_able = _holds(test)
        if is_able or time.monotonic() >= task.gives_up_at:
            with _lock:
                is_free = task.world is None
                _left.pop(task, None)
            if is_free:
                return is_able
    return None


def _holds(test: Callable[[], bool]) -> bool:
    try:
        return test()
    except Exception:  # noqa: BLE001 - the waiting thread finds the error
        return True


def _in_child() -> None:
    """Forget the threads, none of which are in a forked child."""
    global _lock  # noqa: PLW0603 - one may have held it
    _lock = _thread.allocate_lock()
    _left.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
