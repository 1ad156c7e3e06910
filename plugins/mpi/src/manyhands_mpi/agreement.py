"""What happens before MPI performs a collective: the ranks find out whether all make the same call.

MPI compares nothing. Ranks that call different things hang, crash or get wrong numbers. So the ranks first reduce the digests of
their calls, 16 bytes, which takes as long as a barrier. And since all have entered the same call when that is done, what
follows waits for nobody any more.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from manyhands.api import Deadline, HeaderMismatch
from manyhands_mpi.patience import StallCallback

if TYPE_CHECKING:
    from manyhands_mpi.backend import MpiBackend

__all__ = ["Agreement"]

_PAIR = struct.Struct("=QQ")
_ONE = struct.Struct("=Q")
_ALL_BITS = (1 << 64) - 1


class Agreement:
    """Compares digests over all ranks, one call at a time.

    Parameters
    ----------
    backend
        Whose ranks.
    """

    def __init__(self, backend: MpiBackend) -> None:
        self._backend = backend
        self._mine = bytearray(_PAIR.size)
        self._least = bytearray(_PAIR.size)
        mpi, comm = backend.mpi, backend.comm
        arguments = ((self._mine, 2, mpi.UINT64_T), (self._least, 2, mpi.UINT64_T), mpi.MIN)
        self._start: Callable[[], Any] = lambda: comm.Iallreduce(*arguments)
        try:
            # MPI 4 sets a reduction up once for all; a call is then half as long.
            persistent = comm.Allreduce_init(*arguments)
        except NotImplementedError:
            return

        def start() -> Any:
            persistent.Start()
            return persistent

        self._start = start

    def reach(self, digest: bytes, deadline: Deadline, on_stall: StallCallback | None) -> None:
        """Return when every rank has come with the same ``digest``.

        Raises
        ------
        HeaderMismatch
            A rank, which the error names, makes another call.
        LinkLost, TimeoutError
            As `MpiBackend.wait`.
        """
        backend = self._backend
        mine = _ONE.unpack(digest)[0]
        _PAIR.pack_into(self._mine, 0, mine, mine ^ _ALL_BITS)
        with backend.lock:
            request = self._start()
        try:
            backend.wait(request, 0, deadline, on_stall)
        except BaseException:
            # MPI may still read and write there.
            backend.hold(self)
            raise
        if self._least != self._mine:
            raise HeaderMismatch(self._differing(digest, deadline), b"")

    def _differing(self, digest: bytes, deadline: Deadline) -> int:
        """Return the first rank whose digest is not this one; all ranks have found a mismatch, and ask."""
        backend, byte = self._backend, self._backend.mpi.BYTE
        size = len(digest)
        everyones = bytearray(size * backend.size)
        with backend.lock:
            request = backend.comm.Iallgather((digest, size, byte), (everyones, size, byte))
        backend.hold((request, digest, everyones))
        backend.wait(request, 0, deadline, None)
        return next(rank for rank in range(backend.size) if everyones[rank * size : (rank + 1) * size] != digest)
