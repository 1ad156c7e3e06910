"""What the ranks print, brought together: whole lines, each with the rank that wrote it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["RankLines", "text_stream"]


class RankLines(io.BufferedIOBase):
    """Where the streams of all ranks end, for one of the two outputs of the process.

    A line is written when it is complete, ended by a newline or, as progress bars do, by a carriage return. It belongs to the rank that runs,
    not to the one that made the stream: a logging handler that all ranks share tells who wrote.

    Parameters
    ----------
    stream
        Where the lines go.
    digits
        How wide the number of a rank is in front of each line; 0 for lines without it.
    writer
        Tells which rank runs; None for none, whose words pass unchanged.
    silent
        Ranks of which nothing is written any more.

    Attributes
    ----------
    is_broken
        Whether nobody reads ``stream`` any more.
    """

    def __init__(self, stream: TextIO, digits: int, writer: Callable[[], int | None], silent: Collection[int]) -> None:
        self.name: str = getattr(stream, "name", "")
        self.is_broken: bool = False
        self._stream = stream
        self._digits = digits
        self._writer = writer
        self._silent = silent
        self._held: dict[int, bytes] = {}
        self._returned: set[int] = set()
        """Ranks whose last line ended with a carriage return: a newline that comes next belongs to it."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Take what a rank writes; keep what is no whole line yet."""
        text = bytes(data)
        rank = self._writer()
        if rank is None:
            self._emit(text)
        elif rank not in self._silent:
            self._take(rank, text)
        return len(text)

    def finish(self) -> None:
        """Write what the rank that runs did not end with a line."""
        rank = self._writer()
        if rank in self._held and rank not in self._silent:
            self._emit(self._prefix(rank) + self._held.pop(rank) + (b"\n" if self._digits else b""))

    def writable(self) -> bool:
        """As for any file."""
        return True

    def isatty(self) -> bool:
        """As that of the process."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return that of the process; what is written there passes by this class."""
        return self._stream.fileno()

    def close(self) -> None:
        """Nothing: other ranks write here, too."""

    def _take(self, rank: int, text: bytes) -> None:
        if rank in self._returned and text:
            self._returned.discard(rank)
            if text.startswith(b"\n"):
                self._emit(b"\n")
                text = text[1:]
        *lines, rest = (self._held.pop(rank, b"") + text + b"\0").splitlines(keepends=True)
        if len(rest) > 1:
            self._held[rank] = rest[:-1]
        if lines:
            prefix = self._prefix(rank)
            self._emit(prefix + prefix.join(lines))
            if lines[-1].endswith(b"\r"):
                self._returned.add(rank)

    def _prefix(self, rank: int) -> bytes:
        return f"[{rank:>{self._digits}}] ".encode() if self._digits else b""

    def _emit(self, text: bytes) -> None:
        stream = self._stream
        buffer = getattr(stream, "buffer", None)
        try:
            if buffer is None:
                stream.write(text.decode(errors="replace"))
            else:
                buffer.write(text)
            stream.flush()
        except BrokenPipeError:
            self.is_broken = True
            # What the process's own stream still holds can go nowhere, and must not fail again when the process ends.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
            raise


def text_stream(lines: RankLines, like: TextIO) -> TextIO:
    """Return a text stream upon ``lines``, for one rank: it may be changed or detached without harm to others."""
    encoding, errors = like.encoding or sys.getdefaultencoding(), like.errors or "strict"
    return io.TextIOWrapper(lines, encoding=encoding, errors=errors, write_through=True)
