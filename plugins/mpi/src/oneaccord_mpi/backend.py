"""The mpi backend: one communicator for all that oneaccord sends, a tag for each channel.

Transfers and native collectives are started and tested, never waited for inside MPI, so that a deadline, an abort or a lost rank
ends every wait. Memory that MPI may still touch is held until MPI is done with it, also when a call has failed.
"""

from __future__ import annotations

import contextlib
from typing import Any

from oneaccord.api import (
    Backend,
    Bootstrap,
    Deadline,
    LibraryMessage,
    LinkLost,
    PolledTransport,
    UnsupportedError,
    require_processes,
    wait_until,
)
from oneaccord_mpi import library
from oneaccord_mpi.agreement import Agreement
from oneaccord_mpi.config import MpiConfig
from oneaccord_mpi.watchdog import Watchdog
from oneaccord_mpi.world import MpiWorld

__all__ = ["MpiBackend", "MpiTransport", "current"]

_CANCEL_S = 1.0
"""How long MPI may take to give up a receive, for which it waits for no rank."""

_backends: list[MpiBackend] = []


def current() -> MpiBackend | None:
    """Return the backend of this process that was made last and is open, None if there is none."""
    return _backends[-1] if _backends else None


class MpiBackend(MpiWorld, Backend):
    """MPI between the ranks of a job.

    Parameters
    ----------
    bootstrap
        The identity of this rank, and how it finds the others.

    Raises
    ------
    BackendUnavailableError, ConfigError, DeadlineError
        As `MpiWorld`.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        config = bootstrap.config
        assert isinstance(config, MpiConfig)
        require_processes(bootstrap, "mpi")
        super().__init__(bootstrap, config)
        self._aborts = 0
        self._channels: dict[int, int] = {}
        self.blocking: bool = self.parallel and config.native == "blocking"
        self.agreement: Agreement | None = Agreement(self) if config.check else None
        self.watchdog: Watchdog = Watchdog(self)
        _backends.append(self)

    def open_transport(self, channel: int) -> MpiTransport:
        """Return the transport of a channel.

        Raises
        ------
        UnsupportedError
            The tag of the channel is taken by an older group that is still open.
        """
        tag = channel % self._tags
        if self._channels.setdefault(tag, channel) != channel:
            raise UnsupportedError(
                f"{library.name_of(self.mpi)} has {self._tags} tags, so groups number {self._channels[tag] // 2} and {channel // 2} cannot "
                "be open at once: close groups that you no longer use"
            )
        return MpiTransport(self, channel, tag)

    def close_channel(self, channel: int, tag: int) -> None:
        """Forget a channel that no rank uses any more."""
        if self._channels.get(tag) == channel:
            del self._channels[tag]

    def abort(self) -> None:
        """Wake every thread that waits: each looks at `ended` between two tests."""
        self._aborts += 1
        self.end("the job was aborted")

    def close(self) -> None:
        """Let go of MPI, which itself ends with the process."""
        self.end("the backend was closed")
        if self in _backends:
            _backends.remove(self)
            # A job that ends well aborts its backend once, on the way to close it. One more means that it failed before that.
            if self._aborts > 1:
                library.mark_failed()
                return
            self._cancel_receives()
            if self.held:
                library.mark_unfinished()

    def _cancel_receives(self) -> None:
        """Take back what waits for messages that no rank sends any more: messages with tags always have such receives."""
        for message in list(self.held.values()):
            if not isinstance(message, LibraryMessage) or not message.is_incoming or message.is_uncertain:
                continue
            with contextlib.suppress(TimeoutError, self.mpi.Exception):
                for request in message.requests:
                    with self.lock:
                        request.Cancel()
                    wait_until(self.tested(request), lambda: None, Deadline(_CANCEL_S), 0.0)
                self.release(message)


class MpiTransport(PolledTransport):
    """Messages of one channel."""

    def __init__(self, backend: MpiBackend, channel: int, tag: int) -> None:
        super().__init__(backend)
        self._backend = backend
        self._channel = channel
        self._tag = tag
        self._comm, self._byte, self._error = backend.comm, backend.mpi.BYTE, backend.mpi.Exception
        self._lock, self._parallel = backend.lock, backend.parallel

    def start_send(self, peer: int, memory: bytes | memoryview) -> Any:
        """Start to send."""
        with self._lock:
            return self._comm.Isend((memory, len(memory), self._byte), peer, self._tag)

    def start_receive(self, peer: int, memory: Any) -> Any:
        """Start to receive."""
        with self._lock:
            return self._comm.Irecv((memory, len(memory), self._byte), peer, self._tag)

    def test(self, request: Any, peer: int) -> bool:
        """Let MPI work; return whether a request is done."""
        try:
            if self._parallel:
                done: bool = request.Test()
            else:
                with self._lock:
                    done = request.Test()
        except self._error as error:
            raise LinkLost(peer, library.words(error)) from None
        return done

    def close(self) -> None:
        """Give the tag back."""
        self._backend.close_channel(self._channel, self._tag)
