"""An array that is divided along one axis, and then along another."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from functools import partial
from pathlib import Path

import numpy as np

import oneaccord as oa
import oneaccord_parallel as mp
from layers.turns import Action, Row, in_turns, medians

EDGES = {"16 KiB": 64, "64 MiB": 4096}
"""Rows and columns of a matrix of float32."""
_SENT = 200
"""Where the Linux kernel's tcp_info has the bytes that a socket has sent."""


def redistribute(group: oa.Group, backend: str, rounds: int) -> list[Row]:
    """Measure Shard(0) -> Shard(1) of a matrix, and count what each rank sends."""
    import torch
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (group.world_size,))
    rows: list[Row] = []
    for size, edge in EDGES.items():
        x = np.arange(edge * edge, dtype=np.float32).reshape(edge, edge)
        ours = mp.distribute(x, group, [mp.Shard(0)])
        theirs = DTensor.from_local(torch.from_numpy(ours.local), mesh, [Shard(0)])
        actions: dict[str, Action] = {
            f"oneaccord, {backend}": partial(ours.redistribute, [mp.Shard(1)]),
            "torch DTensor, gloo": partial(theirs.redistribute, mesh, [Shard(1)]),
        }
        mine = ours.redistribute([mp.Shard(1)]).local
        assert np.array_equal(mine, theirs.redistribute(mesh, [Shard(1)]).to_local().numpy())
        assert np.array_equal(mine, np.split(x, group.world_size, axis=1)[group.rank])
        table = round(sum(step.bytes_per_rank for step in ours.explain([mp.Shard(1)])))
        found = medians(in_turns(actions, rounds, group))
        for name, action in actions.items():
            counted = name != f"oneaccord, {backend}" or backend == "tcp"
            sent = (sent_in(action, group) - sent_in(lambda: None, group)) if counted else None
            rows.append(
                {
                    "size": size,
                    "ranks": group.world_size,
                    "by": name,
                    "ms": found[name] * 1e3,
                    "sent_bytes": sent,
                    "explained_bytes": table,
                }
            )
    return rows


def sent_in(action: Action, group: oa.Group) -> int:
    """Return how many bytes this rank sends over TCP during an action of all ranks and a barrier, as the kernel counts them."""
    group.barrier()
    before = _sent()
    action()
    group.barrier()
    return _sent() - before


def _sent() -> int:
    total = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it has been closed, or is no socket of TCP
            if descriptor.readlink().name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor.name))) as copy:
                    sent, again = struct.unpack_from("QQ", copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), _SENT)
                    total += sent - again  # without what was lost on the way
    return total
