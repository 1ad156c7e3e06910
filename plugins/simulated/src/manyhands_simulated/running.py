"""Run a function on every rank of a world of threads."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from manyhands.api import CommError, Group, ThreadWorld, init

__all__ = ["Run", "run", "run_ranks"]

T = TypeVar("T")
_GRACE_S = 5.0
"""How long the other ranks may take to end once one has failed."""


@dataclass(frozen=True, slots=True)
class Run(Generic[T]):
    """What a world of threads did.

    Attributes
    ----------
    results
        What the function returned on each rank, in the order of ranks.
    """

    results: list[T]


def run(
    function: Callable[[Group], T],
    world_size: int,
    *,
    config: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
) -> Run[T]:
    """Call ``function(group)`` on each of ``world_size`` threads, and wait for all.

    Parameters
    ----------
    function
        The program of one rank. Threads share its globals: what a rank keeps to itself belongs in local variables.
    world_size
        How many ranks; at least 1.
    config
        Configuration, like the content of a ``manyhands.toml``; files of the working directory are not read.
    timeout_s
        Seconds that an operation may last.

    Returns
    -------
    Run
        With the results of all ranks.

    Raises
    ------
    InvalidWorldSizeError
        ``world_size`` is no positive integer.
    Exception
        What ``function`` raised on the rank that failed first. The other ranks are stopped: their calls on the group raise
        `AbortedError`. The exception has an attribute ``rank`` and a note that names it.
    """
    world = ThreadWorld(world_size, "simulated")

    def body(_: int) -> T:
        with init("simulated", config=config or {}, timeout_s=timeout_s) as group:
            return function(group)

    return Run(run_ranks(world, body))


def run_ranks(world: ThreadWorld, body: Callable[[int], T]) -> list[T]:
    """Call ``body(rank)`` in a thread for each rank; return the results, or raise what the first failing rank raised."""
    results: dict[int, T] = {}
    failures: list[tuple[int, BaseException]] = []
    # Events rather than Thread.join, which an interrupt can leave believing that a thread has ended.
    ended = [threading.Event() for _ in range(world.world_size)]

    def target(rank: int) -> None:
        try:
            with world.rank(rank):
                results[rank] = body(rank)
        except BaseException as error:  # noqa: BLE001 - raised again, in the thread that waits for all ranks
            failures.append((rank, error))
        finally:
            ended[rank].set()

    try:
        for rank in range(world.world_size):
            threading.Thread(target=target, args=(rank,), name=f"rank-{rank}", daemon=True).start()
        _wait_for(ended, failures)
    except BaseException as error:
        world.abort(f"the program was interrupted by {type(error).__name__}")
        until = time.monotonic() + _GRACE_S
        for event in ended:
            event.wait(max(0.0, until - time.monotonic()))
        raise
    if failures:
        raise _first(failures, world)
    return [results[rank] for rank in range(world.world_size)]


def _wait_for(ended: list[threading.Event], failures: list[tuple[int, BaseException]]) -> None:
    """Wait for all ranks; once one has failed, only as long as the others need to learn of it."""
    until = math.inf
    for event in ended:
        while not event.wait(0.1) and time.monotonic() < until:
            if failures and until == math.inf:
                until = time.monotonic() + _GRACE_S


def _first(failures: list[tuple[int, BaseException]], world: ThreadWorld) -> BaseException:
    """Return the cause among the failures: that of the rank that stopped the others, or else what a program raised by itself."""
    causes = [failure for failure in failures if not isinstance(failure[1], CommError)] or failures
    rank, error = next((failure for failure in causes if failure[0] == world.aborted_by), causes[0])
    error.add_note(f"raised on rank {rank} of {world.world_size}")
    if getattr(error, "rank", None) is None:
        error.rank = rank  # type: ignore[attr-defined]
    return error
