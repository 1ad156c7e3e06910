"""Coalescing: many small all_reduces as one message for each dtype and op."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from oneaccord.arrays.buffers import Give
from oneaccord.arrays.dtypes import OpLike, Reduction, resolve_op
from oneaccord.arrays.libraries import DeviceArray
from oneaccord.arrays.memory import Array, check_out, copy_of, handed_over, new_array
from oneaccord.calls.devices.actions import DeviceAction, launch_together, together
from oneaccord.calls.devices.watch import DeviceWatch
from oneaccord.calls.devices.work import DeviceWork
from oneaccord.calls.order.turns import Turns
from oneaccord.calls.paths import Paths
from oneaccord.calls.programs import CallBuilder
from oneaccord.calls.request import CallSteps, Operation, Request
from oneaccord.calls.runner import Call, Calls
from oneaccord.calls.work import Work
from oneaccord.common.checks import safe_str
from oneaccord.contract.deadline import Deadline
from oneaccord.errors import UsageError
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job
from oneaccord.schedule.steps import Collective

__all__ = ["Batch", "BatchCalls"]

_TOLD = 8
"""How many arrays of a batch are named one by one in messages to people."""

_Key = tuple[np.dtype[Any], Reduction, bool]
"""The common part of the all_reduces of one message."""


_NAME = "all_reduce of a batch"


class _Issued:
    """The common part of a batch's handles: there is nothing to wait for until the batch has been issued."""

    _is_issued = False

    def issue(self) -> None:
        """Allow waiting."""
        self._is_issued = True

    def _check_ends(self) -> None:
        if not self._is_issued:
            raise UsageError(
                "this all_reduce is sent when the block of coalesce() ends, so waiting inside the block would never end: wait after it"
            )


class _BatchWork(_Issued, Work[Array]):
    """The handle of one all_reduce of a batch."""


class _DeviceBatchWork(_Issued, DeviceWork[Array]):
    """The handle of one all_reduce of a batch, of an array on a GPU."""


class _Entry(msgspec.Struct, frozen=True):
    """One all_reduce of a batch."""

    source: Array
    out: Array | None
    give: Give | None
    work: _BatchWork


class _DeviceEntry(msgspec.Struct, frozen=True):
    """One all_reduce of a batch, of an array on a GPU."""

    action: DeviceAction
    work: _DeviceBatchWork


class Batch:
    """All_reduces that travel together; made by `Group.coalesce`, and filled inside its block.

    Parameters
    ----------
    issue
        Carries out the prepared all_reduces: the end of the block calls it once.
    programs, paths
        The programs of the group's calls, and the object that carries them out.
    job, turns, on_failure_seen
        Needed by works.
    """

    def __init__(
        self,
        issue: Callable[[list[_Message], list[_DeviceEntry]], None],
        programs: CallBuilder,
        paths: Paths,
        job: Job,
        turns: Turns,
        on_failure_seen: Callable[[], None],
    ) -> None:
        self._issue = issue
        self._builder = programs
        self._paths = paths
        self._job = job
        self._turns = turns
        self._on_failure_seen = on_failure_seen
        self._entries: dict[_Key, list[_Entry]] = {}
        self._on_devices: list[_DeviceEntry] = []
        self._state = "new"

    def __enter__(self) -> Self:
        if self._state != "new":
            raise UsageError("a batch can be used for only one block: call coalesce() again")
        self._state = "open"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._state = "ended"
        works: list[_BatchWork | _DeviceBatchWork] = [entry.work for group in self._entries.values() for entry in group]
        works += [entry.work for entry in self._on_devices]
        for work in works:
            work.issue()
        try:
            if error is None and works:
                self._issue(self._messages(), self._on_devices)
        except BaseException as failure:
            _end_all(works, failure)
            raise
        finally:
            if error is not None:
                cause = UsageError(
                    f"this all_reduce was not sent: the block of coalesce() ended with {type(error).__name__}: {safe_str(error)}"
                )
                cause.__cause__ = error
                _end_all(works, cause)
            self._entries, self._on_devices = {}, []

    def all_reduce(
        self, array: npt.ArrayLike, op: OpLike = "sum", *, out: Array | None = None, reproducible: bool | None = None
    ) -> Work[Array]:
        """Add an `all_reduce` to the batch.

        Parameters
        ----------
        array
            Any shape and dtype, alike on all ranks; read when the block ends. An array that is on a GPU and not contiguous, or that goes through
            the host, is read now.
        op, out, reproducible
            As for `Group.all_reduce`.

        Returns
        -------
        Work
            Its result is that of the all_reduce. It may be waited for after the block.

        Raises
        ------
        DTypeError, LayoutError, SizeMismatchError
            As for `Group.all_reduce`, at once.
        UsageError
            The block has ended, or has not begun.
        """
        if self._state != "open":
            raise UsageError("a batch takes calls only inside its block: with group.coalesce() as batch: ...")
        source, target, give = taken = self._builder.take("all_reduce", array, out)
        if isinstance(source, DeviceArray):
            action = self._paths.prepare(self._builder.all_reduce_of(taken, op, reproducible))
            assert isinstance(action, DeviceAction)
            later = _DeviceBatchWork(_NAME, self._turns, self._on_failure_seen, self._job, DeviceWatch.of(self._job))
            self._on_devices.append(_DeviceEntry(action, later))
            return later
        assert not isinstance(target, DeviceArray)
        reduction = resolve_op(op, source.dtype, source)
        if target is not None:
            check_out(target, source.shape, source.dtype)
        key = (source.dtype, reduction, self._builder.is_fixed(reproducible))
        work = _BatchWork(_NAME, self._turns, self._on_failure_seen)
        self._entries.setdefault(key, []).append(_Entry(source, target, give, work))
        return work

    def _messages(self) -> list[_Message]:
        """Return all messages to send. All arrays are read before any result is written."""
        count = len(self._entries)
        return [
            _Message.of(key, entries, f"batch {number}/{count}, " if count > 1 else "batch ")
            for number, (key, entries) in enumerate(self._entries.items(), start=1)
        ]


class _Message(msgspec.Struct, frozen=True):
    """The all_reduces of one dtype and op, joined into one."""

    request: Request
    memory: Array
    entries: list[_Entry]

    @classmethod
    def of(cls, key: _Key, entries: list[_Entry], name: str) -> _Message:
        """Join the arrays. Their shapes become part of the facts on which all ranks must agree."""
        dtype, reduction, reproducible = key
        memory = new_array((sum(entry.source.size for entry in entries),), dtype)
        np.concatenate([entry.source.reshape(-1) for entry in entries], out=memory)
        request = Request(
            Collective.ALL_REDUCE,
            dtype,
            memory.shape,
            reduction=reduction,
            reproducible=reproducible,
            part=name + _shapes([entry.source.shape for entry in entries]),
        )
        return cls(request, memory, entries)

    def finish(self) -> None:
        """Hand over the results, in the order in which the all_reduces were added."""
        start = 0
        for entry in self.entries:
            end = start + entry.source.size
            result = self.memory[start:end].reshape(entry.source.shape)
            # A copy: a program that keeps one small result must not keep the whole batch.
            placed = handed_over(result, entry.out) if entry.out is not None else copy_of(result)
            give = entry.give
            entry.work.run((lambda placed=placed: placed) if give is None else lambda give=give, placed=placed: give(placed))  # type: ignore[misc]
            start = end


class BatchCalls(Calls):
    """The way from a group to its batches."""

    def coalesce(self, *, wait: bool = True, timeout_s: float | None = None) -> Batch:
        """Begin a block whose small all_reduces travel together: one message for each dtype, op and ``reproducible``.

        ::

            with group.coalesce() as batch:
                works = [batch.all_reduce(x, out=x) for x in gradients]

        The end of the block joins the arrays, makes one all_reduce of each kind, in one turn of the group, and hands the results over.
        Every rank must add arrays of the same shapes in the same order; otherwise every rank gets a
        `CollectiveMismatchError`. Results are those of separate all_reduces, bit for bit if the dtype is exact (integers, bool)
        or with ``reproducible=True``; other sums of floats may be grouped in another way. Arrays are read when the block ends.
        After that you may write to them; leave an ``out`` alone until its work is done.

        A block left by an exception sends nothing, and its works end with a `UsageError` that says so. Other ranks may be
        waiting already; they get an `AbortedError` when this rank leaves.

        Parameters
        ----------
        wait
            Whether the end of the block waits until all results are there, and raises the failure if there is one. Otherwise
            wait for the works.
        timeout_s
            Seconds that all the all_reduces together may last, counted from the end of the block or, without ``wait``, from
            their turn.

        Returns
        -------
        Batch
            Use it in one ``with`` statement.

        Raises
        ------
        ClosedError, CommError
            The group is closed, or has failed.
        UsageError
            ``timeout_s`` is no number of seconds.
        """
        self._begin(timeout_s)
        self._check_open()

        def issue(messages: list[_Message], on_devices: list[_DeviceEntry]) -> None:
            if on_devices:
                self._issue_on_devices(on_devices, timeout_s, wait=wait)
            if messages and wait:
                self._run_program("coalesce", partial(_program, messages), timeout_s)
            elif messages:
                outs = [entry.out for message in messages for entry in message.entries]
                call = _BatchCall(self._job, self._members, self._paths, messages)
                self._later(call, timeout_s, writes=outs)

        return Batch(issue, self._builder, self._paths, self._job, self._callbacks, self._saw)

    def _issue_on_devices(self, entries: list[_DeviceEntry], timeout_s: float | None, *, wait: bool) -> None:
        """Enqueue all_reduces as one, on the caller's stream or beside it."""
        actions = [entry.action for entry in entries]
        if wait or actions[0].is_copy:
            self._in_this_thread("coalesce", (self._call_sequence,), partial(together, actions), timeout_s)
            for entry in entries:
                entry.work.run(entry.action.collect)
            return
        for each in actions:
            each.begin()
        seconds = self._begin(timeout_s).timeout_s

        def run() -> None:
            try:
                underways = launch_together(actions, Deadline(seconds))
            except BaseException as error:  # noqa: BLE001 - the wait for the results raises it
                for entry in entries:
                    entry.work.fail(error)
                return
            for entry, underway in zip(entries, underways, strict=True):
                entry.work.launch(lambda underway=underway: underway)  # type: ignore[misc]

        self._in_turn(run, waits=not all(each.is_known for each in actions))


def _program(messages: list[_Message]) -> CallSteps:
    for message in messages:
        yield Operation(message.request, message.memory, message.memory.shape, message.memory)
        message.finish()


class _BatchCall(Call):
    """The call of a batch that continues in the background; if it fails, the remaining works end with its error."""

    __slots__ = ("_works",)

    def __init__(self, job: Job, members: Members, paths: Paths, messages: list[_Message]) -> None:
        super().__init__(job, members, paths, "coalesce", partial(_program, messages))
        self._works = [entry.work for message in messages for entry in message.entries]

    def run(self, deadline: Deadline) -> None:
        try:
            super().run(deadline)
        except BaseException as error:
            _end_all(self._works, error)
            raise


def _end_all(works: Sequence[_BatchWork | _DeviceBatchWork], error: BaseException) -> None:
    """End all works that have not ended with an error."""

    def fail() -> Array:
        raise error

    for work in works:
        if not work.done():
            work.run(fail)


def _shapes(shapes: list[tuple[int, ...]]) -> str:
    """Return words for the shapes that differ whenever the shapes do."""
    words = " + ".join(str(list(shape)) for shape in shapes[:_TOLD])
    if len(shapes) <= _TOLD:
        return words
    digest = hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest()
    return f"{words} + {len(shapes) - _TOLD} more ({digest})"
