"""The order in which a rank carries out its steps, and which sends must have ended before each.

By the rules of `manyhands.schedule.steps` a step starts when those that it names have finished. The engine keeps no books of that. It has one
order, made beforehand: that of the list, but each send starts as early as what it comes after has run. A send is never waited for where it
starts: it goes on meanwhile, after those before it to the same peer. So a step that is no send waits until the sends have ended that it comes
after, directly or through other sends. Those of empty messages are not waited for: they use no memory.

That no rank waits for ever in this way is proved for every algorithm: `manyhands.schedule.proof.in_order`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

from manyhands.schedule.steps import Ref, Schedule, Send, reads_of, target_of

__all__ = ["Layout", "lay_out", "run_order", "sends_before"]


class Layout(NamedTuple):
    """All that the order of a schedule's steps follows from, and that it leads to.

    Attributes
    ----------
    order
        As `run_order` returns it.
    sends
        As `sends_before` returns it.
    reads, targets
        For each step what it reads, and what it writes, None for nothing.
    """

    order: list[int]
    sends: list[dict[int, int]]
    reads: list[tuple[Ref, ...]]
    targets: list[Ref | None]


def lay_out(schedule: Schedule) -> Layout:
    """Return the order of a schedule's steps, with what each waits for, reads and writes."""
    steps = schedule.steps
    order, sends = run_order(schedule), sends_before(schedule)
    return Layout(order, sends, list(map(reads_of, steps)), list(map(target_of, steps)))


def run_order(schedule: Schedule) -> list[int]:
    """Return the order in which the steps of a rank run: as they are listed, but sends as early as possible.

    Parameters
    ----------
    schedule
        One whose steps come after earlier ones alone.

    Returns
    -------
    list of int
        The indices of its steps.
    """
    waits_for = [len(step.after) for step in schedule.steps]
    dependents: list[list[int]] = [[] for _ in schedule.steps]
    unsent: dict[int, deque[int]] = defaultdict(deque)
    for index, step in enumerate(schedule.steps):
        for earlier in step.after:
            dependents[earlier].append(index)
        if isinstance(step, Send):
            unsent[step.peer].append(index)
    order: list[int] = []

    def run(index: int) -> None:
        order.append(index)
        for dependent in dependents[index]:
            waits_for[dependent] -= 1

    for index, step in enumerate(schedule.steps):
        for sends in unsent.values():
            while sends and not waits_for[sends[0]]:
                run(sends.popleft())
        if not isinstance(step, Send):
            run(index)
    return order


def sends_before(schedule: Schedule) -> list[dict[int, int]]:
    """Return which sends must have ended before each step.

    Parameters
    ----------
    schedule
        As for `run_order`.

    Returns
    -------
    list of dict
        For each step, by peer, the last such send, as its number among all those to the peer; with it end those before it. Nothing
        for sends.
    """
    found: list[dict[int, int]] = []
    ends: dict[int, dict[int, int]] = {}  # for each send what has been sent when it has ended
    numbers: dict[int, int] = defaultdict(int)
    for index, step in enumerate(schedule.steps):
        sent: dict[int, int] = {}
        for earlier in step.after:
            for peer, number in ends.get(earlier, {}).items():
                sent[peer] = max(number, sent.get(peer, 0))
        if isinstance(step, Send):
            ends[index] = sent if step.source is None else sent | {step.peer: numbers[step.peer]}
            numbers[step.peer] += 1
        found.append({} if isinstance(step, Send) else sent)
    return found
