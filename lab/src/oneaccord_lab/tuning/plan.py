"""The plan of a measurement, and its results: plain data that travels between the command line and the ranks as JSON."""

from __future__ import annotations

import msgspec

__all__ = ["DEFAULT_SIZES", "Plan", "Point"]

DEFAULT_SIZES: tuple[int, ...] = tuple(1 << power for power in (3, 8, 12, 16, 20, 24))
"""The sizes that are measured unless others are given: 8 bytes to 16 MiB."""


class Plan(msgspec.Struct, frozen=True):
    """The plan of a measurement.

    Attributes
    ----------
    candidates
        For each collective the names of the algorithms.
    sizes
        The sizes of the calls, in bytes, ascending.
    budget_s
        Seconds that measuring may take.
    backend
        The backend's name; None for that of the configuration.
    output
        The file that rank 0 writes the points to, as JSON.
    rounds
        The most calls of each algorithm in turn, if time allows.
    """

    candidates: dict[str, list[str]]
    sizes: list[int]
    budget_s: float
    backend: str | None
    output: str
    rounds: int = 40

    def dump(self) -> str:
        """Return the plan as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def load(cls, text: str) -> Plan:
        """Return the plan that `dump` wrote."""
        return msgspec.json.decode(text, type=cls)


class Point(msgspec.Struct, frozen=True):
    """The times of all candidates for one kind of call.

    Attributes
    ----------
    collective
        The collective.
    nbytes
        The size of the call, in bytes, as `Selector.choose` counts.
    times
        For each algorithm the seconds of one call: those of the slowest rank, the median over all rounds.
    rounds
        The number of calls of each in turn; 0 if the budget was used up, and nothing was measured.
    """

    collective: str
    nbytes: int
    times: dict[str, float] = msgspec.field(default_factory=dict)
    rounds: int = 0
