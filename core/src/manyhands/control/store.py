"""The store: where the ranks of a job meet. Rank 0's process runs it, in the background loop."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable

import msgspec

from manyhands.common.threads import Thread
from manyhands.contract.deadline import Deadline
from manyhands.control import timing
from manyhands.control.lobby import NEWCOMER_HELLO, JoinAddress, Joiners
from manyhands.control.membership import Membership
from manyhands.control.protocol import MAX_FROM_RANK_BYTES, FromStore, Join, Verdict, decode_from_rank, encode
from manyhands.net.credentials import Credentials, is_loopback
from manyhands.net.frames import FrameConnection
from manyhands.net.keepalive import Liveness
from manyhands.net.loop import Loop
from manyhands.net.network import Address, Listener
from manyhands.net.proven import ProvenSocket

__all__ = ["Store"]

_MAX_NAMED = 4
"""How many refused hosts an error names, at most."""


class Store:
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
        self._loop = loop
        self._host = str(sock.getsockname()[0])
        self._liveness = liveness
        self._ranks: dict[int, FrameConnection] = {}
        self._lobby = None if door is None else Joiners(loop, door, liveness)
        self._membership = Membership(world_size, os.urandom(32), self._send, loop.call_later, store=0, lobby=self._lobby)
        self._deadline = deadline
        self._changed = threading.Condition()
        self._seats: set[FrameConnection] = set()
        self._refusals = 0
        self._refused_hosts: dict[str, str] = {}
        self._listener = Listener(loop, sock, credentials, self._incoming, self._refused)
        loop.call(lambda: loop.call_later(deadline.remaining(), self._late))

    def drain(self, timeout_s: float) -> None:
        """Wait until no rank but this process's own is connected."""
        with self._changed:
            self._changed.wait_for(self._is_alone, timeout_s)

    def _is_alone(self) -> bool:
        return not self._seats - {self._ranks.get(0)}  # its own may have ended before the others were told why

    def stay(self) -> None:
        """Wait until no rank but this process's own is connected; once the job has failed, for a moment only, since one that is stopped never goes."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_alone() or self._membership.verdict is not None)
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

    def close(self) -> None:
        """Stop listening, and close every connection once what is queued has been sent."""
        self._listener.close()
        self._loop.call(self._close)

    def _close(self) -> None:
        for connection in list(self._seats):
            connection.close()
        if self._lobby is not None:
            self._lobby.close()

    def _send(self, rank: int, message: FromStore) -> None:
        self._ranks[rank].send(encode(message))
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

    def _incoming(self, sock: ProvenSocket, hello: bytes) -> None:
        if hello.startswith(NEWCOMER_HELLO):  # the ranks of the beginning are not there yet: it tries again
            sock.close()
        else:
            _Seat(self, sock)


class _Seat:
    """One rank's connection, as the store sees it."""

    def __init__(self, store: Store, sock: ProvenSocket) -> None:
        self._store = store
        self._rank: int | None = None
        self._certificate = sock.certificate
        self._connection = FrameConnection(store._loop, sock, self._frame, self._lost, MAX_FROM_RANK_BYTES, store._liveness)
        store._seats.add(self._connection)

    def _frame(self, frame: bytes | None) -> None:
        membership = self._store._membership
        message = decode_from_rank(frame)
        if message is None or (self._rank is None) != isinstance(message, Join):
            who = "a process" if self._rank is None else f"rank {self._rank}"
            flaw = self._connection.flaw and f" ({self._connection.flaw})"
            verdict = Verdict("protocol", f"{who} sent the store a frame that cannot be read{flaw}", self._rank)
            membership.fail(verdict)
            self._connection.send(encode(membership.verdict or verdict))  # who hears nothing more after that
        elif isinstance(message, Join):
            self._join(message)
        elif self._rank is not None:
            membership.handle(self._rank, message)

    def _join(self, message: Join) -> None:
        membership = self._store._membership
        free = message.rank not in self._store._ranks
        if free:
            self._store._ranks[message.rank] = self._connection
            self._rank = message.rank
        verdict = membership.join(msgspec.structs.replace(message, certificate=self._certificate))
        if verdict is not None:
            if free:
                del self._store._ranks[message.rank]
                self._rank = None
            self._connection.send(encode(verdict))
        if membership.complete:
            self._store._listener.close()

    def _lost(self, reason: str) -> None:
        with self._store._changed:
            self._store._seats.discard(self._connection)
            self._store._changed.notify_all()
        if self._rank is not None:
            self._store._membership.lost(self._rank, reason, self._connection.vanished)
