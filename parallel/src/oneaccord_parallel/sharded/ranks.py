"""Groups of ranks: those that divide the parameters, and those that hold the same shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from oneaccord import DeviceMesh, Group
from oneaccord.errors import OneAccordError, UsageError
from oneaccord_parallel.arrays import Array, Memory

__all__ = ["Hybrid", "Ranks", "Strategy", "tree_sum"]


@dataclass(frozen=True)
class Hybrid:
    """The strategy that divides the parameters along one axis of a mesh, and repeats the shards along another.

    Parameters
    ----------
    replicate
        The axis whose ranks hold the same shards, usually that of the hosts.
    shard
        The axis among whose ranks the parameters are divided, usually that within a host.
    """

    replicate: str | int
    shard: str | int


Strategy = Literal["full", "grad", "none"] | Hybrid


class Ranks:
    """The ranks that train together: ``shard`` divides each unit into ``parts``, and ``replicate`` holds the same shards; either may be None.

    Parameters
    ----------
    group
        All of them; a mesh for `Hybrid`.
    strategy
        The data that are divided.
    root
        The rank whose values win, a rank of the group or of the mesh's parent; None if each keeps its own.

    Raises
    ------
    UsageError
        ``strategy`` or ``root`` is invalid, or does not fit ``group``.
    """

    def __init__(self, group: Group | DeviceMesh, strategy: Strategy, root: int | None) -> None:
        self.shard: Group | None = None
        self.replicate: Group | None = None
        whole = group.parent if isinstance(group, DeviceMesh) else group
        if not isinstance(whole, Group):
            raise UsageError(f"the ranks must be a group, such as oa.init() returns, not a {type(group).__name__}")
        if root is not None and root not in range(whole.world_size):
            raise UsageError(f"root must be a rank from 0 to {whole.world_size - 1}, or None, not {root!r}")
        self.root_part: int | None = root
        self.root_copy: int | None = root
        if isinstance(strategy, Hybrid):
            if not isinstance(group, DeviceMesh):
                raise UsageError(f"{strategy} needs a mesh: mp.Sharded(params, oa.DeviceMesh(group, shape, names), ...)")
            replicate, shard = group.axis(strategy.replicate), group.axis(strategy.shard)
            if replicate == shard:
                raise UsageError(f"{strategy} needs two axes, and both are {group.names[shard]!r}")
            self.shard, self.replicate = group.group(shard), group.group(replicate)
            if root is not None:
                place = group.coordinates_of(root)
                self.root_part, self.root_copy = place[shard], place[replicate]
        elif isinstance(group, DeviceMesh):
            raise UsageError(f"the strategy {strategy!r} takes a group, such as mesh.group({group.names[0]!r}), not a mesh")
        elif strategy in ("full", "grad"):
            self.shard = group
        elif strategy == "none":
            self.replicate = group
        else:
            raise UsageError(f'the strategy must be "full", "grad", "none" or mp.Hybrid(...), not {strategy!r}')
        self.keeps: bool = strategy in ("grad", "none")
        """Whether every rank holds the parameters whole."""
        self.parts: int = self.shard.world_size if self.shard else 1
        self.part: int = self.shard.rank if self.shard else 0
        self.me: int = whole.ranks[whole.rank]
        """This rank, as a rank of the world, for messages."""

    @property
    def _groups(self) -> list[Group]:
        return [group for group in (self.shard, self.replicate) if group is not None]

    @property
    def memory(self) -> Memory:
        """Memory that the ranks of a host can read."""
        return Memory(self._groups[0])

    def gather(self, record: bytes) -> list[bytes]:
        """Return the records of all ranks, which have one size: first along ``shard``, then along ``replicate``."""
        rows = np.frombuffer(record, np.uint8)[None]
        for group in self._groups:
            rows = group.all_gather(rows)
        return [row.tobytes() for row in rows]

    def of_root(self, mine: dict[str, str]) -> dict[str, str]:
        """Return the root's value, on all ranks; this rank's value, if there is no root."""
        if self.root_part is None:
            return mine
        said: list[Any] = [(self.is_root, mine)]
        for group in self._groups:
            said = [each for some in group.all_gather_object(said) for each in some]
        return next(dict(words) for is_root, words in said if is_root)

    def agree(self, lines: Sequence[str], failure: OneAccordError | None, says: str) -> None:
        """Compare the descriptions that all ranks give of themselves.

        Raises
        ------
        UsageError
            It differs, on every rank; or ``failure``, if all ranks failed alike.
        """
        stories: list[Any] = [(self.me, list(lines))]
        for group in self._groups:
            stories = [story for some in group.all_gather_object(stories) for story in some]
        first = next(
            (number for number in range(len(lines) + 1) if len({_line(told, number) for _, told in stories}) > 1), None
        )
        if first is not None:
            told = "".join(f"\n  rank {rank}: {_line(lines, first)}" for rank, lines in sorted(stories))
            raise UsageError(f"{says}; the first difference:{told}", rank=self.me) from failure
        if failure is not None:
            raise failure

    def spread(self, whole: Array, shard: Array) -> None:
        """Give all ranks the root's parameters: to ``whole`` if they keep them, otherwise this rank's part to ``shard``."""
        if self.root_part is None or self.root_copy is None:
            return
        mine = self.replicate is None or self.shard is None or self.replicate.rank == self.root_copy
        if self.keeps:
            (group,) = self._groups
            group.broadcast(whole, self.root_part, out=whole)
            return
        assert self.shard is not None
        if mine:
            self.shard.scatter(whole if self.shard.rank == self.root_part else None, self.root_part, out=shard)
        if self.replicate is not None:
            self.replicate.broadcast(shard, self.root_copy, out=shard)

    @property
    def is_root(self) -> bool:
        """Whether this rank's parameters win."""
        return (self.shard is None or self.shard.rank == self.root_part) and (
            self.replicate is None or self.replicate.rank == self.root_copy
        )

    def total(self, weights: Sequence[float]) -> float:
        """Return the sum of the weights, in the order of `gather`, combined in the tree in which gradients are."""
        if self.shard is None:
            return tree_sum(weights)
        return tree_sum([tree_sum(weights[start : start + self.parts]) for start in range(0, len(weights), self.parts)])


def tree_sum(values: Sequence[float]) -> float:
    """Return the sum in the canonical tree of reproducible reductions, which docs/guides/reductions.md describes."""
    left = list(values)
    pairs = len(left) - (1 << (len(left).bit_length() - 1))
    left = [left[2 * pair] + left[2 * pair + 1] for pair in range(pairs)] + left[2 * pairs :]
    while len(left) > 1:
        left = [left[place] + left[place + 1] for place in range(0, len(left), 2)]
    return left[0]


def _line(lines: Sequence[str], number: int) -> str:
    return lines[number] if number < len(lines) else "nothing more"
