"""The group: the ranks that communicate together, and all that a user does with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from manyhands.arguments import Arguments
from manyhands.arrays import Array, check_out, contiguous, handed_over, placed, to_array
from manyhands.checks import is_success
from manyhands.collectives import Call, Collectives
from manyhands.deadline import Deadline
from manyhands.dtypes import Op, check_dtype, dtype_code, dtype_from_code, resolve_op
from manyhands.errors import LayoutError, ManyHandsError, SizeMismatchError, UsageError
from manyhands.job import Job
from manyhands.peers import Peers
from manyhands.plugins import PluginManager
from manyhands.rendezvous.messages import Report
from manyhands.schedule.steps import Collective
from manyhands.select import Selector
from manyhands.wire import MAX_DIMENSIONS

__all__ = ["Group"]

_NONE = np.empty(0, np.uint8)
_INT64 = np.dtype(np.int64)
_MAY_ALIAS = frozenset({Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST})
"""Where input and output may be the very same memory; schedules are proved for that as well."""


class Group:
    """The ranks that communicate together. Made by `manyhands.init`; a context manager that closes itself.

    Every rank must call the same collectives in the same order, with arrays of the same shape and dtype, the same ``op`` and the
    same ``root``; where one does not, every rank gets a `CollectiveMismatchError` that says who did what.

    Arrays are NumPy arrays of any numeric dtype, bool, or bfloat16 and float8 of ml_dtypes; anything that NumPy can read as one
    (the buffer protocol, ``__array__``, CPU DLPack); or Python numbers. An array that is not C-contiguous is copied first, so that
    elements never change places. Results are new C-contiguous arrays, or ``out``, which may be the input itself.

    All methods but `close` raise, besides what they list:

    ClosedError
        The group is closed.
    CommError
        The group's first failure, alike on every rank: `PeerLostError`, `DeadlineError`, `CollectiveMismatchError`, `AbortedError` or
        `ProtocolError`. ``out`` is then undefined, and each later call raises the same; all ranks may make a new group.
    DTypeError, LayoutError, SizeMismatchError, UsageError
        The arguments cannot be used; found before any byte moves, so that the group stays as it was.

    ``timeout_s`` is the most seconds that a call may last, by default the config's ``timeout_s``.

    Attributes
    ----------
    rank
        This rank, from 0 to ``world_size - 1``.
    world_size
        How many ranks the group has.
    backend_name
        The backend that moves the bytes.
    """

    def __init__(self, job: Job, plugins: PluginManager, selector: Selector, timeout_s: float) -> None:
        self.rank: int = job.rank
        self.world_size: int = job.world_size
        self.backend_name: str = job.backend_name
        self._job = job
        self._timeout_s = timeout_s
        self._arguments = Arguments(job.rank, job.world_size)
        self._collectives = Collectives(job, 0, plugins, selector)
        self._peers = Peers(job, 1)

    def __repr__(self) -> str:
        state = ", closed" if self._job.closed else ", failed" if self._job.control.failed else ""
        return f"<manyhands.Group rank {self.rank} of {self.world_size} over {self.backend_name}{state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or is_success(error):
            self.close()
        else:
            self._job.abort(error)

    def close(self, *, timeout_s: float | None = None) -> None:
        """Leave the group, and wait until the other ranks do as well, for at most ``timeout_s``. Twice is fine.

        Raises
        ------
        CommError
            The group failed, and no call on this rank has said so yet. It is closed all the same.
        """
        self._job.close(self._deadline(timeout_s))

    # Collectives

    def all_reduce(
        self, array: npt.ArrayLike, op: Op = "sum", *, out: Array | None = None, timeout_s: float | None = None
    ) -> Array:
        """Combine the arrays of all ranks element by element; every rank gets the result, bit for bit the same.

        Parameters
        ----------
        array
            Any shape and dtype, alike on all ranks.
        op
            ``"sum"``, ``"mean"``, ``"product"``, ``"min"``, ``"max"``, ``"and"``, ``"or"``, ``"xor"``, or an associative and commutative
            binary NumPy ufunc that keeps the dtype.
        out
            Where the result goes: the same shape and dtype; may be ``array``.
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
        """
        source = to_array(array)
        call = Call(Collective.ALL_REDUCE, source.dtype, source.shape, reduction=resolve_op(op, source.dtype))
        return self._run(call, source, source.shape, out, timeout_s)

    def reduce(
        self, array: npt.ArrayLike, op: Op = "sum", root: int = 0, *, out: Array | None = None, timeout_s: float | None = None
    ) -> Array | None:
        """Combine the arrays of all ranks element by element; the root gets the result.

        Parameters
        ----------
        array, op, timeout_s
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
        source = to_array(array)
        root = self._arguments.rank(root, "root")
        call = Call(Collective.REDUCE, source.dtype, source.shape, reduction=resolve_op(op, source.dtype), root=root)
        if self.rank != root:
            self._run_nowhere(call, source, timeout_s)
            return None
        return self._run(call, source, source.shape, out, timeout_s)

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
        source = to_array(array)
        call = Call(Collective.BROADCAST, source.dtype, source.shape, root=self._arguments.rank(root, "root"))
        return self._run(call, source if self.rank == call.root else np.empty(0, source.dtype), source.shape, out, timeout_s)

    def all_gather(
        self,
        array: npt.ArrayLike,
        *,
        counts: Sequence[int] | None = None,
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
        """
        source, call, shape = self._gathering(Collective.ALL_GATHER, array, counts, -1)
        return self._run(call, source, shape, out, timeout_s)

    def gather(
        self,
        array: npt.ArrayLike,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Array | None:
        """Join the arrays of all ranks along axis 0; the root gets the result.

        Parameters
        ----------
        array, counts, timeout_s
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
        SizeMismatchError
            As for `all_gather`.
        """
        root = self._arguments.rank(root, "root")
        source, call, shape = self._gathering(Collective.GATHER, array, counts, root)
        if self.rank != root:
            self._run_nowhere(call, source, timeout_s)
            return None
        return self._run(call, source, shape, out, timeout_s)

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
        root = self._arguments.rank(root, "root")
        deadline = self._deadline(timeout_s)
        source = _NONE
        description = np.zeros(2 + MAX_DIMENSIONS, _INT64)
        if self.rank == root:
            if array is None:
                raise LayoutError("scatter needs an array on the root, and None was given")
            source = self._arguments.message(array)
            self._arguments.blocks(source, counts, "scatter")
            description[:2] = dtype_code(source.dtype), source.ndim
            description[2 : 2 + source.ndim] = source.shape
        uneven = None if counts is None else self._arguments.counts(counts)
        about = Call(
            Collective.BROADCAST, _INT64, description.shape, root=root, uneven=uneven, operation="scatter", part="shape"
        )
        self._collectives.run(about, description if self.rank == root else np.empty(0, _INT64), description, deadline)
        dtype = dtype_from_code(int(description[0]))
        shape = tuple(int(n) for n in description[2 : 2 + int(description[1])])
        if dtype is None:
            raise self._give_up("the root scatters an array whose dtype needs ml_dtypes: pip install ml_dtypes")
        per_rank = self._arguments.divide(shape[0], counts)
        part_shape = (per_rank[self.rank], *shape[1:])
        if out is not None:
            try:
                check_out(out, part_shape, dtype)
            except UsageError as error:
                raise self._give_up(f"rank {self.rank} cannot take its part of scatter: {error}") from error
        row = math.prod(shape[1:])
        sizes = tuple(n * row for n in per_rank)
        call = Call(Collective.SCATTER, dtype, shape, counts=sizes, root=root, uneven=tuple(per_rank))
        return self._run(call, source if self.rank == root else np.empty(0, dtype), part_shape, out, deadline)

    def reduce_scatter(
        self,
        array: npt.ArrayLike,
        op: Op = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Array:
        """Combine the arrays of all ranks element by element, and give each rank its part along axis 0.

        Parameters
        ----------
        array
            Shape ``(n, ...)``, alike on all ranks, where n is a multiple of the world size unless ``counts`` is given.
        op
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
        source = to_array(array)
        per_rank, sizes = self._arguments.blocks(source, counts, "reduce_scatter")
        call = Call(
            Collective.REDUCE_SCATTER,
            source.dtype,
            source.shape,
            counts=sizes,
            reduction=resolve_op(op, source.dtype),
            uneven=None if counts is None else per_rank,
        )
        return self._run(call, source, (per_rank[self.rank], *source.shape[1:]), out, timeout_s)

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
        source = to_array(array)
        if receive_counts is not None and send_counts is None:
            raise SizeMismatchError("all_to_all was given receive_counts without send_counts: give send_counts on all ranks")
        per_rank, sizes = self._arguments.blocks(source, send_counts, "all_to_all")
        deadline = self._deadline(timeout_s)
        if send_counts is None:
            call = Call(Collective.ALL_TO_ALL, source.dtype, source.shape, counts=sizes, receive_counts=sizes)
            return self._run(call, source, source.shape, out, deadline)
        if receive_counts is not None:
            self._arguments.counts(receive_counts)
        ones = (1,) * self.world_size
        about = Call(Collective.ALL_TO_ALL, _INT64, (), counts=ones, receive_counts=ones, operation="all_to_all", part="counts")
        incoming = np.empty(self.world_size, _INT64)
        self._collectives.run(about, np.array(per_rank, _INT64), incoming, deadline)
        received = tuple(incoming.tolist())
        if receive_counts is not None and received != tuple(receive_counts):
            raise self._give_up(
                f"in all_to_all rank {self.rank} expects receive_counts={list(receive_counts)}, and the others send it {list(received)}"
            )
        row = math.prod(source.shape[1:])
        shape = (sum(received), *source.shape[1:])
        if out is not None:
            try:
                check_out(out, shape, source.dtype)
            except UsageError as error:
                raise self._give_up(f"rank {self.rank} cannot take what all_to_all brings: {error}") from error
        # Axis 0 differs from rank to rank, so that only the rest of the shape can be compared.
        call = Call(
            Collective.ALL_TO_ALL,
            source.dtype,
            source.shape[1:],
            counts=sizes,
            receive_counts=tuple(n * row for n in received),
            uneven=(),
        )
        return self._run(call, source, shape, out, deadline)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Wait until every rank has come here."""
        call = Call(Collective.BARRIER, _NONE.dtype, ())
        self._collectives.run(call, _NONE, _NONE, self._deadline(timeout_s))

    # Point to point

    def send(self, array: npt.ArrayLike, dest: int, *, timeout_s: float | None = None) -> None:
        """Send an array to one rank, which must `recv` it.

        A small array may be on its way when the call returns: that it does not fit, or is never received, a later call or `close` says.

        Parameters
        ----------
        array
            Any shape of at most 32 dimensions, any dtype.
        dest
            The rank to send to.
        timeout_s
            Seconds that the call may last.

        Raises
        ------
        InvalidRankError
            ``dest`` is not in the group.
        SelfSendError
            ``dest`` is this rank.
        """
        source = self._arguments.message(array)
        self._peers.exchange(source, self._arguments.peer(dest, "dest"), None, None, self._deadline(timeout_s))

    def recv(self, source: int, *, out: Array | None = None, timeout_s: float | None = None) -> Array:
        """Receive the next array that ``source`` sends to this rank.

        Parameters
        ----------
        source
            The rank to receive from.
        out
            Where the array goes; the sender's must have the same shape and dtype.
        timeout_s
            Seconds that the call may last.

        Returns
        -------
        ndarray
            ``out``, or a new array of the sender's shape and dtype.

        Raises
        ------
        InvalidRankError
            ``source`` is not in the group.
        SelfSendError
            ``source`` is this rank.
        """
        peer = self._arguments.peer(source, "source")
        return self._receive(None, None, peer, out, timeout_s)

    def sendrecv(
        self, array: npt.ArrayLike, dest: int, source: int, *, out: Array | None = None, timeout_s: float | None = None
    ) -> Array:
        """Send an array to one rank and receive one from another, or the same, at once; so that exchanges cannot deadlock.

        Parameters
        ----------
        array, dest
            As for `send`.
        source, out
            As for `recv`. ``out`` must not overlap ``array``.
        timeout_s
            Seconds that the call may last.

        Returns
        -------
        ndarray
            ``out``, or a new array of the sender's shape and dtype.

        Raises
        ------
        InvalidRankError, SelfSendError
            As for `send` and `recv`.
        """
        outgoing = self._arguments.message(array)
        if out is not None and np.may_share_memory(outgoing, out):
            outgoing = outgoing.copy()
        return self._receive(
            outgoing, self._arguments.peer(dest, "dest"), self._arguments.peer(source, "source"), out, timeout_s
        )

    # What they have in common

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._timeout_s if timeout_s is None else timeout_s)

    def _run(
        self, call: Call, source: Array, shape: tuple[int, ...], out: Array | None, timeout: float | Deadline | None
    ) -> Array:
        """Run a call whose result this rank gets."""
        deadline = timeout if isinstance(timeout, Deadline) else self._deadline(timeout)
        source, target = placed(source, shape, call.dtype, out, may_alias=call.collective in _MAY_ALIAS)
        self._collectives.run(call, source, target, deadline)
        return handed_over(target, out)

    def _run_nowhere(self, call: Call, source: Array, timeout_s: float | None) -> None:
        """Run a call whose result this rank does not get."""
        self._collectives.run(call, contiguous(source), np.empty(0, call.dtype), self._deadline(timeout_s))

    def _gathering(
        self, collective: Collective, array: npt.ArrayLike, counts: Sequence[int] | None, root: int
    ) -> tuple[Array, Call, tuple[int, ...]]:
        """Return what all_gather and gather have in common: the input, the call, and the shape of the result."""
        source = to_array(array)
        if source.ndim == 0:
            source = source.reshape(1)
        per_rank, rest = self._arguments.own_rows(source, counts), source.shape[1:]
        row = math.prod(rest)
        call = Call(
            collective,
            source.dtype,
            source.shape if counts is None else rest,
            counts=tuple(n * row for n in per_rank),
            root=root,
            uneven=None if counts is None else per_rank,
        )
        return source, call, (sum(per_rank), *rest)

    def _receive(
        self, outgoing: Array | None, dest: int | None, source: int, out: Array | None, timeout_s: float | None
    ) -> Array:
        if out is not None:
            check_out(out, getattr(out, "shape", ()), getattr(out, "dtype", _INT64))
            check_dtype(out.dtype)
        target = out if out is None or out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        return handed_over(self._peers.exchange(outgoing, dest, source, target, self._deadline(timeout_s)), out)

    def _give_up(self, text: str) -> ManyHandsError:
        """End the job for a mismatch that this rank alone can see; return the error to raise."""
        return self._job.fail(Report("mismatch", text, peer=self.rank))
