"""What `fake_nccl` has beyond the calls of every NCCL: the calls that came with 2.28."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["MOVING", "ExtraCalls", "blocks_given", "moved"]

MOVING = frozenset({"allto_all", "gather", "scatter"})
_MOVING_VERSION = 22803


def blocks_given(kind: str, rank: int, root: int, size: int) -> int:
    """Return how many blocks a rank brings to a call of `MOVING`."""
    return size if kind == "allto_all" or (kind == "scatter" and rank == root) else 0 if kind == "scatter" else 1


def moved(kind: str, data: list[Any], rank: int, root: int, count: int) -> Any:
    """Return what a rank gets by a call of `MOVING`; None where it gets nothing."""
    if kind == "gather":
        return np.concatenate(data) if rank == root else None
    mine = slice(rank * count, (rank + 1) * count)
    return data[root][mine] if kind == "scatter" else np.concatenate([part[mine] for part in data])


class ExtraCalls:
    """The functions of the binding. It has them with every NCCL, and says so when an old one lacks what is called."""

    version: int

    def _move(self, kind: str, source: int, target: int, count: int, datatype: int, root: int, comm: Any, stream: int) -> None:
        raise NotImplementedError

    def _moving(
        self, kind: str, source: int, target: int, count: int, datatype: int, root: int, comm: Any, stream: int
    ) -> None:
        if self.version < _MOVING_VERSION:
            raise RuntimeError(f"function {kind} is not found")
        self._move(kind, source, target, count, datatype, root, comm, stream)

    def allto_all(self, sendbuff: int, recvbuff: int, count: int, datatype: int, comm: Any, stream: int) -> None:
        self._moving("allto_all", sendbuff, recvbuff, count, datatype, 0, comm, stream)

    def gather(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: Any, stream: int) -> None:
        self._moving("gather", sendbuff, recvbuff, count, datatype, root, comm, stream)

    def scatter(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: Any, stream: int) -> None:
        self._moving("scatter", sendbuff, recvbuff, count, datatype, root, comm, stream)
