"""Turns: calls that must run one after the other, in the order in which they came.

A collective of a group, and a message of one direction between two ranks, must come in the same order on both sides. A thread
takes the turn of such a call: the calling thread itself if it waits for the result (no thread is woken if no other call
has the turn), otherwise a background thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from oneaccord.calls.order.counters import Counters, PythonCounters
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.runtime import Place, Runtime
from oneaccord.runtime.computer import COMPUTER

__all__ = ["Turn", "Turns"]


Turn = tuple[Callable[[], None] | None, Place | None]
"""A place in the queue: of an action for a background thread, or of a waiting thread. The other one is None."""


class Turns:
    """A queue of turns, of which one runs at a time.

    Parameters
    ----------
    runtime
        The runtime of its threads.
    holder
        The owner of the turn while others wait, in words.
    peer
        The rank of the world at the other end of the calls, if there is just one.
    counters
        The counters that keep the turn.
    """

    __slots__ = ("_next", "_runner", "counters", "holder", "peer", "runtime")

    def __init__(
        self, runtime: Runtime = COMPUTER, holder: str = "", peer: int | None = None, counters: Counters | None = None
    ) -> None:
        self.runtime: Runtime = runtime
        self.holder: str = holder
        self.peer: int | None = peer
        self.counters: Counters = PythonCounters() if counters is None else counters
        self._runner: int | None = None
        self._next: Callable[[], None] | None = None

    @property
    def is_free(self) -> bool:
        """Whether the turn is free."""
        return not self.counters.busy

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is the background thread that runs an action of this queue."""
        return self._runner == threading.get_ident()

    def take(self, deadline: Deadline, *, for_good: bool = False) -> bool:
        """Wait for the calling thread's turn; `give` must follow. Return whether the turn was free.

        Parameters
        ----------
        deadline
            Until when to wait.
        for_good
            Whether the thread makes no other call of the group if its turn does not come, so that it can be counted as
            waiting forever.

        Raises
        ------
        TimeoutError
            The turn did not come in time; its place in the queue is given up.
        """
        counters = self.counters
        if counters.take():
            return True
        come = self.runtime.place(for_good=for_good)
        turn: Turn = None, come
        if counters.take(turn):
            return True
        try:
            if come.wait(deadline.remaining()):
                return False
        except BaseException:
            if not counters.drop(turn):
                self.give()
            raise
        if counters.drop(turn):
            raise TimeoutError
        return False

    def take_if_free(self) -> bool:
        """Take the turn if it is free and no call waits, without waiting; `give` must follow if that was so."""
        return self.counters.take()

    def give(self) -> None:
        """End the calling thread's turn."""
        turn: Turn | None = self.counters.give()
        if turn is not None:
            self.pass_on(turn)

    def pass_on(self, turn: Turn) -> None:
        """Let a turn be had that the counters have given."""
        self._next, come = turn
        if come is not None:
            come.wake()
            return
        try:
            self.runtime.start(self._drain)
        except RuntimeError:  # no thread can be started: the call is made all the same, only not in the background
            self._drain()

    def submit(self, action: Callable[[], None]) -> None:
        """Run ``action``, which must not raise, in a background thread when its turn comes.

        If this process can start no more threads, as while the interpreter ends, it runs here and now.
        """
        if not self.counters.take((action, None)):
            return
        self._next = action
        try:
            self.runtime.start(self._drain)
        except RuntimeError:
            self._drain()

    def _drain(self) -> None:
        """Run the action whose turn it is, and those that come next, one after the other, in this thread."""
        before, action, self._next = self._runner, self._next, None
        while action is not None:
            self._runner = threading.get_ident()
            action()
            del action  # it holds arrays, and the next one may be long in coming
            self._runner = before
            turn: Turn | None = self.counters.give()
            if turn is None:
                return
            action, come = turn
            if come is not None:
                come.wake()
