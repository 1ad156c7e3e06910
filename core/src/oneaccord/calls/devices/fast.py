"""The fast way of a call on devices that was made before: as `oneaccord.calls.host.fast`, nothing is looked up that can be known."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from oneaccord.calls.devices.kinds import Prepared
from oneaccord.calls.devices.registered import Registered
from oneaccord.calls.order.call_sequence import CallSequence
from oneaccord.calls.request import SLOW_PATH, Request

if TYPE_CHECKING:
    from oneaccord.arrays.libraries import Library

__all__ = ["PER_THREAD", "CachedDeviceCall"]

PER_THREAD = 2
"""The handle of the default stream that each thread has for itself, where a program was started so. Libraries may launch on a thread of their
own, which means another stream by it; so nothing is launched there."""


class CachedDeviceCall:
    """One kind of call of one group, with arrays of one library.

    Parameters
    ----------
    ways
        The group's call sequence, its registered memory, what all ranks have agreed on, and what enqueues the call: `Devices.launch`.
    device, call
        The number of the device, and the call.
    library
        Whose arrays they are.
    shape, nbytes
        The shape of the result, and how many bytes the input has.
    in_place
        Whether the result may go where the input is.
    """

    is_stale: ClassVar[bool] = False

    __slots__ = (
        "_call",
        "_call_sequence",
        "_device",
        "_dtype",
        "_in_place",
        "_kinds",
        "_launch",
        "_library",
        "_nbytes",
        "_prepared",
        "_registered",
        "_shape",
    )

    def __init__(
        self,
        ways: tuple[CallSequence, Registered, Mapping[Hashable, Prepared], Callable[..., None]],
        device: int,
        call: Request,
        library: Library,
        shape: tuple[int, ...],
        nbytes: int,
        *,
        in_place: bool,
    ) -> None:
        self._call_sequence, self._registered, self._kinds, self._launch = ways
        self._device = device
        self._call = call
        self._prepared = self._kinds.get(call)
        self._library = library
        self._shape = shape
        self._dtype = call.dtype
        self._in_place = in_place
        self._nbytes = max(nbytes, math.prod(shape) * call.dtype.itemsize)

    @property
    def is_whole(self) -> bool:
        """Whether it also leads to the call on memory that is not registered: all ranks had agreed on that when it was made."""
        return self._prepared is not None

    def later(self, array: Any, out: Any) -> None:
        """Return None: beside the caller's stream a call goes the long way."""

    def run(self, array: Any, out: Any, timeout_s: float) -> Any:
        """Make the call, and return its result; `SLOW_PATH` if it must take that.

        Parameters
        ----------
        array
            The input, of the type, dtype and shape that it had the first time.
        out
            What the user gave as ``out=``.
        timeout_s
            Seconds that the call may last.

        Raises
        ------
        CommError
            As `Devices.launch`.
        """
        library, device = self._library, self._device
        source = library.address(array, device)
        if not source:
            return SLOW_PATH
        if out is None:
            # Not through `Library.empty`: what is given back is the array itself.
            target, result = library.fresh(self._shape, self._dtype, device)
        else:
            if type(out) is not type(array) or out.shape != self._shape or out.dtype != array.dtype:
                return SLOW_PATH
            target, result = library.address(out, device), out
            if (
                not target
                or (source != target and abs(source - target) < self._nbytes)
                or (source == target and not self._in_place)
            ):
                return SLOW_PATH
        place = None if self._registered.is_empty else self._registered.place(source, target)
        prepared = self._prepared if place is None else self._kinds.get((self._call, place))
        if prepared is None:
            return SLOW_PATH
        call_sequence = self._call_sequence
        if not call_sequence.take_if_free():
            return SLOW_PATH
        try:
            if not call_sequence.is_usable:
                return SLOW_PATH
            stream, keep = library.stream(device)
            if stream == PER_THREAD:
                return SLOW_PATH
            self._launch(prepared, source, target, stream, keep, timeout_s)
        finally:
            call_sequence.give()
        if out is not None:
            library.wrote(out)
        return result
