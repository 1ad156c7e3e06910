"""From a failure to the error that says why: the first cause that all ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from manyhands.calls.engine.waiting import Breach, Overdue
from manyhands.common.checks import safe_str
from manyhands.contract.backend import Damaged, HeaderMismatch, LinkLost, Transfer
from manyhands.contract.deadline import Deadline
from manyhands.contract.header import CallSignature, parse_header
from manyhands.control.protocol import ANOTHER_CALL, Report
from manyhands.errors import ClosedError, CommError, ManyHandsError, OutOfMemoryError, PluginError
from manyhands.job.group_ranks import Members
from manyhands.job.job import Job

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

    ``words`` say what the call is where the signature does not. Calls that have them are no collective: ``sequence`` is then
    this rank's own count.
    """
    operation = str(words) if words else signature.operation

    def first_cause(kind: str, text: str, peer: int | None) -> ManyHandsError:
        if job.closed:
            text = f"the group was closed during {operation} #{sequence}"
            return ClosedError(text, rank=job.rank, operation=operation, sequence=sequence)
        place = None if words else sequence
        error = job.fail(Report(kind, text, peer, operation, members.channel + bool(words), place, list(members.ranks)))
        return job.control.ended(error, operation, sequence)

    try:
        action()
    except Overdue as overdue:
        text = f"{operation} #{sequence} did not finish within {deadline.timeout_s:g} s"
        raise first_cause("deadline", text, overdue.peers[0]) from None
    except TimeoutError as error:
        text = f"{operation} #{sequence} did not finish within {deadline.timeout_s:g} s on rank {job.rank} ({error})"
        raise first_cause("deadline", text, None) from None
    except LinkLost as lost:
        text = f"in {operation} #{sequence} the connection of rank {job.rank} to rank {lost.peer} broke ({lost.reason})"
        raise first_cause("lost", text, lost.peer) from None
    except Damaged as damaged:
        text = f"during {operation} #{sequence} on rank {job.rank}: {damaged.reason}"
        raise first_cause("protocol", text, damaged.peer) from None
    except HeaderMismatch as mismatch:
        kind, text = _explain(job, str(words), signature, sequence, mismatch)
        raise first_cause(kind, text, mismatch.peer) from None
    except BaseException as error:
        problem = _breach(error)
        cause = error if problem is None else PluginError(f"the backend {job.backend_name!r} breaks its contract: {problem}")
        if isinstance(error, MemoryError):
            why = safe_str(error) or "there is no memory left"
            cause = OutOfMemoryError(why, rank=job.rank, operation=operation, sequence=sequence)
        if not job.control.failed:
            # A signal, a lack of memory, an error inside a user's ufunc, a bug: messages are half sent, so that nobody can go on.
            text = f"rank {job.rank} broke off {operation} #{sequence} with {type(cause).__name__}: {safe_str(cause)}"
            first_cause("aborted", text, job.rank)
        elif isinstance(error, CommError):
            job.control.ended(error, operation, sequence)
        if cause is error:
            raise
        raise cause from error


def broken_off(job: Job, members: Members, what: str, error: BaseException) -> None:
    """Tell the other ranks of an error in a part of a call for which they wait already."""
    if not isinstance(error, CommError):
        text = f"rank {job.rank} broke off {what} with {type(error).__name__}: {safe_str(error)}"
        job.fail(Report("aborted", text, peer=job.rank, members=list(members.ranks)))
    elif error.operation is None:
        job.control.ended(error, what, None)


@contextmanager
def awaited(job: Job, members: Members, what: str) -> Iterator[None]:
    """Run a part of a call for which the other ranks wait already: whatever goes wrong in it, they must learn of it."""
    try:
        yield
    except BaseException as error:
        broken_off(job, members, what, error)
        raise


def again(error: BaseException) -> None:
    """Raise an error; what `guarded` does where the error has come already."""
    raise error


def _breach(error: BaseException) -> str | None:
    """Say what a backend did wrong, where an error tells: messages are not looked at one by one, which would cost time."""
    if isinstance(error, Breach):
        return str(error)
    if isinstance(error, AttributeError) and error.name in ("done", "moved"):
        if isinstance(error.obj, Transfer):
            return (
                f"its {type(error.obj).__name__} has no {error.name!r}, which a manyhands.api.Transfer has from the beginning"
            )
        return f"it gave {error.obj!r} where a manyhands.api.Transfer was expected"
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
    """Trade cards with some ranks of the world, as `Control.exchange`; a rank that does not come ends the job.

    Raises
    ------
    CommError
        The first cause, alike on all ranks.
    """
    try:
        return job.control.exchange(name, card, deadline, ranks, members.channel, call, is_given=is_given)
    except BaseException as error:
        if not isinstance(error, ManyHandsError):
            # The others may go on with this rank, which does not know of it.
            text = f"rank {job.rank} broke off {name} with {type(error).__name__}: {safe_str(error)}"
            job.fail(Report("aborted", text, job.rank, name, members=list(ranks)))
        raise


def _explain(job: Job, words: str, signature: CallSignature, sequence: int, mismatch: HeaderMismatch) -> tuple[str, str]:
    """Say what a message that was not expected tells about its sender."""
    call = words or signature.describe()
    same = "Every rank must make the same calls in the same order, with the same shape, dtype, op and root"
    if not mismatch.header:
        return "mismatch", (
            f"the ranks did not make the same call: rank {job.rank} is in {call} #{sequence}, and rank {mismatch.peer} is in {ANOTHER_CALL}. {same}; "
            f"at #{sequence}:"
        )
    header = parse_header(mismatch.header)
    if header is None:
        return (
            "protocol",
            f"rank {mismatch.peer} sent rank {job.rank} something that is no manyhands message: {mismatch.header[:16]!r}",
        )
    if header.digest == signature.digest and header.sequence == sequence:
        return "mismatch", (
            f"in {signature.operation} #{sequence} rank {mismatch.peer} sends {header.nbytes} bytes that rank {job.rank} does not expect: "
            "do the counts of both fit together?"
        )
    if words:
        return "mismatch", f"rank {job.rank} is in {call}, and what rank {mismatch.peer} sent it is of a {header.operation}:"
    return "mismatch", (
        f"the ranks did not make the same call: rank {job.rank} is in {call} #{sequence}, and rank {mismatch.peer} sent "
        f"it a message of {header.describe()} #{header.sequence}. {same}; at #{sequence}:"
    )
