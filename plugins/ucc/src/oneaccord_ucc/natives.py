"""The collectives that UCC performs: even blocks, of dtypes and reductions whose result is the same as oneaccord'.

All others are left to oneaccord: sums of float16 and bfloat16, which UCC gave back as zeros; minimum and maximum of floats, where a NaN may get
lost; reductions of complex numbers and bools; and barriers, which the agreement around each collective is already.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from oneaccord.api import (
    REDUCING,
    Backend,
    Collective,
    CollectiveRequest,
    Deadline,
    NativeCollective,
    StallCallback,
    divide_sum,
)
from oneaccord_ucc.backend import UccBackend
from oneaccord_ucc.library import Arguments

__all__ = ["offer"]

Array = npt.NDArray[Any]

# Numbers of ucc.h.
_TYPES: dict[Collective, int] = {
    Collective.ALL_GATHER: 1 << 0,
    Collective.ALL_REDUCE: 1 << 2,
    Collective.ALL_TO_ALL: 1 << 3,
    Collective.BROADCAST: 1 << 6,
    Collective.REDUCE: 1 << 11,
    Collective.REDUCE_SCATTER: 1 << 12,
}
_DTYPES: dict[str, int] = {
    name: number << 3
    for number, name in [
        *enumerate(("int8", "int16", "int32", "int64"), 0),
        *enumerate(("uint8", "uint16", "uint32", "uint64"), 5),
        *enumerate(("float32", "float64"), 11),
    ]
}
_OPS: dict[tuple[str, str], int] = {
    # (kind of dtype, reduction)
    **{(kind, "sum"): 0 for kind in "iuf"},
    ("f", "mean"): 0,
    **{(kind, "product"): 1 for kind in "iuf"},
    **{(kind, name): op for kind in "iu" for name, op in (("max", 2), ("min", 3), ("and", 7), ("or", 8), ("xor", 9))},
}


def offer(request: CollectiveRequest) -> NativeCollective | None:
    """Return what performs this kind of call, None if UCC cannot or may not."""
    dtype = request.dtype
    if request.collective not in _TYPES or dtype is None or request.device != "cpu":
        return None
    if not request.even or not request.nbytes or request.world_size < 2:
        return None
    if request.collective not in REDUCING:
        return _Native(request, _DTYPES["uint8"], 0)
    number, op = _DTYPES.get(dtype.name) if dtype.isnative else None, _OPS.get((dtype.kind, request.op or ""))
    return None if number is None or op is None else _Native(request, number, op)


class _Native:
    """One kind of call. Its arguments are kept: to make them takes as long as a short call."""

    __slots__ = ("_arguments", "_as_bytes", "_digest", "_divisor", "_is_broadcast", "_nbytes")

    def __init__(self, request: CollectiveRequest, dtype: int, op: int) -> None:
        self._digest = request.digest
        self._nbytes = request.nbytes
        self._as_bytes = request.collective not in REDUCING
        self._is_broadcast = request.collective is Collective.BROADCAST
        self._divisor = request.world_size if request.op == "mean" else 1
        self._arguments = Arguments(mask=1, coll_type=_TYPES[request.collective], op=op)
        self._arguments.src.datatype = self._arguments.dst.datatype = dtype

    def __call__(
        self, backend: Backend, source: Array, target: Array, root: int, deadline: Deadline, on_stall: StallCallback
    ) -> None:
        assert isinstance(backend, UccBackend)
        team = backend.team
        assert team is not None
        team.check()
        backend.agreement.reach(b"begin " + self._digest, deadline, on_stall)
        is_same = bool(source.size and target.size) and source.ctypes.data == target.ctypes.data
        if self._is_broadcast:
            if source.size and not is_same:
                np.copyto(target, source)
            source = target
        arguments = self._arguments
        arguments.root = max(root, 0)
        arguments.flags = Arguments.IN_PLACE if is_same and not self._is_broadcast else 0
        for buffer, array in ((arguments.src, source), (arguments.dst, target)):
            buffer.buffer = array.ctypes.data if array.size else None
            buffer.count = array.nbytes if self._as_bytes else array.size
        team.perform(arguments, self._nbytes, deadline, on_stall, (source, target))
        # UCC may have ended here and not elsewhere, or, where a rank has died, with wrong numbers.
        backend.agreement.reach(b"ended " + self._digest, deadline, on_stall, team.progress)
        divide_sum(target, self._divisor)
