"""`Ranks`: workers that stay, for one function after the other, and for tasks that need no group."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from oneaccord.common.checks import whole
from oneaccord.common.ranks import show_ranks
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.workers import WorkerLauncher, WorkerLost
from oneaccord.engines import worker_main
from oneaccord.engines.launching import PLACING_S, asked, packed_call, start
from oneaccord.engines.packing import pack, unpack
from oneaccord.engines.worker_main import Outcome
from oneaccord.engines.workers import Gang
from oneaccord.errors import ClosedError, DeadlineError, OneAccordError, RankError, UsageError

__all__ = ["Ranks"]

T = TypeVar("T")


@dataclass(slots=True)
class _Task:
    """A task for any worker."""

    packed: bytes
    name: str
    future: Future[Any]
    retries: int


class Ranks(Executor):
    """Ranks that stay, so that each further function starts at once: a context manager, and a `concurrent.futures.Executor`.

    `run` calls a function with a group on all ranks, as `oneaccord.launch` does. `submit` and `map` call functions that need no group, each on one rank
    that is free. Both may be used in turn, and from several threads: a `run` begins when the tasks under way have ended, and other tasks wait for its end.

    Parameters
    ----------
    n, on, per_host, gpus, options, backend, config
        As for `oneaccord.launch`.
    retries
        How often a task of `submit` and `map` is tried again, on another rank if there is one, when it raises an exception or its rank is lost.
    timeout_s
        The most seconds until the workers have places.

    Raises
    ------
    UsageError, PluginError
        As for `oneaccord.launch`.
    DeadlineError
        The engine had no workers in time.

    Examples
    --------
    >>> import oneaccord as oa
    >>> with oa.Ranks(4) as ranks:  # doctest: +SKIP
    ...     totals = ranks.run(train, data)
    ...     squares = list(ranks.map(pow, range(100), [2] * 100))
    """

    def __init__(
        self,
        n: int,
        *,
        on: str | WorkerLauncher = "local",
        per_host: int | None = None,
        gpus: int = 0,
        options: Mapping[str, Any] | None = None,
        backend: str | None = None,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        retries: int = 0,
        timeout_s: float = PLACING_S,
    ) -> None:
        deadline = Deadline(timeout_s)
        ask = asked(n, per_host, gpus)
        if (whole(retries) is None) or retries < 0:
            raise UsageError(f"retries must be a number of times, 0 or more, not {retries!r}")
        self._call = packed_call(_nothing, (), None, backend, config)
        self._retries = retries
        launcher = start(on, options, self._call)
        self._gang = Gang.of(launcher, ask, deadline, stays=True)
        self._changed = threading.Condition()
        self._tasks: deque[_Task] = deque()
        self._free = set(range(ask.ranks))
        self._runs_before: deque[object] = deque()
        """The calls of `run` that wait or are under way, in their order."""
        self._closed = ""
        self._ended = threading.Event()
        """Whether no rank is left."""
        weakref.finalize(self, _abandon, self._gang).atexit = False

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._gang.workers)

    def run(self, function: Callable[..., T], /, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[T]:
        """Call ``function(group, *args, **kwargs)`` on each rank, with a new group of all of them; return the results, by rank.

        Parameters
        ----------
        function, *args, **kwargs
            The function and its arguments, as for `oneaccord.launch`.
        timeout_s
            The most seconds for the function, by default as long as it takes.

        Raises
        ------
        Exception
            As for `oneaccord.launch`. The ranks can be used again, unless a later call says otherwise.
        RankError
            A rank was lost, now or before.
        ClosedError
            The ranks were ended.
        """
        call = packed_call(function, args, kwargs, None, None)
        call = replace(call, backend=self._call.backend, config=self._call.config)
        turn = object()
        deadline = None if timeout_s is None else Deadline(timeout_s)
        self._check_here()
        with self._changed:
            self._check_open()
            self._runs_before.append(turn)
            try:
                if not self._changed.wait_for(
                    lambda: self._is_turn_of(turn), None if deadline is None else deadline.remaining()
                ):
                    raise DeadlineError(
                        f"earlier calls left no time for {call.name}: it could not begin within {timeout_s:g} s"
                    )
                self._check_open()
                self._check_whole()
            except BaseException:
                self._pass_on(turn)
                raise
        try:
            return self._gang.run(call, deadline)
        except KeyboardInterrupt:
            self._end()
            raise
        finally:
            self._pass_on(turn)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call ``fn(*args, **kwargs)`` on a rank that is free, as `concurrent.futures.Executor.submit`.

        Parameters
        ----------
        fn, *args, **kwargs
            The function and its arguments. They travel as those of `oneaccord.launch`.

        Returns
        -------
        concurrent.futures.Future
            Its result, or what ``fn`` raised; a `RankError` if the rank was lost and ``retries`` are used up.

        Raises
        ------
        UsageError
            The function or an argument cannot be pickled.
        ClosedError
            The ranks were ended.
        """
        name = getattr(fn, "__qualname__", None) or repr(fn)
        task = _Task(pack((fn, args, kwargs), f"the function {name} with its arguments"), f"{name}()", Future(), self._retries)
        self._check_here()
        with self._changed:
            self._check_open()
            self._tasks.append(task)
        self._dispatch()
        return task.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the ranks when all tasks are done, as `concurrent.futures.Executor.shutdown`; leaving a ``with`` does so.

        Parameters
        ----------
        wait
            Whether to wait until no rank is left, also after an earlier call that did not; otherwise they end in the background.
        cancel_futures
            Whether to cancel the tasks that have not begun.
        """
        if not self._gang.is_here:  # a forked child: the ranks belong to its parent
            return
        with self._changed:
            is_first, self._closed = not self._closed, self._closed or "they were shut down"
        if cancel_futures:
            self._drop_tasks()
        if wait and is_first:
            self._close_when_done()
        elif wait:
            self._ended.wait()
        elif is_first:
            threading.Thread(target=self._close_when_done, name="oneaccord-shutdown", daemon=True).start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.shutdown()
        else:
            self._end()

    def __enter__(self) -> Self:
        return self

    def _end(self) -> None:
        """End the ranks with whatever they do."""
        if not self._gang.is_here:
            return
        with self._changed:
            self._closed = self._closed or "they were ended"
        self._drop_tasks()
        self._gang.cancel()
        self._close()

    def _drop_tasks(self) -> None:
        with self._changed:
            dropped = list(self._tasks)
            self._tasks.clear()
            self._changed.notify_all()
        for task in dropped:
            task.future.cancel()

    def _close_when_done(self) -> None:
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._tasks and not self._runs_before and self._is_idle())
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self._gang.close()
        finally:
            self._ended.set()

    def _is_idle(self) -> bool:
        return len(self._free | self._gang.lost.keys() | self._gang.stuck.keys()) == self.world_size

    def _is_turn_of(self, turn: object) -> bool:
        return bool(self._closed) or (self._runs_before[0] is turn and self._is_idle())

    def _pass_on(self, turn: object) -> None:
        """Let the next one run, or tasks."""
        with self._changed:
            self._runs_before.remove(turn)
            self._free -= self._gang.lost.keys() | self._gang.stuck.keys()
            self._changed.notify_all()
        self._dispatch()

    def _check_here(self) -> None:
        if not self._gang.is_here:
            raise ClosedError(
                "these ranks belong to the process from which this one was forked: use them there, or make others here with oneaccord.Ranks()"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"these ranks are no more: {self._closed}; make others with oneaccord.Ranks()")

    def _check_whole(self) -> None:
        lost, stuck = self._gang.lost, self._gang.stuck
        if lost:
            rank, reason = next(iter(lost.items()))
            raise RankError(
                f"{show_ranks(lost)} of {self.world_size} {'was' if len(lost) == 1 else 'were'} lost ({reason}), and a group needs all: make others with "
                "oneaccord.Ranks()",
                rank=rank,
            )
        if stuck:
            rank, name = next(iter(stuck.items()))
            raise RankError(
                f"{show_ranks(stuck)} of {self.world_size} did not end {name} when it was to: make others with oneaccord.Ranks()",
                rank=rank,
            )

    def _dispatch(self) -> None:
        """Give tasks to free ranks."""
        while (found := self._next()) is not None:
            future = self._gang.call(found[0], worker_main.perform, found[1].packed)
            future.add_done_callback(partial(self._done, *found))

    def _next(self) -> tuple[int, _Task] | None:
        """Return a free rank and the task for it; None if there is no such pair. If no rank will ever be free, all tasks fail."""
        hopeless: list[_Task] = []
        with self._changed:
            while self._tasks and self._free and not self._runs_before:
                task = self._tasks.popleft()
                if task.future.running() or task.future.set_running_or_notify_cancel():
                    rank = min(self._free)
                    self._free.discard(rank)
                    return rank, task
            if self._tasks and not self._free and self._is_idle():
                hopeless = list(self._tasks)
                self._tasks.clear()
            self._changed.notify_all()
        for task in hopeless:
            if task.future.running() or task.future.set_running_or_notify_cancel():
                why = {rank: f"did not end {name} when it was to" for rank, name in self._gang.stuck.items()} | self._gang.lost
                task.future.set_exception(
                    RankError(
                        f"{task.name} found no rank, because none of {self.world_size} is left "
                        f"({'; '.join(f'rank {rank}: {reason}' for rank, reason in sorted(why.items()))})"
                    )
                )
        return None

    def _done(self, rank: int, task: _Task, done: Future[Any]) -> None:
        error, value = self._outcome(rank, task, done)
        is_again = error is not None and task.retries > 0
        with self._changed:
            if rank not in self._gang.lost:
                self._free.add(rank)
            if is_again:
                task.retries -= 1
                self._tasks.appendleft(task)
            self._changed.notify_all()
        if error is None:
            task.future.set_result(value)
        elif not is_again:
            task.future.set_exception(error)
        self._dispatch()

    def _outcome(self, rank: int, task: _Task, done: Future[Any]) -> tuple[BaseException | None, Any]:
        """Return the exception of a task, or None and its value."""
        try:
            outcome: Outcome = done.result(timeout=0)
            if not outcome.error:
                return None, unpack(outcome.value or b"")
            error = self._gang.raised(rank, outcome)
            error.add_note(
                f"raised by {task.name} on rank {rank} of {self.world_size}\n\nThe traceback of rank {rank}:\n{outcome.story.rstrip()}"
            )
        except WorkerLost as lost:
            self._gang.lost[rank] = lost.reason
            error = RankError(f"rank {rank} of {self.world_size} was lost during {task.name}: {lost.reason}", rank=rank)
        except OneAccordError as problem:
            error = problem
        except BaseException as problem:  # noqa: BLE001 - of the engine, or of a value that cannot be unpickled here
            error = RankError(
                f"{task.name} on rank {rank} of {self.world_size}: {type(problem).__name__}: {problem}", rank=rank
            )
            error.__cause__ = problem
        return error, None


def _abandon(gang: Gang) -> None:
    """End ranks to which no name leads any more; not in this thread, which may be any one, and hold any lock."""
    if not gang.is_here or gang.is_closed:
        return
    with contextlib.suppress(RuntimeError):  # the program ends, and its ranks with it
        threading.Thread(target=gang.close, name="oneaccord-abandoned", daemon=True).start()


def _nothing(_: object) -> None:
    pass
