"""Folders: the one in which this process works, and those that other users may write to."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from oneaccord.errors import UsageError

__all__ = ["here", "read_regular", "write_new"]


def here() -> Path:
    """Return the working directory; ``Path(".")`` if it has been removed, in which nothing is found."""
    try:
        return Path.cwd()
    except OSError:
        return Path()


def write_new(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all, in a folder that other users may write to.

    It is created under a name that nobody can guess, and then renamed. So a link that another user has put there is replaced, and not
    followed to a file of this user.

    Raises
    ------
    OSError
        It cannot be written: for example, the folder protects another user's file of its name. The old file is then unchanged.
    """
    unfinished = path.with_name(f"{path.name}.{os.urandom(8).hex()}.unfinished")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor
            file.write(data)
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def read_regular(path: Path, most: int) -> bytes:
    """Return the content of a file that other users may have put there.

    Parameters
    ----------
    path
        The file, or a link to it.
    most
        The most bytes that it may have.

    Raises
    ------
    UsageError
        It is a pipe, a device or a folder, or larger.
    OSError
        It cannot be read.
    """
    # Without O_NONBLOCK, opening a pipe without a writer would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError("it is not a regular file, but a pipe, a device or a folder")
        if status.st_size > most:
            raise UsageError(f"it has {status.st_size:,} bytes, but at most {most:,} are allowed")
    except BaseException:
        os.close(descriptor)
        raise
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
        return file.read(most)
