"""Calls that move an array from one rank to one other: ``send``, ``recv`` and ``sendrecv``."""

from __future__ import annotations

from typing import Any, overload

import numpy as np
import numpy.typing as npt

from manyhands.arrays.buffers import Give, Memory
from manyhands.arrays.dtypes import check_dtype
from manyhands.arrays.libraries import DeviceArray
from manyhands.arrays.memory import Array, check_out, contiguous, copy_of, handed_over, new_array, placed
from manyhands.calls.devices.actions import copied, message
from manyhands.calls.failures import check_usable
from manyhands.calls.requests import Action
from manyhands.calls.runner import Calls
from manyhands.calls.work import Work
from manyhands.contract.deadline import Deadline
from manyhands.errors import LayoutError

__all__ = ["MessageCalls"]

_INT64 = np.dtype(np.int64)


class MessageCalls(Calls):
    """The calls of a group that move an array from one rank to one other.

    None as a peer is nobody, as MPI's PROC_NULL is: nothing is sent there, and nothing comes from there. So ranks at the edge of
    a grid need no branch of their own.
    """

    def send(self, array: npt.ArrayLike, dest: int | None, *, timeout_s: float | None = None) -> None:
        """Send an array to one rank, which must `recv` it.

        A small array may be on its way when the call returns: that it does not fit, or is never received, a later call or `close` says.

        Parameters
        ----------
        array
            Any shape of at most 32 dimensions, any dtype.
        dest
            The rank to send to; None for nobody, so that nothing is sent.
        timeout_s
            Seconds that the call may last.

        Raises
        ------
        InvalidRankError
            ``dest`` is not in the group.
        SelfSendError
            ``dest`` is this rank.
        """
        self._between(self._send(array, dest), timeout_s)

    @overload
    def recv(self, source: int, *, out: Array | None = None, timeout_s: float | None = None) -> Array: ...
    @overload
    def recv(self, source: int | None, *, out: Array, timeout_s: float | None = None) -> Array: ...
    @overload
    def recv(self, source: int | None, *, out: None = None, timeout_s: float | None = None) -> Array | None: ...
    def recv(self, source: int | None, *, out: Array | None = None, timeout_s: float | None = None) -> Array | None:
        """Receive the next array that ``source`` sends to this rank.

        Parameters
        ----------
        source
            The rank to receive from; None for nobody, so that nothing comes.
        out
            Where the array goes; the sender's must have the same shape and dtype.
        timeout_s
            Seconds that the call may last.

        Returns
        -------
        ndarray or None
            ``out``, or a new array of the sender's shape and dtype. Where ``source`` is None, ``out`` as it was, or None without it.

        Raises
        ------
        InvalidRankError
            ``source`` is not in the group.
        SelfSendError
            ``source`` is this rank.
        """
        received: Array | None = self._between(self._recv(source, out), timeout_s)
        return received

    @overload
    def sendrecv(
        self, array: npt.ArrayLike, dest: int | None, source: int, *, out: Array | None = None, timeout_s: float | None = None
    ) -> Array: ...
    @overload
    def sendrecv(
        self, array: npt.ArrayLike, dest: int | None, source: int | None, *, out: Array, timeout_s: float | None = None
    ) -> Array: ...
    @overload
    def sendrecv(
        self, array: npt.ArrayLike, dest: int | None, source: int | None, *, out: None = None, timeout_s: float | None = None
    ) -> Array | None: ...
    def sendrecv(
        self,
        array: npt.ArrayLike,
        dest: int | None,
        source: int | None,
        *,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Array | None:
        """Send an array to one rank and receive one from another, or the same, at once; so that exchanges cannot deadlock.

        Parameters
        ----------
        array, dest
            As for `send`.
        source, out
            As for `recv`. ``dest`` and ``source`` may both be this rank, which then gets a copy.
        timeout_s
            Seconds that the call may last.

        Returns
        -------
        ndarray or None
            As for `recv`.

        Raises
        ------
        InvalidRankError
            ``dest`` or ``source`` is not in the group.
        SelfSendError
            One of them is this rank, and the other is not.
        DTypeError, SizeMismatchError
            Both are this rank, and ``out`` is not like ``array``.
        """
        result = self._between(self._sendrecv(array, dest, source, out), timeout_s)
        return out if source is None else result

    def send_async(self, array: npt.ArrayLike, dest: int | None, *, timeout_s: float | None = None) -> Work[None]:
        """Begin a `send`; the array may be written to when the work is done."""
        action = self._send(array, dest, has_turn=True)
        lane = self._operations.peers.lane(self._in_world(dest), is_send=True)
        return self._later(f"send to rank {dest}", action, timeout_s, lane, reads=None if dest is None else array)

    @overload
    def recv_async(self, source: int, *, out: Array | None = None, timeout_s: float | None = None) -> Work[Array]: ...
    @overload
    def recv_async(self, source: int | None, *, out: Array, timeout_s: float | None = None) -> Work[Array]: ...
    @overload
    def recv_async(self, source: int | None, *, out: None = None, timeout_s: float | None = None) -> Work[Array | None]: ...
    def recv_async(
        self, source: int | None, *, out: Array | None = None, timeout_s: float | None = None
    ) -> Work[Array] | Work[Array | None]:
        """Begin a `recv`; the array is the result of the work."""
        action = self._recv(source, out, has_turn=True)
        lane = self._operations.peers.lane(self._in_world(source), is_send=False)
        return self._later(f"recv from rank {source}", action, timeout_s, lane, writes=(out,))

    # What runs when a call's turn comes

    def _send(self, array: npt.ArrayLike, dest: int | None, *, has_turn: bool = False) -> Action:
        number = self._operations.arguments.peer_or_nobody(dest, "dest")
        source, _, _ = self._operations.take_message("send", array)
        self._operations.arguments.check_dimensions(source)
        return self._exchange(source, number, None, None, None, has_turn=has_turn)

    def _recv(self, source: int | None, out: Array | None, *, has_turn: bool = False) -> Action:
        number = self._operations.arguments.peer_or_nobody(source, "source")
        target, give = self._operations.take_message.receiving("recv", out)
        action = self._exchange(None, None, target, number, give, has_turn=has_turn)
        return action if number is not None else lambda deadline: action(deadline) or out

    def _sendrecv(self, array: npt.ArrayLike, dest: int | None, source: int | None, out: Array | None) -> Action:
        to, whence = self._operations.arguments.partners(dest, source)
        outgoing, target, give = self._operations.take_message("sendrecv", array, out)
        self._operations.arguments.check_dimensions(outgoing)
        if to is not None and to == self._members.rank:
            return self._copy(outgoing, target, give)
        if isinstance(outgoing, DeviceArray) and target is None and whence is not None:
            raise LayoutError("sendrecv of an array on a GPU needs out=: nothing else tells where the other array is to go")
        return self._exchange(outgoing, to, target, whence, give)

    def _exchange(
        self,
        outgoing: Memory | None,
        dest: int | None,
        out: Memory | None,
        source: int | None,
        give: Give | None,
        *,
        has_turn: bool = False,
    ) -> Action:
        """Prepare to send to one rank of the group and to receive from one, each where it is not None."""
        job, members, peers = self._job, self._members, self._operations.peers
        if out is not None and not isinstance(out, DeviceArray):
            check_out(out, getattr(out, "shape", ()), getattr(out, "dtype", _INT64))
            check_dtype(out.dtype)
        if dest is None and source is None:
            return lambda _: check_usable(job, members.number)
        if isinstance(outgoing, DeviceArray) or isinstance(out, DeviceArray):
            sent = (outgoing, dest) if isinstance(outgoing, DeviceArray) and dest is not None else None
            received = (out, source) if isinstance(out, DeviceArray) and source is not None else None
            return message(self._operations.devices, sent, received, give)
        to, whence = None if dest is None else members.ranks[dest], None if source is None else members.ranks[source]
        sending = None if to is None or outgoing is None else contiguous(outgoing)
        if sending is not None and out is not None and np.may_share_memory(sending, out):
            sending = copy_of(sending)
        target = out if out is None or out.flags.c_contiguous else new_array(out.shape, out.dtype)

        def action(deadline: Deadline) -> Any:
            result = peers.exchange(sending, to, whence, target, deadline, has_turn=has_turn)
            if whence is None:
                return None
            return handed_over(result, out) if give is None else give(handed_over(result, out))

        return action

    def _copy(self, source: Memory, out: Memory | None, give: Give | None) -> Action:
        """Prepare what a rank sends to itself."""
        job, members = self._job, self._members
        if isinstance(source, DeviceArray):
            assert out is None or isinstance(out, DeviceArray)
            return copied(self._operations.devices, source, out, give)
        assert not isinstance(out, DeviceArray)
        memory, target = placed(source, source.shape, source.dtype, out, may_alias=True)

        def action(_: Deadline) -> Any:
            check_usable(job, members.number)
            target[...] = memory
            return handed_over(target, out) if give is None else give(handed_over(target, out))

        return action

    def _in_world(self, rank: int | None) -> int | None:
        """Return the rank of the world that a rank of the group is."""
        return None if rank is None else self._members.ranks[rank]
