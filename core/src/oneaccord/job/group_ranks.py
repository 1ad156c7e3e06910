"""The ranks of a group, and the place of this rank among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from oneaccord.common.ranks import show_ranks

__all__ = ["Members", "ranks_per_host"]


@dataclass(frozen=True, slots=True)
class Members:
    """The members of one group.

    Attributes
    ----------
    number
        The group's number, alike on all its members and on no other group of the job; 0 is the group of all ranks.
    ranks
        For each rank of the group its rank in the world.
    rank
        This rank, counted in the group.
    ranks_per_host
        The number of neighbouring ranks that share a host, if that number is the same on all hosts; otherwise 1.
    made
        How the program made the group, alike on all its members: ``"made by split()"``.
    name
        The group in words, alike on all its members: ``"group 7 (ranks 0, 2, made by split())"``.
    size
        The number of ranks.
    channel
        The channel of the group's collectives; its messages between two ranks go by the next one.
    """

    number: int
    ranks: tuple[int, ...]
    rank: int
    ranks_per_host: int
    made: str = ""
    name: str = field(init=False, repr=False, compare=False)
    size: int = field(init=False, repr=False, compare=False)
    channel: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _in_words(self.number, self.ranks, self.made))
        object.__setattr__(self, "size", len(self.ranks))
        object.__setattr__(self, "channel", 2 * self.number)


@lru_cache(maxsize=64)
def _in_words(number: int, ranks: tuple[int, ...], made: str) -> str:
    # Remembered for the same reason as below.
    return f"group {number} ({show_ranks(ranks)}{made and f', {made}'})" if number else "the group of all ranks"


def ranks_per_host(hosts: Sequence[int]) -> int:
    """Return the number of neighbouring ranks that share a host; 1 if that number differs from host to host.

    Parameters
    ----------
    hosts
        For each rank, the number of its host.
    """
    return _ranks_per_host(tuple(hosts))


@lru_cache(maxsize=64)
def _ranks_per_host(hosts: tuple[int, ...]) -> int:
    # Remembered, since it is the same on all ranks, and those may be threads of one process.
    count = 1
    while count < len(hosts) and hosts[count] == hosts[0]:
        count += 1
    groups = [set(hosts[first : first + count]) for first in range(0, len(hosts), count)]
    regular = len(hosts) % count == 0 and all(len(group) == 1 for group in groups)
    return count if regular and len(set().union(*groups)) == len(groups) else 1
