"""The MPI world of a job: how its ranks make sure that they are one, and how one of them waits for what MPI does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypedDict

from manyhands.api import BackendUnavailableError, Bootstrap, CommError, ConfigError, Deadline, LinkLost, read_cards, write_card
from manyhands_mpi import library
from manyhands_mpi.config import MpiConfig
from manyhands_mpi.patience import StallCallback, wait_until

__all__ = ["MpiWorld"]

_TRIES = 32
_SLOW_BYTES_PER_S = 250e6
"""A transfer that is slower than that stands still."""
_VERDICT_S = 1.0
"""How long an error of MPI waits for the job to learn what caused it, such as a rank that died."""


class _Card(TypedDict):
    """What a rank tells the others before they begin."""

    size: int
    native: str
    check: bool
    library: str
    parallel: bool


class MpiWorld:
    """MPI between the ranks of a job, and the memory that it uses.

    Parameters
    ----------
    bootstrap
        Who this rank is, and how it finds the others.
    config
        What is set.

    Attributes
    ----------
    rank, size
        Who this rank is.
    mpi
        The module ``mpi4py.MPI``.
    comm
        A communicator of manyhands alone, in which ranks count as in the job.
    lock
        To be held during each call of an MPI that serves one thread at a time.
    ended
        Why nobody may wait any more; empty while all is well.

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
        self.rank: int = bootstrap.rank
        self.size: int = bootstrap.world_size
        self.ended: str = ""
        self._held: dict[int, object] = {}
        self.mpi: Any = library.load(config.finalize_s)
        self._parallel: bool = self.mpi.Query_thread() >= self.mpi.THREAD_MULTIPLE
        self.lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext() if self._parallel else threading.Lock()
        world = self.mpi.COMM_WORLD
        mine = _Card(
            size=world.size,
            native=config.native,
            check=config.check,
            library=library.name_of(self.mpi),
            parallel=self._parallel,
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
                    f"`manyhands run --backend mpi -n {self.size}`, mpiexec -n {self.size} or srun -n {self.size}, of the MPI that mpi4py "
                    f"loads (rank {rank}: {card['library']})"
                )
            first = dict(cards[0])
            for key, value in card.items():
                if value != first[key]:
                    raise ConfigError(
                        f"backends.mpi.{key} is {first[key]!r} on rank 0 and {value!r} on rank {rank}: all ranks need the same",
                        key=f"backends.mpi.{key}",
                        value=value,
                    )

    def end(self, why: str) -> None:
        """Let nobody wait any more; the first reason stays."""
        self.ended = self.ended or why

    def check(self) -> None:
        """Raise `LinkLost` when the backend has ended."""
        if self.ended:
            raise LinkLost((self.rank + 1) % self.size, self.ended)

    def hold(self, what: object) -> None:
        """Keep memory that MPI uses, until `release`: for ever where a call fails."""
        self._held[id(what)] = what

    def release(self, what: object) -> None:
        """Let go of memory that MPI is done with."""
        self._held.pop(id(what), None)

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
        test = request.Test if self._parallel else self._locked(request.Test)
        for _ in range(_TRIES):
            if test():
                return
        others = [rank for rank in range(self.size) if rank != self.rank]
        wait_until(test, self.check, deadline, self.patience_s(nbytes), on_stall and (lambda: on_stall(others)))

    def _locked(self, test: Callable[[], bool]) -> Callable[[], bool]:
        def locked() -> bool:
            with self.lock:
                return test()

        return locked

    def patience_s(self, nbytes: int) -> float:
        """Return for how long a wait stays awake for a message of ``nbytes`` bytes."""
        return self.config.spin_us * 1e-6 + nbytes / _SLOW_BYTES_PER_S

    def broken(self, error: Any) -> Exception:
        """Return what to raise for an error of MPI in a collective: no rank is to blame unless the job says so."""
        # An error is often only how a death shows itself here; the job knows within a moment who died.
        with contextlib.suppress(TimeoutError, LinkLost):
            wait_until(lambda: False, self.check, Deadline(_VERDICT_S), 0.0)
        if self.ended:
            return LinkLost((self.rank + 1) % self.size, f"{self.ended}; {library.words(error)}")
        return CommError(f"MPI failed: {library.words(error)}", rank=self.rank)
