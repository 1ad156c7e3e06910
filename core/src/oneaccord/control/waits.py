"""Which rank waits for which: exact rules for a wait that can never end.

A waiting rank reports its calls, and how far it has come on every channel (its *progress*). Two rules follow, without a
clock:

1. If a rank has left after fewer calls than another one needs of it, the wait of the other one has no end.
2. Take ranks that only wait, each for another of these ranks to do what it has not done. They wait for ever. A report may be
   old, since its rank may have continued. But the first of them to continue could do so only after another one had acted, and
   the report of that one would show it. A send that has not moved for a while counts as waiting for its receive: a program
   that needs a large message to be buffered is wrong, even if a transport buffers it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import msgspec

from oneaccord.contract.header import MET_CHANNEL, POST_CHANNEL
from oneaccord.control.protocol import Progress, Stalled, Testimony, Wait

__all__ = ["Owes", "behind_whom", "circle", "still_owed", "unanswered", "unread"]

Owes = Callable[[Wait, int, int, Progress], bool]
"""``owes(wait, rank, peer, progress)``: `still_owed`, or its counterpart for an exchange."""


def still_owed(wait: Wait, rank: int, peer: int, progress: Progress) -> bool:
    """Return whether ``peer``, whose progress this is, has yet to do what ``rank`` waits for."""
    if wait.is_collective:
        return progress.calls.get(wait.channel, 0) <= wait.sequence
    # A peer that has never talked to this rank takes nothing from it before its program does.
    received = progress.receives.get(wait.channel, {})
    if rank in received and received[rank] < wait.taken.get(peer, 0):
        return False
    # A sender waits for the peer's receive, a receiver for its send.
    return any(
        (progress.receives if is_send else progress.sends).get(wait.channel, {}).get(rank, 0) <= number
        for other, is_send, number in wait.messages
        if other == peer
    )


def circle(
    stalls: Mapping[int, Stalled],
    start: int,
    owes: Owes = still_owed,
    left: Callable[[Wait], Mapping[int, Progress]] | None = None,
) -> list[int]:
    """Return a circle of ranks in which each waits for the next, and which ``start`` waits for; empty if ``start`` may yet continue.

    A rank that waits for any of several needs them all to be stuck, or to have left its group, as ``left(wait)`` says, and to owe it a message. A
    rank whose wait only its own threads could end is a circle of its own.
    """
    stuck = {rank for rank, stalled in stalls.items() if stalled.quiet and stalled.waits}
    needs: dict[int, int] = {}
    owing: dict[tuple[int, int, str], list[int]] = {}

    def needed(rank: int, wait: Wait) -> int | None:
        if not (wait.is_collective or wait.meeting):
            return needed_of(rank, wait, unanswered(wait))
        # Who owes does not depend on who waits, so that thousands that wait in one place cost no more than one; two, as one may be the rank itself.
        place = wait.channel, wait.sequence, wait.meeting
        if place not in owing:
            owing[place] = [*islice((peer for peer in wait.members if _owes(None, wait, peer)), 2)]
        return next((peer for peer in owing[place] if peer != rank), None)

    def needed_of(rank: int, wait: Wait, silent: Wait) -> int | None:
        def answers(peer: int) -> bool:
            return peer in stuck and (stalls[peer].progress.answers or any(each.taken for each in stalls[peer].waits))

        if wait.is_own and not wait.awaiting:
            return rank
        those = [peer for peer in wait.awaiting if _owes(rank, wait if answers(peer) else silent, peer)]
        gone = left(wait) if wait.is_any and left is not None else {}
        if wait.is_any and any(
            peer not in those and not (peer in gone and owes(silent, rank, peer, gone[peer]))
            for peer in wait.awaiting
            if peer != rank
        ):
            return None
        return next(iter(those), None)

    def _owes(rank: int | None, wait: Wait, peer: int) -> bool:
        return peer != rank and peer in stuck and owes(wait, rank or 0, peer, stalls[peer].progress)

    # Usually a rank waits for one that does not wait itself, and the search ends here.
    while start in stuck and None not in (needed(start, wait) for wait in stalls[start].waits):
        able = set()
        for rank in stuck:
            found = [needed(rank, wait) for wait in stalls[rank].waits]
            if None in found:
                able.add(rank)
            else:
                needs[rank] = next(peer for peer in found if peer is not None)
        if not able:
            path = [start]
            while needs[path[-1]] not in path:
                path.append(needs[path[-1]])
            return path[path.index(needs[path[-1]]) :]
        stuck -= able
        owing.clear()
    return []


def unanswered(wait: Wait) -> Wait:
    """Return a wait for peers that answer nothing any more before their programs continue."""
    return msgspec.structs.replace(wait, taken={}) if wait.taken else wait


def behind_whom(rank: int, peer: int | None, answers: Mapping[int, Testimony], silent: Sequence[int]) -> int | None:
    """Return the rank for which ``rank``, which waits for ``peer``, waits in the end; a silent rank, if that may be the one.

    None if the wait has ended meanwhile, or if all wait for each other: the late rank cannot be found then.
    """
    path = [rank]
    if rank in answers and peer in _awaited(rank, answers, still=False):
        owing = _awaited(rank, answers)
        if peer not in owing:  # it has done its part; the same call may wait for others
            peer = min(owing, key=lambda other: other in answers, default=None)
    while peer is not None and peer in answers:
        if peer in path:  # a circle, with no end
            peer = None
            break
        path.append(peer)
        owing = [other for other in _awaited(peer, answers) if other != peer]
        if not owing:
            if answers[peer].waits:  # its waits end
                peer = None
            break
        peer = min(owing, key=lambda other: other in answers)
    return min(silent) if silent and peer not in silent else peer


def _awaited(rank: int, answers: Mapping[int, Testimony], *, still: bool = True) -> list[int]:
    """Return the ranks for which the calls of a rank wait; with ``still``, only those that have yet to do their part."""
    return [
        other
        for wait in answers[rank].waits
        for other in (wait.members if wait.is_collective else wait.awaiting)
        if not still or other not in answers or still_owed(wait, rank, other, answers[other].progress)
    ]


def unread(left: Mapping[int, Progress]) -> str:
    """Return which messages the ranks that have left never received, in words; empty if there are none."""
    for sender, progress in sorted(left.items()):
        for channel, counts in progress.sends.items():
            for receiver, sent in counts.items():
                received = left[receiver].receives.get(channel, {}).get(sender, 0) if receiver in left else sent
                if sent > received and channel == MET_CHANNEL:
                    return (
                        f"rank {sender} sent {sent} message(s) with tags to rank {receiver}, which received {received} and closed its group: "
                        "every send needs its recv, with the same tag or ANY_TAG"
                    )
                if sent > received and channel != POST_CHANNEL:
                    return (
                        f"rank {sender} sent {sent} array(s) to rank {receiver}, which received {received} and closed its group: every "
                        "send needs its recv"
                    )
    return ""
