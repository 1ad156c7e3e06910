"""Calls that move an array from one rank to one other: ``send``, ``recv`` and ``sendrecv``."""

from __future__ import annotations

from typing import Any, overload

import numpy.typing as npt

from oneaccord.arrays.memory import NOTHING, Array
from oneaccord.calls.post.messages import ANY, AnyRank, AnyTag
from oneaccord.calls.post.status import Status
from oneaccord.calls.work import Work
from oneaccord.group.tagged import Mode, TaggedCalls, needs_tag

__all__ = ["MessageCalls"]


class MessageCalls(TaggedCalls):
    """The calls of a group that move an array from one rank to one other.

    None as a peer is no rank, like MPI's PROC_NULL: nothing is sent there, and nothing comes from there. So ranks at the edge of
    a grid need no branch of their own.

    With ``tag=``, messages are as in MPI: the receiver chooses by tag and sender, any number may be on their way, and a rank may send to itself.
    A message that was sent with a tag is received only with one.
    """

    def send(
        self,
        array: npt.ArrayLike,
        dest: int | None,
        *,
        tag: int | None = None,
        mode: Mode = "standard",
        timeout_s: float | None = None,
    ) -> None:
        """Send an array to one rank, which must `recv` it.

        A small array may still be on its way when the call returns. Without a tag, a later call or `close` raises an error if no rank receives the
        array, or if it does not fit the receive. With a tag, the receive raises the error if the array does not fit, and `close` if no rank receives it.

        Parameters
        ----------
        array
            Any shape of at most 32 dimensions, any dtype.
        dest
            The rank to send to; with None, nothing is sent. With a tag it may be this rank.
        tag
            An integer from 0 to 2**63 - 1; by default the message has none.
        mode
            Only with a tag. ``"sync"`` returns once the message has met its receive. ``"buffered"`` copies the array and returns at once. ``"ready"`` promises
            that the receive has begun; if it has not, that is a mismatch. ``"standard"`` returns once the array may be written to.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Raises
        ------
        InvalidRankError
            ``dest`` is not in the group.
        SelfSendError
            ``dest`` is this rank, and there is no tag.
        UsageError
            ``tag`` is not an integer from 0 to 2**63 - 1, or ``mode`` is unknown, or given without ``tag``.
        """
        if tag is not None:
            self._send_tagged(array, dest, tag, mode, timeout_s)
            return
        if mode != "standard":
            raise needs_tag(f"mode={mode!r}")
        if type(dest) is not int:
            dest = self._builder.arguments.peer_or_nobody(dest, "dest")
        self._call(("send", dest), array, None, timeout_s)

    @overload
    def recv(
        self,
        source: int | AnyRank = ANY,
        *,
        tag: int | AnyTag | None = None,
        out: Array | None = None,
        status: Status | None = None,
        timeout_s: float | None = None,
    ) -> Array: ...
    @overload
    def recv(
        self,
        source: int | AnyRank | None,
        *,
        tag: int | AnyTag | None = None,
        out: Array,
        status: Status | None = None,
        timeout_s: float | None = None,
    ) -> Array: ...
    @overload
    def recv(
        self,
        source: int | AnyRank | None,
        *,
        tag: int | AnyTag | None = None,
        out: None = None,
        status: Status | None = None,
        timeout_s: float | None = None,
    ) -> Array | None: ...
    def recv(
        self,
        source: int | AnyRank | None = ANY,
        *,
        tag: int | AnyTag | None = None,
        out: Array | None = None,
        status: Status | None = None,
        timeout_s: float | None = None,
    ) -> Array | None:
        """Receive the next array that ``source`` sends to this rank.

        Parameters
        ----------
        source
            The rank to receive from; with None, nothing is received. `oneaccord.ANY`, the default, takes a message of any rank, and needs a tag.
        tag
            The tag that the message must have, or `oneaccord.ANY_TAG`; by default it must have none.
        out
            The array for the received data. Without a tag it must have the shape and dtype of the sender's. With a tag, it may be larger: the data
            is at its beginning, in C order.
        status
            Only with a tag: a `Status` to fill with the sender, the tag and the size.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

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
            ``source`` is this rank, and there is no tag.
        SizeMismatchError
            A message with a tag is larger than ``out``. It is lost, and the group stays usable.
        DTypeError
            A message with a tag has another dtype than ``out``, or is an object. It is lost, and the group stays usable.
        UsageError
            ``tag`` is not an integer from 0 to 2**63 - 1, or ``ANY`` or ``status`` was given without one.
        """
        if tag is not None:
            received: Array | None = self._recv_tagged(source, tag, out, status, timeout_s)
            return received
        if type(source) is not int:
            if source is ANY:
                raise needs_tag("any source")
            source = self._builder.arguments.peer_or_nobody(source, "source")
        if status is not None:
            raise needs_tag("status=")
        came: Array | None = self._call(("recv", source), NOTHING, out, timeout_s)
        return came

    @overload
    def sendrecv(
        self,
        array: npt.ArrayLike,
        dest: int | None,
        source: int | AnyRank,
        *,
        tag: int | None = None,
        recv_tag: int | AnyTag | None = None,
        out: Array | None = None,
        status: Status | None = None,
        timeout_s: float | None = None,
    ) -> Array: ...
    @overload
    def sendrecv(
        self,
        array: npt.ArrayLike,
        dest: int | None,
        source: int | AnyRank | None,
        *,
        tag: int | None = None,
        recv_tag: int | AnyTag | None = None,
        out: Array,
        status: Status | None = None,
        timeout_s: float | None = None,
    ) -> Array: ...
    @overload
    def sendrecv(
        self,
        array: npt.ArrayLike,
        dest: int | None,
        source: int | AnyRank | None,
        *,
        tag: int | None = None,
        recv_tag: int | AnyTag | None = None,
        out: None = None,
        status: Status | None = None,
        timeout_s: float | None = None,
    ) -> Array | None: ...
    def sendrecv(
        self,
        array: npt.ArrayLike,
        dest: int | None,
        source: int | AnyRank | None,
        *,
        tag: int | None = None,
        recv_tag: int | AnyTag | None = None,
        out: Array | None = None,
        status: Status | None = None,
        timeout_s: float | None = None,
    ) -> Array | None:
        """Send an array to one rank, and at once receive one from the same or another rank, so that exchanges cannot deadlock.

        Parameters
        ----------
        array, dest
            As for `send`.
        source, out, status
            As for `recv`. ``dest`` and ``source`` may both be this rank, which then gets a copy.
        tag
            The tag of the sent message; by default neither has one.
        recv_tag
            As ``tag`` for `recv`, and only with ``tag``; by default the same as ``tag``.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        ndarray or None
            As for `recv`.

        Raises
        ------
        InvalidRankError
            ``dest`` or ``source`` is not in the group.
        SelfSendError
            One of them is this rank, the other is not, and there is no tag.
        DTypeError, SizeMismatchError
            Both are this rank, and ``out`` is not like ``array``; with a tag as for `recv`.
        UsageError
            As for `send` and `recv`.
        """
        if tag is not None:
            tags = tag, tag if recv_tag is None else recv_tag
            received: Array | None = self._sendrecv_tagged(array, dest, source, tags, out, status, timeout_s, later=False)
            return received
        if recv_tag is not None or status is not None or source is ANY:
            raise needs_tag("any source, recv_tag= or status=")
        came: Array | None = self._call(("sendrecv", dest, source), array, out, timeout_s)
        return came

    def send_async(
        self,
        array: npt.ArrayLike,
        dest: int | None,
        *,
        tag: int | None = None,
        mode: Mode = "standard",
        timeout_s: float | None = None,
    ) -> Work[None]:
        """Begin a `send`; the array may be written to when the work is done."""
        if tag is not None:
            return self._send_later(array, dest, tag, mode, timeout_s)
        if mode != "standard":
            raise needs_tag(f"mode={mode!r}")
        return self._call_async(("send", dest), array, None, timeout_s, reads=None if dest is None else array)

    @overload
    def recv_async(
        self,
        source: int | AnyRank = ANY,
        *,
        tag: int | AnyTag | None = None,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Work[Array]: ...
    @overload
    def recv_async(
        self,
        source: int | AnyRank | None,
        *,
        tag: int | AnyTag | None = None,
        out: Array,
        timeout_s: float | None = None,
    ) -> Work[Array]: ...
    @overload
    def recv_async(
        self,
        source: int | AnyRank | None,
        *,
        tag: int | AnyTag | None = None,
        out: None = None,
        timeout_s: float | None = None,
    ) -> Work[Array | None]: ...
    def recv_async(
        self,
        source: int | AnyRank | None = ANY,
        *,
        tag: int | AnyTag | None = None,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Work[Array] | Work[Array | None]:
        """Begin a `recv`; ``wait()`` of the work returns the array. With a tag, its ``status`` says what came, and ``cancel()`` takes it back."""
        if tag is not None:
            work: Work[Any] = self._recv_later(source, tag, out, timeout_s)
            return work
        if source is ANY:
            raise needs_tag("any source")
        return self._call_async(("recv", source), NOTHING, out, timeout_s, writes=(out,))

    def sendrecv_async(
        self,
        array: npt.ArrayLike,
        dest: int | None,
        source: int | AnyRank | None,
        *,
        tag: int,
        recv_tag: int | AnyTag | None = None,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Work[Any]:
        """Begin a `sendrecv` with a tag; ``wait()`` of the work returns the received array."""
        tags = tag, tag if recv_tag is None else recv_tag
        work: Work[Any] = self._sendrecv_tagged(array, dest, source, tags, out, None, timeout_s, later=True)
        return work
