"""A rank's side of a communicator of the fake NCCL, and the kernels that it runs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from support.fake_gpu import fake_cuda
from support.fake_gpu.fake_nccl_extra import MOVING, ExtraRank, blocks_given, moved

__all__ = ["PATIENCE_S", "UNSET", "Call", "Meeting", "Part", "RankSide"]

PATIENCE_S = 30.0
UNSET = -2147483648
_DTYPES = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64".split()
_LOW_PRECISION = {9: "bfloat16", 10: "float8_e4m3fn", 11: "float8_e5m2"}
_SUM, _PRODUCT, _MAX, _MIN, _MEAN = range(5)


@dataclass(eq=False)
class Meeting:
    """What all ranks of a communicator share."""

    size: int
    members: set[int] = field(default_factory=set)
    gpus: list[bytes] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    collectives: dict[int, dict[int, Part]] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    messages: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    windows: dict[int, set[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """What one rank brings to a collective."""

    what: tuple[Any, ...]
    data: np.ndarray[Any, Any] | None
    places: tuple[Any, ...] = ()


@dataclass
class Call:
    """A call on its way to a stream."""

    kind: str
    source: int
    target: int
    count: int
    type: int
    op: int = -1
    peer: int = -1
    places: tuple[Any, ...] = ()
    memory: tuple[int, ...] = ()

    @property
    def what(self) -> tuple[Any, ...]:
        return self.kind, self.count, self.type, self.op, self.peer


class RankSide(ExtraRank):
    """A rank's side of a communicator."""

    def __init__(self, meeting: Meeting, rank: int, config: Any) -> None:
        super().__init__()
        self.meeting = meeting
        self.rank = rank
        self.device = fake_cuda.get_device()
        self.max_ctas = UNSET if config is None else config.max_ctas
        self.is_ordered = config is not None and config.launch_order_implicit == 1
        self.is_blocking = config is None or config.blocking != 0
        self.error = 0
        self.pending: Callable[[], bool] | None = None
        self.is_aborted = False
        self.is_revoked = False
        self.graphs = 0
        self.is_freed = False
        self.is_connected = False
        self.busy = threading.Lock()
        self.completing = threading.Lock()
        self.last: tuple[int, int] | None = None
        self.counts: dict[str, itertools.count[int]] = {}

    def number(self, what: str) -> int:
        return next(self.counts.setdefault(what, itertools.count()))

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Wait for the others, as a kernel does; tell whether to go on."""
        with self.meeting.changed:
            came = self.meeting.changed.wait_for(lambda: self.is_aborted or condition(), PATIENCE_S)
        assert came, "a kernel of NCCL hangs, and nobody aborts it"
        return not self.is_aborted

    def forget_graph(self) -> None:
        """Take note that a graph is gone."""
        with self.meeting.changed:
            self.graphs -= 1
            self.meeting.changed.notify_all()

    def run(self, calls: list[Call]) -> None:
        """Be the kernel: give all, then take all."""
        taken = [self._give(call) for call in calls]
        for take in taken:
            take()

    def _give(self, call: Call) -> Callable[[], None]:
        width = _dtype(call.type).itemsize
        meeting, rank = self.meeting, self.rank
        if call.kind == "send":
            key = (rank, call.peer, self.number(f"to {call.peer}"))
            with meeting.changed:
                meeting.messages[key] = _read(call.source, call.count * width).tobytes()
                meeting.changed.notify_all()
            return lambda: None
        if call.kind == "recv":
            key = (call.peer, rank, self.number(f"from {call.peer}"))
            return lambda: self._receive(key, call, width)
        number = self.number("collectives")
        part = Part(call.what, self._input(call, width), call.places)
        with meeting.changed:
            meeting.collectives.setdefault(number, {})[rank] = part
            meeting.changed.notify_all()
        return lambda: self._take(number, call)

    def _input(self, call: Call, width: int) -> np.ndarray[Any, Any] | None:
        blocks = self.meeting.size if call.kind == "reduce_scatter" else 1
        if call.kind == "broadcast" and self.rank != call.peer:
            return None
        if call.kind in MOVING and not (blocks := blocks_given(call.kind, self.rank, call.peer, self.meeting.size)):
            return None
        return _read(call.source, call.count * width * blocks).copy().view(_dtype(call.type))

    def _receive(self, key: tuple[int, int, int], call: Call, width: int) -> None:
        messages = self.meeting.messages
        if self.wait(lambda: key in messages):
            data = np.frombuffer(messages.pop(key), np.uint8)
            common = min(len(data), call.count * width)  # as NCCL does, which compares no lengths
            _read(call.target, common)[:] = data[:common]

    def _take(self, number: int, call: Call) -> None:
        meeting = self.meeting
        parts = meeting.collectives[number]
        # Those that make different calls wait for each other for ever.
        if not self.wait(lambda: len(parts) == meeting.size and len({part.what for part in parts.values()}) == 1):
            return
        if len({part.places for part in parts.values()}) > 1:
            self.crimes.append(f"{call.kind} of memory that is not registered alike on all ranks")
        data = [parts[rank].data for rank in range(meeting.size)]
        result: np.ndarray[Any, Any] | None
        if call.kind == "broadcast":
            result = data[call.peer]
        elif call.kind == "all_gather":
            result = np.concatenate([part for part in data if part is not None])
        elif call.kind in MOVING:
            result = moved(call.kind, data, self.rank, call.peer, call.count)
        else:
            result = _reduced([part for part in data if part is not None], call.op)
            if call.kind == "reduce_scatter":
                result = result[self.rank * call.count : (self.rank + 1) * call.count]
            elif call.kind == "reduce" and self.rank != call.peer:
                result = None
        if result is not None:
            _read(call.target, result.nbytes)[:] = result.view(np.uint8)
        with meeting.changed:
            meeting.done[number] = meeting.done.get(number, 0) + 1
            if meeting.done[number] == meeting.size:
                del meeting.collectives[number], meeting.done[number]


def _read(pointer: int, nbytes: int) -> np.ndarray[Any, Any]:
    return fake_cuda.view(pointer, nbytes)


def _dtype(number: int) -> np.dtype[Any]:
    if number in _LOW_PRECISION:
        return np.dtype(getattr(pytest.importorskip("ml_dtypes"), _LOW_PRECISION[number]))
    return np.dtype(_DTYPES[number])


def _reduced(parts: list[np.ndarray[Any, Any]], op: int) -> np.ndarray[Any, Any]:
    """Reduce one rank after the other, and round each step to the dtype (src/device/reduce_kernel.h of 2.30.7).

    The mean of floats is a sum of products with 1/n, which has the dtype as well (src/enqueue.cc, `hostToDevRedOp`); that of integers divides the sum.
    NCCL's rings begin at another rank for each part of an array; this one always at rank 0.
    """
    dtype, count = parts[0].dtype, len(parts)
    is_integer = dtype.kind in "iub"
    is_low = dtype.itemsize < 4 and not is_integer
    wide = np.dtype(("f2" if dtype.itemsize == 1 else "f4") if is_low else dtype)
    ufunc: np.ufunc = {_SUM: np.add, _PRODUCT: np.multiply, _MAX: np.maximum, _MIN: np.minimum, _MEAN: np.add}[op]

    def step(function: np.ufunc, left: np.ndarray[Any, Any], right: Any) -> np.ndarray[Any, Any]:
        with np.errstate(all="ignore"):
            return function(left.astype(wide), right.astype(wide)).astype(dtype)

    if op == _MEAN and not is_integer:
        factor = np.array(np.float32(1 / count) if is_low else 1 / count).astype(dtype)
        parts = [step(np.multiply, part, factor) for part in parts]
    total = parts[0]
    for part in parts[1:]:
        total = step(ufunc, total, part)
    return np.trunc(total / count).astype(dtype) if op == _MEAN and is_integer else total
