"""What the training layers cost, next to torch's.

- steps: a training step of one model in torch, by `mp.torch.data_parallel` and by torch's DistributedDataParallel over Gloo. Both live in
  the same two processes, with one thread each, and take turns. The overlap is 1 - (step - step alone) / (all_reduce alone): 1 where the
  communication costs nothing, because it runs beside the backward pass, and 0 where it costs all of its time.
- memory: the most bytes that a rank held in a step with Adam, counted, next to the formula.
- checkpoints: GB/s of a save with fsync, and of a load, next to torch's DCP, np.save and bare writes; how long an asynchronous save keeps the
  program waiting. They take turns as well, into one folder.
- pipelines: for each schedule the share of the time in which ranks were idle, between the first pass and the last one of any of them, next to the
  exact fraction of the plan for the times that passes took; the bytes of activations that each rank held at most, counted until they are freed,
  next to the plan's number times the size of one. (What zb_h1 keeps beside them between the halves of a backward pass does not count.) A
  pass is a pause, which needs no processor, or where there are enough of them a product of matrices. Next to torch's schedules over
  Gloo with the same passes.
- redistribute: Shard(0) -> Shard(1) of a matrix, next to torch's DTensor over Gloo, which gathers all of it and takes a part. What each rank sends
  is counted by the kernel where it goes over TCP.
- calls: of a function on another rank that returns its argument, next to torch.distributed.rpc over TensorPipe.

Results of contenders are compared. Times are medians, of the slowest rank.

Usage: python benchmarks/parallel.py [-h] [--rounds N] [--backends NAME ...] [--ranks N ...] [--topics NAME ...] [--folder DIR] [--mebibytes N]
                                     [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from layers.checkpoints import checkpoints
from layers.pipeline import pipelines
from layers.redistribute import redistribute
from layers.rpc import calls
from layers.training import memory, steps
from layers.turns import Row

import oneaccord as oa

TOPICS = ("steps", "memory", "checkpoints", "pipelines", "redistribute", "calls")
OF_ANY_RANKS = ("pipelines", "redistribute")
"""The others are measured with two."""
LIMIT_S = 900.0


def as_rank(options: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 writes what was found."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    (backend,) = options.backends
    rounds, topics = options.rounds, options.topics
    found: dict[str, list[Row]] = {}
    with oa.init(backend=backend) as group:
        where = Path(group.broadcast_object(tempfile.mkdtemp() if group.rank == 0 else None))
        dist.init_process_group("gloo", init_method=f"file://{where}/store", rank=group.rank, world_size=group.world_size)
        if "checkpoints" in topics:
            folder = Path(options.folder or where) / "checkpoints"
            found["checkpoints"], found["stalls"] = checkpoints(group, rounds, options.mebibytes, folder)
        if "steps" in topics:
            found["steps"] = steps({backend: group}, group, rounds)
        if "memory" in topics:
            found["memory"] = memory(group)
        if "pipelines" in topics:
            found["pipelines"] = pipelines(group, backend, rounds)
        if "redistribute" in topics:
            found["redistribute"] = redistribute(group, backend, rounds)
        if "calls" in topics:
            found["calls"] = calls(group, backend, rounds, where)
        dist.destroy_process_group()
        group.barrier()
        if group.rank == 0:
            shutil.rmtree(where)
            Path(options.found).write_text(json.dumps(found), encoding="utf-8")


def run(options: argparse.Namespace, backend: str, ranks: int, topics: Sequence[str]) -> dict[str, list[Row]]:
    """Start ranks, and return what they found."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.json")
        launch = ["-P", "-m", "oneaccord", "run", "--no-prefix", "-n", str(ranks), "--backend", backend, __file__]
        same = ["--rounds", str(options.rounds), "--backends", backend, "--mebibytes", str(options.mebibytes)]
        if options.folder:
            same += ["--folder", options.folder]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, *launch, *same, "--topics", *topics, "--found", str(found)]
        done = subprocess.run(command, env=environ, timeout=LIMIT_S, check=False)
        if done.returncode:
            sys.exit(done.returncode)
        rows: dict[str, list[Row]] = json.loads(found.read_text(encoding="utf-8"))
        return rows


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
            else ", ".join(map(text, value))
            if isinstance(value, list)
            else value
        )

    heads = list(rows[0])
    lines = [f"| {' | '.join(head.replace('_', ' ') for head in heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join([*lines, *(f"| {' | '.join(text(row[head]) for head in heads)} |" for row in rows)])


def main() -> int:
    """Start the ranks, for each backend and each number of them, and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="timed turns of each contender (15)")
    parser.add_argument("--backends", nargs="+", default=["shm", "tcp"], metavar="NAME", help="backends of oneaccord (shm tcp)")
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[2, 4], metavar="N", help="of pipelines and redistribute (2 4); others have 2"
    )
    parser.add_argument(
        "--topics", nargs="+", default=TOPICS, choices=TOPICS, metavar="NAME", help=f"{', '.join(TOPICS)} (all)"
    )
    parser.add_argument("--folder", metavar="DIR", help="where checkpoints go; by default the folder of temporary files")
    parser.add_argument("--mebibytes", type=int, default=256, metavar="N", help="the size of the checkpoint (256)")
    parser.add_argument("--json", metavar="FILE", help="write all that was found there")
    parser.add_argument("--found", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.found:
        as_rank(options)
        return 0
    results: dict[str, dict[str, list[Row]]] = {}
    for backend in options.backends:
        found = results[backend] = {}
        for ranks in sorted({2, *options.ranks}):
            topics = [topic for topic in options.topics if (ranks in options.ranks if topic in OF_ANY_RANKS else ranks == 2)]
            if topics:
                for topic, rows in run(options, backend, ranks, topics).items():
                    found[topic] = found.get(topic, []) + rows
        for topic, rows in found.items():
            print(f"\n{topic}, over {backend}\n\n{table(rows)}")
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    versions = {name: version(name) for name in ("oneaccord-core", "torch", "numpy")}
    if options.json:
        whole = {"date": datetime.now(UTC).date().isoformat(), "machine": machine, "versions": versions, "found": results}
        Path(options.json).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
