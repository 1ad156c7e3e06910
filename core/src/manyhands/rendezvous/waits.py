"""Who waits for whom: exact rules for a wait that can never end.

A rank that waits says where, and how far it has come on every channel (its *progress*). Two things follow without a clock:

1. A rank that has left, having made fewer calls than another one needs of it, is waited for in vain.
2. Ranks in a circle, each waiting for what the next has not done, wait for ever. A report may be old, since its rank may have
   gone on; but a rank goes on only when the one it waits for has acted, and that one's own, later report would show it. So a
   circle in which every report confirms the one before it stands still, provided that no other thread of these ranks could come
   to the rescue. A send that has stood still for a while counts as waiting for its receive: a program that needs a large
   message to be buffered is wrong, even where a transport would buffer it.
"""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.rendezvous.messages import Progress, Stalled

__all__ = ["circle", "still_owed", "unread"]


def still_owed(stalled: Stalled, rank: int, peer: int, progress: Progress) -> bool:
    """Tell whether ``peer``, which has come as far as ``progress``, has yet to do what ``rank`` waits for in ``stalled``."""
    if stalled.is_collective:
        return progress.calls.get(stalled.channel, 0) <= stalled.sequence
    # Who sends waits for the peer's receive, and the other way round.
    return any(
        (progress.receives if is_send else progress.sends).get(stalled.channel, {}).get(rank, 0) <= number
        for other, is_send, number in stalled.messages
        if other == peer
    )


def circle(stalls: Mapping[int, Stalled], start: int, world_size: int) -> list[int]:
    """Return a circle of ranks through ``start`` in which each waits for the next for ever; empty if there is none."""
    path: list[int] = []
    dead_ends: set[int] = set()

    def search(rank: int) -> bool:
        path.append(rank)
        mine = stalls[rank]
        peers = range(world_size) if mine.is_collective else mine.awaiting
        for peer in peers:
            theirs = stalls.get(peer)
            if peer == rank or theirs is None or not theirs.alone or not still_owed(mine, rank, peer, theirs.progress):
                continue
            if peer == start:
                return True
            if peer not in path and peer not in dead_ends and search(peer):
                return True
        dead_ends.add(path.pop())
        return False

    return path if start in stalls and stalls[start].alone and search(start) else []


def unread(left: Mapping[int, Progress]) -> str:
    """Say which messages the ranks that have left never received; nothing if there are none."""
    for sender, progress in sorted(left.items()):
        for channel, counts in progress.sends.items():
            for receiver, sent in counts.items():
                received = left[receiver].receives.get(channel, {}).get(sender, 0) if receiver in left else sent
                if sent > received:
                    return (
                        f"rank {sender} sent {sent} array(s) to rank {receiver}, which received {received} and closed its group: every "
                        "send needs its recv"
                    )
    return ""
