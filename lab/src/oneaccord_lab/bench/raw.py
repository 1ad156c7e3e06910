"""Foreign libraries called without oneaccord, in the same processes and on the same arrays: the cost of a backend's comfort.

Only libraries that a backend has loaded are called, so that nothing is started twice.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from oneaccord.errors import UnsupportedError

__all__ = ["ASYNC_RAW", "RAW", "RawGloo", "RawMpi"]

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


_TORCH_OPS: Final[dict[str, str]] = {"sum": "SUM", "product": "PRODUCT", "min": "MIN", "max": "MAX"}


class RawMpi:
    """mpi4py on MPI's world, under the names that `Group` uses.

    Parameters
    ----------
    rank, world_size
        This rank; MPI must count alike.
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
                f"MPI says that this is rank {self._world.rank} of {self._world.size}, but oneaccord says rank {rank} of {world_size}"
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

    def all_reduce_async(self, array: Array, op: str, *, out: Array) -> Any:
        """Call MPI_Iallreduce; return the request."""
        return self._world.Iallreduce(array, out, self._op(op))

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


class RawGloo:
    """The process group of torch.distributed over Gloo, as torch's users call it.

    Parameters
    ----------
    rank, world_size
        This rank, and the number of all.
    dtype
        Of all arrays.
    folder
        A folder that all ranks see, and in which they meet.

    Raises
    ------
    UnsupportedError
        torch has no such dtype.
    """

    def __init__(self, rank: int, world_size: int, dtype: np.dtype[Any], folder: Path) -> None:
        self._torch: Any = import_module("torch")
        self._distributed: Any = import_module("torch.distributed")
        if not hasattr(self._torch, dtype.name) or dtype.isbuiltin != 1:
            raise UnsupportedError(f"torch takes no array of {dtype} from NumPy")
        if not self._distributed.is_initialized():
            where = f"file://{folder.resolve()}/gloo"
            self._distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)

    def all_reduce_async(self, array: Array, op: str, *, out: Array) -> Any:
        """Call all_reduce with ``async_op=True`` on ``out``, which holds a copy of ``array``; return the work."""
        if op not in _TORCH_OPS:
            raise UnsupportedError(f"Gloo has no reduction {op!r}")
        reduction = getattr(self._distributed.ReduceOp, _TORCH_OPS[op])
        return self._distributed.all_reduce(self._torch.from_numpy(out), reduction, async_op=True)

    def close(self) -> None:
        """End the process group."""
        if self._distributed.is_initialized():
            self._distributed.destroy_process_group()


def _mpi(rank: int, world_size: int, dtype: np.dtype[Any], folder: Path) -> RawMpi:  # noqa: ARG001 - as RawGloo is made
    return RawMpi(rank, world_size, dtype)


RAW: Final[dict[str, Callable[[int, int, np.dtype[Any]], Any]]] = {"mpi": RawMpi}
"""For a backend's name, the class that makes the calls of its library."""

ASYNC_RAW: Final[dict[str, Callable[[int, int, np.dtype[Any], Path], Any]]] = {"gloo": RawGloo, "mpi": _mpi}
"""For a backend's name, the class that begins asynchronous calls of its library."""
