"""What happens before MPI performs a collective: the ranks find out whether all make the same call.

MPI compares nothing. Ranks that call different things hang, crash or get wrong numbers. So the ranks first reduce the digests of
their calls, 16 bytes, which takes as long as a barrier. And since all have entered the same call when that is done, what
follows waits for nobody any more.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from manyhands.api import Deadline, HeaderMismatch
from manyhands_mpi.patience import StallCallback
from manyhands_mpi.world import MpiWorld

__all__ = ["Agreement"]

_PAIR = struct.Struct("=QQ")
_ONE = struct.Struct("=Q")
_ALL_BITS = (1 << 64) - 1


class Agreement:
    """Compares digests over all ranks, one call at a time.

    Parameters
    ----------
    world
        Whose ranks.
    """

    def __init__(self, world: MpiWorld) -> None:
        self._world = world
        self._mine = bytearray(_PAIR.size)
        self._least = bytearray(_PAIR.size)
        mpi, comm = world.mpi, world.comm
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
            As `MpiWorld.wait`.
        """
        world = self._world
        mine = _ONE.unpack(digest)[0]
        _PAIR.pack_into(self._mine, 0, mine, mine ^ _ALL_BITS)
        with world.lock:
            request = self._start()
        try:
            world.wait(request, 0, deadline, on_stall)
        except BaseException:
            # MPI may still read and write there.
            world.hold(self)
            raise
        if self._least != self._mine:
            raise HeaderMismatch(self._differing(digest, deadline), b"")

    def _differing(self, digest: bytes, deadline: Deadline) -> int:
        """Return the first rank whose digest is not this one; all ranks have found a mismatch, and ask."""
        world, byte = self._world, self._world.mpi.BYTE
        size = len(digest)
        everyones = bytearray(size * world.size)
        with world.lock:
            request = world.comm.Iallgather((digest, size, byte), (everyones, size, byte))
        world.hold((request, digest, everyones))
        world.wait(request, 0, deadline, None)
        return next(rank for rank in range(world.size) if everyones[rank * size : (rank + 1) * size] != digest)
