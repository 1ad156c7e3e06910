"""Windows: arrays that other ranks read and change without a call of the rank that has them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from oneaccord.arrays.memory import Array, check_out, new_array
from oneaccord.calls.failures import again, guarded
from oneaccord.calls.observed import observed
from oneaccord.calls.post.envelopes import RECORD
from oneaccord.calls.post.messages import BYTE, Operation, Receive, Send
from oneaccord.calls.windows import wire
from oneaccord.calls.windows.asking import Asking
from oneaccord.calls.windows.direct import Direct
from oneaccord.calls.windows.places import Place, elements, locate, op_number
from oneaccord.calls.windows.serving import Server
from oneaccord.contract.deadline import Deadline
from oneaccord.control.protocol import Report
from oneaccord.errors import ClosedError, CommError, SizeMismatchError, UsageError

if TYPE_CHECKING:
    from oneaccord.group.windows import Windowed

__all__ = ["Lock", "Parts", "Window"]

At = int | np.integer[Any] | slice
_MOST_KEYS = 16
"""So many elements, which change atomically in one call, are watched as what orders other calls."""


class Words:
    """A call in words, which are made only on demand."""

    __slots__ = ("_call", "_place", "_ranks")

    def __init__(self, call: str, ranks: Sequence[int], place: Place | None = None) -> None:
        self._call = call
        self._ranks = ranks
        self._place = place

    def __str__(self) -> str:
        where = (
            ""
            if not self._ranks
            else f" at rank {self._ranks[0]}"
            if len(self._ranks) == 1
            else f" at {len(self._ranks)} ranks"
        )
        return f"window.{self._call}{where}{'' if self._place is None else f', {self._place}'}"


class Parts:
    """What a window is made of; for core.

    Attributes
    ----------
    number
        A number that no other group or window of the job has.
    local
        The window of this rank, in its shape.
    lengths
        How many elements each rank has.
    server, asking
        For calls by requests.
    direct
        For calls in memory that this host shares; None if there is none.
    in_reach
        The ranks of the world whose windows are in that memory.
    locks_directly
        Whether the locks of programs are there as well.
    release
        Gives the memory back.
    """

    __slots__ = ("asking", "direct", "in_reach", "lengths", "local", "locks_directly", "number", "release", "server")

    def __init__(
        self,
        number: int,
        local: Array,
        lengths: tuple[int, ...],
        server: Server,
        asking: Asking,
        direct: Direct | None,
        in_reach: frozenset[int],
        *,
        locks_directly: bool,
        release: Callable[[], None],
    ) -> None:
        self.number: int = number
        self.local: Array = local
        self.lengths: tuple[int, ...] = lengths
        self.server: Server = server
        self.asking: Asking = asking
        self.direct: Direct | None = direct
        self.in_reach: frozenset[int] = in_reach
        self.locks_directly: bool = locks_directly
        self.release: Callable[[], None] = release


class Window:
    """Arrays, one of each rank, that all ranks of a group read and change without a call of the rank that has them. Made by `Group.window`.

    It is a context manager, whose end is `close`.

    >>> with oa.init() as group, group.window(100, "float64") as win:
    ...     win.put(np.arange(10.0), (group.rank + 1) % group.world_size, at=20)
    ...     win.fence()
    ...     use(win.local[20:30])

    ``target`` is a rank of the group, which may be this one. ``at`` says which elements of the target's window a call means: an integer is where
    they begin, a slice such as ``np.s_[2:8:2]`` is all of them. The window is flat: an array of more dimensions counts in C order.

    **When it has happened.** Calls that return elements are complete when they return. `put` and `accumulate` may be on their way: they are complete
    after `flush`, `fence`, `unlock` or `complete`. Calls of one rank on one window take effect in their order. Of two ranks they have no
    order, unless one of these, or a message or barrier after it, comes between.

    **Atomicity.** `accumulate`, `fetch_and_op` and `compare_and_swap` change each element as if no other such call came at the same time. `put`, `get`
    and the program's own use of ``local`` do not: separate them from what other ranks do there.

    All methods raise these errors, besides those that they list:

    ClosedError
        The window or its group is closed.
    CommError
        The group's first failure, as for the methods of `Group`: also if a rank dies while it holds a lock. ``local`` stays readable.
    InvalidRankError, SizeMismatchError, DTypeError, UsageError
        The arguments are wrong: the target, the elements, or the values. Nothing has happened, and window and group stay as they were.

    Attributes
    ----------
    group
        The group.
    dtype
        The dtype of all ranks' windows.
    lengths
        How many elements the window of each rank has.
    """

    def __init__(self, group: Windowed, parts: Parts) -> None:
        self.group: Windowed = group
        self.dtype: np.dtype[Any] = parts.local.dtype
        self.lengths: tuple[int, ...] = parts.lengths
        self._parts = parts
        self._job = group._job
        self._members = group._members
        self._ranks = group._members.ranks
        self._history = group._job.runtime.history
        self._is_closed = False
        self._guard = threading.Lock()
        self._held: dict[int, bool] = {}
        self._targets: tuple[int, ...] = ()
        self._origins: tuple[int, ...] = ()

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ""
        return f"<oneaccord.Window {self.dtype} of {self.lengths[self._members.rank]} elements on rank {self._members.rank}{state}>"

    @property
    def local(self) -> Array:
        """The window of this rank: the array that it gave, or zeros of the shape that it gave. It stays valid after `close`.

        Read it when the calls of others are complete, after a `fence` for example, and write to it when no other rank uses what is written.
        """
        return self._parts.local

    # Elements

    def put(self, values: Any, target: int, at: At = 0, *, timeout_s: float | None = None) -> None:
        """Write elements into the window of a rank.

        Parameters
        ----------
        values
            The elements, of any shape: an array of the window's dtype, or Python's numbers. The array may be changed when the call returns.
        target, at
            The rank, and its elements.
        timeout_s
            Seconds that the call may last.
        """
        self._change("put", wire.PUT, values, target, at, timeout_s)

    def get(self, target: int, at: At = slice(None), *, out: Array | None = None, timeout_s: float | None = None) -> Any:
        """Read elements of the window of a rank.

        Parameters
        ----------
        target, at
            The rank, and its elements; by default all. From an integer on, these are as many as ``out`` has, or one.
        out
            An array of the window's dtype and of any shape.
        timeout_s
            Seconds that the call may last.

        Returns
        -------
        ndarray or scalar
            ``out``, or a new array of shape ``(n,)``; a scalar of NumPy for one element at an integer.
        """
        if out is not None:
            check_out(out, getattr(out, "shape", ()), self.dtype)
        return self._change("get", wire.GET, None, target, at, timeout_s, out=out, returns=True)

    def accumulate(self, values: Any, target: int, at: At = 0, op: Any = "sum", *, timeout_s: float | None = None) -> None:
        """Combine elements with those of the window of a rank, which get the result. Each element changes atomically.

        Parameters
        ----------
        values, target, at, timeout_s
            As for `put`.
        op
            How: a name as in `Group.all_reduce`, but ``"mean"``; or ``"replace"``, which is a `put` that is atomic.
        """
        self._change("accumulate", wire.ACCUMULATE, values, target, at, timeout_s, op=op)

    def fetch_and_op(
        self,
        values: Any,
        target: int,
        at: At = 0,
        op: Any = "sum",
        *,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Do what `accumulate` does, and return what the elements were before.

        Parameters
        ----------
        values, target, at, op, timeout_s
            As for `accumulate`.
        out
            An array of the window's dtype and of the shape of ``values``.

        Returns
        -------
        ndarray or scalar
            ``out``, or a new array of the shape of ``values``; a scalar of NumPy for one of Python.
        """
        return self._change("fetch_and_op", wire.FETCH, values, target, at, timeout_s, op=op, out=out, returns=True)

    def compare_and_swap(
        self,
        expected: Any,
        values: Any,
        target: int,
        at: At = 0,
        *,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Replace those elements that are as expected, and return what they were before: equal to what was expected if they were replaced.

        Parameters
        ----------
        expected
            The bits that an element must have, of the shape of ``values``: 0.0 is not -0.0, and a NaN is one with the same bits.
        values, target, at, timeout_s
            As for `put`.
        out
            As for `fetch_and_op`.

        Returns
        -------
        ndarray or scalar
            As for `fetch_and_op`.
        """
        return self._change(
            "compare_and_swap", wire.SWAP, values, target, at, timeout_s, out=out, expected=expected, returns=True
        )

    def _change(
        self,
        name: str,
        kind: int,
        values: Any,
        target: int,
        at: At,
        timeout_s: float | None,
        *,
        op: Any = None,
        out: Array | None = None,
        expected: Any = None,
        returns: bool = False,
    ) -> Any:
        """Make a call on elements; return what it returns to the user."""
        seconds = self._begin(name, timeout_s)
        local = self.group._builder.arguments.rank(target, "target")
        rank, dtype = self._ranks[local], self.dtype
        number = 0 if op is None else op_number(op, dtype)
        if kind == wire.GET:
            given = None
            place = locate(at, None if out is None else out.size, self.lengths[local], rank)
            shape: tuple[int, ...] = () if out is None and not isinstance(at, slice) else (place.size,)
        else:
            given = elements(values, dtype)
            place, shape = locate(at, given.size, self.lengths[local], rank), given.shape
        compared = None
        if kind == wire.SWAP:
            compared = elements(expected, dtype, "expected")
            if compared.shape != shape:
                raise SizeMismatchError(f"expected has shape {compared.shape}, and values {shape}: give the same")
        if returns and out is not None and kind != wire.GET:
            check_out(out, shape, dtype)
        result = None
        if returns:
            result = out if out is not None and out.flags.c_contiguous else new_array((place.size,), dtype)
        if place.size:
            flat = result.reshape(-1) if result is not None else None
            options: dict[str, Any] = {"op": number, "out": flat}
            if compared is not None:
                options["expected"] = np.ascontiguousarray(compared).reshape(-1)
            values = self.local[:0] if given is None else np.ascontiguousarray(given).reshape(-1)
            what = Words(name, (rank,), place)
            direct = self._parts.direct if rank in self._parts.in_reach else None
            change = self._parts.asking.change if direct is None else direct.change
            action = partial(change, what, rank, kind, place, values, seconds, **options)
            with self._watched(what, kind, rank, place, returns=returns):
                if direct is None and rank != self._job.rank:
                    self._failing(action)
                else:
                    self._alone(what, action, seconds, place.size * dtype.itemsize)
        if result is None or result is out:
            return out
        if out is not None:
            out[...] = result.reshape(out.shape)
            return out
        return result.reshape(shape)[()]

    # Order

    def flush(self, target: int | None = None, *, timeout_s: float | None = None) -> None:
        """Wait until the calls of this rank on the window of a rank, or of all, are complete there.

        Parameters
        ----------
        target
            The rank; by default all.
        timeout_s
            Seconds that the call may last.
        """
        seconds = self._begin("flush", timeout_s)
        ranks = self._ranks if target is None else (self._ranks[self.group._builder.arguments.rank(target, "target")],)
        self._flush(ranks, seconds)

    def fence(self, *, timeout_s: float | None = None) -> None:
        """Wait until the calls of all ranks are complete, and all ranks have come here. Every rank must call it.

        It is a `flush` of all targets, and a `Group.barrier`: afterwards each rank sees what all of them have written before.

        Parameters
        ----------
        timeout_s
            Seconds that each of the two may last.
        """
        self._flush(self._ranks, self._begin("fence", timeout_s))
        self.group.barrier(timeout_s=timeout_s)
        if self._parts.direct is not None:
            self._parts.direct.flush("fence", (), 1.0)

    def _flush(self, ranks: Sequence[int], seconds: float) -> None:
        if self._parts.direct is not None:
            self._parts.direct.flush("flush", ranks, seconds)
        self._failing(partial(self._parts.asking.flush, Words("flush", ranks), ranks, seconds))
        self._completed(ranks)

    # Locks

    def lock(self, target: int, *, shared: bool = False, timeout_s: float | None = None) -> Lock:
        """Wait for the lock of the window of a rank, and hold it until `unlock`; or use the result in a ``with`` block, whose end unlocks.

        Ranks get it in the order in which they asked. It excludes those who hold or want it, and no others.

        Parameters
        ----------
        target
            The rank.
        shared
            Whether others may hold it shared at the same time.
        timeout_s
            Seconds that the call may last.

        Returns
        -------
        Lock
            A context manager.

        Raises
        ------
        UsageError
            This rank holds it already.
        """
        seconds = self._begin("lock", timeout_s)
        rank = self._ranks[self.group._builder.arguments.rank(target, "target")]
        self._lock(rank, seconds, exclusive=not shared)
        return Lock(self, (rank,))

    def lock_all(self, *, timeout_s: float | None = None) -> Lock:
        """Wait for the locks of all ranks' windows, shared, one after the other; otherwise as `lock`.

        Parameters
        ----------
        timeout_s
            Seconds that the call may last.

        Returns
        -------
        Lock
            A context manager.

        Raises
        ------
        UsageError
            This rank holds one already.
        """
        until = Deadline(self._begin("lock_all", timeout_s), self._job.runtime.now)
        taken: list[int] = []
        try:
            for rank in sorted(self._ranks):
                self._lock(rank, max(until.remaining(), 1e-6), exclusive=False)
                taken.append(rank)
        except UsageError:
            self._unlock(taken, None)
            raise
        return Lock(self, tuple(taken))

    def unlock(self, target: int | None = None, *, timeout_s: float | None = None) -> None:
        """Wait until the calls of this rank on the window of a rank are complete there, and give its lock back.

        Parameters
        ----------
        target
            The rank; by default all whose locks this rank holds.
        timeout_s
            Seconds that the call may last.

        Raises
        ------
        UsageError
            This rank does not hold it.
        """
        self._begin("unlock", timeout_s)
        ranks = tuple(self._held)
        if target is not None:
            ranks = (self._ranks[self.group._builder.arguments.rank(target, "target")],)
            if ranks[0] not in self._held:
                raise UsageError(f"unlock({target}): this rank does not hold that lock")
        self._unlock(ranks, timeout_s)

    def _lock(self, rank: int, seconds: float, *, exclusive: bool) -> None:
        with self._guard:
            if rank in self._held:
                raise UsageError(f"this rank holds the lock of rank {rank}'s window already, or waits for it in another thread")
            self._held[rank] = exclusive
        what = Words("lock" if exclusive else "lock_shared", (rank,))
        try:
            self._through_locks(what, rank, seconds, exclusive=exclusive)
        except BaseException:
            self._held.pop(rank, None)
            raise
        if self._history is not None:
            self._history.acquires(self._job.rank, ("lock", self._parts.number, rank, not exclusive))

    def _through_locks(self, what: Words, rank: int, seconds: float, *, exclusive: bool) -> None:
        parts = self._parts
        if parts.direct is not None and parts.locks_directly:
            self._alone(what, partial(parts.direct.lock, what, rank, seconds, exclusive=exclusive), seconds, 0)
        else:
            self._failing(partial(parts.asking.lock, what, rank, seconds, exclusive=exclusive))

    def _unlock(self, ranks: Sequence[int], timeout_s: float | None) -> None:
        if not ranks:
            return
        parts, seconds, what = self._parts, self.group._limit(timeout_s), Words("unlock", ranks)
        self._completed(ranks)  # before another rank has the lock
        for rank in ranks:
            # One who shares it does not wait for others who do.
            for shared in (False, True) if self._held[rank] else (False,):
                if self._history is not None:
                    self._history.releases(self._job.rank, ("lock", parts.number, rank, shared))
        if parts.direct is not None and parts.locks_directly:
            self._alone(what, partial(parts.direct.unlock, what, ranks, seconds), seconds, 0)
        else:
            self._failing(partial(parts.asking.unlock, what, ranks, seconds))
        for rank in ranks:
            self._held.pop(rank, None)

    # Epochs of some of the ranks

    def post(self, origins: Iterable[int], *, timeout_s: float | None = None) -> None:
        """Let some ranks `start` their calls on the window of this one. It is free for its own use again after `wait`.

        Parameters
        ----------
        origins
            The ranks.
        timeout_s
            Seconds that the call may last.

        Raises
        ------
        UsageError
            `wait` has not ended the last one.
        """
        seconds = self._begin("post", timeout_s)
        if self._origins:
            raise UsageError("post() was called before, and wait() has not ended that: call wait() first")
        ranks = self._chosen(origins, "an origin")
        self._tell("post", ranks, wire.POSTED, seconds)
        self._origins = ranks

    def start(self, targets: Iterable[int], *, timeout_s: float | None = None) -> None:
        """Wait until each of some ranks has let this one in by `post`.

        Parameters
        ----------
        targets
            The ranks.
        timeout_s
            Seconds that the call may last.

        Raises
        ------
        UsageError
            `complete` has not ended the last one.
        """
        seconds = self._begin("start", timeout_s)
        if self._targets:
            raise UsageError("start() was called before, and complete() has not ended that: call complete() first")
        ranks = self._chosen(targets, "a target")
        self._hear("start", ranks, wire.POSTED, seconds)
        self._targets = ranks

    def complete(self, *, timeout_s: float | None = None) -> None:
        """Wait until the calls since `start` are complete, and let the targets know, which `wait` for it.

        Parameters
        ----------
        timeout_s
            Seconds that each of the two may last.

        Raises
        ------
        UsageError
            There was no `start`.
        """
        seconds = self._begin("complete", timeout_s)
        if not self._targets:
            raise UsageError("complete() ends what start() began, which was not called")
        self._flush(self._targets, seconds)
        self._tell("complete", self._targets, wire.COMPLETED, seconds)
        self._targets = ()

    def wait(self, *, timeout_s: float | None = None) -> None:
        """Wait until the ranks that `post` has let in have called `complete`. Then what they wrote is in ``local``.

        Parameters
        ----------
        timeout_s
            Seconds that the call may last.

        Raises
        ------
        UsageError
            There was no `post`.
        """
        seconds = self._begin("wait", timeout_s)
        if not self._origins:
            raise UsageError("wait() ends what post() began, which was not called")
        self._hear("wait", self._origins, wire.COMPLETED, seconds)
        self._origins = ()
        if self._parts.direct is not None:
            self._parts.direct.flush("wait", (), seconds)

    def _chosen(self, given: Iterable[int], what: str) -> tuple[int, ...]:
        local = [self.group._builder.arguments.rank(rank, what) for rank in given]
        if not local or len(set(local)) != len(local):
            raise UsageError(f"at least one rank must be given, and each only once, not {local}")
        return tuple(self._ranks[rank] for rank in local)

    def _tell(self, name: str, ranks: Sequence[int], tag: int, seconds: float) -> None:
        what = Words(name, ranks)
        self._run(what, [Send(what, self._parts.number, rank, tag, memoryview(b""), BYTE, (0,), 0) for rank in ranks], seconds)

    def _hear(self, name: str, ranks: Sequence[int], tag: int, seconds: float) -> None:
        what = Words(name, ranks)
        self._run(what, [Receive(what, self._parts.number, rank, tag, None, ()) for rank in ranks], seconds)

    # The end

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait until the calls of all ranks are complete, and make no more. Every rank must call it; calling it twice is fine.

        Parameters
        ----------
        timeout_s
            Seconds that each of its steps may last.

        Raises
        ------
        UsageError
            This rank holds a lock, or has not ended what `post` or `start` began. The window stays open.
        """
        if self._is_closed:
            return
        if self._held or self._targets or self._origins:
            left = "unlock()" if self._held else "complete()" if self._targets else "wait()"
            raise UsageError(f"the window cannot be closed before {left}")
        try:
            self.fence(timeout_s=timeout_s)
        finally:
            self._end()

    def _end(self) -> None:
        self._is_closed = True
        self._parts.server.end()
        self._parts.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:  # there is nothing to wait for, and the group of all ranks ends the calls of the others
            self._end()

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a window cannot be pickled or copied: it is one of all ranks; send win.local, of which a copy travels"
        )

    # The common part

    @contextmanager
    def _watched(self, what: Words, kind: int, rank: int, place: Place, *, returns: bool) -> Iterator[None]:
        """Look in a simulated world for a race of the call in the body with one of another rank."""
        history, me, window = self._history, self._job.rank, self._parts.number
        if history is None:
            yield
            return
        is_atomic = kind in (wire.ACCUMULATE, wire.FETCH, wire.SWAP)
        race = history.access(
            window, me, rank, place, what, writes=kind != wire.GET, is_atomic=is_atomic, ends=returns or rank == me
        )
        if race:
            self.group._saw()
            raise self._job.fail(Report("race", race, me, str(what), members=list(self._ranks)))
        # An element that changes atomically may be a lock, or a flag, of the program's own.
        keys = [("element", window, rank, each) for each in place.some(_MOST_KEYS)] if is_atomic else []
        for key in keys:
            history.releases(me, key)
        yield
        for key in keys if returns else ():
            history.acquires(me, key)

    def _completed(self, ranks: Sequence[int]) -> None:
        if self._history is not None:
            self._history.completes(self._parts.number, self._job.rank, ranks)

    def _begin(self, name: str, timeout_s: float | None) -> float:
        if self._is_closed:
            text = (
                f"window.{name} was called after close(): take what is needed from win.local, which stays valid; or close later"
            )
            raise ClosedError(text, rank=self._job.rank)
        return self.group._limit(timeout_s)

    def _run(self, what: Words, operations: Sequence[Operation], seconds: float, nbytes: int = 0) -> None:
        self._failing(partial(self.group._post.run, what, operations, seconds, nbytes))

    def _failing(self, action: Callable[[], None]) -> None:
        self.group._failing(_called, action)

    def _alone(self, what: Words, action: Callable[[], None], seconds: float, nbytes: int) -> None:
        """Make a call that needs no message; observers and the flight recorder see it like others."""
        group, job = self.group, self._job
        if not group._call_sequence.is_usable:
            group._check_open(str(what))
        plugins, runtime = group._paths.plugins, job.runtime
        started = runtime.now()
        if not plugins.settled:
            plugins.load_extensions()
        try:
            if plugins.observed:
                words = str(what)
                facts: Mapping[str, Any] = {"nbytes": nbytes, "dtype": str(self.dtype), "call": words}
                number = group._call_sequence.messages + 1
                with observed(plugins, runtime, self._members, operation=words.partition(" ")[0], sequence=number, **facts):
                    action()
            else:
                action()
        except BaseException as error:  # noqa: BLE001 - raised as the first cause
            number, deadline = group._call_sequence.messages + 1, Deadline(seconds, runtime.now)
            try:
                guarded(job, self._members, number, RECORD, deadline, partial(again, error), what)
            except CommError:
                group._saw()
                raise
        finally:
            group._post.note(what, started)


class Lock:
    """The lock of windows, which this rank holds: at the end of its ``with`` block it is given back. Made by `Window.lock`."""

    __slots__ = ("_ranks", "_window")

    def __init__(self, window: Window, ranks: tuple[int, ...]) -> None:
        self._window = window
        self._ranks = ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        window = self._window
        if error is not None and not window.group._call_sequence.is_usable:
            return  # the job has failed, and nobody waits for it
        window._unlock([rank for rank in self._ranks if rank in window._held], None)


def _called(action: Callable[[], None]) -> None:
    action()
