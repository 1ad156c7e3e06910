"""The short way of a call that was made before: no look-ups, no objects, all checks.

Most programs make the same small call again and again, and what it costs is then Python's time, not the network's. Whatever can be
known beforehand was found when the call was made for the first time, the long way. What is left is checked here each time: that the
group is usable, that nobody else has a turn, that ``out=`` fits. Where anything is unusual the answer is None, before anything was
done, and the call goes the long way.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from manyhands.arrays.memory import Array, divide
from manyhands.calls.engine import Express, Patience
from manyhands.calls.engine.waiting import Waiter
from manyhands.calls.failures import guarded
from manyhands.config.plugins import PluginManager
from manyhands.contract.backend import Backend, NativeCollective, Transport
from manyhands.contract.deadline import Deadline
from manyhands.control.recorder import Record
from manyhands.control.signatures import CallSignature
from manyhands.job.group_ranks import Members
from manyhands.job.job import Job

if TYPE_CHECKING:
    from manyhands.calls.host import Collectives

__all__ = ["Kind", "Native", "Shortcut"]

_ndarray, _empty, _share, _now = np.ndarray, np.empty, np.may_share_memory, time.monotonic


@dataclass(frozen=True, slots=True)
class Kind:
    """What calls of one kind have in common.

    Attributes
    ----------
    signature
        What all ranks must call alike.
    way
        The call, made ready.
    divisor
        What the result is divided by.
    dtype, shape
        Those of the result.
    in_place
        Whether the result may go where the input is.
    gives, takes
        Whether this rank's input counts, and whether it gets the result.
    """

    signature: CallSignature
    way: Express | Native
    divisor: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    in_place: bool
    gives: bool
    takes: bool


class Native:
    """A collective that a plugin performs, to be run as an `Express` is.

    Parameters
    ----------
    native
        What performs it.
    backend, root
        What it gets beside the arrays.
    """

    __slots__ = ("_backend", "_native", "_root", "takes_any_layout")

    def __init__(self, native: NativeCollective, backend: Backend, root: int) -> None:
        self._native = native
        self._backend = backend
        self._root = root
        self.takes_any_layout: bool = False

    def run(self, source: Array, target: Array, sequence: int, patience: Patience) -> None:
        """Perform it; raises as a `NativeCollective`."""
        waiter = patience()
        stall = waiter.on_stall or _ignore
        self._native(self._backend, source.reshape(-1), target.reshape(-1), self._root, waiter.deadline, stall)


class Shortcut:
    """One kind of call of one group.

    Parameters
    ----------
    collectives
        The group's collectives, which count all calls.
    job, members, plugins
        Where the group lives, who belongs to it, and who might observe.
    transport
        What the calls use.
    kind
        What they have in common.
    """

    __slots__ = (
        "_any_layout",
        "_channel",
        "_collectives",
        "_control",
        "_divisor",
        "_dtype",
        "_gives",
        "_in_place",
        "_job",
        "_lane",
        "_members",
        "_nothing",
        "_number",
        "_patience",
        "_plugins",
        "_record",
        "_recorder",
        "_run",
        "_shape",
        "_signature",
        "_started",
        "_takes",
        "_timeout_s",
        "_transport",
    )

    def __init__(
        self,
        collectives: Collectives,
        job: Job,
        members: Members,
        plugins: PluginManager,
        transport: Transport,
        kind: Kind,
    ) -> None:
        self._collectives = collectives
        self._lane = collectives.lane
        self._job = job
        self._control = job.control
        self._recorder = job.control.recorder
        self._members = members
        self._number = members.number
        self._channel = members.channel
        self._plugins = plugins
        self._transport = transport
        self._signature = kind.signature
        self._run = kind.way.run
        self._divisor = kind.divisor if kind.takes else 1
        self._gives = kind.gives
        self._takes = kind.takes
        self._nothing: Array = _empty(0, kind.dtype)
        self._dtype = kind.dtype
        self._shape = kind.shape
        self._in_place = kind.in_place
        self._any_layout = kind.way.takes_any_layout
        self._patience = self._be_patient
        # Those of the call that runs now; there is one at a time, since callers take turns.
        self._started = 0.0
        self._timeout_s = 0.0
        self._record: Record | None = None

    def run(self, array: Array, out: object, timeout_s: float) -> Array | None:
        """Make the call; None where it must go the long way.

        Parameters
        ----------
        array
            The input, such as it was the first time.
        out
            What the user gave as ``out=``.
        timeout_s
            Seconds that the call may last.

        Raises
        ------
        CommError
            As `Collectives.run`.
        """
        if not self._any_layout and not array.flags.c_contiguous:
            return None
        if not self._takes:
            return self._nothing if self._go(array, self._nothing, timeout_s) else None
        if out is None:
            try:
                target: Array = _empty(self._shape, self._dtype)
            except MemoryError:  # the long way says so in our words
                return None
        elif type(out) is _ndarray and out.dtype is self._dtype and out.shape == self._shape and out.flags.carray:
            if not self._any_layout and not (self._in_place and out is array) and _share(array, out):
                return None
            target = out
        else:
            return None
        return target if self._go(array if self._gives else self._nothing, target, timeout_s) else None

    def _go(self, source: Array, target: Array, timeout_s: float) -> bool:
        lane = self._lane
        if not lane.take_if_free():
            return False
        try:
            job = self._job
            if job.closed or self._control.verdict or self._number in job.left or self._plugins.observed:
                return False
            collectives, channel, signature = self._collectives, self._channel, self._signature
            sequence = collectives.sequence
            collectives.sequence = self._control.progress.calls[channel] = sequence + 1
            self._timeout_s = timeout_s
            self._started = started = _now()
            recorder = self._recorder
            recorder.short[channel] = signature, sequence, started
            try:
                self._run(source, target, sequence, self._patience)
            except BaseException as error:  # noqa: BLE001 - it is raised again, as the first cause or as it was
                guarded(job, self._members, sequence, signature, self._deadline(), partial(_again, error))
            finally:
                recorder.note(channel, sequence, signature, started)
                if self._record is not None:
                    recorder.finish(self._record)
                    self._record = None
            if self._divisor > 1:
                divide(target, self._divisor)
            return True
        finally:
            lane.give()

    def _deadline(self) -> Deadline:
        deadline = Deadline(self._timeout_s)
        deadline.at += self._started - _now()
        return deadline

    def _be_patient(self) -> Waiter:
        """Return what waits for what did not come at once, as the long way does."""
        self._record = record = self._recorder.start(self._channel, self._collectives.sequence - 1, self._signature)
        stall = partial(self._collectives.stalled, record, self._signature)
        return Waiter(self._transport, self._deadline(), stall)


def _ignore(_peers: list[int]) -> None:
    pass


def _again(error: BaseException) -> None:
    raise error
