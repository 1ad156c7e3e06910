"""Finding that a program and a call in the background use an array at the same time: the same program would give any result.

A digest reveals a program that writes to the input of a call. In a simulated world the result of a call holds no number until the call has ended, so
that a program that reads it too early computes with NaN. A program that writes there is found. (For a batch, and if ranks first tell each other how much
data comes, this holds until the turn of the call.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from oneaccord.arrays.memory import Array, bytes_of, to_array
from oneaccord.calls.order.turns import Turns
from oneaccord.common.lines import program_frame
from oneaccord.contract.deadline import Deadline
from oneaccord.control.protocol import Report
from oneaccord.errors import UnsupportedError
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job

__all__ = ["Inputs"]

T = TypeVar("T")

_SIGNALING: dict[np.dtype[Any], np.unsignedinteger[Any]] = {
    np.dtype(np.float16): np.uint16(0x7C01),
    np.dtype(np.float32): np.uint32(0x7F80_0001),
    np.dtype(np.float64): np.uint64(0x7FF0_0000_0000_0001),
}
"""The bits of a NaN that any arithmetic changes, so that an addition to it in place is seen."""


class Inputs:
    """The inputs of the calls of one group that run in the background, each known by a digest.

    Parameters
    ----------
    job, members
        The job and the members of the group.
    """

    def __init__(self, job: Job, members: Members) -> None:
        self._job = job
        self._members = members
        self._results: dict[object, tuple[Turns, list[Array]]] = {}
        self._sources: dict[object, Array] = {}
        self._hides: bool = job.runtime.is_simulated

    def guard(
        self,
        what: str,
        action: Callable[[Deadline], T],
        turns: Turns,
        array: Any,
        outs: Sequence[Any],
        apart: Callable[[Sequence[Array]], Callable[[Any], Any] | None],
    ) -> Callable[[Deadline], T]:
        """Return the action of a call, which then ends the job if the call's input changes from now until it has been read.

        In a simulated world, the memory that the call writes to holds no numbers from now until the call has ended, unless a call before it uses that
        memory.

        Parameters
        ----------
        what, action
            The call.
        turns
            The turns for which it waits.
        array, outs
            The caller's arrays; None if the call reads nothing, and if it writes to memory of its own.
        apart
            Lets the call work on memory of its own instead of its results, and returns a function that turns that into the caller's result. If it cannot, the results
            are hidden until its turn.

        Raises
        ------
        InputChangedError
            The action does; alike on all ranks.
        """
        source, targets = _memory(array), [target for target in map(_memory, outs) if target is not None]
        if source is not None and not source.flags.c_contiguous:
            source = None  # it was copied at once
        # If a call before this one, in the same turns, writes to it, its content at the turn counts.
        follows = source is not None and any(
            each is turns and _overlap(source, results) for each, results in list(self._results.values())
        )
        in_use = [*self._sources.values(), *(each for _, results in self._results.values() for each in results)]
        hidden = [] if follows or not self._hides else [target for target in targets if not _overlap(target, in_use)]
        if source is not None and not _overlap(source, hidden):
            action = self._checked(what, action, source, targets, None if follows else _digest(source))
        if hidden:
            action = self._hidden(what, action, hidden, apart(hidden))
        if not targets and not (self._hides and source is not None):
            return action
        # One step each, since a call may end while another begins.
        key = object()
        self._results[key] = turns, targets
        if source is not None:
            self._sources[key] = source

        def run(deadline: Deadline) -> T:
            try:
                return action(deadline)
            finally:
                del self._results[key]
                self._sources.pop(key, None)

        return run

    def _hidden(
        self,
        what: str,
        action: Callable[[Deadline], T],
        targets: list[Array],
        hand_over: Callable[[Any], Any] | None,
    ) -> Callable[[Deadline], T]:
        """Return the action of a call whose results are hidden from now on."""
        begun_at = _line()
        covers = [_Cover(target) for target in targets]

        def show() -> None:
            touched = [cover for cover in covers if cover.lift()]
            if touched and not self._job.control.failed:
                text = (
                    f"rank {self._job.rank} wrote to the result of {what}, begun at {begun_at}, while that call was running in the background: "
                    "wait() for the work first, or give it memory of its own"
                )
                raise self._job.fail(Report("changed", text, self._job.rank, what, members=list(self._members.ranks)))

        def run(deadline: Deadline) -> T:
            if hand_over is None:
                show()
                return action(deadline)
            try:
                result: Any = action(deadline)
            finally:
                show()
            return cast("T", hand_over(result))

        return run

    def _checked(
        self, what: str, action: Callable[[Deadline], T], source: Array, targets: list[Array], before: int | None
    ) -> Callable[[Deadline], T]:
        """Return the action, between two looks at its input; the first look is useless if there was no digest ``before``."""
        begun_at = _line()

        def check(digest: int | None) -> None:
            if digest is None or digest == _digest(source) or self._job.control.failed:
                return
            text = (
                f"rank {self._job.rank} wrote to the input of {what}, {source.dtype}{list(source.shape)}, begun at {begun_at}, while the call in the background could still read it: "
                "wait() for the work first, or give it a copy"
            )
            raise self._job.fail(Report("changed", text, self._job.rank, what, members=list(self._members.ranks)))

        def guarded(deadline: Deadline) -> T:
            check(before)
            # The call's own writes prove nothing.
            digest = None if _overlap(source, targets) else _digest(source)
            result = action(deadline)
            check(digest)
            return result

        return guarded


class _Cover:
    """Hides the content of an array: by NaN, or by bits that a program is unlikely to expect."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self._kept: Array = array.copy()
        bits = _SIGNALING.get(array.dtype)
        if bits is not None:
            array.view(bits.dtype).fill(bits)
        elif array.dtype.kind in "fc":
            array.fill(np.nan)
        elif array.dtype.kind == "b":
            np.logical_not(array, out=array)
        elif array.dtype.kind in "iu":
            np.invert(array, out=array)
        elif array.flags.c_contiguous:
            bytes_of(array)[:] = b"\xff" * array.nbytes  # NaN in most formats of few bits
        self._shown = array.tobytes()

    def lift(self) -> bool:
        """Put the old content back; return whether anything else had been written meanwhile."""
        is_touched = self._array.tobytes() != self._shown
        self._array[...] = self._kept
        return is_touched


def _memory(array: Any) -> Array | None:
    """Return an array in the host's memory as NumPy's; None for another one."""
    try:
        return None if array is None else to_array(array)
    except UnsupportedError:
        return None


def _overlap(source: Array, targets: Sequence[Array]) -> bool:
    return any(np.may_share_memory(source, target) for target in targets)


def _digest(array: Array) -> int:
    from zlib import crc32  # no adversary plans a change, and crc32 is the fastest digest

    return crc32(bytes_of(array))


def _line() -> str:
    """Return the line of the program that makes the call."""
    frame = program_frame(sys._getframe(1)) or sys._getframe(1)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
