"""The faults of a checkpoint."""

from __future__ import annotations

from oneaccord.errors import OneAccordError

__all__ = [
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointMissingError",
    "CheckpointWriteError",
]


class CheckpointError(OneAccordError):
    """A checkpoint cannot be written or read. Every rank raises it, and the group stays usable.

    Parameters
    ----------
    message
        The finding, its place, and the remedy.
    file
        The path of the file that it is about, if it is about one.
    leaf
        The name of the leaf that it is about, if it is about one.
    peer
        The rank that found it.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        leaf: str | None = None,
        rank: int | None = None,
        peer: int | None = None,
    ) -> None:
        super().__init__(message, rank=rank, peer=peer)
        self.file: str | None = file
        self.leaf: str | None = leaf


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """There is no complete checkpoint, or one of its files is gone."""


class CheckpointCorruptError(CheckpointError):
    """A file does not have the bytes that were written: it is shorter, or its checksum differs."""


class CheckpointFormatError(CheckpointError):
    """A file is no checkpoint of oneaccord, or that of a newer version, or belongs to another save."""


class CheckpointWriteError(CheckpointError, OSError):
    """A rank could not write. The checkpoint that was there before is whole; or the new one is, if the error came after the rename."""
