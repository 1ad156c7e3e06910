"""How a failed call becomes an error: the first cause, on which all ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from oneaccord.calls.engine.waiting import Breach, Overdue
from oneaccord.common.checks import safe_str
from oneaccord.contract.backend import Damaged, HeaderMismatch, LinkLost, Transfer
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.header import CallSignature, parse_header
from oneaccord.control.protocol import ANOTHER_CALL, Report
from oneaccord.errors import ClosedError, CommError, OneAccordError, OutOfMemoryError, PluginError
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job

__all__ = ["again", "awaited", "broken_off", "exchange_cards", "guarded"]


def guarded(
    job: Job,
    members: Members,
    sequence: int,
    signature: CallSignature,
    deadline: Deadline,
    action: Callable[[], None],
    words: object = "",
) -> None:
    """Do what moves bytes; turn each way in which it can fail into the first cause that all ranks agree on.

    ``words`` name the call if the signature does not. Calls that have them are no collectives, and ``sequence`` is then this rank's own count.
    """
    try:
        action()
    except BaseException as error:
        call = _FailedCall(job, members, sequence, signature, deadline, str(words))
        finding = call.finding(error)
        if finding is not None:
            raise call.first_cause(finding) from None
        instead = call.broken_off(error)
        if instead is None:
            raise
        raise instead from error


class _Finding(NamedTuple):
    """What this rank has found: the kind, the text and the peer of its report."""

    kind: str
    text: str
    peer: int | None


class _FailedCall(NamedTuple):
    """A call that has failed on this rank; the fields are the arguments of `guarded`."""

    job: Job
    members: Members
    sequence: int
    signature: CallSignature
    deadline: Deadline
    words: str

    @property
    def operation(self) -> str:
        return self.words or self.signature.operation

    def first_cause(self, finding: _Finding) -> OneAccordError:
        """Report what was found, and return the first cause, as the error of this call."""
        job, operation, sequence = self.job, self.operation, self.sequence
        if job.closed:
            return ClosedError(
                f"the group was closed during {operation} #{sequence}", rank=job.rank, operation=operation, sequence=sequence
            )
        channel = self.members.channel + bool(self.words)
        error = job.fail(Report(*finding, operation, channel, None if self.words else sequence, list(self.members.ranks)))
        return job.control.ended(error, operation, sequence)

    def finding(self, error: BaseException) -> _Finding | None:
        """Return what an error tells about another rank, or about all; None if it is of this rank's own."""
        rank, call = self.job.rank, f"{self.operation} #{self.sequence}"
        match error:
            case Overdue():
                return _Finding("deadline", f"{call} did not finish within {self.deadline.timeout_s:g} s", error.peers[0])
            case TimeoutError():
                text = f"{call} did not finish within {self.deadline.timeout_s:g} s on rank {rank} ({error})"
                return _Finding("deadline", text, None)
            case LinkLost():
                text = f"in {call} the connection of rank {rank} to rank {error.peer} broke ({error.reason})"
                return _Finding("lost", text, error.peer)
            case Damaged():
                return _Finding("protocol", f"during {call} on rank {rank}: {error.reason}", error.peer)
            case HeaderMismatch():
                return self._mismatch(error)
            case _:
                return None

    def broken_off(self, error: BaseException) -> OneAccordError | None:
        """Tell the others of an error of this rank's own, and return what to raise in its place; None if nothing else.

        A signal, a lack of memory, an error in a user's ufunc, a bug: messages are half sent, so no rank can use the group any more.
        """
        job, operation, sequence = self.job, self.operation, self.sequence
        instead: OneAccordError | None = None
        if isinstance(error, MemoryError):
            why = safe_str(error) or "there is no memory left"
            instead = OutOfMemoryError(why, rank=job.rank, operation=operation, sequence=sequence)
        elif (breach := _breach(error)) is not None:
            instead = PluginError(f"the backend {job.backend_name!r} breaks its contract: {breach}")
        if not job.control.failed:
            cause = instead or error
            text = f"rank {job.rank} broke off {operation} #{sequence} with {type(cause).__name__}: {safe_str(cause)}"
            self.first_cause(_Finding("aborted", text, job.rank))
        elif isinstance(error, CommError):
            job.control.ended(error, operation, sequence)
        return instead

    def _mismatch(self, mismatch: HeaderMismatch) -> _Finding:
        """Return what an unexpected message tells about its sender."""
        rank, peer, sequence = self.job.rank, mismatch.peer, self.sequence
        call = self.words or self.signature.describe()
        same = "Every rank must make the same calls in the same order, with the same shape, dtype, op and root"
        if not mismatch.header:
            text = (
                f"the ranks did not make the same call: rank {rank} is in {call} #{sequence}, and rank {peer} is in {ANOTHER_CALL}. {same}; "
                f"at #{sequence}:"
            )
            return _Finding("mismatch", text, peer)
        header = parse_header(mismatch.header)
        if header is None:
            text = f"rank {peer} sent rank {rank} something that is no oneaccord message: {mismatch.header[:16]!r}"
            return _Finding("protocol", text, peer)
        if header.digest == self.signature.digest and header.sequence == sequence:
            text = (
                f"in {self.signature.operation} #{sequence} rank {peer} sends {header.nbytes} bytes that rank {rank} does not expect: "
                "do the counts of both fit together?"
            )
        elif self.words:
            text = f"rank {rank} is in {call}, and what rank {peer} sent it is of a {header.operation}:"
        else:
            text = (
                f"the ranks did not make the same call: rank {rank} is in {call} #{sequence}, and rank {peer} sent "
                f"it a message of {header.describe()} #{header.sequence}. {same}; at #{sequence}:"
            )
        return _Finding("mismatch", text, peer)


def broken_off(job: Job, members: Members, what: str, error: BaseException) -> None:
    """Report an error in a part of a call for which the other ranks wait already."""
    if not isinstance(error, CommError):
        text = f"rank {job.rank} broke off {what} with {type(error).__name__}: {safe_str(error)}"
        job.fail(Report("aborted", text, peer=job.rank, members=list(members.ranks)))
    elif error.operation is None:
        job.control.ended(error, what, None)


@contextmanager
def awaited(job: Job, members: Members, what: str) -> Iterator[None]:
    """Run a part of a call for which the other ranks wait already, and report any error in it."""
    try:
        yield
    except BaseException as error:
        broken_off(job, members, what, error)
        raise


def again(error: BaseException) -> None:
    """Raise an error: the action of a call that has failed before `guarded` is called."""
    raise error


def _breach(error: BaseException) -> str | None:
    """Return what a backend did wrong, if an error tells. Checking each message would cost time."""
    if isinstance(error, Breach):
        return str(error)
    if isinstance(error, AttributeError) and error.name in ("done", "moved"):
        if isinstance(error.obj, Transfer):
            return (
                f"its {type(error.obj).__name__} has no {error.name!r}, which a oneaccord.api.Transfer has from the beginning"
            )
        return f"it gave {error.obj!r} where a oneaccord.api.Transfer was expected"
    return None


def exchange_cards(
    job: Job,
    members: Members,
    name: str,
    card: bytes,
    ranks: Sequence[int],
    deadline: Deadline,
    call: tuple[CallSignature, int] | None = None,
    *,
    is_given: bool = False,
) -> tuple[list[bytes], int]:
    """Exchange cards with some ranks of the world, as `Control.exchange`; a rank that does not come ends the job.

    Raises
    ------
    CommError
        The first cause, alike on all ranks.
    """
    try:
        return job.control.exchange(name, card, deadline, ranks, members.channel, call, is_given=is_given)
    except BaseException as error:
        if not isinstance(error, OneAccordError):
            # The exchange may have succeeded on the others, which then count on this rank.
            text = f"rank {job.rank} broke off {name} with {type(error).__name__}: {safe_str(error)}"
            job.fail(Report("aborted", text, job.rank, name, members=list(ranks)))
        raise
