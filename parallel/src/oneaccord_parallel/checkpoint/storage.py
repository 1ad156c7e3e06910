"""Files: each step that a crash may come between, on its own.

Data that must survive a crash of the computer are synchronised before the file that refers to them. All other modules of this package use files through
here. The files of a checkpoint are regular ones: a link in its folder may lead anywhere, and opening a pipe may block.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from oneaccord_parallel.checkpoint.errors import CheckpointFormatError

__all__ = [
    "DATA_FILE",
    "LARGEST_METADATA",
    "METADATA",
    "commit",
    "data_file",
    "is_data_file",
    "length_of",
    "make_folder",
    "open_file",
    "read_metadata",
    "remove",
    "remove_checkpoint",
    "remove_others",
    "sync_folder",
    "write_file",
]

METADATA = "metadata.json"
_TEMPORARY = METADATA + ".tmp"
LARGEST_METADATA = 256 << 20
"""The most bytes of it: the checksums of 32 TiB."""
DATA_FILE = r"\Adata-([0-9a-f]{16})-[0-9]{1,9}\.safetensors\Z"
"""The names that `data_file` gives."""
_SLICE_BYTES = 8 << 20
"""How much is written at once: enough for the speed of the disk, and little enough that progress is seen."""


def data_file(save: str, rank: int) -> str:
    """Return the name of the file that a rank writes in one save."""
    return f"data-{save}-{rank}.safetensors"


def is_data_file(name: str) -> bool:
    """Return whether a name is one that `data_file` gives."""
    return re.match(DATA_FILE, name) is not None


def make_folder(path: Path) -> None:
    """Make a folder and those above it, so that they survive a crash."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)  # noqa: PTH102 - as all steps of this module
        sync_folder(folder.parent)
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; a checkpoint is a folder")


def open_file(path: Path, *, follow: bool = False) -> tuple[int, int]:
    """Open a regular file to read it, and return its descriptor and its length; a link to one only with ``follow``.

    Raises
    ------
    CheckpointFormatError
        It is not one: a link, a folder, a pipe or a device.
    OSError
        It cannot be opened.
    """
    # Without O_NONBLOCK, opening a pipe without a writer would block.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError:
        if not follow and path.is_symlink():
            raise _irregular(path, "a link, which may lead out of the folder") from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise _irregular(path, "a folder, a pipe or a device")
    return descriptor, status.st_size


def _irregular(path: Path, what: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"{path} is {what}, but a checkpoint has only regular files: put the file itself there", file=str(path)
    )


def length_of(path: Path) -> int | None:
    """Return the length of a regular file; None if there is none."""
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def read_metadata(path: Path) -> bytes | None:
    """Return the content of ``metadata.json``; None if there is none.

    Raises
    ------
    CheckpointFormatError
        It is no regular file, or larger than any that a save writes.
    OSError
        It cannot be read.
    """
    try:
        descriptor, nbytes = open_file(path / METADATA)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
        if nbytes > LARGEST_METADATA:
            name = str(path / METADATA)
            raise CheckpointFormatError(
                f"{name} is not the metadata of a oneaccord checkpoint: it has {nbytes:,} bytes, and these at most {LARGEST_METADATA:,}",
                file=name,
            )
        return file.read(nbytes)


def write_file(path: Path, parts: Iterable[memoryview | bytes], advance: Callable[[int], object]) -> None:
    """Write a new file, and wait until its content is on the disk; its name is when its folder is synchronised."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for part in parts:
            view = memoryview(part)
            while view:
                written = os.write(descriptor, view[:_SLICE_BYTES])
                view = view[written:]
                advance(written)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(path: Path, metadata: bytes) -> None:
    """Let a folder hold another checkpoint, at one moment: that of the rename."""
    temporary = path / _TEMPORARY
    remove([temporary])
    write_file(temporary, [metadata], lambda _: None)
    os.replace(temporary, path / METADATA)  # noqa: PTH105 - as all steps of this module
    sync_folder(path)


def remove(files: Iterable[Path]) -> None:
    """Remove files, if they are there."""
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)  # noqa: PTH108 - as all steps of this module


def remove_others(path: Path, keep: Iterable[str]) -> None:
    """Remove the data files of a folder but these: those of earlier saves, and of saves that were killed."""
    kept = set(keep)
    remove(path / name for name in sorted(os.listdir(path)) if is_data_file(name) and name not in kept)  # noqa: PTH208 - as above


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint: from the first step on there is none."""
    remove([path / METADATA])
    sync_folder(path)
    remove([path / _TEMPORARY])
    remove_others(path, [])
    with contextlib.suppress(OSError):  # it holds files of another program
        os.rmdir(path)  # noqa: PTH106 - as all steps of this module


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
