"""Ranks in words."""

from __future__ import annotations

import sys
from collections.abc import Iterable

__all__ = ["show_all_ranks", "show_ranks"]


def show_ranks(ranks: Iterable[int], most: int = 6) -> str:
    """Return ``"rank 3"`` or ``"ranks 0-2, 5"``.

    Parameters
    ----------
    ranks
        Which, in any order.
    most
        How many runs of neighbours are named; the others are counted.
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:most])
    if len(runs) > most:
        text += f" and {sum(b - a + 1 for a, b in runs[most:])} more"
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"


def show_all_ranks(ranks: Iterable[int]) -> str:
    """Do likewise, and leave none out: an error must name each rank that it is about."""
    return show_ranks(ranks, sys.maxsize)
