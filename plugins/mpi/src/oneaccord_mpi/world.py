"""The MPI world of a job: how its ranks make sure that they are one, and how one of them waits for what MPI does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypedDict

from oneaccord.api import (
    BackendUnavailableError,
    Bootstrap,
    Deadline,
    LibraryUse,
    StallCallback,
    compare_settings,
    read_cards,
    write_card,
)
from oneaccord_mpi import library
from oneaccord_mpi.config import MpiConfig

__all__ = ["MpiWorld"]

_TRIES = 32


class _Card(TypedDict):
    """What a rank tells the others before they begin."""

    size: int
    native: str
    check: bool
    library: str
    parallel: bool


class MpiWorld(LibraryUse):
    """MPI between the ranks of a job, and the memory that it uses.

    Parameters
    ----------
    bootstrap
        The identity of this rank, and how it finds the others.
    config
        What is set.

    Attributes
    ----------
    mpi
        The module ``mpi4py.MPI``.
    comm
        A communicator of oneaccord alone, in which ranks count as in the job.
    parallel
        Whether MPI serves several threads at a time.
    lock
        To be held during each call of an MPI that serves one thread at a time.

    Raises
    ------
    BackendUnavailableError
        There is no MPI library, or the ranks are not one MPI world.
    ConfigError
        The ranks have different ``[backends.mpi]``.
    DeadlineError
        Another rank did not get ready in time.
    """

    def __init__(self, bootstrap: Bootstrap, config: MpiConfig) -> None:
        self.config: MpiConfig = config
        super().__init__("MPI", bootstrap.rank, bootstrap.world_size, config.spin_us * 1e-6)
        self.mpi: Any = library.load(config.finalize_s)
        self.parallel: bool = self.mpi.Query_thread() >= self.mpi.THREAD_MULTIPLE
        self.lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext() if self.parallel else threading.Lock()
        world = self.mpi.COMM_WORLD
        mine = _Card(
            size=world.size,
            native=config.native,
            check=config.check,
            library=library.name_of(self.mpi),
            parallel=self.parallel,
        )
        cards = read_cards(bootstrap.exchange("mpi", write_card(mine)), _Card)
        self._compare(cards)
        # All ranks are here, so that this call, which has no deadline, does not wait for anybody.
        self.comm: Any = world.Split(0, self.rank)
        self.comm.Set_errhandler(self.mpi.ERRORS_RETURN)
        self._tags: int = world.Get_attr(self.mpi.TAG_UB) + 1

    def _compare(self, cards: list[_Card]) -> None:
        for rank, card in enumerate(cards):
            if card["size"] != self.size:
                raise BackendUnavailableError(
                    f"rank {rank} is in an MPI world of {card['size']}, and the job has {self.size} ranks: start all ranks with one "
                    f"`oneaccord run --backend mpi -n {self.size}`, mpiexec -n {self.size} or srun -n {self.size}, of the MPI that mpi4py "
                    f"loads (rank {rank}: {card['library']})"
                )
        compare_settings("mpi", cards)

    def wait(self, request: Any, nbytes: int, deadline: Deadline, on_stall: StallCallback | None) -> None:
        """Return when a collective is done.

        Parameters
        ----------
        request
            What MPI gave when it began.
        nbytes
            How much it moves: for how long it is worth to stay awake.
        deadline, on_stall
            Until when, and what is called with all other ranks when it takes long.

        Raises
        ------
        LinkLost
            The backend ended.
        TimeoutError
            The deadline passed; the collective goes on.
        """
        test = self.tested(request)
        for _ in range(_TRIES):
            if test():
                return
        self.wait_for(test, nbytes, deadline, on_stall)

    def tested(self, request: Any) -> Callable[[], bool]:
        """Return what lets MPI work, and returns whether a request is done."""
        test: Callable[[], bool] = request.Test
        if self.parallel:
            return test

        def locked() -> bool:
            with self.lock:
                return test()

        return locked

    def broken(self, error: Any) -> Exception:
        """Return what to raise for an error of MPI in a collective: no rank is to blame unless the job says so."""
        return self.failure(library.words(error))
