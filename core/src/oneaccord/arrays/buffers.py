"""Turn a call's arguments into memory that it works on, and its result into an array of the caller's library."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from oneaccord.arrays.dtypes import check_dtype
from oneaccord.arrays.libraries import WAYS_OUT, DeviceArray, library_of
from oneaccord.arrays.memory import Array, new_array, to_array
from oneaccord.common.lines import program_frame
from oneaccord.errors import GpuFallbackWarning, LayoutError, UnsupportedError

__all__ = ["Give", "Memory", "Taken", "Taking", "fill", "staged"]

Memory = Array | DeviceArray

Give = Callable[[Any], Any]
"""Turns the memory of a result into an array for the caller."""

Taken = tuple[Memory, Memory | None, Give | None]
"""The memory of the input, the memory of ``out`` if given, and a function that returns the result to the caller; None for the result as it is."""


class Taking:
    """Turns the arrays that calls are given into memory.

    Parameters
    ----------
    serves_devices
        Whether the group moves device memory.
    why
        Words for the reason if it does not.
    fallback
        ``"host"`` if arrays on GPUs may be copied through the host's memory instead; otherwise ``"error"``.
    """

    def __init__(self, *, serves_devices: bool, fallback: str, why: str = "") -> None:
        self._why = why
        self._serves_devices = serves_devices
        self._fallback = fallback
        self._warned: set[str] = set()

    def __call__(self, operation: str, array: Any, out: Any = None, *, may_stage_later: bool = False) -> Taken:
        """Return the memory that a call works on.

        Parameters
        ----------
        operation
            The name of the call.
        array, out
            As the caller gave them.
        may_stage_later
            Whether arrays on GPUs that are to go through the host's memory are returned as they are, for `staged` or a copy in pieces.

        Raises
        ------
        DTypeError, LayoutError
            As `Library.read` and `Library.write`; or one array is on a GPU and the other is not.
        UnsupportedError
            They are on a GPU, which is not served here.
        """
        if type(array) is np.ndarray and (out is None or type(out) is np.ndarray):
            check_dtype(array.dtype)
            return array, out, None
        library = library_of(array)
        source = to_array(array) if library is None else library.read(array)
        target = self.target(out)
        if not isinstance(source, DeviceArray):
            if isinstance(target, DeviceArray):
                raise LayoutError(
                    f"out= is on a GPU, but the array, a {type(array).__name__}, is not: give both in the same memory"
                )
            if target is not None:
                return source, target, (None if target is out else lambda _: out)
            return source, None, (None if library is None else lambda result: library.give(result, array))
        if target is not None and not isinstance(target, DeviceArray):
            raise LayoutError(
                f"out= is not on a GPU, but the array, a {type(array).__name__}, is: give both in the same memory"
            )
        if not self._serves_devices:
            self.stage(operation, source.nbytes, type(array).__name__)
        if self._serves_devices or may_stage_later:
            if self._serves_devices and target is not None and target.device != source.device:
                raise LayoutError(
                    f"out= is on device {target.device}, but the array is on device {source.device}: give both on one device"
                )
            return source, target, (lambda result: result.library.give_device(result, array)) if out is None else lambda _: out
        return staged(source, target, lambda result: out if target is not None else result.library.give_device(result, array))

    def receiving(self, operation: str, out: Any) -> tuple[Memory | None, Give | None]:
        """Return the memory to receive into, and a function that returns the result, for a call without an input; raises the same
        errors.
        """
        target = None if out is None else self.target(out)
        if not isinstance(target, DeviceArray):
            return target, (None if target is out else lambda _: out)
        if self._serves_devices:
            return target, lambda _: out
        self.stage(operation, target.nbytes, type(out).__name__)
        target.library.synchronize(target.device)

        def give(result: Array) -> Any:
            fill(target, result)
            target.library.synchronize(target.device)
            return out

        return new_array(target.shape, target.dtype), give

    def target(self, out: Any) -> Memory | None:
        """Return the memory of ``out``; None if it is not given."""
        library = library_of(out)
        return out if library is None else library.write(out)

    def stage(self, operation: str, nbytes: int, what: str) -> None:
        """Warn that arrays on GPUs go through the host's memory, once for each operation; raise an error if the config does not allow it."""
        if self._fallback != "host":
            raise UnsupportedError(
                f"{operation} was given a {what} on a GPU, but this backend moves only host memory{self._why}: {WAYS_OUT}"
            )
        if operation in self._warned:
            return
        warnings.warn(
            f"{operation}: {nbytes} bytes of a {what} on a GPU go through the host's memory, since the backend moves no device memory"
            f'{self._why} (gpu_fallback = "host")',
            GpuFallbackWarning,
            stacklevel=_level(),
        )
        self._warned.add(operation)  # skipped if the program turns the warning into an error


def _level() -> int:
    """Return the number of calls between the caller and the program's own line."""
    level, frame = 1, sys._getframe(1)
    found = program_frame(frame)
    while frame is not found and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level


def staged(source: DeviceArray, target: DeviceArray | None, give: Give | None) -> tuple[Array, Array | None, Give]:
    """Return host memory for an array on a GPU and for ``out``, and a function that turns a result in it into an array for the caller.

    ``give`` does the same with a result on the GPU. The host waits for the copies.
    """
    library, device = source.library, source.device
    host = library.to_host(source)
    if target is not None:
        target.library.synchronize(target.device)  # the work queued on its stream comes before the result, from any memory

    def finished(result: Array) -> Any:
        made = target
        if made is None:
            made = library.to_device(result, device)
        else:
            fill(made, result)
        given = made if give is None else give(made)
        made.library.synchronize(made.device)  # this may be another thread than the caller's, with another current stream
        return given

    return host, None if target is None else new_array(target.shape, target.dtype), finished


def fill(target: DeviceArray, result: Array) -> None:
    """Copy a result from the host's memory to a device, on the current stream of the target's library."""
    target.library.copy(target, target.library.to_device(result, target.device))
