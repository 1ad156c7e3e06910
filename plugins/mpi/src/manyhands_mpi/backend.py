"""The mpi backend: one communicator for all that manyhands sends, a tag for each channel.

Transfers and native collectives are started and tested, never waited for inside MPI, so that a deadline, an abort or a lost rank
ends every wait. Memory that MPI may still touch is held until MPI is done with it, also when a call has failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from manyhands.api import Backend, BackendUnavailableError, Bootstrap, Deadline, LinkLost, Transfer, Transport, UnsupportedError
from manyhands_mpi import library
from manyhands_mpi.agreement import Agreement
from manyhands_mpi.config import MpiConfig
from manyhands_mpi.patience import wait_until
from manyhands_mpi.transfers import Moving, Receiving, Sending
from manyhands_mpi.watchdog import Watchdog
from manyhands_mpi.world import MpiWorld

__all__ = ["MpiBackend", "MpiTransport", "current"]

_backends: list[MpiBackend] = []


def current() -> MpiBackend | None:
    """Return the backend of this process that was made last and is open, None where there is none."""
    return _backends[-1] if _backends else None


class MpiBackend(MpiWorld, Backend):
    """MPI between the ranks of a job.

    Parameters
    ----------
    bootstrap
        Who this rank is, and how it finds the others.

    Raises
    ------
    BackendUnavailableError, ConfigError, DeadlineError
        As `MpiWorld`.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        config = bootstrap.config
        assert isinstance(config, MpiConfig)
        if bootstrap.shared is not None:
            raise BackendUnavailableError("the ranks of the mpi backend are processes, and these are threads of one process")
        super().__init__(bootstrap, config)
        self._aborts = 0
        self._channels: dict[int, int] = {}
        self.blocking: bool = self._parallel and config.native == "blocking"
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
                f"{library.name_of(self.mpi)} has {self._tags} tags, so that groups number {self._channels[tag] // 2} and {channel // 2} cannot "
                "be open at once: close groups that are done"
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
            if self._aborts > 1 or self._held:
                library.mark_failed()


class MpiTransport(Transport):
    """Messages of one channel."""

    def __init__(self, backend: MpiBackend, channel: int, tag: int) -> None:
        self._backend = backend
        self._channel = channel
        self._tag = tag

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Nothing to do: MPI connects when it first sends."""

    def close(self) -> None:
        """Give the tag back."""
        self._backend.close_channel(self._channel, self._tag)

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to send."""
        return self._begun(Sending(self._backend, peer, self._tag, header, payload))

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to receive."""
        return self._begun(Receiving(self._backend, peer, self._tag, header, payload))

    def _begun(self, transfer: Moving) -> Moving:
        self._backend.hold(transfer)
        transfer.advance()
        return transfer

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Test in turn until one is done."""
        moving = cast("Sequence[Moving]", transfers)  # made by send and recv

        def one_is_done() -> bool:
            # All of them are to go on, also where the first one is done.
            return bool(sum(transfer.advance() for transfer in moving))

        def check() -> None:
            if self._backend.ended:
                raise LinkLost(moving[0].peer, self._backend.ended)

        wait_until(one_is_done, check, deadline, self._backend.patience_s(max(transfer.nbytes for transfer in moving)))
