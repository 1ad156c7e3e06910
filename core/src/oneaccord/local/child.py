"""One rank as its launcher knows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oneaccord.job import error_file
from oneaccord.local.failure import Ended, Failure
from oneaccord.local.forked import ForkedRank
from oneaccord.local.groups import Spawned
from oneaccord.local.output import Stream

__all__ = ["Child"]


@dataclass(slots=True, eq=False)
class Child:
    """A rank that the launcher has started."""

    rank: int
    process: Spawned | ForkedRank
    error_file: Path
    stderr: Stream
    is_newcomer: bool
    """Whether it was started to join a running job."""
    signalled: bool = False
    """Whether the launcher asked it to end before it did by itself."""
    exited_at: float = 0.0
    """By `time.monotonic`: clocks of the day are set back and forth."""
    told: bool = False
    """Whether the user knows that it is stopped."""
    needless: bool = False
    """Whether it was ended because no rank was left that could let it in."""
    made_good: bool = False
    """Whether the job is no worse off for its failure: another one has come in its place, or it never came in."""

    @property
    def has_failed(self) -> bool:
        """Whether it has ended, and the job is worse off for that."""
        return self.process.returncode not in (0, None) and not self.made_good and not self.needless

    def failure(self) -> Failure:
        """Return how it ended, and its own report of that."""
        assert self.process.returncode is not None
        return Failure(
            self.rank,
            self.process.returncode,
            self.exited_at,
            error_file.read(self.error_file),
            self.stderr.tail.decode(errors="replace"),
            error_file.read_place(self.error_file),
        )

    def ended(self) -> Ended:
        """Return its end, with what the launcher has had to do with it."""
        return Ended(self.failure(), self.signalled, self.needless, self.made_good)
