"""Messages between ranks: the half of a backend that every collective needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from oneaccord.contract.deadline import Deadline

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["HEADER_BYTES", "Damaged", "HeaderMismatch", "LinkLost", "Mailbox", "Sink", "Transfer", "Transport"]

HEADER_BYTES: int = 64
"""The size of the header in front of every message; its content is core's business."""


_AT_ONCE_S = 1e-9

Sink = Callable[[memoryview, int], None]
"""A function that takes the parts of a message: ``sink(data, offset)``; see `Transport.consume`."""


class LinkLost(ConnectionError):
    """The connection to a rank broke. A transport raises it; core finds out why and raises the typed error.

    A transport that cannot see that a peer is lost need not: core sees it by its own connection, and calls `Backend.abort`. After that a
    transport raises it as well, with any rank as ``peer``: core knows the reason by then, and reads neither.

    Parameters
    ----------
    peer
        The rank at the other end, as the backend numbers them.
    reason
        The reason, in words.
    """

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(f"the connection to rank {peer} broke: {reason}")
        self.peer: int = peer
        self.reason: str = reason


class HeaderMismatch(Exception):
    """A message came with another header than expected: the ranks do not make the same call. Core explains it on every rank.

    Parameters
    ----------
    peer
        The rank that sent it.
    header
        The header that came, or as much of it as is known.
    """

    def __init__(self, peer: int, header: bytes) -> None:
        super().__init__(f"an unexpected message from rank {peer}")
        self.peer: int = peer
        self.header: bytes = header


class Damaged(Exception):
    """A message was damaged or lost. A transport that notices it raises this; core ends the job, and no call gets the bytes.

    Parameters
    ----------
    peer
        The rank that sent it.
    reason
        The fault, in words.
    """

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer: int = peer
        self.reason: str = reason


class Transfer(ABC):
    """One message on its way. A transport makes it, with both attributes, and may set them in any thread.

    Attributes
    ----------
    done
        True once a send's memory may be reused, or a receive's memory is filled. It never becomes False again, and the transport
        does not touch the memory from then on.
    moved
        How many bytes have moved so far, with those of the header or without; it never shrinks, and all have moved when the transfer is
        done. It distinguishes a slow message from a stalled one, of which core suspects a deadlock.
    """

    __slots__ = ("done", "moved")

    done: bool
    moved: int


class Mailbox(ABC):
    """Short messages to and from one peer, in memory that the transport owns. No object is made, and nothing is looked up.

    The messages are the same as those of `Transport.send` and `Transport.recv`, in one common order. So a rank may use either
    way, whatever its peer does. At most one thread at a time posts to a mailbox, and at most one fetches from it.

    Core writes a payload into ``outgoing[next_out]`` and posts it. It fetches a payload and reads it in ``incoming[next_in]``; the payload
    there stays unchanged until the next fetch or receive from this peer.

    Attributes
    ----------
    outgoing, incoming
        One or more slots, each a memoryview of bytes for one payload. All have one length, that of the longest payload.
    next_out
        The slot to fill next. It may be filled unless a transfer that `post` returned is not done yet.
    next_in
        The slot with the payload that was fetched last.
    compiled
        `Bootstrap.native` if the mailbox has a C form, which the compiled executor then uses in place of `post` and `fetch`; else None.
    c_mailbox
        The C form: a capsule that `oneaccord_native/mailbox.h` describes. None if there is none.
    posted_bytes
        The longest message that core posts though it will not be reduced; longer ones go by `Transport.lend` and `Transport.recv`. None, the
        default, if that is the length of the slots. The same on both ranks.
    """

    compiled: ModuleType | None = None
    c_mailbox: Any = None
    posted_bytes: int | None = None

    __slots__ = ("incoming", "next_in", "next_out", "outgoing")

    outgoing: tuple[memoryview, ...]
    incoming: tuple[memoryview, ...]
    next_out: int
    next_in: int

    @abstractmethod
    def post(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        """Send the first bytes of slot ``next_out``; do not block.

        Parameters
        ----------
        header
            The message's header, which is copied: core writes the next one into the same memory.
        nbytes
            How many bytes of the slot are the payload; may be 0.

        Returns
        -------
        Transfer or None
            None if the next slot may be filled at once; otherwise a transfer to wait for first.

        Raises
        ------
        LinkLost
            The connection broke.
        """

    def unsent(self) -> Transfer | None:
        """Return what a message waits for that the compiled executor has posted here; None, the default, if all of it went at once."""
        return None

    def recall(self, transfer: Transfer) -> bool:
        """Give up a receive of the next message from this peer, here or by `Transport.recv`, of which nothing has come; return whether that was so.

        The message then comes with the next fetch or receive. By default no receive is given up. A mailbox in C should do it: while Python has such a
        receive, C cannot look for the message.

        Parameters
        ----------
        transfer
            The receive, from `fetch` or `Transport.recv`.
        """
        return False

    @abstractmethod
    def fetch(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        """Receive the next message. Poll for it for a moment, but do not block.

        The moment is at most a few hundred microseconds. Meanwhile, yield the processor to others.

        Parameters
        ----------
        header
            The header that it must have; stays unchanged until the message is there.
        nbytes
            The length of its payload.

        Returns
        -------
        Transfer or None
            None if the payload is in slot ``next_in``; otherwise a transfer to wait for first.

        Raises
        ------
        HeaderMismatch
            Another header came, here or from `Transport.wait`.
        LinkLost
            The connection broke.
        """


class Transport(ABC):
    """Ordered, reliable messages between any two ranks of a group.

    A message is a header of `HEADER_BYTES` bytes and a payload. Core promises:

    - It keeps at most one unfinished send and one unfinished receive for each peer. It calls `send`, `recv`, `consume` and `mailbox` only
      for peers that it has connected.
    - Payloads are one-dimensional, contiguous memoryviews of bytes (format ``"B"``), of any length from 0. The two ends of a message
      name the same length, or their headers differ.
    - A transport of an even channel is used by one thread at a time. One of an odd channel, which carries sends and receives of the user, is
      used by several: each has its own (peer, direction), and several may be in `wait` at once, for different transfers.
    - After `LinkLost`, `HeaderMismatch`, `Damaged` or any exception that is not listed here, the job ends: core calls `Backend.abort`,
      and starts nothing new on any transport.

    The transport promises:

    - The messages from one rank to one other arrive in the order in which they were sent. There is no order between peers, and none
      between channels.
    - A transfer needs to make progress only during a wait for it. But a send that is ``done`` arrives without any further call: a
      transport that copies the payload and returns a transfer that is done must move the copy by itself, in the kernel or a thread.
    - Nothing blocks but `connect` and `wait`, and these end at their deadline and at `Backend.abort`.

    Attributes
    ----------
    streams
        If true, messages of any length are sent whole, and `consume` receives those that are to be reduced, without memory of
        core. If false, core cuts long messages into pieces, and receives a message to be reduced into memory of its own, one piece
        while it reduces the other. The same on all ranks.
    eager_bytes
        The longest message with a tag that core may send before its receive is known; None, the default, leaves that to core.
    """

    streams: bool = False
    eager_bytes: int | None = None

    @abstractmethod
    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Prepare to talk to some ranks. Core calls it before the first message to each of them.

        It must not wait until a peer calls `connect` too: the peer may come much later, or wait for a third rank first. The work of the other
        end belongs in a background thread, such as the one that runs ``accept`` of `Bootstrap.listen`, or in the factory.

        Core may name a peer again that is connected, and two threads may name the same peer at once.

        Parameters
        ----------
        peers
            The ranks, at least one; never this rank.
        deadline
            By when they must be connected.

        Raises
        ------
        LinkLost
            A peer cannot be reached, or `Backend.abort` was called.
        TimeoutError
            The deadline passed.
        """

    @abstractmethod
    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to send a message; do not block. The message may be done when this returns.

        Parameters
        ----------
        peer
            The rank that it is for.
        header
            Its header, of `HEADER_BYTES` bytes.
        payload
            The memory to send, which may be read-only, and does not change until the transfer is done. The transport reads it until then
            and no longer. It may copy the payload and be done at once, at the price of the copy.

        Returns
        -------
        Transfer
            The transfer for `wait`, unless it is done.

        Raises
        ------
        LinkLost
            The connection broke.
        """

    def lend(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to send a message that the peer receives by `recv`, never by `Mailbox.fetch`, nor by `consume`. By default, it is sent.

        Parameters
        ----------
        peer, header, payload
            As for `send`.

        Returns
        -------
        Transfer
            As for `send`.

        Raises
        ------
        LinkLost
            The connection broke.
        """
        return self.send(peer, header, payload)

    @abstractmethod
    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to receive the next message; do not block. The message may be done when this returns.

        If the first `HEADER_BYTES` bytes that arrive differ from ``header``, this or `wait` raises `HeaderMismatch` as soon as they are
        there, without waiting for a payload. If they are equal, ``payload`` is exactly as long as the payload that follows.

        Parameters
        ----------
        peer
            The rank that sends it.
        header
            The header that it must have.
        payload
            The memory to fill: the user's own, or core's. After an error its content is undefined.

        Returns
        -------
        Transfer
            The transfer for `wait`, unless it is done.

        Raises
        ------
        HeaderMismatch
            Another message came.
        LinkLost
            The connection broke.
        """

    @abstractmethod
    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Return once at least one of some transfers is done, and not before. All the moving of bytes may happen in here.

        After a `TimeoutError` the transfers are still on their way, and their memory still belongs to the transport: core looks around a few times a
        second, and then waits for them again. After any other exception, and after the last `TimeoutError`, core aborts the backend, and the
        user may free the memory or write to it. If threads or devices of the transport may still touch it, the transport then keeps the memoryview until they
        have stopped, so that the memory stays valid; what they write there is lost without harm.

        Parameters
        ----------
        transfers
            Results of `send`, `recv`, `consume`, `Mailbox.post` or `Mailbox.fetch` of this transport, none of which was done when core last looked.
            All of them must make progress, not only the first: a peer may wait for the last one.
        deadline
            Until when to wait.

        Raises
        ------
        HeaderMismatch
            A message was not the expected one.
        LinkLost
            A connection broke, or `Backend.abort` was called.
        Damaged
            A message did not come as it was sent.
        TimeoutError
            The deadline passed.
        """

    def poll(self, transfers: Sequence[Transfer]) -> None:
        """Move what can be moved now, without waiting. By default a `wait` whose deadline passes at once.

        Parameters
        ----------
        transfers
            As for `wait`; one at least.

        Raises
        ------
        HeaderMismatch, LinkLost, Damaged
            As for `wait`.
        """
        with suppress(TimeoutError):
            self.wait(transfers, Deadline(_AT_ONCE_S))

    def interrupt(self) -> bool:
        """Let the `wait` of another thread end now, with `TimeoutError`, or the next one if none waits. Never blocks; called in any thread.

        Core calls it when that thread should wait for other transfers as well. Otherwise it waits for short times.

        Returns
        -------
        bool
            Whether the transport can do so; False by default.
        """
        return False

    def consume(self, peer: int, header: bytes, nbytes: int, sink: Sink) -> Transfer:
        """Start to receive a message, and pass each part of it to a function without a copy; do not block.

        Only transports with `streams` offer it. ``sink(data, offset)`` is called once for each part, in any order, from here or from `wait`:
        ``data`` is a read-only memoryview of bytes, valid only during the call; ``offset`` is its position in the payload.
        Every part begins at a multiple of 64 bytes. The transfer is done when all parts have been passed on. An exception from
        the sink is raised as it is, and ends the transport.

        Parameters
        ----------
        peer, header
            As for `recv`.
        nbytes
            The length of the payload; never 0.
        sink
            The function that takes the parts, in the thread that called this or `wait`.

        Returns
        -------
        Transfer
            The transfer for `wait`, unless it is done.

        Raises
        ------
        HeaderMismatch, LinkLost
            As for `recv`.
        """
        raise NotImplementedError(f"the transport {type(self).__name__} does not support consume(): its streams is False")

    def mailbox(self, peer: int) -> Mailbox | None:
        """Return a mailbox for short messages to and from a rank; None, the default, if the transport has none.

        Core asks once for each peer, after `connect`.

        Parameters
        ----------
        peer
            The rank.

        Returns
        -------
        Mailbox or None
            The mailbox, which lives as long as the transport.
        """
        return None

    def close(self) -> None:  # noqa: B027 - a transport that holds nothing of its own need not do anything
        """Release the resources of this transport alone, such as its connections. Never blocks; may be called from any thread.

        Core calls it once, when every rank of its group has finished with the group, so nothing is on its way and no call follows. When the whole
        job ends, core calls only `Backend.close`.
        """
