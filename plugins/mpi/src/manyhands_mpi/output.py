"""The output of many ranks, line by line, each with its rank in front."""

from __future__ import annotations

import contextlib
import os
import selectors
from pathlib import Path
from typing import IO, Self

__all__ = ["Output"]

_READ_BYTES = 1 << 16


class _Stream:
    """One output of one rank, or of mpiexec; a line is shown when it is complete."""

    def __init__(self, fd: int, screen: int, prefix: bytes) -> None:
        self.fd = fd
        self._screen = screen
        self._prefix = prefix
        self._held = b""

    def feed(self, data: bytes) -> None:
        lines = (self._held + data).splitlines(keepends=True)
        self._held = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        if len(self._held) > _READ_BYTES:
            lines.append(self._held)
            self._held = b""
        self._write(b"".join(self._prefix + line for line in lines))

    def finish(self) -> None:
        if self._held:
            self._write(self._prefix + self._held + (b"\n" if self._prefix else b""))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        # Nobody may read any more, as in `manyhands run ... | head`.
        with contextlib.suppress(BrokenPipeError):
            while view:
                view = view[os.write(self._screen, view) :]


class Output:
    """Reads named pipes and pipes, and shows what comes; leaving it as a context shows the rest."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # What the ranks wrote is in the pipes by now.
        while self.show(0.0):
            pass
        for key in list(self._selector.get_map().values()):
            key.data.finish()
            os.close(key.data.fd)
        self._selector.close()

    def add_fifo(self, path: Path, screen: int, prefix: bytes) -> None:
        """Make a named pipe, and show on file descriptor ``screen`` what is written there, each line after ``prefix``."""
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
        self._selector.register(fd, selectors.EVENT_READ, _Stream(fd, screen, prefix))

    def show(self, timeout_s: float) -> bool:
        """Wait for output at most so long, and show it; tell whether there was any."""
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
                key.data.finish()
                os.close(key.fd)
        return some
