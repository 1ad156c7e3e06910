"""The control connections of ranks that are processes: to the store, and to the rank that goes on in its place."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial

import msgspec

from manyhands.contract.deadline import Deadline
from manyhands.control import timing
from manyhands.control.connection import Control
from manyhands.control.protocol import (
    MAX_CARD_BYTES,
    Agreed,
    Decided,
    FromRank,
    JobReformed,
    Join,
    Leave,
    Orphaned,
    Report,
    Successor,
    Verdict,
    Whereabouts,
    decode_from_store,
    encode,
    ranks_in,
)
from manyhands.net.credentials import Credentials
from manyhands.net.frames import FrameConnection
from manyhands.net.keepalive import Liveness
from manyhands.net.loop import Loop
from manyhands.net.network import BACKLOG, Address, dial_patiently, hold, show_address
from manyhands.net.proven import ProvenSocket
from manyhands.runtime.computer import has_ended, neighbourhood

__all__ = ["CONTROL_HELLO", "SocketControl"]

_log = logging.getLogger("manyhands.job")

CONTROL_HELLO = b"control"


class SocketControl(Control):
    """A control connection over TCP.

    Parameters
    ----------
    loop
        Where it runs.
    join
        Who this rank is.
    address
        Where the store listens; dialled again and again until the deadline, since the store may come last.
    credentials
        What shows that this rank belongs to the job.
    deadline
        Until when to try.
    liveness
        How it is noticed that the store, or its successor, is silent.
    cancelled
        Asked now and then whether to give up.
    hello
        What this comes as.

    Raises
    ------
    RendezvousError
        Nobody listens there, or no manyhands.
    AuthenticationError
        The store holds another secret, or the two do not trust each other's certificates.
    """

    def __init__(
        self,
        loop: Loop,
        join: Join,
        address: Address,
        credentials: Credentials,
        deadline: Deadline,
        liveness: Liveness,
        cancelled: Callable[[], bool] = lambda: False,
        hello: bytes = CONTROL_HELLO,
    ) -> None:
        sock = dial_patiently(address, credentials, hello, join.rank, deadline, cancelled)
        loop.own(sock)  # at once: nobody closes a control that fails before it is made
        super().__init__(join.rank, join.world_size, sock.getsockname()[0])
        self._loop = loop
        self._liveness = liveness
        self._join = join
        self._where = f" at {show_address(address)}"
        self._second: _Wire | None = None  # to the rank that goes on where the store ends
        self._expected: int | None = None  # the next one, to which this rank is connecting
        self._orphaned: tuple[str, Verdict] | None = None  # how the connection to the store ended meanwhile
        self._first_lost: int | None = None  # of the ranks that have had the store
        self._old: list[_Wire] = []
        self._searching: Verdict | None = None  # why neither is there, while this rank looks for the others
        self._closed = False
        self._leave: Leave | None = None
        self._lost_stores: set[int] = set()  # with those that were to go on in their place
        self._survived: set[int] = set()  # whoever has lived for a while since both are lost
        self._place: socket.socket | None = None
        if join.rank >= 0 and join.world_size > 1:
            self._join = msgspec.structs.replace(join, place=self._hold_place())
        self._connection = _Wire(self, 0)
        self._connection.open(sock)
        self._post(self._join)

    def _hold_place(self) -> Whereabouts:
        address = self.host, 0
        try:
            self._place = hold(self.host)
            self._loop.own(self._place)
            address = self._place.getsockname()[:2]
        except OSError as error:  # as where there are no descriptors left
            _log.debug("rank %d has no place where others could find it: %s", self.rank, error)
        return Whereabouts(*address, self._join.pid, neighbourhood())

    def take_place(self) -> socket.socket | None:
        """Return the socket of this rank's place, which listens from now on, as the caller's own; None where it has none, or cannot."""
        with self._changed:
            place, self._place = self._place, None
        if place is None:
            return None
        try:
            place.listen(BACKLOG)
        except OSError as error:
            _log.debug("rank %d cannot listen at its place: %s", self.rank, error)
            place.close()
            return None
        return place

    @property
    def lost(self) -> set[int]:
        """The ranks that have ended as far as this one knows, or are cut off from it."""
        with self._changed:
            return {*self._lost_stores, *(rank for rank in self.gone if rank < self.world_size)}

    @property
    def hosts(self) -> list[int]:
        """For each rank a number, alike for those that share a host."""
        return [0] * self.world_size if self._welcome is None else self._welcome.hosts

    def place_of(self, rank: int) -> Address | None:
        """Return where a rank is found if the store and its successor have ended; None where it has no such place."""
        place = None if self._welcome is None else self._welcome.places[rank]
        return (place.host, place.port) if place is not None and place.port else None

    def has_ended(self, rank: int) -> bool | None:
        """Tell whether a rank's process has ended; None where that cannot be known here, as on another host."""
        places = [] if self._welcome is None else self._welcome.places
        theirs, ours = (places[rank], places[self.rank]) if places else (None, None)
        if theirs is None or ours is None or not ours.processes or theirs.processes != ours.processes:
            return None
        return rank not in self._survived and has_ended(theirs.pid)

    def _note_the_living(self) -> None:
        """Take note of who lives although the store and its successor are lost: they may go on without this rank, and end."""
        self._survived |= {rank for rank in range(self.world_size) if self.has_ended(rank) is False}

    def follow(self, sock: ProvenSocket, rank: int) -> None:
        """Connect to the rank that goes on where the store ends, by a proven socket, which this closes in the end."""
        with self._changed:
            if self._closed:
                sock.close()
                return
            if self._second is not None:
                self._second.close()
            second = self._second = _Wire(self, rank)
            second.open(sock)  # which the other may have closed, and then there is none
            # Who goes on tells all the first cause that one of them knows, unless all only know that nobody was there.
            second.send(
                encode(self._join if self._searching is None else msgspec.structs.replace(self._join, verdict=self.verdict))
            )
            if self._leave is not None:
                second.send(encode(self._leave))
            if rank == self._expected:
                self._expected = None
            if self._searching is not None:
                reason, self._searching = self._searching.text, None
                if self._turn_to_successor():
                    self._post(Orphaned(reason))
            elif self._orphaned is not None:
                self._loop.call(self._turn_at_last)
            self._changed.notify_all()

    def join_others(self, sock: ProvenSocket, rank: int) -> None:
        """Connect to the rank with which those that are left gather, as `follow`, unless the store or its successor has answered meanwhile."""
        with self._changed:
            if self.searching is not None:
                self.follow(sock, rank)
            else:
                sock.close()

    def await_successor(self, at_most_s: float) -> None:
        """Wait until this rank is connected to whoever goes on where the store ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._second is not None or self.verdict is not None, at_most_s)

    def _post(self, message: FromRank) -> None:
        last_words = isinstance(message, Report) and message.kind == "silent"  # the program may end right after
        if isinstance(message, Leave):  # to the successor first: the store may end as soon as all have left
            with self._changed:
                self._leave = message
                if self._second is not None:
                    self._second.send(encode(message))
        self._connection.send(encode(message), within_s=timing.LAST_WORDS_S if last_words else 0.0)

    def went_on(self) -> None:
        """Say that this rank is in the next job; also to a store or successor that was stopped, and has been given up."""
        mine = JobReformed([self.rank])
        with self._changed:
            for connection in (self._connection, self._second, *self._old):
                if connection is not None:
                    connection.send(encode(mine))
        reserve = self.reserve
        if reserve is not None:  # which ends before it would hear it
            self._loop.call(lambda: reserve.went_on(mine.ranks))

    def close(self) -> None:
        """Close the connections."""
        with self._changed:
            self._closed = True
            for connection in (self._connection, self._second, *self._old, self._place):
                if connection is not None:
                    connection.close()
            self._place = None

    def _turn_to_successor(self) -> bool:
        with self._changed:
            if self._second is None:
                return False
            self._old.append(self._connection)
            self._connection, self._second = self._second, None
            self._where, self._orphaned = "", None
            # Newcomers came to the store that has ended; the next one gives their numbers to others.
            for rank in [rank for rank in self.gone if rank >= self.world_size]:
                del self.gone[rank]
            for message in self.recovery.turn_to(self._connection.rank):
                self._loop.call(partial(self._loop.call_later, timing.COMING_S, partial(self.recovery.give_up_again, message)))
            return True

    def _frame(self, connection: _Wire, frame: bytes | None) -> None:
        message = decode_from_store(frame)
        if message is None or not all(0 <= rank < self.world_size for rank in ranks_in(message)):
            if connection is self._connection:
                flaw = connection.flaw and f" ({connection.flaw})"
                text = f"rank {self.rank} got a frame that cannot be read from the store with rank {connection.rank}{self._where}{flaw}"
                self._post(Report("protocol", text, connection.rank))  # who can be told is told the same
                self.fail(Verdict("protocol", text, connection.rank))
            return
        if isinstance(message, Decided):  # also of a store that was stopped while others went on without it
            verdict = message.verdict if self.reserve is None else self.reserve.agree(message.verdict)
            connection.send(encode(Agreed(verdict)))
            return
        if isinstance(message, JobReformed):
            self._deliver(message)
            return
        with self._changed:
            if connection is self._second:  # which goes on in the store's place from now on
                self._turn_to_successor()
            is_heard = connection is self._connection
            if is_heard:
                self._searching = None  # it was only slow
        if is_heard:
            if isinstance(message, Successor):
                self._expected = message.rank
            self._deliver(message)

    def _lost(self, connection: _Wire, reason: str) -> None:
        with self._changed:  # or `follow` turns to one that has ended, or comes too late for what is decided here
            self._lost_stores.add(connection.rank)
            if connection is self._second:
                self._second = None
            if self._farewell or connection is not self._connection:
                return
            lost = connection.rank if self._first_lost is None else self._first_lost
            how = f"the control connection to it{self._where} ended ({reason})"
            if lost == connection.rank:
                text = f"rank {lost} was lost: {how}, so its process died or was cut off"
            else:
                text = f"rank {lost} was lost, and so was rank {connection.rank}, which was to go on in its place: {how}, so both died, or rank {self.rank} was cut off"
            self._first_lost = lost
            verdict = Verdict("lost", text, lost)
            is_followed = self._turn_to_successor()
            if not is_followed and self._expected is not None:
                self._orphaned = reason, verdict
                self._loop.call_later(
                    timing.COMING_S, lambda: None if self._orphaned is None else self._cut_off(verdict, connection)
                )
                return
            if not is_followed:
                self._searching = verdict
        if is_followed:
            self._ask_successor(reason, verdict)
        else:
            self._cut_off(verdict, connection)

    def _turn_at_last(self) -> None:
        """Go on with a successor that this rank has reached after the store had ended."""
        orphaned = self._orphaned
        if orphaned is None or self.cut:
            return
        if self._turn_to_successor():
            self._ask_successor(*orphaned)
        else:
            self._cut_off(orphaned[1], self._connection)

    def _ask_successor(self, reason: str, verdict: Verdict) -> None:
        self._post(Orphaned(reason))
        connection = self._connection
        self._loop.call_later(timing.ORPHAN_S, lambda: None if self.failed else self._cut_off(verdict, connection))

    def _cut_off(self, verdict: Verdict, connection: _Wire) -> None:
        """Look for the others, unless this rank has another connection than the one that does not answer."""
        with self._changed:
            self._orphaned = None
            is_followed = self._connection is not connection
            if not is_followed:
                self._searching = verdict
            look = None if self._closed or self.recovery.gone_on else self._when_orphaned  # they are in the next job
        if look is not None:
            # Whoever they find tells all of them the same; but nobody waits for that for long.
            self._loop.call_later(timing.COMING_S, lambda: self._fail_alone(verdict, connection))
        if is_followed:
            return
        if look is None:
            self.fail(verdict)
            self.give_up_looking()
        else:
            self._loop.call_later(timing.DYING_S, self._note_the_living)
            look()

    def _fail_alone(self, verdict: Verdict, connection: _Wire) -> None:
        """Take what this rank has found for the first cause, unless the store or its successor was only slow."""
        if self._searching is not None or self._connection is not connection:
            self.fail(verdict)

    @property
    def searching(self) -> Verdict | None:
        """Why this rank looks for the others: neither the store nor its successor is there. None while it does not."""
        return self._searching

    def give_up_looking(self) -> None:
        """Take note that nobody is found who goes on where the store and its successor have ended."""
        with self._changed:
            self.recovery.end(self._searching)


class _Wire:
    """A connection of a control, which knows it before the first frame comes; to which rank."""

    def __init__(self, control: SocketControl, rank: int) -> None:
        self._control = control
        self.rank = rank
        self._connection: FrameConnection

    def open(self, sock: ProvenSocket) -> None:
        control = self._control
        max_bytes = (control.world_size + 1) * MAX_CARD_BYTES
        self._connection = FrameConnection(
            control._loop, sock, partial(control._frame, self), partial(control._lost, self), max_bytes, control._liveness
        )

    @property
    def flaw(self) -> str:
        return self._connection.flaw

    def send(self, frame: bytes, *, within_s: float = 0.0) -> None:
        self._connection.send(frame, within_s=within_s)

    def close(self) -> None:
        self._connection.close()
