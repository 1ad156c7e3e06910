"""Checkpoints in the background."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from oneaccord import Group
from oneaccord.errors import ClosedError, DeadlineError, UsageError
from oneaccord_parallel.checkpoint.folder import Saved, newest, remove_old
from oneaccord_parallel.checkpoint.host import Bytes, copy_bytes, host_buffer
from oneaccord_parallel.checkpoint.plan import Part, Plan, make_plan
from oneaccord_parallel.checkpoint.progress import progress_bar
from oneaccord_parallel.checkpoint.ranks import Ranks
from oneaccord_parallel.checkpoint.save import write

__all__ = ["AsyncSaver", "SaveWork"]


class SaveWork:
    """A save that continues in the background. `AsyncSaver.save` returns it."""

    def __init__(self) -> None:
        self._future: Future[Saved] = Future()
        self._was_raised = False

    def wait(self, timeout_s: float | None = None) -> Saved:
        """Wait until the checkpoint is complete.

        Parameters
        ----------
        timeout_s
            The most seconds to wait. By default as long as it takes, which the deadlines of the save bound.

        Returns
        -------
        Saved
            Its path, step and time.

        Raises
        ------
        DeadlineError
            ``timeout_s`` has passed; the save continues.
        OneAccordError
            The error of the save; see `oneaccord_parallel.save`.
        """
        try:
            error = self._future.exception(timeout_s)
        except FutureTimeoutError as late:
            raise DeadlineError(f"the checkpoint was not complete within {timeout_s:g} s; the save continues") from late
        if error is not None:
            self._was_raised = True
            raise error
        return self._future.result()

    def done(self) -> bool:
        """Return whether it has ended, successfully or not."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """Return the error of the save; None while it runs and after success."""
        return self._future.exception() if self._future.done() else None

    def _raise_unseen(self) -> None:
        """Wait, and raise the error that has not been raised before."""
        if not self._was_raised:
            self.wait()


class AsyncSaver:
    """Saves checkpoints while the program continues. Every rank makes it, and calls its methods in the same order.

    >>> with mp.AsyncSaver("ckpt", group, keep=3) as saver:
    ...     for step in range(steps):
    ...         train(tree)
    ...         if step % 100 == 0:
    ...             saver.save(tree, step=step)

    Each checkpoint is a folder, ``ckpt/100``, for `oneaccord_parallel.load`. It has a group of its own, so that it does not disturb the
    program's calls, and one buffer for the copies.

    Parameters
    ----------
    path
        The folder of the checkpoints, the same on all ranks. It is made if need be. It is for one saver at a time: numbered folders without a
        complete checkpoint are removed. A relative path is that of the working directory, which must stay while a save runs.
    group
        The ranks that save.
    keep
        How many checkpoints to keep: older ones are removed when a newer one is complete. Only folders whose names are numbers are. None: all.
    timeout_s
        Seconds that a rank may wait for the others in each collective; see `oneaccord_parallel.save`.

    Raises
    ------
    UsageError
        ``keep`` is less than 1, or the ranks gave different paths or numbers.
    CheckpointError
        The folder cannot be read.
    """

    def __init__(
        self, path: str | os.PathLike[str], group: Group, *, keep: int | None = None, timeout_s: float | None = None
    ) -> None:
        self._path = Path(path)
        self._keep = keep
        self._buffer: Bytes | None = None
        self._work: SaveWork | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        part = group.split(0, timeout_s=timeout_s)
        assert part is not None
        self._group = part
        self._ranks = Ranks(part, timeout_s)
        mine, failure, found = None, None, None
        try:
            if keep is not None and keep < 1:
                raise UsageError(f"keep must be at least 1, or None for all, not {keep}")
            if self._ranks.rank == 0:
                found = newest(self._path)
        except Exception as error:  # noqa: BLE001 - it is raised on all ranks
            mine, failure = error, self._ranks.failure(error)
        offers = self._ranks.all_gather({"failure": failure, "same": [os.fspath(path), keep], "found": list(found or ())})
        try:
            self._ranks.raise_first([offer["failure"] for offer in offers], mine)
            given = [tuple(offer["same"]) for offer in offers]
            if len(set(given)) > 1:
                raise UsageError(f"all ranks must give the same path and keep=, but they gave {given}", rank=part.rank)
        except BaseException:
            part.close()
            raise
        self._latest: Saved | None = Saved(*offers[0]["found"]) if offers[0]["found"] else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        # The save in flight is worth the time, and its error is not the first cause.
        if self._work is not None:
            self._work._future.exception()
        self._is_closed = True

    def save(self, tree: Any, *, step: int, extra: Any = None, check: bool = True, progress: bool = False) -> SaveWork:
        """Save a tree, and return when this rank's share is copied: the program may then change its arrays.

        One collective compares the trees of the ranks; the rest happens in the background. If the save before has not ended, this waits for it:
        there is one copy at a time.

        Parameters
        ----------
        tree
            As for `oneaccord_parallel.save`.
        step
            The number of the checkpoint: the name of its folder. If it is there, it is replaced.
        extra, check, progress
            As for `oneaccord_parallel.save`. The check is done before this returns.

        Returns
        -------
        SaveWork
            Its errors are raised by its `SaveWork.wait`. Without a wait, the next save or `close` raises them.

        Raises
        ------
        ClosedError
            The saver was closed.
        UsageError
            As for `oneaccord_parallel.save`; ``step`` is no number from 0 on. Nothing was saved.
        OneAccordError
            The save before has failed, and its error was not raised before. This one was not begun.
        """
        if self._is_closed:
            raise ClosedError("the saver was closed; make another one")
        self._settle()
        plan = make_plan(tree, self._path / str(step), self._ranks, step, extra, check=check)
        parts: list[Part] = []
        problem: Exception | None = None
        try:
            parts = self._stage(plan)
        except Exception as error:  # noqa: BLE001 - it is raised on all ranks, by write
            problem = error

        def copied() -> list[Part]:
            if problem is not None:
                raise problem
            return parts

        self._work = work = SaveWork()
        self._thread = threading.Thread(target=self._run, args=(plan, copied, work, progress), name=f"checkpoint-{step}")
        self._thread.start()
        return work

    def latest(self) -> Saved | None:
        """Return the newest complete checkpoint: the last one whose save has ended, or the one that was there when the saver was made.

        A save in flight may end at other moments on other ranks: `SaveWork.wait` first, if all must have the same answer.
        """
        return self._latest

    def close(self) -> None:
        """Wait for the save in flight. Calling it twice is fine.

        Raises
        ------
        OneAccordError
            That save has failed, and its error was not raised before.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._settle()
        finally:
            self._buffer = None
            self._group.close()

    def _settle(self) -> None:
        """Wait for the save before, and raise its error if it was not raised before."""
        work, thread = self._work, self._thread
        if work is None or thread is None:
            return
        self._work = self._thread = None
        thread.join()
        work._raise_unseen()

    def _stage(self, plan: Plan) -> list[Part]:
        """Copy the data that this rank will write."""
        nbytes = sum(part.nbytes for part in plan.parts)
        if self._buffer is None or self._buffer.nbytes < nbytes:
            self._buffer = None
            self._buffer = host_buffer(nbytes, [part.array for part in plan.parts])
        staged, done = [], 0
        for part in plan.parts:
            copy = self._buffer[done : done + part.nbytes]
            copy_bytes(part.array, copy)
            staged.append(replace(part, array=copy))
            done += part.nbytes
        return staged

    def _run(self, plan: Plan, parts: Callable[[], list[Part]], work: SaveWork, progress: bool) -> None:
        try:
            with progress_bar("saving", plan.largest_bytes, progress, self._ranks.rank) as advance:
                after = self._latest.time if self._latest is not None else 0.0
                when = write(plan, self._ranks, parts, advance, lambda: remove_old(self._path, self._keep), after)
            self._latest = saved = Saved(str(plan.path), plan.step, when)
            work._future.set_result(saved)
        except BaseException as error:
            work._future.set_exception(error)
            if not isinstance(error, Exception):
                raise
