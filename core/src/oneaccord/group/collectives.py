"""The collectives of a group, and those that run in the background."""

from __future__ import annotations

from collections.abc import Sequence

import numpy.typing as npt

from oneaccord.arrays.dtypes import OpLike
from oneaccord.arrays.memory import NOTHING, Array
from oneaccord.calls.runner import Calls
from oneaccord.calls.work import Work

__all__ = ["CollectiveCalls"]


class CollectiveCalls(Calls):
    """The collectives of a group.

    Each has a form whose name ends in ``_async``: it takes the same arguments, checks them at once and raises the errors of the arguments, and
    returns a `Work` whose ``wait`` gives the result and raises the rest. Any number may be in flight. ``timeout_s`` counts from the
    call's turn. Until the work is done, do not write to the input, and do not touch ``out``; an array that is not C-contiguous is copied
    at once. In a simulated world, and with ``check_inputs`` in the config, an early write to an input in the host's memory
    is an `InputChangedError`. Arrays on GPUs go through a stream of the group's own, after the work that the caller's current stream has queued
    by then; the work's ``wait`` makes that stream wait, and its ``synchronize`` the host.
    """

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
            such a function of your own, ``fn(a, b)``, as `Op` describes, and an `Op` if it does not commute.
        out
            The array for the result: the same shape and dtype; may be ``array``.
        reproducible
            Whether the operands are combined in the order of ranks, grouped in one fixed way, so that the bits of a floating-point
            result depend on the operands alone: not on the size of the array, the algorithm, the backend or the hosts. By default
            as the config says (``reproducible``, false). Alike on all ranks.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        ndarray
            The shape and dtype of ``array``.

        Raises
        ------
        DTypeError
            The dtype does not have ``op``: mean of integers, sum of bools, min of complex numbers, bits of floats.
        UsageError
            A function given as ``op`` does not keep dtype or shape, writes into its arguments, or raised an exception, which is the
            cause. If this shows only in the middle of the call, the others get an `AbortedError`, and the group is finished.
        """
        return self._call(("all_reduce", op, reproducible), array, out, timeout_s)

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
            On the root, the array for the result; may be ``array``. Ignored elsewhere.

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
        if type(root) is not int:
            root = self._rank_of(root)
        return self._call(("reduce", op, reproducible, root), array, out, timeout_s)

    def broadcast(
        self, array: npt.ArrayLike, root: int = 0, *, out: Array | None = None, timeout_s: float | None = None
    ) -> Array:
        """Give the root's array to every rank.

        Parameters
        ----------
        array
            On the root, the array to send; elsewhere any array of the same shape and dtype, whose values do not matter.
        root
            The rank whose array it is.
        out
            The array for the result: the same shape and dtype; may be ``array``, and usually is.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        ndarray
            The shape and dtype of ``array``.

        Raises
        ------
        InvalidRankError
            ``root`` is not in the group.
        """
        if type(root) is not int:
            root = self._rank_of(root)
        return self._call(("broadcast", root), array, out, timeout_s)

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
            Shape ``(n, ...)``, the same on all ranks; a 0-d array counts as shape ``(1,)``.
        counts
            If n differs from rank to rank: the n of each rank, the same list on all ranks.
        uneven
            Whether n may differ without ``counts``. The ranks then exchange their n first, which costs a small call. Give the
            same on all ranks.
        out
            The array for the result.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        ndarray
            Shape ``(sum of n, ...)``, in the order of ranks.

        Raises
        ------
        SizeMismatchError
            ``counts`` does not have one entry per rank, or this rank's entry is not its n.
        UsageError
            Both ``counts`` and ``uneven`` are given.
        CollectiveMismatchError
            n differs, and neither ``counts`` nor ``uneven`` is given; or, with ``uneven``, ``out`` does not have the shape of
            the joined arrays. Every rank raises it.
        """
        return self._call(("all_gather", counts, uneven), array, out, timeout_s)

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
            On the root, the array for the result. Ignored elsewhere.

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
        if type(root) is not int:
            root = self._rank_of(root)
        return self._call(("gather", root, counts, uneven), array, out, timeout_s)

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

        The root's dtype and shape travel first, so the others need not know them.

        Parameters
        ----------
        array
            On the root, shape ``(n, ...)``; n is a multiple of the world size unless ``counts`` is given. Elsewhere ignored,
            and may be None.
        root
            The rank whose array it is.
        counts
            How many rows each rank gets, the same list on all ranks.
        out
            The array for this rank's part.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        ndarray
            Shape ``(n / world_size, ...)``, or ``(counts[rank], ...)``.

        Raises
        ------
        InvalidRankError
            ``root`` is not in the group.
        SizeMismatchError
            On the root: axis 0 cannot be divided in this way. Other ranks may be waiting already; they get an `AbortedError`
            when the root leaves.
        """
        return self._scatter(array, out, self._rank_of(root), counts, timeout_s)

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
            Shape ``(n, ...)``, the same on all ranks; n is a multiple of the world size unless ``counts`` is given.
        op, reproducible
            As for `all_reduce`.
        counts
            How many rows each rank gets, the same list on all ranks.
        out
            The array for this rank's part.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        ndarray
            Shape ``(n / world_size, ...)``, or ``(counts[rank], ...)``.

        Raises
        ------
        SizeMismatchError
            Axis 0 cannot be divided in this way.
        DTypeError
            As for `all_reduce`.
        """
        return self._call(("reduce_scatter", op, reproducible, counts), array, out, timeout_s)

    def all_to_all(
        self,
        array: npt.ArrayLike,
        *,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Array:
        """Give part r of each rank's array to rank r, which joins its parts along axis 0.

        Parameters
        ----------
        array
            Shape ``(n, ...)``; n is a multiple of the world size unless ``send_counts`` is given.
        send_counts
            How many rows go to each rank. The list may differ from rank to rank; give it on all ranks or on none.
        receive_counts
            The number of rows that come from each rank. Optional; if given, it is compared with the rows that the others send.
        out
            The array for the result; must not overlap ``array``.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        ndarray
            Shape ``(n, ...)``, or ``(sum of receive_counts, ...)``, in the order of ranks.

        Raises
        ------
        SizeMismatchError
            Axis 0 cannot be divided in this way, or ``receive_counts`` was given without ``send_counts``.
        """
        return self._call(("all_to_all", send_counts, receive_counts), array, out, timeout_s)

    def barrier(self, *, device: str | int | None = None, timeout_s: float | None = None) -> None:
        """Wait until every rank has come here.

        With ``device="cuda"``, streams wait, and the host does not. Work that is queued on the current streams of CuPy and torch after this call begins
        when the work queued before it is done, on all ranks. If the backend moves no GPU memory, the host waits for both.

        Parameters
        ----------
        device
            ``"cuda"``, or a GPU as for `empty`, for a barrier between GPUs; the same on all ranks. By default it is one between processes.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Raises
        ------
        UsageError, LayoutError, UnsupportedError
            For ``device``, as for `empty`.
        """
        if device is not None and device != "cpu":
            self._barrier_on_device(device, timeout_s)
            return
        self._call(("barrier",), NOTHING, NOTHING, timeout_s)

    def _barrier_on_device(self, device: str | int, timeout_s: float | None) -> None:
        raise NotImplementedError

    # Prefix reductions: operands are combined in the order of ranks, whatever the op

    def scan(
        self,
        array: npt.ArrayLike,
        op: OpLike = "sum",
        *,
        out: Array | None = None,
        reproducible: bool | None = None,
        timeout_s: float | None = None,
    ) -> Array:
        """Give each rank r the arrays of ranks 0 to r, its own included, combined element by element.

        Parameters
        ----------
        array
            Any shape and dtype, the same on all ranks.
        op
            As for `Group.all_reduce`, except ``"mean"``. It need not commute.
        out
            The array for the result: the same shape and dtype; may be ``array``.
        reproducible
            Whether the operands are combined from left to right, ``((a0 op a1) op a2) op ...``, so that the bits of a
            floating-point result depend on them alone. By default the config decides. Give the same on all ranks.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        ndarray
            The shape and dtype of ``array``.

        Raises
        ------
        DTypeError
            The dtype does not have ``op``.
        UsageError
            ``op`` is ``"mean"``, or as for `Group.all_reduce`.
        UnsupportedError
            The array is on a GPU.
        """
        return self._call(("scan", op, reproducible), array, out, timeout_s)

    def exscan(
        self,
        array: npt.ArrayLike,
        op: OpLike = "sum",
        *,
        out: Array | None = None,
        reproducible: bool | None = None,
        timeout_s: float | None = None,
    ) -> Array:
        """Give each rank r the arrays of the ranks before it, 0 to r - 1, combined element by element.

        Rank 0 gets the identity of ``op``: 0 for a sum, 1 for a product, infinity or the dtype's greatest number for a minimum,
        and so on.

        Parameters
        ----------
        array, out, reproducible, timeout_s
            As for `scan`.
        op
            As for `scan`; a function needs its ``identity=``: see `Op`.

        Returns
        -------
        ndarray
            The shape and dtype of ``array``.

        Raises
        ------
        DTypeError, UnsupportedError
            As for `scan`.
        UsageError
            As for `scan`; or the identity of ``op`` is unknown, or does not fit the dtype. Every rank raises it before any byte
            moves.
        """
        return self._call(("exscan", op, reproducible), array, out, timeout_s)

    # In the background

    def all_reduce_async(
        self,
        array: npt.ArrayLike,
        op: OpLike = "sum",
        *,
        out: Array | None = None,
        reproducible: bool | None = None,
        timeout_s: float | None = None,
    ) -> Work[Array]:
        """Begin an `all_reduce`; ``wait()`` of the work returns its result."""
        return self._call_async(("all_reduce", op, reproducible), array, out, timeout_s, reads=array, writes=(out,))

    def reduce_async(
        self,
        array: npt.ArrayLike,
        op: OpLike = "sum",
        root: int = 0,
        *,
        out: Array | None = None,
        reproducible: bool | None = None,
        timeout_s: float | None = None,
    ) -> Work[Array | None]:
        """Begin a `reduce`; the result of the work is None on all ranks but the root."""
        key = ("reduce", op, reproducible, self._rank_of(root))
        return self._call_async(key, array, out, timeout_s, reads=array, writes=(out,))

    def broadcast_async(
        self, array: npt.ArrayLike, root: int = 0, *, out: Array | None = None, timeout_s: float | None = None
    ) -> Work[Array]:
        """Begin a `broadcast`; ``wait()`` of the work returns its result."""
        root = self._rank_of(root)
        reads = array if self._members.rank == root else None
        return self._call_async(("broadcast", root), array, out, timeout_s, reads=reads, writes=(out,))

    def all_gather_async(
        self,
        array: npt.ArrayLike,
        *,
        counts: Sequence[int] | None = None,
        uneven: bool = False,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Work[Array]:
        """Begin an `all_gather`; ``wait()`` of the work returns its result."""
        return self._call_async(("all_gather", counts, uneven), array, out, timeout_s, reads=array, writes=(out,))

    def gather_async(
        self,
        array: npt.ArrayLike,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        uneven: bool = False,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Work[Array | None]:
        """Begin a `gather`; the result of the work is None on all ranks but the root."""
        key = ("gather", self._rank_of(root), counts, uneven)
        return self._call_async(key, array, out, timeout_s, reads=array, writes=(out,))

    def scatter_async(
        self,
        array: npt.ArrayLike | None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Work[Array]:
        """Begin a `scatter`; ``wait()`` of the work returns its result."""
        root = self._rank_of(root)
        reads = array if self._members.rank == root else None
        return self._call_async(("scatter", root, counts), array, out, timeout_s, reads=reads, writes=(out,))

    def reduce_scatter_async(
        self,
        array: npt.ArrayLike,
        op: OpLike = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: Array | None = None,
        reproducible: bool | None = None,
        timeout_s: float | None = None,
    ) -> Work[Array]:
        """Begin a `reduce_scatter`; ``wait()`` of the work returns its result."""
        key = ("reduce_scatter", op, reproducible, counts)
        return self._call_async(key, array, out, timeout_s, reads=array, writes=(out,))

    def all_to_all_async(
        self,
        array: npt.ArrayLike,
        *,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Work[Array]:
        """Begin an `all_to_all`; ``wait()`` of the work returns its result."""
        key = ("all_to_all", send_counts, receive_counts)
        return self._call_async(key, array, out, timeout_s, reads=array, writes=(out,))

    def barrier_async(self, *, timeout_s: float | None = None) -> Work[None]:
        """Begin a `barrier`; the work is done when every rank has come to it."""
        return self._call_async(("barrier",), NOTHING, NOTHING, timeout_s)

    def scan_async(
        self,
        array: npt.ArrayLike,
        op: OpLike = "sum",
        *,
        out: Array | None = None,
        reproducible: bool | None = None,
        timeout_s: float | None = None,
    ) -> Work[Array]:
        """Begin a `scan`; ``wait()`` of the work returns its result."""
        return self._call_async(("scan", op, reproducible), array, out, timeout_s, reads=array, writes=(out,))

    def exscan_async(
        self,
        array: npt.ArrayLike,
        op: OpLike = "sum",
        *,
        out: Array | None = None,
        reproducible: bool | None = None,
        timeout_s: float | None = None,
    ) -> Work[Array]:
        """Begin an `exscan`; ``wait()`` of the work returns its result."""
        return self._call_async(("exscan", op, reproducible), array, out, timeout_s, reads=array, writes=(out,))
