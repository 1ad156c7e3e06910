"""The sockets of its parent's jobs, which a forked child must not keep.

A child that held them would keep a dead parent looking alive to the other ranks, and by closing its group at exit it would
end its parent's. So every socket and every job is remembered here, weakly, and a fork closes the child's copies: without
`shutdown`, which would reach the parent's as well.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from typing import Any

__all__ = ["close_after_fork", "forget_after_fork"]

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_forgetters: weakref.WeakSet[Any] = weakref.WeakSet()


def close_after_fork(sock: socket.socket) -> socket.socket:
    """Close this socket in children; return it."""
    _sockets.add(sock)
    return sock


def forget_after_fork(owner: Any) -> None:
    """Call ``owner.after_fork()`` in children, as long as the owner lives."""
    _forgetters.add(owner)


def _in_child() -> None:
    for owner in list(_forgetters):
        owner.after_fork()
    for sock in list(_sockets):
        with contextlib.suppress(OSError):
            sock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
