"""The shared knowledge of the parts of one run: where each rank is, its calls, and its end."""

from __future__ import annotations

import sys
from typing import Any

from oneaccord.api import Network, Record, ThreadWorld, current_frames, line_of
from oneaccord_simulated.faults import FaultPlan, Links
from oneaccord_simulated.flight import Flights
from oneaccord_simulated.scheduler import Scheduler
from oneaccord_simulated.task import Task
from oneaccord_simulated.trace import Trace

__all__ = ["State"]

_PASSING = frozenset({"compute", "sleep"})


class State:
    """The state of one run.

    Parameters
    ----------
    world
        The ranks.
    seed, network, faults
        As for `run`.
    keep_messages
        Whether the trace keeps every message.

    Attributes
    ----------
    scheduler, flights, trace
        Its parts.
    links
        The effects of the fault plan on the links.
    pipes
        The connections of the ranks, for each backend that they made, one after the other.
    killed
        The ranks that a fault has killed, and its words.
    over
        The ranks whose program has ended.
    last_calls
        The call of its program that each rank began last.
    """

    def __init__(
        self, world: ThreadWorld, seed: int, network: Network | None, faults: FaultPlan, *, keep_messages: bool
    ) -> None:
        size = world.world_size
        self.world: ThreadWorld = world
        self.scheduler: Scheduler = Scheduler(seed, size)
        self.trace: Trace = Trace(size, seed, keep_messages=keep_messages)
        self.links: Links = faults.links(size)
        self.flights: Flights = Flights(self.scheduler, network, size, seed, self.links, self.trace)
        self.pipes: dict[int, Any] = {}
        self.killed: dict[int, str] = {}
        self.over: set[int] = set()
        self.last_calls: dict[int, Record] = {}
        self._backends = [0] * size

    def next_backend(self, rank: int) -> int:
        """Return which backend of a rank this is."""
        self._backends[rank] += 1
        return self._backends[rank] - 1

    def is_over(self, rank: int) -> bool:
        """Return whether a rank's program has ended."""
        return rank in self.over

    def lose(self, rank: int, reason: str) -> None:
        """Let all ranks know that one has died."""
        self.world.lose(rank, reason)

    def abort(self, kind: str, text: str, rank: int | None) -> None:
        """End the job, for one cause on all ranks."""
        self.world.abort(text, kind, rank)

    def where(self) -> str:
        """Return the line of the program that the calling task works for."""
        return self.scheduler.current().where or line_of(sys._getframe(1))

    def where_is(self, task: Task) -> str:
        """Return the line of the program for which a task works, wherever it waits."""
        return task.where or line_of(current_frames().get(task.ident))

    def where_is_rank(self, rank: int) -> str:
        """Return the line of its program at which a rank is."""
        return next((self.where_is(task) for task in self.scheduler.tasks() if task.rank == rank and task.number == 0), "")

    def last_call(self, rank: int) -> str:
        """Return the last call of its program that a rank began, in words; empty if there was none."""
        last = self.last_calls.get(rank)
        return "" if last is None else last.describe()

    def sent(self, channel: int, rank: int) -> list[str]:
        """Return which finished calls of a rank sent the messages that other ranks are receiving."""
        doing = {task.doing for task in self.scheduler.tasks()}
        met = [each for pipes in self.pipes.values() for each in pipes.met(channel, rank)]
        return [
            f"what rank {dest} receives is from its {send.describe()}"
            for dest, send, receive in met
            if receive in doing and send not in doing
        ]

    def unreceived(self, rank: int) -> list[str]:
        """Return the calls of a rank whose messages another one has not received, in words."""
        return [call.describe() for pipes in self.pipes.values() for call in pipes.unreceived(rank)]

    def passes_time(self, rank: int) -> str:
        """Return words for a timed activity of a rank, if it has one."""
        calls = self.trace.calls_of(rank)
        return calls[-1].what if calls and calls[-1].end_s is None and calls[-1].operation in _PASSING else ""
