"""The collectives that Gloo performs itself: even blocks, of dtypes and reductions that Gloo has.

All others are left to manyhands. So are minimum and maximum of floats, where Gloo may lose a NaN, or show it on some ranks only.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from manyhands.api import Backend, Collective, CollectiveRequest, Deadline, HeaderMismatch, NativeCollective
from manyhands_gloo.backend import GlooBackend, current

__all__ = ["offer"]

_REDUCING = frozenset({Collective.ALL_REDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER})
_LACKING = frozenset({Collective.SCAN, Collective.EXSCAN})
_NUMBERS: dict[str, tuple[str, str]] = {
    # dtype: as which dtype of NumPy torch takes its memory, and what that then is in torch
    **{name: (name, name) for name in ("int8", "uint8", "int32", "int64", "float16", "float32", "float64")},
    "bfloat16": ("int16", "bfloat16"),
    "bool": ("uint8", "uint8"),
    # Sums and products wrap around alike with and without a sign.
    "uint32": ("int32", "int32"),
    "uint64": ("int64", "int64"),
}
_OPS: dict[str, tuple[str, frozenset[str]]] = {
    # reduction: the name in torch, and the dtypes that have it here
    "sum": ("SUM", frozenset(_NUMBERS) - {"bool"}),
    "mean": ("SUM", frozenset({"float16", "bfloat16", "float32", "float64"})),
    "product": ("PRODUCT", frozenset(_NUMBERS) - {"bool"}),
    "min": ("MIN", frozenset({"bool", "int8", "uint8", "int32", "int64"})),
    "max": ("MAX", frozenset({"bool", "int8", "uint8", "int32", "int64"})),
    "and": ("MIN", frozenset({"bool"})),
    "or": ("MAX", frozenset({"bool"})),
}
_PAIR = struct.Struct("=qq")
_ONE = struct.Struct("=q")

Array = npt.NDArray[Any]
StallCallback = Callable[[list[int]], None]


def offer(request: CollectiveRequest) -> NativeCollective | None:
    """Return what performs this kind of call, None where Gloo cannot or may not."""
    backend = current()
    if backend is None or not backend.config.native or request.device != "cpu" or not request.even or request.dtype is None:
        return None
    if request.collective in _LACKING or (not request.nbytes and request.collective is not Collective.BARRIER):
        return None
    numbers, op = None, None
    if request.collective in _REDUCING:
        name, dtypes = _OPS.get(request.op or "", ("", frozenset()))
        if request.dtype.name not in dtypes:
            return None
        numbers, op = _NUMBERS[request.dtype.name], getattr(backend.distributed.ReduceOp, name)
    divisor = request.world_size if request.op == "mean" else 1
    return cast("NativeCollective", _Native(request.collective, request.digest, numbers, op, divisor))


@dataclass(frozen=True, slots=True)
class _Native:
    """One kind of call."""

    collective: Collective
    digest: bytes
    numbers: tuple[str, str] | None
    op: Any
    divisor: int

    def __call__(
        self,
        backend: Backend,
        source: Array,
        target: Array,
        root: int,
        deadline: Deadline,
        on_stall: StallCallback | None = None,
    ) -> None:
        gloo = cast("GlooBackend", backend)
        gloo.check()
        if gloo.config.check:
            _agree(gloo, self.digest, deadline, on_stall)
        # A reduction of Gloo is in place, and on ranks that get no result it leaves parts of one.
        memory = source.copy() if self.collective is Collective.REDUCE and gloo.rank != root else target
        copied = self.collective in (Collective.ALL_REDUCE, Collective.REDUCE) and memory is target
        if copied and not np.may_share_memory(source, target):
            np.copyto(target, source.reshape(target.shape))
        work = self._start(gloo, source, memory, root)
        on_its_way = (work, source, memory)
        gloo.hold(on_its_way)
        gloo.wait(work, deadline, on_stall)
        gloo.release(on_its_way)
        if self.collective is Collective.BROADCAST and gloo.rank == root and not np.may_share_memory(source, target):
            np.copyto(target, source.reshape(target.shape))
        if self.divisor > 1 and target.size:
            _divide(target, self.divisor)

    def _start(self, gloo: GlooBackend, source: Array, target: Array, root: int) -> Any:
        """Begin; return Gloo's handle, which keeps the tensors."""
        group, c10d = gloo.group, gloo.distributed.distributed_c10d
        match self.collective:
            case Collective.BARRIER:
                return group.barrier()
            case Collective.ALL_REDUCE:
                options = c10d.AllreduceOptions()
                options.reduceOp = self.op
                return group.allreduce([self._numbers(gloo, target)], options)
            case Collective.REDUCE:
                options = c10d.ReduceOptions()
                options.reduceOp, options.rootRank = self.op, root
                return group.reduce([self._numbers(gloo, target)], options)
            case Collective.REDUCE_SCATTER:
                options = c10d.ReduceScatterOptions()
                options.reduceOp = self.op
                return group._reduce_scatter_base(self._numbers(gloo, target), self._numbers(gloo, source), options)
            case Collective.BROADCAST:
                options = c10d.BroadcastOptions()
                options.rootRank = root
                return group.broadcast([gloo.tensors.of_bytes(source if gloo.rank == root else target)], options)
            case Collective.ALL_GATHER:
                outgoing, incoming = gloo.tensors.of_bytes(source), gloo.tensors.of_bytes(target)
                return group._allgather_base(incoming, outgoing)
            case Collective.ALL_TO_ALL:
                outgoing, incoming = gloo.tensors.of_bytes(source), gloo.tensors.of_bytes(target)
                return group.alltoall_base(incoming, outgoing, [], [])
            case Collective.GATHER:
                options = c10d.GatherOptions()
                options.rootRank = root
                parts = [list(gloo.tensors.of_bytes(target).chunk(gloo.size))] if gloo.rank == root else []
                return group.gather(parts, [gloo.tensors.of_bytes(source)], options)
            case Collective.SCATTER:
                options = c10d.ScatterOptions()
                options.rootRank = root
                parts = [list(gloo.tensors.of_bytes(source).chunk(gloo.size))] if gloo.rank == root else []
                return group.scatter([gloo.tensors.of_bytes(target)], parts, options)

    def _numbers(self, gloo: GlooBackend, array: Array) -> Any:
        assert self.numbers is not None
        return gloo.tensors.of_numbers(array, *self.numbers)


def _agree(gloo: GlooBackend, digest: bytes, deadline: Deadline, on_stall: StallCallback | None) -> None:
    """Return when every rank has come with the same ``digest``.

    Raises
    ------
    HeaderMismatch
        A rank, which the error names, makes another call.
    """
    mine = _ONE.unpack(digest)[0]
    least = bytearray(_PAIR.pack(mine, ~mine))
    tensor = gloo.tensors.of_payload(least).view(gloo.torch.int64)
    options = gloo.distributed.distributed_c10d.AllreduceOptions()
    options.reduceOp = gloo.distributed.ReduceOp.MIN
    work = gloo.group.allreduce([tensor], options)
    on_its_way = (work, tensor, least)
    gloo.hold(on_its_way)
    gloo.wait(work, deadline, on_stall)
    gloo.release(on_its_way)
    if _PAIR.unpack(least) != (mine, ~mine):
        raise HeaderMismatch(_differing(gloo, digest, deadline), b"")


def _differing(gloo: GlooBackend, digest: bytes, deadline: Deadline) -> int:
    """Return the first rank whose digest is not this one; all ranks have found a mismatch, and ask."""
    size = len(digest)
    mine, everyones = bytearray(digest), bytearray(size * gloo.size)
    incoming, outgoing = gloo.tensors.of_payload(everyones), gloo.tensors.of_payload(mine)
    work = gloo.group._allgather_base(incoming, outgoing)
    on_its_way = (work, incoming, outgoing)
    gloo.hold(on_its_way)
    gloo.wait(work, deadline, None)
    gloo.release(on_its_way)
    return next(rank for rank in range(gloo.size) if everyones[rank * size : (rank + 1) * size] != digest)


def _divide(total: Array, count: int) -> None:
    """Turn sums into means in place, rounded once."""
    if total.dtype.itemsize > 2:
        np.true_divide(total, total.dtype.type(count), out=total)
    else:
        # The count itself may have no exact value in a dtype this small.
        total[...] = (total.astype(np.float32) / np.float32(count)).astype(total.dtype)
