"""Calls that run in the background: the methods of a group that return a `Work`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy.typing as npt

from manyhands.arrays.dtypes import OpLike
from manyhands.arrays.memory import Array
from manyhands.calls.devices.actions import DeviceAction
from manyhands.calls.requests import Action, Traded
from manyhands.calls.runner import Calls
from manyhands.calls.work import Work
from manyhands.contract.deadline import Deadline

__all__ = ["AsyncCalls"]


class AsyncCalls(Calls):
    """The asynchronous calls of a group.

    Each takes the arguments of the call without ``_async``, checks them at once and raises what that raises for them, and returns
    a `Work` whose ``wait`` gives the result and raises the rest. Any number may be in flight. ``timeout_s`` counts from when the
    call's turn comes. The input must not be written to, and ``out`` not be touched, until the work is done; an array that is
    not C-contiguous is copied at once. In a simulated world, and with ``check_inputs`` in the config, an input in the host's memory that was written
    to all the same is an `InputChangedError`. Arrays on GPUs go through a stream of the group's own, behind what the caller's current stream has queued
    by then; the work's ``wait`` makes that stream wait, and its ``synchronize`` the host.
    """

    def all_reduce_async(
        self,
        array: npt.ArrayLike,
        op: OpLike = "sum",
        *,
        out: Array | None = None,
        reproducible: bool | None = None,
        timeout_s: float | None = None,
    ) -> Work[Array]:
        """Begin an `all_reduce`; its result is that of the work."""
        action = self._operations.all_reduce(array, op, out, reproducible)
        return self._later("all_reduce", action, timeout_s, reads=array, writes=(out,))

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
        action = self._operations.reduce(array, op, root, out, reproducible)
        return self._later("reduce", self._on_root(root, action), timeout_s, reads=array, writes=(out,))

    def broadcast_async(
        self, array: npt.ArrayLike, root: int = 0, *, out: Array | None = None, timeout_s: float | None = None
    ) -> Work[Array]:
        """Begin a `broadcast`; its result is that of the work."""
        action = self._operations.broadcast(array, root, out)
        reads = array if self._members.rank == root else None
        return self._later("broadcast", action, timeout_s, reads=reads, writes=(out,))

    def all_gather_async(
        self,
        array: npt.ArrayLike,
        *,
        counts: Sequence[int] | None = None,
        uneven: bool = False,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Work[Array]:
        """Begin an `all_gather`; its result is that of the work."""
        action = self._operations.all_gather(array, counts, out, uneven=uneven)
        return self._later("all_gather", action, timeout_s, reads=array, writes=(out,))

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
        action = self._operations.gather(array, root, counts, out, uneven=uneven)
        return self._later("gather", self._on_root(root, action), timeout_s, reads=array, writes=(out,))

    def scatter_async(
        self,
        array: npt.ArrayLike | None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Work[Array]:
        """Begin a `scatter`; its result is that of the work."""
        action = self._operations.scatter(array, root, counts, out)
        reads = array if self._members.rank == root else None
        return self._later("scatter", action, timeout_s, reads=reads, writes=(out,))

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
        """Begin a `reduce_scatter`; its result is that of the work."""
        action = self._operations.reduce_scatter(array, op, counts, out, reproducible)
        return self._later("reduce_scatter", action, timeout_s, reads=array, writes=(out,))

    def all_to_all_async(
        self,
        array: npt.ArrayLike,
        *,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Work[Array]:
        """Begin an `all_to_all`; its result is that of the work."""
        action = self._operations.all_to_all(array, send_counts, receive_counts, out)
        return self._later("all_to_all", action, timeout_s, reads=array, writes=(out,))

    def barrier_async(self, *, timeout_s: float | None = None) -> Work[None]:
        """Begin a `barrier`; the work is done when every rank has come to it."""
        return self._later("barrier", _without_result(self._operations.barrier()), timeout_s)

    def _on_root(self, root: int, action: Action) -> Callable[[Deadline], Array | None]:
        return action if self._members.rank == root else _without_result(action)


def _without_result(action: Action) -> Callable[[Deadline], None]:
    if isinstance(action, DeviceAction | Traded):
        return action  # it has no result where this rank gets none, and must be known for what it is

    def run(deadline: Deadline) -> None:
        action(deadline)

    return run
