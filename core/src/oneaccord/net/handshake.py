"""Both sides prove that they hold the job's secret, before anything else is read.

::

    server                                     client
       | <- magic, 32 random bytes,              |
       |    HMAC("knock", these) --------------- |     the knock
       | -- magic, 32 random bytes ------------> |
       | <- magic, 32 random bytes, hello,       |
       |    HMAC("client", both, hello) -------- |
       | -- magic, HMAC("server", both, hello) > |     or, when a proof of the client is wrong: refusal, tag

The tag is the digest of the name of the server's job. It is no secret; by it a client whose secret is wrong learns whether it has found its own
job.

Every message has a fixed size, so that nothing of a stranger's choosing is ever stored. ``hello`` (64 bytes) says what
the connection is for and is covered by the proof. HMAC-SHA256 (RFC 2104); fresh randomness from both sides stops replays.

The knock is already there when the server takes the connection, and costs no time: it shows the server at once which clients to keep. A
recorded knock can be sent again, which proves nothing; a server takes each once.

Both sides then have two keys that nobody else knows: of the same secret and random bytes, one for each direction.

If the job uses TLS, the knock and the greeting begin with another magic, so that each side learns at once if the other does not. The
handshake of TLS comes after this one.
"""

from __future__ import annotations

import hashlib
import hmac
import os

from oneaccord.contract.seal import Seal, Seals

__all__ = [
    "CLIENT_BYTES",
    "GREETING_BYTES",
    "HELLO_BYTES",
    "KNOCK_BYTES",
    "MAGIC",
    "MAGIC_BEFORE_TLS",
    "REFUSAL",
    "REPLY_BYTES",
    "ClientHandshake",
    "ServerHandshake",
    "is_knock",
    "knock",
    "may_be_ours",
    "refusal",
]

MAGIC = b"ACCORD\x00\x02"
MAGIC_BEFORE_TLS = b"ACCORD\x01\x02"
REFUSAL = b"OAREFUSE"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
HELLO_BYTES = 64
KNOCK_BYTES = len(MAGIC) + _NONCE_BYTES + _PROOF_BYTES
GREETING_BYTES = len(MAGIC) + _NONCE_BYTES
CLIENT_BYTES = len(MAGIC) + _NONCE_BYTES + HELLO_BYTES + _PROOF_BYTES
REPLY_BYTES = len(MAGIC) + _PROOF_BYTES


def _proof(secret: bytes, role: bytes, *words: bytes) -> bytes:
    return hmac.digest(secret, role + b"".join(words), hashlib.sha256)


def refusal(tag: bytes) -> bytes:
    """Return what a server sends in place of a greeting, which has as many bytes, and in place of a reply; ``tag`` names its job."""
    return REFUSAL + tag


def may_be_ours(data: bytes, *others: bytes) -> bool:
    """Return whether some bytes begin as the first bytes of a oneaccord, or as one of ``others``."""
    return any(data.startswith(words[: len(data)]) for words in (MAGIC, MAGIC_BEFORE_TLS, *others))


def knock(secret: bytes, magic: bytes = MAGIC) -> bytes:
    """Return the first bytes of a client, another `KNOCK_BYTES` bytes each time."""
    nonce = os.urandom(_NONCE_BYTES)
    return magic + nonce + _proof(secret, b"knock", nonce)


def is_knock(secret: bytes, data: bytes) -> bool:
    """Return whether a client that sent these `KNOCK_BYTES` bytes holds the secret, or repeats the knock of one that does."""
    return hmac.compare_digest(data[GREETING_BYTES:], _proof(secret, b"knock", data[len(MAGIC) : GREETING_BYTES]))


def _seals(secret: bytes, sides: tuple[bytes, bytes], said: bytes) -> Seals:
    outgoing, incoming = (Seal(_proof(secret, b"from " + side, said)) for side in sides)
    return outgoing, incoming


class ServerHandshake:
    """The listening side; no input or output of its own.

    Attributes
    ----------
    seals
        The seals of the connection from now on, once the client has proved the secret.
    said
        The bytes of both sides in this handshake, which never come again.
    """

    seals: Seals
    said: bytes

    def __init__(self, secret: bytes, magic: bytes = MAGIC, tag: bytes = bytes(_PROOF_BYTES)) -> None:
        self._secret = secret
        self._tag = tag
        self._nonce = os.urandom(_NONCE_BYTES)
        self.greeting: bytes = magic + self._nonce

    def answer(self, data: bytes) -> tuple[bytes, bytes | None]:
        """Judge the client's `CLIENT_BYTES` bytes.

        Returns
        -------
        tuple of bytes and bytes or None
            The reply, and the client's hello; None in its place if the proof is wrong.
        """
        client_nonce = data[len(MAGIC) : GREETING_BYTES]
        hello = data[GREETING_BYTES : GREETING_BYTES + HELLO_BYTES]
        proof = data[GREETING_BYTES + HELLO_BYTES :]
        self.said = self._nonce + client_nonce + hello
        if not hmac.compare_digest(proof, _proof(self._secret, b"client", self.said)):
            return refusal(self._tag), None
        self.seals = _seals(self._secret, (b"server", b"client"), self.said)
        return MAGIC + _proof(self._secret, b"server", self.said), hello


class ClientHandshake:
    """The dialling side; no input or output of its own.

    Attributes
    ----------
    seals
        The seals of the connection from now on, once the server has proved the secret.
    said
        The bytes of both sides in this handshake, which never come again.
    """

    seals: Seals
    said: bytes

    def __init__(self, secret: bytes, hello: bytes) -> None:
        self._secret = secret
        self._hello = hello.ljust(HELLO_BYTES, b"\x00")
        self._nonce = os.urandom(_NONCE_BYTES)
        self._expected = b""

    def answer(self, greeting: bytes) -> bytes:
        """Return the client's answer to the server's `GREETING_BYTES` bytes."""
        server_nonce = greeting[len(MAGIC) :]
        self.said = server_nonce + self._nonce + self._hello
        self._expected = _proof(self._secret, b"server", self.said)
        self.seals = _seals(self._secret, (b"client", b"server"), self.said)
        return MAGIC + self._nonce + self._hello + _proof(self._secret, b"client", self.said)

    def accepts(self, reply: bytes) -> bool:
        """Return whether the server's `REPLY_BYTES` bytes prove that it holds the secret, and accept ours."""
        return reply.startswith(MAGIC) and hmac.compare_digest(reply[len(MAGIC) :], self._expected)
