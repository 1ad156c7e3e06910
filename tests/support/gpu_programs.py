"""Programs for ranks with GPUs: each asserts on every rank what holds there.

They run on real GPUs (`tests/gpu`), and on fakes of CUDA, CuPy and NCCL (`test_gpu_programs`). Each takes a group and the module of its arrays:
CuPy, a stand-in for it, or, where nothing of a GPU is asked for, NumPy. All of them hold for 1, 2 and 4 ranks, whose means are exact.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oneaccord as oa
from oneaccord.api import Group
from support.gpu_memory import free_bytes, settled
from support.gpu_ranks import FOLDER

__all__ = [
    "accumulation",
    "batches",
    "capture",
    "collectives",
    "deadline",
    "failure_seen",
    "going_on",
    "host",
    "killed",
    "layouts",
    "memory",
    "messages",
    "mismatch",
    "refusals",
    "registered",
    "routes",
    "splits",
    "stream_order",
    "tensors",
    "through_the_host",
    "training",
    "works",
]

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "uint32", "int64", "uint64")
OTHERS = ("bool", "complex64", "int16")
_OPS = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
_KINDS = {"b": ("and", "or", "min", "max"), "c": ("sum", "mean"), "f": ("sum", "product", "min", "max", "mean")}
_PATIENCE_S = 30.0
MANY = 1 << 18
"""So many elements that a GPU is busy with them when the host goes on."""


def host(array: Any) -> np.ndarray[Any, Any]:
    """Return a copy on the host, once the current stream is done."""
    return np.asarray(array.get() if hasattr(array, "get") else array)


def dtype_of(name: str, xp: Any) -> np.dtype[Any] | None:
    """Return a dtype; None where it, or an array of it, is not to be had here."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes

        dtype = np.dtype(ml_dtypes.bfloat16)
        xp.empty(1, dtype)
    except (ImportError, TypeError, ValueError):
        return None
    return dtype


def numbers(rank: int, count: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return numbers so small that every sum, product and mean of them is exact."""
    found = (np.arange(count) * 7 + rank * 3) % 4
    return found % 2 == 1 if dtype.kind == "b" else found.astype(dtype)


def combined(op: str, arrays: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return what a reduction gives."""
    dtype = arrays[0].dtype
    if op == "mean":
        wide = np.complex128 if dtype.kind == "c" else np.float64
        total: np.ndarray[Any, Any] = sum(array.astype(wide) for array in arrays) / len(arrays)  # type: ignore[assignment]
        return total.astype(dtype)
    return functools.reduce(lambda one, other: _OPS[op](one, other).astype(dtype), arrays)


def same(got: Any, expected: np.ndarray[Any, Any] | None, *what: object) -> None:
    """Assert that a result is an array, or none."""
    if expected is None:
        assert got is None, what
        return
    found = host(got)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), (what, found.dtype, found.shape, expected.shape)
    assert np.array_equal(found, expected), (what, found, expected)


# What calls give.


def collectives(group: Group, xp: Any, *names: str) -> list[str]:
    """Make every collective with arrays of every dtype, even and uneven; return the dtypes that are not to be had."""
    left_out = []
    for name in names or (*DTYPES, *OTHERS):
        dtype = dtype_of(name, xp)
        if dtype is None:
            left_out.append(name)
            continue
        for count in (0, 1, 3, *((20_000,) if name == "float32" else ())):
            _moves(group, xp, dtype, count)
            if name != "int16":
                _reductions(group, xp, dtype, count)
        if name == "int16":
            with pytest.raises(oa.UnsupportedError, match="int32"):
                group.all_reduce(xp.asarray(numbers(group.rank, 3, dtype)))
    group.synchronize()
    group.barrier()
    return left_out


def _moves(group: Group, xp: Any, dtype: np.dtype[Any], count: int) -> None:
    rank, size = group.rank, group.world_size
    every = [numbers(each, count * size, dtype) for each in range(size)]
    parts = [[array[each * count : (each + 1) * count] for each in range(size)] for array in every]
    mine, last = xp.asarray(every[rank]), size - 1
    for root in {0, last}:
        same(group.broadcast(mine, root), every[root], "broadcast", dtype)
        same(group.gather(mine, root), np.concatenate(every) if rank == root else None, "gather", dtype)
        same(group.scatter(mine if rank == root else None, root), parts[root][rank], "scatter", dtype)
    same(group.all_gather(mine), np.concatenate(every), "all_gather", dtype)
    same(group.all_to_all(mine), np.concatenate([part[rank] for part in parts]), "all_to_all", dtype)
    same(mine, every[rank], "inputs stay as they are", dtype)
    counts = [count + each for each in range(size)]
    blocks = [numbers(each, counts[each], dtype) for each in range(size)]
    joined, block = np.concatenate(blocks), xp.asarray(blocks[rank])
    same(group.all_gather(block, counts=counts), joined, "uneven all_gather", dtype)
    same(group.gather(block, last, counts=counts), joined if rank == last else None, "uneven gather", dtype)
    same(group.all_gather(block, uneven=True), joined, "all_gather of any lengths", dtype)
    same(group.gather(block, last, uneven=True), joined if rank == last else None, "gather of any lengths", dtype)
    whole = xp.asarray(joined) if rank == last else None
    same(group.scatter(whole, last, counts=counts), blocks[rank], "uneven scatter", dtype)
    sent = [numbers(each, sum(counts), dtype) for each in range(size)]
    start = sum(counts[:rank])
    received = np.concatenate([array[start : start + counts[rank]] for array in sent])
    same(group.all_to_all(xp.asarray(sent[rank]), send_counts=counts), received, "uneven all_to_all", dtype)


def _reductions(group: Group, xp: Any, dtype: np.dtype[Any], count: int) -> None:
    rank, size = group.rank, group.world_size
    every = [numbers(each, count * size, dtype) for each in range(size)]
    counts = [count + each for each in range(size)]
    ragged = [numbers(each, sum(counts), dtype) for each in range(size)]
    for op in _KINDS.get("f" if dtype.kind == "V" else dtype.kind, ("sum", "product", "min", "max")):
        total, mine = combined(op, every), xp.array(every[rank])  # a copy, also of NumPy
        same(group.all_reduce(mine, op), total, "all_reduce", op, dtype)
        same(group.reduce(mine, op, size - 1), total if rank == size - 1 else None, "reduce", op, dtype)
        part = total[rank * count : (rank + 1) * count]
        same(group.reduce_scatter(mine, op), part, "reduce_scatter", op, dtype)
        same(mine, every[rank], "inputs stay as they are", op, dtype)
        out = xp.asarray(np.zeros_like(total))
        assert group.all_reduce(mine, op, out=out) is out
        same(out, total, "all_reduce into out", op, dtype)
        assert group.all_reduce(mine, op, out=mine) is mine
        same(mine, total, "all_reduce in place", op, dtype)
        start = sum(counts[:rank])
        expected = combined(op, ragged)[start : start + counts[rank]]
        got = group.reduce_scatter(xp.asarray(ragged[rank]), op, counts=counts)
        same(got, expected, "uneven reduce_scatter", op, dtype)


def layouts(group: Group, xp: Any) -> None:
    """Give and take arrays that are not C-contiguous."""
    data = np.arange(12, dtype=np.float32).reshape(3, 4)
    total = data * group.world_size
    turned = xp.asarray(np.ascontiguousarray(data.T)).T
    same(group.all_reduce(turned), total, "transposed")
    same(group.all_reduce(xp.asarray(np.repeat(data, 2, axis=1))[:, ::2]), total, "strided")
    out = xp.asarray(np.zeros((4, 3), np.float32)).T
    assert group.all_reduce(turned, out=out) is out
    same(out, total, "into a transposed array")
    same(group.all_reduce(xp.asarray(np.float32(3))), np.full((), 3 * group.world_size, np.float32), "without dimensions")


def refusals(group: Group, xp: Any) -> None:
    """Ask for what NCCL does not do, and go on."""
    x = xp.asarray(np.ones(3, np.float32))
    with pytest.raises(oa.UnsupportedError, match="reproducible"):
        group.all_reduce(x, reproducible=True)
    with pytest.raises(oa.UnsupportedError, match="bitwise"):
        group.all_reduce(xp.asarray(np.ones(3, np.int32)), "xor")
    with pytest.raises(oa.UnsupportedError, match=r"op=Op\(larger\): use one of"):
        group.all_reduce(x, oa.Op(np.maximum, name="larger"))
    for call in (group.scan, group.exscan):
        with pytest.raises(oa.UnsupportedError, match="not support arrays on GPUs"):
            call(x)
    with pytest.raises(oa.LayoutError, match="out="):
        group.all_reduce(x, out=np.zeros(3, np.float32))
    same(group.all_reduce(x), np.full(3, group.world_size, np.float32))


def messages(group: Group, xp: Any) -> None:
    """Send to the next rank, and from the first to the last."""
    rank, size = group.rank, group.world_size
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (1, 513, 100_000):
        for _ in range(2):
            out = xp.asarray(np.zeros(count, np.float64))
            got = group.sendrecv(xp.asarray(np.full(count, rank, np.float64)), after, before, out=out)
            same(got, np.full(count, before, np.float64))
        mine = xp.asarray(np.full(count, rank, np.float64))
        left, right = (before if rank else None), (after or None)
        same(group.sendrecv(mine, right, left, out=xp.asarray(np.zeros(count))), np.full(count, left or 0, np.float64))
        assert group.sendrecv(mine, None, None, out=out) is out
        assert group.sendrecv(mine, None, None) is None
        copy = group.sendrecv(mine, rank, rank)
        mine += 1
        same(copy, np.full(count, rank, np.float64))
        line = xp.asarray(np.arange(count + 1.0))
        group.sendrecv(line[:-1], rank, rank, out=line[1:])
        same(line, np.concatenate([[0.0], np.arange(float(count))]))
    square = xp.asarray(np.arange(9.0).reshape(3, 3))
    same(group.sendrecv(square, rank, rank, out=square.T), np.arange(9.0).reshape(3, 3))
    if size > 1 and rank == 0:
        group.send_async(xp.asarray(np.full(7, 5, np.int32)), size - 1).synchronize()
    if size > 1 and rank == size - 1:
        same(group.recv(0, out=xp.asarray(np.zeros(7, np.int32))), np.full(7, 5, np.int32))
    group.barrier()


def splits(group: Group, xp: Any) -> None:
    """Reduce in groups of some ranks, and in that of all in between."""
    rank, size = group.rank, group.world_size
    x = xp.asarray(np.full(5, rank + 1, np.float32))
    with group.split(rank % 2) as half:
        same(half.all_reduce(x), np.full(5, sum(range(rank % 2 + 1, size + 1, 2)), np.float32))
        same(group.all_reduce(x), np.full(5, size * (size + 1) / 2, np.float32))
    same(group.all_reduce(x, "max"), np.full(5, size, np.float32))


def batches(group: Group, xp: Any) -> None:
    """Make several calls as one."""
    size = group.world_size
    for _ in range(2):
        arrays = [xp.asarray(np.full((n, 2), group.rank + 1, np.float32)) for n in (1, 1000, 3)]
        with group.coalesce() as batch:
            made = [batch.all_reduce(array, out=array if n == 1 else None) for n, array in enumerate(arrays)]
        for work, array in zip(made, arrays, strict=True):
            same(work.wait(), np.full(array.shape, size * (size + 1) / 2, np.float32))
        assert made[1].wait() is arrays[1]


def routes(group: Group, xp: Any) -> None:
    """Send what lies on the host and objects over one backend, and what lies on a GPU over another."""
    size = group.world_size
    for _ in range(3):
        assert group.all_reduce(np.ones(1000)).tolist() == [size] * 1000
        same(group.all_reduce(xp.asarray(np.ones(1000))), np.full(1000, float(size)))
        assert group.broadcast_object({"rank": group.rank}, root=size - 1) == {"rank": size - 1}
    assert type(group.all_reduce(np.ones(3))) is np.ndarray
    assert type(group.all_reduce(xp.asarray(np.ones(3)))) is xp.ndarray
    assert group.backend("nccl") is not None
    group.synchronize()
    group.barrier()


def through_the_host(group: Group, xp: Any) -> None:
    """Reduce arrays of a GPU over a backend that moves the host's memory."""
    size = group.world_size
    x = xp.asarray(np.full((2, 500), group.rank + 1, np.float32))
    total = np.full((2, 500), size * (size + 1) / 2, np.float32)
    same(group.all_reduce(x), total)
    assert group.all_reduce(x, out=x) is x
    same(x, total)
    if size > 1 and group.rank == 0:
        group.send(x + 1, 1)
    if group.rank == 1:
        same(group.recv(0, out=xp.asarray(np.zeros((2, 500), np.float32))), total + 1)
    group.barrier()


# Streams.


def stream_order(group: Group, xp: Any) -> None:
    """Compute and reduce by turns, without waiting for anything: on the default stream, and on one of the program's own."""
    steps, count = 20, MANY
    expected = np.float32(0)
    for _ in range(steps):
        expected = np.float32((group.world_size * expected + sum(range(1, group.world_size + 1))) / (2 * group.world_size))
    for stream in (xp.cuda.Stream.null, xp.cuda.Stream(non_blocking=True)):
        with stream:
            x = xp.zeros(count, np.float32)
            for _ in range(steps):
                x = x + (group.rank + 1)
                group.all_reduce(x, out=x)
                x = x / (2 * group.world_size)
            assert np.allclose(host(x), expected, rtol=1e-5), (host(x)[:3], expected)
    # Several threads make no difference to what a stream does.
    stream = xp.cuda.Stream(non_blocking=True)
    outcomes: list[Any] = []
    device = group.backend("nccl").device  # type: ignore[union-attr]

    def elsewhere() -> None:
        with xp.cuda.Device(device), stream:
            outcomes.append(host(group.all_reduce(xp.full(count, group.rank + 1, np.float32)))[-1])

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(_PATIENCE_S)
    assert outcomes == [sum(range(1, group.world_size + 1))]


def works(group: Group, xp: Any) -> None:
    """Reduce beside the program's stream, and wait for it in every way there is."""
    size, total = group.world_size, group.world_size * (group.world_size + 1) / 2
    with xp.cuda.Stream(non_blocking=True):
        x = xp.full(100_000, group.rank + 1, np.float32)
        begun = [group.all_reduce_async(x * (step + 1)) for step in range(5)]
        results = [work.wait() * 2 for work in begun]
        for step, result in enumerate(results):
            same(result, np.full(100_000, 2 * total * (step + 1), np.float32))
        group.synchronize()
        assert all(work.done() for work in begun)
        called, over = [], threading.Event()
        work = group.all_reduce_async(x)
        work.add_done_callback(lambda each: (called.append(each.exception()), over.set()))
        same(work.synchronize(), np.full(100_000, total, np.float32))
        assert over.wait(_PATIENCE_S)
        assert called == [None]

        async def main() -> Any:
            return await group.all_reduce_async(x, "max")

        same(asyncio.run(main()), np.full(100_000, size, np.float32))
        # A work waits for what the stream had queued when it was made, and for nothing after.
        y = x + 1
        work = group.all_reduce_async(y, out=y)
        assert work.wait() is y
        y += 1
        same(y, np.full(100_000, total + size + 1, np.float32))


def capture(group: Group, xp: Any) -> None:
    """Capture a reduction between two kernels into a graph, and run the graph three times."""
    size = group.world_size
    x = xp.full(1000, group.rank + 1, np.float32)
    group.all_reduce(x, "max", out=x)  # once before, so that no connection has to be made in the capture
    same(x, np.full(1000, size, np.float32))
    x += 1  # nor a kernel to be compiled
    stream = xp.cuda.Stream(non_blocking=True)
    host(x)
    with stream:
        x.fill(group.rank + 1)
        host(x)
        stream.begin_capture()
        x += 1
        group.all_reduce(x, "max", out=x)
        x += 1
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch(stream)
        same(x, np.full(1000, size + 6, np.float32))
        group.all_reduce(x, "max", out=x)  # and go on as before
        same(x, np.full(1000, size + 6, np.float32))
    group.synchronize()


def registered(group: Group, xp: Any) -> None:
    """Use memory of `empty` in calls, in a graph and after it was given back, and let streams wait for those of all ranks."""
    rank, size = group.rank, group.world_size
    total = size * (size + 1) // 2
    x, y = (group.empty(1 << 16, np.float32, device="cuda") for _ in range(2))
    for _ in range(3):
        x.fill(rank + 1)
        group.all_reduce(x, out=y)
        same(y, np.full(1 << 16, total, np.float32))
        group.barrier(device="cuda")
    group.all_reduce(y, out=y)
    same(y, np.full(1 << 16, total * size, np.float32))
    same(group.broadcast(x, root=size - 1), np.full(1 << 16, size, np.float32))
    stream = xp.cuda.Stream(non_blocking=True)
    host(y)
    with stream:
        stream.begin_capture()
        group.all_reduce(x, out=y)
        graph = stream.end_capture()
    del x
    other = group.empty(1 << 16, np.float32, device="cuda")
    other.fill(0)
    host(other)
    with stream:
        graph.launch(stream)
        same(y, np.full(1 << 16, total, np.float32))
    same(group.all_reduce(other), np.zeros(1 << 16, np.float32))
    group.synchronize()


def accumulation(group: Group, xp: Any) -> None:
    """Sum 16-bit floats in float32, for which the config asks: on the caller's stream, beside it, in a batch and in a graph."""
    size = group.world_size
    for name, large in (("float16", 2048), ("bfloat16", 256)):
        dtype = dtype_of(name, xp)
        if dtype is None:
            continue
        # The large number and 1 have no sum in the dtype.
        expected = np.full(1000, large + size - 1).astype(dtype)
        x = xp.full(1000, large if group.rank == 0 else 1, np.float32).astype(dtype)
        same(group.all_reduce(x), expected)
        same(group.all_reduce(x, out=xp.zeros((1000, 2), dtype)[:, 0]), expected)
        same(group.all_reduce_async(x).wait(), expected)
        same(group.reduce(x, root=size - 1), expected if group.rank == size - 1 else None)
        same(group.reduce_scatter(xp.concatenate([x] * size)), expected)
        with group.coalesce() as batch:
            works = [batch.all_reduce(x), batch.all_reduce(x, "max")]
        same(works[0].wait(), expected)
        same(works[1].wait(), np.full(1000, large).astype(dtype))
        same(group.all_reduce(xp.full(1000, 7, np.float32).astype(dtype), "mean"), np.full(1000, 7).astype(dtype))
        result, stream = xp.zeros(1000, dtype), xp.cuda.Stream(non_blocking=True)
        host(result)
        with stream:
            stream.begin_capture()
            group.all_reduce(x, out=result)
            graph = stream.end_capture()
            for _ in range(3):
                result.fill(0)
                graph.launch(stream)
                same(result, expected)
        del graph
    group.synchronize()


# Other libraries.


def tensors(group: Group, torch: Any) -> bool:
    """Give tensors of torch, on a GPU where there is one; return whether there is."""
    rank, size = group.rank, group.world_size
    on_gpu = bool(torch.cuda.is_available())
    device = torch.device("cuda", group.backend("nccl").device) if on_gpu else torch.device("cpu")  # type: ignore[union-attr]
    total = size * (size + 1) / 2
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int32, torch.complex64):
        x = torch.full((3, 4), rank + 1, dtype=dtype, device=device)
        y = group.all_reduce(x)
        assert (type(y), y.dtype, y.device, y.tolist()) == (torch.Tensor, dtype, device, [[total] * 4] * 3)
        assert group.all_reduce(x.T, out=x.T.clone()).tolist() == [[total] * 3] * 4
        assert group.all_gather(x[:1]).tolist() == [[each + 1] * 4 for each in range(size)]
        assert group.all_reduce(x, "sum", out=x) is x
        assert x.tolist() == y.tolist()
    assert group.all_reduce(torch.tensor([rank == 0, True], device=device), "and").tolist() == [size == 1, True]
    low = torch.tensor([1.0, 2.0, 0.0], device=device)
    assert group.all_reduce(low.to(torch.bfloat16), "mean").float().tolist() == low.tolist()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        if on_gpu and torch.cuda.get_device_capability(device) < (9, 0):
            with pytest.raises(oa.UnsupportedError, match="compute capability"):
                group.all_reduce(low.to(dtype))
        else:
            assert group.all_reduce(low.to(dtype)).float().tolist() == (low * size).tolist()
        assert group.broadcast(low.to(dtype), size - 1).float().tolist() == low.tolist()
    weight = torch.full((4,), float(rank), device=device, requires_grad=True)
    (weight * weight).sum().backward()
    assert group.all_reduce(weight.grad, "mean").tolist() == [size - 1.0] * 4
    if on_gpu:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            x = torch.zeros(1 << 18, device=device)
            for _ in range(20):
                x = group.all_reduce(x + 1, "mean")
            work = group.all_reduce_async(x, "max")
            assert set(work.wait().tolist()) == {20.0}
    group.synchronize()
    return on_gpu


# A loop as programs have it.


def training(group: Group, xp: Any) -> list[str]:
    """Train a small network, each rank on its share of the samples; return the bits of its weights, which are alike on all ranks."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((64, 8)).astype(np.float32)
    targets = np.maximum(inputs @ rng.standard_normal((8, 2)), 0).astype(np.float32)
    weights = [xp.asarray((rng.standard_normal(shape) / 4).astype(np.float32)) for shape in ((8, 16), (16, 2))]
    weights = [group.broadcast(weight, 0) for weight in weights]
    first, last = 0.0, 0.0
    share = 64 // group.world_size
    mine = slice(group.rank * share, (group.rank + 1) * share)
    x, y = xp.asarray(inputs[mine]), xp.asarray(targets[mine])
    for step in range(30):
        hidden = x @ weights[0]
        active = hidden > 0
        hidden = hidden * active
        error = hidden @ weights[1] - y
        slope = error * (2 / share)
        # The gradient of the last layer travels while that of the first is computed.
        late = group.all_reduce_async(hidden.T @ slope, "mean")
        early = group.all_reduce_async(x.T @ ((slope @ weights[1].T) * active), "mean")
        weights = [weight - work.wait() * 0.05 for weight, work in zip(weights, (early, late), strict=True)]
        if step in (0, 29):
            loss = float(host(group.all_reduce((error * error).sum().reshape(1), "mean"))[0])
            first, last = (loss, last) if step == 0 else (first, loss)
    assert last < first / 2, (first, last)
    bits = [host(weight) for weight in weights]
    for weight, found in zip(weights, bits, strict=True):
        gathered = host(group.all_gather(weight.reshape(1, -1)))
        assert all(row.tobytes() == found.tobytes() for row in gathered), "the ranks' weights differ"
    return [found.tobytes().hex() for found in bits]


# What is given back.


def memory(begin: Callable[[], AbstractContextManager[Group]], xp: Any, settle_s: float = 1.0) -> list[int]:
    """Open and close a group four times; return how much of the device is free after each, which is alike from the second on."""
    found: list[int] = []
    for _ in range(4):
        with begin() as group:
            x = xp.asarray(np.ones(1 << 20, np.float32))
            same(group.all_reduce(x), np.full(1 << 20, group.world_size, np.float32))
            with group.split(0) as other:
                other.all_reduce_async(x, "max").synchronize()
            open_bytes = free_bytes(xp)
        # What NCCL holds is given back on a thread of its own; with one rank it may be too little to show.
        limit = time.monotonic() + 3
        while free_bytes(xp) <= open_bytes and time.monotonic() < limit:
            time.sleep(0.01)
        found.append(settled(xp, settle_s))
    return found


memory.begins_itself = True  # type: ignore[attr-defined]


# What fails.


def failure_seen(group: Group) -> None:
    """Wait, without a call, until this rank knows that the job has failed."""
    limit = time.monotonic() + _PATIENCE_S
    while not repr(group).endswith("failed>"):
        assert time.monotonic() < limit
        time.sleep(0.005)


def mismatch(group: Group, xp: Any) -> None:
    """Make calls that do not belong together; nothing is launched, and all ranks are told the same."""
    x = xp.asarray(np.ones(5, np.float32))
    group.all_reduce(x)
    group.all_reduce(x, "max" if group.rank == 0 else "sum")
    group.all_reduce(x, "max" if group.rank == 0 else "min")


def deadline(group: Group, xp: Any) -> None:
    """Wait on the host for a rank that does not come in time."""
    x = xp.asarray(np.ones(5, np.float32))
    group.all_reduce(x)
    group.synchronize()
    if group.rank == 1:
        failure_seen(group)
        group.all_reduce(x)
    group.all_reduce(x, timeout_s=1)
    group.synchronize()


def killed(group: Group, xp: Any) -> None:
    """Reduce until the last rank dies by a signal, which it sends itself; it writes before when that was."""
    x = xp.asarray(np.ones(1 << 16, np.float32))
    for step in range(1_000_000):
        if step == 50 and group.rank == group.world_size - 1:
            Path(os.environ[FOLDER], "killed").write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        group.all_reduce(x, "max", out=x)
        group.synchronize()


def going_on(group: Group, xp: Any) -> list[int]:
    """Lose the last rank, and go on with the others, each on the GPU that it had; return which rank this one is then, and of how many."""
    with suppress(oa.PeerLostError):
        killed(group, xp)
    with group.shrink() as left:
        x = xp.asarray(np.full(1 << 16, left.rank + 1, np.float32))
        same(left.all_reduce(x), np.full(1 << 16, left.world_size * (left.world_size + 1) / 2, np.float32))
        left.synchronize()
        return [left.rank, left.world_size]
