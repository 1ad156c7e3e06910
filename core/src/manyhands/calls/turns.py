"""Turns: calls that must run one after the other, in the order in which they came.

A collective of a group, and a message of one direction between two ranks, must come in the same order on both sides. Whoever
makes such a call takes its turn: the calling thread itself where it waits for the result (no thread is woken
when nobody else has it), a background thread where it does not.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from manyhands.contract.deadline import Deadline
from manyhands.contract.runtime import Place, Runtime
from manyhands.control.computer import COMPUTER

__all__ = ["Turns"]


_Turn = tuple[Callable[[], None] | None, Place | None]
"""A place in the queue: of an action for a background thread, or of a waiting thread. The other one is None."""


class Turns:
    """A queue of turns, of which one runs at a time.

    Parameters
    ----------
    runtime
        What its threads run on.
    holder
        Who has the turn while others wait, in words.
    peer
        The rank of the world that the calls talk with, where it is one.
    """

    __slots__ = ("_busy", "_lock", "_queue", "_runner", "holder", "peer", "runtime")

    def __init__(self, runtime: Runtime = COMPUTER, holder: str = "", peer: int | None = None) -> None:
        self.runtime: Runtime = runtime
        self.holder: str = holder
        self.peer: int | None = peer
        self._lock = threading.Lock()
        self._busy = False
        self._queue: deque[_Turn] = deque()
        self._runner: int | None = None

    @property
    def is_free(self) -> bool:
        """Whether nobody has a turn."""
        return not self._busy

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is the background thread that runs an action of this queue."""
        return self._runner == threading.get_ident()

    def take(self, deadline: Deadline, *, for_good: bool = False) -> bool:
        """Wait for the calling thread's turn; `give` must follow. Return whether nobody was before it.

        Parameters
        ----------
        deadline
            Until when to wait.
        for_good
            Whether the thread makes no other call of the group when its turn does not come, so that it can be counted as
            waiting for ever.

        Raises
        ------
        TimeoutError
            The turn did not come in time; its place in the queue is given up.
        """
        with self._lock:
            if not self._busy:
                self._busy = True
                return True
            come = self.runtime.place(for_good=for_good)
            turn = None, come
            self._queue.append(turn)
        try:
            if come.wait(deadline.remaining()):
                return False
        except BaseException:
            if not self._leave(turn):
                self.give()
            raise
        if self._leave(turn):
            raise TimeoutError
        return False

    def take_if_free(self) -> bool:
        """Take the turn if nobody has it and nobody waits, without waiting; `give` must follow where that was so."""
        with self._lock:
            free = not self._busy
            self._busy = True
        return free

    def give(self) -> None:
        """End the calling thread's turn."""
        with self._lock:
            if not self._queue:
                self._busy = False
                return
            come = self._queue[0][1]
            if come is not None:
                self._queue.popleft()
                come.wake()
                return
        try:
            self.runtime.start(self._drain)
        except RuntimeError:  # no thread can be had: what was promised is done all the same, only not in the background
            self._drain()

    def submit(self, action: Callable[[], None]) -> None:
        """Run ``action``, which must not raise, in a background thread when its turn comes.

        Where this process can have no more threads, which is so while the interpreter ends, it runs here and now.
        """
        with self._lock:
            self._queue.append((action, None))
            if self._busy:
                return
            self._busy = True
        try:
            self.runtime.start(self._drain)
        except RuntimeError:
            self._drain()

    def _drain(self) -> None:
        """Run the actions that come next, one after the other, in this thread."""
        before, self._runner = self._runner, threading.get_ident()
        while True:
            with self._lock:
                action, come = self._queue.popleft() if self._queue else (None, None)
                if action is None:
                    self._runner = before
                    if come is None:
                        self._busy = False
                    else:
                        come.wake()
                    return
            action()
            del action  # it holds arrays, and the next one may be long in coming

    def _leave(self, turn: _Turn) -> bool:
        """Give up a place in the queue; tell whether it was still one. Else the turn has just come."""
        with self._lock:
            if turn in self._queue:
                self._queue.remove(turn)
                return True
        return False
