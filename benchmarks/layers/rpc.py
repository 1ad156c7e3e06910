"""Calls of functions on another rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import oneaccord as oa
import oneaccord_parallel as mp
from layers.turns import Action, Row, in_turns, medians

CASES = {
    "tiny, 1 outstanding": (0, 100, 1),
    "tiny, 16 outstanding": (0, 400, 16),
    "1 MiB": (1 << 20, 10, 1),
    "16 MiB": (16 << 20, 3, 1),
}
"""The bytes of the array that goes there and back (0: the number 1), calls in a turn, and how many of them are on their way at once."""


def same(x: Any) -> Any:
    """Return what came."""
    return x


def calls(group: oa.Group, backend: str, rounds: int, folder: Path) -> list[Row]:
    """Measure calls from rank 0 of a function on rank 1, which returns its argument."""
    import torch
    import torch.distributed.rpc as theirs

    agent = Agent(group, folder)
    rows: list[Row] = []
    with mp.Service(group, {"same": same}) as service:
        for case, (nbytes, count, outstanding) in CASES.items():
            array = np.arange(nbytes // 4, dtype=np.float32) if nbytes else 1
            tensor = torch.arange(nbytes // 4, dtype=torch.float32) if nbytes else 1
            begin: dict[str, Callable[[], Any]] = {
                f"oneaccord, {backend}": partial(service.call, 1, "same", array),
                "torch, TensorPipe": partial(theirs.rpc_async, "rank1", same, args=(tensor,)),
            }
            latencies: dict[str, list[float]] = {name: [] for name in begin}
            actions: dict[str, Action] = {
                name: partial(many, call, count, outstanding, latencies[name]) for name, call in begin.items()
            }
            if group.rank == 0:
                for name, call in begin.items():
                    agent.before(name)
                    assert np.array_equal(call().wait(), array), name
            else:
                for name in begin:
                    agent.before(name)
                actions = {name: lambda: None for name in begin}
            for name, seconds in medians(in_turns(actions, rounds, group, agent.before)).items():
                row: Row = {"case": case, "by": name, "calls_per_s": count / seconds}
                if group.rank == 0:
                    row["latency_us"] = statistics.median(latencies[name]) * 1e6 if outstanding == 1 else None
                row["gb_s"] = 2 * nbytes * count / seconds / 1e9 if nbytes else None
                rows.append(row)
        agent.before("")
    return rows


class Agent:
    """torch's agent, which is there while it is torch's turn alone: a thread of it keeps a processor busy, and slows all others."""

    def __init__(self, group: oa.Group, folder: Path) -> None:
        self._group = group
        self._folder = folder
        self._number = 0
        self._is_there = False

    def before(self, name: str) -> None:
        """Begin or end the agent before a turn."""
        import torch.distributed.rpc as theirs

        if self._is_there == name.startswith("torch"):
            return
        self._is_there = not self._is_there
        if not self._is_there:
            theirs.shutdown()
            return
        self._number += 1
        options = theirs.TensorPipeRpcBackendOptions(init_method=f"file://{self._folder}/rpc{self._number}")
        rank = self._group.rank
        theirs.init_rpc(f"rank{rank}", rank=rank, world_size=self._group.world_size, rpc_backend_options=options)


def many(begin: Callable[[], Any], count: int, outstanding: int, latencies: list[float]) -> None:
    """Make many calls, some of them on their way at once."""
    on_their_way = []
    for _ in range(count):
        begun = time.perf_counter()
        on_their_way.append(begin())
        if len(on_their_way) == outstanding:
            on_their_way.pop(0).wait()
            latencies.append(time.perf_counter() - begun)
    for each in on_their_way:
        each.wait()
