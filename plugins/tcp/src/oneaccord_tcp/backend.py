"""The tcp backend: one link per pair of ranks and channel, made when the two first talk.

A link is one connection or several. The first carries everything except the later segments of long messages; each of the
others carries one such segment. The two ranks cut a message alike, and messages never overtake each other: so each end knows what comes on each.

The lower rank always dials, so that two ranks that need each other at once do not make two connections. When the
higher one needs the link first and the lower has not dialled within a moment, it knocks: a short connection that makes the
lower rank dial. The dialling rank decides the number of connections of the link, and says so in the hello of each.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from oneaccord.api import (
    HEADER_BYTES,
    Backend,
    Bootstrap,
    ConfigError,
    Deadline,
    LinkLost,
    Mailbox,
    Seal,
    Sink,
    Thread,
    Transfer,
    Transport,
    read_cards,
    write_card,
)
from oneaccord_tcp.interfaces import address_of
from oneaccord_tcp.mailbox import Box, Patience, TcpMailbox, aligned, compiled_mailbox, yield_processor
from oneaccord_tcp.plugin import MOST_STREAMS, TcpConfig
from oneaccord_tcp.sealed import SealedReceiving, SealedSending
from oneaccord_tcp.streams import SEGMENT_BYTES, enough_streams, segments
from oneaccord_tcp.transfers import Consuming, Moving, Receiving, Sending, Striped

__all__ = ["TcpBackend", "TcpTransport"]

_RINGS = 4096
_HELLO = struct.Struct("<4sBBBxIII")  # "tcp", purpose, index and count of the connection, channel, rank, attempt
_LINK, _KNOCK, _PROBE = 0, 1, 2
_KNOCK_AFTER_S = 0.02
_KNOCK_AGAIN_S = 1.0
_STAGING_BYTES = 1 << 18
"""The bytes that are reduced at once: they are still in the cache, while the kernel moves the next."""

_Link = tuple[socket.socket, ...]
"""The connections to a peer on a channel, the one that carries headers first."""


@dataclass(frozen=True, slots=True)
class _Card:
    """The address of a rank's listener."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not 0 < self.port < 1 << 16:
            raise ValueError(f"{self.port} is not a port")


class TcpBackend(Backend):
    """Connections to the other ranks.

    Parameters
    ----------
    bootstrap
        This rank, and its way to reach the others.

    Raises
    ------
    ConfigError
        The configured interface does not exist, or the host does not offer the configured congestion control.
    RendezvousError
        This rank cannot listen at the configured address.
    DeadlineError
        Another rank did not get ready in time.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        config = bootstrap.config
        assert isinstance(config, TcpConfig)
        _check_congestion_control(config.congestion_control)
        self._config = config
        self._bootstrap = bootstrap
        self.rank: int = bootstrap.rank
        self._size = bootstrap.world_size
        self.patience: Patience = Patience.of(bootstrap.world_size, config.spin_us)
        self._make_box = TcpMailbox if bootstrap.native is None else compiled_mailbox(bootstrap.native)
        self._boxes: dict[socket.socket, Box] = {}
        self._changed = threading.Condition()
        self._links: dict[tuple[int, int], _Link] = {}
        self._dialling: set[tuple[int, int]] = set()
        self._attempts = itertools.count()
        self._bells: list[socket.socket] = []
        # Of links that are not whole yet, by channel, peer, attempt and count: one whose dial failed half-way never mixes with the next.
        self._arriving: dict[tuple[int, int, int, int], dict[int, socket.socket]] = {}
        self._ended = ""
        host = config.host or (address_of(config.interface) if config.interface else bootstrap.host)
        self._addresses: list[tuple[str, int]] = []
        self._early_knocks: list[tuple[int, int]] = []
        listening, port = bootstrap.listen(host, self._accept)
        # A rank that listens at all addresses is dialled at its address for the meeting: its own name for "all addresses" leads each to itself.
        reachable = bootstrap.host if listening in ("0.0.0.0", "::") else listening  # noqa: S104 - compared, not bound
        self._streams: dict[str, int] = {}
        try:
            cards = read_cards(bootstrap.exchange("tcp", write_card(_Card(reachable, port))), _Card)
            addresses = [(card.host, card.port) for card in cards]
            self._streams[addresses[self.rank][0]] = 1
            with self._changed:
                self._addresses = addresses
                knocks, self._early_knocks = self._early_knocks, []
            for channel, peer in knocks:
                self._start_dial(channel, peer)
        except BaseException:  # ranks that are ready already may have dialled this one
            self.close()
            raise

    def open_transport(self, channel: int) -> TcpTransport:
        """Return the transport of a channel."""
        return TcpTransport(self, channel)

    def abort(self) -> None:
        """Shut every connection down, which wakes the threads that wait for one."""
        self._end("the job was aborted")
        for sock in itertools.chain.from_iterable(list(self._links.values())):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close every connection."""
        self._end("the backend was closed")
        with self._changed:
            for link in self._links.values():
                self._close(link)
            self._links.clear()
            _close_all(self._bells)

    def bell(self) -> tuple[socket.socket, socket.socket]:
        """Return two ends of a connection to oneself, which wakes a thread that waits; closed with the backend."""
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(False)
        self._bells += ends
        return ends

    def close_channel(self, channel: int) -> None:
        """Close the connections of a channel that no rank uses any more."""
        with self._changed:
            for key in [key for key in self._links if key[0] == channel]:
                self._close(self._links.pop(key))
            self._forget(lambda key: key[0] == channel)

    def _close(self, link: _Link) -> None:
        """Close a link; its mailbox, which may be C's, forgets the descriptor: the next socket may get the same."""
        box = self._boxes.pop(link[0], None)
        if box is not None:
            box.close()
        _close_all(link)

    def _forget(self, is_meant: Callable[[tuple[int, int, int, int]], bool]) -> None:
        """Close the connections of some links that never became whole."""
        for key in list(filter(is_meant, self._arriving)):
            _close_all(self._arriving.pop(key).values())

    def _end(self, reason: str) -> None:
        with self._changed:
            self._ended = self._ended or reason
            self._forget(lambda _: True)
            self._changed.notify_all()

    def seals(self, sock: socket.socket) -> tuple[Seal, Seal] | None:
        """Return the seals of the messages of a connection, if they have seals."""
        return self._bootstrap.seals(sock)

    def mailbox(self, sock: socket.socket, peer: int) -> Mailbox:
        """Return a mailbox over a connection."""
        box = self._boxes[sock] = self._make_box(sock, peer, self.patience)
        return box

    def link(self, channel: int, peer: int, deadline: Deadline) -> tuple[socket.socket, ...]:
        """Return the connections to ``peer``, made now if need be.

        Raises
        ------
        LinkLost
            The peer cannot be reached, or the backend ended.
        TimeoutError
            The deadline passed.
        """
        key = (channel, peer)
        dials = peer > self.rank
        knock_at = time.monotonic() + _KNOCK_AFTER_S
        while True:
            if dials:
                self._dial(channel, peer, deadline)
            with self._changed:
                limit = deadline.at if dials else min(knock_at, deadline.at)
                # Another thread's dial may fail, which is then for this one to try.
                idle = dials and key not in self._dialling
                if not idle:
                    self._changed.wait_for(
                        lambda: self._ended or key in self._links or (dials and key not in self._dialling),
                        max(0.0, limit - time.monotonic()),
                    )
                if self._ended:
                    raise LinkLost(peer, self._ended)
                if key in self._links:
                    return self._links[key]
            if deadline.passed():
                raise TimeoutError(f"no connection to rank {peer}")
            if not dials and time.monotonic() >= knock_at:
                knock_at = time.monotonic() + _KNOCK_AGAIN_S
                self._knock(channel, peer, deadline)

    def _knock(self, channel: int, peer: int, deadline: Deadline) -> None:
        """Ask a lower rank to dial."""
        self._bootstrap.dial(peer, self._addresses[peer], self._hello(_KNOCK, channel), deadline).close()

    def _hello(self, purpose: int, channel: int = 0, index: int = 0, count: int = 1, attempt: int = 0) -> bytes:
        return _HELLO.pack(b"tcp", purpose, index, count, channel, self.rank, attempt)

    def _dial(self, channel: int, peer: int, deadline: Deadline) -> None:
        key = (channel, peer)
        with self._changed:
            if self._ended or key in self._links or key in self._dialling:
                return
            self._dialling.add(key)
        try:
            self._add(key, self._connections(channel, peer, self._streams_to(peer, deadline), deadline))
        finally:
            with self._changed:
                self._dialling.discard(key)
                self._changed.notify_all()

    def _streams_to(self, peer: int, deadline: Deadline) -> int:
        """Return how many connections a link to a peer gets; the round trip to each host is measured once, by a short connection."""
        if self._config.streams != "auto":
            return self._config.streams
        host = self._addresses[peer][0]
        if host not in self._streams:
            with self._bootstrap.dial(peer, self._addresses[peer], self._hello(_PROBE), deadline) as probe:
                try:
                    self._tune(probe)
                    self._streams[host] = enough_streams(probe, self._size - 1)
                except OSError:  # the peer was quicker to close it: one connection always does
                    return 1
        return self._streams[host]

    def _connections(self, channel: int, peer: int, count: int, deadline: Deadline) -> _Link:
        """Dial the connections of a link, all at once: each takes a few round trips, and these are long if there are several connections."""
        attempt = next(self._attempts)
        hellos = [self._hello(_LINK, channel, index, count, attempt) for index in range(count)]
        address = self._addresses[peer]
        if count == 1:
            return (self._bootstrap.dial(peer, address, hellos[0], deadline),)
        from concurrent.futures import ThreadPoolExecutor

        # Not in the futures: if the pool cannot start a thread, another one dials what was submitted, and its future is lost.
        dialled: dict[int, socket.socket] = {}
        is_wanted = True

        def dial(index: int) -> None:
            sock = self._bootstrap.dial(peer, address, hellos[index], deadline)
            with self._changed:
                if is_wanted:
                    dialled[index] = sock
                    return
            sock.close()

        try:
            with ThreadPoolExecutor(count, "oneaccord-tcp-dial") as pool:
                futures = [pool.submit(dial, index) for index in range(count)]
            for future in futures:
                future.result()
            return tuple(dialled[index] for index in range(count))
        except BaseException as error:
            with self._changed:  # if this was interrupted, some are still on their way
                is_wanted = False
                _close_all(dialled.values())
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                hint = f"{error.strerror}; two ranks share {count} connections here; backends.tcp.streams = 1 needs the fewest"
                raise OSError(error.errno, hint) from error
            raise

    def _accept(self, sock: socket.socket, hello: bytes) -> None:
        """Take an authenticated connection; runs in core's background thread, so that it must not block."""
        magic, purpose, index, count, channel, peer, attempt = _HELLO.unpack_from(hello)
        is_known = (
            magic.rstrip(b"\0") == b"tcp"
            and 0 <= peer < self._size
            and peer != self.rank
            and self._bootstrap.is_from(sock, peer)
        )
        if is_known and purpose == _LINK and index < count <= MOST_STREAMS:
            self._gather((channel, peer, attempt, count), index, sock)
            return
        sock.close()  # even if the hello is invalid; the wait for that connection learns that it broke
        if not is_known or purpose != _KNOCK:
            return
        with self._changed:
            if not self._addresses:
                self._early_knocks.append((channel, peer))
                return
        self._start_dial(channel, peer)

    def _start_dial(self, channel: int, peer: int) -> None:
        Thread(target=self._answer_knock, args=(channel, peer), name="oneaccord-tcp-dial", daemon=True).start()

    def _answer_knock(self, channel: int, peer: int) -> None:
        # A peer that cannot be reached is lost, which the control connection notices; the knocking side has its own deadline.
        with contextlib.suppress(LinkLost, TimeoutError):
            self._dial(channel, peer, Deadline(10.0))

    def _gather(self, key: tuple[int, int, int, int], index: int, sock: socket.socket) -> None:
        """Keep a connection until its link is whole."""
        channel, peer, _, count = key
        with self._changed:
            if self._ended:
                sock.close()
                return
            arriving = self._arriving.setdefault(key, {})
            if index in arriving:
                arriving[index].close()
            arriving[index] = sock
            if len(arriving) < count:
                return
            del self._arriving[key]
            self._forget(lambda other: other[:2] == key[:2])
        self._add((channel, peer), tuple(arriving[number] for number in range(count)))

    def _add(self, key: tuple[int, int], link: _Link) -> None:
        try:
            for sock in link:
                self._tune(sock)
        except OSError:  # it broke already; the next use finds none, and the control connection gives the reason
            _close_all(link)
            return
        with self._changed:
            if self._ended or key in self._links:
                _close_all(link)
                return
            self._links[key] = link
            self._changed.notify_all()

    def _tune(self, sock: socket.socket) -> None:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, self._config.buffer_bytes)
        wanted = self._config.congestion_control
        if wanted == "auto":
            # Loopback loses nothing, and a host's default such as bbr paces it down to half its speed.
            wanted = "reno" if sock.getpeername()[0] == sock.getsockname()[0] else ""
        if wanted and hasattr(socket, "TCP_CONGESTION"):
            with contextlib.suppress(OSError):  # not built into this kernel: only slower
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, wanted.encode())


class TcpTransport(Transport):
    """Messages of one channel."""

    streams = True

    def __init__(self, backend: TcpBackend, channel: int) -> None:
        self._backend = backend
        self._channel = channel
        self._links: dict[int, _Link] = {}
        self._staging: dict[socket.socket, memoryview] = {}
        self._seals: dict[socket.socket, tuple[Seal, Seal]] = {}  # of connections whose messages bear them
        self._bell: tuple[socket.socket, socket.socket] | None = None
        self._is_interrupted = False

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Connect to ``peers``; those that this rank dials first, so that two ranks never wait for each other."""
        for peer in sorted(peers, key=lambda peer: peer < self._backend.rank):
            if peer not in self._links:
                self._links[peer] = self._backend.link(self._channel, peer, deadline)
                for sock in self._links[peer]:
                    seals = self._backend.seals(sock)
                    if seals is not None:
                        self._seals[sock] = seals

    def close(self) -> None:
        """Close the connections of this channel."""
        self._links.clear()
        self._staging.clear()
        self._seals.clear()
        self._backend.close_channel(self._channel)

    def mailbox(self, peer: int) -> Mailbox | None:
        """Return a mailbox that shares the first connection; None if messages have seals, or are encrypted: C cannot do that."""
        sock = self._links[peer][0]
        return None if sock in self._seals or type(sock).send is not socket.socket.send else self._backend.mailbox(sock, peer)

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to send, with one try at once."""

        def segment(sock: socket.socket, start: int, stop: int) -> Moving:
            seals = self._seals.get(sock)
            if seals is not None:
                return SealedSending(sock, peer, seals[0], b"" if start else header, payload[start:stop])
            return Sending(sock, peer, header, payload[start:stop], HEADER_BYTES if start else 0)

        return _begun(self._links[peer], len(payload), segment)

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to receive, with one try at once."""

        def segment(sock: socket.socket, start: int, stop: int) -> Moving:
            seals = self._seals.get(sock)
            if seals is not None:
                return SealedReceiving(sock, peer, seals[1], self._backend.rank, b"" if start else header, payload[start:stop])
            return Receiving(sock, peer, header, payload[start:stop], *((HEADER_BYTES, header) if start else ()))

        return _begun(self._links[peer], len(payload), segment)

    def consume(self, peer: int, header: bytes, nbytes: int, sink: Sink) -> Transfer:
        """Start to receive in parts of the size of the cache, with one try at once."""

        def segment(sock: socket.socket, start: int, stop: int) -> Moving:
            staging = self._staging.get(sock)
            if staging is None:
                staging = self._staging[sock] = aligned(_STAGING_BYTES)

            def shifted(data: memoryview, offset: int) -> None:
                sink(data, start + offset)

            seals = self._seals.get(sock)
            if seals is not None:
                own = b"" if start else header
                return SealedReceiving(sock, peer, seals[1], self._backend.rank, own, staging, stop - start, shifted)
            if not start:
                return Consuming(sock, peer, header, stop, staging, sink)
            return Consuming(sock, peer, header, stop - start, staging, shifted, HEADER_BYTES, header)

        return _begun(self._links[peer], nbytes, segment)

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Try for a moment, yielding the processor between tries, then block in the kernel."""
        moving = cast("Sequence[Moving | Striped]", transfers)  # made by send, recv and mailboxes
        tries, until = self._backend.patience.eager_tries, 0.0
        while True:
            progressed = done = False
            for transfer in moving:
                progressed = transfer.advance() or progressed
                done = transfer.done or done
            if done:
                return
            if progressed:
                if deadline.passed():
                    raise TimeoutError("the deadline passed")
                tries, until = self._backend.patience.eager_tries, 0.0
                continue
            tries -= 1
            if tries >= 0:
                continue
            if self._is_interrupted:
                self._is_interrupted = False
                if self._bell is not None:
                    with contextlib.suppress(OSError):
                        self._bell[0].recv(_RINGS)
                raise TimeoutError("the wait was interrupted")
            now = time.monotonic()
            until = until or now + self._backend.patience.spin_s
            if now < until:
                if now >= deadline.at:
                    raise TimeoutError("the deadline passed")
                yield_processor()
            else:
                _block(moving, deadline, None if self._bell is None else self._bell[0])

    def poll(self, transfers: Sequence[Transfer]) -> None:
        """Move what can be moved now."""
        for transfer in cast("Sequence[Moving | Striped]", transfers):
            transfer.advance()

    def interrupt(self) -> bool:
        """Wake the thread that waits; from the second time on, since the first wait may have begun without a bell."""
        is_new = self._bell is None
        if self._bell is None:
            self._bell = self._backend.bell()
        self._is_interrupted = True
        with contextlib.suppress(OSError):  # it has rung often enough
            self._bell[1].send(b"\0")
        return not is_new


def _begun(link: _Link, nbytes: int, segment: Callable[[socket.socket, int, int], Moving]) -> Transfer:
    """Return a message on its way, which ``segment(sock, start, stop)`` makes, or each of its segments."""
    transfer: Moving | Striped
    if len(link) == 1 or nbytes < 2 * SEGMENT_BYTES:
        transfer = segment(link[0], 0, nbytes)
    else:
        transfer = Striped([segment(sock, *span) for sock, span in zip(link, segments(nbytes, len(link)), strict=False)])
    transfer.advance()
    return transfer


def _close_all(socks: Iterable[socket.socket]) -> None:
    for sock in socks:
        sock.close()


def _block(transfers: Sequence[Moving | Striped], deadline: Deadline, bell: socket.socket | None) -> None:
    """Sleep in the kernel until a transfer can continue, or the bell rings."""
    remaining = deadline.remaining()
    if not remaining:
        raise TimeoutError("the deadline passed")
    events: dict[int, int] = {}
    for part in itertools.chain.from_iterable(transfer.pending for transfer in transfers):
        if part.fd < 0:
            raise LinkLost(part.peer, "the connection was closed")
        events[part.fd] = events.get(part.fd, 0) | part.event
    if bell is not None and bell.fileno() >= 0:
        events[bell.fileno()] = select.POLLIN
    poll = select.poll()
    for fd, mask in events.items():
        poll.register(fd, mask)
    ready = poll.poll(remaining * 1000)
    # A ring that comes after its interruption was seen must not wake every wait from then on.
    if bell is not None and any(fd == bell.fileno() for fd, _ in ready):
        with contextlib.suppress(OSError):
            bell.recv(_RINGS)


def _check_congestion_control(name: str) -> None:
    """Refuse a congestion control that was asked for by name and cannot be had."""
    if name == "auto" or not hasattr(socket, "TCP_CONGESTION"):
        return
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError as error:
            allowed = ""
            with contextlib.suppress(OSError):
                allowed = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(encoding="ascii").strip()
            raise ConfigError(
                f"backends.tcp.congestion_control is {name!r}, which this host does not offer ({error.strerror}); it offers: "
                f"auto, {allowed.replace(' ', ', ') or 'unknown'}",
                key="backends.tcp.congestion_control",
                value=name,
            ) from None
