"""The store: the server at which the ranks of a job meet. It runs in the background loop of rank 0."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence

import msgspec

from oneaccord.common.threads import Thread
from oneaccord.contract.deadline import Deadline
from oneaccord.control import timing
from oneaccord.control.connection import Control
from oneaccord.control.joiners import NEWCOMER_HELLO, JoinAddress, Joiners
from oneaccord.control.membership import Membership
from oneaccord.control.protocol import FromRank, FromStore, Join, Verdict
from oneaccord.control.server import Seat, Server
from oneaccord.net.credentials import Credentials, is_loopback
from oneaccord.net.keepalive import Liveness
from oneaccord.net.loop import Loop
from oneaccord.net.network import Address
from oneaccord.net.proven import ProvenSocket

__all__ = ["Store"]

_OWN = 0
"""The rank in whose process a store runs."""
_MAX_NAMED = 4
"""The most refused hosts that an error names."""


class Store(Server):
    """Serve one job: take its ranks in, then carry their control connections.

    It listens until all ranks have come. A port of its own is then free for the next job. One that the launcher handed over stays open for the next
    group of this job, and clients that come in between wait for that.

    Parameters
    ----------
    loop
        The background loop.
    sock
        The listening socket; owned by the store from now on.
    credentials
        The credentials that ranks must prove.
    world_size
        The number of ranks.
    deadline
        The deadline for all of them to come.
    liveness
        How a silent rank is noticed.
    join_address
        The address for ranks that come later; None if none can.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        credentials: Credentials,
        world_size: int,
        deadline: Deadline,
        liveness: Liveness,
        join_address: JoinAddress | None = None,
    ) -> None:
        self._joiners = None if join_address is None else Joiners(loop, join_address, liveness)
        super().__init__(loop, liveness, _OWN, self._joiners)
        self._host = str(sock.getsockname()[0])
        self._membership = Membership(
            world_size, os.urandom(32), self._send, loop.call_later, store=_OWN, joiners=self._joiners
        )
        self._deadline = deadline
        self._refusals = 0
        self._refused_hosts: dict[str, str] = {}
        self._listen(sock, credentials, self._refused)
        loop.call(lambda: loop.call_later(deadline.remaining(), self._late))

    def stay(self) -> None:
        """Wait until no other rank is connected; after a failure for a moment only, since a rank that is stopped never goes."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_alone() or self._membership.verdict is not None)
        self.drain(timing.DRAIN_S)

    def when_alone(self, function: Callable[[], None]) -> None:
        """Call ``function`` in a thread of its own once no other rank is connected."""

        def wait() -> None:
            self.stay()
            function()

        Thread(target=wait, name="oneaccord-store-drain", daemon=True).start()

    def will_not_come(self, rank: int, reason: str) -> None:
        """Take note that a rank has ended, perhaps before it came; from any thread."""
        self._loop.call(lambda: self._membership.will_not_come(rank, reason))

    def follow(self, old: Control, ranks: Sequence[int]) -> None:
        """Learn from the job before this one which of its ``ranks``, the survivors, end before they come here."""
        old.on_gone(lambda rank, reason: self.will_not_come(ranks.index(rank), reason) if rank in ranks else None)
        # If the store of the old job is lost, the ends of newcomers are not known.
        self.expect_soon([place for place, rank in enumerate(ranks) if rank >= old.world_size])

    def look_for(self, gone: Callable[[], dict[int, str]]) -> None:
        """Ask ``gone`` several times a second, until all ranks have come, which of them have ended before; from any thread."""

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
        """Take ranks for lost that do not come within `timing.READY_S`; from any thread."""

        def look() -> None:
            for rank in ranks:
                self._membership.will_not_come(rank, f"it did not come within {timing.READY_S:g} s, although it was ready to")

        self._loop.call(lambda: self._loop.call_later(timing.READY_S, look))

    def _send(self, rank: int, message: FromStore) -> None:
        super()._send(rank, message)
        if isinstance(message, Verdict):
            with self._changed:
                self._changed.notify_all()

    def let_more_come(self) -> None:
        """If the job may grow, end it as soon as a new rank comes, so that all make a group with it; from any thread."""
        membership, joiners = self._membership, self._joiners
        if joiners is None:
            return
        roster = joiners.roster()
        if membership.world_size < roster.fewest:
            self._loop.call(lambda: membership.make_room("the job has fewer ranks than --min-ranks, and new ones may come"))
        elif membership.world_size < roster.most:
            self._loop.call(lambda: joiners.watch(membership.make_room))

    def _late(self) -> None:
        hint = "Did they start, and were they given this address and secret? More time: init(timeout_s=...), or ONEACCORD_TIMEOUT_S"
        if is_loopback(self._host):
            hint += f". Rank 0 listens at {self._host}, which only ranks of its own host can reach"
        if self._refusals:
            hosts = ", ".join(f"from {host} {why}" for host, why in self._refused_hosts.items())
            hint = (
                f"Connections were refused, {self._refusals} in all: {hosts}. Give all ranks the same ONEACCORD_SECRET (`oneaccord run` makes one "
                "per job), and the same security.tls, if any"
            )
        self._membership.late(self._deadline.timeout_s, hint)

    def _refused(self, address: Address, why: str) -> None:
        # A rank of the job learns of the refusal, and raises. A stranger must do no harm.
        self._refusals += 1
        if len(self._refused_hosts) < _MAX_NAMED:
            self._refused_hosts.setdefault(address[0], why)

    def _accept(self, sock: ProvenSocket, hello: bytes) -> None:
        if hello.startswith(NEWCOMER_HELLO):  # the first ranks have not all come yet: the newcomer tries again
            sock.close()
        else:
            super()._accept(sock, hello)

    # Messages of the ranks

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

    def _turn_away(self, seat: Seat, message: Join) -> str:
        reason = super()._turn_away(seat, message)
        self._membership.note_misfit(reason)
        return reason

    def _hear(self, rank: int, message: FromRank) -> None:
        self._membership.handle(rank, message)

    def _refuse(self, seat: Seat) -> None:
        client = "a process" if seat.number is None else f"rank {seat.number}"
        flaw = seat.connection.flaw and f" ({seat.connection.flaw})"
        verdict = Verdict("protocol", f"{client} sent the store a frame that cannot be read{flaw}", seat.number)
        self._membership.fail(verdict)
        seat.send(self._membership.verdict or verdict)  # the last that it gets

    def _lose(self, rank: int, reason: str, vanished: bool) -> None:
        self._membership.lost(rank, reason, vanished)
