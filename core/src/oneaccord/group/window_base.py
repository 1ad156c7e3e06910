"""How the calls of a window are made: checked, carried out, and shown to those who watch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import numpy as np

from oneaccord.arrays.memory import NOTHING, Array, check_out, new_array
from oneaccord.calls.failures import again, guarded
from oneaccord.calls.observed import observed
from oneaccord.calls.order.call_sequence import CallSequence
from oneaccord.calls.paths import Paths
from oneaccord.calls.post.envelopes import RECORD
from oneaccord.calls.post.messages import BYTE, Operation, Receive, Send
from oneaccord.calls.post.path import PostPath
from oneaccord.calls.programs import CallBuilder
from oneaccord.calls.windows import wire
from oneaccord.calls.windows.asking import Asking
from oneaccord.calls.windows.direct import Direct
from oneaccord.calls.windows.places import Place, elements, locate, op_number
from oneaccord.calls.windows.serving import Server
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.runtime import History
from oneaccord.control.protocol import Report
from oneaccord.errors import ClosedError, CommError, SizeMismatchError, UsageError
from oneaccord.group.shared import SharedArray, Whole

__all__ = ["At", "Parts", "WindowBase", "Words"]

At = int | np.integer[Any] | slice
_RETURNING = frozenset({wire.GET, wire.FETCH, wire.SWAP})
_NONE: Array = NOTHING
_MOST_KEYS = 16
"""So many elements, which change atomically in one call, are watched as what orders other calls."""


class Words:
    """A call in words, which are made only on demand."""

    __slots__ = ("_call", "_ranks", "place")

    def __init__(self, call: str, ranks: Sequence[int], place: Place | None = None) -> None:
        self._call = call
        self._ranks = ranks
        self.place: Place | None = place

    def __str__(self) -> str:
        where = (
            ""
            if not self._ranks
            else f" at rank {self._ranks[0]}"
            if len(self._ranks) == 1
            else f" at {len(self._ranks)} ranks"
        )
        return f"window.{self._call}{where}{'' if self.place is None else f', {self.place}'}"


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


class Windowed(Whole, Protocol):
    """A group, as far as windows need to know it."""

    _builder: CallBuilder
    _call_sequence: CallSequence
    _caller: Any
    _paths: Paths

    @property
    def _post(self) -> PostPath: ...
    def _limit(self, timeout_s: float | None) -> float: ...
    def _failing(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any: ...
    def shared(self, shape: Any, dtype: Any = ..., *, timeout_s: float | None = None) -> SharedArray[Any]: ...


class WindowBase:
    """A window without its public methods.

    Parameters
    ----------
    group, parts
        The group, and what the window is made of.
    """

    def __init__(self, group: Windowed, parts: Parts) -> None:
        self.group: Windowed = group
        self.dtype: np.dtype[Any] = parts.local.dtype
        self.lengths: tuple[int, ...] = parts.lengths
        self._parts = parts
        self._job = group._job
        self._members = group._members
        self._ranks = group._members.ranks
        self._arguments = group._builder.arguments
        self._plugins = group._paths.plugins
        self._sequence = group._call_sequence
        self._history: History | None = group._job.runtime.history
        self._is_closed = False
        if self._history is not None and not self._history.begins(group._job.backend_name):
            self._history = None
        self._guard = threading.Lock()
        self._held: dict[int, bool] = {}
        self._targets: tuple[int, ...] = ()
        self._origins: tuple[int, ...] = ()
        self._compiled: Any = None
        module, direct = group._paths.native, parts.direct
        if module is not None and direct is not None and self._history is None and self.dtype.isnative:
            calls = group._caller, self._change, self._flush, self._lock, self._unlock
            whose = self._held, group._post._shorts.compiled, self._ranks
            self._compiled = made = direct.compiled(module, calls, *whose, locks=parts.locks_directly)
            # C makes calls that it can make, and hands all others to the methods.
            self._change, self._flush = made.change, made.flush  # type: ignore[method-assign]
            self._lock, self._unlock = made.lock, made.unlock  # type: ignore[method-assign]

    def _change(
        self, kind: int, values: Any, target: int, at: At, op: Any, out: Array | None, expected: Any, timeout_s: float | None
    ) -> Any:
        """Make a call on elements; return what it returns to the user."""
        name = wire.NAMES[kind]
        seconds = self._begin(name, timeout_s)
        local = self._arguments.rank(target, "target")
        rank, dtype = self._ranks[local], self.dtype
        number = 0 if op is None else op_number(op, dtype)
        given = compared = _NONE
        if kind == wire.GET:
            if out is not None:
                check_out(out, getattr(out, "shape", ()), dtype)
            place = locate(at, None if out is None else out.size, self.lengths[local], rank)
            shape: tuple[int, ...] = () if out is None and not isinstance(at, slice) else (place.size,)
        else:
            given = elements(values, dtype)
            place, shape = locate(at, given.size, self.lengths[local], rank), given.shape
            given = given.reshape(-1)
            if out is not None:
                check_out(out, shape, dtype)
        if kind == wire.SWAP:
            compared = elements(expected, dtype, "expected")
            if compared.shape != shape:
                raise SizeMismatchError(f"expected has shape {compared.shape}, and values {shape}: give the same")
            compared = compared.reshape(-1)
        result: Array | None = None
        if kind in _RETURNING:
            result = out.reshape(-1) if out is not None and out.flags.c_contiguous else new_array((place.size,), dtype)
        if place.size:
            what = Words(name, (rank,), place)
            with nullcontext() if self._history is None else self._watched(what, kind, rank, place):
                self._carry_out(what, rank, kind, place, given, seconds, number, compared, result)
        if result is None:
            return None
        if out is None:
            return result.reshape(shape)[()]
        if not out.flags.c_contiguous:
            out[...] = result.reshape(out.shape)
        return out

    def _carry_out(
        self,
        what: Words,
        rank: int,
        kind: int,
        place: Place,
        values: Array,
        seconds: float,
        op: int,
        expected: Array,
        result: Array | None,
    ) -> None:
        parts = self._parts
        arguments = what, rank, kind, place, values, seconds, op, expected, result
        if parts.direct is not None and rank in parts.in_reach:
            self._alone(what, parts.direct.change, seconds, *arguments)
        elif rank == self._job.rank:
            self._alone(what, parts.asking.change, seconds, *arguments)
        else:
            self._asked(what, partial(parts.asking.change, *arguments))

    def _flush(self, target: int | None, timeout_s: float | None, name: str) -> None:
        """Flush a target or, for None, all of them, for a call of a name."""
        seconds = self._begin(name, timeout_s)
        self._flush_ranks(self._ranks if target is None else (self._world_rank(target),), seconds)

    def _flush_ranks(self, ranks: Sequence[int], seconds: float) -> None:
        if self._parts.direct is not None:
            self._parts.direct.flush("flush", ranks, seconds)
        what = Words("flush", ranks)
        self._asked(what, partial(self._parts.asking.flush, what, ranks, seconds))
        self._completed(ranks)

    def _world_rank(self, target: int) -> int:
        return self._ranks[self._arguments.rank(target, "target")]

    def _lock(self, target: int, shared: bool, timeout_s: float | None) -> None:
        """Take the lock of a target."""
        seconds = self._begin("lock", timeout_s)
        rank, exclusive = self._world_rank(target), not shared
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
            self._alone(what, parts.direct.lock, seconds, what, rank, seconds, exclusive)
        else:
            self._asked(what, partial(parts.asking.lock, what, rank, seconds, exclusive))

    def _unlock(self, target: int, timeout_s: float | None) -> None:
        """Give the lock of a target back."""
        self._begin("unlock", timeout_s)
        rank = self._world_rank(target)
        if rank not in self._held:
            raise UsageError(f"unlock({target}): this rank does not hold that lock")
        self._unlock_ranks((rank,), timeout_s)

    def _unlock_ranks(self, ranks: Sequence[int], timeout_s: float | None) -> None:
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
            self._alone(what, parts.direct.unlock, seconds, what, ranks, seconds)
        else:
            self._asked(what, partial(parts.asking.unlock, what, ranks, seconds))
        for rank in ranks:
            self._held.pop(rank, None)

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

    def _end(self) -> None:
        self._is_closed = True
        if self._compiled is not None:
            self._compiled.close()
        self._parts.server.end()
        self._parts.release()

    @contextmanager
    def _watched(self, what: Words, kind: int, rank: int, place: Place) -> Iterator[None]:
        """Look in a simulated world for a race of the call in the body with one of another rank."""
        history, me, window = self._history, self._job.rank, self._parts.number
        assert history is not None
        is_atomic, returns = kind not in (wire.PUT, wire.GET), kind in _RETURNING
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
        self.group._failing(self.group._post.run, what, operations, seconds, nbytes)

    def _asked(self, what: Words, action: Callable[[], None]) -> None:
        """Make a call by requests."""
        if not self._plugins.settled:
            self._plugins.load_extensions()
        if self._plugins.observed:
            action = partial(self._shown, what, action)
        self.group._failing(_called, action)

    def _alone(self, what: Words, action: Callable[..., None], seconds: float, *arguments: Any) -> None:
        """Make a call that needs no message; observers and the flight recorder see it like others."""
        group, runtime = self.group, self._job.runtime
        plugins = self._plugins
        if not self._sequence.is_usable:
            group._check_open(str(what))
        if not plugins.settled:
            plugins.load_extensions()
        started, direct = runtime.now(), self._parts.direct
        try:
            if plugins.observed:
                self._shown(what, partial(action, *arguments))
            else:
                action(*arguments)
        except UsageError:
            raise
        except BaseException as error:  # noqa: BLE001 - raised as the first cause
            number = 0 if direct is None else direct.number_of(what)
            number, deadline = number or self._sequence.messages + 1, Deadline(seconds, runtime.now)
            try:
                guarded(self._job, self._members, number, RECORD, deadline, partial(again, error), what)
            except CommError:
                group._saw()
                raise
        finally:
            if direct is None or not direct.end(what):
                group._post.note(what, started)

    def _shown(self, what: Words, action: Callable[[], None]) -> None:
        words, size = str(what), 0 if what.place is None else what.place.size * self.dtype.itemsize
        with observed(
            self._plugins,
            self._job.runtime,
            self._members,
            operation=words.partition(" ")[0],
            sequence=self._sequence.messages + 1,
            nbytes=size,
            dtype=str(self.dtype),
            call=words,
        ):
            action()


def _called(action: Callable[[], None]) -> None:
    action()
