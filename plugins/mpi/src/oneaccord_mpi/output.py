"""The output of many ranks, line by line, each with its rank in front."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
from pathlib import Path
from typing import IO, Self

from oneaccord.api import OutputStream, screens

__all__ = ["Output"]

_READ_BYTES = 1 << 16


class Output:
    """Reads named pipes and pipes, and shows what comes; leaving it as a context shows the rest."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._screens = dict(zip((1, 2), screens(1, 2), strict=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # What the ranks wrote is in the pipes by now.
        while self.show(0.0):
            pass
        for key in list(self._selector.get_map().values()):
            key.data.close()
            os.close(key.fd)
        self._selector.close()
        for screen in self._screens.values():
            screen.tell_of_lost()

    def add_fifo(self, path: Path, screen: int, prefix: bytes) -> None:
        """Make a named pipe, and show on file descriptor ``screen``, 1 or 2, what is written there, each line after ``prefix``."""
        os.mkfifo(path, 0o600)
        # For both directions, so that it stays open whoever comes and goes at its other end.
        self._add(os.open(path, os.O_RDWR | os.O_NONBLOCK), screen, prefix)

    def add_pipe(self, pipe: IO[bytes], screen: int) -> None:
        """Show on file descriptor ``screen`` what comes from a pipe."""
        fd = os.dup(pipe.fileno())
        os.set_blocking(fd, False)
        pipe.close()
        self._add(fd, screen, b"")

    def _add(self, fd: int, screen: int, prefix: bytes) -> None:
        self._selector.register(fd, selectors.EVENT_READ, OutputStream(self._screens[screen], screen, prefix, math.inf))

    def show(self, timeout_s: float) -> bool:
        """Wait for output at most so long, and show it; return whether there was any."""
        some = False
        for key, _ in self._selector.select(timeout_s):
            data = b""
            with contextlib.suppress(BlockingIOError):
                data = os.read(key.fd, _READ_BYTES)
            if data:
                key.data.feed(data)
                some = True
            else:
                self._selector.unregister(key.fd)
                key.data.close()
                os.close(key.fd)
        return some
