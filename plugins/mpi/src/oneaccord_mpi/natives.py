"""The collectives that MPI performs itself: even blocks, of dtypes and reductions that MPI has.

All others are left to oneaccord. So are reductions for which MPI promises less than oneaccord: minimum and maximum of floats, where a
NaN may get lost or show on some ranks only, products of complex numbers, whose last bit may differ from rank to rank, and sums of integers
of 8 and 16 bits, which Open MPI saturates and NumPy wraps (open-mpi/ompi#8045).
"""

from __future__ import annotations

from collections.abc import Callable
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
    copy_own,
    divide_sum,
)
from oneaccord_mpi.backend import MpiBackend, current

__all__ = ["offer"]

_LONGEST_BYTES = (1 << 31) - 1
"""Counts of MPI 3 are ints; what is longer is left to oneaccord, which sends pieces."""

_WRAPPING_BYTES = 4
"""From which size on sums of integers wrap round in every MPI."""

_NAMES: dict[Collective, str] = {
    Collective.ALL_REDUCE: "allreduce",
    Collective.REDUCE: "reduce",
    Collective.REDUCE_SCATTER: "reduce_scatter_block",
    Collective.BROADCAST: "bcast",
    Collective.ALL_GATHER: "allgather",
    Collective.GATHER: "gather",
    Collective.SCATTER: "scatter",
    Collective.ALL_TO_ALL: "alltoall",
    Collective.BARRIER: "barrier",
}

_TYPES: dict[str, str] = {
    "bool": "C_BOOL",
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}_T" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "complex64": "C_FLOAT_COMPLEX",
    "complex128": "C_DOUBLE_COMPLEX",
}
_OPS: dict[tuple[str, str], str] = {
    # (kind of dtype, reduction): the operation of MPI
    **{(kind, name): "SUM" for kind in "iufc" for name in ("sum", "mean")},
    **{(kind, "product"): "PROD" for kind in "iuf"},
    **{(kind, name): name.upper() for kind in "iu" for name in ("min", "max")},
    **{(kind, name): f"B{name.upper()}" for kind in "iu" for name in ("and", "or", "xor")},
    **{("b", name): op for name, op in (("and", "LAND"), ("or", "LOR"), ("xor", "LXOR"), ("min", "LAND"), ("max", "LOR"))},
}

Array = npt.NDArray[Any]
Message = tuple[Any, int, Any]


def offer(request: CollectiveRequest) -> NativeCollective | None:
    """Return what performs this kind of call, None if MPI cannot or may not."""
    backend = current()
    if backend is None or backend.config.native == "off":
        return None
    if (
        request.collective not in _NAMES
        or request.device != "cpu"
        or not request.even
        or request.nbytes > _LONGEST_BYTES
        or request.dtype is None
    ):
        return None
    datatype, op = backend.mpi.BYTE, None
    if request.collective in REDUCING:
        datatype, op = _reduction(backend.mpi, request.dtype, request.op or "")
        if op is None:
            return None
    return _Native(backend, request, datatype, op)


def _reduction(mpi: Any, dtype: np.dtype[Any], name: str) -> tuple[Any, Any]:
    """Return MPI's datatype and operation, both None if it lacks one."""
    if dtype.type in (np.longdouble, np.clongdouble):
        type_name = "LONG_DOUBLE" if dtype.kind == "f" else "C_LONG_DOUBLE_COMPLEX"
    else:
        type_name = _TYPES.get(dtype.name, "")
    datatype = getattr(mpi, type_name, None) if type_name else None
    op = _OPS.get((dtype.kind, name))
    if op == "SUM" and dtype.kind in "iu" and dtype.itemsize < _WRAPPING_BYTES:
        return None, None
    if datatype is None or datatype == mpi.DATATYPE_NULL or op is None:
        return None, None
    return datatype, getattr(mpi, op)


class _Native:
    """One kind of call."""

    __slots__ = (
        "_blocking",
        "_blocks",
        "_collective",
        "_datatype",
        "_digest",
        "_divisor",
        "_mpi",
        "_name",
        "_nbytes",
        "_op",
        "_start",
    )

    def __init__(self, mpi: MpiBackend, request: CollectiveRequest, datatype: Any, op: Any) -> None:
        name = _NAMES[request.collective]
        self._mpi = mpi
        self._blocking = mpi.blocking
        self._collective = request.collective
        self._digest = request.digest
        self._nbytes = request.nbytes
        self._datatype = datatype
        self._op = op
        self._divisor = request.world_size if request.op == "mean" else 1
        self._blocks = request.world_size
        self._name = name
        self._start: Callable[..., Any] = getattr(mpi.comm, name.capitalize() if mpi.blocking else f"I{name}")

    def __call__(
        self,
        backend: Backend,
        source: Array,
        target: Array,
        root: int,
        deadline: Deadline,
        on_stall: StallCallback | None = None,
    ) -> None:
        mpi = self._mpi
        mpi.check()
        try:
            if mpi.agreement is not None:
                mpi.agreement.reach(self._digest, deadline, on_stall)
            arguments = self._prepare(source, target, root)
            if self._blocking:
                self._block(source, target, arguments, deadline)
            else:
                self._poll(source, target, arguments, deadline, on_stall)
        except mpi.mpi.Exception as error:
            raise mpi.broken(error) from error
        divide_sum(target, self._divisor)

    def _block(self, source: Array, target: Array, arguments: tuple[Any, ...], deadline: Deadline) -> None:
        watchdog = self._mpi.watchdog
        watchdog.enter(self._name, deadline)
        try:
            self._start(*arguments)
        finally:
            watchdog.leave()
        self._keep_own(source, target)

    def _poll(
        self, source: Array, target: Array, arguments: tuple[Any, ...], deadline: Deadline, on_stall: StallCallback | None
    ) -> None:
        mpi = self._mpi
        with mpi.lock:
            request = self._start(*arguments)
        try:
            self._keep_own(source, target)
            mpi.wait(request, self._nbytes, deadline, on_stall)
        except BaseException:
            # MPI may still read and write there.
            mpi.hold((request, source, target))
            raise

    def _keep_own(self, source: Array, target: Array) -> None:
        """Copy what the root of a broadcast keeps itself, while MPI sends it."""
        if self._collective is Collective.BROADCAST:
            copy_own(source, target)

    def _prepare(self, source: Array, target: Array, root: int) -> tuple[Any, ...]:
        """Return the arguments for MPI."""
        mpi, is_root = self._mpi, self._mpi.rank == root
        match self._collective:
            case Collective.ALL_REDUCE:
                in_place = source is target or np.may_share_memory(source, target)
                return mpi.mpi.IN_PLACE if in_place else self._message(source), self._message(target), self._op
            case Collective.BARRIER:
                return ()
            case Collective.BROADCAST:
                return self._message(source if is_root else target), root
            case Collective.REDUCE:
                if not is_root:
                    return self._message(source), None, self._op, root
                in_place = source is target or np.may_share_memory(source, target)
                return mpi.mpi.IN_PLACE if in_place else self._message(source), self._message(target), self._op, root
            case Collective.REDUCE_SCATTER:
                return self._message(source, self._blocks), self._message(target), self._op
            case Collective.ALL_GATHER:
                return self._message(source), self._message(target, self._blocks)
            case Collective.ALL_TO_ALL:
                return self._message(source, self._blocks), self._message(target, self._blocks)
            case Collective.GATHER:
                return self._message(source), self._message(target, self._blocks) if is_root else None, root
            case Collective.SCATTER:
                return self._message(source, self._blocks) if is_root else None, self._message(target), root
            case Collective.SCAN | Collective.EXSCAN:
                raise AssertionError("this MPI library does not provide it")

    def _message(self, array: Array, blocks: int = 1) -> Message:
        """Return memory as mpi4py takes it: with the number of elements of one block."""
        if self._op is None:
            return array.reshape(-1).view(np.uint8), array.nbytes // blocks, self._datatype
        return array, array.size // blocks, self._datatype
