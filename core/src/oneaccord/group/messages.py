"""Calls that move an array from one rank to one other: ``send``, ``recv`` and ``sendrecv``."""

from __future__ import annotations

from typing import overload

import numpy.typing as npt

from oneaccord.arrays.memory import NOTHING, Array
from oneaccord.calls.runner import Calls
from oneaccord.calls.work import Work

__all__ = ["MessageCalls"]


class MessageCalls(Calls):
    """The calls of a group that move an array from one rank to one other.

    None as a peer is no rank, like MPI's PROC_NULL: nothing is sent there, and nothing comes from there. So ranks at the edge of
    a grid need no branch of their own.
    """

    def send(self, array: npt.ArrayLike, dest: int | None, *, timeout_s: float | None = None) -> None:
        """Send an array to one rank, which must `recv` it.

        A small array may still be on its way when the call returns. If it does not fit, or no rank receives it, a later call or
        `close` raises the error.

        Parameters
        ----------
        array
            Any shape of at most 32 dimensions, any dtype.
        dest
            The rank to send to; with None, nothing is sent.
        timeout_s
            Seconds that the call may last.

        Raises
        ------
        InvalidRankError
            ``dest`` is not in the group.
        SelfSendError
            ``dest`` is this rank.
        """
        if type(dest) is not int:
            dest = self._builder.arguments.peer_or_nobody(dest, "dest")
        self._call(("send", dest), array, None, timeout_s)

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
            The rank to receive from; with None, nothing is received.
        out
            The array for the received data; the sender's must have the same shape and dtype.
        timeout_s
            Seconds that the call may last.

        Returns
        -------
        ndarray or None
            ``out``, or a new array of the sender's shape and dtype. If ``source`` is None: ``out`` as it was, or None without
            it.

        Raises
        ------
        InvalidRankError
            ``source`` is not in the group.
        SelfSendError
            ``source`` is this rank.
        """
        if type(source) is not int:
            source = self._builder.arguments.peer_or_nobody(source, "source")
        received: Array | None = self._call(("recv", source), NOTHING, out, timeout_s)
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
        """Send an array to one rank, and at once receive one from the same or another rank, so that exchanges cannot deadlock.

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
        received: Array | None = self._call(("sendrecv", dest, source), array, out, timeout_s)
        return received

    def send_async(self, array: npt.ArrayLike, dest: int | None, *, timeout_s: float | None = None) -> Work[None]:
        """Begin a `send`; the array may be written to when the work is done."""
        return self._call_async(("send", dest), array, None, timeout_s, reads=None if dest is None else array)

    @overload
    def recv_async(self, source: int, *, out: Array | None = None, timeout_s: float | None = None) -> Work[Array]: ...
    @overload
    def recv_async(self, source: int | None, *, out: Array, timeout_s: float | None = None) -> Work[Array]: ...
    @overload
    def recv_async(self, source: int | None, *, out: None = None, timeout_s: float | None = None) -> Work[Array | None]: ...
    def recv_async(
        self, source: int | None, *, out: Array | None = None, timeout_s: float | None = None
    ) -> Work[Array] | Work[Array | None]:
        """Begin a `recv`; ``wait()`` of the work returns the array."""
        return self._call_async(("recv", source), NOTHING, out, timeout_s, writes=(out,))
