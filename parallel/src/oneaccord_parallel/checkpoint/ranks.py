"""The ranks that save or load together; one alone needs no group. An error of one of them is raised on all."""

from __future__ import annotations

from typing import Any

import msgspec

import oneaccord.errors
from oneaccord import Group
from oneaccord.errors import OneAccordError
from oneaccord_parallel.agreement import need_group
from oneaccord_parallel.checkpoint import errors
from oneaccord_parallel.checkpoint.errors import CheckpointError

__all__ = ["Failure", "Ranks"]

Failure = dict[str, Any]
"""An error, as it travels."""


class Ranks:
    """The ranks of a group, or this process alone.

    Parameters
    ----------
    group
        The group; None for one process.
    timeout_s
        Seconds that a rank waits for the others, which may be reading or writing; None for a bound that suits ``nbytes`` of them.
    """

    def __init__(self, group: Group | None, timeout_s: float | None) -> None:
        if group is not None:
            need_group(group)
        self.group = group
        self.rank: int = 0 if group is None else group.rank
        self.count: int = 1 if group is None else group.world_size
        self._timeout_s = timeout_s

    def patience_s(self, nbytes: int) -> float:
        """Return how long to wait for ranks that read or write so much: ten minutes, and as long as a slow disk takes."""
        return 600 + nbytes / 10e6 if self._timeout_s is None else self._timeout_s

    def all_gather(self, mine: Any, timeout_s: float | None = None) -> list[Any]:
        """Return the values of all ranks."""
        if self.group is None:
            return [_travel(mine)]
        return self.group.all_gather_object(mine, timeout_s=self._timeout_s if timeout_s is None else timeout_s)

    def gather(self, mine: Any, timeout_s: float) -> list[Any]:
        """Return the values of all ranks on rank 0, and nothing elsewhere."""
        if self.group is None:
            return [_travel(mine)]
        return self.group.gather_object(mine, timeout_s=timeout_s) or []

    def broadcast(self, mine: Any, timeout_s: float | None = None) -> Any:
        """Return the value of rank 0."""
        if self.group is None:
            return _travel(mine)
        return self.group.broadcast_object(mine, timeout_s=self._timeout_s if timeout_s is None else timeout_s)

    def failure(self, error: Exception) -> Failure:
        """Return this rank's error as it travels."""
        known = isinstance(error, OneAccordError)
        return {
            "kind": type(error).__name__ if known else "CheckpointError",
            "text": str(error) if known else f"{type(error).__name__}: {error}",
            "file": getattr(error, "file", None) if known else None,
            "leaf": getattr(error, "leaf", None),
            "rank": self.rank,
        }

    def raise_first(self, failures: list[Failure | None], mine: Exception | None = None) -> None:
        """Raise the error of the first rank that has one, on each rank.

        Parameters
        ----------
        failures
            The errors, the same list on all ranks.
        mine
            This rank's own error, which becomes the cause.
        """
        found = [failure for failure in failures if failure is not None]
        if not found:
            return
        if self.count == 1 and mine is not None:
            raise mine
        first, others = found[0], [failure["rank"] for failure in found[1:]]
        text = f"rank {first['rank']}: {first['text']}" + (f" (so did others: {others})" if others else "")
        kind: type[OneAccordError] = CheckpointError
        for module in (errors, oneaccord.errors):
            kind = getattr(module, first["kind"], kind)
        if issubclass(kind, CheckpointError):
            raise kind(text, file=first["file"], leaf=first["leaf"], rank=self.rank, peer=first["rank"]) from mine
        raise kind(text, rank=self.rank, peer=first["rank"]) from mine


def _travel(mine: Any) -> Any:
    """Return an object as it is when it comes from another rank."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(mine))
