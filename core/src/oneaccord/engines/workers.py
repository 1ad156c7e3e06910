"""The driver of worker launchers: one function on all workers, as the ranks of a job; and functions on single workers."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from oneaccord.common.ranks import show_ranks
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.launcher import Ask
from oneaccord.contract.workers import Worker, WorkerLauncher, WorkerLost
from oneaccord.engines import worker_main
from oneaccord.engines.packing import unpack
from oneaccord.engines.worker_main import Outcome, Task
from oneaccord.errors import AbortedError, DeadlineError, OneAccordError, RankError, UsageError

__all__ = ["Call", "Gang", "Status"]

_GRACE_S: Final = 5.0
"""How long the other ranks may take to end after one has failed: they learn of it in their next call."""
_REVOKE_S: Final = 5.0
"""How long ranks may take to end when their group has been revoked, if their workers are to stay."""
_PARTING_S: Final = 1.0
"""How long, if the workers are stopped anyway."""
_LATE_S: Final = 0.1
"""How much later than its consequences a death may be seen."""
_LONGEST_WAIT_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Call:
    """A function for all ranks, packed with its arguments.

    Attributes
    ----------
    packed
        What `oneaccord.engines.packing.pack` has made of it.
    name
        Its name, for messages.
    backend, config
        What `oneaccord.init` takes on the ranks.
    """

    packed: bytes
    name: str
    backend: str | None = None
    config: str | Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """What is known of a rank that `oneaccord.launch_async` has started.

    Attributes
    ----------
    rank
        Its number.
    host
        The name of its host.
    state
        ``"running"``, ``"finished"`` or ``"failed"``.
    """

    rank: int
    host: str
    state: str


@dataclass(frozen=True, slots=True)
class _Failure:
    """How a rank failed."""

    rank: int
    error: BaseException
    name: str
    story: str
    order: tuple[bool, float]
    """The first cause has the least: whether it is a consequence of another one, and when it was."""
    has_returned: bool = False


class Gang:
    """Workers, which form the ranks of one job after the other.

    Parameters
    ----------
    launcher, workers
        The launcher, and what it has returned.
    stays
        Whether the workers are to be used again after a failure.
    """

    def __init__(self, launcher: WorkerLauncher, workers: Sequence[Worker], *, stays: bool) -> None:
        self._launcher = launcher
        self._stays = stays
        self.workers: tuple[Worker, ...] = tuple(workers)
        hosts = [worker.host for worker in workers]
        self._local_ranks = [hosts[:index].count(host) for index, host in enumerate(hosts)]
        self._has_one_clock = len(set(hosts)) == 1
        self._events: queue.SimpleQueue[tuple[int, Future[Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_cancelled = False
        self.is_closed: bool = False
        self._process = os.getpid()
        self.lost: dict[int, str] = {}
        """The ranks whose workers have ended, and how."""
        self.stuck: dict[int, str] = {}
        """The ranks that went on after the end of their call, and its name."""
        self.states: list[str] = ["running"] * len(workers)
        _open.add(self)

    @classmethod
    def of(cls, launcher: WorkerLauncher, ask: Ask, deadline: Deadline, *, stays: bool) -> Gang:
        """Get workers from a launcher; if it fails, let it give up what it has taken for them."""
        try:
            workers = launcher.place(ask, deadline)
        except BaseException:
            launcher.stop(())
            raise
        return cls(launcher, workers, stays=stays)

    @property
    def is_here(self) -> bool:
        """Whether this process has started the workers, and is not one that was forked since."""
        return self._process == os.getpid()

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call a function of oneaccord in one worker."""
        try:
            return self._launcher.call(self.workers[rank], function, args)
        except Exception as error:  # noqa: BLE001 - an engine's own error must reach the one place that deals with errors
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def cancel(self) -> None:
        """End the call under way, and let each later one end at once; from any thread."""
        self._is_cancelled = True
        self._events.put(None)

    def close(self) -> None:
        """End the workers; from any thread, once."""
        with self._lock:
            if self.is_closed or not self.is_here:
                return
            self.is_closed = True
        _open.discard(self)
        self._launcher.stop(self.workers)

    def run(self, call: Call, deadline: Deadline | None) -> list[Any]:
        """Call a function with a group of all workers, until a deadline if there is one; return the results, by rank.

        Raises
        ------
        BaseException
            What the rank raised that failed first.
        RankError
            A worker was lost, or its answer cannot be had.
        DeadlineError
            The time was up.
        AbortedError
            `cancel` was called.
        """
        try:
            return self._run(call, deadline)
        finally:
            self.states = ["failed" if state == "running" else state for state in self.states]

    def _run(self, call: Call, deadline: Deadline | None) -> list[Any]:
        self._events = queue.SimpleQueue()
        if self._is_cancelled:
            raise _cancelled(call)
        self.states = ["running"] * len(self.workers)
        job, secret = secrets.token_hex(8), secrets.token_hex(32)
        pending = {0}
        self._watch(0, self.call(0, worker_main.meet, job, self.workers[0].address))
        address = self._gather(pending, job, call, deadline, is_work=False)[0]
        if isinstance(address, BaseException):
            raise self._first([self._failure(0, address, time.monotonic())], call)
        size = len(self.workers)
        for rank, local_rank in enumerate(self._local_ranks):
            task = Task(job, secret, address, rank, size, local_rank, call.packed, call.backend, call.config)
            self._watch(rank, self.call(rank, worker_main.work, task))
        outcomes = self._gather(set(range(size)), job, call, deadline)
        failures = [each for each in outcomes.values() if isinstance(each, _Failure)]
        if failures:
            raise self._first(failures, call)
        return [self._result(rank, outcomes[rank]) for rank in range(size)]

    def _result(self, rank: int, outcome: Outcome) -> Any:
        try:
            return unpack(outcome.value or b"")
        except Exception as error:
            raise UsageError(
                f"the result of {self._name(rank)} cannot be unpickled here ({type(error).__name__}: {error}): return plain data or arrays, or objects "
                "whose class this program can import"
            ) from error

    def _watch(self, rank: int, future: Future[Any]) -> None:
        events = self._events
        future.add_done_callback(lambda done: events.put((rank, done)))

    def _gather(
        self, pending: set[int], job: str, call: Call, deadline: Deadline | None, *, is_work: bool = True
    ) -> dict[int, Any]:
        """Wait for the ends of calls; return what each has returned, or a `_Failure`, or the exception of what prepares it.

        Without ``is_work``, rank 0 prepares the work of all.
        """
        outcomes: dict[int, Any] = {}
        give_up: float | None = None
        while pending:
            now = time.monotonic()
            ends = [each for each in (give_up, None if deadline is None else deadline.at) if each is not None]
            until = min([now + _LONGEST_WAIT_S, *ends])
            try:
                event = self._events.get(timeout=max(0.0, until - now))
            except queue.Empty:
                event = None
            if event is not None:
                self._note(event, pending, outcomes)
                if give_up is None and isinstance(outcomes[event[0]], _Failure):
                    give_up = time.monotonic() + _GRACE_S
            elif self._is_cancelled:
                self._end(job, pending, outcomes, call)
                raise _cancelled(call)
            elif give_up is not None and time.monotonic() >= give_up:
                self._end(job, pending, outcomes, call)
                break
            elif deadline is not None and deadline.passed():
                late = self._end(job, pending, outcomes, call)
                late = late if is_work else list(range(len(self.workers)))
                raise DeadlineError(
                    f"{show_ranks(late)} of {len(self.workers)} had not finished {call.name} within {deadline.timeout_s:g} s (timeout_s): see what "
                    f"{'it does' if len(late) == 1 else 'they do'}, or give more time"
                )
        return outcomes

    def _note(self, event: tuple[int, Future[Any]], pending: set[int], outcomes: dict[int, Any]) -> None:
        rank, future = event
        pending.discard(rank)
        try:
            outcome = future.result(timeout=0)
        except BaseException as error:  # noqa: BLE001 - it is raised when all is known
            outcome = error
        if isinstance(outcome, WorkerLost):
            self.lost[rank] = outcome.reason
        if isinstance(outcome, BaseException) or (isinstance(outcome, Outcome) and outcome.error):
            outcome = self._failure(rank, outcome, time.monotonic())
        if isinstance(outcome, Outcome | _Failure):
            self.states[rank] = "finished" if isinstance(outcome, Outcome) else "failed"
        outcomes[rank] = outcome

    def _end(self, job: str, pending: set[int], outcomes: dict[int, Any], call: Call) -> list[int]:
        """End what ranks still do, so that their workers are free again; note those that go on all the same. Return the ranks whose function ran."""
        answers = {rank: self.call(rank, worker_main.revoke, job, rank) for rank in pending}
        until = time.monotonic() + (_REVOKE_S if self._stays and not self._is_cancelled else _PARTING_S)
        while pending and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=left)
                if event is not None:
                    self._note(event, pending, outcomes)
        self.stuck.update(dict.fromkeys(pending, call.name))
        idle = {rank for rank, answer in answers.items() if answer.done() and not answer.exception() and not answer.result()}
        # A rank that was ended through its group, by the end of another one, may have left before it was asked.
        idle |= {rank for rank, outcome in outcomes.items() if not isinstance(outcome, _Failure) or outcome.has_returned}
        return sorted(answers.keys() - idle or answers)

    def _failure(self, rank: int, outcome: BaseException | Outcome, came: float) -> _Failure:
        if isinstance(outcome, WorkerLost):
            error: BaseException = RankError(f"{self._name(rank)} was lost: {outcome.reason}", rank=rank)
            return _Failure(rank, error, outcome.reason, "", (False, came - _LATE_S))
        if isinstance(outcome, BaseException):  # of the engine, not of the function
            if isinstance(outcome, OneAccordError):
                error = outcome
            else:
                error = RankError(f"{self._name(rank)} could not be started: {type(outcome).__name__}: {outcome}", rank=rank)
                error.__cause__ = outcome
            return _Failure(rank, error, type(outcome).__name__, "", (False, came))
        at = outcome.at if self._has_one_clock else came
        return _Failure(
            rank, self.raised(rank, outcome), outcome.error, outcome.story, (outcome.is_secondary, at), outcome.has_returned
        )

    def raised(self, rank: int, outcome: Outcome) -> BaseException:
        """Return the exception of a function, or a `RankError` if it is none that can be raised here."""
        words = f"{outcome.error}: {outcome.message}" if outcome.message else outcome.error
        try:
            error = unpack(outcome.value) if outcome.value is not None else None
        except Exception as problem:  # noqa: BLE001 - its class is not there, or not the same
            error = problem
            reason = f"which cannot be unpickled here ({type(problem).__name__}: {problem})"
        else:
            reason = "which cannot be pickled"
            if isinstance(error, Exception):
                return error
            if (
                error is not None
            ):  # SystemExit would end this program, and KeyboardInterrupt would say that the user has ended it
                return RankError(f"{self._name(rank)} ended with {words}", rank=rank)
        return RankError(f"{self._name(rank)} raised {words}, {reason}", rank=rank)

    def _first(self, failures: Sequence[_Failure], call: Call) -> BaseException:
        """Return the first cause, with a note of where it comes from."""
        first = min(failures, key=lambda failure: failure.order)
        others = [
            f"rank {each.rank} ({each.name})" for each in sorted(failures, key=lambda each: each.rank) if each is not first
        ]
        note = f"raised by {call.name} on {self._name(first.rank)}"
        note += f"; then also: {', '.join(others)}" if others else ""
        first.error.add_note(note + (f"\n\nThe traceback of rank {first.rank}:\n{first.story.rstrip()}" if first.story else ""))
        return first.error

    def _name(self, rank: int) -> str:
        hosts = {worker.host for worker in self.workers}
        where = f" on {self.workers[rank].host}" if len(hosts) > 1 else ""
        return f"rank {rank} of {len(self.workers)}{where}"


def _cancelled(call: Call) -> AbortedError:
    return AbortedError(f"{call.name} was cancelled on all ranks")


_open: weakref.WeakSet[Gang] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for gang in list(_open):
        gang.cancel()
        gang.close()
