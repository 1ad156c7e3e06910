"""The group: the ranks that communicate together, and all that a user does with them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy.typing as npt

from manyhands.arrays.dtypes import OpLike
from manyhands.arrays.memory import NOTHING, Array
from manyhands.calls.devices.opening import open_channel
from manyhands.calls.requests import Operations
from manyhands.common.aliases import ForeignNames
from manyhands.common.checks import is_success
from manyhands.config.select import Selector
from manyhands.contract.deadline import Deadline
from manyhands.contract.device import DeviceChannel
from manyhands.errors import CommError, UsageError
from manyhands.group.async_methods import AsyncCalls
from manyhands.group.batch import CoalescingCalls
from manyhands.group.forming import Setup
from manyhands.group.local_methods import LocalCalls
from manyhands.group.message_methods import MessageCalls
from manyhands.group.object_methods import ObjectCalls
from manyhands.group.scan_methods import ScanCalls
from manyhands.group.shrinking import check_possible, shrink
from manyhands.group.split import DividingCalls
from manyhands.job.group_ranks import Members, ranks_per_host
from manyhands.job.job import Job

__all__ = ["Group"]


class Group(
    AsyncCalls, ScanCalls, MessageCalls, ObjectCalls, CoalescingCalls, LocalCalls, DividingCalls["Group"], ForeignNames
):
    """The ranks that communicate together. Made by `manyhands.init`; a context manager that closes itself.

    Every rank must call the same collectives in the same order, with arrays of the same shape and dtype, the same ``op`` and the
    same ``root``; where one does not, every rank gets a `CollectiveMismatchError` that says who did what.

    Arrays are NumPy arrays of any numeric dtype, bool, or bfloat16 and float8 of ml_dtypes, or structured of fields of these; anything that NumPy can read as one
    (the buffer protocol, ``__array__``); Python numbers; or arrays of CuPy, torch, JAX and others that speak DLPack or the CUDA array interface,
    in host memory or, where the backend moves that, on GPUs. An array that is not C-contiguous is copied first, so that elements never change
    places. Results are new C-contiguous arrays of the same library, or ``out``, which may be the input itself. On GPUs, calls are enqueued on the
    caller's current stream, and return at once.

    All methods but `close` raise, besides what they list:

    ClosedError
        The group is closed.
    CommError
        The group's first failure, alike on every rank: `PeerLostError`, `DeadlineError`, `CollectiveMismatchError`, `AbortedError` or
        `ProtocolError`. ``out`` is then undefined, and each later call raises the same; `shrink` makes a new group.
    DTypeError, LayoutError, SizeMismatchError, UsageError
        The arguments cannot be used; found before any byte moves, so that the group stays as it was.
    OutOfMemoryError
        There is no memory for the result. The group stays as it was, unless that happened in the middle of the call.

    ``timeout_s`` is the most seconds that a call may last, by default the config's ``timeout_s``.

    Attributes
    ----------
    rank
        This rank, from 0 to ``world_size - 1``.
    world_size
        How many ranks the group has.
    ranks
        The ranks of the world that are the members, in the order of their ranks in this group.
    backend_name
        The backend that moves the bytes.
    """

    def __init__(
        self,
        job: Job,
        members: Members,
        setup: Setup,
        selector: Selector,
        channel: DeviceChannel | None,
    ) -> None:
        settings = setup.resolved.settings
        operations = Operations(job, members, setup.plugins, selector, channel, settings)
        super().__init__(job, members, operations, settings.timeout_s)
        self.rank: int = members.rank
        self.world_size: int = members.size
        self.ranks: tuple[int, ...] = members.ranks
        self.backend_name: str = job.backend_name
        self._setup = setup
        self._selector = selector
        self._reproducible = settings.reproducible
        self._closing = threading.Lock()
        job.drains.append(self._drain)

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ", failed" if self._job.control.failed else ""
        number = f" {self._members.number}" if self._members.number else ""
        return f"<manyhands.Group{number} rank {self.rank} of {self.world_size} over {self.backend_name}{state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or is_success(error):
            self.close()
        elif self._members.number == 0 or not self._job.control.failed:
            self._job.abort(error)
        # Else the ranks know already, and what becomes of the job is up to the group of all ranks, which can still shrink.

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for the calls that are still in flight, for at most ``timeout_s``, and leave the group. Twice is fine.

        Calls that have not had their turn by then end with `ClosedError`. The group of all ranks also waits, within that time, until
        the other ranks leave; the groups made from it are closed with it.
        A group made by `split` or `subgroup` waits for nobody: what it holds is given back when all its members have closed it.

        Parameters
        ----------
        timeout_s
            Seconds that it may last; by default the config's ``timeout_s``.

        Raises
        ------
        CommError
            The job failed, and no call on this rank has said so yet. The group is closed all the same.
        """
        deadline = self._begin(timeout_s)
        if self._members.number == 0:
            self._job.close(deadline)
            return
        with self._closing:
            if self._is_closed:
                return
            while not self._drain(deadline, for_good=False) and not deadline.passed():
                pass
            # From here on no call begins; those that have begun are waited for in the background.
            self._job.left.add(self._members.number)
            self._job.drains.remove(self._drain)
            self._when_idle(lambda: self._job.control.leave_group(self._members.number, self.ranks, self._operations.close))

    def shrink(self, *, timeout_s: float | None = None) -> Group:
        """Make a new group of the ranks that are left, after this one has failed. Every rank that is left must call it.

        Ranks that died, ended, or closed the group are not waited for. The others are numbered anew from 0, in the order that they had.
        With nobody lost, after a missed deadline say, the new group has the same ranks. This group, and those made from it, are closed,
        also where an error is raised. To be called on the group of all ranks.

        Parameters
        ----------
        timeout_s
            Seconds that it may last; by default the config's ``rendezvous.timeout_s``.

        Returns
        -------
        Group
            To be closed, best by ``with``. Its errors name ranks as it counts them.

        Raises
        ------
        UsageError
            The group has not failed, or was made by `split` or `subgroup`. It stays as it was.
        PeerLostError
            Rank 0 is lost or has closed the group: the ranks met in its process, and cannot do so any more.
        DeadlineError
            A rank that still runs did not call this in time; the message names it, on all ranks that did.
        UnsupportedError
            The ranks are threads, as in a simulated world. The group stays as it was.
        """
        job, settings = self._job, self._setup.resolved.settings
        deadline = self._begin(settings.rendezvous_timeout_s if timeout_s is None else timeout_s)
        if self._members.number:
            raise UsageError(
                f"shrink() was called on group {self._members.number}, made by split() or subgroup(): call it on the group of all ranks, "
                "and divide the new one again"
            )
        with self._closing:
            if job.closed:
                raise job.closed_error(", and cannot shrink")
            if not job.control.failed:
                raise UsageError(
                    "shrink() is for a group that has failed, and this one has not: go on with it, or use subgroup()"
                )
            check_possible(job)
            job.retire()
        job.instead = "shrink() has failed, and cannot be tried again: start the job anew"
        formed = shrink(job, self._setup, deadline)
        job.instead = "go on with the one that shrink() returned"
        return Group(*formed)

    @property
    def _is_closed(self) -> bool:
        return self._job.closed or self._members.number in self._job.left

    # Groups of some of the ranks: `split` and `subgroup`

    def _child(self, number: int, ranks: tuple[int, ...], deadline: Deadline) -> Group:
        hosts = [self._job.hosts[rank] for rank in ranks]
        members = Members(number, ranks, ranks.index(self._job.rank), ranks_per_host(hosts))
        try:
            channel = open_channel(self._job, members, deadline)
        except CommError:
            self._saw()
            raise
        return Group(self._job, members, self._setup, self._selector, channel)

    # Collectives

    def all_reduce(
        self,
        array: npt.ArrayLike,
        op: OpLike = "sum",
        *,
        out: Array | None = None,
        reproducible: bool | None = None,
        timeout_s: float | None = None,
    ) -> Array:
        """Combine the arrays of all ranks element by element; every rank gets the result, bit for bit the same.

        Parameters
        ----------
        array
            Any shape and dtype, alike on all ranks.
        op
            ``"sum"``, ``"mean"``, ``"product"``, ``"min"``, ``"max"``, ``"and"``, ``"or"``, ``"xor"``; ``"minloc"`` or ``"maxloc"`` for
            values with their locations (see `with_index`); an associative and commutative binary NumPy ufunc that keeps the dtype; or
            such a function of one's own, ``fn(a, b)``, as `Op` describes, and an `Op` where it does not commute.
        out
            Where the result goes: the same shape and dtype; may be ``array``.
        reproducible
            Whether the operands are combined in the order of ranks, grouped in one fixed way, so that the bits of a floating-point
            result depend on the operands alone: not on the size of the array, the algorithm, the backend or the hosts. By default
            as the config says (``reproducible``, false). Alike on all ranks.
        timeout_s
            Seconds that the call may last.

        Returns
        -------
        ndarray
            The shape and dtype of ``array``.

        Raises
        ------
        DTypeError
            The dtype does not have ``op``: mean of integers, sum of bools, min of complex numbers, bits of floats.
        UsageError
            A function that is given as ``op`` does not keep dtype or shape, writes into its arguments, or raised something, which is the
            cause. Where it shows only in the midst of the call, the others get an `AbortedError`, and the group is finished.
        """
        result = self._quickly(("all_reduce", op, reproducible), array, out, timeout_s)
        if result is not None:
            return result
        return self._now("all_reduce", self._operations.all_reduce(array, op, out, reproducible), timeout_s)

    def reduce(
        self,
        array: npt.ArrayLike,
        op: OpLike = "sum",
        root: int = 0,
        *,
        out: Array | None = None,
        reproducible: bool | None = None,
        timeout_s: float | None = None,
    ) -> Array | None:
        """Combine the arrays of all ranks element by element; the root gets the result.

        Parameters
        ----------
        array, op, reproducible, timeout_s
            As for `all_reduce`.
        root
            The rank that gets the result.
        out
            On the root, where the result goes; may be ``array``. Ignored elsewhere.

        Returns
        -------
        ndarray or None
            On the root, the shape and dtype of ``array``; None elsewhere.

        Raises
        ------
        InvalidRankError
            ``root`` is not in the group.
        DTypeError
            As for `all_reduce`.
        """
        result = self._quickly(("reduce", op, reproducible, root, type(root)), array, out, timeout_s)
        if result is None:
            result = self._now("reduce", self._operations.reduce(array, op, root, out, reproducible), timeout_s)
        return result if self.rank == root else None

    def broadcast(
        self, array: npt.ArrayLike, root: int = 0, *, out: Array | None = None, timeout_s: float | None = None
    ) -> Array:
        """Give the root's array to every rank.

        Parameters
        ----------
        array
            On the root, what to send; elsewhere any array of the same shape and dtype, whose values do not matter.
        root
            The rank whose array it is.
        out
            Where the result goes: the same shape and dtype; may be ``array``, and mostly is.
        timeout_s
            Seconds that the call may last.

        Returns
        -------
        ndarray
            The shape and dtype of ``array``.

        Raises
        ------
        InvalidRankError
            ``root`` is not in the group.
        """
        result = self._quickly(("broadcast", root, type(root)), array, out, timeout_s)
        if result is not None:
            return result
        return self._now("broadcast", self._operations.broadcast(array, root, out), timeout_s)

    def all_gather(
        self,
        array: npt.ArrayLike,
        *,
        counts: Sequence[int] | None = None,
        uneven: bool = False,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Array:
        """Join the arrays of all ranks along axis 0; every rank gets the result.

        Parameters
        ----------
        array
            Shape ``(n, ...)``, alike on all ranks; a 0-d array counts as shape ``(1,)``.
        counts
            Where n differs from rank to rank: the n of each rank, the same list on all ranks.
        uneven
            Whether n may differ though no rank knows all of them: they then travel first, which costs a small call. Alike on all ranks.
        out
            Where the result goes.
        timeout_s
            Seconds that the call may last.

        Returns
        -------
        ndarray
            Shape ``(sum of n, ...)``, in the order of ranks.

        Raises
        ------
        SizeMismatchError
            ``counts`` does not have one entry per rank, or this rank's is not its n.
        UsageError
            Both ``counts`` and ``uneven`` are given.
        CollectiveMismatchError
            n differs, and neither is given; or, with ``uneven``, ``out`` does not have the shape that the others' n make. On all ranks.
        """
        result = None if uneven or counts is not None else self._quickly(("all_gather",), array, out, timeout_s)
        if result is not None:
            return result
        return self._now("all_gather", self._operations.all_gather(array, counts, out, uneven=uneven), timeout_s)

    def gather(
        self,
        array: npt.ArrayLike,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        uneven: bool = False,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Array | None:
        """Join the arrays of all ranks along axis 0; the root gets the result.

        Parameters
        ----------
        array, counts, uneven, timeout_s
            As for `all_gather`.
        root
            The rank that gets the result.
        out
            On the root, where the result goes. Ignored elsewhere.

        Returns
        -------
        ndarray or None
            On the root, shape ``(sum of n, ...)``; None elsewhere.

        Raises
        ------
        InvalidRankError
            ``root`` is not in the group.
        SizeMismatchError, UsageError, CollectiveMismatchError
            As for `all_gather`.
        """
        result = self._now("gather", self._operations.gather(array, root, counts, out, uneven=uneven), timeout_s)
        return result if self.rank == root else None

    def scatter(
        self,
        array: npt.ArrayLike | None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Array:
        """Divide the root's array along axis 0; every rank gets its part.

        The root's dtype and shape travel first, so that the others need not know them.

        Parameters
        ----------
        array
            On the root, shape ``(n, ...)``, where n is a multiple of the world size unless ``counts`` is given. Elsewhere ignored,
            and may be None.
        root
            The rank whose array it is.
        counts
            How many rows each rank gets, the same list on all ranks.
        out
            Where this rank's part goes.
        timeout_s
            Seconds that the call may last.

        Returns
        -------
        ndarray
            Shape ``(n / world_size, ...)``, or ``(counts[rank], ...)``.

        Raises
        ------
        InvalidRankError
            ``root`` is not in the group.
        SizeMismatchError
            On the root: axis 0 cannot be divided so. Other ranks, which may wait already, then get an `AbortedError` when the root
            leaves.
        """
        return self._now("scatter", self._operations.scatter(array, root, counts, out), timeout_s)

    def reduce_scatter(
        self,
        array: npt.ArrayLike,
        op: OpLike = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: Array | None = None,
        reproducible: bool | None = None,
        timeout_s: float | None = None,
    ) -> Array:
        """Combine the arrays of all ranks element by element, and give each rank its part along axis 0.

        Parameters
        ----------
        array
            Shape ``(n, ...)``, alike on all ranks, where n is a multiple of the world size unless ``counts`` is given.
        op, reproducible
            As for `all_reduce`.
        counts
            How many rows each rank gets, the same list on all ranks.
        out
            Where this rank's part goes.
        timeout_s
            Seconds that the call may last.

        Returns
        -------
        ndarray
            Shape ``(n / world_size, ...)``, or ``(counts[rank], ...)``.

        Raises
        ------
        SizeMismatchError
            Axis 0 cannot be divided so.
        DTypeError
            As for `all_reduce`.
        """
        result = None if counts is not None else self._quickly(("reduce_scatter", op, reproducible), array, out, timeout_s)
        if result is not None:
            return result
        action = self._operations.reduce_scatter(array, op, counts, out, reproducible)
        return self._now("reduce_scatter", action, timeout_s)

    def all_to_all(
        self,
        array: npt.ArrayLike,
        *,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Array:
        """Give the r-th part of each rank's array to rank r; what this rank gets is joined along axis 0.

        Parameters
        ----------
        array
            Shape ``(n, ...)``, where n is a multiple of the world size unless ``send_counts`` is given.
        send_counts
            How many rows go to each rank; may differ from rank to rank, and is given by all ranks or by none.
        receive_counts
            How many rows come from each rank. Need not be given; it is checked against what the others send where it is.
        out
            Where the result goes; must not overlap ``array``.
        timeout_s
            Seconds that the call may last.

        Returns
        -------
        ndarray
            Shape ``(n, ...)``, or ``(sum of receive_counts, ...)``, in the order of ranks.

        Raises
        ------
        SizeMismatchError
            Axis 0 cannot be divided so, or ``receive_counts`` was given without ``send_counts``.
        """
        if send_counts is None and receive_counts is None:
            result = self._quickly(("all_to_all",), array, out, timeout_s)
            if result is not None:
                return result
        action = self._operations.all_to_all(array, send_counts, receive_counts, out)
        return self._now("all_to_all", action, timeout_s)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Wait until every rank has come here.

        Parameters
        ----------
        timeout_s
            Seconds that the call may last.
        """
        if self._quickly(("barrier",), NOTHING, NOTHING, timeout_s) is None:
            self._now("barrier", self._operations.barrier(), timeout_s)
