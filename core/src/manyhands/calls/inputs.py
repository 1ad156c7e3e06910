"""Finding that a program wrote to an array while a call in the background was still to read it: the same call would give any result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from manyhands.arrays.memory import Array, bytes_of, to_array
from manyhands.calls.turns import Turns
from manyhands.common.lines import program_frame
from manyhands.contract.deadline import Deadline
from manyhands.control.protocol import Report
from manyhands.errors import UnsupportedError
from manyhands.job.group_ranks import Members
from manyhands.job.job import Job

__all__ = ["Inputs"]

T = TypeVar("T")


class Inputs:
    """The inputs of the calls of one group that run in the background, each known by a digest.

    Parameters
    ----------
    job, members
        Where the group lives, and who belongs to it.
    """

    def __init__(self, job: Job, members: Members) -> None:
        self._job = job
        self._members = members
        self._results: dict[object, tuple[Turns, list[Array]]] = {}

    def guard(
        self, what: str, action: Callable[[Deadline], T], turns: Turns, array: Any, outs: Sequence[Any]
    ) -> Callable[[Deadline], T]:
        """Return the action of a call, which then ends the job if the call's input changes from now until it has been read.

        Parameters
        ----------
        what, action
            The call.
        turns
            Where it waits for its turn.
        array, outs
            As the caller gave them; None where the call reads nothing, and where it writes to memory of its own.

        Raises
        ------
        InputChangedError
            The action does; alike on all ranks.
        """
        source, targets = _memory(array), [target for target in map(_memory, outs) if target is not None]
        if source is not None and not source.flags.c_contiguous:
            source = None  # it was copied at once
        # Where a call before this one, in the same turns, writes to it, what counts is what is there when the turn comes.
        follows = source is not None and any(
            each is turns and _overlap(source, results) for each, results in list(self._results.values())
        )
        if source is not None:
            action = self._checked(what, action, source, targets, None if follows else _digest(source))
        if not targets:
            return action
        # One step each, since a call may end while another begins.
        key = object()
        self._results[key] = turns, targets

        def run(deadline: Deadline) -> T:
            try:
                return action(deadline)
            finally:
                del self._results[key]

        return run

    def _checked(
        self, what: str, action: Callable[[Deadline], T], source: Array, targets: list[Array], before: int | None
    ) -> Callable[[Deadline], T]:
        """Return the action, between two looks at its input; the first is of no use where there was no digest ``before``."""
        begun_at = _line()

        def check(digest: int | None) -> None:
            if digest is None or digest == _digest(source) or self._job.control.failed:
                return
            text = (
                f"rank {self._job.rank} wrote to the input of {what}, {source.dtype}{list(source.shape)}, begun at {begun_at}, while that was still to be read in the background: "
                "wait() for the work first, or give it a copy"
            )
            raise self._job.fail(Report("changed", text, self._job.rank, what, members=list(self._members.ranks)))

        def guarded(deadline: Deadline) -> T:
            check(before)
            # What the call itself writes to says nothing afterwards.
            digest = None if _overlap(source, targets) else _digest(source)
            result = action(deadline)
            check(digest)
            return result

        return guarded


def _memory(array: Any) -> Array | None:
    """Return an array in the host's memory as NumPy's; None for another one."""
    try:
        return None if array is None else to_array(array)
    except UnsupportedError:
        return None


def _overlap(source: Array, targets: list[Array]) -> bool:
    return any(np.may_share_memory(source, target) for target in targets)


def _digest(array: Array) -> int:
    from zlib import crc32  # nobody plans this, and it is the fastest there is

    return crc32(bytes_of(array))


def _line() -> str:
    """Return the line of the program that makes the call."""
    frame = program_frame(sys._getframe(1)) or sys._getframe(1)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
