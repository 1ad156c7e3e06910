"""Bringing the output of many ranks together, line by line."""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oneaccord.local.logs import Log

__all__ = ["Screen", "Stream", "screens"]

_LONGEST_HELD_LINE = 1 << 16
_TAIL_BYTES = 1 << 16


_NO_READER = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN})


class Screen:
    """A file to which streams write in turn: a line that one began is ended before another one writes.

    Output that cannot be written although the file has a reader, as on a full disk, is lost, and the other output says so: no program ends because
    of its output.

    Parameters
    ----------
    name
        The name of the file in messages.
    other
        The place for a message that output is lost: another screen and its file descriptor.
    """

    def __init__(self, name: str = "the output", other: tuple[Screen, int] | None = None) -> None:
        self.name: str = name
        self.other: tuple[Screen, int] | None = other
        self.broken: bool = False
        """Whether the file has no reader any more; later output is dropped."""
        self.lost: int = 0
        """How many bytes could not be written."""
        self.open_line: Stream | None = None
        """The stream whose line is not ended yet, or that went back to its start by a carriage return."""
        self.wait: Callable[[int], bool] = _wait_for_reader
        """Waits a while until a file can be written, and returns whether to try again."""
        self._reason = ""
        self._is_cut = False
        """Whether a part of the last output is missing."""

    def write(self, fd: int, data: bytes) -> None:
        """Write all of ``data``, waiting for a slow reader as long as `wait` goes on.

        Parameters
        ----------
        fd
            The file.
        data
            The bytes.
        """
        view = memoryview(b"\n" + data if self._is_cut else data)
        while view and not self.broken:
            # Never more than a ready pipe takes at once: a write that blocked would be deaf to signals.
            if not select.select([], [fd], [], 0)[1]:
                if not self.wait(fd):
                    return
                continue
            try:
                view = view[os.write(fd, view[: select.PIPE_BUF]) :]
                self._is_cut = False
            except BlockingIOError:
                continue
            except OSError as error:
                # A terminal that has gone gives EIO, as a broken disk does.
                if error.errno in _NO_READER or (error.errno == errno.EIO and stat.S_ISCHR(os.fstat(fd).st_mode)):
                    self.broken = True
                    return
                self._lose(min(len(view), len(data)), error)
                return

    def tell_of_lost(self) -> None:
        """Say on the other screen how much could not be written, if anything."""
        if self.lost and self.other is not None:
            self._say(f"{self.lost} bytes of {self.name} were lost: {self._reason}")

    def _lose(self, length: int, error: OSError) -> None:
        is_first, self.lost, self._is_cut = not self.lost, self.lost + length, True
        self._reason = error.strerror or str(error)
        if is_first and self.other is not None:
            self._say(f"{self.name} cannot be written ({self._reason}): the job continues, but its output there is lost")

    def _say(self, words: str) -> None:
        assert self.other is not None
        screen, fd = self.other
        before = "\n" if screen.open_line is not None else ""
        screen.open_line = None
        screen.write(fd, f"{before}oneaccord run: {words}\n".encode(errors="backslashreplace"))


def _wait_for_reader(fd: int) -> bool:
    select.select([], [fd], [])
    return True


class Stream:
    """One output of one rank.

    A line is written when it is complete, ended by a newline or, as progress bars do, by a carriage return. A beginning that waits
    for longer than ``patience_s`` (a prompt, a bar that draws its end last) is shown as it is.

    Parameters
    ----------
    screen, fd
        The target of the lines.
    prefix
        The text before each line; if it is empty, the bytes pass unchanged.
    patience_s
        Seconds for which an incomplete line is held back.
    log
        Where the bytes go as well, as they come.
    """

    def __init__(self, screen: Screen, fd: int, prefix: bytes, patience_s: float, log: Log | None = None) -> None:
        self._screen = screen
        self._fd = fd
        self._prefix = prefix
        self._patience_s = patience_s
        self._log = log
        self._held = b""
        self._returned = False
        """Whether the last byte written was a carriage return: the next line needs its prefix again."""
        self.tail: bytearray = bytearray()
        """The last 64 KiB that the rank wrote."""
        self.show_at: float | None = None
        """When the beginning of a line that is held back is due, on the monotonic clock."""

    def feed(self, data: bytes) -> None:
        """Take bytes as they come from the rank.

        Parameters
        ----------
        data
            The bytes.
        """
        if self._log is not None:
            self._log.write(data)
        self.tail += data[-_TAIL_BYTES:]
        del self.tail[:-_TAIL_BYTES]
        if self._returned and not self._held and data.startswith(b"\n"):
            # The second half of a "\r\n" whose first half ended the last read; a writer in between has ended the line.
            if self._screen.open_line is self:
                self._write([b"\n"], prefix=b"")
            self._returned = False
            data = data[1:]
        data = self._held + data
        lines = data.splitlines(keepends=True)  # of bytes: at \n, \r and \r\n, nowhere else
        self._held = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        if lines:
            self._write(lines, self._prefix)
        if not self._held:
            self.show_at = None
        elif len(self._held) > _LONGEST_HELD_LINE:
            self.show()
        elif self.show_at is None or lines:
            self.show_at = time.monotonic() + self._patience_s

    def show(self) -> None:
        """Write the beginning of a line that was held back; the next to write ends it."""
        if self._held:
            self._write([self._held], self._prefix)
        self._held = b""
        self.show_at = None

    def close(self) -> None:
        """Write the rest; an unfinished last line is ended if lines have prefixes."""
        self.show()
        if self._screen.open_line is self and self._prefix:
            self._screen.write(self._fd, b"\n")
            self._screen.open_line = None

    def _write(self, lines: list[bytes], prefix: bytes) -> None:
        first, before = prefix, b""
        if self._screen.open_line is self:
            first = prefix if self._returned else b""
        elif self._screen.open_line is not None:
            before = b"\n"
        self._screen.write(self._fd, before + first + prefix.join(lines))
        self._returned = lines[-1].endswith(b"\r")
        self._screen.open_line = None if lines[-1].endswith(b"\n") else self


def screens(stdout: int, stderr: int) -> tuple[Screen, Screen]:
    """Return the screens of the two outputs: one and the same if both are one terminal or file.

    Parameters
    ----------
    stdout, stderr
        Their file descriptors.
    """
    first, second = os.fstat(stdout), os.fstat(stderr)
    if (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino):
        screen = Screen("the output")
        return screen, screen
    out, err = Screen("standard output"), Screen("standard error")
    out.other, err.other = (err, stderr), (out, stdout)
    return out, err
