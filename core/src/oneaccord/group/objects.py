"""Calls that move Python objects: the methods of a group whose names end in ``_object``."""
# ruff: noqa: A002 - ``type=`` is what msgspec and its users call it

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar, overload

import numpy as np

from oneaccord.arrays.memory import Array, new_array
from oneaccord.calls.post.messages import ANY, AnyRank, AnyTag
from oneaccord.calls.post.status import Status
from oneaccord.calls.request import CallSteps, Message, Operation, Request, SizeExchange
from oneaccord.calls.work import Work
from oneaccord.contract.header import CallSignature
from oneaccord.control.protocol import Report
from oneaccord.errors import OneAccordError, OutOfMemoryError, SizeMismatchError, UsageError
from oneaccord.group.packing import Unpacker, pack
from oneaccord.group.tagged import Mode, TaggedCalls, needs_tag
from oneaccord.schedule.steps import Collective

__all__ = ["ObjectCalls"]

T = TypeVar("T")

_MESSAGE = CallSignature("send_object")
_INT64 = np.dtype(np.int64)
_BYTE = np.dtype(np.uint8)
_NO_BYTES = np.empty(0, _BYTE)
_LARGEST_BYTES = 1 << 40
"""No object that a rank really has is larger, so that a size beyond is damage."""


class ObjectCalls(TaggedCalls):
    """The calls of a group that move Python objects.

    Objects travel as msgpack, made by msgspec, and never as pickles: nothing that is received can run code. With ``type=``, the
    receiver gets an object of that type (a dataclass, a `msgspec.Struct`, a TypedDict, ``dict[str, tuple[int, ...]]``), or an
    error if the object does not fit. Without it, the result consists of None, bool, int, float, str, bytes, list and dict:

    ======================================================  =====================================================================
    sent                                                    received without ``type=``
    ======================================================  =====================================================================
    None, bool, int (-2**63 to 2**64-1), float, str, bytes  the same
    list, tuple, named tuple, set, frozenset                a list; a tuple if it is the key of a dict
    dict                                                    a dict; keys may be all that comes out hashable, not only str
    dataclass, Struct, attrs class                          a dict of the fields
    Enum                                                    its value
    bytearray, memoryview                                   bytes
    NumPy scalar of a bool, an integer, a float or text     the Python one
    NumPy array of any dtype that `Group.send` takes        a new array of its shape and dtype
    datetime with a time zone                               a datetime in UTC
    datetime without one, date, time, timedelta             a str, in ISO 8601
    Decimal, UUID                                           a str
    ======================================================  =====================================================================

    Nothing else can travel: no array of Python objects, no function, no complex number, no instance of a plain class or of a
    subclass of int, float or str, and no structure that contains itself or nests too deep. It raises a `UsageError` that names
    the place, before any byte moves, and the group stays as it was. Other ranks of a collective may be waiting already; they
    get an `AbortedError` when this rank leaves. An object that does not fit ``type=`` raises a `UsageError` as well. The call
    has been made by then, and the group stays usable. ``type`` may differ from rank to rank.

    All ranks, the root included, get new objects.
    """

    def send_object(
        self, obj: object, dest: int, *, tag: int | None = None, mode: Mode = "standard", timeout_s: float | None = None
    ) -> None:
        """Send an object to one rank, which must call `recv_object`.

        Parameters
        ----------
        obj
            The object to send; docs/guides/objects.md lists what can travel.
        dest
            Another rank; with a tag, any rank.
        tag, mode
            As for `Group.send`.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Raises
        ------
        InvalidRankError, SelfSendError
            ``dest`` is not another rank of the group.
        UsageError
            The object holds something that cannot travel, or the tag or mode is none.
        """
        if tag is not None:
            self._send_object_tagged(obj, dest, tag, mode, timeout_s, later=False)
            return
        if mode != "standard":
            raise needs_tag(f"mode={mode!r}")
        self._run_program("send_object", partial(self._sending, obj, dest), timeout_s)

    @overload
    def recv_object(
        self,
        source: int | AnyRank = ANY,
        *,
        tag: int | AnyTag | None = None,
        type: type[T],
        status: Status | None = None,
        timeout_s: float | None = None,
    ) -> T: ...
    @overload
    def recv_object(
        self,
        source: int | AnyRank = ANY,
        *,
        tag: int | AnyTag | None = None,
        type: Any = None,
        status: Status | None = None,
        timeout_s: float | None = None,
    ) -> Any: ...
    def recv_object(
        self,
        source: int | AnyRank = ANY,
        *,
        tag: int | AnyTag | None = None,
        type: Any = None,
        status: Status | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Receive an object that one rank sent with `send_object`.

        Parameters
        ----------
        source
            Another rank; with a tag, any rank or `oneaccord.ANY`.
        tag, status
            As for `Group.recv`.
        type
            The type that the object must have, such as a dataclass. By default plain Python objects come out: see
            docs/guides/objects.md.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        object
            Of type ``type``.

        Raises
        ------
        InvalidRankError, SelfSendError
            ``source`` is not another rank of the group.
        UsageError
            msgspec cannot decode into ``type``; or the object does not fit ``type``, and is then lost.
        DTypeError
            A message with a tag is an array. It is lost, and the group stays usable.
        """
        if tag is not None:
            return self._recv_object_tagged(source, tag, type, status, timeout_s)
        if status is not None or source is ANY:
            raise needs_tag("any source or status=")
        return self._run_program("recv_object", partial(self._receiving, source, type), timeout_s)

    def send_object_async(
        self, obj: object, dest: int, *, tag: int | None = None, mode: Mode = "standard", timeout_s: float | None = None
    ) -> Work[None]:
        """Begin a `send_object`; the object may be changed at once, and an object that cannot travel is refused at once."""
        if tag is not None:
            work = self._send_object_tagged(obj, dest, tag, mode, timeout_s, later=True)
            assert work is not None
            return work
        if mode != "standard":
            raise needs_tag(f"mode={mode!r}")
        return self._run_program_async("send_object", partial(self._sending, obj, dest), timeout_s)

    @overload
    def recv_object_async(
        self,
        source: int | AnyRank = ANY,
        *,
        tag: int | AnyTag | None = None,
        type: type[T],
        timeout_s: float | None = None,
    ) -> Work[T]: ...
    @overload
    def recv_object_async(
        self,
        source: int | AnyRank = ANY,
        *,
        tag: int | AnyTag | None = None,
        type: Any = None,
        timeout_s: float | None = None,
    ) -> Work[Any]: ...
    def recv_object_async(
        self,
        source: int | AnyRank = ANY,
        *,
        tag: int | AnyTag | None = None,
        type: Any = None,
        timeout_s: float | None = None,
    ) -> Work[Any]:
        """Begin a `recv_object`; ``wait()`` of the work returns the object, or raises if it does not fit ``type``."""
        if tag is not None:
            return self._recv_object_later(source, tag, type, timeout_s)
        if source is ANY:
            raise needs_tag("any source")
        return self._run_program_async("recv_object", partial(self._receiving, source, type), timeout_s)

    @overload
    def broadcast_object(self, obj: object, root: int = 0, *, type: type[T], timeout_s: float | None = None) -> T: ...
    @overload
    def broadcast_object(self, obj: object, root: int = 0, *, type: Any = None, timeout_s: float | None = None) -> Any: ...
    def broadcast_object(self, obj: object, root: int = 0, *, type: Any = None, timeout_s: float | None = None) -> Any:
        """Give the root's object to every rank.

        Parameters
        ----------
        obj
            On the root, the object to send; elsewhere ignored.
        root
            The rank whose object it is.
        type
            The type that the object must have; see `recv_object`.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        object
            Of type ``type``.

        Raises
        ------
        InvalidRankError
            ``root`` is not in the group.
        UsageError
            On the root: the object holds something that cannot travel. On any rank: it does not fit ``type``.
        """
        root = self._rank_of(root)
        unpacker: Unpacker[Any] = Unpacker(type, "broadcast_object")
        return unpacker.unpack(self._run_program("broadcast_object", partial(self._broadcasting, obj, root), timeout_s), root)

    @overload
    def all_gather_object(self, obj: object, *, type: type[T], timeout_s: float | None = None) -> list[T]: ...
    @overload
    def all_gather_object(self, obj: object, *, type: Any = None, timeout_s: float | None = None) -> list[Any]: ...
    def all_gather_object(self, obj: object, *, type: Any = None, timeout_s: float | None = None) -> list[Any]:
        """Give the objects of all ranks to every rank.

        Parameters
        ----------
        obj
            This rank's object; sizes and kinds may differ from rank to rank.
        type
            The type that each object must have; see `recv_object`.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        list
            One object for each rank, in the order of ranks.

        Raises
        ------
        UsageError
            The object holds something that cannot travel, or the object of some rank does not fit ``type``.
        """
        return self._gathered("all_gather_object", obj, -1, type, timeout_s)

    @overload
    def gather_object(self, obj: object, root: int = 0, *, type: type[T], timeout_s: float | None = None) -> list[T] | None: ...
    @overload
    def gather_object(
        self, obj: object, root: int = 0, *, type: Any = None, timeout_s: float | None = None
    ) -> list[Any] | None: ...
    def gather_object(
        self, obj: object, root: int = 0, *, type: Any = None, timeout_s: float | None = None
    ) -> list[Any] | None:
        """Give the objects of all ranks to the root.

        Parameters
        ----------
        obj
            This rank's object; sizes and kinds may differ from rank to rank.
        root
            The rank that gets them.
        type
            On the root, the type that each object must have. Ignored elsewhere.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        list or None
            On the root, one object for each rank, in the order of ranks; None elsewhere.

        Raises
        ------
        InvalidRankError
            ``root`` is not in the group.
        UsageError
            The object holds something that cannot travel; or, on the root, the object of some rank does not fit ``type``.
        """
        root = self._rank_of(root)
        objects = self._gathered("gather_object", obj, root, type, timeout_s)
        return objects if self._is(root) else None

    @overload
    def scatter_object(
        self, objs: Sequence[object] | None, root: int = 0, *, type: type[T], timeout_s: float | None = None
    ) -> T: ...
    @overload
    def scatter_object(
        self, objs: Sequence[object] | None, root: int = 0, *, type: Any = None, timeout_s: float | None = None
    ) -> Any: ...
    def scatter_object(
        self, objs: Sequence[object] | None, root: int = 0, *, type: Any = None, timeout_s: float | None = None
    ) -> Any:
        """Give each rank one of the root's objects.

        Parameters
        ----------
        objs
            On the root, one object for each rank, in the order of ranks; elsewhere ignored, and may be None.
        root
            The rank whose objects they are.
        type
            The type that this rank's object must have; see `recv_object`.
        timeout_s
            The most seconds that the call may last; by default the setting ``timeout_s``.

        Returns
        -------
        object
            Of type ``type``.

        Raises
        ------
        InvalidRankError
            ``root`` is not in the group.
        SizeMismatchError
            On the root: ``objs`` does not have one entry for each rank.
        UsageError
            On the root: ``objs`` is no sequence, or holds something that cannot travel. On any rank: its object does not fit
            ``type``.
        """
        root = self._rank_of(root)
        unpacker: Unpacker[Any] = Unpacker(type, "scatter_object")
        return unpacker.unpack(self._run_program("scatter_object", partial(self._scattering, objs, root), timeout_s), root)

    def _is(self, rank: int) -> bool:
        """Return whether this is that rank."""
        return self._members.rank == rank

    def _gathered(self, name: str, obj: object, root: int, kind: Any, timeout_s: float | None) -> list[Any]:
        """Return the objects of all ranks on the root, or on every rank if the root is -1; elsewhere nothing."""
        unpacker: Unpacker[Any] = Unpacker(kind if root < 0 or self._is(root) else None, name)
        parts = self._run_program(name, partial(self._gathering, name, obj, root), timeout_s)
        return [unpacker.unpack(part, sender) for sender, part in enumerate(parts)]

    # Programs: the sizes of the objects travel first

    def _sending(self, obj: object, dest: int) -> CallSteps:
        peer = self._builder.arguments.peer(dest, "dest")
        yield Message(np.frombuffer(pack(obj, "send_object"), _BYTE), peer, None, None, signature=_MESSAGE)

    def _receiving(self, source: int, kind: Any) -> CallSteps:
        peer = self._builder.arguments.peer(source, "source")
        unpacker: Unpacker[Any] = Unpacker(kind, "recv_object")
        return unpacker.unpack((yield Message(None, None, None, peer, signature=_MESSAGE)), source)

    def _broadcasting(self, obj: object, root: int) -> CallSteps:
        name = "broadcast_object"
        data = pack(obj, name) if self._is(root) else bytearray()
        (size,) = yield from self._telling_sizes([len(data)], root, name)
        memory = _padded(data) if self._is(root) else self._memory(_room(size), name)
        request = Request(Collective.BROADCAST, _BYTE, memory.shape, root=root, operation=name)
        source = memory if self._is(root) else _NO_BYTES
        return (yield Operation(request, source, memory.shape, memory))[:size]

    def _scattering(self, objs: Sequence[object] | None, root: int) -> CallSteps:
        name, rank, size = "scatter_object", self._members.rank, self._members.size
        parts: list[bytearray] = [bytearray()] * size
        if self._is(root):
            if not isinstance(objs, Sequence):
                raise UsageError(f"{name} needs a list of {size} objects on the root, not a {_kind(objs)}")
            if len(objs) != size:
                raise SizeMismatchError(f"{name} needs one object for each of the {size} ranks, but got {len(objs)}")
            parts = [pack(obj, f"{name}, for rank {dest},") for dest, obj in enumerate(objs)]
        sizes = yield from self._telling_sizes([len(part) for part in parts], root, name)
        rooms = tuple(map(_room, sizes))
        joined = self._memory(sum(rooms), name) if self._is(root) else _NO_BYTES
        if self._is(root):
            np.concatenate([_padded(part) for part in parts], out=joined)
        memory = self._memory(rooms[rank], name)
        request = Request(Collective.SCATTER, _BYTE, (sum(rooms),), counts=rooms, root=root, uneven=rooms, operation=name)
        return (yield Operation(request, joined, memory.shape, memory))[: sizes[rank]]

    def _gathering(self, name: str, obj: object, root: int) -> CallSteps:
        wanted, count = root < 0 or self._is(root), self._members.size
        data = pack(obj, name)
        about = Request(Collective.ALL_GATHER, _INT64, (1,), counts=(1,) * count, root=root, operation=name, part="sizes")
        sizes = yield SizeExchange(about, np.array([len(data)], _INT64), count)
        self._check_sizes(sizes, name)
        rooms = tuple(map(_room, sizes.tolist()))
        collective = Collective.ALL_GATHER if root < 0 else Collective.GATHER
        request = Request(collective, _BYTE, (), counts=rooms, root=root, uneven=rooms, operation=name)
        if not wanted:
            yield Operation(request, _padded(data), None)
            return []
        memory = self._memory(sum(rooms), name)
        yield Operation(request, _padded(data), memory.shape, memory)
        starts = accumulate(rooms, initial=0)
        return [memory[start : start + size] for start, size in zip(starts, sizes.tolist(), strict=False)]

    def _telling_sizes(self, sizes: list[int], root: int, name: str) -> Generator[SizeExchange, Array, list[int]]:
        """Give the root's sizes to every rank."""
        about = Request(Collective.BROADCAST, _INT64, (len(sizes),), root=root, operation=name, part="sizes")
        told = yield SizeExchange(about, np.array(sizes, _INT64), len(sizes))
        self._check_sizes(told, name)
        return [int(size) for size in told]

    def _check_sizes(self, sizes: Array, name: str) -> None:
        """End the job if a size is impossible, before memory is taken for it."""
        if sizes.min() < 1 or sizes.max() > _LARGEST_BYTES:
            raise self._fail(
                "protocol",
                f"rank {self._job.rank} learned in {name} of objects of {sizes.tolist()} bytes, which is impossible",
                name,
            )

    def _memory(self, nbytes: int, name: str) -> Array:
        """Take memory for incoming or outgoing data; if there is none, end the job, because the others have begun."""
        try:
            return new_array((nbytes,), _BYTE)
        except OutOfMemoryError:
            self._fail("aborted", f"rank {self._job.rank} has no memory for the {nbytes} bytes of {name}", name)
            raise

    def _fail(self, kind: str, text: str, name: str) -> OneAccordError:
        return self._job.fail(Report(kind, text, self._job.rank, name, members=list(self._members.ranks)))


def _room(nbytes: int) -> int:
    """Return the size of the message for an object: at most an eighth, or 63 bytes, more.

    A group remembers how it carries out each size of message. Objects come in many sizes, of messages there are few.
    """
    step = 1 << max(nbytes.bit_length() - 4, 6)
    return -(-nbytes // step) * step


def _padded(data: bytearray) -> Array:
    """Return an object's bytes as the message that carries them."""
    return np.frombuffer(data.ljust(_room(len(data)), b"\0"), _BYTE)


def _kind(value: object) -> str:
    return type(value).__name__
