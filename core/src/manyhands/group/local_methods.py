"""The calls of a group in which no other rank takes part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from manyhands.arrays.dtypes import check_dtype
from manyhands.arrays.memory import Array, aligned_empty
from manyhands.calls.arguments import extents
from manyhands.calls.runner import Calls
from manyhands.common.checks import said
from manyhands.contract.backend import Backend
from manyhands.errors import DeadlineError, OutOfMemoryError, PluginError, UsageError
from manyhands.job.threads import duration

__all__ = ["LocalCalls"]

_GRACE_S = 5.0


class LocalCalls(Calls):
    """What a group does for one rank alone."""

    def empty(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: npt.DTypeLike = np.float64) -> Array:
        """Return an array in memory that the other ranks of this host can read in place, where the backend has such.

        Messages from it need no copy on the way, so that collectives on large arrays of this kind are faster; both the input and
        ``out=`` gain. Every call on other arrays works as well, and on backends without such memory this is a plain array that is aligned
        to 64 bytes. No other rank takes part.

        Parameters
        ----------
        shape, dtype
            As for `numpy.empty`.

        Returns
        -------
        ndarray
            C-contiguous, of undefined content. Its memory is given back when no array refers to it any more.

        Raises
        ------
        SizeMismatchError
            An extent is negative, or no integer.
        OutOfMemoryError
            There is no memory, or the backend's share of such memory is used up.
        """
        self._check_open()
        dtype = np.dtype(dtype)
        check_dtype(dtype)
        shape = extents(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        backend = self._job.backend
        try:
            shared = backend.allocate(nbytes) if backend is not None and nbytes > 0 else None
        except MemoryError as error:
            raise OutOfMemoryError(said(error), rank=self._job.rank) from error
        given: object = shared
        if given is not None and not (isinstance(given, memoryview) and given.nbytes == nbytes and not given.readonly):
            raise PluginError(
                f"allocate({nbytes}) of the backend {self._job.backend_name!r} returned {shared!r}, and neither a writable memoryview of "
                "so many bytes nor None"
            )
        # Not np.ndarray(..., shared): that would hold what the memoryview is of, and not the memoryview.
        memory = aligned_empty(nbytes) if shared is None else np.frombuffer(shared, np.uint8)
        return memory.view(dtype).reshape(shape)

    def compute(self, seconds: float) -> None:
        """Declare that the program computes here for so long, so that a simulated world lets its time pass.

        Everywhere else it does nothing: there, computing takes the time that it takes.

        Parameters
        ----------
        seconds
            Seconds of the simulated clock; a rank that a fault plan slows down takes longer.

        Raises
        ------
        UsageError
            ``seconds`` is no finite number of at least 0.
        """
        seconds = duration(seconds)
        self._job.runtime.enter(self._job.rank)
        self._job.runtime.compute(seconds)

    def mark(self, label: str) -> None:
        """Note in the trace of a simulated world that this rank has come to a point of its program, such as ``"step 7"``.

        Everywhere else it does nothing.

        Parameters
        ----------
        label
            What the trace calls the point.

        Raises
        ------
        UsageError
            ``label`` is no text.
        """
        if not isinstance(label, str):
            raise UsageError(f"a mark is a text, and {label!r} was given")
        self._job.runtime.enter(self._job.rank)
        self._job.runtime.mark(label)

    def synchronize(self, *, timeout_s: float | None = None) -> None:
        """Wait on the host until this rank's GPU has done all calls of this group; return at once where there were none on GPUs.

        What was computed is sound if this returns: a rank that was lost meanwhile, whose calls then end with anything, is raised here.

        Parameters
        ----------
        timeout_s
            The most seconds to wait. By default as long as the calls take, which their own deadlines bound.

        Raises
        ------
        DeadlineError
            The time is up; the calls go on.
        """
        devices = self._operations.devices
        # By default as long as the calls take, which their own deadlines bound: these tell who did not come.
        longest = _GRACE_S + max([self._timeout_s, *(launched.timeout_s for launched in devices.unfinished())])
        deadline = self._begin(longest if timeout_s is None else timeout_s)
        self._check_open()
        if not devices.synchronize(deadline):
            raise DeadlineError(f"the GPU was not done within {deadline.timeout_s:g} s; it goes on", rank=self._job.rank)
        self._check_open()

    def backend(self, name: str | None = None) -> Backend | None:
        """Return the backend that moves the bytes, or a part of it, where it is composed of others.

        Parameters
        ----------
        name
            The name of the part, such as ``"nccl"``; by default the backend itself.

        Returns
        -------
        Backend or None
            None where there is none: in a world of one, or where it is not composed of such a part.
        """
        backend = self._job.backend
        return backend if name is None or backend is None or name == self._job.backend_name else backend.part(name)
