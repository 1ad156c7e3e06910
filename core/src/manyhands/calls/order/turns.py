"""Turns: calls that must run one after the other, in the order in which they came.

A collective of a group, and a message of one direction between two ranks, must come in the same order on both sides. Whoever
makes such a call takes its turn: the calling thread itself where it waits for the result (no thread is woken
when nobody else has it), a background thread where it does not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from manyhands.calls.order.books import Books, PythonBooks
from manyhands.contract.deadline import Deadline
from manyhands.contract.runtime import Place, Runtime
from manyhands.runtime.computer import COMPUTER

__all__ = ["Turn", "Turns"]


Turn = tuple[Callable[[], None] | None, Place | None]
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
    books
        Where the turn is kept.
    """

    __slots__ = ("_next", "_runner", "books", "holder", "peer", "runtime")

    def __init__(
        self, runtime: Runtime = COMPUTER, holder: str = "", peer: int | None = None, books: Books | None = None
    ) -> None:
        self.runtime: Runtime = runtime
        self.holder: str = holder
        self.peer: int | None = peer
        self.books: Books = PythonBooks() if books is None else books
        self._runner: int | None = None
        self._next: Callable[[], None] | None = None

    @property
    def is_free(self) -> bool:
        """Whether nobody has a turn."""
        return not self.books.busy

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
        books = self.books
        if books.take():
            return True
        come = self.runtime.place(for_good=for_good)
        turn: Turn = None, come
        if books.take(turn):
            return True
        try:
            if come.wait(deadline.remaining()):
                return False
        except BaseException:
            if not books.drop(turn):
                self.give()
            raise
        if books.drop(turn):
            raise TimeoutError
        return False

    def take_if_free(self) -> bool:
        """Take the turn if nobody has it and nobody waits, without waiting; `give` must follow where that was so."""
        return self.books.take()

    def give(self) -> None:
        """End the calling thread's turn."""
        turn: Turn | None = self.books.give()
        if turn is not None:
            self.pass_on(turn)

    def pass_on(self, turn: Turn) -> None:
        """Let a turn be had that the books have given."""
        self._next, come = turn
        if come is not None:
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
        if not self.books.take((action, None)):
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
            turn: Turn | None = self.books.give()
            if turn is None:
                return
            action, come = turn
            if come is not None:
                come.wake()
