"""Files: each step that a crash may come between, on its own.

What must survive a crash of the computer is synchronised before what refers to it. All else of this package reaches files through here.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = [
    "METADATA",
    "commit",
    "data_file",
    "is_data_file",
    "make_folder",
    "read_metadata",
    "remove",
    "remove_checkpoint",
    "remove_others",
    "sync_folder",
    "write_file",
]

METADATA = "metadata.json"
_TEMPORARY = METADATA + ".tmp"
_DATA_FILE = re.compile(r"data-[0-9a-f]{16}-\d+\.safetensors")
_SLICE_BYTES = 8 << 20
"""How much is written at once: enough for the speed of the disk, and little enough that progress is seen."""


def data_file(save: str, rank: int) -> str:
    """Return the name of the file that a rank writes in one save."""
    return f"data-{save}-{rank}.safetensors"


def is_data_file(name: str) -> bool:
    """Tell whether a name is one that `data_file` gives."""
    return _DATA_FILE.fullmatch(name) is not None


def make_folder(path: Path) -> None:
    """Make a folder and those above it, so that they survive a crash."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)  # noqa: PTH102 - as all steps of this module
        sync_folder(folder.parent)
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; a checkpoint is a folder")


def read_metadata(path: Path) -> bytes | None:
    """Return the content of ``metadata.json``; None where there is none."""
    try:
        return (path / METADATA).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


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
    with contextlib.suppress(OSError):  # somebody else has files there
        os.rmdir(path)  # noqa: PTH106 - as all steps of this module


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
