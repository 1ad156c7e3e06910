"""Files that hold a secret: a check that no other user can read them."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

__all__ = ["warn_of_readers"]

_log = logging.getLogger("oneaccord.security")
_warned: set[Path] = set()
_READ_OR_WRITTEN = stat.S_IRGRP | stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH


def warn_of_readers(path: Path, what: str) -> None:
    """Log a warning, once for each file, if other users can read or replace a file that is secret.

    The rules are those of libpq. A file of root may be readable by its group, as Kubernetes mounts it with ``fsGroup``.

    Parameters
    ----------
    path
        The file; links are followed. A file that cannot be looked at is passed over: reading it says why.
    what
        A description of the file, such as ``"the secret"``.
    """
    try:
        status = path.stat()
    except OSError:
        return
    others = _others(stat.S_IMODE(status.st_mode), status.st_uid, os.geteuid())
    if others and path not in _warned:
        _warned.add(path)
        _log.warning("oneaccord: %s in %s %s", what, path, others)


def _others(mode: int, owner: int, me: int) -> str:
    """Return words about other users who can read or replace a file; empty if there are none."""
    if owner not in (0, me):
        return f"belongs to another user of this host (uid {owner}), who can read and replace it: chown it to this user, or to root"
    remedy = "`chmod 600` takes that back; in Kubernetes, mount it with `defaultMode: 0400`, or 0440 with an fsGroup"
    allowed = stat.S_IRGRP if owner == 0 else 0
    if mode & _READ_OR_WRITTEN & ~allowed:
        return f"can be read or changed by other users of this host (mode {mode:04o}): {remedy}"
    return ""
