"""Other people's libraries called without manyhands, in the same processes and on the same arrays: what a backend's comfort costs.

Only libraries that a backend has loaded are called, so that nothing is started twice.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from manyhands.errors import UnsupportedError

__all__ = ["RAW", "RawMpi"]

Array = npt.NDArray[Any]

_OPS: Final[dict[str, str]] = {
    "sum": "SUM",
    "product": "PROD",
    "min": "MIN",
    "max": "MAX",
    "and": "BAND",
    "or": "BOR",
    "xor": "BXOR",
}


class RawMpi:
    """mpi4py on MPI's world, under the names that `Group` uses.

    Parameters
    ----------
    rank, world_size
        Who this rank is; MPI must count alike.
    dtype
        Of all arrays.

    Raises
    ------
    UnsupportedError
        MPI has no such dtype, or counts the ranks in another way.
    """

    def __init__(self, rank: int, world_size: int, dtype: np.dtype[Any]) -> None:
        mpi: Any = import_module("mpi4py.MPI")
        self._mpi = mpi
        self._world = mpi.COMM_WORLD
        if (self._world.rank, self._world.size) != (rank, world_size):
            raise UnsupportedError(
                f"MPI's world has rank {self._world.rank} of {self._world.size} where manyhands has {rank} of {world_size}"
            )
        try:
            datatype = import_module("mpi4py.util.dtlib").from_numpy_dtype(dtype)
        except ValueError:
            raise UnsupportedError(f"MPI has no {dtype}") from None
        if datatype == mpi.DATATYPE_NULL:
            raise UnsupportedError(f"this MPI has no {dtype}")
        self.barrier: Callable[[], None] = self._world.Barrier

    def _op(self, name: str) -> Any:
        if name not in _OPS:
            raise UnsupportedError(f"MPI has no reduction {name!r}")
        return getattr(self._mpi, _OPS[name])

    def all_reduce(self, array: Array, op: str, *, out: Array) -> None:
        """Call MPI_Allreduce."""
        self._world.Allreduce(array, out, self._op(op))

    def reduce(self, array: Array, op: str, root: int, *, out: Array | None) -> None:
        """Call MPI_Reduce."""
        self._world.Reduce(array, out, self._op(op), root)

    def reduce_scatter(self, array: Array, op: str, *, out: Array) -> None:
        """Call MPI_Reduce_scatter_block."""
        self._world.Reduce_scatter_block(array, out, self._op(op))

    def broadcast(self, array: Array, root: int, *, out: Array) -> None:
        """Call MPI_Bcast, which works in place."""
        self._world.Bcast(out, root)

    def gather(self, array: Array, root: int, *, out: Array | None) -> None:
        """Call MPI_Gather."""
        self._world.Gather(array, out, root)

    def scatter(self, array: Array | None, root: int, *, out: Array) -> None:
        """Call MPI_Scatter."""
        self._world.Scatter(array, out, root)

    def all_gather(self, array: Array, *, out: Array) -> None:
        """Call MPI_Allgather."""
        self._world.Allgather(array, out)

    def all_to_all(self, array: Array, *, out: Array) -> None:
        """Call MPI_Alltoall."""
        self._world.Alltoall(array, out)

    def scan(self, array: Array, op: str, *, out: Array) -> None:
        """Call MPI_Scan."""
        self._world.Scan(array, out, self._op(op))

    def exscan(self, array: Array, op: str, *, out: Array) -> None:
        """Call MPI_Exscan."""
        self._world.Exscan(array, out, self._op(op))

    def sendrecv(self, array: Array, dest: int, source: int, *, out: Array) -> None:
        """Call MPI_Sendrecv."""
        self._world.Sendrecv(array, dest, recvbuf=out, source=source)

    def send(self, array: Array, dest: int) -> None:
        """Call MPI_Send."""
        self._world.Send(array, dest)

    def recv(self, source: int, *, out: Array) -> None:
        """Call MPI_Recv."""
        self._world.Recv(out, source)


RAW: Final[dict[str, Callable[[int, int, np.dtype[Any]], Any]]] = {"mpi": RawMpi}
"""For a backend's name, what makes the calls of its library."""
