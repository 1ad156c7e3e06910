"""A connection after the handshake."""

from __future__ import annotations

import socket

from oneaccord.contract.seal import Seals
from oneaccord.net.forking import close_after_fork

__all__ = ["ProvenSocket"]


class ProvenSocket(socket.socket):
    """A non-blocking connection whose two ends have proved the secret to each other.

    Attributes
    ----------
    seals
        The seals for outgoing and for incoming messages.
    certificate
        The names in the certificate of the other end; empty if it has none, or if no names are compared.
    """

    __slots__ = ("certificate", "seals")

    seals: Seals
    certificate: str

    @classmethod
    def over(cls, sock: socket.socket, seals: Seals) -> ProvenSocket:
        """Take over the connection of ``sock``, which counts as closed from now on, even if this fails."""
        try:
            proven = cls(sock.family, sock.type, sock.proto, sock.fileno())
        except BaseException:
            sock.close()
            raise
        sock.detach()
        try:
            close_after_fork(proven)
            proven.setblocking(False)
            proven.seals = seals
            proven.certificate = ""
        except BaseException:
            proven.close()
            raise
        return proven
