"""The error of a function that another rank called."""

from __future__ import annotations

from oneaccord.errors import OneAccordError

__all__ = ["RemoteError"]


class RemoteError(OneAccordError):
    """A function that was called on a rank raised an exception there. The service continues.

    Parameters
    ----------
    message
        The function, the rank, and the exception; the remote traceback follows.
    peer
        The rank on which the function ran.
    function
        Its name.
    kind
        The name of the exception's class, such as ``"ValueError"``.
    traceback
        The traceback on that rank, as text.
    """

    def __init__(self, message: str, *, peer: int, function: str, kind: str, traceback: str) -> None:
        super().__init__(message, rank=peer, peer=peer, operation=function)
        self.function: str = function
        self.kind: str = kind
        self.traceback: str = traceback
