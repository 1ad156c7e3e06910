"""The store: where the ranks of a job meet. Rank 0's process runs it, in the background loop."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable

import msgspec

from manyhands.common.threads import Thread
from manyhands.contract.deadline import Deadline
from manyhands.control import timing
from manyhands.control.lobby import NEWCOMER_HELLO, JoinAddress, Joiners
from manyhands.control.membership import Membership
from manyhands.control.protocol import FromRank, FromStore, Join, Verdict
from manyhands.control.server import Seat, Server
from manyhands.net.credentials import Credentials, is_loopback
from manyhands.net.keepalive import Liveness
from manyhands.net.loop import Loop
from manyhands.net.network import Address
from manyhands.net.proven import ProvenSocket

__all__ = ["Store"]

_OWN = 0
"""The rank in whose process a store runs."""
_MAX_NAMED = 4
"""How many refused hosts an error names, at most."""


class Store(Server):
    """Serve one job: take its ranks in, then carry their control connections.

    It takes connections only until all ranks have come. A port of its own is then free for the next job; one that the launcher
    handed over stays open for the next group of this job, and whoever comes in between waits for that.

    Parameters
    ----------
    loop
        Where it runs.
    sock
        The listening socket; owned by the store from now on.
    credentials
        What ranks must show.
    world_size
        How many ranks must come.
    deadline
        Until when they must.
    liveness
        How a silent rank is noticed.
    door
        Where ranks come later; None where none does.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        credentials: Credentials,
        world_size: int,
        deadline: Deadline,
        liveness: Liveness,
        door: JoinAddress | None = None,
    ) -> None:
        super().__init__(loop, liveness)
        self._host = str(sock.getsockname()[0])
        self._lobby = None if door is None else Joiners(loop, door, liveness)
        self._membership = Membership(world_size, os.urandom(32), self._send, loop.call_later, store=_OWN, lobby=self._lobby)
        self._deadline = deadline
        self._refusals = 0
        self._refused_hosts: dict[str, str] = {}
        self._listen(sock, credentials, self._refused)
        loop.call(lambda: loop.call_later(deadline.remaining(), self._late))

    def drain(self, timeout_s: float) -> None:
        """Wait until no rank but this process's own is connected."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_alone(_OWN), timeout_s)

    def stay(self) -> None:
        """Wait until no rank but this process's own is connected; once the job has failed, for a moment only, since one that is stopped never goes."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_alone(_OWN) or self._membership.verdict is not None)
        self.drain(timing.DRAIN_S)

    def when_alone(self, function: Callable[[], None]) -> None:
        """Call ``function`` in a thread of its own once no rank but this process's own is connected."""

        def wait() -> None:
            self.stay()
            function()

        Thread(target=wait, name="manyhands-store-drain", daemon=True).start()

    def will_not_come(self, rank: int, reason: str) -> None:
        """Take note that a rank has ended, which may not have come yet; from any thread."""
        self._loop.call(lambda: self._membership.will_not_come(rank, reason))

    def look_for(self, gone: Callable[[], dict[int, str]]) -> None:
        """Ask several times a second, until all ranks have come, which have ended before; from any thread."""

        def look() -> None:
            missing = set(self._membership.missing())
            if not missing or self._membership.verdict is not None:
                return
            for rank, how in gone().items():
                if rank in missing:
                    self._membership.will_not_come(rank, how)
                    return
            self._loop.call_later(timing.LATE_LOOK_S, look)

        self._loop.call(look)

    def expect_soon(self, ranks: Iterable[int]) -> None:
        """Take ranks that do not come within some seconds for lost; from any thread."""

        def look() -> None:
            for rank in ranks:
                self._membership.will_not_come(rank, f"it did not come within {timing.READY_S:g} s, although it was ready to")

        self._loop.call(lambda: self._loop.call_later(timing.READY_S, look))

    def _close(self) -> None:
        super()._close()
        if self._lobby is not None:
            self._lobby.close()

    def _send(self, rank: int, message: FromStore) -> None:
        super()._send(rank, message)
        if isinstance(message, Verdict):
            with self._changed:
                self._changed.notify_all()

    def let_more_come(self) -> None:
        """End the job as soon as a new rank comes, so that it is let in, where there may be more ranks than there are; from any thread."""
        membership, lobby = self._membership, self._lobby
        if lobby is None:
            return
        roll = lobby.roll()
        if membership.world_size < roll.fewest:
            self._loop.call(lambda: membership.make_room("the job has fewer ranks than --min-ranks, and new ones may come"))
        elif membership.world_size < roll.most:
            self._loop.call(lambda: lobby.watch(membership.make_room))

    def _late(self) -> None:
        hint = "Did they start, and were they given this address and secret? More time: init(timeout_s=...), or MANYHANDS_TIMEOUT_S"
        if is_loopback(self._host):
            hint += f". Rank 0 listens at {self._host}, which only ranks of its own host can reach"
        if self._refusals:
            hosts = ", ".join(f"from {host} {why}" for host, why in self._refused_hosts.items())
            hint = (
                f"Connections were refused, {self._refusals} in all: {hosts}. Give all ranks the same MANYHANDS_SECRET (`manyhands run` makes one "
                "per job), and the same security.tls, if any"
            )
        self._membership.late(self._deadline.timeout_s, hint)

    def _refused(self, address: Address, why: str) -> None:
        # Whoever belongs to the job is told by the refusal, and raises; whoever does not must do no harm.
        self._refusals += 1
        if len(self._refused_hosts) < _MAX_NAMED:
            self._refused_hosts.setdefault(address[0], why)

    def _accept(self, sock: ProvenSocket, hello: bytes) -> None:
        if hello.startswith(NEWCOMER_HELLO):  # the ranks of the beginning are not there yet: it tries again
            sock.close()
        else:
            super()._accept(sock, hello)

    # What the seats hear

    def _join(self, seat: Seat, message: Join) -> None:
        is_free = message.rank not in self._seats
        if is_free:
            self._sit(seat, message.rank)
        refusal = self._membership.join(msgspec.structs.replace(message, certificate=seat.sock.certificate))
        if refusal is not None:
            if is_free:
                self._stand_up(seat)
            seat.send(refusal)
        if self._membership.complete:
            self._stop_listening()

    def _hear(self, rank: int, message: FromRank) -> None:
        self._membership.handle(rank, message)

    def _refuse(self, seat: Seat) -> None:
        who = "a process" if seat.number is None else f"rank {seat.number}"
        flaw = seat.connection.flaw and f" ({seat.connection.flaw})"
        verdict = Verdict("protocol", f"{who} sent the store a frame that cannot be read{flaw}", seat.number)
        self._membership.fail(verdict)
        seat.send(self._membership.verdict or verdict)  # who hears nothing more after that

    def _lose(self, rank: int, reason: str, vanished: bool) -> None:
        self._membership.lost(rank, reason, vanished)
