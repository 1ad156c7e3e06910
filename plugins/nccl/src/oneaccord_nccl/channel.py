"""The calls of one group on this rank's GPU: a communicator, a stream, and the events that order the work of streams."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from oneaccord.api import Deadline, DeviceCall, DeviceChannel, DeviceEvent, DeviceFailure, Launch, UnsupportedError
from oneaccord_nccl._cuda import Cuda
from oneaccord_nccl._driver import Driver
from oneaccord_nccl.collectives import Collectives
from oneaccord_nccl.communicator import Communicator
from oneaccord_nccl.dtypes import Abilities
from oneaccord_nccl.memory import Memory

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
        self.accumulate: np.dtype[Any] | None = abilities.accumulate
        self._communicator = communicator
        self._cuda = cuda
        self._collectives = Collectives(communicator.library, communicator.handle, rank, abilities)
        self._driver = cuda.driver
        self._context = cuda.driver.context(device)
        self._is_closed = False
        self._memory = Memory(communicator, cuda, device)
        with cuda.on(device):
            self.stream: int = cuda.new_stream()
        self._events = _Events(cuda.driver)

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
        return _nothing if enqueue is None else self._communicator.guard(enqueue, self._memory.captured)

    def together(self) -> AbstractContextManager[None]:
        """Return a block whose launches are one group of NCCL's."""
        return self._communicator.group()

    def communicator(self) -> int:
        """Return the address of the ``ncclComm_t``; 0 once it has ended."""
        return 0 if self._communicator.has_ended else int(self._communicator.handle.handle)

    def allocate(self, nbytes: int) -> int | None:
        """Return the address of memory that NCCL can register."""
        return self._memory.allocate(nbytes)

    def register(self, pointer: int, nbytes: int, deadline: Deadline) -> None:
        """Register it, on all ranks."""
        self._memory.register(pointer, nbytes)  # it waits as long as a first launch may

    def free(self, pointers: Sequence[int]) -> None:
        """Give it back."""
        self._memory.free(pointers)

    def abandon(self, pointer: int) -> None:
        """Note that the program can reach it no more."""
        self._memory.abandon(pointer)

    def is_captured(self, pointer: int) -> bool:
        """Return whether a graph holds launches on it."""
        return self._memory.is_captured(pointer)

    def settle(self, deadline: Deadline) -> None:
        """Wait until the device is done with all that was queued."""
        self._memory.settle(deadline)

    def watch(self) -> None:
        """Let the calling thread look at events while another one captures in the strictest mode, which forbids that to all others."""
        self._driver.relax_capture()
        with contextlib.suppress(DeviceFailure):  # what is wrong with the device is told by what follows
            self._driver.make_current(self._context)  # for good, since the thread is core's

    def record(self, stream: int) -> DeviceEvent:
        """Return the point that a stream has come to by now."""
        with self._here():
            event = _Event(self)
            self._driver.record(event.handle, stream)
        return event

    def is_capturing(self, stream: int) -> bool:
        """Return whether a stream is being captured into a graph."""
        with self._here():
            return self._driver.is_capturing(stream)

    def _here(self) -> AbstractContextManager[None]:
        """Return a block in which the channel's device is the current one."""
        return contextlib.nullcontext() if self._driver.current() == self._context else self._cuda.on(self.device)

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


def _nothing(source: int, target: int, stream: int) -> None:
    """Launch a call that moves nothing."""


class _Events:
    """Events of CUDA's that are used again and again: to make one takes longer than to record it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: deque[int] = deque()
        self._is_closed = False

    def take(self) -> int:
        """Return an event of the current device."""
        try:
            return self._free.pop()
        except IndexError:
            return self._driver.new_event()

    def give(self, handle: int) -> None:
        """Take an event back that is no longer used."""
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
                self._driver.destroy_event(self._free.pop())


class _Event(DeviceEvent):
    __slots__ = ("_channel", "_events", "handle")

    def __init__(self, channel: NcclChannel) -> None:
        self._channel = channel
        self._events = channel._events
        self.handle: int = self._events.take()

    def done(self) -> bool:
        """Return whether the stream has come to it."""
        return self._channel._driver.is_past(self.handle)

    def hold(self, stream: int) -> None:
        """Let a stream wait for it."""
        with self._channel._here():
            self._channel._driver.wait(stream, self.handle)

    def __del__(self) -> None:
        # What waits for an event waits for the point where it was recorded, also when it is recorded again elsewhere.
        if hasattr(self, "handle"):
            self._events.give(self.handle)
