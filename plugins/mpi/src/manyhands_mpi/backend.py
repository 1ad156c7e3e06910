"""The mpi backend: one communicator for all that manyhands sends, a tag for each channel.

Transfers and native collectives are started and tested, never waited for inside MPI, so that a deadline, an abort or a lost rank
ends every wait. Memory that MPI may still touch is held until MPI is done with it, also when a call has failed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, cast

from manyhands.api import (
    Backend,
    BackendUnavailableError,
    Bootstrap,
    CommError,
    ConfigError,
    Deadline,
    LinkLost,
    Transfer,
    Transport,
    UnsupportedError,
    read_cards,
    write_card,
)
from manyhands_mpi import library
from manyhands_mpi.agreement import Agreement
from manyhands_mpi.patience import StallCallback, wait_until
from manyhands_mpi.plugin import MpiConfig
from manyhands_mpi.transfers import Moving, Receiving, Sending
from manyhands_mpi.watchdog import Watchdog

__all__ = ["MpiBackend", "MpiTransport", "current"]

_TRIES = 32
_SLOW_BYTES_PER_S = 250e6
"""A transfer that is slower than that stands still."""
_VERDICT_S = 1.0
"""How long an error of MPI waits for the job to learn what caused it, such as a rank that died."""

_backends: list[MpiBackend] = []


def current() -> MpiBackend | None:
    """Return the backend of this process that was made last and is open, None where there is none."""
    return _backends[-1] if _backends else None


class _Card(TypedDict):
    """What a rank tells the others before they begin."""

    size: int
    native: str
    check: bool
    library: str
    parallel: bool


class MpiBackend(Backend):
    """MPI between the ranks of a job.

    Parameters
    ----------
    bootstrap
        Who this rank is, and how it finds the others.

    Attributes
    ----------
    mpi
        The module ``mpi4py.MPI``.
    comm
        A communicator of manyhands alone, in which ranks count as in the job.
    lock
        To be held during each call of an MPI that serves one thread at a time.
    ended
        Why nobody may wait any more; empty while all is well.

    Raises
    ------
    BackendUnavailableError
        There is no MPI library, or the ranks are not one MPI world.
    ConfigError
        The ranks have different ``[backends.mpi]``.
    DeadlineError
        Another rank did not get ready in time.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        config = bootstrap.config
        assert isinstance(config, MpiConfig)
        if bootstrap.shared is not None:
            raise BackendUnavailableError("the ranks of the mpi backend are processes, and these are threads of one process")
        self.config: MpiConfig = config
        self.rank: int = bootstrap.rank
        self.size: int = bootstrap.world_size
        self.ended: str = ""
        self._aborts = 0
        self._channels: dict[int, int] = {}
        self._held: dict[int, object] = {}
        self.mpi: Any = library.load(config.finalize_s)
        self._parallel: bool = self.mpi.Query_thread() >= self.mpi.THREAD_MULTIPLE
        self.lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext() if self._parallel else threading.Lock()
        self.blocking: bool = self._parallel and config.native == "blocking"
        world = self.mpi.COMM_WORLD
        mine = _Card(
            size=world.size,
            native=config.native,
            check=config.check,
            library=library.name_of(self.mpi),
            parallel=self._parallel,
        )
        cards = read_cards(bootstrap.exchange("mpi", write_card(mine)), _Card)
        self._compare(cards)
        # All ranks are here, so that this call, which has no deadline, does not wait for anybody.
        self.comm: Any = world.Split(0, self.rank)
        self.comm.Set_errhandler(self.mpi.ERRORS_RETURN)
        self._tags: int = world.Get_attr(self.mpi.TAG_UB) + 1
        self.agreement: Agreement | None = Agreement(self) if config.check else None
        self.watchdog: Watchdog = Watchdog(self)
        _backends.append(self)

    def _compare(self, cards: list[_Card]) -> None:
        for rank, card in enumerate(cards):
            if card["size"] != self.size:
                raise BackendUnavailableError(
                    f"rank {rank} is in an MPI world of {card['size']}, and the job has {self.size} ranks: start all ranks with one "
                    f"`manyhands run --backend mpi -n {self.size}`, mpiexec -n {self.size} or srun -n {self.size}, of the MPI that mpi4py "
                    f"loads (rank {rank}: {card['library']})"
                )
            first = dict(cards[0])
            for key, value in card.items():
                if value != first[key]:
                    raise ConfigError(
                        f"backends.mpi.{key} is {first[key]!r} on rank 0 and {value!r} on rank {rank}: all ranks need the same",
                        key=f"backends.mpi.{key}",
                        value=value,
                    )

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
        self._end("the job was aborted")

    def close(self) -> None:
        """Let go of MPI, which itself ends with the process."""
        self._end("the backend was closed")
        if self in _backends:
            _backends.remove(self)
            # A job that ends well aborts its backend once, on the way to close it. One more means that it failed before that.
            if self._aborts > 1 or self._held:
                library.mark_failed()

    def _end(self, reason: str) -> None:
        self.ended = self.ended or reason

    def check(self) -> None:
        """Raise `LinkLost` when the backend has ended."""
        if self.ended:
            raise LinkLost((self.rank + 1) % self.size, self.ended)

    def hold(self, what: object) -> None:
        """Keep memory that MPI uses, until `release`: for ever where a call fails."""
        self._held[id(what)] = what

    def release(self, what: object) -> None:
        """Let go of memory that MPI is done with."""
        self._held.pop(id(what), None)

    def wait(self, request: Any, nbytes: int, deadline: Deadline, on_stall: StallCallback | None) -> None:
        """Return when a collective is done.

        Parameters
        ----------
        request
            What MPI gave when it began.
        nbytes
            How much it moves: for how long it is worth to stay awake.
        deadline, on_stall
            Until when, and what is called with all other ranks when it takes long.

        Raises
        ------
        LinkLost
            The backend ended.
        TimeoutError
            The deadline passed; the collective goes on.
        """
        test = request.Test if self._parallel else self._locked(request.Test)
        for _ in range(_TRIES):
            if test():
                return
        others = [rank for rank in range(self.size) if rank != self.rank]
        wait_until(test, self.check, deadline, self.patience_s(nbytes), on_stall and (lambda: on_stall(others)))

    def _locked(self, test: Callable[[], bool]) -> Callable[[], bool]:
        def locked() -> bool:
            with self.lock:
                return test()

        return locked

    def patience_s(self, nbytes: int) -> float:
        """Return for how long a wait stays awake for a message of ``nbytes`` bytes."""
        return self.config.spin_us * 1e-6 + nbytes / _SLOW_BYTES_PER_S

    def broken(self, error: Any) -> Exception:
        """Return what to raise for an error of MPI in a collective: no rank is to blame unless the job says so."""
        # An error is often only how a death shows itself here; the job knows within a moment who died.
        with contextlib.suppress(TimeoutError, LinkLost):
            wait_until(lambda: False, self.check, Deadline(_VERDICT_S), 0.0)
        if self.ended:
            return LinkLost((self.rank + 1) % self.size, f"{self.ended}; {library.words(error)}")
        return CommError(f"MPI failed: {library.words(error)}", rank=self.rank)


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
