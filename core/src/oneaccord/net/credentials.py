"""The proof that a process belongs to a job."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import string
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from oneaccord.errors import AuthenticationError
from oneaccord.net.proven import ProvenSocket

if TYPE_CHECKING:
    from oneaccord.net.tls import Tls  # imported by jobs that use it: ssl takes time and memory

__all__ = ["Credentials", "is_loopback"]

_LEAST_BITS = 128
_LEAST_CHARACTERS = 6
"""The least number of different characters in a text that counts as drawn at random."""
_ALPHABETS = (
    string.digits,
    string.digits + "abcdef",
    string.digits + "ABCDEF",
    string.digits + string.ascii_lowercase,
    string.digits + string.ascii_letters,
    string.printable,
)
_JUDGED = 256
"""How many characters of a text are looked at, at most."""
_ROUNDS = 100_000
"""The iterations of PBKDF2 (RFC 8018). They cost a rank some 50 ms, and an attacker as much for each guess."""

_log = logging.getLogger("oneaccord.security")


class Credentials(NamedTuple):
    """The secrets by which a process shows that it belongs to a job.

    Attributes
    ----------
    secret
        The secret that both ends of each connection prove to each other; may be empty only on loopback.
    tls
        The certificates, if connections are encrypted.
    run
        The name of the job, which the server of each connection compares; empty if it has none.
    weakness
        Why anybody could join, in words that follow "listening"; empty for a secret that nobody can guess, and for none.
    certificates
        For each rank of the job the names in its certificate; empty if nothing is to be compared.
    expected
        The names in the certificate of the listener that is dialled. If None, the certificate must name the host that is dialled.
    """

    secret: bytes
    tls: Tls | None = None
    run: str = ""
    weakness: str = ""
    certificates: tuple[str, ...] = ()
    expected: str | None = None

    @classmethod
    def of_text(cls, text: bytes, tls: Tls | None = None) -> Credentials:
        """Return those of a secret that users have given, or of none."""
        if not text:
            return cls(b"", tls)
        bits = _bits(text)
        # A text that is not the digits of a key may be a word: each guess must take long.
        is_key = bits >= _LEAST_BITS and all(byte in b"0123456789abcdefABCDEF" for byte in text)
        weakness = f"with a secret that can be guessed (too short, or of too few characters, for {_LEAST_BITS} bits)"
        return cls(text if is_key else _stretched(text), tls, weakness="" if bits >= _LEAST_BITS else weakness)

    @property
    def _hole(self) -> str:
        """The reason why strangers who reach more than loopback are not kept out; empty if they are."""
        return self.weakness or ("" if self.secret else "without a secret")

    def check_reach(self, host: str, doing: str) -> None:
        """Raise an error if processes of other hosts can reach the meeting point.

        Parameters
        ----------
        host
            The numeric address at which this rank listens, or which it has reached.
        doing
            Its action there, as in ``"listening at"``.

        Raises
        ------
        AuthenticationError
            The address is not loopback, and there is no secret, or one that can be guessed.
        """
        if self._hole and not is_loopback(host):
            raise AuthenticationError(
                f"{doing} {host} {self._hole} is refused: anybody who reaches this host could join the job. Set ONEACCORD_SECRET to the same "
                "long random text on all ranks (or rendezvous.secret_file in the config), such as the output of: python -c 'import secrets; "
                "print(secrets.token_hex(32))'; or meet at 127.0.0.1"
            )

    def __repr__(self) -> str:
        """Show nothing of the secret."""
        return f"{type(self).__name__}(..., {self.tls!r})"

    def of_run(self, run: str) -> Credentials:
        """Return those of one run: a process that is left over from another one with the same secret is a stranger to it."""
        return self._replace(run=run)

    @property
    def tag(self) -> bytes:
        """The 32 bytes by which a refused client learns whether the listener is of its own job, with another secret; zeros without a name."""
        return hashlib.sha256(self.run.encode(errors="surrogateescape")).digest() if self.run else bytes(32)

    def of_job(self, nonce: bytes, certificates: Sequence[str] = ()) -> Credentials:
        """Return those of one job of many with the same secret: the one whose store has drawn these bytes, and taken ranks with such certificates."""
        secret = hmac.digest(self.secret, nonce, hashlib.sha256)
        return self._replace(secret=secret, weakness=self._hole, certificates=tuple(certificates), expected=None)

    def towards(self, whom: str, rank: int | None = None) -> Credentials:
        """Return the credentials for connections to one listener of the job: nobody on the path can redirect a connection to another one.

        Parameters
        ----------
        whom
            The listener: its rank, and its purpose. Both ends say the same.
        rank
            The rank of the job that is dialled, if it is known.
        """
        secret = hmac.digest(self.secret, b"towards " + whom.encode(), hashlib.sha256)
        return self._replace(
            secret=secret, expected=self.certificates[rank] if self.certificates and rank is not None else None
        )

    def is_from(self, sock: ProvenSocket, rank: int) -> bool:
        """Return whether a connection that came may be a rank's: its certificate has the names with which the rank has come to the job."""
        if not self.certificates or sock.certificate == self.certificates[rank]:
            return True
        _log.warning(
            "oneaccord: a connection claims to be rank %d, whose certificate names %s, but shows a certificate that names %s: it was refused",
            rank,
            self.certificates[rank] or "no host",
            sock.certificate or "no host",
        )
        return False


def is_loopback(host: str) -> bool:
    """Return whether an address, not a name, is reachable from this host alone."""
    return host.startswith("127.") or host in ("::1", "::ffff:127.0.0.1")


def _bits(text: bytes) -> float:
    """Return the most bits of a text of this length and these characters; a repeated character counts once."""
    text = text[:_JUDGED]
    # By chance alone a random text ends as it begins, but does not say all of it twice.
    periods = (length for length in range(1, len(text) // 2 + 1) if text == (text[:length] * len(text))[: len(text)])
    once = next(periods, len(text))
    characters = set(text)
    if len(characters) < _LEAST_CHARACTERS:
        return 0.0
    sizes = (len(alphabet) for alphabet in _ALPHABETS if characters <= set(alphabet.encode()))
    return once * math.log2(next(sizes, 256))


@lru_cache(maxsize=4)
def _stretched(text: bytes) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", text, b"oneaccord secret", _ROUNDS)
