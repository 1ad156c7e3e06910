"""TLS 1.3 (RFC 8446) on a connection whose two ends have proved the secret to each other.

The secret comes first, since its proof is cheap: no stranger can make a rank compute signatures. Within TLS each end then proves it once more,
together with both certificates. So whoever sits on the path with a certificate of his own, and lets the proof of the secret pass, is found out.

Names of hosts are not compared with certificates: ranks meet at addresses that nobody knows before. Whoever holds the secret and a certificate of
the job's authority is a rank.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import selectors
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from manyhands.contract.seal import TAMPERED
from manyhands.control.forking import close_after_fork
from manyhands.control.proven import ProvenSocket
from manyhands.errors import AuthenticationError, ConfigError

__all__ = ["FILES", "Tls", "TlsHandshake", "TlsSocket"]

FILES = ("ca.crt", "tls.crt", "tls.key")
"""The authority's certificate, this rank's own, and the key of that: named as in the secrets of Kubernetes."""
_PROOF_BYTES = 32
_RECORD_BYTES = 1 << 14
_MOST_BYTES = 1 << 18
"""What is encrypted at once, unless the kernel takes less."""
T = TypeVar("T")


class Tls:
    """The certificates of a rank.

    Parameters
    ----------
    folder
        Where the files `FILES` are.

    Raises
    ------
    ConfigError
        One of them cannot be read, or they do not belong together.
    """

    def __init__(self, folder: Path) -> None:
        authority, certificate, key = (folder / name for name in FILES)
        for path in (authority, certificate, key):
            try:
                path.read_bytes()
            except OSError as error:
                raise _problem(folder, f"where {path.name} cannot be read: {error.strerror}") from error
        try:
            self._server = _context(ssl.PROTOCOL_TLS_SERVER, authority, certificate, key)
            self._client = _context(ssl.PROTOCOL_TLS_CLIENT, authority, certificate, key)
            own = ssl.PEM_cert_to_DER_cert(_first(certificate.read_text("ascii")))
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise _problem(folder, f"whose files do not make a certificate: {error}") from error
        self.digest: bytes = hashlib.sha256(own).digest()

    def over(self, sock: ProvenSocket, is_server: bool) -> TlsSocket:
        """Take over a connection, which counts as closed from now on; the handshake is to come."""
        sock.getpeername()  # of one that has ended ssl would make a socket that nobody closes
        context = self._server if is_server else self._client
        wrapped = context.wrap_socket(sock, is_server, do_handshake_on_connect=False)
        assert isinstance(wrapped, TlsSocket)
        wrapped.seals = sock.seals
        wrapped.lock = threading.Lock()
        close_after_fork(wrapped)
        return wrapped


def _context(side: int, authority: Path, certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority)
    # An encrypted key would make OpenSSL ask at the terminal, and a rank has none.
    context.load_cert_chain(certificate, key, password=lambda: b"")
    context.sslsocket_class = TlsSocket
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # each connection has a handshake of its own
    return context


def _first(text: str) -> str:
    """Return the first certificate of a chain."""
    begin, end = text.index(ssl.PEM_HEADER), text.index(ssl.PEM_FOOTER)
    return text[begin : end + len(ssl.PEM_FOOTER)]


def _problem(folder: Path, what: str) -> ConfigError:
    return ConfigError(
        f"security.tls is {str(folder)!r}, {what}. It should be a folder with the files {', '.join(FILES)}; `manyhands certs` makes one",
        key="security.tls",
        value=str(folder),
    )


class TlsSocket(ssl.SSLSocket, ProvenSocket):
    """A connection that encrypts what is sent and received; it never blocks, and says so as other sockets do.

    An error with the number EBADMSG says that what came is not what was sent. After a call that raised BlockingIOError, ``send`` must be called
    with the same bytes again, of which there may be more: some of them have been encrypted. The kernel may have nothing to read while this
    has; so wait for it only after ``recv`` has raised BlockingIOError.
    """

    lock: threading.Lock = threading.Lock()
    """Each connection has its own, since OpenSSL allows no two calls at once; this one is for those that have ended before they have got it."""

    def _do(self, function: Callable[[], T]) -> T:
        try:
            with self.lock:
                return function()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError(errno.EAGAIN, "TLS waits for the network") from None
        except (ssl.SSLEOFError, ssl.SSLSyscallError):
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection") from None
        except ssl.SSLError as error:
            # The other end says by an alert that what came there was changed.
            raise OSError(errno.EBADMSG, TAMPERED) from error

    def send(self, data: object, flags: int = 0) -> int:
        """Send as much as the kernel takes."""
        piece = memoryview(data)[:_MOST_BYTES]  # type: ignore[arg-type]
        return self._do(lambda: ssl.SSLSocket.send(self, piece))

    def sendmsg(self, buffers: Iterable[object], *_: object) -> int:  # type: ignore[override]
        """Send one record of these buffers, or less."""
        record = bytearray()
        for buffer in buffers:
            record += memoryview(buffer)[: _RECORD_BYTES - len(record)]  # type: ignore[arg-type]
        return self.send(record)

    def recv(self, count: int = 1024, flags: int = 0) -> bytes:
        """Return what has come, at most ``count`` bytes."""
        return self._do(lambda: ssl.SSLSocket.recv(self, count))

    def recv_into(self, buffer: object, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive into a buffer."""
        view = memoryview(buffer)[: nbytes or None]  # type: ignore[arg-type]
        return self._do(lambda: ssl.SSLSocket.recv_into(self, view)) if len(view) else 0

    def recvmsg_into(self, buffers: Iterable[object], *_: object) -> tuple[int, list[object], int, None]:  # type: ignore[override]
        """Receive into the buffers, one behind the other, as much as there is."""
        count = 0
        for buffer in buffers:
            view = memoryview(buffer)  # type: ignore[arg-type]
            while view:
                try:
                    came = self.recv_into(view)
                except BlockingIOError:
                    if not count:
                        raise
                    return count, [], 0, None
                if not came:
                    return count, [], 0, None
                count, view = count + came, view[came:]
        return count, [], 0, None

    def shutdown(self, how: int) -> None:
        """End the connection in a direction; what is still read is never taken for plain text."""
        socket.socket.shutdown(self, how)


class TlsHandshake:
    """The handshake on one connection, at either end; it blocks nowhere.

    Parameters
    ----------
    tls
        The certificates.
    sock
        The connection, which this takes over.
    is_server
        Whether this end is the one that listens.
    secret, words
        What each end proves within TLS, and what makes the proof this connection's own.

    Attributes
    ----------
    sock
        The encrypted connection, to be used once `advance` has returned 0, and closed in any case.
    """

    def __init__(self, tls: Tls, sock: ProvenSocket, is_server: bool, secret: bytes, words: bytes) -> None:
        self.sock: TlsSocket = tls.over(sock, is_server)
        self._tls = tls
        self._is_server = is_server
        self._secret = secret
        self._words = words
        self._shaken = self._said = False
        self._came = b""

    def advance(self) -> int:
        """Go as far as the network lets it.

        Returns
        -------
        int
            What to wait for before the next call, ``selectors.EVENT_READ`` or ``EVENT_WRITE``; 0 when all is done.

        Raises
        ------
        AuthenticationError
            The other end has no certificate that this one trusts, or the other way round, or it is not who proved the secret.
        OSError
            The connection broke.
        """
        try:
            return self._advance()
        except ssl.SSLWantReadError:
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
        except (ssl.SSLEOFError, ssl.SSLSyscallError):
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection during the handshake of TLS") from None
        except ssl.SSLError as error:
            self._empty()
            raise AuthenticationError(_why(error)) from None

    def _advance(self) -> int:
        if not self._shaken:
            self.sock.do_handshake()
            self._shaken = True
        other = hashlib.sha256(self.sock.getpeercert(binary_form=True) or b"").digest()
        certificates = self._tls.digest + other if self._is_server else other + self._tls.digest
        client, server = (
            hmac.digest(self._secret, b"within tls " + side + certificates + self._words, hashlib.sha256)
            for side in (b"client", b"server")
        )
        if not self._said:
            ssl.SSLSocket.send(self.sock, server if self._is_server else client)
            self._said = True
        while len(self._came) < _PROOF_BYTES:
            piece = ssl.SSLSocket.recv(self.sock, _PROOF_BYTES - len(self._came))
            if not piece:
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection during the handshake of TLS")
            self._came += piece
        if not hmac.compare_digest(self._came, client if self._is_server else server):
            raise AuthenticationError(
                "the other end of TLS is not who proved the secret: somebody on the path has a certificate of the same authority"
            )
        return 0

    def _empty(self) -> None:
        """Take what has come, or closing would reset the connection, and the other end would not read why."""
        with contextlib.suppress(OSError):
            while socket.socket.recv(self.sock, 1 << 16):
                pass


def _why(error: ssl.SSLError) -> str:
    """Say what is wrong with whose certificate."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the other end is not trusted here: {error.verify_message}"
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if "alert" in reason and ("certificate" in reason or "unknown ca" in reason):
        return f"the other end does not trust the certificate of this one: {reason}"
    return f"the handshake of TLS failed ({reason}): the connection was tampered with, or the network has a fault"
