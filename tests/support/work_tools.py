"""What tests of works have in common: a group's lanes, and an action that goes on when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable

from oneaccord.calls.order.turns import Turns
from oneaccord.calls.work import Work
from oneaccord.contract.deadline import Deadline
from support.waiting import PATIENCE_S

__all__ = ["Gate", "Group"]


class Group:
    """What a group keeps for its calls: a lane for them, and one for their callbacks."""

    def __init__(self) -> None:
        self.calls, self.callbacks = Turns(), Turns()

    def later(self, action: Callable[[], object], what: str = "all_reduce") -> Work[object]:
        work: Work[object] = Work(what, self.callbacks)
        self.calls.submit(lambda: work.run(action))
        return work

    def finish(self) -> None:
        """Wait until all calls, and then all callbacks, have ended."""
        for lane in (self.calls, self.callbacks):
            lane.take(Deadline(PATIENCE_S))
            lane.give()


class Gate:
    """An action that goes on when the test says so."""

    def __init__(self, result: object = None) -> None:
        self.begun, self.open, self.result = threading.Event(), threading.Event(), result

    def __call__(self) -> object:
        self.begun.set()
        assert self.open.wait(PATIENCE_S)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result
