"""What shows that a process belongs to a job."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from manyhands.control.tls import Tls  # imported by jobs that use it: ssl takes time and memory

__all__ = ["Credentials"]


class Credentials(NamedTuple):
    """What shows that a process belongs to a job.

    Attributes
    ----------
    secret
        What both ends of each connection prove to each other; may be empty on loopback alone.
    tls
        The certificates, where connections are encrypted.
    run
        The name of the run, for messages; empty if it has none.
    guessable
        Whether the secret is made of nothing that is secret, such as the name of a run alone.
    """

    secret: bytes
    tls: Tls | None = None
    run: str = ""
    guessable: bool = False

    @property
    def keep_out(self) -> bool:
        """Whether they keep strangers out, who reach more than loopback."""
        return bool(self.secret) and not self.guessable

    def __repr__(self) -> str:
        """Show nothing of the secret."""
        return f"{type(self).__name__}(..., {self.tls!r})"

    def of_run(self, run: str) -> Credentials:
        """Return those of one run: a process that is left over from another one with the same secret is a stranger to it."""
        if not run:
            return self
        secret = hmac.digest(self.secret, b"run " + run.encode(), hashlib.sha256)
        return self._replace(secret=secret, run=run, guessable=not self.keep_out)

    def of_job(self, nonce: bytes) -> Credentials:
        """Return those of one job of many with the same secret: the one whose store has drawn these bytes."""
        return self._replace(secret=hmac.digest(self.secret, nonce, hashlib.sha256))

    def towards(self, whom: str) -> Credentials:
        """Return those of connections to one listener of the job: nobody on the path can lead a connection to another one.

        Parameters
        ----------
        whom
            The listener: which rank it is, and for what it listens. Both ends say the same.
        """
        return self._replace(secret=hmac.digest(self.secret, b"towards " + whom.encode(), hashlib.sha256))
