"""The standby store: where the survivors find each other when the rank with the store, at first rank 0, dies or falls silent.

The store appoints one other rank as its standby, on another host if there is one. The standby listens, and all ranks connect to it in the background.
While the store lives the standby only takes note of which ranks are there. It takes over, and appoints a standby of its own,

- as soon as its connections with the store's rank end;
- when a rank reports a failure to it, since the store does not answer;
- a moment after a rank has lost its connection to the store, unless the store decides something meanwhile. If it does, the store lives, and that rank
  alone is cut off.

It needs to know little. The calls under way have failed in any case, and the store tells its standby the first cause before all others. Whichever of the two finds a
first cause, the other one takes it over. So a store that was stopped, and wakes up after a failover, changes nothing.

If the network splits, both may live, each with some of the ranks. Then the larger part alone continues (`Membership.lost`).

If the standby dies as well before there is another one, the survivors gather: the first of them, as far as each knows, listens at an address that all have known
since the beginning, and takes over as the standby would have (`StandbyStore.gather`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable
from enum import Enum, auto
from functools import partial
from typing import Any, Final

from oneaccord.control import timing
from oneaccord.control.joiners import JoinAddress, Joiners
from oneaccord.control.membership import Membership
from oneaccord.control.protocol import (
    Agree,
    Agreement,
    Farewell,
    FromRank,
    GiveUp,
    JobReformed,
    Join,
    Leave,
    Orphaned,
    Progress,
    Report,
    Shrink,
    Shrunk,
    Verdict,
    ranks_in,
)
from oneaccord.control.server import Seat, Server
from oneaccord.net.credentials import Credentials
from oneaccord.net.keepalive import Liveness
from oneaccord.net.loop import Loop
from oneaccord.net.proven import ProvenSocket

__all__ = ["NOBODY", "StandbyStore"]

NOBODY = -1
"""Stands for the rank with the store if there is no store any more."""

_Actions = dict[Any, "Callable[[StandbyStore, int, Any], None]"]
_TOO_EARLY = "its process ended before all ranks had left"


class _State(Enum):
    """The life of a standby store."""

    WATCHING = auto()
    """The store lives, as far as this rank knows."""
    EXPECTING = auto()
    """The store is lost. Ranks on their way here have a moment to come."""
    GATHERING = auto()
    """The store and its standby are lost. All survivors are expected here."""
    SERVING = auto()
    """This is the store now."""
    DISMISSED = auto()
    """All ranks have left. Nothing is to be done any more."""
    CLOSED = auto()


_WAITING: Final = frozenset({_State.EXPECTING, _State.GATHERING})


class StandbyStore(Server):
    """The server that takes over when the store is lost.

    Parameters
    ----------
    loop
        The background loop.
    sock
        The listening socket; owned by this from now on.
    credentials
        The credentials that the ranks of this job must prove.
    rank, world_size
        This rank, and the number of ranks.
    store
        The rank with the store, or `NOBODY`.
    liveness
        How a silent rank is noticed.
    gone
        The ranks that had ended before.
    has_ended
        Returns whether a rank's process has ended; None if that is not known here.
    join_address
        The address for ranks that come later; None if none can.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        credentials: Credentials,
        rank: int,
        world_size: int,
        store: int,
        liveness: Liveness,
        gone: Collection[int] = (),
        has_ended: Callable[[int], bool | None] = lambda _: None,
        join_address: JoinAddress | None = None,
    ) -> None:
        self._joiners = None if join_address is None else Joiners(loop, join_address, liveness)
        super().__init__(loop, liveness, rank, self._joiners)
        self._has_ended = has_ended
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._lost: frozenset[int] = frozenset()
        self._ended = frozenset(gone)
        self._members: dict[int, Join] = {}
        self._left: dict[int, Progress] = {}
        self._gone: dict[int, tuple[str, bool]] = {}
        self._waiting: list[tuple[int, FromRank]] = []
        self._reformed: set[int] = set()
        self._verdict: Verdict | None = None
        self._membership: Membership | None = None
        self._then: list[Callable[[Membership], None]] = []
        self._state = _State.WATCHING
        self._waited_s = 0.0
        self._found: Verdict | None = None
        self._credentials = credentials
        self._listen(sock, credentials)

    def _accept(self, sock: ProvenSocket, hello: bytes) -> None:
        if self._state is _State.CLOSED:
            sock.close()
        else:
            super()._accept(sock, hello)

    def agree(self, verdict: Verdict) -> Verdict:
        """Take note of the store's first cause, and return the one that counts."""
        if self._membership is not None:
            self._membership.fail(verdict)
            return self._membership.verdict or verdict
        self._verdict = self._verdict or verdict
        return self._verdict

    def drain(self, timeout_s: float) -> None:
        """If this has taken over, wait until no other rank is connected."""
        if self._membership is not None:
            super().drain(timeout_s)

    def all_have_left(self) -> None:
        """Tell the others that all ranks have left: the store may end as it tells them, one after the other."""
        if self._state in {_State.WATCHING, *_WAITING}:
            self._state = _State.DISMISSED
            for rank in sorted(self._seats):
                self._send(rank, Farewell())

    def add_reformed(self, ranks: Iterable[int]) -> None:
        """Take note of ranks that are in the next job, and tell the others; this rank may be one of them, and close this."""
        if self._membership is None:
            is_first, self._reformed = not self._reformed, self._reformed | {*ranks}
            for rank in sorted(self._seats) if is_first else ():  # one message is enough
                self._send(rank, JobReformed(sorted(self._reformed)))

    def step_back(self) -> None:
        """Close, unless this has taken over or is about to: its rank leaves the store, which will then have another standby; from any thread.

        The rank with the store turns to that one, and so ends its connection to this one, which would look like the loss of the store.
        """

        def close() -> None:
            if self._state is _State.WATCHING:
                self._stop_listening()
                self._close()

        self._loop.call(close)

    def _close(self) -> None:
        self._state = _State.CLOSED
        super()._close()

    def gather(self, lost: Collection[int], found: Verdict | None) -> None:
        """Take over once the survivors have come, which look for each other; from any thread.

        Parameters
        ----------
        lost
            The ranks that have ended, or are cut off from this one.
        found
            The first cause, unless a rank that comes knows another one.
        """

        def begin() -> None:
            self._found = found
            self._lost |= {*lost}
            self._await(_State.GATHERING)

        self._loop.call(begin)

    def _take_over(self, then: Callable[[Membership], None] = lambda _: None) -> None:
        """Take over, and call ``then``; ranks on their way here have a moment to come."""
        if self._membership is not None:
            then(self._membership)
        else:
            self._then.append(then)
            self._await(_State.EXPECTING)

    def _await(self, state: _State) -> None:
        """Take over once all expected ranks have come, or time is up."""
        before = self._state
        if before is _State.WATCHING or (before is _State.EXPECTING and state is _State.GATHERING):
            self._state = state
            if before is _State.WATCHING:
                self._look()

    def _look(self) -> None:
        if self._state not in _WAITING:
            return
        if not self._missing() or self._waited_s >= (
            timing.GATHERING_S if self._state is _State.GATHERING else timing.COMING_S
        ):
            self._begin()
        else:
            self._waited_s += timing.GATHERING_LOOK_S
            self._loop.call_later(timing.GATHERING_LOOK_S, self._look)

    def _missing(self) -> list[int]:
        """Return the ranks that may still come."""
        here = self._members.keys() | self._ended | (set() if self._state is _State.GATHERING else {self._store})
        return [rank for rank in range(self._world_size) if rank not in here and not self._will_not_come(rank)]

    def _will_not_come(self, rank: int) -> bool:
        has_ended = self._has_ended(rank)
        return rank in self._lost if has_ended is None else has_ended

    def _begin(self) -> None:
        if self._verdict is None:  # one of those that have come may know it
            told = (join.verdict for join in self._members.values() if join.verdict is not None)
            known = (verdict for verdict in told if all(0 <= rank < self._world_size for rank in ranks_in(verdict)))
            self._verdict = next(known, self._found)
        self._stop_listening()
        self._state = _State.SERVING
        membership = self._membership = Membership(
            self._world_size, b"", self._send, self._loop.call_later, self._rank, self._joiners
        )
        for rank in range(self._world_size):
            if rank not in self._members:
                self._members[rank] = Join(rank, self._world_size, "", "", "", "", "", 0)
                may_live = rank not in self._ended and not self._has_ended(rank)
                self._gone[rank] = "it was not connected to the store's standby", may_live
        # The store first: if it told no first cause, its own loss is that.
        gone = dict(sorted(self._gone.items(), key=lambda item: item[0] != self._store))
        membership.take_over(self._store, self._members, self._left, gone, self._verdict)
        if self._reformed:
            membership.handle(self._rank, JobReformed(sorted(self._reformed)))
        for rank, message in self._waiting:
            if isinstance(message, GiveUp):  # the messages that it misses may be the next ones to be read
                self._loop.call_later(timing.COMING_S, partial(membership.handle, rank, message))
            else:
                membership.handle(rank, message)
        for then in self._then:
            then(membership)

    # Messages of the ranks

    def _join(self, seat: Seat, message: Join) -> None:
        rank = message.rank
        is_new = 0 <= rank < self._world_size and rank not in self._members
        if not is_new or not self._credentials.is_from(seat.sock, rank):
            seat.close()
            return
        self._members[rank] = message
        self._sit(seat, rank)
        if len(self._members) == self._world_size:
            self._stop_listening()
        if self._state in _WAITING and not self._missing():
            self._begin()

    def _refuse(self, seat: Seat) -> None:
        if seat.number is None:
            seat.close()

    def _hear(self, rank: int, message: FromRank) -> None:
        actions = _HEARD[self._state]
        action = actions.get(type(message)) or actions[FromRank]
        action(self, rank, message)

    def _serve(self, rank: int, message: FromRank) -> None:
        assert self._membership is not None
        self._membership.handle(rank, message)

    def _keep(self, rank: int, message: FromRank) -> None:
        """Keep a message until this has taken over."""
        self._waiting.append((rank, message))

    def _keep_a_while(self, rank: int, message: FromRank) -> None:
        """Keep a message of a rank that has lost the store, and answer it if the store, which lives, does not."""
        self._keep(rank, message)
        self._loop.call_later(timing.STORE_SAYS_S, lambda: self._late(rank, message))

    def _note_reformed(self, _: int, message: JobReformed) -> None:
        self.add_reformed(message.ranks)

    def _note_leave(self, rank: int, message: Leave) -> None:
        self._left[rank] = message.progress

    def _take_over_with(self, rank: int, message: Report) -> None:
        """Take over from a store that did not answer a report."""
        self._take_over(lambda membership: membership.handle(rank, message))

    def _note_orphan(self, rank: int, message: Orphaned) -> None:
        is_own = rank == self._rank
        if is_own and self._store not in self._members:  # the store had not connected here, or this would have seen its end
            self._ended |= {self._store}
            self._take_over()
        elif is_own and self._store in self._gone.keys() - self._left.keys():
            self._take_over()
        elif self._store in self._gone:  # its rank had left, and others still need it
            self._replace(_TOO_EARLY)
        else:
            self._keep_a_while(rank, message)

    def _ignore(self, rank: int, message: FromRank) -> None:
        pass

    def _late(self, rank: int, message: FromRank) -> None:
        """Answer a rank that has lost the store, although the store lives."""
        if self._state is not _State.WATCHING:  # the store has changed, and answers it
            return
        if self._verdict is None:
            self._replace(f"the control connection of rank {rank} to it ended, and it says nothing of that")
        elif isinstance(message, Orphaned):
            self._send(rank, self._verdict)
        elif isinstance(message, Shrink | Agree):
            self._waiting.remove((rank, message))  # answered now, so not again after a failover
            text = f"rank {rank} was cut off from rank {self._store}, which has the store, and the others were not: it cannot "
            if isinstance(message, Shrink):
                problem = Verdict("lost", f"{text}continue with them", self._store, "shrink")
                self._send(rank, Shrunk([], "", 0, problem, attempt=message.attempt))
            else:
                problem = Verdict("lost", f"{text}agree with them", self._store, "agree")
                self._send(rank, Agreement(message.name, 0, problem, message.attempt))

    def _replace(self, why: str) -> None:
        """Take over from a store that does not answer. It is lost, unless all ranks have left."""
        lost = Verdict("lost", f"rank {self._store} was lost: {why}", self._store)
        self._take_over(lambda membership: None if membership.finished else membership.fail(lost))

    def _lose(self, rank: int, reason: str, vanished: bool) -> None:
        self._gone[rank] = reason, vanished
        if self._membership is not None:
            self._membership.lost(rank, reason, vanished)
        elif rank == self._store and self._state is not _State.CLOSED:
            if rank not in self._left:
                # This rank's own connection to the store may still hold its last message, perhaps that all have left. That is read first.
                is_heard = self._verdict is not None or any(other == self._rank for other, _ in self._waiting)
                if is_heard:
                    self._take_over()
                else:
                    self._loop.call_later(timing.SEEN_S, self._take_over)
            elif self._waiting:
                self._replace(_TOO_EARLY)


_WHILE_WATCHING: Final[_Actions] = {
    JobReformed: StandbyStore._note_reformed,
    Leave: StandbyStore._note_leave,
    Report: StandbyStore._take_over_with,
    Orphaned: StandbyStore._note_orphan,
    FromRank: StandbyStore._keep_a_while,
}
_HEARD: Final[dict[_State, _Actions]] = {
    _State.WATCHING: _WHILE_WATCHING,
    _State.EXPECTING: _WHILE_WATCHING,
    _State.GATHERING: {JobReformed: StandbyStore._note_reformed, FromRank: StandbyStore._keep},
    _State.SERVING: {FromRank: StandbyStore._serve},
    _State.DISMISSED: _WHILE_WATCHING,
    _State.CLOSED: {FromRank: StandbyStore._ignore},
}
"""What each message means in each state; ``FromRank`` stands for all other messages."""
