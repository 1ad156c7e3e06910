"""Worlds of real processes over the peers, MPI, Gloo, UCX and UCC: programs for every rank, and what starts them.

A program asserts on each rank what holds there; a world that ends well has held all of it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

__all__ = [
    "COLLECTIVES",
    "FAILING",
    "GROUPS",
    "LISTENING",
    "QUIET",
    "mismatched",
    "names_both_calls",
    "real_ucc",
    "run_ranks",
    "well",
]

_PREAMBLE = """
import faulthandler, os, signal, sys, threading, time
import numpy as np
import oneaccord as oa
faulthandler.dump_traceback_later(50, exit=True)
"""

COLLECTIVES = """
import ml_dtypes

NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 longdouble complex64 complex128 clongdouble"
DTYPES = [np.dtype(name) for name in NAMES.split()] + [np.dtype(ml_dtypes.bfloat16)]
OPS = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
       "xor": np.bitwise_xor}

def data(rank, count, dtype):
    numbers = (np.arange(count) * 7 + rank * 3) % 4  # small, so that every sum and product is exact
    return (numbers % 2 == 1) if dtype == bool else numbers.astype(dtype)

def combined(op, arrays):
    total = arrays[0]
    for array in arrays[1:]:
        total = OPS[op](total, array).astype(array.dtype)
    return total

def has(op, dtype):
    kind = "f" if dtype.kind == "V" else dtype.kind
    return kind in {"sum": "iufc", "product": "iufc", "min": "biuf", "max": "biuf", "and": "biu", "or": "biu", "xor": "biu"}[op]

def same(got, expected, what):
    if expected is None:
        assert got is None, (what, got)
        return
    assert got.dtype == expected.dtype and got.shape == expected.shape, (what, got.dtype, got.shape, expected.shape)
    assert np.array_equal(got, expected), (what, got, expected)

with oa.init(timeout_s=30) as group:
    rank, size = group.rank, group.world_size
    for dtype in DTYPES:
        for count in (0, 1, 5 * size) + ((20_000 * size,) if dtype.name in ("float32", "uint64", "bfloat16") else ()):
            every = [data(peer, count, dtype) for peer in range(size)]
            mine = every[rank]
            for op in OPS:
                if not has(op, dtype):
                    continue
                total = combined(op, every)
                same(group.all_reduce(mine, op=op), total, ("all_reduce", op, dtype))
                if count < 1000:
                    inout = mine.copy()
                    assert group.all_reduce(inout, op=op, out=inout) is inout
                    same(inout, total, ("all_reduce in place", op, dtype))
                    got = group.reduce(mine, op=op, root=size - 1)
                    same(got, total if rank == size - 1 else None, ("reduce", op, dtype))
                    same(mine, data(rank, count, dtype), ("reduce leaves its input alone", op, dtype))
                    if count % size == 0:
                        part = total[rank * count // size : (rank + 1) * count // size]
                        same(group.reduce_scatter(mine, op=op), part, ("reduce_scatter", op, dtype))
            if has("sum", dtype) and dtype.kind in "fcV" and count:
                mean = group.all_reduce(mine, op="mean")
                exact = sum(array.astype(complex) for array in every) / size
                assert mean.dtype == dtype and np.allclose(mean.astype(complex), exact, rtol=1e-2 if dtype.itemsize == 2 else 1e-6)
            same(group.broadcast(mine, root=1), every[1], ("broadcast", dtype))
            inout = mine.copy()
            group.broadcast(inout, root=0, out=inout)
            same(inout, every[0], ("broadcast in place", dtype))
            same(group.all_gather(mine), np.concatenate(every), ("all_gather", dtype))
            got = group.gather(mine, root=1)
            same(got, np.concatenate(every) if rank == 1 else None, ("gather", dtype))
            got = group.scatter(np.concatenate(every) if rank == 1 else None, root=1)
            same(got, mine, ("scatter", dtype))
            if count % size == 0:
                rows = np.concatenate([array.reshape(size, -1)[rank] for array in every])
                same(group.all_to_all(mine), rows, ("all_to_all", dtype))
        group.barrier()
    # A matrix, uneven counts, a read-only input, reproducible bits, and a NaN that no reduction may lose.
    matrix = np.arange(12.0).reshape(3, 4) + rank
    same(group.all_reduce(matrix), sum(np.arange(12.0).reshape(3, 4) + peer for peer in range(size)), "matrix")
    counts = [peer + 1 for peer in range(size)]
    ragged = [np.full(peer + 1, peer, np.float32) for peer in range(size)]
    same(group.all_gather(ragged[rank], counts=counts), np.concatenate(ragged), "uneven all_gather")
    same(group.reduce_scatter(np.concatenate(ragged), counts=counts), ragged[rank] * np.float32(size), "uneven reduce_scatter")
    locked = data(rank, 6, np.dtype(np.float32))
    locked.flags.writeable = False
    same(group.all_reduce(locked), combined("sum", [data(peer, 6, np.dtype(np.float32)) for peer in range(size)]), "read-only")
    same(group.broadcast(locked, root=0), data(0, 6, np.dtype(np.float32)), "read-only broadcast")
    values = np.random.default_rng(rank).standard_normal(1001)
    same(group.all_reduce(values, reproducible=True), group.all_reduce(values, reproducible=True), "reproducible")
    for op in ("min", "max"):
        assert np.isnan(group.all_reduce(np.array([1.0, np.nan if rank == 1 else 2.0]), op=op)[1]), op
    same(group.all_reduce(np.array([3, 5]) + rank, op=np.lcm), np.lcm.reduce([np.array([3, 5]) + peer for peer in range(size)]), "ufunc")
    bits = group.all_gather(np.frombuffer(group.all_reduce(values).tobytes(), np.uint8)).reshape(size, -1)
    assert (bits == bits[0]).all(), "all ranks get the same bits"
    print("all is well")
"""

GROUPS = """
with oa.init(timeout_s=30) as group:
    rank, size = group.rank, group.world_size
    for turn in range(3):
        half = group.split(color=rank % 2, key=-rank)
        mine = sorted((peer for peer in range(size) if peer % 2 == rank % 2), reverse=True)
        assert half.world_size == len(mine) and mine[half.rank] == rank
        assert half.all_reduce(np.array([rank]))[0] == sum(mine)
        assert half.all_gather(np.full(100_000, rank))[:: 100_000].tolist() == mine
        half.close()
    again = group.split(color=0)
    assert again.all_reduce(np.ones(3)).tolist() == [size] * 3
    works = [group.all_reduce_async(np.full(1000, 1.0)), again.all_reduce_async(np.full(1000, 2.0))]
    assert [work.wait()[0] for work in works] == [size, 2 * size]
# A group that was closed makes way for another one.
with oa.init(timeout_s=30) as group:
    assert group.all_reduce(np.ones(2)).tolist() == [group.world_size] * 2
    print("all is well")
"""

LISTENING = """
group = oa.init()
group.all_reduce(np.ones(3))
table = open("/proc/net/tcp").read().splitlines()[1:] + open("/proc/net/tcp6").read().splitlines()[1:]
mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
listening = [line.split()[1].split(":")[0] for line in table if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in mine]
assert listening and set(listening) <= {"0100007F", "0000000000000000FFFF00000100007F"}, listening
group.close()
print("all is well")
"""
"""The library listens where the ranks reach each other, and nowhere else."""

QUIET = """
import gc

def left():
    gc.collect()
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    names = [os.readlink(path) for path in paths if os.path.exists(path)]
    return len(names), [thread.name for thread in threading.enumerate() if thread.name.startswith("oneaccord-uc")]

for turn in range(3):
    with oa.init() as group:
        group.all_reduce(np.ones(3))
        if group.rank == 0:
            time.sleep(1)
        before = time.process_time()
        group.all_reduce(np.ones(3))
        assert time.process_time() - before < 0.5
    if turn:
        assert left() == (after[0], []), (left(), after)
    after = left()
print("all is well")
"""
"""A wait burns no core, and closing leaves nothing behind."""

FAILING = """
def attempt(call, *args, **kwargs):
    started = time.monotonic()
    try:
        call(*args, **kwargs)
        print(f"returned after {time.monotonic() - started:.1f} s")
    except oa.OneAccordError as error:
        print(f"{type(error).__name__} after {time.monotonic() - started:.1f} s: {error}")
        raise

group = oa.init(timeout_s=20)
rank, size = group.rank, group.world_size
group.barrier()
try:
    group.all_reduce(np.ones(1000))
except oa.OneAccordError:  # others may have left this call, and failed in the next
    attempt(group.all_reduce, np.ones(1))
"""
"""Put in front of a program of ranks that fail: `attempt` tells how a call ended, and for how long it went on."""


def run_ranks(
    tmp_path: Path,
    backend: str,
    program: str,
    ranks: int,
    *,
    command: list[str] | None = None,
    options: tuple[str, ...] = (),
    timeout_s: float = 55,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program on every rank; return how the job ended.

    Parameters
    ----------
    tmp_path
        Where the ranks run.
    backend
        The backend's name.
    program
        What each rank runs.
    ranks
        How many there are.
    command
        What stands in front of a rank's own command, instead of ``oneaccord run``.
    options
        Options of ``oneaccord run``.
    timeout_s
        What no test exceeds.
    variables
        Variables of the ranks.
    """
    script = tmp_path / "program.py"
    script.write_text(_PREAMBLE + textwrap.dedent(program), encoding="utf-8")
    foreign = ("ONEACCORD_", "SLURM_", "PMI", "OMPI_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environ |= {"ONEACCORD_BACKEND": backend, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"} | variables
    start = (
        [sys.executable, "-m", "oneaccord", "run", "-n", str(ranks), *options]
        if command is None
        else [*command, sys.executable]
    )
    return subprocess.run(
        [*start, str(script)], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def well(done: subprocess.CompletedProcess[str], ranks: int) -> None:
    """Check that all ranks of a program ended well."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all is well") == ranks, done.stdout + done.stderr


def mismatched(done: subprocess.CompletedProcess[str]) -> None:
    """Check that a mismatch among three ranks was found on all of them, and not come upon by the deadline."""
    said = re.findall(r"CollectiveMismatchError after ([0-9.]+) s", done.stdout)
    assert (done.returncode, len(said)) == (1, 3), done.stdout + done.stderr
    assert max(map(float, said)) < 20


def names_both_calls(done: subprocess.CompletedProcess[str]) -> None:
    """Check that its first line says what both ranks did, as on every other backend."""
    who = r"rank [012] is in \w+\(.*\) #2, and rank [012] (?:is in|in|sent it a message of) \w+\(.*\) #2"
    assert len(re.findall(rf"CollectiveMismatchError after .*{who}", done.stdout)) == 3, done.stdout
    ranks = re.findall(r"^\[.\]   ranks? [0-9, -]+: .*\(.*\) #2", done.stdout, re.MULTILINE)
    assert len(set(ranks)) >= 2, done.stdout


@contextmanager
def real_ucc() -> Iterator[None]:
    """Let processes find the wheel's UCX, which UCC may need; skip the test where UCC cannot be loaded."""
    spec = find_spec("libucx")
    wheel = [str(Path(folder) / "lib") for folder in (spec and spec.submodule_search_locations) or ()]
    folders = [*filter(None, [os.environ.get("LD_LIBRARY_PATH")]), *wheel]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", os.pathsep.join(folders))
        if reason := _without_ucc():
            pytest.skip(reason)
        yield


@cache
def _without_ucc() -> str:
    """Return why UCC cannot be loaded, empty where it can."""
    program = "from oneaccord_ucc.library import load; load()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
