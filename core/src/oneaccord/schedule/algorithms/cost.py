"""The cost of a call by formula, before any simulation or measurement."""

from __future__ import annotations

import msgspec

from oneaccord.common.data import as_dataclass

__all__ = ["Cost", "ceil_log2", "floor_log2", "one_after_the_other"]


@as_dataclass
class Cost(msgspec.Struct, frozen=True):
    """The cost of one call by the formula of its algorithm, if every message takes a latency and a time for each byte.

    A rank sends one message and receives one message at a time. The time of the call on a network where messages of
    different ranks never delay each other is ``steps * latency + path_bytes / bandwidth + reduced_bytes / reduction
    rate`` (Hockney's model, as in Thakur, Rabenseifner and Gropp, 2005).

    Attributes
    ----------
    steps
        The number of messages on the critical path: the longest chain in which each waits for the one before, either for its
        bytes or for a rank that sends (receives) no two messages at once.
    path_bytes
        The bytes of the messages on that path.
    reduced_bytes
        The bytes that are reduced on that path.
    sent_bytes
        The bytes that the rank which sends most sends.
    """

    steps: int
    path_bytes: float
    reduced_bytes: float
    sent_bytes: float


def floor_log2(size: int) -> int:
    """Return the largest j with ``2**j <= size``."""
    return size.bit_length() - 1


def ceil_log2(size: int) -> int:
    """Return the least j with ``2**j >= size``."""
    return (size - 1).bit_length()


def one_after_the_other(*parts: Cost) -> Cost:
    """Return the cost of parts each of which begins when the one before has ended, if the same rank sends most in all."""
    return Cost(
        sum(part.steps for part in parts),
        sum(part.path_bytes for part in parts),
        sum(part.reduced_bytes for part in parts),
        sum(part.sent_bytes for part in parts),
    )
