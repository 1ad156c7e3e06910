"""Putting the clocks of hosts together, by the calls that their ranks made with each other.

No rank ends an all_reduce before all have begun it, because every rank needs the data of every other. So each such call that two ranks made
together bounds the difference of their clocks from both sides, as a ping and its answer do. Let rank a and rank b have begun a call at s and ended
it at e, each on its own clock, and let o be the number to add to b's times to have them on a's clock. Then

    s_a - e_b  <=  o  <=  e_a - s_b

The bounds of all kept calls hold together. The result is the middle of the remaining interval. Its error is at most half the width of the
interval: about half the time of the shortest such call, if clocks do not drift. They drift by some millionths, so that calls an
hour apart may contradict each other by milliseconds. Then the result is the middle between the two that do, and the error says by how much.
The method is that of A. Duda, G. Harrus, Y. Haddad and G. Bernard, "Estimating global time in distributed systems", ICDCS 1987, with calls as
the messages. Ranks that share a clock, as all of one host do, need none of this.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from oneaccord.errors import UsageError
from oneaccord.explain.dump import Call, Dump

__all__ = ["Offset", "align"]

_TOGETHER = frozenset({"all_reduce", "all_gather", "all_gather_object", "all_to_all", "reduce_scatter", "barrier"})
"""The calls that no rank ends before all have begun them."""


class Offset(NamedTuple):
    """The number to add to the times of a rank, in seconds.

    Attributes
    ----------
    seconds
        The time.
    error
        The greatest possible error, in seconds: 0 for ranks that share the first one's clock, infinite if no call bounds it, and the hosts' clocks
        of the day are used.
    """

    seconds: float
    error: float


def align(dumps: Mapping[int, Dump]) -> dict[int, Offset]:
    """Return for each rank the offset that puts its times on the clock of the lowest one.

    Parameters
    ----------
    dumps
        The files of the ranks.

    Raises
    ------
    UsageError
        There are none.
    """
    if not dumps:
        raise UsageError("there are no files of a flight recorder: their clocks cannot be compared")
    first = dumps[min(dumps)]
    clocks = {rank: dump.clock for rank, dump in dumps.items()}
    bounds = _bounds(dumps, clocks)
    found = {first.clock: Offset(0.0, 0.0)}
    # From clock to clock, by those ways first that add the least error.
    ways: list[tuple[float, float, str]] = [(0.0, 0.0, first.clock)]
    done: set[str] = set()
    while ways:
        error, seconds, clock = heapq.heappop(ways)
        if clock in done:
            continue
        done.add(clock)
        found[clock] = Offset(seconds, error)
        for (one, other), (low, high) in bounds.items():
            if one == clock and other not in done and low > -math.inf and high < math.inf:
                # If they contradict each other, the distance between them is the error as well.
                heapq.heappush(ways, (error + abs(high - low) / 2, seconds + (low + high) / 2, other))
    for dump in dumps.values():
        if dump.clock not in found:
            found[dump.clock] = Offset((dump.time - dump.now) - (first.time - first.now), math.inf)
    return {rank: found[clock] for rank, clock in clocks.items()}


def _bounds(dumps: Mapping[int, Dump], clocks: Mapping[int, str]) -> dict[tuple[str, str], tuple[float, float]]:
    """Return for pairs of clocks the least and the most that must be added to times of the second to have them on the first."""
    together: dict[tuple[int, int], dict[str, tuple[float, float]]] = {}
    for rank, dump in dumps.items():
        for call in _telling(dump.calls):
            # Of all ranks on one clock: when the last one began, and when the first one ended.
            of_clock = together.setdefault((call.channel, call.sequence), {})
            begun, ended = of_clock.get(clocks[rank], (-math.inf, math.inf))
            finished = math.inf if call.finished is None else call.finished
            of_clock[clocks[rank]] = (max(begun, call.started), min(ended, finished))
    bounds: dict[tuple[str, str], tuple[float, float]] = {}
    for times in together.values():
        for one, (one_begun, one_ended) in times.items():
            for other, (other_begun, other_ended) in times.items():
                if one != other:
                    low, high = bounds.get((one, other), (-math.inf, math.inf))
                    bounds[one, other] = (max(low, one_begun - other_ended), min(high, one_ended - other_begun))
    return bounds


def _telling(calls: Iterable[Call]) -> Iterable[Call]:
    """Yield the calls that bound clocks: of operations that wait for all, of memory of the host, with something to send.

    A call on a GPU ends when it is launched. One that was running when the file was written may have ended for another reason.
    """
    for call in calls:
        is_empty = call.operation != "barrier" and (0 in call.shape or (call.counts is not None and not all(call.counts)))
        if call.operation in _TOGETHER and call.digest and not call.device and not is_empty:
            yield call
