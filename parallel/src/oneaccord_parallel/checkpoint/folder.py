"""The content of a checkpoint, and the checkpoints in a folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from oneaccord import Group
from oneaccord.errors import printable
from oneaccord_parallel.arrays import itemsize
from oneaccord_parallel.boxes import whole
from oneaccord_parallel.checkpoint import storage
from oneaccord_parallel.checkpoint.errors import CheckpointError
from oneaccord_parallel.checkpoint.load import read_metadata
from oneaccord_parallel.checkpoint.metadata import Stamp, from_json, parse
from oneaccord_parallel.checkpoint.ranks import Ranks

__all__ = ["ArrayInfo", "CheckpointInfo", "Saved", "describe", "latest", "newest", "remove_old"]


class Saved(NamedTuple):
    """A complete checkpoint. It can be given as a path to all that takes one.

    Attributes
    ----------
    path
        Its folder.
    step
        The step that it was saved with, or None.
    time
        When it was saved, in seconds since 1970.
    """

    path: str
    step: int | None
    time: float

    def __fspath__(self) -> str:
        return self.path


class ArrayInfo(NamedTuple):
    """An array of a checkpoint.

    Attributes
    ----------
    dtype
        Its dtype, by name.
    shape
        Its shape; that of the whole array, if it is divided.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all its elements."""
        return whole(self.shape).size * itemsize(self.dtype)


@dataclass(frozen=True)
class CheckpointInfo:
    """The content of a checkpoint. Its text is a table.

    Attributes
    ----------
    path
        Its folder.
    step
        The step that it was saved with, or None.
    time
        When it was saved, in seconds since 1970.
    world_size
        How many ranks have saved it.
    extra
        The value of ``extra``; tuples have become lists.
    arrays
        The dtype and shape of each array, by name.
    values
        The other leaves, by name.
    files
        The bytes of each data file, by name.
    """

    path: str
    step: int | None
    time: float
    world_size: int
    extra: Any
    arrays: dict[str, ArrayInfo]
    values: dict[str, Any]
    files: dict[str, int]

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def __str__(self) -> str:
        step = f", step {self.step}" if self.step is not None else ""
        lines = [f"{printable(self.path)}{step}: {self.nbytes:,} bytes; ranks: {self.world_size}; files: {len(self.files)}"]
        leaves = {name: f"{array.dtype}{list(array.shape)}" for name, array in self.arrays.items()}
        leaves |= {name: repr(value) for name, value in self.values.items()}
        rows = {printable(name).replace("\n", "\\n"): text for name, text in leaves.items()}  # a line each
        width = max(map(len, rows), default=0)
        lines += [f"  {name:{width}}  {text}" for name, text in rows.items()]
        return "\n".join(lines)


def describe(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Return the content of a checkpoint, without reading the data. No other rank takes part.

    Parameters
    ----------
    path
        The folder of a checkpoint, or a file in safetensors format.

    Raises
    ------
    CheckpointMissingError
        There is no checkpoint.
    CheckpointCorruptError
        Its metadata was changed after it was written.
    CheckpointFormatError
        It is no checkpoint of oneaccord, or that of a newer version.
    """
    metadata = read_metadata(Path(path))
    return CheckpointInfo(
        os.fspath(path),
        metadata.step,
        metadata.time,
        metadata.world_size,
        from_json(metadata.extra),
        {name: ArrayInfo(array.dtype, array.shape) for name, array in metadata.arrays.items()},
        {name: from_json(value.value) for name, value in metadata.values.items()},
        metadata.files,
    )


def latest(path: str | os.PathLike[str], group: Group | None = None, *, timeout_s: float | None = None) -> Saved | None:
    """Return the newest complete checkpoint among the subfolders of a folder: the one that was saved last, whatever its step.

    Parameters
    ----------
    path
        The folder, such as that of an `AsyncSaver`.
    group
        The ranks that ask, all of them: rank 0 looks, so that all get the same answer. None for one process.
    timeout_s
        Seconds that a rank may wait for the others.

    Returns
    -------
    Saved or None
        Its path, step and time; None if there is none, or no such folder.

    Raises
    ------
    CheckpointError
        The folder cannot be read; on every rank.
    """
    ranks = Ranks(group, timeout_s)
    found, failure, mine = None, None, None
    if ranks.rank == 0:
        try:
            found = newest(Path(path))
        except OSError as error:
            mine = CheckpointError(f"{os.fspath(path)} cannot be read: {error}", file=os.fspath(path))
            failure = ranks.failure(mine)
    offer = ranks.broadcast({"failure": failure, "found": None if found is None else list(found)})
    ranks.raise_first([offer["failure"]], mine)
    return None if offer["found"] is None else Saved(*offer["found"])


def newest(path: Path) -> Saved | None:
    """Return the newest complete checkpoint that is directly in a folder."""
    return max(_complete(path), key=lambda saved: (saved.time, saved.step or 0), default=None)


def remove_old(path: Path, keep: int | None) -> None:
    """Remove from the folder of an `AsyncSaver` all checkpoints but the last ``keep``, and the files of killed saves."""
    ours = {folder for folder in _folders(path) if folder.name.isdecimal() and not folder.is_symlink()}
    complete = [saved for saved in _complete(path) if Path(saved.path) in ours]
    complete.sort(key=lambda saved: saved.time)
    old = {Path(saved.path) for saved in complete[: -keep if keep else 0]}
    for folder in sorted(ours):
        if folder in old or not (folder / storage.METADATA).exists():
            storage.remove_checkpoint(folder)


def _folders(path: Path) -> list[Path]:
    try:
        return [folder for folder in path.iterdir() if folder.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _complete(path: Path) -> list[Saved]:
    """Return the checkpoints of which all files are there."""
    found = []
    for folder in _folders(path):
        try:
            data = storage.read_metadata(folder)
            if data is None:
                continue
            stamp = parse(data, str(folder / storage.METADATA), Stamp)
        except CheckpointError:
            continue
        if all(storage.length_of(folder / name) == nbytes for name, nbytes in stamp.files.items()):
            found.append(Saved(str(folder), stamp.step, stamp.time))
    return found
