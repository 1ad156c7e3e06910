"""What the training layers cost, next to torch's: steps of data-parallel training, memory, checkpoints.

- step: a training step of one model in torch, by `mp.torch.data_parallel` and by torch's DistributedDataParallel over Gloo. Both live in
  the same two processes, with one thread each, and take turns. The overlap is 1 - (step - step alone) / (all_reduce alone): 1 where the
  communication costs nothing, because it runs beside the backward pass, and 0 where it costs all of its time.
- memory: the most bytes that a rank held in a step with Adam, counted, next to the formula.
- checkpoint: GB/s of a save with fsync, and of a load, next to torch's DCP, np.save and bare writes; how long an asynchronous save keeps the
  program waiting. They take turns as well, into one folder.

Usage: python benchmarks/parallel.py [-h] [--rounds N] [--backends NAME ...] [--folder DIR] [--mebibytes N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

import manyhands as mh
import manyhands_parallel as mp

RANKS = 2
LIMIT_S = 900.0
MODELS = {"8 layers of 1024": (8, 1024, 64), "96 layers of 96": (96, 96, 64)}
"""Layers, their width, and the samples of a rank's batch."""

Row = dict[str, Any]
Action = Callable[[], object]


def in_turns(
    actions: Mapping[str, Action], rounds: int, group: mh.Group, before: Action = lambda: None
) -> dict[str, list[float]]:
    """Call each action once a round, in an order that rotates and turns round; return the seconds of each call on the slowest rank."""
    names = list(actions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        turned = names[number % len(names) :] + names[: number % len(names)]
        for name in turned if number % 2 else reversed(turned):
            before()
            group.barrier()
            begun = time.perf_counter()
            actions[name]()
            lasted = float(group.all_reduce(time.perf_counter() - begun, op="max"))
            if number:  # the first round is to warm up
                seconds[name].append(lasted)
    return seconds


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each."""
    return {name: statistics.median(each) for name, each in seconds.items()}


# Steps of training.


def model_of(layers: int, width: int) -> Any:
    """Return a stack of linear layers in torch, with the same weights each time."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(*(part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())))


def steps(groups: Mapping[str, mh.Group], group: mh.Group, rounds: int) -> list[Row]:
    """Measure a step of each model: alone, by torch over Gloo, and by manyhands over each backend."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rows = []
    for name, (layers, width, batch) in MODELS.items():
        x = torch.randn(batch, width, generator=torch.Generator().manual_seed(group.rank))

        def step(model: Any, call: Any, x: Any) -> None:
            model.zero_grad(set_to_none=True)
            call(x).square().mean().backward()

        alone = model_of(layers, width)
        theirs_inside = model_of(layers, width)
        theirs = DistributedDataParallel(theirs_inside, gradient_as_bucket_view=True)
        flat = torch.zeros(sum(p.numel() for p in alone.parameters()))
        actions: dict[str, Action] = {
            "alone": partial(step, alone, alone, x),
            "gloo": partial(step, theirs_inside, theirs, x),
            "gloo, all_reduce": partial(dist.all_reduce, flat),
        }
        models = {}
        for backend, own in groups.items():
            models[backend] = model_of(layers, width)
            mp.torch.data_parallel(models[backend], own)
            actions[backend] = partial(step, models[backend], models[backend], x)
            buffer = torch.from_numpy(own.empty(flat.shape, np.float32))
            buffer.zero_()
            actions[f"{backend}, all_reduce"] = partial(own.all_reduce, buffer, out=buffer, reproducible=True)
        found = medians(in_turns(actions, rounds, group))
        for backend in groups:
            for ours, its in zip(models[backend].parameters(), theirs_inside.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, its.grad)
        for who in ("gloo", *groups):
            whole, apart = found[who], found[f"{who}, all_reduce"]
            rows.append(
                {
                    "model": name,
                    "by": "torch DDP, gloo" if who == "gloo" else f"manyhands, {who}",
                    "step_ms": whole * 1e3,
                    "alone_ms": found["alone"] * 1e3,
                    "all_reduce_ms": apart * 1e3,
                    "overlap": 1 - (whole - found["alone"]) / apart,
                    "of_gloo": whole / found["gloo"],
                }
            )
    return rows


# Memory.


def memory(group: mh.Group) -> list[Row]:
    """Count what a rank holds at most in a step with Adam, and compare it with the formula."""
    units, rows_of, n = 8, 256, group.world_size
    params = {f"layer{i}": {"w": np.ones((rows_of, rows_of), np.float32)} for i in range(units)}
    unit = rows_of * rows_of
    whole = units * unit
    formulas: dict[Literal["none", "grad", "full"], int] = {
        "none": 16 * whole,
        "grad": 4 * whole + 12 * whole // n + 4 * unit,
        "full": 16 * whole // n + 4 * 2 * unit + 4 * unit,
    }
    found = []
    for strategy, formula in formulas.items():
        store = mp.Sharded(params, group, strategy=strategy, prefetch=1)
        adam = mp.Adam(lr=1e-3)
        for _ in range(3):
            store.memory.reset_peak()
            with store.step(weight=1):
                for name in params:
                    with store.unit(name):
                        pass
                for name in reversed(params):
                    with store.unit(name) as weights:
                        gradients = {key: np.ones_like(value) for key, value in weights.items()}
                    store.reduce(name, gradients)
            store.update(adam)
        found.append({"strategy": strategy, "peak_bytes": store.memory.peak, "formula_bytes": formula})
    return found


# Checkpoints.


def checkpoints(group: mh.Group, rounds: int, mebibytes: int, folder: Path) -> tuple[list[Row], list[Row]]:
    """Measure saves and loads of one replicated tree by all ranks, and how long an asynchronous save keeps the program."""
    import torch
    import torch.distributed.checkpoint as dcp

    count = 16
    rows = (mebibytes << 20) // count // 4096
    tree = {f"layer{i}": torch.full((rows, 1024), float(i)) for i in range(count)}
    nbytes = sum(value.nbytes for value in tree.values())
    arrays = {name: value.numpy() for name, value in tree.items()}
    names = list(arrays)

    def fresh() -> None:
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
        "manyhands": lambda: mp.save(tree, folder / "ours", group),
        "torch DCP": lambda: dcp.save(tree, storage_writer=dcp.FileSystemWriter(folder / "dcp", sync_files=True)),
        "np.save on rank 0": np_save,
        "bare writes on all ranks": bare,
    }
    saved = medians(in_turns(writers, rounds, group, before=fresh))

    fresh()
    for writer in writers.values():
        writer()
    into = {name: torch.zeros_like(value) for name, value in tree.items()}

    def np_load() -> None:
        for name in names:
            into[name].numpy()[...] = np.load(folder / f"{name}.npy")

    readers: dict[str, Action] = {
        "manyhands": lambda: mp.load(folder / "ours", like=into, group=group),
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


def stalls(group: mh.Group, rounds: int, tree: Any, folder: Path, fresh: Action) -> list[Row]:
    """Measure how long an asynchronous save keeps the program, next to a copy of the tree."""
    import torch
    import torch.distributed.checkpoint as dcp

    pending: list[Any] = []
    number = iter(range(1_000_000))
    copies = {name: torch.empty_like(value) for name, value in tree.items()}

    def before() -> None:
        for each in pending:
            each()
        pending.clear()
        fresh()

    def ours() -> None:
        pending.append(saver.save(tree, step=next(number)).wait)

    def theirs() -> None:
        writer = dcp.FileSystemWriter(folder / "dcp", sync_files=True)
        pending.append(dcp.async_save(tree, storage_writer=writer, process_group=background).result)

    def copy() -> None:
        for name, value in tree.items():
            copies[name].copy_(value)

    import torch.distributed as dist

    background = dist.new_group(backend="gloo")
    with mp.AsyncSaver(folder / "async", group, keep=1) as saver:
        found = medians(in_turns({"manyhands": ours, "torch DCP": theirs, "a copy alone": copy}, rounds, group, before=before))
        before()
    return [{"by": name, "stall_ms": seconds * 1e3} for name, seconds in found.items()]


# What starts, and what tells.


def as_rank(options: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 writes what was found."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with mh.init(backend=options.backends[0]) as group:
        where = group.broadcast_object(tempfile.mkdtemp() if group.rank == 0 else None)
        dist.init_process_group("gloo", init_method=f"file://{where}/store", rank=group.rank, world_size=group.world_size)
        parts, pairs = checkpoints(group, options.rounds, options.mebibytes, Path(options.folder or where) / "checkpoints")
        found = {
            "steps": steps({options.backends[0]: group}, group, options.rounds),
            "memory": memory(group),
            "checkpoints": parts,
            "stalls": pairs,
        }
        dist.destroy_process_group()
        if group.rank == 0:
            shutil.rmtree(where)
            Path(options.found).write_text(json.dumps(found), encoding="utf-8")


def table(rows: Sequence[Row]) -> str:
    """Return rows as a table in Markdown."""

    def text(value: Any) -> str:
        return (
            ""
            if value is None
            else f"{value:,.2f}"
            if isinstance(value, float)
            else f"{value:,}"
            if isinstance(value, int)
            else value
        )

    heads = list(rows[0])
    lines = [f"| {' | '.join(head.replace('_', ' ') for head in heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join([*lines, *(f"| {' | '.join(text(row[head]) for head in heads)} |" for row in rows)])


def main() -> int:
    """Start the ranks, once for each backend, and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="timed turns of each contender (15)")
    parser.add_argument("--backends", nargs="+", default=["shm", "tcp"], metavar="NAME", help="backends of manyhands (shm tcp)")
    parser.add_argument("--folder", metavar="DIR", help="where checkpoints go; by default the folder of temporary files")
    parser.add_argument("--mebibytes", type=int, default=256, metavar="N", help="the size of the checkpoint (256)")
    parser.add_argument("--json", metavar="FILE", help="write all that was found there")
    parser.add_argument("--found", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.found:
        as_rank(options)
        return 0
    results: dict[str, Any] = {}
    for backend in options.backends:
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder, "found.json")
            same = ["--rounds", str(options.rounds), "--backends", backend, "--mebibytes", str(options.mebibytes)]
            if options.folder:
                same += ["--folder", options.folder]
            command = [
                sys.executable,
                "-P",
                "-m",
                "manyhands",
                "run",
                "--no-prefix",
                "-n",
                str(RANKS),
                "--backend",
                backend,
                __file__,
            ]
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            done = subprocess.run([*command, *same, "--found", str(found)], env=environ, timeout=LIMIT_S, check=False)
            if done.returncode:
                return done.returncode
            results[backend] = json.loads(found.read_text(encoding="utf-8"))
        for topic, rows in results[backend].items():
            print(f"\n{topic}, over {backend}\n\n{table(rows)}")
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    versions = {name: version(name) for name in ("manyhands-core", "torch", "numpy")}
    if options.json:
        whole = {"date": datetime.now(UTC).date().isoformat(), "machine": machine, "versions": versions, "found": results}
        Path(options.json).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
