"""Which ranks read what comes to the standard input of the launcher."""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Iterator
from functools import partial

__all__ = ["ALL", "NONE", "StandardInput"]

ALL = "all"
NONE = "none"

_READ_BYTES = 1 << 16
_MOST_HELD_BYTES = 1 << 24
"""How much is held for the slowest rank; nothing more is read until that rank has caught up."""


class StandardInput:
    """The input of the ranks of one host.

    One rank reads the launcher's own file, a terminal too: it is in a session of its own, to which no terminal belongs, so the system
    does not stop it for reading. For `ALL` the launcher reads, and copies to a pipe of each rank; a regular file and a pipe alike.

    Parameters
    ----------
    which
        The number of a rank, `ALL` or `NONE`.
    selector
        Says when the input can be read and a pipe written; the data of a key is a function without arguments.
    """

    def __init__(self, which: str, selector: selectors.BaseSelector) -> None:
        self._which = which
        self._selector = selector
        self._unwritten: dict[int, bytearray] = {}
        """What each pipe still gets."""
        self._is_pausing = False
        self._has_ended = False
        self._is_selectable = True
        """Whether the system says when there is something to read; it does not for regular files, where there always is."""

    @contextlib.contextmanager
    def of(self, rank: int) -> Iterator[int]:
        """Yield the file that a rank reads, which is the caller's until the rank has it; a rank that comes later gets what comes after its start."""
        if self._which == str(rank):
            yield 0
            return
        if self._which == ALL and not self._has_ended:
            file, pipe = os.pipe()
            os.set_blocking(pipe, False)
            self._unwritten[pipe] = bytearray()
        else:
            file = os.open(os.devnull, os.O_RDONLY)
        try:
            yield file
        finally:
            os.close(file)

    def start(self) -> None:
        """Begin to copy, when all ranks that begin have their pipes."""
        if self._which != ALL:
            return
        if _is_in_background():
            self._end()
            return
        try:
            self._selector.register(0, selectors.EVENT_READ, self._read)
        except PermissionError:
            self._is_selectable = False
            self._read()
        except (OSError, ValueError):  # it is closed
            self._end()

    def close(self) -> None:
        """Close the pipes."""
        for pipe in list(self._unwritten):
            self._drop(pipe)

    def _read(self) -> None:
        """Read once, and give it to each rank."""
        try:
            data = os.read(0, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:  # a terminal that has gone, or a folder
            data = b""
        if not data or not self._unwritten:
            self._end()
            return
        for pipe, unwritten in list(self._unwritten.items()):
            if not unwritten:
                self._selector.register(pipe, selectors.EVENT_WRITE, partial(self._write, pipe))
            unwritten.extend(data)
        if self._is_selectable and self._is_full():
            self._is_pausing = True
            self._selector.unregister(0)

    def _write(self, pipe: int) -> None:
        unwritten = self._unwritten[pipe]
        try:
            count = os.write(pipe, unwritten[:_READ_BYTES])
        except BlockingIOError:
            return
        except OSError:  # the rank has ended, or has closed its input
            self._drop(pipe)
        else:
            del unwritten[:count]
            if not unwritten:
                self._selector.unregister(pipe)
                if self._has_ended:
                    self._drop(pipe)
        self._go_on()

    def _go_on(self) -> None:
        """Read more, if there is room for it again."""
        if self._has_ended or self._is_full():
            return
        if not self._is_selectable:
            if not all(self._unwritten.values()):
                self._read()
        elif self._is_pausing:
            self._is_pausing = False
            self._selector.register(0, selectors.EVENT_READ, self._read)

    def _is_full(self) -> bool:
        return any(len(each) >= _MOST_HELD_BYTES for each in self._unwritten.values())

    def _end(self) -> None:
        """Let each rank see the end, when it has read the rest."""
        self._has_ended = True
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(0)
        for pipe, unwritten in list(self._unwritten.items()):
            if not unwritten:
                self._drop(pipe)

    def _drop(self, pipe: int) -> None:
        if self._unwritten.pop(pipe):
            self._selector.unregister(pipe)
        os.close(pipe)


def _is_in_background() -> bool:
    """Return whether a shell runs this process behind a ``&``: to read its terminal would stop the process."""
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # no terminal
        return False
