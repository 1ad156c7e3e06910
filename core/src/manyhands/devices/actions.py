"""A call on device memory, ready to be enqueued: on which streams, and what the caller gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from manyhands.collectives import Call
from manyhands.deadline import Deadline
from manyhands.device import DeviceChannel, DeviceEvent, DeviceFailure
from manyhands.devices.calls import Devices
from manyhands.devices.work import Underway
from manyhands.dtypes import check_dtype
from manyhands.errors import DTypeError, LayoutError, SizeMismatchError, UnsupportedError
from manyhands.libraries import DeviceArray, Library
from manyhands.taking import Give

__all__ = [
    "STRIDED",
    "DeviceAction",
    "begin",
    "check_arrays",
    "check_device_out",
    "collective",
    "launch_together",
    "message",
    "together",
]

STRIDED = "out= of a call in the background must be C-contiguous where it is on a GPU: give an array of its own"

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
    is_known
        Tells whether the ranks have agreed on such a call before.
    arrays
        What it works on, the input first; the current stream of its library is the caller's.
    target
        Where the result goes; None where this rank gets none.
    out
        The array that the result is copied to from there, where it cannot be written directly.
    give
        Gives the result.

    Attributes
    ----------
    starts
        The points of the caller's stream behind which a call beside it runs.
    then
        What is done once the call was enqueued on the caller's stream.
    """

    __slots__ = ("_arrays", "_devices", "_enqueue", "_give", "_is_known", "_out", "_target", "starts", "then")

    def __init__(
        self,
        devices: Devices,
        enqueue: Enqueue | None,
        is_known: Callable[[], bool],
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
        self._is_known = is_known
        self.starts: list[DeviceEvent] = []
        self.then: Callable[[], None] | None = None

    @property
    def is_copy(self) -> bool:
        """Whether nothing is enqueued but a copy."""
        return self._enqueue is None

    def __call__(self, deadline: Deadline) -> Any:
        """Enqueue the call on the caller's current stream; return the result, which that stream may use from there on."""
        together([self], deadline)
        return self.collect()

    @property
    def is_known(self) -> bool:
        """Whether the ranks have agreed on such a call before, so that it is enqueued without waiting for them."""
        return self._is_known()

    def enqueue_on(self, stream: int, keep: Any, deadline: Deadline) -> None:
        """Enqueue the call itself on a stream."""
        if self._enqueue is None:
            self._copy()
        else:
            self._enqueue(stream, keep, deadline)

    def follow_up(self, stream: int) -> None:
        """Enqueue what comes after the call, where it went to the caller's current stream."""
        if self._out is not None and self._target is not None and self._enqueue is not None:
            self._out.library.copy(self._out, self._target)
            if not self.channel.is_capturing(stream):
                self._devices.copied(self.channel.record(stream))
        # Some libraries do not know which stream uses their arrays.
        is_ordered = self._enqueue is None or all(array.library.is_stream_ordered for array in self._arrays)
        if not is_ordered and not self.channel.is_capturing(stream):
            self._devices.follow(Kept(self.channel.record(stream), self._arrays))
        if self.then is not None:
            self.then()

    def begin(self) -> None:
        """Note, in the caller's thread, what its stream has queued so far: a call beside it waits for that.

        Raises
        ------
        LayoutError
            ``out`` is not contiguous.
        UnsupportedError
            The stream is being captured.
        """
        if self._out is not None:
            raise LayoutError(STRIDED)
        self.starts = begin(self._devices, [self.library])

    def launch(self, deadline: Deadline) -> Underway[Any]:
        """Enqueue the call on the group's own stream."""
        return launch_together([self], deadline)[0]

    def launch_on(self, channel: DeviceChannel, deadline: Deadline) -> None:
        """Enqueue the call on the group's own stream, behind what `begin` noted."""
        for start in self.starts:
            start.hold(channel.stream)
        self.enqueue_on(channel.stream, None, deadline)

    def underway(self, end: DeviceEvent) -> Underway[Any]:
        """Return the call, which is done at a point."""
        return Underway(end, lambda: end.hold(self.stream[0]), self.collect)

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

    @property
    def devices(self) -> Devices:
        """The group's calls on devices."""
        return self._devices

    @property
    def stream(self) -> tuple[int, Any]:
        """The caller's current stream, and what keeps it alive."""
        return self._arrays[0].library.stream(self._arrays[0].device)

    def _copy(self) -> None:
        source, target = self._arrays[0], self._out or self._target
        if target is not None and target.pointer != source.pointer:
            target.library.copy(target, source.reshape(*target.shape))

    def collect(self) -> Any:
        """Return the result, once its stream may use it."""
        if self._target is None:
            return None
        return self._target.owner if self._give is None else self._give(self._target)


class Kept:
    """Arrays that are kept until a device has come to a point."""

    def __init__(self, end: DeviceEvent, arrays: list[DeviceArray]) -> None:
        self._end = end
        self._arrays = arrays

    def look(self) -> bool:
        """Tell whether the device has come there, or never will."""
        try:
            return self._end.done()
        except DeviceFailure as failure:
            return not failure.is_passing

    def give_up(self, error: BaseException) -> None:
        """Keep them no longer."""


def begin(devices: Devices, libraries: Sequence[Library]) -> list[DeviceEvent]:
    """Return the points that the current streams of libraries have come to; none in a world of one.

    Raises
    ------
    UnsupportedError
        A stream is being captured.
    """
    channel = devices.channel
    if channel is None:
        return []
    starts = []
    with devices.reporting("a call in the background"):
        for library in libraries:
            stream, _ = library.stream(channel.device)
            if channel.is_capturing(stream):
                raise UnsupportedError(
                    "a call in the background cannot become part of a CUDA graph: capture the call without _async, which is enqueued on the "
                    "stream that is captured"
                )
            starts.append(channel.record(stream))
    return starts


def together(actions: Sequence[DeviceAction], deadline: Deadline) -> None:
    """Enqueue calls on the caller's current stream, as one."""
    devices = actions[0].devices
    stream, keep = actions[0].stream
    with devices.reporting("the launch of a call"):
        with devices.batch() if len(actions) > 1 else nullcontext():
            for action in actions:
                action.enqueue_on(stream, keep, deadline)
        for action in actions:
            action.follow_up(stream)


def launch_together(actions: Sequence[DeviceAction], deadline: Deadline) -> list[Underway[Any]]:
    """Enqueue calls on the group's own stream, as one."""
    devices, channel = actions[0].devices, actions[0].channel
    with devices.reporting("the launch of a call"):
        with devices.batch() if len(actions) > 1 else nullcontext():
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
    check_arrays(devices, source, out)
    array = source.library.contiguous(source)
    if shape is None:
        enqueue = _enqueue(devices, call, array, None, is_agreed=is_agreed)
        return DeviceAction(devices, enqueue, lambda: devices.knows(call), [array], None, None, give)
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
    enqueue = _enqueue(devices, call, array, target, is_agreed=is_agreed)
    return DeviceAction(devices, enqueue, lambda: devices.knows(call), arrays, target, late, give)


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

    if sent is not None and incoming is not None:
        _check_libraries(sent[0], incoming[0])
    arrays = [flow[0] for flow in (sent, received, incoming) if flow is not None]
    return DeviceAction(devices, enqueue, lambda: devices.knows_messages(sent, received), arrays, target, late, give)


def _enqueue(
    devices: Devices, call: Call, source: DeviceArray, target: DeviceArray | None, *, is_agreed: bool
) -> Enqueue | None:
    if devices.channel is None:
        return None
    return lambda stream, keep, deadline: devices.run(call, source, target, stream, keep, deadline, is_agreed=is_agreed)


def check_arrays(devices: Devices, *arrays: DeviceArray | None) -> None:
    """Refuse arrays that a call cannot work on.

    Raises
    ------
    LayoutError
        One is on another device than the group's, or they are of different libraries.
    """
    found = [array for array in arrays if array is not None]
    for array in found:
        _check_device(devices, array)
        _check_libraries(found[0], array)


def _check_device(devices: Devices, array: DeviceArray) -> None:
    channel = devices.channel
    if channel is not None and array.device != channel.device:
        raise LayoutError(
            f"the array is on device {array.device}, and this rank's group uses device {channel.device}: make the array there, with "
            f'cupy.cuda.Device({channel.device}) or device="cuda:{channel.device}", or set backends.nccl.device'
        )


def _check_libraries(source: DeviceArray, out: DeviceArray) -> None:
    if source.library.streams != out.library.streams:
        raise LayoutError(
            f"out= is an array of {out.library.name}, and the array one of {source.library.name}, which queue their work on streams of their "
            "own: give both of one library"
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
