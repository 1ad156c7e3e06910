"""The second part of the proof: every send meets its receive, and no rank waits forever.

Rules 1, 2 and 4 of `oneaccord.schedule.steps` leave nothing open about which step waits for which. So the steps of all ranks,
with a send and its receive as one event, are a graph that is known before anything runs, and a schedule is free of
deadlock exactly if that graph has no circle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from oneaccord.schedule.errors import ScheduleDeadlockError, UnmatchedMessageError
from oneaccord.schedule.proof.structure import Pieces, name_of, sizes
from oneaccord.schedule.steps import Recv, RecvReduce, Schedule, Send, reads_of, target_of

__all__ = ["Address", "Flow", "check_flow"]

Address = tuple[int, int]
"""A rank, and the index of a step in its schedule."""


@dataclass(frozen=True, slots=True)
class Flow:
    """An order in which all steps of all ranks can run.

    Attributes
    ----------
    events
        Each local step as ``(its address, None)``, each message as ``(its send's, its receive's)``.
    rounds
        The number of messages on the longest chain in which each waits for the one before.
    synchronising
        Whether no rank can finish before every rank has started, even if a transport buffers messages.
    """

    events: tuple[tuple[Address, Address | None], ...]
    rounds: int
    synchronising: bool


def check_flow(schedules: Sequence[Schedule], pieces: Sequence[Pieces]) -> Flow:
    """Match the messages of all ranks and put all steps in order.

    Raises
    ------
    UnmatchedMessageError
        A send has no receive, a receive no send, or their sizes differ.
    ScheduleDeadlockError
        There is no order.
    """
    partners, previous = _match(schedules, pieces)
    return _Ordering(schedules, partners, previous).run()


def _match(schedules: Sequence[Schedule], pieces: Sequence[Pieces]) -> tuple[dict[Address, Address], dict[Address, Address]]:
    """Return the other end of each message, and the message before it from (to) the same peer."""
    sends: dict[tuple[int, int], list[Address]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Address]] = defaultdict(list)
    for schedule in schedules:
        for index, step in enumerate(schedule.steps):
            if isinstance(step, Send):
                sends[schedule.rank, step.peer].append((schedule.rank, index))
            elif isinstance(step, Recv | RecvReduce):
                receives[step.peer, schedule.rank].append((schedule.rank, index))
    partners: dict[Address, Address] = {}
    previous: dict[Address, Address] = {}
    for source, target in sorted(sends.keys() | receives.keys()):
        sent, received = sends[source, target], receives[source, target]
        if len(sent) != len(received):
            lonely = max(sent, received, key=len)[min(len(sent), len(received))]
            kind = "sends to" if len(sent) > len(received) else "receives from"
            peer = target if len(sent) > len(received) else source
            raise UnmatchedMessageError(
                f"rank {lonely[0]}, step {lonely[1]} {kind} rank {peer}, which has no counterpart: rank {source} has "
                f"{len(sent)} sends to rank {target}, and rank {target} has {len(received)} receives from rank {source}",
                rank=lonely[0],
                step=lonely[1],
            )
        for send, receive in zip(sent, received, strict=True):
            _check_sizes(schedules, pieces, send, receive)
            partners[send], partners[receive] = receive, send
        for channel in (sent, received):
            previous.update(zip(channel[1:], channel, strict=False))
    return partners, previous


def _check_sizes(schedules: Sequence[Schedule], pieces: Sequence[Pieces], send: Address, receive: Address) -> None:
    source = next(iter(reads_of(schedules[send[0]].steps[send[1]])), None)
    target = target_of(schedules[receive[0]].steps[receive[1]])
    if sizes(pieces[send[0]], source) == sizes(pieces[receive[0]], target):
        return
    sent, expected = ("an empty message" if ref is None else name_of(ref) for ref in (source, target))
    raise UnmatchedMessageError(
        f"rank {send[0]}, step {send[1]} sends {sent} to rank {receive[0]}, which receives it by step {receive[1]} as "
        f"{expected}: the sizes are those of pieces {_listed(sizes(pieces[send[0]], source))} and "
        f"{_listed(sizes(pieces[receive[0]], target))}",
        rank=send[0],
        step=send[1],
    )


def _listed(pieces: tuple[tuple[int, ...], ...]) -> str:
    shown = ", ".join(str(piece) for piece in pieces[:4])
    return f"[{shown}, ...]" if len(pieces) > 4 else f"[{shown}]"


class _Ordering:
    """Puts steps in order, each as soon as nothing is left that it waits for."""

    def __init__(
        self, schedules: Sequence[Schedule], partners: dict[Address, Address], previous: dict[Address, Address]
    ) -> None:
        self.schedules = schedules
        self.partners = partners
        self.waits_for: dict[Address, list[Address]] = {}
        for schedule in schedules:
            for index, step in enumerate(schedule.steps):
                address = (schedule.rank, index)
                earlier = [(schedule.rank, after) for after in step.after]
                if address in previous:
                    earlier.append(previous[address])
                self.waits_for[address] = earlier

    def run(self) -> Flow:
        waiting = {address: len(earlier) for address, earlier in self.waits_for.items()}
        followers: dict[Address, list[Address]] = defaultdict(list)
        for address, earlier in self.waits_for.items():
            for before in earlier:
                followers[before].append(address)
        events: list[tuple[Address, Address | None]] = []
        rounds: dict[Address, int] = {}
        heard: dict[Address, int] = {}
        ready = [address for address, count in waiting.items() if not count]
        while ready:
            address = ready.pop()
            partner = self.partners.get(address)
            if partner is None:
                ends = [address]
                events.append((address, None))
            elif waiting[partner] or partner in rounds:
                continue
            else:
                send, receive = (address, partner) if self._is_send(address) else (partner, address)
                ends = [send, receive]
                events.append((send, receive))
            depth = max((rounds[before] for end in ends for before in self.waits_for[end]), default=0) + (len(ends) - 1)
            told = 0
            for end in ends:
                rounds[end] = depth
                # A receive also knows what its sender knew; a send learns nothing, because a transport may buffer it.
                told |= 1 << end[0]
                for before in self.waits_for[end]:
                    told |= heard[before]
                heard[end] = told
                for follower in followers[end]:
                    waiting[follower] -= 1
                    if not waiting[follower]:
                        ready.append(follower)
        if len(rounds) < len(waiting):
            raise self._deadlock(rounds)
        known = [1 << schedule.rank for schedule in self.schedules]
        for (rank, _), told in heard.items():
            known[rank] |= told
        everyone = (1 << len(self.schedules)) - 1
        return Flow(tuple(events), max(rounds.values(), default=0), all(told == everyone for told in known))

    def _is_send(self, address: Address) -> bool:
        return isinstance(self.schedules[address[0]].steps[address[1]], Send)

    def _deadlock(self, finished: dict[Address, int]) -> ScheduleDeadlockError:
        """Follow steps that wait until one comes again."""

        def cause(address: Address) -> Address:
            unfinished = (before for before in self.waits_for[address] if before not in finished)
            return next(unfinished, self.partners.get(address, address))

        address = min(address for address in self.waits_for if address not in finished)
        path: dict[Address, int] = {}  # the position of each step on it
        while address not in path:
            path[address] = len(path)
            address = cause(address)
        circle = list(path)[path[address] :]
        shown = [
            f"rank {rank}, step {index} ({type(self.schedules[rank].steps[index]).__name__})" for rank, index in circle[:16]
        ]
        left_out = [f"({len(circle) - 16} more)"] if len(circle) > 16 else []
        return ScheduleDeadlockError(
            f"{len(finished)} of {len(self.waits_for)} steps can run, and then each of these waits for the next: "
            + " -> ".join([*shown, *left_out, shown[0]]),
            rank=circle[0][0],
            step=circle[0][1],
        )
