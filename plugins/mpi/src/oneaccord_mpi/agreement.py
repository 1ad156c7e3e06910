"""What happens before MPI performs a collective: the ranks find out whether all make the same call.

MPI compares nothing. Ranks that call different things hang, crash or get wrong numbers. So the ranks first reduce the digests of
their calls, 16 bytes, which takes as long as a barrier. And since all have entered the same call when that is done, what
follows waits for no rank any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oneaccord.api import Deadline, StallCallback, agree_on_call
from oneaccord_mpi.world import MpiWorld

__all__ = ["Agreement"]


class Agreement:
    """Compares digests over all ranks, one call at a time.

    Parameters
    ----------
    world
        Whose ranks.
    """

    def __init__(self, world: MpiWorld) -> None:
        self._world = world
        self._mine, self._least = bytearray(16), bytearray(16)
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

        def least(pair: bytes) -> bytearray:
            self._mine[:] = pair
            with world.lock:
                request = self._start()
            try:
                world.wait(request, 0, deadline, on_stall)
            except BaseException:
                # MPI may still read and write there.
                world.hold(self)
                raise
            return self._least

        def gather(mine: bytes) -> bytearray:
            size, byte = len(mine), world.mpi.BYTE
            everyones = bytearray(size * world.size)
            with world.lock:
                request = world.comm.Iallgather((mine, size, byte), (everyones, size, byte))
            world.hold((request, mine, everyones))
            world.wait(request, 0, deadline, None)
            return everyones

        agree_on_call(digest, world.size, least, gather)
