"""Pairwise exchange: in round i, every rank sends to the one i further on and receives from the one i before.

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", International Journal of
High Performance Computing Applications 19(1), 2005.
"""

from __future__ import annotations

from manyhands.algorithms.draft import Draft
from manyhands.schedule.steps import Buffer, Collective, Recv, Schedule, Send

__all__ = ["ROUNDS_AT_ONCE", "all_to_all"]

ROUNDS_AT_ONCE = 4
"""How many rounds are under way at a time: enough to hide latency, few enough not to flood a switch of a large world."""


def all_to_all(rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
    """Exchange one block with every other rank directly.

    ``segments`` changes nothing: no rank passes anything on.

    Cost: P - 1 messages; all blocks but one's own, n (P - 1) / P bytes where they are even; ceil((P - 1) / 4) steps.
    """
    draft = Draft(Collective.ALL_TO_ALL, "pairwise", rank, size)
    draft.copy(draft.block(Buffer.OUTPUT, rank), draft.block(Buffer.INPUT, rank))
    rounds: list[tuple[int, int]] = []
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        after = rounds[-ROUNDS_AT_ONCE] if len(rounds) >= ROUNDS_AT_ONCE else ()
        sent = draft.add(Send(to, draft.block(Buffer.INPUT, to), after))
        rounds.append((sent, draft.add(Recv(source, draft.block(Buffer.OUTPUT, source), after))))
    return draft.finish()
