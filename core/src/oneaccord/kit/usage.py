"""What a backend knows of its library: whether a wait still has a point, which memory the library may still touch, and what an error means.

A library inside a call does not notice that a peer has died, or notices it as some error of its own. The job knows within a moment which rank died,
and calls `Backend.abort`. So each wait looks at `LibraryUse.ended`, and an error of the library waits for the job's verdict.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from oneaccord.contract.backend import Bootstrap
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.transport import LinkLost
from oneaccord.errors import BackendUnavailableError, CommError, ConfigError
from oneaccord.kit.waiting import StallCallback, wait_until

__all__ = ["LibraryUse", "compare_settings", "require_processes"]

_SLOW_BYTES_PER_S = 250e6
"""A transfer that is slower than that stands still."""


class LibraryUse:
    """The use of a library by one rank: a base of a backend, or of a part of it.

    Parameters
    ----------
    name
        The library's name in errors.
    rank, size
        Who this rank is.
    spin_s
        How many seconds a wait for a message without bytes yields the processor before it sleeps between tests.

    Attributes
    ----------
    library_name
        The library's name.
    ended
        Why nobody may wait any more; empty while all is well.
    held
        The memory that the library may still touch, by its identity.
    pauses_s
        The first and the longest sleep between tests, as `wait_until` takes them.
    verdict_s
        How many seconds an error of the library waits for the job to learn what caused it, such as a rank that died.
    """

    pauses_s: ClassVar[tuple[float, float]] = (20e-6, 1e-3)
    verdict_s: ClassVar[float] = 1.0

    def __init__(self, name: str, rank: int, size: int, spin_s: float = 0.0) -> None:
        self.library_name: str = name
        self.rank: int = rank
        self.size: int = size
        self.spin_s: float = spin_s
        self.ended: str = ""
        self.held: dict[int, Any] = {}

    def end(self, why: str) -> None:
        """Let nobody wait any more. From any thread; the first reason stays.

        Parameters
        ----------
        why
            The reason, for `LinkLost`.
        """
        self.ended = self.ended or why

    def check(self, peer: int | None = None) -> None:
        """Return while nothing has ended the use.

        Parameters
        ----------
        peer
            The rank that the error names; None for any.

        Raises
        ------
        LinkLost
            The use has ended.
        """
        if self.ended:
            raise LinkLost((self.rank + 1) % self.size if peer is None else peer, self.ended)

    def hold(self, what: object) -> None:
        """Keep memory that the library uses until `release`: for ever where a call fails.

        Parameters
        ----------
        what
            An object that holds the memory.
        """
        self.held[id(what)] = what

    def release(self, what: object) -> None:
        """Let go of memory that the library is done with.

        Parameters
        ----------
        what
            The object that `hold` was given; another one changes nothing.
        """
        self.held.pop(id(what), None)

    def patience_s(self, nbytes: int) -> float:
        """Return for how many seconds a wait stays awake.

        Parameters
        ----------
        nbytes
            How much the message or the collective moves.

        Returns
        -------
        float
            Seconds.
        """
        return self.spin_s + nbytes / _SLOW_BYTES_PER_S

    def wait_for(self, done: Callable[[], object], nbytes: int, deadline: Deadline, on_stall: StallCallback | None) -> None:
        """Return when a collective is done.

        Parameters
        ----------
        done
            Asks the library.
        nbytes
            How much the collective moves.
        deadline
            Until when.
        on_stall
            Called with all other ranks when the wait has lasted for a while.

        Raises
        ------
        LinkLost
            The use has ended.
        TimeoutError
            The deadline passed; the collective goes on.
        """

        def stall() -> None:
            if on_stall is not None:
                on_stall([rank for rank in range(self.size) if rank != self.rank])

        wait_until(done, self.check, deadline, self.patience_s(nbytes), stall, self.pauses_s)

    def failure(self, words: str) -> Exception:
        """Return what to raise for an error of the library in a collective: no rank is to blame unless the job says so.

        Parameters
        ----------
        words
            What the library says.

        Returns
        -------
        Exception
            `LinkLost` if the job ends within `verdict_s`, else `CommError`.
        """
        # An error is often only how a death shows itself here; the job knows within a moment who died.
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: self.ended, lambda: None, Deadline(self.verdict_s), 0.0)
        if self.ended:
            return LinkLost((self.rank + 1) % self.size, f"{self.ended}; {words}")
        return CommError(f"{self.library_name} failed: {words}", rank=self.rank)


def require_processes(bootstrap: Bootstrap, backend: str) -> None:
    """Refuse ranks that are threads of one process, which most libraries cannot tell apart.

    Parameters
    ----------
    bootstrap
        What the factory got.
    backend
        The backend's name.

    Raises
    ------
    BackendUnavailableError
        The ranks are threads.
    """
    if bootstrap.shared is not None:
        raise BackendUnavailableError(f"the ranks of the {backend} backend are processes, and these are threads of one process")


def compare_settings(backend: str, cards: Sequence[Mapping[str, Any]], names: Mapping[str, str] | None = None) -> None:
    """Compare what must be alike on all ranks.

    Parameters
    ----------
    backend
        The backend's name.
    cards
        What each rank has, from rank 0 on, as `Bootstrap.exchange` brought it; the keys are those of ``[backends.NAME]``.
    names
        What to call a key that is no setting, such as ``{"library": "the version of UCX"}``.

    Raises
    ------
    ConfigError
        A rank, which the error names, has something else than rank 0.
    """
    first = cards[0]
    for rank, card in enumerate(cards):
        for key, value in card.items():
            if value != first.get(key):
                name = (names or {}).get(key, f"backends.{backend}.{key}")
                raise ConfigError(
                    f"{name} is {first.get(key)} on rank 0 and {value} on rank {rank}: all ranks need the same",
                    key=f"backends.{backend}.{key}",
                    value=value,
                )
