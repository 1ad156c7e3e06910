"""What a launcher does for an elastic job: which ranks it replaces, which it ends, and what it tells them of each other.

A rank that has come into the job leaves a mark, a file of its own, in the folder that all ranks of the host know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oneaccord.common.variables import Variable
from oneaccord.local.failure import MISTAKES

if TYPE_CHECKING:
    from oneaccord.local.child import Child
    from oneaccord.local.launching import Launch

__all__ = ["Elastic"]


class Elastic:
    """The ranks of an elastic job on one host.

    Parameters
    ----------
    job
        What is run.
    folder
        What all ranks of this host know.
    children
        All ranks that the launcher has started so far; it adds to them.
    """

    def __init__(self, job: Launch, folder: Path, children: Sequence[Child]) -> None:
        self._job = job
        self._folder = folder
        self._children = children
        self._begun = False
        self._restarts = 0

    def variables(self, rank: int, *, is_newcomer: bool) -> dict[str, str]:
        """Return what a rank that begins gets to know of this."""
        self._mark(rank).unlink(missing_ok=True)
        return {str(Variable.ELASTIC): str(self._folder)} | ({str(Variable.NEWCOMER): "1"} if is_newcomer else {})

    def enroll(self, running: int) -> None:
        """Tell the ranks how many of them there are."""
        from oneaccord.control.joiners import Roster  # other jobs need none of it

        job = self._job
        with contextlib.suppress(OSError):  # a full disk is no reason to end the job: the ranks wait a while for nothing
            Roster(running, job.min_ranks or 1, job.most, job.nodes).write(self._folder)

    def take_leave(self, ended: Sequence[Child]) -> list[Child]:
        """Take the marks of ranks that have ended; return which of them were in the job, or about to say so."""
        self._has_begun()
        members = [child for child in ended if self._may_be_member(child)]
        for child in ended:
            self._mark(child.rank).unlink(missing_ok=True)
        return members

    def continues(self) -> bool:
        """Return whether the job has begun, and ranks live that could let others in; those of other hosts are not known here."""
        return self._has_begun() and self._has_members()

    def restart(self, failed: Child, *, was_member: bool) -> str:
        """Return what to say if another rank comes in the place of one that has failed; nothing if none does.

        If the job has several hosts, one that never came in is not replaced: the others may have ended.
        """
        failure, most = failed.failure(), self._job.max_restarts or 0
        is_mistake = failure.record is not None and failure.record.type in MISTAKES
        if self._restarts == most or is_mistake or self._is_ending() or (self._job.nodes > 1 and not was_member):
            return ""
        self._restarts += 1
        return f"oneaccord run: rank {failed.rank} failed ({failure.how}), and another one comes in its place: restart {self._restarts} of {most}\n"

    def needless(self) -> list[Child]:
        """Return the ranks that wait for others to let them in, if nobody is left who could."""
        return self._running() if self._has_begun() and not self._has_members() else []

    def _mark(self, rank: int) -> Path:
        return self._folder / f"member-{rank}"

    def _has_begun(self) -> bool:
        """Return whether the ranks have come together: then one of them, alive or dead, has said so."""
        self._begun = self._begun or any(self._mark(rank).exists() for rank in range(self._job.most))
        return self._begun

    def _may_be_member(self, child: Child) -> bool:
        return not child.is_newcomer or self._mark(child.rank).exists()

    def _is_ending(self) -> bool:
        """Return whether a rank has ended well, as all are about to, those of other hosts as well."""
        return any(child.process.returncode == 0 for child in self._children)

    def _has_members(self) -> bool:
        return (self._job.nodes > 1 and not self._is_ending()) or any(map(self._may_be_member, self._running()))

    def _running(self) -> list[Child]:
        return [child for child in self._children if child.process.returncode is None]
