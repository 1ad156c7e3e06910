"""Ranks that are threads of one process: how `oneaccord.init` in such a thread knows which rank it is."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from oneaccord.common.checks import is_number, is_success, safe_str, whole
from oneaccord.contract.runtime import Runtime
from oneaccord.errors import InvalidRankError, InvalidWorldSizeError, UsageError
from oneaccord.runtime.computer import COMPUTER
from oneaccord.runtime.idle import stands_by

if TYPE_CHECKING:
    from oneaccord.control.local import LocalHub
    from oneaccord.control.recorder import FlightRecorder

__all__ = [
    "ThreadRank",
    "ThreadWorld",
    "current_rank",
    "current_runtime",
    "current_thread_rank",
    "current_world",
    "duration",
    "inherit_rank",
    "outside",
    "sleep",
]


class ThreadWorld:
    """A job whose ranks are threads of this process.

    Parameters
    ----------
    world_size
        How many ranks; at least 1.
    backend
        The backend that their groups use unless they name another one.
    runtime
        The runtime of the ranks; the computer itself by default.
    recorder
        ``recorder(rank)`` makes the recorder for the calls of a rank in one group and all that are made of it; a plain `FlightRecorder` by default.

    Attributes
    ----------
    shared
        Data that the ranks share; a backend's factory finds it as ``bootstrap.shared``.

    Raises
    ------
    InvalidWorldSizeError
        ``world_size`` is no positive integer.
    """

    def __init__(
        self,
        world_size: int,
        backend: str,
        runtime: Runtime = COMPUTER,
        recorder: Callable[[int], FlightRecorder] | None = None,
    ) -> None:
        size = whole(world_size)
        if size is None or size < 1:
            raise InvalidWorldSizeError(f"world_size must be a positive integer, not {world_size!r}")
        self.world_size: int = size
        self.backend: str = backend
        self.runtime: Runtime = runtime
        self._recorder = recorder
        self.shared: dict[str, Any] = {}
        self._maker = threading.current_thread()
        self._hubs: dict[int, LocalHub] = {}
        self._lost: dict[int, str] = {}

    @contextmanager
    def rank(self, rank: int) -> Iterator[None]:
        """Make the calling thread this rank, until the context ends.

        Groups that are still open then are closed; when the context ends by an exception, they are aborted with it, and every
        other rank that waits learns so.

        Parameters
        ----------
        rank
            The rank.

        Raises
        ------
        InvalidRankError
            ``rank`` is not in the world.
        CommError
            Closing a group found that the job had failed.
        """
        if not 0 <= rank < self.world_size:
            raise InvalidRankError(f"rank {rank} is not in a world of {self.world_size}")
        member = ThreadRank(self, rank)
        stands_by(self._maker)  # it waits for the ranks; in a world of one, which no rank enters so, it is the rank
        stands_by(threading.current_thread())
        token = _current.set(member)
        try:
            yield
        except BaseException as error:
            member.finish(error)
            raise
        else:
            member.finish(None)
        finally:
            _current.reset(token)

    @property
    def aborted_by(self) -> int | None:
        """The rank whose failure stopped the others; None if there was none, or it was not a rank's own."""
        verdicts = [hub.verdict for _, hub in sorted(self._hubs.items())]
        return next(
            (verdict.peer for verdict in verdicts if verdict is not None and verdict.kind in ("aborted", "changed")), None
        )

    def abort(self, text: str, kind: str = "aborted", rank: int | None = None) -> None:
        """Stop every rank: waits on a group, and later calls, raise an error with this text.

        Parameters
        ----------
        text
            Why.
        kind
            Which error: ``"aborted"`` for `AbortedError`, ``"deadlock"`` for `DeadlockError`, ``"mismatch"`` for
            `CollectiveMismatchError`, ``"lost"`` for `PeerLostError`.
        rank
            The rank that it is about.
        """
        from oneaccord.control.protocol import Verdict

        for number in range(len(self._hubs) or 1):
            self.hub(number).fail(Verdict(kind, text, rank))

    def lose(self, rank: int, reason: str) -> None:
        """Let every group learn that a rank has died.

        Parameters
        ----------
        rank
            The rank.
        reason
            The cause of its death.
        """
        self._lost[rank] = reason
        for number in range(len(self._hubs) or 1):
            self.hub(number).lost(rank, reason)

    def has_met(self, rank: int) -> bool:
        """Return whether all ranks have come to the group that a rank made last.

        Parameters
        ----------
        rank
            The rank.
        """
        hub = self._last_hub(rank)
        return hub is not None and hub.is_complete()

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has closed the group that it made last.

        Parameters
        ----------
        rank
            The rank.
        """
        hub = self._last_hub(rank)
        return hub is not None and hub.has_left(rank)

    def _last_hub(self, rank: int) -> LocalHub | None:
        return next(
            (self._hubs[number] for number in sorted(self._hubs, reverse=True) if self._hubs[number].has_come(rank)), None
        )

    def hub(self, number: int) -> LocalHub:
        """Return the hub of the ``number``-th group that the ranks make; for core."""
        from oneaccord.control.local import LocalHub

        hub = self._hubs.get(number)
        if hub is None:
            # dict.setdefault is atomic, and a hub that loses the race holds nothing.
            hub = self._hubs.setdefault(number, LocalHub(self.world_size, self.runtime, self._recorder))
            for rank, reason in list(self._lost.items()):
                hub.lost(rank, reason)
        return hub


class ThreadRank:
    """The calling thread's rank in a `ThreadWorld`."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world = world
        self.rank = rank
        self._opened = 0
        self._finishers: dict[Any, None] = {}

    def next_hub(self) -> LocalHub:
        """Return the hub for the next group of this rank."""
        self._opened += 1
        return self.world.hub(self._opened - 1)

    def at_end(self, finisher: Any) -> None:
        """Call ``finisher(error or None)`` when the rank's thread ends."""
        self._finishers[finisher] = None

    def not_at_end(self, finisher: Any) -> None:
        """Do not call ``finisher`` any more, nor keep it."""
        self._finishers.pop(finisher, None)

    def finish(self, error: BaseException | None) -> None:
        """End the rank."""
        if error is not None and is_success(error):
            error = None
        if error is not None:
            # The others may be on their way to the next group, and would wait for this rank there.
            from oneaccord.control.protocol import Verdict

            text = f"rank {self.rank} ended with {type(error).__name__}: {safe_str(error)}"
            self.next_hub().fail(Verdict("aborted", text, self.rank))
        for finisher in list(self._finishers):
            finisher(error)


_current: ContextVar[ThreadRank | None] = ContextVar("oneaccord_thread_rank", default=None)


def current_thread_rank() -> ThreadRank | None:
    """Return which rank of which world the calling thread is, None in an ordinary program."""
    return _current.get()


def current_rank() -> int | None:
    """Return the calling thread's rank, None in an ordinary program."""
    member = _current.get()
    return None if member is None else member.rank


def current_runtime() -> Runtime:
    """Return the runtime of the calling thread's rank: in an ordinary program the computer itself."""
    member = _current.get()
    return COMPUTER if member is None else member.world.runtime


def current_world() -> ThreadWorld | None:
    """Return the world that the calling thread is a rank of, None in an ordinary program."""
    member = _current.get()
    return None if member is None else member.world


def inherit_rank(action: Callable[[], None]) -> Callable[[], None]:
    """Return an action to run in another thread, which is part of the calling thread's rank there.

    Parameters
    ----------
    action
        The function to run.

    Returns
    -------
    callable
        Without arguments.
    """
    member = _current.get()

    def run() -> None:
        token = _current.set(member)
        try:
            action()
        finally:
            _current.reset(token)

    return run


def sleep(seconds: float) -> None:
    """Sleep, on the clock of the calling rank.

    Outside of simulated worlds this is `time.sleep`. A simulated world has a clock of its own, which jumps ahead when no rank
    has anything else to do.

    Parameters
    ----------
    seconds
        How long.

    Raises
    ------
    UsageError
        ``seconds`` is no finite number of at least 0.
    """
    seconds = duration(seconds)
    member = _current.get()
    if member is None:
        COMPUTER.sleep(seconds)
        return
    member.world.runtime.enter(member.rank)
    member.world.runtime.sleep(seconds)


def outside() -> AbstractContextManager[None]:
    """Declare that the calling thread waits for something that no rank brings, such as a file or another program.

    In a simulated world the clock stands until the context ends. Other ranks that can run do so meanwhile, so the computer decides what they do
    first. With all other backends the context does nothing. Inside, a call on a group of a simulated world raises `UsageError`; do not
    ``await`` there.

    Returns
    -------
    context manager
        To be entered once, by the thread that waits.

    Examples
    --------
    >>> import subprocess, sys
    >>> with oa.outside():
    ...     done = subprocess.run([sys.executable, "-c", "print(6)"], capture_output=True, check=True)
    >>> done.stdout.strip()
    b'6'
    """
    return current_runtime().outside()


def duration(seconds: float) -> float:
    """Return a number of seconds that may be waited.

    Raises
    ------
    UsageError
        It is no finite number of at least 0.
    """
    if not is_number(seconds) or not 0 <= seconds < math.inf:
        raise UsageError(f"seconds must be a finite number of at least 0, not {seconds!r}")
    return float(seconds)
