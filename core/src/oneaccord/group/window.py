"""Windows: arrays that other ranks read and change without a call of the rank that has them."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, NoReturn, Self

from oneaccord.arrays.memory import Array
from oneaccord.calls.windows import wire
from oneaccord.contract.deadline import Deadline
from oneaccord.errors import UsageError
from oneaccord.group.window_base import At, WindowBase

__all__ = ["Lock", "Window"]


class Window(WindowBase):
    """Arrays, one of each rank, that all ranks of a group read and change without a call of the rank that has them. Made by `Group.window`.

    It is a context manager, whose end is `close`.

    >>> with oa.init() as group, group.window(100, "float64") as win:
    ...     win.put(np.arange(10.0), (group.rank + 1) % group.world_size, at=20)
    ...     win.fence()
    ...     use(win.local[20:30])

    ``target`` is a rank of the group, which may be this one. ``at`` says which elements of the target's window a call means: an integer is where
    they begin, a slice such as ``np.s_[2:8:2]`` is all of them. The window is flat: an array of more dimensions counts in C order.

    **When it has happened.** Calls that return elements are complete when they return. `put` and `accumulate` may be on their way: they are complete
    after `flush`, `fence`, `unlock` or `complete`. Calls of one rank on one window take effect in their order. Calls of two ranks have an order only
    if the first one is complete, and a fence, a lock, a message or a barrier comes before the second.

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
            The most seconds that the call may last; by default the setting ``timeout_s``.
        """
        self._change(wire.PUT, values, target, at, None, None, None, timeout_s)

    def get(self, target: int, at: At = slice(None), *, out: Array | None = None, timeout_s: float | None = None) -> Any:
        """Read elements of the window of a rank.

        Parameters
        ----------
        target, at
            The rank, and its elements; by default all. From an integer on, these are as many as ``out`` has, or one.
        out
            An array of the window's dtype and of any shape.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        ndarray or scalar
            ``out``, or a new array of shape ``(n,)``; a scalar of NumPy for one element at an integer.
        """
        return self._change(wire.GET, None, target, at, None, out, None, timeout_s)

    def accumulate(self, values: Any, target: int, at: At = 0, op: Any = "sum", *, timeout_s: float | None = None) -> None:
        """Combine elements with those of the window of a rank, which get the result. Each element changes atomically.

        Parameters
        ----------
        values, target, at, timeout_s
            As for `put`.
        op
            How: a name as in `Group.all_reduce`, except ``"mean"``; or ``"replace"``, which is a `put` that is atomic.
        """
        self._change(wire.ACCUMULATE, values, target, at, op, None, None, timeout_s)

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
        return self._change(wire.FETCH, values, target, at, op, out, None, timeout_s)

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
        return self._change(wire.SWAP, values, target, at, None, out, expected, timeout_s)

    # Order

    def flush(self, target: int | None = None, *, timeout_s: float | None = None) -> None:
        """Wait until the calls of this rank on the window of a rank, or of all, are complete there.

        Parameters
        ----------
        target
            The rank; by default all.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.
        """
        self._flush(target, timeout_s, "flush")

    def fence(self, *, timeout_s: float | None = None) -> None:
        """Wait until the calls of all ranks are complete, and all ranks have come here. Every rank must call it.

        It is a `flush` of all targets, and a `Group.barrier`: afterwards each rank sees what all of them have written before.

        Parameters
        ----------
        timeout_s
            Seconds that each of the two may last.
        """
        self._flush(None, timeout_s, "fence")
        self.group.barrier(timeout_s=timeout_s)
        if self._parts.direct is not None:
            self._parts.direct.flush("fence", (), 1.0)

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
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        Lock
            A context manager.

        Raises
        ------
        UsageError
            This rank holds it already.
        """
        self._lock(target, shared, timeout_s)
        return Lock(self, (target,))

    def lock_all(self, *, timeout_s: float | None = None) -> Lock:
        """Wait for the locks of all ranks' windows, shared, one after the other; otherwise as `lock`.

        Parameters
        ----------
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

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
            for target in sorted(range(len(self._ranks)), key=self._ranks.__getitem__):
                self._lock(target, True, max(until.remaining(), 1e-6))
                taken.append(target)
        except UsageError:
            self._unlock_ranks([self._ranks[target] for target in taken], None)
            raise
        return Lock(self, tuple(taken))

    def unlock(self, target: int | None = None, *, timeout_s: float | None = None) -> None:
        """Wait until the calls of this rank on the window of a rank are complete there, and give its lock back.

        Parameters
        ----------
        target
            The rank; by default all whose locks this rank holds.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Raises
        ------
        UsageError
            This rank does not hold it.
        """
        if target is not None:
            self._unlock(target, timeout_s)
        else:
            self._begin("unlock", timeout_s)
            self._unlock_ranks(tuple(self._held), timeout_s)

    # Epochs of some of the ranks

    def post(self, origins: Iterable[int], *, timeout_s: float | None = None) -> None:
        """Let some ranks `start` their calls on the window of this one. It is free for its own use again after `wait`.

        Parameters
        ----------
        origins
            The ranks.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

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
            The most seconds that the call may last; by default the setting ``timeout_s``.

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
        self._flush_ranks(self._targets, seconds)
        self._tell("complete", self._targets, wire.COMPLETED, seconds)
        self._targets = ()

    def wait(self, *, timeout_s: float | None = None) -> None:
        """Wait until the ranks that `post` has let in have called `complete`. Then what they wrote is in ``local``.

        Parameters
        ----------
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

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


class Lock:
    """The lock of windows, which this rank holds: at the end of its ``with`` block it is given back. Made by `Window.lock`."""

    __slots__ = ("_targets", "_window")

    def __init__(self, window: Window, targets: tuple[int, ...]) -> None:
        self._window = window
        self._targets = targets

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        window = self._window
        if error is not None and (window._is_closed or not window.group._call_sequence.is_usable):
            return  # nobody waits for it
        held = [target for target in self._targets if window._ranks[target] in window._held]
        if len(held) == 1:
            window._unlock(held[0], None)
        else:
            window._unlock_ranks([window._ranks[target] for target in held], None)
