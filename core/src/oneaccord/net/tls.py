"""TLS 1.3 (RFC 8446) on a connection whose two ends have proved the secret to each other.

The secret comes first, because its proof is cheap: no stranger can make a rank compute signatures. Within TLS each end then proves it once more,
together with both certificates. This reveals an attacker on the path who has a certificate and lets the proof of the secret pass.

If ``security.tls_names`` is "host", the names in certificates bind ranks. At the meeting point, the certificate must name the host that was dialled.
The store then sends all ranks the names in the certificate of each, and later connections of a rank must show the same names. The
host of a rank is not known beforehand: a process that holds the secret and a certificate of the authority can come as any rank that has not come.

The files may change while the job runs. Each handshake takes them as they are then.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import logging
import selectors
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from oneaccord.common.private import warn_of_readers
from oneaccord.contract.seal import TAMPERED
from oneaccord.errors import AuthenticationError, ConfigError
from oneaccord.net.forking import close_after_fork
from oneaccord.net.proven import ProvenSocket

__all__ = ["CRL", "FILES", "Tls", "TlsHandshake", "TlsSocket"]

_log = logging.getLogger("oneaccord.security")

FILES = ("ca.crt", "tls.crt", "tls.key")
"""The authority's certificate, this rank's own, and the key of that: named as in the secrets of Kubernetes."""
CRL = "crl.pem"
"""The certificates that their authority has revoked; need not be there."""
_NAMES_OF_HOSTS = ("DNS", "IP Address")
_NAMES_ANOTHER_HOST = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""
_PROOF_BYTES = 32
_RECORD_BYTES = 1 << 14
_MOST_BYTES = 1 << 18
"""The bytes that are encrypted at once, unless the kernel takes less."""
T = TypeVar("T")


class _Loaded(NamedTuple):
    """The content of the files at a time.

    ``named`` is the context of a client that compares the host that it dials with the certificate. ``names`` are those in this rank's own certificate,
    and ``names_hosts`` says whether hosts are among them.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    named: ssl.SSLContext
    digest: bytes
    names: str
    names_hosts: bool


class Tls:
    """The certificates of a rank, as its files are at each handshake.

    Parameters
    ----------
    folder
        The folder of the files `FILES`, and perhaps `CRL`.
    compares
        Whether names in certificates are compared.

    Raises
    ------
    ConfigError
        One of the files cannot be read, or they do not belong together.
    """

    def __init__(self, folder: Path, compares: bool = True) -> None:
        self.compares = compares
        self._folder = folder
        self._changing = threading.Lock()
        self._state = _state(folder)
        self._loaded = _load(folder)
        warn_of_readers(folder / FILES[-1], "the key")

    @property
    def names(self) -> str | None:
        """The names in this rank's own certificate; None if no names are compared."""
        return self.current().names if self.compares else None

    def current(self) -> _Loaded:
        """Return the content of the files, or their last matching content while half of them are written."""
        with self._changing:
            state = _state(self._folder)
            if state != self._state:
                try:
                    loaded = _load(self._folder)
                except ConfigError as error:
                    self._state = state
                    _log.warning("oneaccord: the new certificates cannot be used, so the old ones remain in use: %s", error)
                else:
                    if state == _state(self._folder):  # otherwise they changed meanwhile, and the next handshake looks again
                        self._state, self._loaded = state, loaded
                        _log.info("the certificates in %s have changed: new connections use the new ones", self._folder)
            return self._loaded


def _state(folder: Path) -> list[tuple[int, ...] | None]:
    """Return values that show whether the files have changed."""
    found: list[tuple[int, ...] | None] = []
    for name in (*FILES, CRL):
        try:
            status = (folder / name).stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return found


def _load(folder: Path) -> _Loaded:
    for name in FILES:
        try:
            (folder / name).read_bytes()
        except OSError as error:
            raise _problem(folder, f"where {name} cannot be read: {error.strerror}") from error
    try:
        server = _context(ssl.PROTOCOL_TLS_SERVER, folder)
        client, named = (_context(ssl.PROTOCOL_TLS_CLIENT, folder) for _ in range(2))
        named.check_hostname = True
        named.hostname_checks_common_name = False
        own = ssl.PEM_cert_to_DER_cert(_first((folder / FILES[1]).read_text("ascii")))
        certificate = _shown(server, client)
    except ssl.SSLCertVerificationError as error:
        raise _problem(folder, f"whose certificate its own {FILES[0]} does not trust: {error.verify_message}") from error
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise _problem(folder, f"whose files do not make a certificate: {error}") from error
    names_hosts = any(kind in _NAMES_OF_HOSTS for kind, _ in certificate.get("subjectAltName", ()))
    return _Loaded(server, client, named, hashlib.sha256(own).digest(), _names(certificate), names_hosts)


def _context(side: int, folder: Path) -> ssl.SSLContext:
    authority, certificate, key = (folder / name for name in FILES)
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority)
    with contextlib.suppress(FileNotFoundError):
        context.load_verify_locations(folder / CRL)
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    # An encrypted key would make OpenSSL ask at the terminal, and a rank has none.
    context.load_cert_chain(certificate, key, password=lambda: b"")
    context.sslsocket_class = TlsSocket
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # each connection has a handshake of its own
    return context


def _shown(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """Return this rank's own certificate, as it shows it to itself: Python's ssl reads none in another way."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    for end in (*ends, *ends):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return ends[0].getpeercert() or {}


def _names(certificate: dict[str, Any]) -> str:
    """Return the names in a certificate that was verified, always in one order."""
    return ", ".join(sorted(f"{kind}:{value}" for kind, value in certificate.get("subjectAltName", ())))


def _first(text: str) -> str:
    """Return the first certificate of a chain."""
    begin, end = text.index(ssl.PEM_HEADER), text.index(ssl.PEM_FOOTER)
    return text[begin : end + len(ssl.PEM_FOOTER)]


def _problem(folder: Path, what: str) -> ConfigError:
    return ConfigError(
        f"security.tls is {str(folder)!r}, {what}. It should be a folder with the files {', '.join(FILES)}; `oneaccord certs` makes one",
        key="security.tls",
        value=str(folder),
    )


class TlsSocket(ssl.SSLSocket, ProvenSocket):
    """A connection that encrypts everything; it never blocks, and raises BlockingIOError as other sockets do.

    An error with the number EBADMSG says that the received bytes are not the sent ones. After a call that raised BlockingIOError, ``send`` must be called
    with the same bytes again, perhaps with more after them: some of them have been encrypted. The kernel may have nothing to read while this
    connection has; so wait for it only after ``recv`` has raised BlockingIOError.
    """

    lock: threading.Lock = threading.Lock()
    """Each connection has its own, since OpenSSL allows no two calls at once; this one is for those that have ended before they have got it."""

    def _do(self, function: Callable[[], T]) -> T:
        try:
            with self.lock:
                return function()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError(errno.EAGAIN, "TLS is waiting for the network") from None
        except (ssl.SSLEOFError, ssl.SSLSyscallError):
            raise ConnectionResetError(errno.ECONNRESET, "the other end closed the connection") from None
        except ssl.SSLError as error:
            # The other end says by an alert that the bytes that it received were changed.
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
        """Return the bytes that have come, at most ``count``."""
        if self.lock is TlsSocket.lock:
            # `SSLSocket._create` (Python 3.11) reads from a connection that has ended before it has got TLS, and leaves the socket open if that raises.
            self.close()
            raise ConnectionResetError(errno.ECONNRESET, "the other end closed the connection before the TLS handshake")
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
        """End the connection in a direction; later bytes are never taken for plain text."""
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
        The secret that each end proves within TLS, and the words that bind the proof to this connection.
    host
        The host that was dialled, which the certificate must name if ``names`` is None; the listening end leaves it out.
    names
        The names that the other end's certificate must have, if they are known.

    Attributes
    ----------
    sock
        The encrypted connection, to be used once `advance` has returned 0, and closed in any case.
    """

    def __init__(
        self,
        tls: Tls,
        sock: ProvenSocket,
        is_server: bool,
        secret: bytes,
        words: bytes,
        host: str = "",
        names: str | None = None,
    ) -> None:
        self._loaded = loaded = tls.current()
        self._compares = tls.compares
        self._names = names if tls.compares else None
        is_within_host = (
            sock.getsockname()[0] == sock.getpeername()[0]
        )  # raises if it has ended; ssl would make a socket of it that is never closed
        # If this rank's own certificate names no host, one certificate serves all ranks. Only the own one may say so: another one may be stolen.
        names_host = host and names is None and tls.compares and loaded.names_hosts and not is_within_host
        self._host = host.partition("%")[0].rstrip(".") if names_host else None
        context = loaded.server if is_server else loaded.client if self._host is None else loaded.named
        self.sock: TlsSocket = _over(context, sock, is_server, self._host)
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
            The event to wait for before the next call, ``selectors.EVENT_READ`` or ``EVENT_WRITE``; 0 when the handshake is done.

        Raises
        ------
        AuthenticationError
            The other end has no certificate that this one trusts, or the other way round, or it is not the end that proved the secret.
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
            raise ConnectionResetError(
                errno.ECONNRESET, "the other end closed the connection during the TLS handshake"
            ) from None
        except ssl.SSLError as error:
            self._empty()
            raise AuthenticationError(_why(error, self._host)) from None

    def _advance(self) -> int:
        if not self._shaken:
            self.sock.do_handshake()
            self._shaken = True
            self._compare_names()
        other = hashlib.sha256(self.sock.getpeercert(binary_form=True) or b"").digest()
        certificates = self._loaded.digest + other if self._is_server else other + self._loaded.digest
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
                raise ConnectionResetError(errno.ECONNRESET, "the other end closed the connection during the TLS handshake")
            self._came += piece
        if not hmac.compare_digest(self._came, client if self._is_server else server):
            raise AuthenticationError(
                "the other end of TLS did not prove the secret: an attacker on the path has a certificate of the same authority"
            )
        return 0

    def _compare_names(self) -> None:
        self.sock.certificate = _names(self.sock.getpeercert() or {}) if self._compares else ""
        if self._names is not None and self.sock.certificate != self._names:
            names, wanted = (each or "no host" for each in (self.sock.certificate, self._names))
            raise AuthenticationError(
                f"the certificate of the other end names {names}, but the certificate of the dialled rank names {wanted} (security.tls_names): another process "
                "answers in its place"
            )

    def _empty(self) -> None:
        """Take the bytes that have come, or closing would reset the connection, and the other end would not read the reason."""
        with contextlib.suppress(OSError):
            while socket.socket.recv(self.sock, 1 << 16):
                pass


def _over(context: ssl.SSLContext, sock: ProvenSocket, is_server: bool, host: str | None) -> TlsSocket:
    """Take over a connection, which counts as closed from now on; the handshake is to come."""
    try:
        if host is not None:
            host.encode("idna")  # raises if the name is invalid; ssl would make a socket of it that is never closed
        wrapped = context.wrap_socket(sock, is_server, do_handshake_on_connect=False, server_hostname=host)
    except ValueError as error:
        raise AuthenticationError(f"no certificate can name the dialled host, {host!r}: {error}") from None
    assert isinstance(wrapped, TlsSocket)
    wrapped.seals = sock.seals
    wrapped.certificate = ""
    wrapped.lock = threading.Lock()
    close_after_fork(wrapped)
    return wrapped


def _why(error: ssl.SSLError, host: str | None) -> str:
    """Return words for the fault of a certificate, and whose it is."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _NAMES_ANOTHER_HOST:
            return (
                f"the certificate of the other end does not name {host!r}, the dialled host. Make certificates that name each host as the ranks "
                f'dial it (`oneaccord certs DIR HOST=NAME,NAME`), or set security.tls_names = "any" on all ranks'
            )
        return f"the certificate of the other end is not trusted here: {error.verify_message}"
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if "alert" in reason and ("certificate" in reason or "unknown ca" in reason):
        return f"the other end does not trust this rank's certificate: {reason}"
    return f"the TLS handshake failed ({reason}): the connection was tampered with, or the network has a fault"
