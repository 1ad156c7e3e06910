"""Defects of collectives that a backend performs itself; as `broken_family`."""

from __future__ import annotations

from typing import Any

import numpy as np
from broken_family import WRONG, fault
from broken_loft import Loft

from oneaccord.api import CollectiveRequest, Deadline, NativeCollective, hookimpl


class Native(Loft):
    """A backend whose all_reduce and barrier are its own: each rank sends its array to all others."""

    def all_reduce(self, op: str, source: Any, target: Any, deadline: Deadline) -> None:
        arrays = self.gather(source, deadline)
        with np.errstate(all="ignore"):
            ufunc = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op]
            target[...] = ufunc.reduce(arrays, axis=0, dtype=source.dtype)

    def barrier(self, deadline: Deadline) -> None:
        self.gather(np.zeros(0, np.uint8), deadline)

    def gather(self, source: Any, deadline: Deadline) -> list[Any]:
        link = self.transport(self, 1 << 20)
        arrays = [source if rank == self.rank else np.empty_like(source) for rank in range(self.world_size)]
        header = b"native"
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        for rank in others:
            link.send(rank, header, memoryview(source.view(np.uint8)))
        receives = [link.recv(rank, header, memoryview(arrays[rank].view(np.uint8))) for rank in others]
        for receive in receives:
            if not receive.done:
                link.wait([receive], deadline)
        return arrays


@fault("the native barrier returns early", "bytes.barriers", r"a rank left it \d+\.\d+ s before the last one had come")
class EarlyBarrier(Native):
    def barrier(self, deadline: Deadline) -> None:
        """Leave at once."""


@fault(
    "a native sum is wrong for one dtype", "bytes.every_dtype_and_reduction", rf'all_reduce of int8\[\d+\], op="sum": {WRONG}'
)
class WrongSum(Native):
    def all_reduce(self, op: str, source: Any, target: Any, deadline: Deadline) -> None:
        super().all_reduce(op, source, target, deadline)
        if source.dtype == np.int8 and op == "sum":
            wide = np.add.reduce(self.gather(source, deadline), axis=0, dtype=np.int64)
            target[...] = np.clip(wide, -128, 127)


@fault("a native max loses NaN", "bytes.floats_are_the_same_everywhere", r'op="max", lost a NaN')
class NoNaN(Native):
    def all_reduce(self, op: str, source: Any, target: Any, deadline: Deadline) -> None:
        super().all_reduce(op, source, target, deadline)
        if op == "max":
            target[...] = np.fmax.reduce(self.gather(source, deadline), axis=0)


@fault(
    "a native all_reduce works for arrays in other memory alone",
    "bytes.in_place",
    rf"all_reduce of int32\[\d+\] in place: {WRONG}",
)
class NotInPlace(Native):
    def all_reduce(self, op: str, source: Any, target: Any, deadline: Deadline) -> None:
        target[...] = 0
        super().all_reduce(op, source, target, deadline)


class Natives:
    """The plugin that offers what `Native` does, while the backend is one of those."""

    enabled = False

    @hookimpl
    def oneaccord_collective(self, request: CollectiveRequest) -> NativeCollective | None:
        if request.backend != "loft" or not self.enabled:
            return None
        collective, op = request.collective.value if hasattr(request.collective, "value") else request.collective, request.op
        if collective == "barrier":
            return lambda backend, source, target, root, deadline, on_stall: backend.barrier(deadline)  # type: ignore[attr-defined]
        if collective == "all_reduce" and op in ("sum", "max", "min"):
            return lambda backend, source, target, root, deadline, on_stall: backend.all_reduce(op, source, target, deadline)  # type: ignore[attr-defined]
        return None
