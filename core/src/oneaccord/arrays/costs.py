"""Choose the size of the pieces in which an array on a GPU goes through the host's memory, by a model of the cost of a piece.

A piece is copied to the host, moved between the ranks, and copied back. The three overlap for pieces that follow each other, so that a call of
k pieces lasts as long as one piece, and k - 1 times as long as the slowest of the three: see docs/guides/gpu-details.md, "Through the host".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

__all__ = ["MOST_PIECE_BYTES", "Costs", "piece_bytes"]

MOST_PIECE_BYTES: int = 1 << 24
"""The largest piece, which bounds the pinned memory of a group."""

_LEAST_PIECE_BYTES = 1 << 16
_COPY_LATENCY_S = 20e-6
"""The time to queue a copy and to see its end, without the time for its bytes."""


@dataclass(frozen=True)
class Costs:
    """The cost of copies and calls.

    Parameters
    ----------
    latency_s
        Seconds that a call between the ranks takes, without the time for its bytes.
    move_bytes_per_s
        Bytes that a call sends and reduces in a second.
    copy_bytes_per_s
        Bytes that are copied between a GPU and pinned memory in a second, in one direction.
    """

    latency_s: float
    move_bytes_per_s: float
    copy_bytes_per_s: float

    def seconds(self, nbytes: int, piece: int) -> float:
        """Return the seconds that a call on ``nbytes`` takes in pieces of ``piece`` bytes."""
        count = -(-nbytes // piece)
        copy = _COPY_LATENCY_S + piece / self.copy_bytes_per_s
        move = self.latency_s + piece / self.move_bytes_per_s
        return 2 * copy + move + (count - 1) * max(copy, move)


@lru_cache(maxsize=256)
def piece_bytes(costs: Costs, nbytes: int) -> int:
    """Return the size in bytes of the pieces that end a call soonest; ``nbytes`` if a single piece does.

    All ranks with the same costs find the same size.
    """
    best, least = nbytes, costs.seconds(nbytes, nbytes)
    piece = _LEAST_PIECE_BYTES
    while piece <= MOST_PIECE_BYTES and piece < nbytes:
        seconds = costs.seconds(nbytes, piece)
        if seconds < least:
            best, least = piece, seconds
        piece *= 2
    return best
