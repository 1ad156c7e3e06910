"""The gloo backend: a process group of torch's, with a tag for each channel."""

from __future__ import annotations

import contextlib
import ctypes
from datetime import timedelta
from functools import partial
from typing import Any

from oneaccord.api import Backend, Bootstrap, UnsupportedError, require_processes
from oneaccord_gloo.config import GlooConfig
from oneaccord_gloo.process_group import ProcessGroup
from oneaccord_gloo.transport import GlooTransport

__all__ = ["GlooBackend", "current"]

_TAGS = 1 << 31
_LAST_WORDS_S = 0.5
"""How long threads may take to come back from broken connections."""

_backends: list[GlooBackend] = []


def current() -> GlooBackend | None:
    """Return the backend of this process that was made last and is open, None if there is none."""
    return _backends[-1] if _backends else None


class GlooBackend(ProcessGroup, Backend):
    """Gloo between the ranks of a job.

    Parameters
    ----------
    bootstrap
        The identity of this rank, and how it finds the others.

    Raises
    ------
    BackendUnavailableError, ConfigError, DeadlineError
        As `ProcessGroup`.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        config = bootstrap.config
        assert isinstance(config, GlooConfig)
        require_processes(bootstrap, "gloo")
        super().__init__(bootstrap, config)
        self._transports: set[GlooTransport] = set()
        self._broken_off = False
        _backends.append(self)

    def open_transport(self, channel: int) -> GlooTransport:
        """Return the transport of a channel.

        Raises
        ------
        UnsupportedError
            Gloo has no tag for it.
        """
        if channel >= _TAGS - 1:
            raise UnsupportedError(
                f"Gloo has {_TAGS} tags, and this job has used one for each group that it made: make fewer groups, or start a new job"
            )
        transport = GlooTransport(self, channel, self._transports.discard)
        self._transports.add(transport)
        return transport

    def abort(self) -> None:
        """Wake every thread that waits for a message; who waits in a collective looks at `ended` again and again."""
        self.end("the job was aborted")
        if self.held and not self._broken_off:
            self._broken_off = True
            self.calls.start(partial(self._break_off, self.group))

    def close(self) -> None:
        """Let go of the process group; where calls are still in it, it stays until the process ends."""
        self.end("the backend was closed")
        self.calls.close(_LAST_WORDS_S if self._broken_off else 0.0)
        if self in _backends:
            _backends.remove(self)
            if self.held:
                # Its destructor would wait for threads that wait for ranks that are gone.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))
            self.group: Any = None

    def _break_off(self, group: Any) -> None:
        """Break every connection: a wait that runs out of time does.

        Threads inside Gloo come back by that. Were they still there when the interpreter ends, they would take the process down.
        """
        with contextlib.suppress(RuntimeError):
            nothing = self.tensors.of_payload(bytearray(1))
            group.recv([nothing], (self.rank + 1) % self.size, _TAGS - 1).wait(timedelta(milliseconds=1))

    def end(self, why: str) -> None:
        """Let nobody wait any more, and wake those who do."""
        super().end(why)
        for transport in list(self._transports):
            transport.tell()
