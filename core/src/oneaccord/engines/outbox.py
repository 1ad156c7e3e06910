"""What is on its way to the agent of a host."""

from __future__ import annotations

import contextlib
import json
import os
import queue
from typing import IO, Any

from oneaccord.common.threads import Thread

__all__ = ["Outbox"]


class Outbox:
    """Lines for an agent, written by a thread: a host that hangs reads nothing, and those who send have deadlines and signals to obey.

    Parameters
    ----------
    pipe
        The standard input of the local process that leads to the agent; it belongs to this from now on.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = Thread(target=self._write, name="oneaccord-outbox", daemon=True)
        self._thread.start()

    def send(self, **message: Any) -> None:
        """Send a line, and return at once; if nothing reads it any more, it is lost."""
        self._lines.put(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Close the pipe behind the last line, which ends the agent; return at once."""
        self._lines.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until the pipe is closed. If the process has ended, it soon is."""
        self._thread.join(timeout_s)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (line := self._lines.get()) is not None:
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(self._pipe.fileno(), rest) :]
        with contextlib.suppress(OSError):
            self._pipe.close()
