"""Messages on their way through the simulated network: when they leave, which others they meet, when they arrive."""

from __future__ import annotations

import math
from collections.abc import Callable

from oneaccord.api import Network, Path, Paths
from oneaccord_simulated.faults import Links
from oneaccord_simulated.scheduler import Scheduler
from oneaccord_simulated.trace import Trace

__all__ = ["Flights", "Line"]


class Line:
    """The common state of messages of one channel on their way from one rank to another: their order.

    Parameters
    ----------
    source, dest
        The ranks.
    group
        The number of the group that they belong to.
    """

    __slots__ = ("dest", "group", "last_s", "source")

    def __init__(self, source: int, dest: int, group: int) -> None:
        self.source: int = source
        self.dest: int = dest
        self.group: int = group
        self.last_s: float = 0.0


class Flights:
    """The network of one run.

    Parameters
    ----------
    scheduler
        The clock.
    network
        The times of the messages; None if they arrive at once.
    world_size, seed
        The number of ranks, and the seed of random choices.
    links
        The faults of the links.
    trace
        The trace in which arrivals are noted.

    Attributes
    ----------
    held
        How many messages wait for a link that will never be whole again.
    """

    def __init__(
        self, scheduler: Scheduler, network: Network | None, world_size: int, seed: int, links: Links, trace: Trace
    ) -> None:
        self._scheduler = scheduler
        self._paths = None if network is None else Paths(network, world_size)
        self._jitter = None if network is None else network.jitter
        self._late = None if self._jitter is None else self._jitter.draws(seed)
        self._links = links
        self._trace = trace
        self._free = [0.0] * (0 if self._paths is None else self._paths.queue_count)
        self.held: int = 0

    def depart(self, line: Line, nbytes: int, arrive: Callable[[], None]) -> None:
        """Send a message off; call ``arrive`` when it is there, which may be now."""
        scheduler, links = self._scheduler, self._links
        now = scheduler.now
        delay = 0.0
        if links.any:
            whole = links.cut_until(line.source, line.dest, now)
            if whole == math.inf:
                self.held += 1
                self._trace.message(line.source, line.dest, nbytes, now, math.inf, line.group)
                return
            if whole > now:
                scheduler.at(whole, lambda: self.depart(line, nbytes, arrive))
                return
            delay = links.delay_s(line.source, line.dest, now)
        if self._paths is None:
            self._land(line, nbytes, arrive, now, now + delay)
            return
        path = self._paths.between(line.source, line.dest)
        if self._late is not None and self._jitter is not None and self._jitter.covers(path):
            delay += self._late.next()
        _Flight(self, line, nbytes, arrive, path, now, delay).pass_queues()

    def _land(self, line: Line, nbytes: int, arrive: Callable[[], None], sent: float, time: float) -> None:
        """Let a message arrive at a time, but not before those of its line that left before."""
        line.last_s = time = max(time, line.last_s)
        self._trace.message(line.source, line.dest, nbytes, sent, time, line.group)
        if time > self._scheduler.now:
            self._scheduler.at(time, arrive)
        else:
            arrive()


class _Flight:
    """A message that passes its queues, each first come, first served."""

    __slots__ = ("_arrive", "_busy", "_delay", "_flights", "_line", "_nbytes", "_path", "_place", "_sent")

    def __init__(
        self, flights: Flights, line: Line, nbytes: int, arrive: Callable[[], None], path: Path, sent: float, delay: float
    ) -> None:
        self._flights = flights
        self._line = line
        self._nbytes = nbytes
        self._arrive = arrive
        self._path = path
        self._busy = path.busy_s(nbytes)
        self._sent = sent
        self._delay = delay
        self._place = 0

    def pass_queues(self) -> None:
        """Go on to the next queue that is busy, or to the end."""
        flights, queues = self._flights, self._path.queues
        free, scheduler = flights._free, flights._scheduler
        while True:
            queue = queues[self._place]
            start = max(free[queue], scheduler.now)
            free[queue] = start + self._busy[self._place]
            self._place += 1
            if self._place == len(queues):
                end = start + self._path.flight_s(self._nbytes) + self._delay
                flights._land(self._line, self._nbytes, self._arrive, self._sent, end)
                return
            if start > scheduler.now:
                scheduler.at(start, self.pass_queues)
                return
