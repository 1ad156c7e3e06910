"""The output of the ranks, brought together: whole lines, each with the rank that wrote it."""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, TextIO

from oneaccord.api import OutputStream, Screen

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["RankLines", "text_stream"]


class _Screen(Screen):
    """An output of this process, which may be anything that stands for one, such as pytest's."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, fd: int, data: bytes) -> None:
        stream = self._stream
        buffer = getattr(stream, "buffer", None)
        try:
            if buffer is None:
                stream.write(data.decode(errors="replace"))
            else:
                buffer.write(data)
            stream.flush()
        except BrokenPipeError:
            self.broken = True
            # What the process's own stream still holds can go nowhere, and must not fail again when the process ends.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
            raise


class RankLines(io.BufferedIOBase):
    """The common end of the streams of all ranks, for one of the two outputs of the process.

    Lines are brought together as `oneaccord run` does for processes. A line belongs to the rank that runs, not to the one that made the stream: a
    logging handler that all ranks share tells who wrote.

    Parameters
    ----------
    stream
        The target of the lines.
    digits
        How wide the number of a rank is in front of each line; 0 for lines without it.
    writer
        Returns the running rank; None for none, whose output passes unchanged.
    silent
        Ranks of which nothing is written any more.
    """

    def __init__(self, stream: TextIO, digits: int, writer: Callable[[], int | None], silent: Collection[int]) -> None:
        self.name: str = getattr(stream, "name", "")
        self._stream = stream
        self._screen = _Screen(stream)
        self._digits = digits
        self._writer = writer
        self._silent = silent
        self._ranks: dict[int, OutputStream] = {}

    @property
    def is_broken(self) -> bool:
        """Whether nobody reads ``stream`` any more."""
        return self._screen.broken

    def write(self, data: ReadableBuffer, /) -> int:
        """Take the output of a rank; keep an unfinished line."""
        text = bytes(data)
        rank = self._writer()
        if rank is None:
            self._screen.write(-1, text)
        elif rank not in self._silent:
            if rank not in self._ranks:
                prefix = f"[{rank:>{self._digits}}] ".encode() if self._digits else b""
                self._ranks[rank] = OutputStream(self._screen, -1, prefix, math.inf)
            self._ranks[rank].feed(text)
        return len(text)

    def finish(self) -> None:
        """Write the unfinished line of the running rank."""
        rank = self._writer()
        if rank in self._ranks and rank not in self._silent:
            self._ranks.pop(rank).close()

    def writable(self) -> bool:
        """As for any file."""
        return True

    def isatty(self) -> bool:
        """As that of the process."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the stream of the process; writes to it pass by this class."""
        return self._stream.fileno()

    def close(self) -> None:
        """Nothing: other ranks write here, too."""


def text_stream(lines: RankLines, like: TextIO) -> TextIO:
    """Return a text stream upon ``lines``, for one rank: it may be changed or detached without harm to others."""
    encoding, errors = like.encoding or sys.getdefaultencoding(), like.errors or "strict"
    return io.TextIOWrapper(lines, encoding=encoding, errors=errors, write_through=True)
