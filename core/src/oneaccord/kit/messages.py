"""One message of oneaccord as one or two of a library that sends bytes from one rank to another, in order.

A short message is one of the library: header and payload together, into memory of the receiver's own, from which the payload is copied. A
long one is two: the header first; only when it has come and is the expected one is the payload's receive begun, into the user's
memory. So a mismatch is seen without waiting for a payload, and never writes there. The receiver always begins with room for a
short message, because a peer that does something else may send one.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, cast

from oneaccord.contract.deadline import Deadline
from oneaccord.contract.transport import HEADER_BYTES, HeaderMismatch, LinkLost, Transfer, Transport
from oneaccord.kit.blocking import BlockingCalls
from oneaccord.kit.usage import LibraryUse
from oneaccord.kit.waiting import wait_until

__all__ = ["LibraryMessage", "LibraryTransport", "PolledTransport", "ThreadedTransport"]


class LibraryMessage(Transfer):
    """A message on its way to or from ``peer``; `LibraryTransport` makes it.

    Attributes
    ----------
    done, moved
        As those of `Transfer`.
    peer
        The rank at the other end.
    nbytes
        The length of the payload.
    requests
        The library's requests that are not known to be done.
    is_uncertain
        Whether a signal interrupted a test, so that the library may or may not have ended the last request. It must not be tested again, and its
        memory counts as in use.
    failure
        What ended it, where a thread moves it.
    is_incoming
        Whether this rank receives it.
    """

    is_incoming: ClassVar[bool] = False

    __slots__ = ("_first", "_payload", "_transport", "failure", "is_uncertain", "nbytes", "peer", "requests")

    def __init__(self, transport: LibraryTransport, peer: int, payload: memoryview) -> None:
        self.peer: int = peer
        self.nbytes: int = len(payload)
        self.done: bool = False
        self.moved: int = 0
        self.requests: list[Any] = []
        self.failure: Exception | None = None
        self.is_uncertain: bool = False
        self._transport = transport
        self._payload = payload
        self._first: Any = None

    @abstractmethod
    def begin(self, header: bytes) -> None:
        """Start the first requests; for core."""

    @abstractmethod
    def go_on(self) -> None:
        """Take the next step, since no request is on its way any more; for core."""

    def advance(self) -> bool:
        """Test the requests, and go on when they are done; return whether the message is.

        Raises
        ------
        HeaderMismatch
            The message was not the expected one.
        LinkLost
            The library gave up.
        """
        requests, test = self.requests, self._transport.test
        while not self.done:
            try:
                while requests:
                    if not test(requests[-1], self.peer):
                        return False
                    requests.pop()
            except Exception:
                requests.pop()  # the library has ended it
                raise
            except BaseException:
                self.is_uncertain = True  # a signal may have come in the midst of a test
                raise
            self.go_on()
        return True

    def _add(self, request: Any) -> None:
        if request is not None:
            self.requests.append(request)

    def _finish(self) -> None:
        self.moved = HEADER_BYTES + self.nbytes
        self._transport.library.release(self)
        self.done = True


class _Sending(LibraryMessage):
    __slots__ = ()

    def begin(self, header: bytes) -> None:
        transport = self._transport
        is_short = self.nbytes <= transport.short_bytes
        self._first = b"".join((header, self._payload)) if is_short else header
        self._add(transport.start_send(self.peer, self._first))
        if not is_short:
            self._add(transport.start_send(self.peer, self._payload))

    def go_on(self) -> None:
        self._finish()


class _Receiving(LibraryMessage):
    is_incoming = True

    __slots__ = ("_expected",)

    def begin(self, header: bytes) -> None:
        self._expected = header
        self._first = self._transport.room(self.peer)
        self._add(self._transport.start_receive(self.peer, self._first))

    def go_on(self) -> None:
        if self._first is None:
            self._finish()
            return
        came, self._first = memoryview(self._first).cast("B"), None
        header = bytes(came[:HEADER_BYTES])
        if header != self._expected:
            raise HeaderMismatch(self.peer, header)
        self.moved = HEADER_BYTES
        if self.nbytes <= self._transport.short_bytes:
            self._payload[:] = came[HEADER_BYTES : HEADER_BYTES + self.nbytes]
            self._finish()
        else:
            self._add(self._transport.start_receive(self.peer, self._payload))


class LibraryTransport(Transport):
    """Messages of one channel, over a library; a subclass says how the library sends, receives and tests.

    `PolledTransport` and `ThreadedTransport` also wait. A subclass of this class itself brings a `Transport.wait` of its own, which calls
    `LibraryMessage.advance`.

    Parameters
    ----------
    library
        Whose memory is held, and who says whether a wait has a point.

    Attributes
    ----------
    short_bytes
        The longest payload that travels with its header; alike on all ranks.
    """

    short_bytes: ClassVar[int] = 4096

    def __init__(self, library: LibraryUse) -> None:
        self.library: LibraryUse = library

    @abstractmethod
    def start_send(self, peer: int, memory: bytes | memoryview) -> Any:
        """Start to send memory, which lives until its request is done.

        Parameters
        ----------
        peer
            The rank that it is for.
        memory
            Bytes, which may be read-only.

        Returns
        -------
        object or None
            A request for `test`; None if the memory is free again.

        Raises
        ------
        LinkLost
            The library refused.
        """

    @abstractmethod
    def start_receive(self, peer: int, memory: Any) -> Any:
        """Start to receive into memory, in which there is room for what comes.

        Parameters
        ----------
        peer
            The rank that sends it.
        memory
            What `room` returned, or a memoryview of bytes.

        Returns
        -------
        object or None
            A request for `test`; None if the memory is filled.

        Raises
        ------
        LinkLost
            The library refused.
        """

    @abstractmethod
    def test(self, request: Any, peer: int) -> bool:
        """Return whether a request is done; a request of a `ThreadedTransport` is waited for here.

        Parameters
        ----------
        request
            What `start_send` or `start_receive` returned.
        peer
            The rank that its message goes to or comes from.

        Returns
        -------
        bool
            Whether it is done.

        Raises
        ------
        LinkLost
            The library gave up on it.
        """

    def room(self, peer: int) -> Any:
        """Return memory for a header and a short payload: by default new memory for each message.

        Parameters
        ----------
        peer
            The rank that sends them.

        Returns
        -------
        object
            `HEADER_BYTES` and `short_bytes` bytes that can be written to, until the message is done.
        """
        return bytearray(HEADER_BYTES + self.short_bytes)

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Do nothing, since most libraries connect all ranks when they begin, or when they first send; for core."""

    def send(self, peer: int, header: bytes, payload: memoryview) -> LibraryMessage:
        """Start to send; for core."""
        return self._begin(_Sending(self, peer, payload), header)

    def recv(self, peer: int, header: bytes, payload: memoryview) -> LibraryMessage:
        """Start to receive; for core."""
        return self._begin(_Receiving(self, peer, payload), header)

    def _begin(self, message: LibraryMessage, header: bytes) -> LibraryMessage:
        self.library.check(message.peer)
        self.library.hold(message)
        message.begin(header)
        self._move(message)
        return message

    def _move(self, message: LibraryMessage) -> None:
        message.advance()


class PolledTransport(LibraryTransport):
    """Messages of a library whose requests can be tested: `LibraryTransport.test` does not block."""

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Test in turn until one is done; for core."""
        messages = cast("Sequence[LibraryMessage]", transfers)  # made by send and recv
        library, peer = self.library, messages[0].peer

        def one_is_done() -> bool:
            # All of them are to go on, also where the first one is done.
            return bool(sum(message.advance() for message in messages))

        patience_s = library.patience_s(max(message.nbytes for message in messages))
        wait_until(one_is_done, partial(library.check, peer), deadline, patience_s, None, library.pauses_s)


class ThreadedTransport(LibraryTransport):
    """Messages of a library whose requests can only be waited for: `LibraryTransport.test` blocks, in a thread of its own.

    Parameters
    ----------
    library
        As for `LibraryTransport`.
    calls
        The threads.
    """

    def __init__(self, library: LibraryUse, calls: BlockingCalls) -> None:
        super().__init__(library)
        self._calls = calls
        self._changed = threading.Condition()

    def _move(self, message: LibraryMessage) -> None:
        self._calls.start(partial(self._run, message))

    def _run(self, message: LibraryMessage) -> None:
        try:
            message.advance()
        except Exception as error:  # noqa: BLE001 - it is raised where the message is waited for
            message.failure = error
        self.tell()

    def tell(self) -> None:
        """Wake all threads that wait for a message; they look at `LibraryUse.ended`."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Wait until a thread has moved a message to its end; for core."""
        messages = cast("Sequence[LibraryMessage]", transfers)  # made by send and recv
        with self._changed:
            while True:
                failure = next((message.failure for message in messages if message.failure is not None), None)
                if failure is not None:
                    raise failure
                if any(message.done for message in messages):
                    return
                if self.library.ended:
                    raise LinkLost(messages[0].peer, self.library.ended)
                remaining = deadline.remaining()
                if not remaining:
                    raise TimeoutError("the deadline passed")
                self._changed.wait(remaining)
