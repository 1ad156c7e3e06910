"""The virtual clock: when each message and each reduction of a program starts and ends.

The rules, in full:

1. A message is *ready* when all that its send and its receive wait for has ended, and the message before it of the same pair of
   ranks is ready. A reduction is ready when all that it waits for has ended; that of a receive that reduces waits for its message.
2. A ready message takes, one after the other, the sending port of its sender, the links on its way, and the receiving port of its
   receiver. Each is a queue, first come, first served, and a message that finds it free continues at once. It comes to the next one
   when the one before begins to serve it (virtual cut-through): the first byte continues while the last is still on its way.
3. A link is busy with a message for its gap and for bytes / its bandwidth. A port is busy for the sum of the gaps on the way and
   for bytes / the least bandwidth on the way.
4. A message ends, for sender and receiver, when the sum of the latencies on its way and bytes / the least bandwidth have passed
   since the receiving port began to serve it.
5. A rank reduces one thing at a time, first come first served, and each takes bytes / rate.
6. At one moment, ends come first, then reductions, then messages: those that have passed fewer queues before others, then
   those whose sending step comes earlier in its schedule (copies not counted), then those of a lower rank (modulo the period, see
   `program`).

Times that are equal are handled together, so that a world in which all ranks do the same is cheap.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Clock", "Flows", "Timing"]

_LATER = 1 + 1e-12
"""The factor that makes a time surely later: two ways to add up the same numbers may differ in the last bits."""


@dataclass(frozen=True, slots=True)
class Flows:
    """The different messages: those of one way and one size are one flow.

    Attributes
    ----------
    first
        Flow i passes the queues ``queues[first[i]:first[i + 1]]``, two or more.
    queues
        Queues by number.
    busy_s
        For how long a message keeps each of these queues busy.
    flight_s
        For each flow the seconds from the start at its last queue to the end.
    """

    first: Sequence[int]
    queues: Sequence[int]
    busy_s: Sequence[float]
    flight_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class Timing:
    """The result of a program.

    Attributes
    ----------
    time_s
        When the last operation ended.
    steps
        The number of messages on the longest chain in which each waits for the one before, either for its bytes or for a rank that
        sends (receives) one after the other.
    finished
        How many operations ended.
    """

    time_s: float
    steps: int
    finished: int


class Clock:
    """Runs a program.

    Parameters
    ----------
    flows
        The different messages.
    flow
        For each message, which of them it is.
    reducer, reduction_s
        For each reduction its rank, and how long it takes.
    following, waits, successors, first_successor
        As in `Program`.
    queues, ranks
        How many queues there are, and how many ranks.
    """

    def __init__(
        self,
        flows: Flows,
        flow: Sequence[int],
        reducer: Sequence[int],
        reduction_s: Sequence[float],
        following: Sequence[int],
        waits: Sequence[int],
        successors: Sequence[int],
        first_successor: Sequence[int],
        queues: int,
        ranks: int,
    ) -> None:
        self._flows = flows
        self._flow = flow
        self._reducer = reducer
        self._reduction_s = reduction_s
        self._following = following
        self._waits = list(waits)
        self._successors = successors
        self._first_successor = first_successor
        self._free = [0.0] * queues
        self._deepest = [0] * queues
        self._reducer_free = [0.0] * ranks
        self._messages = len(flow)
        self._depth = [0] * len(waits)
        self._passed = [0] * self._messages
        # The event at a time: an operation that ends, as ~operation, or a message that comes to its next queue.
        self._agenda: dict[float, list[int]] = {}
        self._times: list[float] = []

    def run(self) -> Timing:
        """Run all operations, and return when the last one ends."""
        starting = [operation for operation, count in enumerate(self._waits) if not count]
        now, finished = 0.0, 0
        self._begin(now, starting, [])
        while self._times:
            now = heapq.heappop(self._times)
            happening = self._agenda.pop(now)
            ended = [~entry for entry in happening if entry < 0]
            finished += len(ended)
            self._begin(now, self._release(ended), [entry for entry in happening if entry >= 0])
        return Timing(now, max(self._depth, default=0), finished)

    def _release(self, ended: list[int]) -> list[int]:
        """Return the operations that waited for the last of ``ended``."""
        waits, depth, successors, first = self._waits, self._depth, self._successors, self._first_successor
        ready = []
        for operation in ended:
            deep = depth[operation]
            for successor in successors[first[operation] : first[operation + 1]]:
                if deep > depth[successor]:  # noqa: PLR1730 (max() takes a fifth of the time of this loop)
                    depth[successor] = deep
                waits[successor] -= 1
                if not waits[successor]:
                    ready.append(successor)
        return ready

    def _begin(self, now: float, ready: list[int], arriving: list[int]) -> None:
        """Let operations begin that are ready, and messages continue that come to their next queue."""
        messages = self._messages
        begun: list[int] = []
        reducing: list[int] = []
        for operation in ready:
            if operation >= messages:
                reducing.append(operation)
                continue
            message = operation
            while True:
                self._depth[message] += 1
                begun.append(message)
                after = self._following[message]
                if after < 0:
                    break
                self._depth[after] = max(self._depth[after], self._depth[message])
                self._waits[after] -= 1
                if self._waits[after]:
                    break
                message = after
        if reducing:
            self._reduce(now, reducing)
        if begun or arriving:
            self._pass(now, begun, arriving)

    def _reduce(self, now: float, ready: list[int]) -> None:
        free, messages = self._reducer_free, self._messages
        for operation in sorted(ready):
            place = operation - messages
            rank = self._reducer[place]
            end = max(now, free[rank]) + self._reduction_s[place]
            free[rank] = end
            self._note(end, ~operation)

    def _pass(self, now: float, begun: list[int], arriving: list[int]) -> None:
        """Move messages through as many queues as they find free."""
        first, queues, busy_s, flight_s = self._flows.first, self._flows.queues, self._flows.busy_s, self._flows.flight_s
        flow, free, passed, note = self._flow, self._free, self._passed, self._note
        depth, deepest = self._depth, self._deepest
        later: dict[int, list[int]] = {}
        for message in arriving:
            later.setdefault(passed[message], []).append(message)
        turn, group = 0, begun
        while group or later:
            group += later.pop(turn, [])
            group.sort()
            through: list[int] = []
            turn += 1
            for message in group:
                way = flow[message]
                place = first[way] + turn
                queue = queues[place - 1]
                start = free[queue]
                if start < now:  # noqa: PLR1730 (as above)
                    start = now
                free[queue] = start + busy_s[place - 1]
                last = place == first[way + 1]
                if turn == 1 or last:
                    # A rank that sends (receives) one thing after the other makes a chain of them.
                    if start > now * _LATER and depth[message] <= deepest[queue]:
                        depth[message] = deepest[queue] + 1
                    deepest[queue] = depth[message]
                if last:
                    note(start + flight_s[way], ~message)
                elif start > now:
                    passed[message] = turn
                    note(start, message)
                else:
                    through.append(message)
            group = through

    def _note(self, time: float, entry: int) -> None:
        """Put something on the agenda."""
        known = self._agenda.get(time)
        if known is None:
            self._agenda[time] = [entry]
            heapq.heappush(self._times, time)
        else:
            known.append(entry)
