"""Authenticated sockets: listening and dialling."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from oneaccord.contract.deadline import Deadline
from oneaccord.errors import AuthenticationError, DeadlineError, RendezvousError
from oneaccord.net.credentials import Credentials
from oneaccord.net.forking import close_after_fork
from oneaccord.net.handshake import (
    CLIENT_BYTES,
    GREETING_BYTES,
    KNOCK_BYTES,
    MAGIC,
    MAGIC_BEFORE_TLS,
    REFUSAL,
    REPLY_BYTES,
    ClientHandshake,
    ServerHandshake,
    is_knock,
    knock,
    may_be_ours,
    refusal,
)
from oneaccord.net.loop import Loop
from oneaccord.net.names import resolve, resolve_patiently
from oneaccord.net.proven import ProvenSocket

if TYPE_CHECKING:
    from oneaccord.net.tls import TlsHandshake

__all__ = [
    "BACKLOG",
    "Address",
    "AnotherSecretError",
    "Listener",
    "bind",
    "dial",
    "guarded",
    "guarded_bind",
    "hold",
    "show_address",
]

_log = logging.getLogger("oneaccord.network")

Address = tuple[str, int]

_HANDSHAKE_S = 20.0
"""How long a stranger may take to prove itself."""
_RESOLVE_S = 30.0
"""How long the name of this host may take to resolve, if no deadline is given."""
BACKLOG = 4096
_MAX_STRANGERS = 128
"""How many connections that have not knocked a listener keeps at once; the oldest goes for a newcomer."""
_MAX_CALLERS = 1024
"""The most connections that have knocked: ranks of this job, or knocks recorded longer ago than `_MAX_HEARD` knocks."""
_MAX_HEARD = 8192
"""The number of knocks that a listener remembers, in order to take each only once."""
_AT_ONCE = 16
"""How many connections it takes before the loop serves others again."""


class AnotherSecretError(AuthenticationError):
    """The listener is of another job, which has another secret."""


def show_address(address: Address) -> str:
    """Return ``host:port``, with brackets around an IPv6 host."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(host: str, port: int, deadline: Deadline | None = None) -> socket.socket:
    """Return a socket that listens on exactly this host's address. A name that is not known yet is asked for again until the deadline.

    Raises
    ------
    DeadlineError
        The name did not resolve in time.
    RendezvousError
        The address is not this host's, or the port is in use; its cause is the OSError.
    """
    where = show_address((host, port))
    deadline = deadline or Deadline(_RESOLVE_S)
    try:
        candidates = resolve_patiently(host, port, deadline, socket.AI_PASSIVE)
    except (socket.gaierror, TimeoutError) as error:
        raise DeadlineError(
            f"this host cannot listen at {where}: the name {host!r} did not resolve within {deadline.timeout_s:g} s "
            f"({error.strerror or error}). Is it the name of this host?"
        ) from error
    failure: OSError | None = None
    for family, kind, protocol, _, address in candidates:
        sock = close_after_fork(socket.socket(family, kind, protocol))
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            failure = error
        else:
            return sock
    if failure is not None and failure.errno == errno.EADDRINUSE:
        remedy = "the port is in use, by another program or another job: choose a free one, or let `oneaccord run` choose on a single host"
    elif failure is not None and failure.errno == errno.EADDRNOTAVAIL:
        remedy = "this host has no such address"
    else:
        remedy = str(failure)
    raise RendezvousError(f"this host cannot listen at {where}: {remedy}") from failure


def guarded_bind(address: Address, credentials: Credentials, deadline: Deadline | None = None) -> socket.socket:
    """Return a socket that listens at ``address``, unless it is public and the job has no secret that keeps strangers out.

    Raises
    ------
    RendezvousError
        As `bind`.
    AuthenticationError
        Anybody could join.
    """
    return guarded(bind(*address, deadline), credentials)


def guarded(sock: socket.socket, credentials: Credentials) -> socket.socket:
    """Return a socket that listens, or close it and raise an `AuthenticationError` if anybody could join there."""
    try:
        credentials.check_reach(sock.getsockname()[0], "listening at")
    except AuthenticationError:
        sock.close()
        raise
    return sock


def hold(host: str) -> socket.socket:
    """Return a socket that is bound to a free port of an address of this host, and does not listen: until it does, connections are refused.

    Raises
    ------
    OSError
        The address is not this host's, or there are no descriptors.
    """
    sock = close_after_fork(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
    try:
        sock.bind(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][4])
    except OSError:
        sock.close()
        raise
    return sock


def dial(
    address: Address, credentials: Credentials, hello: bytes, deadline: Deadline, cancelled: Callable[[], bool] = lambda: False
) -> ProvenSocket:
    """Connect, prove the secret both ways, encrypt if the job does, and return the non-blocking socket.

    A listener that takes the connection and says nothing may be a rank that is still importing, or busy: it has until the deadline.
    ``cancelled`` is asked several times a second whether to give up.

    Raises
    ------
    ConnectionError
        No program listens there, or the connection broke, or the dial was cancelled; `RendezvousError` if the listener is not
        oneaccord.
    AuthenticationError
        The two sides hold different secrets, or one does not trust the other's certificate, or one has none; or the other side is on another
        host, and the job has no secret that is hard to guess.
    TimeoutError
        The other side did not answer in time.
    OSError
        The host cannot be reached.
    """
    where = show_address(address)
    sock = _connect(address, deadline, cancelled)
    try:
        # A program that has taken the port sees the knock, which lets it guess a secret.
        credentials.check_reach(sock.getpeername()[0], "meeting at")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        magic, other_magic = _magics(credentials)
        sock.send(knock(credentials.secret, magic))  # 72 bytes, and later 136, into an empty socket buffer always fit
        handshake = ClientHandshake(credentials.secret, hello)
        reply = greeting = _receive_exactly(sock, GREETING_BYTES, deadline, cancelled)
        if greeting.startswith(other_magic):
            job = f"the job at {where}"
            has, lacks = (job, "this rank") if credentials.tls is None else ("this rank", job)
            raise AuthenticationError(
                f"{has} encrypts its connections, but {lacks} does not: set security.tls on all ranks or on none"
            )
        if not greeting.startswith((magic, REFUSAL)):
            what = "another version of oneaccord" if greeting.startswith(MAGIC[:-2]) else "not a oneaccord job"
            raise RendezvousError(
                f"the program that listens at {where} is {what}: it sent {greeting[:40]!r}. Is the address right?"
            )
        if greeting.startswith(magic):
            sock.send(handshake.answer(greeting))
            reply = _receive_exactly(sock, REPLY_BYTES, deadline, cancelled)
        if not handshake.accepts(reply):
            is_own = not reply.startswith(REFUSAL) or reply == refusal(credentials.tag)
            whose = "the job" if is_own else f"another job than {credentials.run!r}, or one of another run,"
            raise (AuthenticationError if is_own else AnotherSecretError)(
                f"{whose} at {where} holds another secret than this rank: give all ranks the same ONEACCORD_SECRET "
                "(`oneaccord run` makes one per job), and check that the address is that of your own job"
            )
    except BaseException:
        sock.close()
        raise
    proven = ProvenSocket.over(sock, handshake.seals)
    encrypting = _encrypting(credentials, proven, False, handshake.said, address[0])
    return proven if encrypting is None else _encrypt(encrypting, where, deadline, cancelled)


def _magics(credentials: Credentials) -> tuple[bytes, bytes]:
    """Return the magic of this job's messages, and that of a job that has TLS if this one has not, or the other way round."""
    return (MAGIC, MAGIC_BEFORE_TLS) if credentials.tls is None else (MAGIC_BEFORE_TLS, MAGIC)


def _encrypting(
    credentials: Credentials, sock: ProvenSocket, is_server: bool, said: bytes, host: str = ""
) -> TlsHandshake | None:
    """Return the handshake of TLS, which takes the socket over, if the job uses TLS; the socket is closed if that fails."""
    if credentials.tls is None:
        return None
    from oneaccord.net.tls import TlsHandshake

    try:
        names = None if is_server else credentials.expected  # those of the listener
        return TlsHandshake(credentials.tls, sock, is_server, credentials.secret, said, host, names)
    except BaseException:
        sock.close()
        raise


def _encrypt(encrypting: TlsHandshake, where: str, deadline: Deadline, cancelled: Callable[[], bool]) -> ProvenSocket:
    try:
        while event := encrypting.advance():
            _wait_until(encrypting.sock, event, deadline, cancelled)
    except BaseException as error:
        encrypting.sock.close()
        if isinstance(error, AuthenticationError):
            remedy = "give all ranks certificates of one authority, which have not expired; `oneaccord certs` makes them"
            hint = f". To fix it, {remedy}" if "certificate" in str(error) and "tls_names" not in str(error) else ""
            raise AuthenticationError(f"the connection to {where} cannot be encrypted: {error}{hint}") from None
        raise
    return encrypting.sock


def _connect(address: Address, deadline: Deadline, cancelled: Callable[[], bool]) -> socket.socket:
    failure = OSError(f"{address[0]} has no address")
    candidates = resolve(*address, deadline)
    for number, (family, kind, protocol, _, place) in enumerate(candidates):
        # An address that swallows everything must leave time for the next one.
        share = Deadline(max(0.001, deadline.remaining() / (len(candidates) - number)))
        sock = close_after_fork(socket.socket(family, kind, protocol))
        try:
            sock.setblocking(False)
            error = sock.connect_ex(place)
            if error == errno.EINPROGRESS:
                _wait_until(sock, selectors.EVENT_WRITE, share, cancelled)
                error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            if sock.getsockname() == sock.getpeername():
                # The system may give an ephemeral port without a listener to this very socket, which then connects to itself.
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        except BaseException as error:  # such as the user's interrupt
            sock.close()
            if not isinstance(error, OSError):
                raise
            failure = error
        else:
            return sock
    raise failure


def _receive_exactly(sock: socket.socket, count: int, deadline: Deadline, cancelled: Callable[[], bool]) -> bytes:
    """Return ``count`` bytes; fewer when it is clear that they are none of ours."""
    data = b""
    while len(data) < count:
        _wait_until(sock, selectors.EVENT_READ, deadline, cancelled)
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionResetError(errno.ECONNRESET, "the other end closed the connection during the handshake")
        data += piece
        if not may_be_ours(data[: len(MAGIC)], REFUSAL):
            break
    return data


def _wait_until(sock: socket.socket, event: int, deadline: Deadline, cancelled: Callable[[], bool]) -> None:
    """Wait until ``sock`` is ready, checking now and then whether the connection is still wanted."""
    with selectors.DefaultSelector() as selector:
        selector.register(sock, event)
        while not selector.select(min(0.1, deadline.remaining())):
            if cancelled():
                raise ConnectionAbortedError(errno.ECONNABORTED, "the job was aborted")
            if deadline.passed():
                raise TimeoutError(
                    "the other end took the connection and sent nothing" if event == selectors.EVENT_READ else "no answer"
                )


class Listener:
    """A listening socket in a loop; hands over each connection that proved the secret.

    Parameters
    ----------
    loop
        The loop that serves it.
    sock
        A socket that listens; owned by the listener from now on.
    credentials
        The secrets that both sides prove.
    accept
        Called in the loop's thread with the non-blocking socket and the 64 bytes of its hello.
    refuse
        Called with the peer's address, and why in words, when a peer speaks oneaccord and is not let in.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        credentials: Credentials,
        accept: Callable[[ProvenSocket, bytes], None],
        refuse: Callable[[Address, str], None] = lambda *_: None,
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._credentials = credentials
        self._accept = accept
        self._refuse = refuse
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._callers: dict[socket.socket, _Stranger] = {}  # clients that have knocked, but not answered yet
        self._heard: dict[bytes, None] = {}
        self._expiring = self._refraining = False
        if loop.own(sock):
            sock.setblocking(False)
            loop.call(self._resume)

    def close(self) -> None:
        """Stop listening and drop every connection that has not proved itself; from any thread."""
        self._loop.call(self._close)

    def _close(self) -> None:
        self._loop.give_back(self._sock)
        for stranger in (*self._strangers.values(), *self._callers.values()):
            self._drop(stranger)

    def _incoming(self, _: int) -> None:
        for number in range(_AT_ONCE):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # usually, out of file descriptors
                if not number:  # otherwise there may be none: the kernel looks for a descriptor first
                    self._refrain(error)
                return
            self._refraining = False
            self._loop.own(sock)
            sock.setblocking(False)
            close_after_fork(sock)
            stranger = _Stranger(sock, (address[0], address[1]))
            self._keep(stranger, self._strangers, _MAX_STRANGERS)
            self._loop.watch(sock, selectors.EVENT_READ, lambda _, stranger=stranger: self._read(stranger))  # type: ignore[misc]
            self._read(stranger)  # a rank has usually knocked by now, and does not wait behind clients that have not

    def _refrain(self, error: OSError) -> None:
        """Give up a stranger for a newcomer; without any, leave newcomers in the kernel's queue for a moment, and say so."""
        if self._strangers:
            self._drop(next(iter(self._strangers.values())))
            return
        if not self._refraining:
            self._refraining = True
            _log.warning("oneaccord: cannot take a connection: %s", error)
        self._loop.forget(self._sock)
        self._loop.call_later(0.05, self._resume)

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.watch(self._sock, selectors.EVENT_READ, self._incoming)

    def _keep(self, stranger: _Stranger, among: dict[socket.socket, _Stranger], most: int) -> None:
        """Keep a connection for a while, instead of the oldest of its kind if there are too many."""
        among[stranger.sock] = stranger
        if len(among) > most:
            self._drop(next(iter(among.values())))
        if not self._expiring:
            self._expiring = True
            self._loop.call_later(_HANDSHAKE_S / 20, self._expire)

    def _expire(self) -> None:
        before = time.monotonic() - _HANDSHAKE_S
        for stranger in (*self._strangers.values(), *self._callers.values()):
            if stranger.since < before:
                self._drop(stranger)
        self._expiring = bool(self._strangers or self._callers)
        if self._expiring:
            self._loop.call_later(_HANDSHAKE_S / 20, self._expire)

    def _read(self, stranger: _Stranger) -> None:
        wanted = KNOCK_BYTES if stranger.handshake is None else CLIENT_BYTES
        try:
            piece = stranger.sock.recv(wanted - len(stranger.received))
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        stranger.received += piece
        if not piece or not may_be_ours(stranger.received[: len(MAGIC)]):
            self._drop(stranger)  # it gave up, or is not one of ours
            return
        if len(stranger.received) < wanted:
            return
        words, stranger.received = stranger.received, b""
        try:
            if stranger.handshake is None:
                self._hear(stranger, words)
            else:
                self._judge(stranger, stranger.handshake, words)
        except OSError:  # it has gone
            self._drop(stranger)

    def _hear(self, stranger: _Stranger, words: bytes) -> None:
        """Greet a client that knocked; a repeated knock comes from an attacker."""
        if words in self._heard:
            self._drop(stranger)
            return
        magic, other_magic = _magics(self._credentials)
        secret = self._credentials.secret
        if not is_knock(secret, words):
            self._turn_away(stranger)
            return
        handshake = ServerHandshake(secret, magic, self._credentials.tag)
        if words.startswith(other_magic):
            stranger.sock.send(handshake.greeting)  # which says so
            self._drop(stranger)
            self._refuse(stranger.address, f"{'without' if self._credentials.tls else 'with'} TLS")
            return
        self._heard[words] = None
        if len(self._heard) > _MAX_HEARD:
            del self._heard[next(iter(self._heard))]
        del self._strangers[stranger.sock]
        self._keep(stranger, self._callers, _MAX_CALLERS)
        stranger.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stranger.handshake = handshake
        stranger.sock.send(handshake.greeting)  # 40 bytes into an empty socket buffer always fit

    def _judge(self, stranger: _Stranger, handshake: ServerHandshake, words: bytes) -> None:
        reply, hello = handshake.answer(words)
        if hello is None:
            self._turn_away(stranger)
            return
        stranger.sock.send(reply)
        del self._callers[stranger.sock]
        self._loop.let_go(stranger.sock)
        proven = ProvenSocket.over(stranger.sock, handshake.seals)
        encrypting = _encrypting(self._credentials, proven, True, handshake.said)
        if encrypting is None:
            self._hand_over(proven, hello)
            return
        stranger.sock = encrypting.sock
        self._loop.own(stranger.sock)
        self._keep(stranger, self._callers, _MAX_CALLERS)
        self._encrypt(stranger, encrypting, hello)

    def _encrypt(self, stranger: _Stranger, encrypting: TlsHandshake, hello: bytes) -> None:
        try:
            event = encrypting.advance()
        except AuthenticationError as error:
            self._drop(stranger)
            self._refuse(stranger.address, f"with TLS that failed ({error})")
        except OSError:  # it has gone
            self._drop(stranger)
        else:
            if event:
                self._loop.watch(stranger.sock, event, lambda _: self._encrypt(stranger, encrypting, hello))
                return
            del self._callers[stranger.sock]
            self._loop.let_go(stranger.sock)
            with contextlib.suppress(OSError):  # it has gone
                self._hand_over(encrypting.sock, hello)

    def _hand_over(self, sock: ProvenSocket, hello: bytes) -> None:
        """Let a connection be taken; close it if that fails, such as when its other end has gone meanwhile."""
        try:
            self._accept(sock, hello)
        except BaseException:
            sock.close()
            raise

    def _turn_away(self, stranger: _Stranger) -> None:
        """Tell a stranger that its secret is wrong, and report its attempt."""
        with contextlib.suppress(OSError):
            stranger.sock.send(refusal(self._credentials.tag))
        self._drop(stranger)
        self._refuse(stranger.address, "with another secret")

    def _drop(self, stranger: _Stranger) -> None:
        self._strangers.pop(stranger.sock, None)
        self._callers.pop(stranger.sock, None)
        self._loop.give_back(stranger.sock)


class _Stranger:
    """A connection that has not proved itself yet; with a handshake once it has knocked."""

    def __init__(self, sock: socket.socket, address: Address) -> None:
        self.sock = sock
        self.address = address
        self.handshake: ServerHandshake | None = None
        self.since = time.monotonic()
        self.received = b""
