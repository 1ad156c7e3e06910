"""A call on device memory, ready to be enqueued: on which streams, and what the caller gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np

from oneaccord.arrays.buffers import Give
from oneaccord.arrays.dtypes import check_dtype, resolve_op
from oneaccord.arrays.libraries import DeviceArray, Library, present
from oneaccord.calls.devices.calls import Devices
from oneaccord.calls.devices.fast import PER_THREAD
from oneaccord.calls.devices.registered import Place
from oneaccord.calls.devices.work import Underway
from oneaccord.calls.order.turns import Turns
from oneaccord.calls.request import Local, Message, Operation, Request
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.device import DeviceChannel, DeviceEvent, DeviceFailure
from oneaccord.errors import DTypeError, LayoutError, SizeMismatchError, UnsupportedError
from oneaccord.schedule.steps import Collective

__all__ = [
    "STRIDED",
    "Aside",
    "DeviceAction",
    "barrier",
    "begin",
    "check_arrays",
    "check_device_out",
    "collective",
    "copied",
    "launch_together",
    "message",
    "ready_of",
    "together",
]

STRIDED = "out= of an _async call on a GPU must be C-contiguous, and this one is not: give a contiguous array, or make the call without _async"
"""The error if it is not."""

_REGISTERED = (
    "this _async call was given memory of group.empty(), which only all_reduce, all_gather, reduce_scatter and all_to_all with even "
    "counts use: give another array, or make the call without _async"
)

_NO_CAPTURE = "an _async call cannot become part of a CUDA graph: capture the call without _async, which is enqueued on the stream that is captured"

Enqueue = Callable[[int, Any], None]
"""``enqueue(stream, keep)``: launch what is ready."""

Ready = Callable[[Deadline, int], Enqueue]
"""``ready(deadline, ahead)``: agree with the other ranks if needed; ``ahead`` calls are to be launched before."""


class DeviceAction:
    """What runs when a call's turn comes, on the caller's current stream or beside it.

    Parameters
    ----------
    devices
        The group's calls on devices.
    ready
        Agrees on the call and returns what enqueues it; None if a copy by the library does it: in a world of one, or to this rank itself.
    is_known
        Tells whether the ranks have agreed on such a call before.
    arrays
        What it works on, and what that was copied from, the input first; the current stream of its library is the caller's.
    target
        Where the result goes; None if this rank gets none.
    out
        The array that the result is copied to from there, if it cannot be written directly.
    give
        Gives the result.
    own
        Those of the arrays that stand in place of the caller's, and that a graph needs as long as it lives.

    Attributes
    ----------
    starts
        The points of the caller's stream behind which a call beside it runs.
    then
        What is done once the call was enqueued on the caller's stream.
    """

    __slots__ = ("_arrays", "_devices", "_give", "_is_known", "_out", "_own", "_ready", "_target", "starts", "then")

    def __init__(
        self,
        devices: Devices,
        ready: Ready | None,
        is_known: Callable[[], bool],
        arrays: list[DeviceArray],
        target: DeviceArray | None,
        out: DeviceArray | None,
        give: Give | None,
        own: Sequence[DeviceArray] = (),
    ) -> None:
        self._devices = devices
        self._ready = ready
        self._arrays = arrays
        self._target = target
        self._out = out
        self._give = give
        self._is_known = is_known
        self._own = own
        self.starts: list[DeviceEvent] = []
        self.then: Callable[[], None] | None = None

    @property
    def is_copy(self) -> bool:
        """Whether nothing is enqueued but a copy."""
        return self._ready is None

    @property
    def turns(self) -> tuple[Turns, ...]:
        """Whose turn it needs; a device does one thing after the other, messages too."""
        return (self._devices.call_sequence,)

    def run(self, deadline: Deadline) -> Any:
        """Enqueue the call on the caller's current stream; return the result, which that stream may use from there on."""
        together([self], deadline)
        return self.collect()

    @property
    def is_known(self) -> bool:
        """Whether the ranks have agreed on such a call before, so that it is enqueued without waiting for them."""
        return self._is_known()

    def ready(self, deadline: Deadline, ahead: int) -> Enqueue:
        """Return what enqueues the call itself, once all ranks have agreed on it."""
        return self._copy if self._ready is None else self._ready(deadline, ahead)

    def widen(self, stream: int) -> None:
        """Enqueue what comes before the call, on its stream."""

    def narrow(self, stream: int) -> None:
        """Enqueue what comes right after the call, on its stream."""

    def follow_up(self, stream: int) -> None:
        """Enqueue what comes after the call on the caller's current stream."""
        channel, registered = self._devices.channel, self._devices.registered
        # A graph reads copies at each replay, and the registered memory that copies were made of: NCCL never sees that.
        if channel is not None and (self._own or not registered.is_empty) and channel.is_capturing(stream):
            self._devices.keep([*self._own, *(array for array in self._arrays if registered.has(array.pointer))])
        # Some libraries do not know which stream uses their arrays.
        is_ordered = all(array.library.is_stream_ordered for array in self._arrays)
        if self._out is not None and self._target is not None:
            self._out.library.copy(self._out, self._target)
            if channel is not None and not channel.is_capturing(stream):
                self._devices.copied(stream, channel.record(stream))
        if channel is None:
            if not is_ordered:
                self.library.synchronize(self._arrays[0].device)
            return
        if not is_ordered and not channel.is_capturing(stream):
            self._devices.follow(Kept(channel.record(stream), self._arrays))
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
            raise LayoutError(_REGISTERED if self._out.is_contiguous else STRIDED)
        self.starts = begin(self._devices, [self.library])

    def launch(self, deadline: Deadline) -> Underway[Any]:
        """Enqueue the call on the group's own stream."""
        return launch_together([self], deadline)[0]

    def underway(self, end: DeviceEvent) -> Underway[Any]:
        """Return the call, which is done at a point."""

        def hold() -> None:
            stream, _ = self.stream
            channel = self._devices.channel  # None if the group has been closed since
            if channel is not None and channel.is_capturing(stream):
                raise UnsupportedError(
                    "a stream that is being captured cannot wait for an _async call: wait before the capture begins, or capture the call without "
                    "_async"
                )
            end.hold(stream)

        return Underway(end, hold, self.collect)

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

    def _copy(self, _stream: int, _keep: Any) -> None:
        source, target = self._arrays[0], self._target
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
        """Return whether the device has come there, or never will."""
        try:
            return self._end.done()
        except DeviceFailure as failure:
            return not failure.is_passing

    def give_up(self, error: BaseException) -> None:
        """Keep them no longer."""


def begin(
    devices: Devices, libraries: Sequence[Library], name: str = "a call in the background", refusal: str = _NO_CAPTURE
) -> list[DeviceEvent]:
    """Return the points that the current streams of libraries have come to; none if the group has no channel.

    Raises
    ------
    UnsupportedError
        A stream is being captured.
    """
    channel = devices.channel
    if channel is None:
        return []
    starts = []
    with devices.reporting(name):
        for library in libraries:
            stream, _ = library.stream(channel.device)
            if channel.is_capturing(stream):
                raise UnsupportedError(refusal)
            starts.append(channel.record(stream))
    return starts


def together(actions: Sequence[DeviceAction], deadline: Deadline) -> None:
    """Enqueue calls on the caller's current stream, as one."""
    devices, streams = actions[0].devices, [action.stream for action in actions]
    with devices.reporting("the launch of a call"):
        if devices.channel is not None and any(stream == PER_THREAD for stream, _ in streams):
            if devices.channel.is_capturing(PER_THREAD):
                raise UnsupportedError(
                    "calls on the default stream of a thread cannot be captured: capture a stream of your own"
                )
            libraries = {action.library.streams: action.library for action in actions}
            starts = begin(devices, list(libraries.values()))
            for action in actions:
                action.starts = starts
            end = launch_together(actions, deadline)[0].end
            for stream in {stream for stream, _ in streams}:
                end.hold(stream)
        else:
            # Whatever one of them is refused for, none was launched before.
            ready = [action.ready(deadline, ahead) for ahead, action in enumerate(actions)]
            for action, (stream, _) in zip(actions, streams, strict=True):
                action.widen(stream)
            with devices.batch() if len(actions) > 1 else nullcontext():
                for enqueue, (stream, keep) in zip(ready, streams, strict=True):
                    enqueue(stream, keep)
            for action, (stream, _) in zip(actions, streams, strict=True):
                action.narrow(stream)
        for action, (stream, _) in zip(actions, streams, strict=True):
            action.follow_up(stream)


def launch_together(actions: Sequence[DeviceAction], deadline: Deadline) -> list[Underway[Any]]:
    """Enqueue calls on the group's own stream, as one."""
    devices, channel = actions[0].devices, actions[0].channel
    with devices.reporting("the launch of a call"):
        ready = [action.ready(deadline, ahead) for ahead, action in enumerate(actions)]
        for start in {start for action in actions for start in action.starts}:
            start.hold(channel.stream)  # what the callers' streams had queued comes first
        for action in actions:
            action.widen(channel.stream)
        with devices.batch() if len(actions) > 1 else nullcontext():
            for enqueue in ready:
                enqueue(channel.stream, None)
        for action in actions:
            action.narrow(channel.stream)
        end = channel.record(channel.stream)
    return [action.underway(end) for action in actions]


def barrier(devices: Devices, token: DeviceArray, deadline: Deadline) -> None:
    """Let the current streams of all libraries wait until those of all ranks have come as far; ``token`` is an array of one element.

    Raises
    ------
    UnsupportedError
        A stream is being captured.
    """
    request = Request(
        Collective.ALL_REDUCE, token.dtype, token.shape, reduction=resolve_op("max", token.dtype), operation="barrier"
    )
    channel, libraries = devices.channel, present()
    assert channel is not None
    step = Operation(request, token, token.shape)
    action = DeviceAction(devices, ready_of(devices, step, token, token), lambda: True, [token], token, None, None)
    action.starts = begin(
        devices, libraries, "barrier", "barrier(device=) cannot become part of a CUDA graph: call it before the capture begins"
    )
    end = launch_together([action], deadline)[0].end
    with devices.reporting("barrier"):
        for library in libraries:
            end.hold(library.stream(channel.device)[0])
    # The library may give its memory out again behind what its stream has queued, which now is the barrier.


def collective(devices: Devices, step: Operation, *, may_alias: bool) -> DeviceAction:
    """Prepare a collective.

    Raises
    ------
    DTypeError, SizeMismatchError
        ``out`` does not fit.
    LayoutError
        The array is on another device than the group's.
    """
    request, source, out, give = step.request, step.source, step.out, step.give
    assert isinstance(source, DeviceArray)
    assert out is None or isinstance(out, DeviceArray)
    check_arrays(devices, source, out)
    array = source.library.contiguous(source)
    if step.shape is None:
        array, _, _, _ = devices.registered.settled(request, array, None, None)
        ready = ready_of(devices, step, array, None, None)
        own = _own((array, source))
        return DeviceAction(devices, ready, lambda: devices.knows(request), [array, source], None, None, give, own)
    array, wanted, late = _placed(array, step.shape, request.dtype, out, may_alias=may_alias)
    array, target, late, place = devices.registered.settled(request, array, wanted, late)
    arrays = [array, source] if out is None else [array, source, out]
    ready = ready_of(devices, step, array, target, place)
    own = _own((array, source), (target, target if late is None else late))
    return DeviceAction(devices, ready, lambda: devices.knows(request, place), arrays, target, late, give, own)


def copied(devices: Devices, local: Local) -> DeviceAction:
    """Prepare a copy on the caller's stream, in which no other rank takes part; raises as `collective`."""
    source, out, give = local.source, local.out, local.give
    assert isinstance(source, DeviceArray)
    assert out is None or isinstance(out, DeviceArray)
    check_arrays(devices, source, out)
    array, target, late = _placed(source.library.contiguous(source), source.shape, source.dtype, out, may_alias=True)
    arrays = [array, source] if out is None else [array, source, out]
    own = _own((array, source), (target, target if late is None else late))
    return DeviceAction(devices, None, lambda: True, arrays, target, late, give, own)


def _own(*pairs: tuple[DeviceArray | None, DeviceArray | None]) -> list[DeviceArray]:
    """Return the arrays that stand in place of the caller's, each given with the one that it stands for."""
    return [used for used, callers in pairs if used is not None and used is not callers]


def _placed(
    array: DeviceArray, shape: tuple[int, ...], dtype: np.dtype[Any], out: DeviceArray | None, *, may_alias: bool
) -> tuple[DeviceArray, DeviceArray, DeviceArray | None]:
    """Return the input, which shares no memory with the result unless both may be the very same, the result, and where that is then copied to."""
    if out is not None:
        check_device_out(out, shape, dtype)
        if out.is_contiguous:
            if _overlap(array, out) and not (may_alias and (array.pointer, array.nbytes) == (out.pointer, out.nbytes)):
                apart = array.library.empty(array.shape, array.dtype, array.device)
                array.library.copy(apart, array)
                array = apart
            return array, out, None
    return array, array.library.empty(shape, dtype, array.device), out


def message(devices: Devices, step: Message) -> DeviceAction:
    """Prepare a send, a receive, or both; raises as `collective`."""
    source, out, give = step.outgoing, step.target, step.give
    outgoing = (source, step.dest) if isinstance(source, DeviceArray) and step.dest is not None else None
    incoming = (out, step.source) if isinstance(out, DeviceArray) and step.source is not None else None
    arrays = [flow[0] for flow in (outgoing, incoming) if flow is not None]
    for array in arrays:
        _check_device(devices, array)
    sent = None if outgoing is None else (_outside(devices, outgoing[0]), outgoing[1])
    target, late = None, None
    if incoming is not None:
        target = incoming[0]
        check_dtype(target.dtype)
        is_apart = target.is_contiguous and not devices.registered.has(target.pointer)
        if not is_apart or (sent is not None and _overlap(sent[0], target)):
            target, late = target.library.empty(target.shape, target.dtype, target.device), target
    received = None if target is None or incoming is None else (target, incoming[1])

    def ready(deadline: Deadline, _ahead: int) -> Enqueue:
        prepared, place = devices.ready_messages(sent, received, deadline)
        return lambda stream, keep: devices.launch(
            prepared, place, place, stream, keep, deadline.timeout_s, is_collective=False
        )

    if sent is not None and incoming is not None:
        _check_libraries(sent[0], incoming[0])
    arrays = [flow[0] for flow in (sent, received, outgoing, incoming) if flow is not None]
    own = _own(
        (sent and sent[0], source if isinstance(source, DeviceArray) else None), (target, target if late is None else late)
    )
    return DeviceAction(devices, ready, lambda: devices.knows_messages(sent, received), arrays, target, late, give, own)


def _outside(devices: Devices, array: DeviceArray) -> DeviceArray:
    """Return a C-contiguous array that a message may come from: outside registered memory."""
    if not array.is_contiguous or not devices.registered.has(array.pointer):
        return array.library.contiguous(array)
    apart = array.library.empty(array.shape, array.dtype, array.device)
    array.library.copy(apart, array)
    return apart


def ready_of(
    devices: Devices, step: Operation, source: DeviceArray, target: DeviceArray | None, place: Place | None = None
) -> Ready | None:
    """Return what agrees on a collective and enqueues it on C-contiguous memory; None in a world of one, where a copy by the library does it."""
    if devices.channel is None:
        return None

    def ready(deadline: Deadline, ahead: int) -> Enqueue:
        prepared = devices.ready(step.request, deadline, is_agreed=step.is_agreed, ahead=ahead, place=place)
        to, timeout_s = 0 if target is None else target.pointer, deadline.timeout_s
        return lambda stream, keep: devices.launch(prepared, source.pointer, to, stream, keep, timeout_s)

    return ready


class Aside:
    """The caller's streams at a point, behind which a call is to run whose arrays are not all known yet.

    To be made in the caller's thread.

    Parameters
    ----------
    devices
        The group's calls on devices.
    arrays
        Those that are known.

    Raises
    ------
    LayoutError
        One is not contiguous.
    UnsupportedError
        A stream is being captured.
    """

    def __init__(self, devices: Devices, arrays: Sequence[DeviceArray]) -> None:
        if not all(array.is_contiguous for array in arrays):
            raise LayoutError(STRIDED)
        if any(devices.registered.has(array.pointer) for array in arrays):
            raise LayoutError(_REGISTERED)
        # What the root scatters is not known yet, nor whose array this rank will get.
        libraries = [arrays[0].library] if arrays else present()
        channel = devices.channel
        assert channel is not None
        self._devices = devices
        self._device = channel.device
        self._starts = begin(devices, libraries)
        self._streams = [(library, library.stream(channel.device)[1]) for library in libraries]

    @contextmanager
    def streams(self) -> Iterator[None]:
        """Let memory that is made in a block, in another thread, belong to the caller's streams."""
        with ExitStack() as blocks:
            for library, keep in self._streams:
                blocks.enter_context(library.using(keep, self._device))
            yield

    def place(self, action: DeviceAction) -> None:
        """Let a call run behind the point, and behind what the stream may still do with memory that it has just given out again."""
        if not action.is_copy:
            action.starts = [*self._starts, *begin(self._devices, [action.library])]


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
        raise DTypeError(f"out= has dtype {out.dtype}, and the result has {dtype}: give out= an array of that dtype")
    if out.shape != shape:
        raise SizeMismatchError(f"out= has shape {out.shape}, and the result has {shape}: give out= an array of that shape")


def _overlap(one: DeviceArray, other: DeviceArray) -> bool:
    return one.pointer < other.pointer + other.nbytes and other.pointer < one.pointer + one.nbytes
