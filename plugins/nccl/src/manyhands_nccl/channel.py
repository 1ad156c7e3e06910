"""The calls of one group on this rank's GPU: a communicator, a stream, and the events that order the work of streams."""

from __future__ import annotations

import contextlib
from collections import deque
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from manyhands.api import DeviceCall, DeviceChannel, DeviceEvent, DeviceFailure, Launch, UnsupportedError
from manyhands_nccl._cuda import Cuda, relax_capture
from manyhands_nccl._nccl import Communicator
from manyhands_nccl.collectives import Collectives
from manyhands_nccl.dtypes import Abilities

__all__ = ["NcclChannel"]


class NcclChannel(DeviceChannel):
    """A group's calls on the memory of a GPU.

    Parameters
    ----------
    communicator
        It is connected; the channel closes it.
    cuda, device
        The CUDA runtime, and the number of the GPU.
    rank
        This rank's number in the group.
    abilities
        What decides about reductions.

    Raises
    ------
    DeviceFailure
        CUDA gives no stream.
    """

    def __init__(self, communicator: Communicator, cuda: Cuda, device: int, rank: int, abilities: Abilities) -> None:
        self.device: int = device
        self.library: str = communicator.library.name
        self._communicator = communicator
        self._cuda = cuda
        self._collectives = Collectives(communicator.library, communicator.handle, rank, abilities)
        self._get_device = cuda.runtime.getDevice
        self._is_closed = False
        with cuda.on(device):
            self.stream: int = cuda.new_stream()
        self._events = _Events(cuda, device)

    def prepare(self, call: DeviceCall) -> Launch:
        """Return what launches calls of a kind; refuse what NCCL does not do."""
        try:
            enqueue = self._collectives.prepare(call)
        except UnsupportedError as error:
            error.operation = call.collective.value
            raise
        return self._launch_of(enqueue)

    def prepare_send(self, dtype: np.dtype[Any], elements: int, dest: int) -> Launch:
        """Return what sends arrays of a kind."""
        return self._launch_of(self._collectives.send(elements * dtype.itemsize, dest))

    def prepare_recv(self, dtype: np.dtype[Any], elements: int, source: int) -> Launch:
        """Return what receives arrays of a kind."""
        return self._launch_of(self._collectives.recv(elements * dtype.itemsize, source))

    def _launch_of(self, enqueue: Launch | None) -> Launch:
        return _nothing if enqueue is None else self._communicator.guard(enqueue)

    def together(self) -> AbstractContextManager[None]:
        """Return a block whose launches are one group of NCCL's."""
        return self._communicator.group()

    def watch(self) -> None:
        """Let the calling thread look at events while another one captures in the strictest mode, which forbids that to all others."""
        relax_capture()
        with contextlib.suppress(self._cuda.error):  # what is wrong with the device is told by what follows
            self._cuda.runtime.setDevice(self.device)  # for good, since the thread is core's

    def record(self, stream: int) -> DeviceEvent:
        """Return the point that a stream has come to by now."""
        if self._get_device() == self.device:
            return self._record(stream)
        with self._cuda.on(self.device):
            return self._record(stream)

    def _record(self, stream: int) -> DeviceEvent:
        try:
            event = _Event(self._events)
            self._cuda.runtime.eventRecord(event.handle, stream)
        except self._cuda.error as error:
            raise self._cuda.failure(error) from error
        return event

    def is_capturing(self, stream: int) -> bool:
        """Tell whether a stream is being captured into a graph."""
        with contextlib.nullcontext() if self._get_device() == self.device else self._cuda.on(self.device):
            try:
                return bool(self._cuda.runtime.streamIsCapturing(stream))
            except self._cuda.error as error:
                if getattr(error, "status", 0) == _IMPLICIT:
                    return True  # another stream is being captured, with which the default stream is in one order
                raise self._cuda.failure(error) from error
            except RuntimeError:  # CuPy's own: the capture has become invalid, and goes on until the program ends it
                return True

    def failure(self) -> DeviceFailure | None:
        """Return what has failed since a launch."""
        return self._communicator.failure()

    def abort(self, reason: str) -> None:
        """Begin to end all that is under way; returns at once."""
        self._communicator.abort(reason)

    def close(self) -> None:
        """Give back the communicator, the stream and the events; twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        self._communicator.close()
        self._events.close()
        with contextlib.suppress(Exception), self._cuda.on(self.device):  # a device that has failed refuses even this
            self._cuda.runtime.streamDestroy(self.stream)


_IMPLICIT = 906  # cudaErrorStreamCaptureImplicit


def _nothing(source: int, target: int, stream: int) -> None:
    """Launch a call that moves nothing."""


class _Events:
    """Events of CUDA's that are used again and again: to make one takes longer than to record it."""

    def __init__(self, cuda: Cuda, device: int) -> None:
        self.cuda = cuda
        self.device = device
        self._free: deque[int] = deque()
        self._is_closed = False

    def take(self) -> int:
        """Return an event of the current device."""
        try:
            return self._free.pop()
        except IndexError:
            return self.cuda.new_event()

    def give(self, handle: int) -> None:
        """Take an event back that nobody uses any more."""
        self._free.append(handle)
        if self._is_closed:
            self._destroy()

    def close(self) -> None:
        """Destroy all events; those in use follow when they are given back."""
        self._is_closed = True
        self._destroy()

    def _destroy(self) -> None:
        with contextlib.suppress(Exception):  # the device may have failed, or the interpreter be at its end
            while True:
                self.cuda.runtime.eventDestroy(self._free.pop())


class _Event(DeviceEvent):
    __slots__ = ("_events", "handle")

    def __init__(self, events: _Events) -> None:
        self._events = events
        self.handle: int = events.take()

    def done(self) -> bool:
        """Tell whether the stream has come to it."""
        return self._events.cuda.is_past(self.handle)

    def hold(self, stream: int) -> None:
        """Let a stream wait for it."""
        cuda, device = self._events.cuda, self._events.device
        try:
            if cuda.runtime.getDevice() == device:
                cuda.runtime.streamWaitEvent(stream, self.handle)
            else:
                with cuda.on(device):
                    cuda.runtime.streamWaitEvent(stream, self.handle)
        except cuda.error as error:
            raise cuda.failure(error) from error

    def __del__(self) -> None:
        # What waits for an event waits for the point where it was recorded, also when it is recorded again elsewhere.
        if hasattr(self, "handle"):
            self._events.give(self.handle)
