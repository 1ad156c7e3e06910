"""What messages with tags cost, next to mpi4py: each call in turn with each library, in the same two processes, and the median and the best of all rounds.

    mpirun -n 2 python benchmarks/tagged.py [--rounds 30] [--calls 400] [--backends shm,tcp]

It needs mpi4py, an MPI, and oneaccord with the named backends in one environment.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI  # type: ignore[import-not-found]

import oneaccord as oa
from oneaccord.api import Group

_OBJECT = {"loss": 0.25, "step": 17, "name": "train"}
_REQUESTS = 16
_TAG = 7
Calls = dict[str, Callable[[], object]]


def _ours(group: Group) -> Calls:
    me, other = group.rank, 1 - group.rank
    x, out = np.zeros(1), np.zeros(1)
    many, outs = [np.zeros(1) for _ in range(_REQUESTS)], [np.zeros(1) for _ in range(_REQUESTS)]
    send, recv = group.send, group.recv
    send_object, recv_object = group.send_object, group.recv_object

    def tagged() -> None:
        if me == 0:
            send(x, other, tag=_TAG)
            recv(other, tag=_TAG, out=out)
        else:
            recv(other, tag=_TAG, out=out)
            send(x, other, tag=_TAG)

    def wild() -> None:
        if me == 0:
            send(x, other, tag=_TAG)
            recv(oa.ANY, tag=oa.ANY_TAG, out=out)
        else:
            recv(oa.ANY, tag=oa.ANY_TAG, out=out)
            send(x, other, tag=_TAG)

    def objects() -> None:
        if me == 0:
            send_object(_OBJECT, other, tag=_TAG)
            recv_object(other, tag=_TAG)
        else:
            recv_object(other, tag=_TAG)
            send_object(_OBJECT, other, tag=_TAG)

    def requests() -> None:
        works: list[Any] = [group.recv_async(other, tag=tag, out=outs[tag]) for tag in range(_REQUESTS)]
        works += [group.send_async(many[tag], other, tag=tag) for tag in range(_REQUESTS)]
        oa.wait_all(works)

    return {"8 bytes": tagged, "8 bytes, any": wild, "dict": objects, "16 requests": requests, "iprobe": group.iprobe}


def _theirs(world: MPI.Comm) -> Calls:
    me, other = world.rank, 1 - world.rank
    x, out = np.zeros(1), np.zeros(1)
    many, outs = [np.zeros(1) for _ in range(_REQUESTS)], [np.zeros(1) for _ in range(_REQUESTS)]

    def tagged() -> None:
        if me == 0:
            world.Send(x, other, _TAG)
            world.Recv(out, other, _TAG)
        else:
            world.Recv(out, other, _TAG)
            world.Send(x, other, _TAG)

    def wild() -> None:
        if me == 0:
            world.Send(x, other, _TAG)
            world.Recv(out, MPI.ANY_SOURCE, MPI.ANY_TAG)
        else:
            world.Recv(out, MPI.ANY_SOURCE, MPI.ANY_TAG)
            world.Send(x, other, _TAG)

    def objects() -> None:
        if me == 0:
            world.send(_OBJECT, other, _TAG)
            world.recv(None, other, _TAG)
        else:
            world.recv(None, other, _TAG)
            world.send(_OBJECT, other, _TAG)

    def requests() -> None:
        works = [world.Irecv(outs[tag], other, tag) for tag in range(_REQUESTS)]
        works += [world.Isend(many[tag], other, tag) for tag in range(_REQUESTS)]
        MPI.Request.Waitall(works)

    return {"8 bytes": tagged, "8 bytes, any": wild, "dict": objects, "16 requests": requests, "iprobe": world.Iprobe}


_PER_CALL = {"8 bytes": 2, "8 bytes, any": 2, "dict": 2}
"""A round trip is two messages."""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--backends", default="shm,tcp")
    given = parser.parse_args()
    world = MPI.COMM_WORLD
    groups = {name: oa.init(name) for name in given.backends.split(",")}
    columns = {name: _ours(group) for name, group in groups.items()} | {"mpi4py": _theirs(world)}
    for kind in columns["mpi4py"]:
        took: dict[str, list[float]] = {name: [] for name in columns}
        for turn in range(given.rounds):
            for name, calls in columns.items():
                call, count = calls[kind], given.calls // (8 if kind == "16 requests" else 1)
                world.Barrier()
                for _ in range(5):
                    call()
                started = time.perf_counter()
                for _ in range(count):
                    call()
                if turn:
                    took[name].append((time.perf_counter() - started) / count / _PER_CALL.get(kind, 1))
        if world.rank == 0:
            for about, of in (("median", statistics.median), ("best", min)):
                found = {name: of(each) * 1e6 for name, each in took.items()}
                words = [f"{name} {us:8.2f} us ({us / found['mpi4py']:6.2f})" for name, us in found.items()]
                print(f"{kind:14} {about:6}", "   ".join(words), flush=True)
    for group in reversed(groups.values()):
        group.close()


main()
