"""The interface of a backend for arrays on GPUs: the classes that a plugin implements in addition to, or instead of, a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from oneaccord.contract.deadline import Deadline
    from oneaccord.schedule.steps import Collective

__all__ = ["DeviceCall", "DeviceChannel", "DeviceEvent", "DeviceFailure", "DeviceMeeting", "Launch"]


class DeviceFailure(Exception):
    """The library that moves device memory failed. A channel raises or returns it; core informs every rank.

    Parameters
    ----------
    reason
        The library's own message.
    is_remote
        Whether it blames another rank, or the way to it.
    is_passing
        Whether nothing is broken, and the call may be tried again later: a stream is being captured.
    """

    def __init__(self, reason: str, *, is_remote: bool = False, is_passing: bool = False) -> None:
        super().__init__(reason)
        self.reason: str = reason
        self.is_remote: bool = is_remote
        self.is_passing: bool = is_passing


Launch = Callable[[int, int, int], None]
"""``launch(source, target, stream)``: enqueue a call that was prepared on a stream, and return at once.

``source`` and ``target`` are addresses of C-contiguous device memory, 0 if this rank holds none; they may be the same for all_reduce,
reduce and broadcast. ``stream`` is the handle of a CUDA stream, never that of the thread's own default stream. Raises `DeviceFailure`, or
TimeoutError if the library waits in vain for another rank.
"""


@dataclass(frozen=True, slots=True)
class DeviceCall:
    """A kind of call on device memory: everything that its launch depends on, except the addresses.

    Attributes
    ----------
    collective
        The collective; never a barrier.
    dtype
        The dtype of the arrays.
    elements
        How many elements this rank's input has; for broadcast, how many the root's input has.
    counts
        Elements in each rank's block, in the order of ranks, if the collective divides by ranks. For all_to_all, the elements
        that this rank sends to each rank.
    receive_counts
        For all_to_all, the elements that this rank receives.
    op
        The name of the reduction, which may be ``"mean"``, if there is one.
    root
        The root's number in the group; -1 for none.
    reproducible
        Whether the bits of the result must not depend on how it is computed.
    is_even
        For all_to_all, whether all blocks of all ranks have one size. Equal counts on this rank do not show that: the counts of other ranks may
        differ.
    """

    collective: Collective
    dtype: np.dtype[Any]
    elements: int
    counts: tuple[int, ...] = ()
    receive_counts: tuple[int, ...] = ()
    op: str | None = None
    root: int = -1
    reproducible: bool = False
    is_even: bool = False


class DeviceEvent(ABC):
    """A point in the work of a stream."""

    __slots__ = ()

    @abstractmethod
    def done(self) -> bool:
        """Return whether the stream has come to it. Never blocks."""

    @abstractmethod
    def hold(self, stream: int) -> None:
        """Let a stream wait, on the device, until this point is reached. Never blocks.

        Parameters
        ----------
        stream
            Its handle.
        """


class DeviceChannel(ABC):
    """The calls of one group on the memory of this rank's device. Core launches one at a time, in the same order on all ranks.

    Attributes
    ----------
    device
        The number of the device.
    stream
        The handle of a non-blocking stream of its own, for calls that the program does not wait for.
    library
        What moves the bytes, in words, such as ``"NCCL 2.32.3"``.
    accumulate
        The dtype in which sums and means of narrower floats are computed, alike on all ranks; None for that of the arrays. Core converts the
        arrays on the device, before the call and after it, and `prepare` gets the wide dtype.
    """

    device: int
    stream: int
    library: str
    accumulate: np.dtype[Any] | None = None

    @abstractmethod
    def prepare(self, call: DeviceCall) -> Launch:
        """Return a function that launches calls of a kind. Core gets one for each kind, and may launch it any number of times.

        Parameters
        ----------
        call
            The kind.

        Returns
        -------
        Launch
            The function that launches.

        Raises
        ------
        UnsupportedError
            The library cannot do that. All ranks raise it alike, and the message gives the remedy.
        """

    @abstractmethod
    def prepare_send(self, dtype: np.dtype[Any], elements: int, dest: int) -> Launch:
        """Return a function that sends arrays of a kind to another rank of the group; its target is not used.

        Parameters
        ----------
        dtype, elements
            The arrays: their dtype, and how many elements they have.
        dest
            The other rank's number in the group.

        Returns
        -------
        Launch
            The function that launches.
        """

    @abstractmethod
    def prepare_recv(self, dtype: np.dtype[Any], elements: int, source: int) -> Launch:
        """Return a function that receives arrays of a kind from another rank of the group; its source is not used.

        Parameters
        ----------
        dtype, elements
            As for `prepare_send`.
        source
            The other rank's number in the group.

        Returns
        -------
        Launch
            The function that launches.
        """

    @abstractmethod
    def together(self) -> AbstractContextManager[None]:
        """Return a context manager that enqueues the launches of its block as one.

        Each stream of the launches then waits for the others. Leaving the block may raise `DeviceFailure`.
        """

    def communicator(self) -> int:
        """Return the address of what the library itself calls this channel, such as an ``ncclComm_t``; 0 where it has none."""
        return 0

    def allocate(self, nbytes: int) -> int | None:
        """Return the address of new memory of the device that `register` takes; None, alike on all ranks, where the library has no such memory.

        Parameters
        ----------
        nbytes
            How much; at least 1.

        Raises
        ------
        MemoryError
            There is not so much.
        """
        return None

    def register(self, pointer: int, nbytes: int, deadline: Deadline) -> None:
        """Make memory of `allocate` known to the library. All ranks do so together, with memory of the same size each.

        Core uses such memory for launches of all_reduce, and of all_gather, reduce_scatter and all_to_all with even blocks, alone, and at the
        same place in the same memory on all ranks.

        Parameters
        ----------
        pointer, nbytes
            The memory.
        deadline
            Until when the others must have come; TimeoutError is raised where they do not.
        """
        raise NotImplementedError

    def free(self, pointers: Sequence[int]) -> None:
        """Give memory of `allocate` back, whether it is registered or not.

        Of registered memory, all ranks give the same back, in the same order. The device is done with it.

        Parameters
        ----------
        pointers
            Its addresses.
        """
        raise NotImplementedError

    def abandon(self, pointer: int) -> None:
        """Note that the program can reach memory of `allocate` no more.

        Unless `free` is called for it, it is given back when the library has forgotten it, after `close` or after an abort; at once if that is so.
        Takes no lock and never blocks, since it is called while garbage is collected.

        Parameters
        ----------
        pointer
            Its address.
        """
        raise NotImplementedError

    def is_captured(self, pointer: int) -> bool:
        """Return whether a CUDA graph holds launches on memory of `allocate`. Core does not give such memory to `free`.

        Parameters
        ----------
        pointer
            Its address.
        """
        return False

    def settle(self, deadline: Deadline) -> None:
        """Wait until the device has done all that this process has queued so far; raise TimeoutError where it does not.

        Raises `DeviceFailure` that is passing while a stream of the device is captured, by whichever thread.

        Parameters
        ----------
        deadline
            Until when.
        """
        raise NotImplementedError

    def watch(self) -> None:  # noqa: B027 - most libraries need not know
        """Note that the calling thread, one of core's, will watch the launches, also while streams are captured."""

    @abstractmethod
    def record(self, stream: int) -> DeviceEvent:
        """Return an event after everything that has been enqueued on a stream so far. Never blocks.

        Parameters
        ----------
        stream
            Its handle.

        Returns
        -------
        DeviceEvent
            The event.
        """

    @abstractmethod
    def is_capturing(self, stream: int) -> bool:
        """Return whether calls that are enqueued on a stream now become part of a CUDA graph.

        Parameters
        ----------
        stream
            Its handle.
        """

    @abstractmethod
    def failure(self) -> DeviceFailure | None:
        """Return the failure since a launch, or None. A thread of core calls it now and then; never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of this channel, when all launches have ended or the backend was aborted. Blocks for seconds at
        most.
        """


@dataclass(frozen=True, slots=True)
class DeviceMeeting:
    """How the members of a group meet to open a device channel; all of them do so.

    Attributes
    ----------
    ranks
        The members, as ranks of the world, in the order of their numbers in the group.
    rank
        This rank's number in the group.
    exchange
        ``exchange(name, card)`` gives this rank's card of at most 64 KiB, and returns those of all members in their order; raises the error that
        ends the job.
    deadline
        By when the channel must be open.
    """

    ranks: Sequence[int]
    rank: int
    exchange: Callable[[str, bytes], list[bytes]]
    deadline: Deadline
