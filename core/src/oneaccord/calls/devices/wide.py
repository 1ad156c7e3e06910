"""Reductions in a wider dtype than that of the arrays, if the backend asks for it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np

from oneaccord.arrays.libraries import DeviceArray
from oneaccord.calls.devices.actions import STRIDED, DeviceAction, check_arrays, check_device_out, ready_of
from oneaccord.calls.devices.calls import Devices
from oneaccord.calls.request import Operation
from oneaccord.errors import LayoutError

__all__ = ["WideAction"]


class WideAction(DeviceAction):
    """A reduction whose arrays are converted on the device, before the call and after it.

    The wide memory comes from the pool of the array's library, for the caller's stream. It belongs to this action, which lives as long as the
    call, and to the group if the call becomes part of a graph.

    Parameters
    ----------
    devices, step
        The group's calls on devices, and what to do.
    wide
        The dtype to reduce in.
    may_alias
        Whether the result may go where the input is.

    Raises
    ------
    DTypeError, LayoutError, SizeMismatchError
        As `collective`.
    OutOfMemoryError
        The device has no memory for the wide arrays.
    """

    __slots__ = ("_scratch", "_source")

    def __init__(self, devices: Devices, step: Operation, wide: np.dtype[Any], *, may_alias: bool) -> None:
        request, source, target = step.request, step.source, step.out
        assert isinstance(source, DeviceArray)
        assert target is None or isinstance(target, DeviceArray)
        check_arrays(devices, source, target)
        library, device = source.library, source.device
        scratch = [library.empty(source.shape, wide, device)]
        if step.shape is None:
            target = None
        else:
            if target is None:
                target = library.empty(step.shape, request.dtype, device)
            else:
                check_device_out(target, step.shape, request.dtype)
            scratch.append(scratch[0] if may_alias else library.empty(step.shape, wide, device))
        ready = ready_of(devices, step, scratch[0], None if target is None else scratch[1])
        arrays = [source, *scratch] if target is None else [source, *scratch, target]
        super().__init__(devices, ready, lambda: devices.knows(request), arrays, target, None, step.give)
        self._source = source
        self._scratch = scratch

    def begin(self) -> None:
        """Note, in the caller's thread, what its stream has queued so far; raises as every call beside it."""
        if self._target is not None and not self._target.is_contiguous:
            raise LayoutError(STRIDED)
        super().begin()

    def widen(self, stream: int) -> None:
        """Enqueue the conversion of the input."""
        _convert(self._scratch[0], self._source, stream)

    def narrow(self, stream: int) -> None:
        """Enqueue the conversion of the result."""
        if self._target is not None:
            _convert(self._target, self._scratch[1], stream)
        if self.channel.is_capturing(stream):
            self._devices.keep(self._scratch)
        else:
            # The watch may have seen the end of the call itself already.
            self._devices.copied(stream, self.channel.record(stream))


def _convert(target: DeviceArray, source: DeviceArray, stream: int) -> None:
    """Enqueue a conversion on a stream, which need not be the library's current one."""
    library, device = target.library, target.device
    is_current = library.stream(device)[0] == stream
    with nullcontext() if is_current else library.using(library.external(stream, device), device):
        library.copy(target, source)
