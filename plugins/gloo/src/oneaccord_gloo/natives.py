"""The collectives that Gloo performs itself: even blocks, of dtypes and reductions that Gloo has.

All others are left to oneaccord. So are minimum and maximum of floats, where Gloo may lose a NaN, or show it on some ranks only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy.typing as npt

from oneaccord.api import (
    REDUCING,
    Backend,
    Collective,
    CollectiveRequest,
    Deadline,
    NativeCollective,
    StallCallback,
    agree_on_call,
    copy_own,
    divide_sum,
)
from oneaccord_gloo.backend import GlooBackend, current

__all__ = ["offer"]

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

Array = npt.NDArray[Any]


def offer(request: CollectiveRequest) -> NativeCollective | None:
    """Return what performs this kind of call, None if Gloo cannot or may not."""
    backend = current()
    if backend is None or not backend.config.native or request.device != "cpu" or not request.even or request.dtype is None:
        return None
    if request.collective in _LACKING or (not request.nbytes and request.collective is not Collective.BARRIER):
        return None
    numbers, op = None, None
    if request.collective in REDUCING:
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
        if self.collective in (Collective.ALL_REDUCE, Collective.REDUCE) and memory is target:
            copy_own(source, target)
        _finish(gloo, self._start(gloo, source, memory, root), (source, memory), deadline, on_stall)
        if self.collective is Collective.BROADCAST and gloo.rank == root:
            copy_own(source, target)
        divide_sum(target, self.divisor)

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
    """Return when every rank has come with the same ``digest``; raises as `agree_on_call`."""

    def least(pair: bytes) -> bytearray:
        memory = bytearray(pair)
        tensor = gloo.tensors.of_payload(memory).view(gloo.torch.int64)
        options = gloo.distributed.distributed_c10d.AllreduceOptions()
        options.reduceOp = gloo.distributed.ReduceOp.MIN
        _finish(gloo, gloo.group.allreduce([tensor], options), (tensor, memory), deadline, on_stall)
        return memory

    def gather(mine: bytes) -> bytearray:
        everyones = bytearray(len(mine) * gloo.size)
        incoming, outgoing = gloo.tensors.of_payload(everyones), gloo.tensors.of_payload(mine)
        _finish(gloo, gloo.group._allgather_base(incoming, outgoing), (incoming, outgoing, mine), deadline, None)
        return everyones

    agree_on_call(digest, gloo.size, least, gather)


def _finish(gloo: GlooBackend, work: Any, memory: Any, deadline: Deadline, on_stall: StallCallback | None) -> None:
    """Wait for what has begun; its memory is kept until then, for ever where it fails."""
    on_its_way = (work, memory)
    gloo.hold(on_its_way)
    gloo.wait(work, deadline, on_stall)
    gloo.release(on_its_way)
