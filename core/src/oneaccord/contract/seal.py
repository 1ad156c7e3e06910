"""Seals: proofs that a message on a connection is the one that was sent there, and the next one."""

from __future__ import annotations

import hashlib
import hmac
from typing import ClassVar

__all__ = ["TAMPERED", "Seal", "Seals"]

TAMPERED: str = (
    "the received message is not the one that was sent: the connection was tampered with, or the network has a fault"
)


class Seal:
    """Seals the messages in one direction of a connection: a message authentication code over a message's number and bytes.

    Both ends count alike, so that a message that is changed, repeated, left out, or sent in another order or on another connection has the wrong
    seal. Keyed BLAKE2b (RFC 7693), which is faster than HMAC.

    Parameters
    ----------
    key
        32 bytes that both ends know, of this connection and direction.

    Attributes
    ----------
    BYTES
        The length of a seal.
    """

    BYTES: ClassVar[int] = 16

    __slots__ = ("_count", "_key")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def begin(self) -> hashlib.blake2b:
        """Begin the next message, which may come in parts.

        Returns
        -------
        hashlib.blake2b
            A hash, to be updated with the bytes of the message; its digest is the seal.
        """
        number = self._count.to_bytes(8, "little")
        self._count += 1
        return hashlib.blake2b(number, digest_size=self.BYTES, key=self._key)

    def of(self, data: bytes | bytearray | memoryview) -> bytes:
        """Seal the next message.

        Parameters
        ----------
        data
            All of it.

        Returns
        -------
        bytes
            Its seal.
        """
        seal = self.begin()
        seal.update(data)
        return seal.digest()

    def fits(self, data: bytes | bytearray | memoryview, seal: bytes | bytearray | memoryview) -> bool:
        """Return whether the next message is this one; the time that it takes reveals nothing about the right seal.

        Parameters
        ----------
        data
            The received bytes.
        seal
            The seal that came with them.

        Returns
        -------
        bool
            Whether they belong together. If not, nothing that comes after can be trusted either.
        """
        return hmac.compare_digest(self.of(data), bytes(seal))


Seals = tuple[Seal, Seal]
"""The seals of a connection: for the messages that this end sends, and for those that it receives."""
