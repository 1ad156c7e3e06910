"""Messages with tags: the part of `send`, `recv` and their like that has a tag, and what only such messages have."""
# ruff: noqa: A002 - ``type=`` is what msgspec and its users call it

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
import numpy.typing as npt

from oneaccord.arrays.buffers import Give
from oneaccord.arrays.dtypes import CODES, check_dtype
from oneaccord.arrays.libraries import DeviceArray
from oneaccord.arrays.memory import NOTHING, Array, bytes_of, check_out, contiguous, copy_of
from oneaccord.calls.arguments import tag_number
from oneaccord.calls.post.envelopes import NO_RANK, NO_TAG, OBJECT, READY, SYNC
from oneaccord.calls.post.messages import ANY, ANY_TAG, AnyRank, AnyTag, Letter, Operation, Receive, Send, words_of
from oneaccord.calls.post.requests import Persistent, Receiving, Request, Sent
from oneaccord.calls.post.status import Status
from oneaccord.calls.runner import Calls
from oneaccord.calls.work import Work
from oneaccord.contract.deadline import Deadline
from oneaccord.errors import UsageError
from oneaccord.group.packing import Unpacker, pack

if TYPE_CHECKING:
    from oneaccord.calls.paths import Paths
    from oneaccord.config import Settings
    from oneaccord.job.group_ranks import Members
    from oneaccord.job.job import Job

__all__ = ["Mode", "Pending", "TaggedCalls", "needs_tag"]

T = TypeVar("T")

Mode = Literal["standard", "sync", "ready", "buffered"]
_FLAGS = {"standard": 0, "sync": SYNC, "ready": READY, "buffered": 0}
_BYTES = np.dtype(np.uint8)
_NEIGHBORS = 1 << 31
"""Distinguishes the messages of a mesh from those of the program, in the same group."""


class TaggedCalls(Calls):
    """The calls of a group that move messages with tags, and only those."""

    def __init__(self, job: Job, members: Members, paths: Paths, settings: Settings) -> None:
        super().__init__(job, members, paths, settings)
        self._post = post = paths.post
        post.turns, post.on_failure_seen = self._callbacks, self._saw
        self._plain: Unpacker[Any] | None = None
        self._send_bytes: Callable[..., bool | None] = _not_compiled
        self._recv_bytes: Callable[..., tuple[bytearray, int] | None] = _not_compiled
        if paths.native is not None:
            python = (
                self._send_tagged,
                self._send_on,
                self._recv_tagged,
                self._recv_on,
                self._iprobe,
                self._send_later,
                self._recv_later,
            )
            made_of = words_of, Status, ANY, ANY_TAG, Sent, Receive, Receiving, Lock, OrderedDict
            whose = post, float(settings.timeout_s), members.number, members.rank, tuple(members.ranks), CODES
            post.compiled = made = paths.native.Post(self._caller, *python, *made_of, *whose)
            # C makes calls that it can make, and hands all others to the methods.
            self._send_tagged, self._send_bytes = made.send, made.send_bytes  # type: ignore[method-assign]
            self._recv_tagged, self._recv_bytes = made.recv, made.recv_bytes  # type: ignore[method-assign]
            self._iprobe, self._send_later, self._recv_later = made.iprobe, made.isend, made.irecv  # type: ignore[method-assign]

    def probe(self, source: int | AnyRank = ANY, tag: int | AnyTag = ANY_TAG, *, timeout_s: float | None = None) -> Status:
        """Wait until a message with a tag is there, and say what is known of it. It stays there for a `recv`.

        If several threads of this rank receive, another one may get it first: `take` is for that.

        Parameters
        ----------
        source
            The rank that it must be from; by default any.
        tag
            The tag that it must have; by default any.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        Status
            Its sender, tag and size.

        Raises
        ------
        InvalidRankError
            ``source`` is not in the group.
        UsageError
            ``tag`` is not an integer from 0 to 2**63 - 1, or `oneaccord.ANY_TAG`.
        """
        pattern = self._pattern("probe", source, tag)
        letter = self._failing(self._post.probe, pattern.what, pattern, self._limit(timeout_s), take=False)
        return self._post.status_of(letter)

    def iprobe(self, source: int | AnyRank = ANY, tag: int | AnyTag = ANY_TAG) -> Status | None:
        """Return what is known of a message with a tag that is there now; None if there is none. Never waits for one.

        Parameters
        ----------
        source, tag
            As for `probe`.

        Returns
        -------
        Status or None
            As for `probe`.

        Raises
        ------
        InvalidRankError, UsageError
            As for `probe`.
        """
        return self._iprobe(source, tag)

    def _iprobe(self, source: Any, tag: Any) -> Status | None:
        pattern = self._pattern("iprobe", source, tag)
        letter = self._failing(self._post.look, pattern.what, pattern, self._limit(None), take=False)
        return None if letter is None else self._post.status_of(letter)

    def take(self, source: int | AnyRank = ANY, tag: int | AnyTag = ANY_TAG, *, timeout_s: float | None = None) -> Pending:
        """Wait until a message with a tag is there, and take it, so that only the result can receive it.

        Parameters
        ----------
        source, tag, timeout_s
            As for `probe`.

        Returns
        -------
        Pending
            The message; call its ``recv`` or ``recv_object`` once.

        Raises
        ------
        InvalidRankError, UsageError
            As for `probe`.
        """
        pattern = self._pattern("take", source, tag)
        return Pending(self, self._failing(self._post.probe, pattern.what, pattern, self._limit(timeout_s), take=True))

    def take_now(self, source: int | AnyRank = ANY, tag: int | AnyTag = ANY_TAG) -> Pending | None:
        """Take a message with a tag that is there now; None if there is none. Never waits for one.

        Parameters
        ----------
        source, tag
            As for `probe`.

        Returns
        -------
        Pending or None
            As for `take`.

        Raises
        ------
        InvalidRankError, UsageError
            As for `probe`.
        """
        pattern = self._pattern("take_now", source, tag)
        letter = self._failing(self._post.look, pattern.what, pattern, self._limit(None), take=True)
        return None if letter is None else Pending(self, letter)

    def persistent_send(
        self,
        array: npt.ArrayLike,
        dest: int | None,
        *,
        tag: int,
        mode: Mode = "standard",
        timeout_s: float | None = None,
    ) -> Persistent[None]:
        """Prepare a `send_async` that is made again and again, each time with what the array then holds.

        Parameters
        ----------
        array, dest, tag, mode, timeout_s
            As for `Group.send`.

        Returns
        -------
        Persistent
            Each ``start()`` of it begins the send, and returns a `Work`.

        Raises
        ------
        InvalidRankError, UsageError
            As for `Group.send`; from here or from ``start()``.
        """
        tag_number(tag)
        return Persistent(partial(self._send_later, array, dest, tag, mode, timeout_s))

    def persistent_recv(
        self,
        source: int | AnyRank | None = ANY,
        *,
        tag: int | AnyTag,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Persistent[Any]:
        """Prepare a `recv_async` that is made again and again.

        Parameters
        ----------
        source, tag, out, timeout_s
            As for `Group.recv`.

        Returns
        -------
        Persistent
            Each ``start()`` of it begins the receive, and returns a `Work`.

        Raises
        ------
        InvalidRankError, UsageError
            As for `Group.recv`; from here or from ``start()``.
        """
        self._pattern("recv", ANY if source is None else source, tag)
        return Persistent(partial(self._recv_later, source, tag, out, timeout_s))

    # Sends

    def _send_tagged(self, array: Any, dest: Any, tag: Any, mode: str, timeout_s: float | None) -> None:
        seconds = self._limit(timeout_s)
        send = self._tagged_send(array, dest, tag, mode)
        if send is None:
            return
        if mode == "buffered":
            self._begin_tagged([send], seconds)
        else:
            self._failing(self._post.run, send.what, (send,), seconds, len(send.data))

    def _send_later(self, array: Any, dest: Any, tag: Any, mode: str, timeout_s: float | None) -> Work[None]:
        send = self._tagged_send(array, dest, tag, mode)
        return self._request([] if send is None else [send], timeout_s, _nothing)

    def _send_object_tagged(
        self, obj: object, dest: Any, tag: Any, mode: str, timeout_s: float | None, *, later: bool
    ) -> Work[None] | None:
        seconds = self._limit(timeout_s)
        peer, flags = self._peer(dest), self._flags(mode)
        number = tag_number(tag)
        packed = pack(obj, "send_object")
        if not later and self._send_bytes(packed, dest, tag, mode, timeout_s):
            return None
        data = memoryview(packed)
        if peer is None:
            return self._request([], timeout_s, _nothing) if later else None
        what = words_of("send_object", "to", peer, number)
        send = Send(what, self._members.number, peer, number, data, None, (), flags | OBJECT)
        if later:
            return self._request([send], timeout_s, _nothing)
        if mode == "buffered":
            self._begin_tagged([send], seconds)
        else:
            self._failing(self._post.run, what, (send,), seconds, len(data))
        return None

    def _tagged_send(self, array: Any, dest: Any, tag: Any, mode: str) -> Send | None:
        """Return the send of an array; None if it goes to no rank."""
        peer, flags = self._peer(dest), self._flags(mode)
        number = tag_number(tag)
        source = self._builder.take_tagged("send", array)[0]
        assert not isinstance(source, DeviceArray)
        self._builder.arguments.check_dimensions(source)
        if peer is None:
            return None
        source = copy_of(source) if mode == "buffered" else contiguous(source)
        what = words_of("send", "to", peer, number)
        return Send(what, self._members.number, peer, number, bytes_of(source), source.dtype, source.shape, flags)

    def _send_on(self, given: Any, dest: int, tag: int, timeout_s: float | None, gone: int, later: bool) -> Work[None] | None:
        """Go on with a send that C has begun; ``later`` in the background."""
        seconds, peer = self._limit(timeout_s), self._members.ranks[dest]
        is_object = isinstance(given, bytearray)
        what = words_of("send_object" if is_object else "send", "to", peer, tag)
        data = memoryview(given) if is_object else bytes_of(given)
        send = Send(what, self._members.number, peer, tag, data, None, (), OBJECT if is_object else 0)
        if not later:
            return self._failing(self._post.send_on, what, send, gone, seconds)
        request: Request[None] = Request(self._post, (send,), _nothing)
        self._failing(self._post.start, what, (send,), seconds, request, gone)
        return request

    def _flags(self, mode: Any) -> int:
        flags = _FLAGS.get(mode) if isinstance(mode, str) else None
        if flags is None:
            raise UsageError(f"mode must be one of {', '.join(map(repr, _FLAGS))}, not {mode!r}")
        return flags

    def _peer(self, rank: Any) -> int | None:
        """Return a rank of the group as one of the world, which may be this one; None for no rank."""
        if rank is None:
            return None
        return self._members.ranks[self._builder.arguments.rank(rank, "dest", or_nobody=True)]

    # Receives

    def _recv_tagged(self, source: Any, tag: Any, out: Any, status: Status | None, timeout_s: float | None) -> Any:
        seconds = self._limit(timeout_s)
        if status is not None:
            _check_status(status)
        if source is None:
            return self._from_nobody(out, status, tag)
        receive, give = self._tagged_recv(source, tag, out)
        self._failing(self._post.run, receive.what, (receive,), seconds)
        return self._received(receive, give, status)

    def _recv_later(self, source: Any, tag: Any, out: Any, timeout_s: float | None) -> Work[Any]:
        if source is None:
            return self._request([], timeout_s, partial(self._from_nobody, out, None, tag))
        receive, give = self._tagged_recv(source, tag, out)
        return self._request([receive], timeout_s, partial(self._received, receive, give, None))

    def _recv_object_tagged(self, source: Any, tag: Any, kind: Any, status: Status | None, timeout_s: float | None) -> Any:
        seconds = self._limit(timeout_s)
        if status is not None:
            _check_status(status)
        if source is None:
            return self._from_nobody(None, status, tag)
        unpacker: Unpacker[Any] | None = self._plain if kind is None else Unpacker(kind, "recv_object")
        if unpacker is None:
            unpacker = self._plain = Unpacker(None, "recv_object")
        came = self._recv_bytes(source, tag, status, timeout_s)
        if came is not None:
            return unpacker.unpack(*came)
        receive, unpacker = self._receiving_object(source, tag, kind)
        self._failing(self._post.run, receive.what, (receive,), seconds)
        return self._unpacked(receive, unpacker, status)

    def _recv_object_later(self, source: Any, tag: Any, kind: Any, timeout_s: float | None) -> Work[Any]:
        if source is None:
            return self._request([], timeout_s, partial(self._from_nobody, None, None, tag))
        receive, unpacker = self._receiving_object(source, tag, kind)
        return self._request([receive], timeout_s, partial(self._unpacked, receive, unpacker, None))

    def _tagged_recv(self, source: Any, tag: Any, out: Any) -> tuple[Receive, Give | None]:
        receive = self._pattern("recv", source, tag)
        if out is None:
            return receive, None
        target, give = self._builder.take_tagged.receiving("recv", out)
        assert target is not None
        assert not isinstance(target, DeviceArray)
        check_out(target, getattr(target, "shape", ()), getattr(target, "dtype", _BYTES))
        check_dtype(target.dtype)
        receive.out = target
        return receive, give

    def _receiving_object(self, source: Any, tag: Any, kind: Any) -> tuple[Receive, Unpacker[Any]]:
        unpacker: Unpacker[Any] = Unpacker(kind, "recv_object")
        receive = self._pattern("recv_object", source, tag)
        receive.is_object = True
        return receive, unpacker

    def _recv_on(self, into: Array | bytearray, source: int, about: bytes, came: int, timeout_s: float | None) -> None:
        """Go on with a receive of which C has the first bytes, with the opening ``about`` the message."""
        data = memoryview(into) if isinstance(into, bytearray) else bytes_of(into)
        is_object, seconds = isinstance(into, bytearray), self._limit(timeout_s)
        what = words_of("recv_object" if is_object else "recv", "from", source, NO_TAG)
        receive = Receive(what, self._members.number, source, NO_TAG, None, (), is_object=is_object)
        self._failing(self._post.take_on, what, receive, about, data, came, seconds)

    def _from_nobody(self, out: Any, status: Status | None, tag: Any) -> Any:
        if tag is not ANY_TAG:
            tag_number(tag)
        if status is not None:
            status.clear()
        return out

    def _received(self, receive: Receive, give: Give | None, status: Status | None) -> Any:
        assert receive.letter is not None
        if status is not None:
            self._post.status_of(receive.letter, status)
        array = NOTHING if receive.array is None else receive.array
        return array if give is None else give(array)

    def _unpacked(self, receive: Receive, unpacker: Unpacker[Any], status: Status | None) -> Any:
        assert receive.letter is not None
        about = self._post.status_of(receive.letter, status)
        assert about.source is not None
        return unpacker.unpack(receive.array, about.source)

    def _pattern(self, call: str, source: Any, tag: Any) -> Receive:
        """Return a receive of messages from a rank or any, with a tag or any."""
        members = self._members
        number = NO_TAG if tag is ANY_TAG else tag_number(tag)
        if source is ANY:
            rank, senders = NO_RANK, self._post.others
        else:
            rank = members.ranks[self._builder.arguments.rank(source, "source")]
            senders = ()
        return Receive(words_of(call, "from", rank, number), members.number, rank, number, None, senders)

    # Both

    def _sendrecv_tagged(
        self,
        array: Any,
        dest: Any,
        source: Any,
        tags: tuple[Any, Any],
        out: Any,
        status: Status | None,
        timeout_s: float | None,
        *,
        later: bool,
    ) -> Any:
        seconds = self._limit(timeout_s)
        if status is not None:
            _check_status(status)
        send = self._tagged_send(array, dest, tags[0], "standard")
        operations: list[Operation] = [] if send is None else [send]
        make: Callable[[], Any] = partial(self._from_nobody, out, status, tags[1])
        if source is not None:
            receive, give = self._tagged_recv(source, tags[1], out)
            if send is not None and receive.out is not None and np.may_share_memory(np.asarray(send.data), receive.out):
                send.data = memoryview(bytes(send.data))  # a message that comes first must not change it
            operations.append(receive)
            make = partial(self._received, receive, give, status)
        if later:
            return self._request(operations, timeout_s, make)
        if operations:
            what = " and ".join(str(each.what) for each in operations) if len(operations) > 1 else operations[0].what
            self._failing(self._post.run, what, operations, seconds, 0 if send is None else len(send.data))
        return make()

    def _exchange_neighbors(
        self, arrays: list[Any], peers: list[int | None], tags: list[int], name: str, timeout_s: float | None
    ) -> list[Array | None]:
        """Send an array with a tag to each peer, and receive one with the tag of its place from each; None stands for no rank."""
        seconds, members = self._limit(timeout_s), self._members
        context = members.number | _NEIGHBORS
        sends: list[Operation] = []
        receives: list[Receive | None] = []
        for place, (array, peer, tag) in enumerate(zip(arrays, peers, tags, strict=True)):
            send = self._tagged_send(array, peer, tag, "standard")
            receive = None
            if send is not None and peer is not None:
                send.context, send.what = context, words_of(name, "to", send.peer, tag)
                rank = members.ranks[peer]
                receive = Receive(words_of(name, "from", rank, place), context, rank, place, None, ())
                sends.append(send)
            receives.append(receive)
        operations = [*(each for each in receives if each is not None), *sends]
        if operations:
            self._failing(self._post.run, name, operations, seconds)
        return [None if each is None else each.array for each in receives]

    # The common part

    def _limit(self, timeout_s: float | None) -> float:
        runtime = self._job.runtime
        if runtime.is_simulated:
            runtime.enter(self._job.rank)
        return self._timeout_s if timeout_s is None else Deadline(timeout_s).timeout_s

    def _failing(self, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Make a call of the office; take note that the program sees its failure."""
        if not self._call_sequence.is_usable:
            self._check_open(str(arguments[0]))
        try:
            return call(*arguments, **options)
        except UsageError:
            raise
        except BaseException:
            if self._job.control.failed:
                self._saw()
            raise

    def _begin_tagged(self, operations: list[Any], seconds: float, request: Request[Any] | None = None) -> None:
        what = operations[0].what if request is None or len(operations) == 1 else request._what
        self._failing(self._post.start, what, operations, seconds, request)

    def _request(self, operations: list[Any], timeout_s: float | None, make: Callable[[], T]) -> Work[T]:
        """Begin a call that continues in the background."""
        seconds = self._limit(timeout_s)
        if not operations:
            done: Work[T] = Work("a message of no rank", self._callbacks, self._saw)
            done.run(make)
            return done
        request: Request[T] = Request(self._post, tuple(operations), make)
        self._begin_tagged(operations, seconds, request)
        return request


class Pending:
    """A message that `Group.take` has taken, and that only this can receive; once.

    Attributes
    ----------
    status
        What is known of it.
    """

    __slots__ = ("_calls", "_letter", "status")

    def __init__(self, calls: TaggedCalls, letter: Letter) -> None:
        self._calls = calls
        self._letter: Letter | None = letter
        self.status: Status = calls._post.status_of(letter)

    def __repr__(self) -> str:
        state = ", received" if self._letter is None else ""
        return f"<oneaccord.Pending {self.status!r}{state}>"

    @overload
    def recv(self, *, out: Array, timeout_s: float | None = None) -> Array: ...
    @overload
    def recv(self, *, out: None = None, timeout_s: float | None = None) -> Array: ...
    def recv(self, *, out: Array | None = None, timeout_s: float | None = None) -> Array:
        """Receive it, an array.

        Parameters
        ----------
        out, timeout_s
            As for `Group.recv`.

        Returns
        -------
        ndarray
            As for `Group.recv`.

        Raises
        ------
        UsageError
            It has been received already.
        DTypeError, SizeMismatchError
            As for `Group.recv`; the message is then lost.
        """
        calls = self._calls
        seconds = calls._limit(timeout_s)
        receive, give = calls._tagged_recv(self.status.source, self.status.tag, out)
        self._receive(receive, seconds)
        received: Array = calls._received(receive, give, None)
        return received

    @overload
    def recv_object(self, *, type: type[T], timeout_s: float | None = None) -> T: ...
    @overload
    def recv_object(self, *, type: Any = None, timeout_s: float | None = None) -> Any: ...
    def recv_object(self, *, type: Any = None, timeout_s: float | None = None) -> Any:
        """Receive it, an object.

        Parameters
        ----------
        type, timeout_s
            As for `Group.recv_object`.

        Returns
        -------
        object
            As for `Group.recv_object`.

        Raises
        ------
        UsageError
            It has been received already, or does not fit ``type``.
        DTypeError
            It is an array; the message is then lost.
        """
        calls = self._calls
        seconds = calls._limit(timeout_s)
        receive, unpacker = calls._receiving_object(self.status.source, self.status.tag, type)
        self._receive(receive, seconds)
        return calls._unpacked(receive, unpacker, None)

    def _receive(self, receive: Receive, seconds: float) -> None:
        letter, self._letter = self._letter, None
        if letter is None:
            raise UsageError(f"{self!r} can be received only once")
        receive.letter = letter
        self._calls._failing(self._calls._post.run, receive.what, (receive,), seconds)


def _check_status(status: object) -> None:
    if not isinstance(status, Status):
        raise UsageError(f"status= must be a oneaccord.Status, such as status = oneaccord.Status(), not {status!r}")


def _nothing() -> None:
    return None


def _not_compiled(*_: Any) -> None:
    return None


def needs_tag(what: str) -> UsageError:
    """Return the error of an argument that only messages with tags have."""
    return UsageError(f"{what} needs a tag: give tag=, an integer from 0 on, to the send and to the receive")
