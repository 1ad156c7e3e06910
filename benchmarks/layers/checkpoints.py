"""Saves and loads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import oneaccord as oa
import oneaccord_parallel as mp
from layers.turns import Action, Row, in_turns, medians


def checkpoints(group: oa.Group, rounds: int, mebibytes: int, folder: Path) -> tuple[list[Row], list[Row]]:
    """Measure saves and loads of one replicated tree by all ranks, and how long an asynchronous save keeps the program."""
    import torch
    import torch.distributed.checkpoint as dcp

    count = 16
    rows = (mebibytes << 20) // count // 4096
    tree = {f"layer{i}": torch.full((rows, 1024), float(i)) for i in range(count)}
    nbytes = sum(value.nbytes for value in tree.values())
    arrays = {name: value.numpy() for name, value in tree.items()}
    names = list(arrays)

    def fresh(_: str) -> None:
        group.barrier()
        if group.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            os.sync()
        group.barrier()

    def synced(path: Path, write: Callable[[Any], object]) -> None:
        with path.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())

    def bare() -> None:  # each rank its share, as one would who knows it all
        def write(file: Any) -> None:
            for name in names[group.rank :: group.world_size]:
                file.write(memoryview(arrays[name]).cast("B"))

        synced(folder / f"bare{group.rank}", write)
        group.barrier()

    def np_save() -> None:  # rank 0 alone, as most programs do
        if group.rank == 0:
            for name in names:
                synced(folder / f"{name}.npy", partial(np.save, arr=arrays[name]))
        group.barrier()

    writers: dict[str, Action] = {
        "oneaccord": lambda: mp.save(tree, folder / "ours", group, check=False),
        "torch DCP": lambda: dcp.save(tree, storage_writer=dcp.FileSystemWriter(folder / "dcp", sync_files=True)),
        "np.save on rank 0": np_save,
        "bare writes on all ranks": bare,
    }
    saved = medians(in_turns(writers, rounds, group, before=fresh))

    fresh("")
    for writer in writers.values():
        writer()
    into = {name: torch.zeros_like(value) for name, value in tree.items()}

    def np_load() -> None:
        for name in names:
            into[name].numpy()[...] = np.load(folder / f"{name}.npy")

    readers: dict[str, Action] = {
        "oneaccord": lambda: mp.load(folder / "ours", like=into, group=group),
        "torch DCP": lambda: dcp.load(into, storage_reader=dcp.FileSystemReader(folder / "dcp")),
        "np.save on rank 0": np_load,
    }
    loaded = medians(in_turns(readers, rounds, group))
    assert all(torch.equal(into[name], tree[name]) for name in names)
    found = [
        {"by": name, "save_gb_s": nbytes / seconds / 1e9, "load_gb_s": nbytes / loaded[name] / 1e9 if name in loaded else None}
        for name, seconds in saved.items()
    ]
    return found, stalls(group, rounds, tree, folder, fresh)


def stalls(group: oa.Group, rounds: int, tree: Any, folder: Path, fresh: Callable[[str], object]) -> list[Row]:
    """Measure how long an asynchronous save keeps the program, next to a copy of the tree."""
    import torch
    import torch.distributed.checkpoint as dcp

    pending: list[Any] = []
    number = iter(range(1_000_000))
    copies = {name: torch.empty_like(value) for name, value in tree.items()}

    def before(turn: str) -> None:
        for each in pending:
            each()
        pending.clear()
        fresh(turn)

    def ours() -> None:
        pending.append(saver.save(tree, step=next(number), check=False).wait)

    def theirs() -> None:
        writer = dcp.FileSystemWriter(folder / "dcp", sync_files=True)
        pending.append(dcp.async_save(tree, storage_writer=writer, process_group=background).result)

    def copy() -> None:
        for name, value in tree.items():
            copies[name].copy_(value)

    import torch.distributed as dist

    background = dist.new_group(backend="gloo")
    with mp.AsyncSaver(folder / "async", group, keep=1) as saver:
        found = medians(in_turns({"oneaccord": ours, "torch DCP": theirs, "a copy alone": copy}, rounds, group, before=before))
        before("")
    return [{"by": name, "stall_ms": seconds * 1e3} for name, seconds in found.items()]
