"""What a plugin implements whose engine has workers, processes in which it calls functions, such as Ray and Dask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

    from oneaccord.contract.deadline import Deadline
    from oneaccord.contract.launcher import Ask

__all__ = ["Worker", "WorkerLauncher", "WorkerLost"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker, for one rank.

    Attributes
    ----------
    index
        Which of the workers of a launch it is, counted from 0; the rank there has this number.
    host
        The name of its host, the same for all workers of one host.
    address
        The numeric address of that host at which the other ranks reach it.
    handle
        What the launcher needs to find the worker again.
    """

    index: int
    host: str
    address: str
    handle: Any = field(default=None, compare=False)


class WorkerLost(Exception):
    """A worker has ended, and with it the calls that it was to answer.

    Parameters
    ----------
    reason
        How, in words, such as ``"killed by SIGKILL"``.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason: str = reason


class WorkerLauncher(Protocol):
    """A launcher whose engine has workers: processes, or threads of processes, in which it calls functions.

    oneaccord calls it from several threads, and asks a launcher for workers once. It sends only functions of oneaccord
    itself, and plain data, so the engine may use any kind of pickle. oneaccord must be installed where the workers run.
    """

    def place(self, ask: Ask, deadline: Deadline) -> Sequence[Worker]:
        """Get one worker for each rank; the workers of one host are neighbours.

        Parameters
        ----------
        ask
            How many ranks, and what each needs.
        deadline
            Until when they must be there.

        Raises
        ------
        UsageError
            The engine can never have such workers; the message says what it has.
        DeadlineError
            They are not free by the deadline.
        """
        ...

    def call(self, worker: Worker, function: Callable[..., T], args: tuple[Any, ...]) -> Future[T]:
        """Run ``function(*args)`` in a worker, and return at once.

        Several calls in one worker may run at the same time: one ends the work of another. The worker runs each call exactly once, never
        again after a failure.

        Parameters
        ----------
        worker
            One that `place` has returned.
        function, args
            A function of oneaccord and plain data. Its result is plain data too.

        Returns
        -------
        Future
            The value of the function, or its exception; `WorkerLost` if the worker ends first.
        """
        ...

    def stop(self, workers: Sequence[Worker]) -> None:
        """End the workers with whatever they do, within seconds; called again, it does nothing.

        When it is done, no process of theirs is left, or none that the engine does not end by itself.

        Parameters
        ----------
        workers
            What `place` has returned; empty if it raised.
        """
        ...
