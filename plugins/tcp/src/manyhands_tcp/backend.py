"""The tcp backend: one socket per pair of ranks and channel, made when the two first talk.

Who dials: always the lower rank, so that two ranks that need each other at once do not make two connections. When the
higher one needs the link first and the lower has not dialled within a moment, it knocks: a short connection that asks the
lower rank to dial.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from manyhands.api import (
    Backend,
    Bootstrap,
    ConfigError,
    Deadline,
    LinkLost,
    Mailbox,
    Sink,
    Transfer,
    Transport,
    read_cards,
    write_card,
)
from manyhands_tcp.interfaces import address_of
from manyhands_tcp.mailbox import Box, Patience, TcpMailbox, aligned, compiled_mailbox, yield_processor
from manyhands_tcp.plugin import TcpConfig
from manyhands_tcp.transfers import Consuming, Moving, Receiving, Sending

__all__ = ["TcpBackend", "TcpTransport"]

_HELLO = struct.Struct("<4sBxxxII")  # "tcp", purpose, channel, rank
_LINK, _KNOCK = 0, 1
_KNOCK_AFTER_S = 0.02
_KNOCK_AGAIN_S = 1.0
_STAGING_BYTES = 1 << 18
"""What is reduced at once: it is still in the cache, while the kernel moves the next."""


@dataclass(frozen=True, slots=True)
class _Card:
    """Where a rank listens."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not 0 < self.port < 1 << 16:
            raise ValueError(f"there is no port {self.port}")


class TcpBackend(Backend):
    """Connections to the other ranks.

    Parameters
    ----------
    bootstrap
        Who this rank is, and how it finds the others.

    Raises
    ------
    ConfigError
        The configured interface does not exist, or the host does not offer the configured congestion control.
    RendezvousError
        This rank cannot listen where it was told to.
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
        self._links: dict[tuple[int, int], socket.socket] = {}
        self._dialling: set[tuple[int, int]] = set()
        self._ended = ""
        host = config.host or (address_of(config.interface) if config.interface else bootstrap.host)
        self._addresses: list[tuple[str, int]] = []
        self._early_knocks: list[tuple[int, int]] = []
        listening, port = bootstrap.listen(host, self._accept)
        # Whoever listens everywhere is dialled where the others meet it: its own word for "everywhere" leads each to itself.
        reachable = bootstrap.host if listening in ("0.0.0.0", "::") else listening  # noqa: S104 - compared, not bound
        cards = read_cards(bootstrap.exchange("tcp", write_card(_Card(reachable, port))), _Card)
        addresses = [(card.host, card.port) for card in cards]
        with self._changed:
            self._addresses = addresses
            knocks, self._early_knocks = self._early_knocks, []
        for channel, peer in knocks:
            self._start_dial(channel, peer)

    def open_transport(self, channel: int) -> TcpTransport:
        """Return the transport of a channel."""
        return TcpTransport(self, channel)

    def abort(self) -> None:
        """Shut every connection down, which wakes whoever waits for one."""
        self._end("the job was aborted")
        for sock in list(self._links.values()):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close every connection."""
        self._end("the backend was closed")
        with self._changed:
            for sock in self._links.values():
                self._close(sock)
            self._links.clear()

    def close_channel(self, channel: int) -> None:
        """Close the connections of a channel that no rank uses any more."""
        with self._changed:
            for key in [key for key in self._links if key[0] == channel]:
                self._close(self._links.pop(key))

    def _close(self, sock: socket.socket) -> None:
        """Close a connection; its mailbox, which may be C's, forgets the descriptor: the next socket may get the same."""
        box = self._boxes.pop(sock, None)
        if box is not None:
            box.close()
        sock.close()

    def _end(self, reason: str) -> None:
        with self._changed:
            self._ended = self._ended or reason
            self._changed.notify_all()

    def mailbox(self, sock: socket.socket, peer: int) -> Mailbox:
        """Return a mailbox over a connection."""
        box = self._boxes[sock] = self._make_box(sock, peer, self.patience)
        return box

    def link(self, channel: int, peer: int, deadline: Deadline) -> socket.socket:
        """Return the connection to ``peer``, made now if need be.

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
        hello = _HELLO.pack(b"tcp", _KNOCK, channel, self.rank)
        self._bootstrap.dial(peer, self._addresses[peer], hello, deadline).close()

    def _dial(self, channel: int, peer: int, deadline: Deadline) -> None:
        key = (channel, peer)
        with self._changed:
            if self._ended or key in self._links or key in self._dialling:
                return
            self._dialling.add(key)
        try:
            sock = self._bootstrap.dial(peer, self._addresses[peer], _HELLO.pack(b"tcp", _LINK, channel, self.rank), deadline)
            self._add(key, sock)
        finally:
            with self._changed:
                self._dialling.discard(key)
                self._changed.notify_all()

    def _accept(self, sock: socket.socket, hello: bytes) -> None:
        """Take an authenticated connection; runs in core's background thread, so that it must not block."""
        magic, purpose, channel, peer = _HELLO.unpack_from(hello)
        if magic.rstrip(b"\0") != b"tcp" or purpose not in (_LINK, _KNOCK) or not 0 <= peer < self._size or peer == self.rank:
            sock.close()  # no rank says so; who waits for that connection is told that it broke
            return
        if purpose == _LINK:
            self._add((channel, peer), sock)
            return
        sock.close()
        with self._changed:
            if not self._addresses:
                self._early_knocks.append((channel, peer))
                return
        self._start_dial(channel, peer)

    def _start_dial(self, channel: int, peer: int) -> None:
        threading.Thread(target=self._answer_knock, args=(channel, peer), name="manyhands-tcp-dial", daemon=True).start()

    def _answer_knock(self, channel: int, peer: int) -> None:
        # A peer that cannot be reached is lost, which the control connection notices; the knocking side has its own deadline.
        with contextlib.suppress(LinkLost, TimeoutError):
            self._dial(channel, peer, Deadline(10.0))

    def _add(self, key: tuple[int, int], sock: socket.socket) -> None:
        try:
            self._tune(sock)
        except OSError:  # it broke already; whoever needs it finds none, and the control connection tells why
            sock.close()
            return
        with self._changed:
            if self._ended or key in self._links:
                sock.close()
                return
            self._links[key] = sock
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
        self._links: dict[int, socket.socket] = {}
        self._staging: dict[int, memoryview] = {}

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Connect to ``peers``; those that this rank dials first, so that two ranks never wait for each other."""
        for peer in sorted(peers, key=lambda peer: peer < self._backend.rank):
            if peer not in self._links:
                self._links[peer] = self._backend.link(self._channel, peer, deadline)

    def close(self) -> None:
        """Close the connections of this channel."""
        self._links.clear()
        self._backend.close_channel(self._channel)

    def mailbox(self, peer: int) -> Mailbox:
        """Return a mailbox that shares the connection."""
        return self._backend.mailbox(self._links[peer], peer)

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to send, with one try at once."""
        transfer = Sending(self._links[peer], peer, header, payload)
        transfer.advance()
        return transfer

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to receive, with one try at once."""
        transfer = Receiving(self._links[peer], peer, header, payload)
        transfer.advance()
        return transfer

    def consume(self, peer: int, header: bytes, nbytes: int, sink: Sink) -> Transfer:
        """Start to receive in parts of the size of the cache, with one try at once."""
        staging = self._staging.get(peer)
        if staging is None:
            staging = self._staging[peer] = aligned(_STAGING_BYTES)
        transfer = Consuming(self._links[peer], peer, header, nbytes, staging, sink)
        transfer.advance()
        return transfer

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Try for a moment, yielding the processor between tries, then block in the kernel."""
        moving = cast("Sequence[Moving]", transfers)  # made by send, recv and mailboxes
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
            now = time.monotonic()
            until = until or now + self._backend.patience.spin_s
            if now < until:
                yield_processor()
            else:
                _block(moving, deadline)


def _block(transfers: Sequence[Moving], deadline: Deadline) -> None:
    """Sleep in the kernel until a transfer can go on."""
    remaining = deadline.remaining()
    if not remaining:
        raise TimeoutError("the deadline passed")
    events: dict[int, int] = {}
    for transfer in transfers:
        if transfer.fd < 0:
            raise LinkLost(transfer.peer, "the connection was closed")
        events[transfer.fd] = events.get(transfer.fd, 0) | transfer.event
    poll = select.poll()
    for fd, mask in events.items():
        poll.register(fd, mask)
    poll.poll(remaining * 1000)


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
