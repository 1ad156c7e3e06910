"""A call on device memory, ready to be enqueued: on which streams, and what the caller gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from manyhands.collectives import Call
from manyhands.deadline import Deadline
from manyhands.device import DeviceChannel, DeviceEvent
from manyhands.devices.calls import Devices
from manyhands.devices.work import Underway
from manyhands.dtypes import check_dtype
from manyhands.errors import DTypeError, LayoutError, SizeMismatchError
from manyhands.libraries import DeviceArray, Library
from manyhands.taking import Give

__all__ = ["DeviceAction", "check_device_out", "collective", "launch_together", "message", "together"]

Enqueue = Callable[[int, Any, Deadline], None]
"""``enqueue(stream, keep, deadline)``."""


class DeviceAction:
    """What runs when a call's turn comes, on the caller's current stream or beside it.

    Parameters
    ----------
    devices
        The group's calls on devices.
    enqueue
        Enqueues the call on a stream; None where a copy by the library does it, in a world of one.
    arrays
        What it works on, the input first; their libraries' current streams are the caller's.
    target
        Where the result goes; None where this rank gets none.
    out
        The array that the result is copied to from there, where it cannot be written directly.
    give
        Gives the result.

    Attributes
    ----------
    then
        What is done once the call was enqueued on the caller's stream.
    """

    __slots__ = ("_arrays", "_devices", "_enqueue", "_give", "_out", "_start", "_target", "then")

    def __init__(
        self,
        devices: Devices,
        enqueue: Enqueue | None,
        arrays: list[DeviceArray],
        target: DeviceArray | None,
        out: DeviceArray | None,
        give: Give | None,
    ) -> None:
        self._devices = devices
        self._enqueue = enqueue
        self._arrays = arrays
        self._target = target
        self._out = out
        self._give = give
        self._start: list[DeviceEvent] = []
        self.then: Callable[[], None] | None = None

    @property
    def is_copy(self) -> bool:
        """Whether nothing is enqueued but a copy."""
        return self._enqueue is None

    def __call__(self, deadline: Deadline) -> Any:
        """Enqueue the call on the caller's current stream; return the result, which that stream may use from there on."""
        self.enqueue(deadline)
        return self.collect()

    def enqueue(self, deadline: Deadline) -> None:
        """Enqueue the call on the caller's current stream."""
        streams = self._streams()
        (stream, keep), others = streams[0], streams[1:]
        if self._enqueue is None:
            self._copy()
            return
        if others:  # the arrays are of different libraries, each with a current stream of its own
            for other, _ in others:
                self._record(other).hold(stream)
        self._enqueue(stream, keep, deadline)
        self._collect_into_out()
        if others or not all(array.library.is_stream_ordered for array in self._arrays):
            end = self._record(stream)
            for other, _ in others:
                end.hold(other)
            self._keep(end)
        if self.then is not None:
            self.then()

    def begin(self) -> None:
        """Note, in the caller's thread, what its streams have queued so far: a call beside them waits for that."""
        if self._out is not None:
            raise LayoutError(
                "out= of a call in the background must be C-contiguous where it is on a GPU: give an array of its own"
            )
        self._start = [self._record(stream) for stream, _ in self._streams()]

    def launch(self, deadline: Deadline) -> Underway[Any]:
        """Enqueue the call on the group's own stream."""
        return launch_together([self], deadline)[0]

    def launch_on(self, channel: DeviceChannel, deadline: Deadline) -> None:
        """Enqueue the call on the group's own stream, behind what `begin` noted."""
        assert self._enqueue is not None
        for start in self._start:
            start.hold(channel.stream)
        self._enqueue(channel.stream, None, deadline)

    def underway(self, end: DeviceEvent) -> Underway[Any]:
        """Return the call, which is done at a point."""

        def hold() -> None:
            for stream, _ in self._streams():
                end.hold(stream)

        return Underway(end, hold, self.collect)

    def _keep(self, end: DeviceEvent) -> None:
        """Keep the arrays until a point is reached: their libraries do not know which stream uses them."""
        arrays = self._arrays

        def has_ended() -> bool:
            return end.done() or not arrays

        self._devices.follow(has_ended)

    @property
    def library(self) -> Library:
        """Whose the input is."""
        return self._arrays[0].library

    @property
    def takes(self) -> bool:
        """Whether this rank gets the result."""
        return self._target is not None

    @property
    def channel(self) -> DeviceChannel:
        """What performs the call."""
        channel = self._devices.channel
        assert channel is not None
        return channel

    def block(self) -> AbstractContextManager[None]:
        """Return a block whose calls are enqueued as one."""
        return nullcontext() if self._enqueue is None else self.channel.together()

    def _streams(self) -> list[tuple[int, Any]]:
        found = {array.library.name: array for array in self._arrays}
        return list(dict(each.library.stream(each.device) for each in found.values()).items())

    def _record(self, stream: int) -> DeviceEvent:
        return self.channel.record(stream)

    def _copy(self) -> None:
        source, target = self._arrays[0], self._out or self._target
        if target is not None and target.pointer != source.pointer:
            target.library.copy(target, source.reshape(*target.shape))

    def _collect_into_out(self) -> None:
        if self._out is not None and self._target is not None:
            self._out.library.copy(self._out, self._target)

    def collect(self) -> Any:
        """Return the result, once its stream may use it."""
        if self._target is None:
            return None
        return self._target.owner if self._give is None else self._give(self._target)


def together(actions: Sequence[DeviceAction], deadline: Deadline) -> None:
    """Enqueue calls on the caller's current streams, as one where the streams are one."""
    with actions[0].block():
        for action in actions:
            action.enqueue(deadline)


def launch_together(actions: Sequence[DeviceAction], deadline: Deadline) -> list[Underway[Any]]:
    """Enqueue calls on the group's own stream, as one."""
    channel = actions[0].channel
    with channel.together() if len(actions) > 1 else nullcontext():
        for action in actions:
            action.launch_on(channel, deadline)
    end = channel.record(channel.stream)
    return [action.underway(end) for action in actions]


def collective(
    devices: Devices,
    call: Call,
    source: DeviceArray,
    shape: tuple[int, ...] | None,
    out: DeviceArray | None,
    give: Give | None,
    *,
    may_alias: bool,
    is_agreed: bool = False,
) -> DeviceAction:
    """Prepare a collective whose result has ``shape``, None where this rank gets none; ``is_agreed`` is that of `Devices.run`.

    Raises
    ------
    DTypeError, SizeMismatchError
        ``out`` does not fit.
    LayoutError
        The array is on another device than the group's.
    """
    _check_device(devices, source)
    array = source.library.contiguous(source)
    if shape is None:
        return DeviceAction(devices, _enqueue(devices, call, array, None, is_agreed=is_agreed), [array], None, None, give)
    target, late = out, None
    if out is not None:
        check_device_out(out, shape, call.dtype)
        if not out.is_contiguous:
            target, late = None, out
        elif _overlap(array, out) and not (may_alias and (array.pointer, array.nbytes) == (out.pointer, out.nbytes)):
            apart = array.library.empty(array.shape, array.dtype, array.device)
            array.library.copy(apart, array)
            array = apart
    if target is None:
        target = source.library.empty(shape, call.dtype, source.device)
    arrays = [array] if out is None else [array, out]
    return DeviceAction(devices, _enqueue(devices, call, array, target, is_agreed=is_agreed), arrays, target, late, give)


def message(
    devices: Devices, outgoing: tuple[DeviceArray, int] | None, incoming: tuple[DeviceArray, int] | None, give: Give | None
) -> DeviceAction:
    """Prepare a send, a receive, or both; raises as `collective`."""
    arrays = [flow[0] for flow in (outgoing, incoming) if flow is not None]
    for array in arrays:
        _check_device(devices, array)
    sent = None if outgoing is None else (outgoing[0].library.contiguous(outgoing[0]), outgoing[1])
    target, late = None, None
    if incoming is not None:
        target = incoming[0]
        check_dtype(target.dtype)
        if not target.is_contiguous or (sent is not None and _overlap(sent[0], target)):
            target, late = target.library.empty(target.shape, target.dtype, target.device), target
    received = None if target is None or incoming is None else (target, incoming[1])

    def enqueue(stream: int, keep: Any, deadline: Deadline) -> None:
        devices.exchange(sent, received, stream, keep, deadline)

    arrays = [flow[0] for flow in (sent, incoming) if flow is not None]
    return DeviceAction(devices, enqueue, arrays, target, late, give)


def _enqueue(
    devices: Devices, call: Call, source: DeviceArray, target: DeviceArray | None, *, is_agreed: bool
) -> Enqueue | None:
    if devices.channel is None:
        return None
    return lambda stream, keep, deadline: devices.run(call, source, target, stream, keep, deadline, is_agreed=is_agreed)


def _check_device(devices: Devices, array: DeviceArray) -> None:
    channel = devices.channel
    if channel is not None and array.device != channel.device:
        raise LayoutError(
            f"the array is on device {array.device}, and this rank's group uses device {channel.device}: make the array there, with "
            f'cupy.cuda.Device({channel.device}) or device="cuda:{channel.device}", or set backends.nccl.device'
        )


def check_device_out(out: DeviceArray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Refuse an ``out=`` on a device that cannot take a result of this shape and dtype.

    Raises
    ------
    DTypeError, SizeMismatchError
        It differs.
    """
    if out.dtype != dtype:
        raise DTypeError(f"out= has dtype {out.dtype}, and the result has {dtype}")
    if out.shape != shape:
        raise SizeMismatchError(f"out= has shape {out.shape}, and the result has {shape}")


def _overlap(one: DeviceArray, other: DeviceArray) -> bool:
    return one.pointer < other.pointer + other.nbytes and other.pointer < one.pointer + one.nbytes
