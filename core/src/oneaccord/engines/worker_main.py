"""What launchers run in workers: a rank of a job, at its seat, and what prepares and ends it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from oneaccord.common.checks import safe_str
from oneaccord.common.tracebacks import shorten
from oneaccord.engines.packing import pack, unpack
from oneaccord.errors import AbortedError, CommError, OneAccordError
from oneaccord.group.init import init
from oneaccord.launchers.seat import Seat
from oneaccord.net.forking import close_after_fork

if TYPE_CHECKING:
    from oneaccord.group.group import Group

__all__ = ["Outcome", "Task", "meet", "perform", "revoke", "work"]

_LONGEST_STORY = 1 << 16

_lock = threading.Lock()
_listeners: dict[str, socket.socket] = {}
"""By the name of a job, the socket at which its ranks will meet in this process."""
_ranks: dict[tuple[str, int], _Rank] = {}
"""The ranks in this process, by their jobs and numbers."""


@dataclass(slots=True)
class _Rank:
    """How far a rank has come."""

    group: Group | None = None
    is_revoked: bool = False
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """A rank of a job, as plain data.

    Attributes
    ----------
    job, secret, address
        The name of the job, its secret, and where its ranks meet.
    rank, world_size, local_rank
        The rank.
    call
        The packed function, its arguments and its keyword arguments.
    backend, config
        What `oneaccord.init` takes.
    """

    job: str
    secret: str
    address: str
    rank: int
    world_size: int
    local_rank: int
    call: bytes
    backend: str | None = None
    config: str | Mapping[str, Any] | None = None

    def revoke(self) -> None:
        """End the calls of this rank, in its own process: a launcher's plugin does so if the launching program has gone."""
        revoke(self.job, self.rank)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call of a user's function ended, as plain data.

    Attributes
    ----------
    value
        The packed result, or the packed exception if ``error`` is not empty; None if that cannot be pickled.
    error
        The type of the exception; empty if there is none.
    message, story
        The words of the exception, and its traceback.
    is_secondary
        Whether the rank only learned that another one had failed.
    at
        When it was raised, by ``time.monotonic``, which ranks of one host share.
    has_returned
        Whether the function had returned, and only the rank's leave of the group failed.
    """

    value: bytes | None
    error: str = ""
    message: str = ""
    story: str = ""
    is_secondary: bool = False
    at: float = 0.0
    has_returned: bool = False


def meet(job: str, host: str) -> str:
    """Listen for the ranks of a job on a free port of this host; return the address, and keep the socket for `work`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = close_after_fork(socket.create_server((host, 0), family=family, backlog=1024))
    with _lock:
        _listeners[job] = listener
    port = listener.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def work(task: Task) -> Outcome:
    """Be a rank: join the job, call the user's function with the group, leave, and say how it went."""
    rank, at = _Rank(), 0.0
    with _lock:
        _ranks[task.job, task.rank] = rank
        listener = _listeners.pop(task.job, None) if task.rank == 0 else None
    try:
        seat = Seat(task.rank, task.world_size, task.address, task.secret, task.local_rank, listener, task.job)
        function, args, kwargs = unpack(task.call)
        with init(task.backend, config=task.config, seat=seat) as group:
            try:
                _let_revoke(rank, group)
                value = function(group, *args, **kwargs)
            except BaseException:
                at = time.monotonic()
                raise
            rank.is_leaving = True
        return Outcome(pack(value, f"the result of rank {task.rank}"))
    except BaseException as error:  # noqa: BLE001 - the driver raises it
        return replace(_failed(error, task.rank, at or time.monotonic()), has_returned=rank.is_leaving)
    finally:
        with _lock:
            del _ranks[task.job, task.rank]


def perform(call: bytes) -> Outcome:
    """Call a user's function that needs no group."""
    try:
        function, args, kwargs = unpack(call)
        return Outcome(pack(function(*args, **kwargs), f"the result of {getattr(function, '__qualname__', function)}"))
    except BaseException as error:  # noqa: BLE001 - the driver raises it
        return _failed(error, None, time.monotonic())


def revoke(job: str, number: int) -> bool:
    """End the calls of a job's ranks, from a rank in this process, as soon as it has joined; return False if its function has returned."""
    with _lock:
        rank = _ranks.get((job, number))
        listener = _listeners.pop(job, None)
        group = None
        if rank is not None:
            rank.is_revoked, group = True, rank.group
    if listener is not None:
        listener.close()
    if group is not None:
        with contextlib.suppress(OneAccordError):  # it has left meanwhile
            group.revoke()
    return rank is None or not rank.is_leaving


def _let_revoke(rank: _Rank, group: Group) -> None:
    with _lock:
        rank.group = group
        is_late = rank.is_revoked
    if is_late:
        group.revoke()


def _failed(error: BaseException, rank: int | None, at: float) -> Outcome:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ in {"builtins", "__main__"} else f"{kind.__module__}.{kind.__qualname__}"
    own = rank if not isinstance(error, CommError) or error.rank is None else error.rank
    is_secondary = isinstance(error, AbortedError) or (isinstance(error, CommError) and error.peer not in {None, own})
    story = traceback.TracebackException(kind, error, _of_user(error))
    shorten(story, error)
    packed = None
    with contextlib.suppress(Exception):  # its words must do
        packed = pack(error, "the exception")
        unpack(packed)
    return Outcome(packed, name, safe_str(error), "".join(story.format())[-_LONGEST_STORY:], is_secondary, at)


def _of_user(error: BaseException) -> Any:
    """Return the traceback from the user's function on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
