"""The input of the table, and one of its rows."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from oneaccord.common.data import as_dataclass
from oneaccord.common.units import bytes_text
from oneaccord.schedule.steps import Collective

__all__ = ["MAX_SEGMENTS", "Call", "Rule"]

MAX_SEGMENTS = 64
"""The most segments that a vector or block is cut into: beyond it, the work for each step costs more than overlap gains."""


@as_dataclass
class Call(msgspec.Struct, frozen=True):
    """The facts about a call when its algorithm is chosen, the same on all ranks.

    Attributes
    ----------
    collective
        The collective.
    nbytes
        The size of the vector, of the blocks of all ranks together, or of the blocks that one rank sends in all_to_all, in bytes.
    world_size
        The number of ranks.
    ranks_per_host
        The number of neighbouring ranks that share a host; 1 if it is not known, or not the same everywhere.
    even
        Whether the blocks of all ranks are of one size.
    reproducible
        Whether the reduction must be the one that all reproducible reductions share.
    """

    collective: Collective
    nbytes: int
    world_size: int
    ranks_per_host: int = 1
    even: bool = True
    reproducible: bool = False

    @property
    def by_host(self) -> bool:
        """Whether there are several hosts with several ranks each, equally many."""
        return 1 < self.ranks_per_host < self.world_size and self.world_size % self.ranks_per_host == 0


@as_dataclass
class Rule(msgspec.Struct, frozen=True):
    """One row of the table. It fits a call when all conditions that it names hold.

    Attributes
    ----------
    collective, algorithm
        The collective, and the name of the algorithm that this row chooses for it.
    max_bytes, min_bytes
        The largest and the smallest call that the row is for, in bytes; None for any.
    max_world, min_world
        The largest and the smallest world that the row is for; None for any.
    reason
        Why, for people.
    power_of_two
        Whether the row is for worlds of 1, 2, 4, 8, ... ranks alone.
    min_hosts, max_hosts
        The fewest and the most hosts that the row is for; None for any.
    min_ranks_per_host
        How many neighbouring ranks must share a host at least; None for any.
    reproducible, uneven
        Whether the row is for reproducible calls alone, and for calls with uneven blocks alone.
    segments
        How many segments to build the algorithm with; None for as many as it asks for.
    origin
        The place of the row, for messages, such as ``"tuned.toml: all_reduce, row 2"``.
    file
        The path of its file, if it is in one.
    """

    collective: Collective
    algorithm: str
    max_bytes: int | None = None
    max_world: int | None = None
    reason: str = ""
    min_bytes: int | None = None
    min_world: int | None = None
    power_of_two: bool = False
    min_hosts: int | None = None
    max_hosts: int | None = None
    min_ranks_per_host: int | None = None
    reproducible: bool = False
    uneven: bool = False
    segments: int | None = None
    origin: str = "a rule"
    file: str | None = None

    @property
    def conditions(self) -> str:
        """The condition on a call, in words that fit after "for"."""
        told = [word for word, given in (("reproducible calls", self.reproducible), ("uneven blocks", self.uneven)) if given]
        told += _span(self.min_bytes, self.max_bytes, bytes_text)
        told += _span(self.min_world, self.max_world, lambda count: f"{count:,} rank{'s' if count > 1 else ''}")
        told += ["a power of two of ranks"] if self.power_of_two else []
        told += _span(self.min_hosts, self.max_hosts, lambda count: "one host" if count == 1 else f"{count:,} hosts")
        told += _span(self.min_ranks_per_host, None, lambda count: f"hosts of {count:,} ranks")
        return ", ".join(told) or "all other calls"


def _span(lowest: int | None, highest: int | None, words: Callable[[int], str]) -> list[str]:
    """Return words for the allowed values of a condition, if it does not allow all."""
    if lowest == highest or (highest == 1 and lowest is None):
        return [] if highest is None else [words(highest)]
    if lowest is None:
        return [f"up to {words(highest or 0)}"]
    return [f"{words(lowest)} or more" if highest is None else f"{words(lowest)} to {words(highest)}"]
