"""Arrays that the ranks of each host have in common, and groups of the ranks of each host."""

from __future__ import annotations

import hashlib
import math
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, NoReturn, Protocol, Self, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

from oneaccord.arrays.dtypes import named_dtype
from oneaccord.arrays.memory import ALIGNMENT, Array
from oneaccord.calls.arguments import extents
from oneaccord.calls.failures import awaited
from oneaccord.common.checks import safe_str
from oneaccord.common.ranks import show_ranks
from oneaccord.common.units import bytes_text
from oneaccord.contract.deadline import Deadline
from oneaccord.control.protocol import Report
from oneaccord.errors import (
    ClosedError,
    CommError,
    DTypeError,
    OneAccordError,
    OutOfMemoryError,
    SizeMismatchError,
    UnsupportedError,
    UsageError,
)
from oneaccord.group.forming import Setup
from oneaccord.group.hosts import Hosts, Trade, find_hosts
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job
from oneaccord.runtime.host_memory import TOKEN_BYTES, CannotOpenError, SharedFile, memory_fence

__all__ = ["SharedArray", "SharedCalls", "begin_to_share", "checked_array", "hosts_of"]

_MOST_WORDS = 500


class Whole(Protocol):
    """A group, as far as this module needs to know it."""

    rank: int
    ranks: tuple[int, ...]
    _job: Job
    _members: Members
    _setup: Setup
    _counting: threading.Lock
    _hosts: Hosts | None
    _shares: int

    def barrier(self, *, timeout_s: float | None = None) -> None: ...
    def close(self, *, timeout_s: float | None = None) -> None: ...
    def _split(self, color: int | None, key: int | None, made: str, timeout_s: float | None) -> Any: ...
    def _begin(self, timeout_s: float | None) -> Deadline: ...
    def _check_open(self, what: object = None) -> None: ...
    def _saw(self) -> None: ...
    def _meet(self, name: str, card: bytes, members: tuple[int, ...], deadline: Deadline) -> tuple[list[bytes], int]: ...
    def _child(self, number: int, ranks: tuple[int, ...], made: str, deadline: Deadline) -> Any: ...


G = TypeVar("G", bound=Whole)


class SharedArray(Generic[G]):
    """An array that the ranks of a host have in common: what one of them writes, all of them read. Made by `Group.shared`.

    It is a context manager, whose end is `close`. The calls of a group take it as they take its ``array``.

    >>> with oa.init() as group, group.shared((1000, 1000), "float32") as table:
    ...     if table.is_first:
    ...         table.array[...] = np.load("table.npy")
    ...     table.fence()
    ...     use(table.read_only)

    Attributes
    ----------
    group
        The group of the ranks that have the array in common.
    is_first
        Whether this rank is the first of them, which in most programs fills the array.
    shape, dtype, nbytes
        As those of the array.
    """

    def __init__(self, memory: memoryview | None, shape: tuple[int, ...], dtype: np.dtype[Any], group: G) -> None:
        self.group: G = group
        self.is_first: bool = group.rank == 0
        self.shape: tuple[int, ...] = shape
        self.dtype: np.dtype[Any] = dtype
        self.nbytes: int = math.prod(shape) * dtype.itemsize
        self._array: Array | None = _array_of(memory, shape, dtype)
        self._read_only: Array | None = _array_of(None if memory is None else memory.toreadonly(), shape, dtype)
        self._read_only.flags.writeable = False

    def __repr__(self) -> str:
        state = ", closed" if self._array is None else ""
        ranks = show_ranks(self.group.ranks)
        return f"<oneaccord.SharedArray {self.dtype} of shape {self.shape}, of {ranks}{state}>"

    @property
    def array(self) -> Array:
        """The array: C-contiguous, aligned to 64 bytes, zero at the beginning. It stays valid after `close`, for those who hold it.

        Raises
        ------
        ClosedError
            The shared array is closed.
        """
        return self._open(self._array)

    @property
    def read_only(self) -> Array:
        """The array, to be read only: NumPy refuses to write to it, or to make it writable. Otherwise as ``array``."""
        return self._open(self._read_only)

    def _open(self, array: Array | None) -> Array:
        if array is None:
            raise ClosedError(
                "this shared array is closed: take what is needed from it before, since arrays that were taken stay valid; or close it later",
                rank=self.group._job.rank,
            )
        return array

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy is None and (dtype is None or np.dtype(dtype) == self.dtype):
            return self.array
        return np.array(self.array, dtype=dtype, copy=copy)

    def fence(self, *, timeout_s: float | None = None) -> None:
        """Wait until every rank of the host has come here. What any of them has written before, all of them read after.

        It is a `Group.barrier` of ``group`` and a fence for the processor's memory. Without one between them, a rank that reads what another one
        writes may see the old value, the new one, or a mixture.

        Parameters
        ----------
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Raises
        ------
        ClosedError
            The shared array or its group is closed.
        CommError
            The first cause of the job's failure, such as the death of a rank. The array stays as it is, and may be read.
        """
        self._open(self._array)
        memory_fence()
        self.group.barrier(timeout_s=timeout_s)
        memory_fence()

    def close(self, *, timeout_s: float | None = None) -> None:
        """Let go of the array, and close ``group``; wait for no rank. Calling it twice is fine.

        The memory is given back when no rank's arrays refer to it any more: arrays that were taken from it stay valid, and so do their views.

        Parameters
        ----------
        timeout_s
            Seconds that ``group`` may wait for its calls in flight.

        Raises
        ------
        CommError
            The job failed, and no call on this rank has raised the error yet. The array is closed all the same.
        """
        self._array = self._read_only = None
        self.group.close(timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:  # there is nothing to wait for, and the group of all ranks ends that of the array
            self._array = self._read_only = None

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a shared array cannot be pickled or copied as such, because its memory belongs to the ranks of one host: give its array, of which a "
            "copy travels, or call group.shared() on all ranks"
        )


class SharedCalls:
    """What a group does with the memory of hosts."""

    _hosts: Hosts | None = None
    _shares: int = 0

    def shared(  # noqa: PYI019 - `Self` would not be a whole group
        self: G,
        shape: SupportsIndex | Sequence[SupportsIndex],
        dtype: npt.DTypeLike = np.float64,
        *,
        timeout_s: float | None = None,
    ) -> SharedArray[G]:
        """Make one array on each host, which all its ranks have in common: a table that they all read, or an array of which each fills a part.

        Every rank must call it, with the same shape and dtype. It works on every backend. Ranks share memory if they can open each other's, which
        they try; the names of their hosts do not matter. ``ranks_per_host`` in the config divides them further. The array has all its
        memory from the beginning, so that a later write cannot fail: the r-th of n ranks makes the r-th of n equal parts
        of its pages, which lie close to that rank's processor.

        The array is plain memory. As ``out=`` of a call it gets what each of its ranks gets, at once, so that no two ranks of a host
        may give the same part of it. Two threads of a rank must not call this on one group at once.

        Parameters
        ----------
        shape, dtype
            As for `numpy.zeros`; any dtype without Python objects.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        SharedArray
            Zeros. Its ``array`` is a NumPy array. Nothing is left of it when its processes have ended in any way.

        Raises
        ------
        CollectiveMismatchError
            The ranks gave different shapes or dtypes.
        DTypeError
            The dtype holds Python objects, or its elements have no bytes.
        OutOfMemoryError
            A host has too little memory, or too little of it in ``/dev/shm`` if its ranks must use that; alike on all ranks. The group stays as it was.
        SizeMismatchError
            An extent is negative, or no integer.
        UnsupportedError
            A rank cannot share memory, for another reason; alike on all ranks. The group stays as it was.
        """
        shape, dtype = checked_array(shape, dtype)
        deadline = self._begin(timeout_s)
        trade = begin_to_share(self, "shared", deadline)
        try:
            making: _Making[G] = _Making(self, trade, hosts_of(self, trade), shape, dtype, deadline)
            return making.make()
        except CommError:
            self._saw()
            raise

    def split_hosts(self: G, *, timeout_s: float | None = None) -> G:  # noqa: PYI019 - as above
        """Divide the group into one for each host: ranks come together that share memory, in the order of this group. Every rank must call it.

        Hosts are found as for `shared`.

        Parameters
        ----------
        timeout_s
            Seconds that each of its steps may last.

        Returns
        -------
        Group
            As for `split`.
        """
        trade = begin_to_share(self, "split_hosts", self._begin(timeout_s))
        try:
            hosts = hosts_of(self, trade)
        except CommError:
            self._saw()
            raise
        group: G = self._split(hosts.firsts[self.rank], None, "made by split_hosts()", timeout_s)
        return group


def begin_to_share(group: Whole, what: str, deadline: Deadline) -> Trade:
    """Begin a call; return what trades cards in it."""
    group._check_open(what)
    with group._counting:  # counted last, as for split()
        group._shares = count = group._shares + 1

    def exchange(name: str, card: bytes) -> tuple[list[bytes], int]:
        return group._meet(name, card, group._members.ranks, deadline)

    return Trade(exchange, f"{what} #{count} of {group._members.name}")


def hosts_of(group: Whole, trade: Trade) -> Hosts:
    """Return the hosts of a group, which are looked for once."""
    if group._hosts is None:
        is_assigned = group._setup.resolved.settings.ranks_per_host is not None
        group._hosts = find_hosts(group._job, group._members, trade, is_assigned=is_assigned)
    return group._hosts


@dataclass(frozen=True, slots=True)
class _Problem:
    """The reason why a rank has no memory; empty if it has."""

    text: str = ""
    is_memory: bool = False


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a rank asks for; and if it is the first one of its host, where the others find the memory."""

    words: str
    digest: str
    pid: int = 0
    fd: int = -1
    name: str = ""
    token: bytes = b""
    problem: _Problem = _Problem()


_of_threads: dict[tuple[bytes, str, int], memoryview] = {}
"""Memory on its way to ranks that are threads of this process, by the key of their job, the call, and the first of the ranks."""


class _Making(Generic[G]):
    """One call of `Group.shared`."""

    def __init__(
        self, group: G, trade: Trade, hosts: Hosts, shape: tuple[int, ...], dtype: np.dtype[Any], deadline: Deadline
    ) -> None:
        self._group = group
        self._job = group._job
        self._members = group._members
        self._trade = trade
        self._shape = shape
        self._dtype = dtype
        self._nbytes = math.prod(shape) * dtype.itemsize
        self._deadline = deadline
        self._parts = hosts.parts()
        self._first = hosts.firsts[group.rank]
        self._ranks = self._parts[self._first]
        self._is_named = self._first in hosts.named
        self._file: SharedFile | None = None

    def make(self) -> SharedArray[G]:
        """Make the memory together with the other ranks."""
        job, ranks = self._job, self._members.ranks
        key = job.key_for("shared arrays"), self._trade.name, self._first
        try:
            cards = self._trade("asks", self._offer(key))
            with awaited(job, self._members, "shared"):
                offers = job.read_cards(cards, _Offer, self._trade.name, ranks)
                self._compare(offers)
            self._refuse([offer.problem for offer in offers])
            with awaited(job, self._members, "shared"):
                memory, problem = self._take(offers[self._first], key)
            answers = job.read_cards(self._trade("made", problem), _Problem, self._trade.name, ranks)
            self._refuse(answers)
        finally:
            if self._group.rank == self._first:
                _of_threads.pop(key, None)
            if self._file is not None:
                self._file.close()
        place = sorted(self._parts).index(self._first)
        members = tuple(ranks[rank] for rank in self._ranks)
        group: G = self._group._child(self._trade.number + place, members, "made by shared()", self._deadline)
        return SharedArray(memory, self._shape, self._dtype, group)

    def _offer(self, key: tuple[bytes, str, int]) -> _Offer:
        """Return this rank's card; the first rank of a host makes the memory before."""
        words = f"shared({self._shape}, {self._dtype})"
        digest = hashlib.blake2b(words.encode(), digest_size=16).hexdigest()
        words = words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]}... ({digest})"
        if self._group.rank != self._first or not self._nbytes:
            return _Offer(words, digest)
        token, name = os.urandom(TOKEN_BYTES), ""
        try:
            if self._nbytes > sys.maxsize:
                raise MemoryError(f"{bytes_text(self._nbytes)} are more than a process can have")
            if self._job.meeting is None:
                _of_threads[key] = _plain(self._nbytes)
                return _Offer(words, digest)
            self._file = SharedFile.create(self._nbytes, token, in_folder=self._is_named)
            if self._is_named:
                name = self._file.publish()
        except (MemoryError, OSError) as error:
            return _Offer(words, digest, problem=_problem(error))
        return _Offer(words, digest, os.getpid(), self._file.fd, name, token)

    def _compare(self, offers: Sequence[_Offer]) -> None:
        """Refuse ranks that ask for different arrays, alike on all of them."""
        ranks = self._members.ranks
        asked: dict[str, list[int]] = {}
        for rank, offer in enumerate(offers):
            asked.setdefault(offer.digest, []).append(rank)
        if len(asked) == 1:
            return
        stories = "; ".join(f"{show_ranks([ranks[rank] for rank in same])} {offers[same[0]].words}" for same in asked.values())
        text = f"the ranks did not make the same call: every rank must give the same shape and dtype in {self._trade.name}, and there are {stories}"
        peer = ranks[list(asked.values())[1][0]]
        raise self._job.fail(Report("mismatch", text, peer, "shared", self._members.channel, None, list(ranks)))

    def _take(self, offer: _Offer, key: tuple[bytes, str, int]) -> tuple[memoryview | None, _Problem]:
        """Open the memory that the first rank of this host has made, give this rank's part of it its pages, and map it."""
        if not self._nbytes:
            return None, _Problem()
        if self._job.meeting is None:
            return _of_threads[key], _Problem()
        try:
            if self._file is None:
                self._file = (
                    SharedFile.open_named(offer.name, offer.token, self._nbytes)
                    if offer.name
                    else SharedFile.open(offer.pid, offer.fd, offer.token, self._nbytes)
                )
            memory = self._file.map()
            if not self._file.reserve(self._ranks.index(self._group.rank), len(self._ranks), self._may_go_on):
                text = f"{self._trade.name} had no time left on rank {self._job.rank} for {bytes_text(self._nbytes)} of memory"
                raise self._job.fail(
                    Report("deadline", text, None, "shared", self._members.channel, None, list(self._members.ranks))
                )
        except (MemoryError, OSError, CannotOpenError) as error:
            if isinstance(error, OneAccordError):
                raise
            return None, _problem(error)
        return memory, _Problem()

    def _may_go_on(self) -> bool:
        return not self._deadline.passed() and not self._job.control.failed

    def _refuse(self, problems: Sequence[_Problem]) -> None:
        """Raise the first problem of any rank, alike on all of them."""
        found = next(((rank, problem) for rank, problem in enumerate(problems) if problem.text), None)
        if found is None:
            return
        rank, problem = self._members.ranks[found[0]], found[1]
        kind = OutOfMemoryError if problem.is_memory else UnsupportedError
        raise kind(
            f"shared({self._shape}, {self._dtype}) cannot be made on the host of rank {rank}: {problem.text}",
            rank=self._job.rank,
            peer=rank,
            operation="shared",
        )


def _problem(error: Exception) -> _Problem:
    text = safe_str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:  # without its number
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return _Problem(text[:_MOST_WORDS], isinstance(error, MemoryError))


def checked_array(shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return a shape and a dtype in the one form that all ranks compare."""
    found = named_dtype(dtype)
    given = extents(shape)
    if found.subdtype is not None:  # as NumPy's functions take it
        found, more = found.subdtype
        given += more
    if found.hasobject:
        raise DTypeError(f"an array of dtype {found} cannot be shared: it holds Python objects, which belong to one process")
    if not found.itemsize:
        raise DTypeError(
            f"an array of dtype {dtype!r} cannot be shared: its elements have no bytes; give their length, such as U10"
        )
    try:
        np.broadcast_to(np.zeros((), found), given)
    except ValueError as error:
        raise SizeMismatchError(f"no array of NumPy has the shape {given}: {error}") from None
    return given, found


def _plain(nbytes: int) -> memoryview:
    """Return aligned memory of this process, which has no pages yet."""
    memory = np.zeros(nbytes + ALIGNMENT - 1, np.uint8)
    start = -int(memory.ctypes.data) % ALIGNMENT
    return memory[start : start + nbytes].data


def _array_of(memory: memoryview | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    if memory is None:
        return np.zeros(shape, dtype)
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)
