"""Opening what moves the device memory of a group."""

from __future__ import annotations

from oneaccord.calls.failures import exchange_cards
from oneaccord.common.checks import safe_str
from oneaccord.config.plugins import checked_kind
from oneaccord.contract.backend import Damaged
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.device import DeviceChannel, DeviceFailure, DeviceMeeting
from oneaccord.control.protocol import Report
from oneaccord.errors import CommError
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job

__all__ = ["open_channel"]


def open_channel(job: Job, members: Members, deadline: Deadline) -> DeviceChannel | None:
    """Open what moves the device memory of a group that is being made; None if the backend moves none. All members do so together.

    Raises
    ------
    CommError
        It did not come up, on some rank; alike on all ranks. Other errors are the backend's own, and an AbortedError on the other ranks.
    """
    backend = job.backend
    if backend is None or "cuda" not in backend.memory:
        return None

    def exchange(name: str, card: bytes) -> list[bytes]:
        return exchange_cards(job, members, f"{name} for the GPUs of {members.name}", card, members.ranks, deadline)[0]

    ranks = list(members.ranks)
    try:
        meeting = DeviceMeeting(members.ranks, members.rank, exchange, deadline)
        channel = checked_kind(
            backend.open_device(members.channel, meeting), DeviceChannel, f"open_device() of the backend {job.backend_name!r}"
        )
    except DeviceFailure as failure:
        kind, peer = ("lost", None) if failure.is_remote else ("aborted", job.rank)
        text = f"rank {job.rank} cannot open the GPUs of {members.name}: {failure.reason}"
        raise job.fail(Report(kind, text, peer, members=ranks)) from failure
    except Damaged as damaged:
        peer = members.ranks[damaged.peer]
        text = f"rank {peer} sent a message that oneaccord cannot read, for the GPUs of {members.name}: {damaged.reason}"
        raise job.fail(Report("protocol", text, peer, members=ranks)) from None
    except TimeoutError as error:
        text = f"the GPUs of {members.name} were not ready within {deadline.timeout_s:g} s on rank {job.rank} ({error})"
        raise job.fail(Report("deadline", text, None, "init", members.channel, -1, ranks)) from None
    except CommError:
        raise
    except BaseException as error:
        text = f"rank {job.rank} broke off opening the GPUs of {members.name} with {type(error).__name__}: {safe_str(error)}"
        job.fail(Report("aborted", text, job.rank, members=ranks))  # or the others would wait for it
        raise
    job.device_channels.append(channel)
    return channel
