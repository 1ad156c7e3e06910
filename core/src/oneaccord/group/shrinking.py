"""A new job of the ranks that a failure has left over."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable

import msgspec

from oneaccord.contract.deadline import Deadline
from oneaccord.control.meeting import Meeting
from oneaccord.control.protocol import Shrunk
from oneaccord.errors import CommError, DeadlineError, RendezvousError, UnsupportedError
from oneaccord.group.forming import Formed, Setup, among_processes, come_alone, finish
from oneaccord.job.job import Job
from oneaccord.net.network import Address, guarded_bind

__all__ = ["check_possible", "come_later", "shrink"]

_PAUSE_S = 0.05
_log = logging.getLogger("oneaccord.job")


def check_possible(job: Job) -> None:
    """Raise an error if ranks are threads, whose world has a place for each of them.

    Raises
    ------
    UnsupportedError
        They are.
    """
    if job.meeting is None and (job.world_size > 1 or job.runtime.is_simulated):
        where = "a simulated world" if job.runtime.is_simulated else "one process"
        raise UnsupportedError(
            f"shrink() needs ranks that are processes, but these are threads of {where}: start processes, or make a world without the lost "
            "ranks",
            rank=job.rank,
        )


def come_later(meeting: Meeting, most: int, setup: Setup, timeout_s: float, patience_s: float) -> Formed:
    """Come into a job that runs already: wait until it lets new ranks in, and meet the others in their next job.

    Parameters
    ----------
    meeting
        How to come to the join address.
    most
        How many ranks the job has at most.
    setup
        The description of the job that this rank got.
    timeout_s
        How long the meeting may last, once it begins.
    patience_s
        How long to wait until then.

    Raises
    ------
    RendezvousError
        This rank does not fit the others, or they did not let it in. Other errors of its own pass through as well.
    """
    deadline = Deadline(patience_s)
    while True:
        old = Job.at_the_door(meeting, most, deadline)
        try:
            return shrink(old, setup, deadline, timeout_s)
        except CommError:
            if not old.control.cut:  # otherwise it was not accepted this time, or the rank that let it in has died
                raise
        finally:
            old.release()
        time.sleep(_PAUSE_S)


def shrink(old: Job, setup: Setup, deadline: Deadline, timeout_s: float | None = None) -> Formed:
    """Meet those that are left of a job that has failed, in a new job of their own, and give back the old one.

    If they did not come together for a reason that may pass, the old job stays, and `Job.may_shrink_again` says so.

    If another rank dies meanwhile, or cannot continue for a reason of its own, the others try again without it, whatever error
    that caused. All of them do the same, because they leave the new job's last exchange together or not at all, and the old
    job's store gives all of them the same list of survivors.

    Parameters
    ----------
    old
        The job, whose backend has been closed; its control connections still report the survivors.
    setup
        The description of the job that this rank got.
    deadline
        Until when.
    timeout_s
        The seconds that this rank may take to meet the others once it knows them, if it came later; by default until the deadline.

    Raises
    ------
    CommError
        They did not come together.
    BackendUnavailableError
        This rank cannot continue. Other errors of its own are raised as they are.
    """
    try:
        with contextlib.ExitStack() as at_end:
            formed = _Shrinking(old, setup, deadline, timeout_s, at_end.callback).run()
    except CommError as error:
        # If one rank alone cannot meet the others, it must leave, or they would wait for it.
        if isinstance(error, RendezvousError) or old.control.cut:
            old.release()
        else:
            old.instead = "call shrink() again, or close() the group"
            old.may_shrink_again = True
        raise
    except BaseException:
        old.release()
        raise
    old.control.report_reformed()
    old.release()
    return formed


class _Shrinking(msgspec.Struct, frozen=True):
    """The ranks that are left of ``old``, on their way to a new job; ``at_end`` takes what must stay until then."""

    old: Job
    setup: Setup
    deadline: Deadline
    timeout_s: float | None
    at_end: Callable[[Callable[[], None]], object]

    def run(self) -> Formed:
        failure: CommError | None = None
        before: list[int] = []
        while True:
            # No rank dials before all have asked to continue. By then each of them listens, because the first is not known in advance.
            with _listen(self.old, self.deadline) as listener:
                address = ("", 0) if listener is None else listener.getsockname()[:2]
                shrunk = self.ask(address)
                if failure is not None and shrunk.ranks == before:
                    raise failure  # no rank has died: the same fault would come again
                before = shrunk.ranks
                try:
                    return self.form(shrunk, listener, self.deadline if self.timeout_s is None else Deadline(self.timeout_s))
                except CommError as error:
                    # A rank that meets other ranks there, alone, leaves; if one of them is gone, the old store says so.
                    control = self.old.control
                    is_alone = (
                        isinstance(error, RendezvousError)
                        and not control.cut
                        and not any(map(control.gone.__contains__, shrunk.ranks))
                    )
                    is_late = self.timeout_s is None and self.deadline.passed()
                    if is_late and not control.cut and not isinstance(error, DeadlineError):
                        # As if they had learned to continue when there was no time left to meet: they may try again.
                        text = f"shrink() did not end within {self.deadline.timeout_s:g} s, while the ranks met: {error}"
                        raise DeadlineError(text, rank=self.old.rank, operation="shrink") from error
                    if is_alone or self.deadline.passed():
                        raise
                    failure = error

    def ask(self, address: Address) -> Shrunk:
        meeting = self.old.meeting
        accepts_joiners = meeting is not None and meeting.join_address is not None and meeting.join_address.is_here
        tls = None if meeting is None else meeting.credentials.tls
        certificate = None if tls is None else tls.names
        shrunk = self.old.control.recovery.shrink(
            address, self.deadline, accepts_joiners=accepts_joiners, certificate=certificate
        )
        if shrunk.you >= 0:
            self.old.rank = self.old.control.rank = shrunk.you
        return shrunk

    def form(self, shrunk: Shrunk, listener: socket.socket | None, deadline: Deadline) -> Formed:
        job = self.meet(shrunk, listener, deadline)
        origins = self.old.control.origins or tuple(range(self.old.world_size))
        known = len(origins) if self.timeout_s is None else 0
        job.control.origins = tuple(origins[rank] if rank < known else None for rank in shrunk.ranks)
        _log.info("rank %d of %d continues as rank %d of %d", self.old.rank, self.old.world_size, job.rank, job.world_size)
        formed = finish(job, self.setup, None, deadline)
        try:
            # Until now the old store and its successor know the survivors, and from now on the new ones do.
            job.control.exchange("the end of shrink()", b"", deadline)
        except BaseException as error:
            job.abort(error)
            raise
        job.let_more_come()
        join_address = None if job.meeting is None else job.meeting.join_address
        if join_address is not None and job.world_size < join_address.roster().fewest:
            # A standby that cannot let newcomers in has counted them: too few. The store of this job can, and ends the job, so that all meet again there.
            with contextlib.suppress(CommError):
                job.control.exchange("more ranks", b"", deadline)
        return formed

    def meet(self, shrunk: Shrunk, listener: socket.socket | None, deadline: Deadline) -> Job:
        old, ranks, before = self.old, shrunk.ranks, self.old.meeting
        if before is None or (len(ranks) == 1 and not (before.join_address is not None and before.join_address.is_here)):
            return come_alone(self.setup, deadline, old.local_rank)
        meeting = Meeting(
            ranks.index(old.rank),
            len(ranks),
            before.backend,
            before.choices,
            (shrunk.host, shrunk.port),
            before.credentials._replace(expected=shrunk.certificate),
            None if listener is None else listener.fileno(),
            before.liveness,
            (old.control, ranks),
            old.local_rank,
            self.at_end,
            before.join_address,
        )
        if len(ranks) == 1:
            return come_alone(self.setup, deadline, old.local_rank, meeting)
        # The ranks of each host stay the same, also if the config names them by their old numbers; unless there are newcomers.
        hosts = None
        if max(ranks) < len(old.hosts):
            known = [old.hosts[rank] for rank in ranks]
            hosts = [known.index(host) for host in known]
        return among_processes(meeting, self.setup, deadline, hosts)


def _listen(old: Job, deadline: Deadline) -> contextlib.AbstractContextManager[socket.socket | None]:
    """Return the socket at which this rank waits for the others, on the address by which it reaches them; to be closed by the context."""
    if old.meeting is None:
        return contextlib.nullcontext()
    return guarded_bind((old.control.host, 0), old.meeting.credentials, deadline)
