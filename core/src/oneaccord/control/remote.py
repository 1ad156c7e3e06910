"""The control connections of a rank that is a process: to the store, and to the standby that takes over when the store is lost."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial

import msgspec

from oneaccord.contract.deadline import Deadline
from oneaccord.control import timing
from oneaccord.control.client_states import Action, Event, State, transition
from oneaccord.control.connection import Control
from oneaccord.control.protocol import (
    MAX_CARD_BYTES,
    Agreed,
    Decided,
    Farewell,
    FromRank,
    FromStore,
    JobReformed,
    Join,
    Leave,
    Orphaned,
    Prepare,
    Report,
    Standby,
    Successor,
    Verdict,
    Whereabouts,
    decode_from_store,
    encode,
    ranks_in,
)
from oneaccord.control.standby_store import StandbyStore
from oneaccord.net.credentials import Credentials
from oneaccord.net.finding import dial_patiently
from oneaccord.net.frames import FrameConnection
from oneaccord.net.keepalive import Liveness
from oneaccord.net.loop import Loop
from oneaccord.net.network import BACKLOG, Address, hold, show_address
from oneaccord.net.proven import ProvenSocket
from oneaccord.runtime.computer import has_ended, neighbourhood

__all__ = ["CONTROL_HELLO", "SocketControl"]

_log = logging.getLogger("oneaccord.job")

CONTROL_HELLO = b"control"


class SocketControl(Control):
    """A control connection over TCP.

    `client_states` has the states of its life. The methods here turn what happens into events, and perform the actions.

    Parameters
    ----------
    loop
        The loop that serves the connections.
    join
        What this rank says of itself.
    address
        The address of the store. It is dialled again and again until the deadline, since the store may start last.
    credentials
        The proof that this rank belongs to the job.
    deadline
        The end of the attempts to connect.
    liveness
        How silence of the store or its standby is noticed.
    cancelled
        Asked now and then whether to give up.
    hello
        The role in which this rank connects.
    sock
        A connection to the store, if there is one already.

    Attributes
    ----------
    standby_store
        The standby store of this rank; None unless this rank is the standby.

    Raises
    ------
    RendezvousError
        Nobody listens there, or no oneaccord.
    DeadlineError
        The name of the host did not resolve in time.
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
        sock: ProvenSocket | None = None,
    ) -> None:
        if sock is None:
            sock = dial_patiently(address, credentials, hello, join.rank, deadline, cancelled)
        loop.own(sock)  # at once: nobody closes a control that fails before it is made
        super().__init__(join.rank, join.world_size, sock.getsockname()[0])
        self.standby_store: StandbyStore | None = None
        self._loop = loop
        self._liveness = liveness
        self._join = join
        self._leave: Leave | None = None
        self._state = State.CONNECTED
        self._where = f" at {show_address(address)}"
        self._standby: _Wire | None = None
        self._named: int | None = None  # the standby to which this rank is connecting
        self._old: list[_Wire] = []
        self._finding: Verdict | None = None  # how the connection to the store ended
        self._first_lost: int | None = None  # of the ranks that have had the store
        self._lost_stores: set[int] = set()  # with their standbys
        self._living: set[int] = set()  # survivors of this host, seen a moment after the store and its standby were lost
        self._early: list[Prepare | Successor] = []
        self._prepare: Callable[[Prepare | Successor], None] | None = None
        self._look: Callable[[], None] | None = None
        self._place: socket.socket | None = None
        if join.rank >= 0 and join.world_size > 1:
            self._join = msgspec.structs.replace(join, place=self._hold_place())
        self._store = _Wire(self, 0)
        self._store.open(sock)
        self._post(self._join)

    # Where the survivors find this rank

    def _hold_place(self) -> Whereabouts:
        address = self.host, 0
        try:
            self._place = hold(self.host)
            self._loop.own(self._place)
            address = self._place.getsockname()[:2]
        except OSError as error:  # no descriptors are left, for example
            _log.debug("rank %d has no address at which survivors could find it: %s", self.rank, error)
        return Whereabouts(*address, self._join.pid, neighbourhood())

    def take_place(self) -> socket.socket | None:
        """Return the socket of this rank's place, listening from now on and owned by the caller; None if there is none, or it cannot listen."""
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

    def place_of(self, rank: int) -> Address | None:
        """Return where to find a rank when the store and its standby are lost; None if it has no such place."""
        place = None if self._welcome is None else self._welcome.places[rank]
        return (place.host, place.port) if place is not None and place.port else None

    @property
    def hosts(self) -> list[int]:
        """For each rank a number, equal for ranks of one host."""
        return [0] * self.world_size if self._welcome is None else self._welcome.hosts

    @property
    def lost(self) -> set[int]:
        """The ranks that have ended as far as this one knows, or are cut off from it."""
        with self._changed:
            return {*self._lost_stores, *(rank for rank in self.gone if rank < self.world_size)}

    def has_ended(self, rank: int) -> bool | None:
        """Return whether a rank's process has ended; None if this process cannot know, since the rank is on another host."""
        places = [] if self._welcome is None else self._welcome.places
        theirs, ours = (places[rank], places[self.rank]) if places else (None, None)
        if theirs is None or ours is None or not ours.processes or theirs.processes != ours.processes:
            return None
        return rank not in self._living and has_ended(theirs.pid)

    def _note_the_living(self) -> None:
        """Remember the ranks that live although the store and its standby are lost: they may continue without this rank, and end."""
        self._living |= {rank for rank in range(self.world_size) if self.has_ended(rank) is False}

    # What the standby's part in this process uses

    def stand_by(self, address: Address) -> None:
        """Say that this rank is ready to take over by its `standby_store`, and where it listens for the others."""
        self._post(Standby(*address))

    def on_prepare(self, callback: Callable[[Prepare | Successor], None]) -> None:
        """Call ``callback`` when this rank is to become the standby, and when another one is ready; it must not block."""
        with self._changed:
            self._prepare = callback
            early, self._early = self._early, []
        for message in early:
            callback(message)

    def on_orphaned(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` to look for the survivors when the store and its standby are both lost; it must not block."""
        self._look = callback

    def follow(self, sock: ProvenSocket, rank: int) -> None:
        """Take a proven socket to a standby, ``rank``, and close it in the end."""
        with self._changed:
            if self._state is State.CLOSED:
                sock.close()
                return
            if self._standby is not None:
                self._standby.close()
            standby = self._standby = _Wire(self, rank)
            standby.open(sock)  # the standby may have closed it, and is lost then
            # Survivors that gather take the first cause that one of them knows.
            is_lost = self._state in (State.SEARCHING, State.CUT_OFF)
            standby.send(encode(msgspec.structs.replace(self._join, verdict=self.verdict) if is_lost else self._join))
            if self._leave is not None:
                standby.send(encode(self._leave))
            if rank == self._named:
                self._named = None
            self._move(Event.STANDBY_REACHED)
            self._changed.notify_all()

    def join_others(self, sock: ProvenSocket, rank: int) -> None:
        """Take a socket to the survivor at which the others gather, as `follow`, unless this rank has a store again."""
        with self._changed:
            if self._state is State.SEARCHING:
                self.follow(sock, rank)
            else:
                sock.close()

    @property
    def searching(self) -> Verdict | None:
        """The reason why this rank looks for the other survivors; None while it does not."""
        with self._changed:
            return self._finding if self._state is State.SEARCHING else None

    def give_up_looking(self) -> None:
        """End the search for the other survivors: none was found."""
        self._finish(self._move(Event.NOBODY_FOUND))

    def await_successor(self, at_most_s: float) -> None:
        """Wait until this rank is connected to the standby."""
        with self._changed:
            self._changed.wait_for(lambda: self._standby is not None or self.verdict is not None, at_most_s)

    # What this rank says

    def _post(self, message: FromRank) -> None:
        last_words = isinstance(message, Report) and message.kind == "silent"  # the program may end right after
        if isinstance(message, Leave):  # to the standby first: the store may end as soon as all have left
            with self._changed:
                self._leave = message
                if self._standby is not None:
                    self._standby.send(encode(message))
        self._store.send(encode(message), within_s=timing.LAST_WORDS_S if last_words else 0.0)

    def report_reformed(self) -> None:
        """Say that this rank is in the next job; also to a store or standby that was stopped, and has been given up."""
        mine = JobReformed([self.rank])
        with self._changed:
            for wire in (self._store, self._standby, *self._old):
                if wire is not None:
                    wire.send(encode(mine))
        standby = self.standby_store
        if standby is not None:  # it ends before it would hear this
            self._loop.call(lambda: standby.add_reformed(mine.ranks))

    def close(self) -> None:
        """Close the connections."""
        with self._changed:
            self._move(Event.CLOSE)
            for connection in (self._store, self._standby, *self._old, self._place):
                if connection is not None:
                    connection.close()
            self._place = None

    # What happens to the connections

    def _frame(self, wire: _Wire, frame: bytes | None) -> None:
        message = decode_from_store(frame)
        if message is None or not all(0 <= rank < self.world_size for rank in ranks_in(message)):
            if wire is self._store:
                flaw = wire.flaw and f" ({wire.flaw})"
                text = (
                    f"rank {self.rank} got a frame that cannot be read from the store with rank {wire.rank}{self._where}{flaw}"
                )
                self._post(Report("protocol", text, wire.rank))  # the other ranks then raise the same
                self.fail(Verdict("protocol", text, wire.rank))
            return
        if isinstance(message, Decided):  # also from a store that was stopped while the others continued without it
            verdict = message.verdict if self.standby_store is None else self.standby_store.agree(message.verdict)
            wire.send(encode(Agreed(verdict)))
            return
        if isinstance(message, JobReformed):
            self._deliver(message)
            return
        with self._changed:
            if wire is self._standby:
                self._move(Event.STANDBY_SPEAKS)
            elif wire is self._store:
                self._move(Event.STORE_SPEAKS)
            is_heard = wire is self._store
            if is_heard and isinstance(message, Successor):
                self._named = message.rank
            elif is_heard and isinstance(message, Farewell):
                self._move(Event.ALL_LEFT)
        if is_heard:
            self._deliver(message)

    def _deliver(self, message: FromStore) -> None:
        super()._deliver(message)
        if isinstance(message, Prepare | Successor):
            with self._changed:
                prepare = self._prepare
                if prepare is None:
                    self._early.append(message)
            if prepare is not None:
                prepare(message)

    def _lost(self, wire: _Wire, reason: str) -> None:
        with self._changed:
            self._lost_stores.add(wire.rank)
            if wire is self._standby:
                self._standby = None
            if wire is not self._store:
                return
            self._finding = self._find(wire.rank, reason)
            if self._standby is not None:
                event = Event.LOST_WITH_STANDBY
            else:
                event = Event.LOST if self._named is None else Event.LOST_WITH_STANDBY_NAMED
            action = self._move(event)
        self._finish(action)

    def _find(self, rank: int, reason: str) -> Verdict:
        """Return what the end of the connection to the store means, unless the standby knows better."""
        how = f"the control connection to it{self._where} ended ({reason})"
        if self._first_lost is None:
            self._first_lost = rank
        first = self._first_lost
        if first == rank:
            return Verdict("lost", f"rank {rank} was lost: {how}, so its process died or was cut off", first)
        text = (
            f"rank {first} was lost, and so was its standby, rank {rank}: {how}, so both died, or rank {self.rank} was cut off"
        )
        return Verdict("lost", text, first)

    def _turn_to_successor(self) -> bool:
        with self._changed:
            if self._standby is None:
                return False
            self._move(Event.STORE_SILENT)
            return True

    # The actions

    def _move(self, event: Event) -> Action:
        """Take in an event; do what concerns the connections, and return the action, of which `_finish` does the rest."""
        with self._changed:
            self._state, action = transition(self._state, event)
            if action in (Action.TURN, Action.ASK, Action.JOIN):
                self._turn()
            if action in (Action.ASK, Action.JOIN) and self._finding is not None:
                self._post(Orphaned(self._finding.text))
            if action is Action.ASK:
                self._later(timing.ORPHAN_S, Event.STANDBY_SILENT)
            elif action is Action.AWAIT:
                self._later(timing.COMING_S, Event.STANDBY_LATE)
            elif action is Action.RELAY and self.standby_store is not None:
                self.standby_store.all_have_left()
            return action

    def _finish(self, action: Action) -> None:
        """Do what calls others, and so must not hold the lock."""
        if action is Action.SEARCH:
            look = None if self.recovery.reformed else self._look  # the other survivors are in the next job
            if look is None:
                self.give_up_looking()
                return
            # What the survivors hear when they meet is the same for all; but no call waits for that for long.
            self._loop.call_later(timing.COMING_S, lambda: self._finish(self._move(Event.NOBODY_TELLS)))
            self._loop.call_later(timing.DYING_S, self._note_the_living)
            look()
        elif action in (Action.FAIL, Action.GIVE_UP) and self._finding is not None:
            self.fail(self._finding)
            if action is Action.GIVE_UP:
                self.recovery.end(self._finding)

    def _turn(self) -> None:
        """Take the standby for the store."""
        if self._standby is None:
            return
        self._old.append(self._store)
        self._store, self._standby = self._standby, None
        self._where = ""
        # Newcomers came to the store that is lost; the next one gives their numbers to others.
        for rank in [rank for rank in self.gone if rank >= self.world_size]:
            del self.gone[rank]
        for message in self.recovery.turn_to(self._store.rank):
            self._call_later(timing.COMING_S, partial(self.recovery.give_up_again, message))

    def _later(self, delay_s: float, event: Event) -> None:
        """Let an event happen later, unless another rank has the store by then, or, of a silent standby, the first cause is known."""
        store = self._store

        def happen() -> None:
            with self._changed:
                if self._store is not store or (event is Event.STANDBY_SILENT and self.failed):
                    return
                action = self._move(event)
            self._finish(action)

        self._call_later(delay_s, happen)

    def _call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Call a function in the loop later; from any thread."""
        self._loop.call(partial(self._loop.call_later, delay_s, function))


class _Wire:
    """A connection to one rank, known to its control before the first frame comes."""

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
