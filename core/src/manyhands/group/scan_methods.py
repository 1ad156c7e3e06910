"""Prefix reductions: the methods of a group that combine the arrays of the ranks up to each one."""

from __future__ import annotations

import numpy.typing as npt

from manyhands.arrays.dtypes import OpLike
from manyhands.arrays.memory import Array
from manyhands.calls.runner import Calls
from manyhands.calls.work import Work
from manyhands.schedule.steps import Collective

__all__ = ["ScanCalls"]


class ScanCalls(Calls):
    """The prefix reductions of a group. Operands are combined in the order of ranks, whatever the ``op``."""

    def scan(
        self,
        array: npt.ArrayLike,
        op: OpLike = "sum",
        *,
        out: Array | None = None,
        reproducible: bool | None = None,
        timeout_s: float | None = None,
    ) -> Array:
        """Combine the arrays of ranks 0 to r, its own included, element by element, for each rank r.

        Parameters
        ----------
        array
            Any shape and dtype, alike on all ranks.
        op
            As for `Group.all_reduce`, but for ``"mean"``. It need not commute.
        out
            Where the result goes: the same shape and dtype; may be ``array``.
        reproducible
            Whether the operands are combined from left to right, ``((a0 op a1) op a2) op ...``, so that the bits of a floating-point
            result depend on them alone. By default as the config says. Alike on all ranks.
        timeout_s
            Seconds that the call may last.

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
        result = self._quickly(("scan", op, reproducible), array, out, timeout_s)
        if result is not None:
            return result
        return self._now("scan", self._operations.scan(Collective.SCAN, array, op, out, reproducible), timeout_s)

    def exscan(
        self,
        array: npt.ArrayLike,
        op: OpLike = "sum",
        *,
        out: Array | None = None,
        reproducible: bool | None = None,
        timeout_s: float | None = None,
    ) -> Array:
        """Combine the arrays of the ranks before each one, ranks 0 to r - 1 for rank r, element by element.

        Rank 0 gets what ``op`` leaves every element unchanged with: 0 for a sum, 1 for a product, infinity or the dtype's greatest number
        for a minimum, and so on.

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
            As for `scan`; or the identity of ``op`` is not known, or no element of the dtype: on all ranks, before any byte moves.
        """
        result = self._quickly(("exscan", op, reproducible), array, out, timeout_s)
        if result is not None:
            return result
        return self._now("exscan", self._operations.scan(Collective.EXSCAN, array, op, out, reproducible), timeout_s)

    def scan_async(
        self,
        array: npt.ArrayLike,
        op: OpLike = "sum",
        *,
        out: Array | None = None,
        reproducible: bool | None = None,
        timeout_s: float | None = None,
    ) -> Work[Array]:
        """Begin a `scan`; its result is that of the work."""
        action = self._operations.scan(Collective.SCAN, array, op, out, reproducible)
        return self._later("scan", action, timeout_s, reads=array, writes=(out,))

    def exscan_async(
        self,
        array: npt.ArrayLike,
        op: OpLike = "sum",
        *,
        out: Array | None = None,
        reproducible: bool | None = None,
        timeout_s: float | None = None,
    ) -> Work[Array]:
        """Begin an `exscan`; its result is that of the work."""
        action = self._operations.scan(Collective.EXSCAN, array, op, out, reproducible)
        return self._later("exscan", action, timeout_s, reads=array, writes=(out,))
