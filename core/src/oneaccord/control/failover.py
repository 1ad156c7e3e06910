"""A rank's part in a failover: connect to the standby of the store, or be the standby."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Collection
from functools import partial

from oneaccord.common.threads import Thread
from oneaccord.contract.deadline import Deadline
from oneaccord.control.joiners import JoinAddress
from oneaccord.control.protocol import Prepare, Successor
from oneaccord.control.remote import SocketControl
from oneaccord.control.standby_store import NOBODY, StandbyStore
from oneaccord.errors import OneAccordError
from oneaccord.net.credentials import Credentials
from oneaccord.net.finding import dial_patiently
from oneaccord.net.keepalive import Liveness
from oneaccord.net.loop import Loop
from oneaccord.net.network import Address, dial, guarded_bind

__all__ = ["Failover"]

_log = logging.getLogger("oneaccord.job")

_CONNECT_S, _END_S = 20.0, 0.5
"""How long to try to reach the standby, and how long to wait until the attempt has ended."""
_LOOKING_S, _PAUSE_S, _LONGEST_PAUSE_S = 10.0, 0.01, 0.25
"""How long to look for the survivors after the loss of both the store and its standby, and how long to wait between two attempts."""
_TURN_S, _TRY_S = 1.0, 0.5
"""After how long without a result the next rank waits for the others, and how long one attempt may take."""
_FIRST, _MORE = 3, 5
"""How many ranks are tried each time: the first ones, and some of the others in turn."""
_HELLO = b"reserve"


class Failover:
    """What a rank does in the background so that the job survives the loss of its store.

    Parameters
    ----------
    loop
        The background loop of a `StandbyStore`.
    control
        This rank's control connection.
    credentials
        The proof that a process belongs to this job.
    liveness
        How a silent rank is noticed.
    join_address
        The address for ranks that come later; None if none can.
    """

    def __init__(
        self,
        loop: Loop,
        control: SocketControl,
        credentials: Credentials,
        liveness: Liveness,
        join_address: JoinAddress | None,
    ) -> None:
        self._liveness = liveness
        self._loop = loop
        self._control = control
        self._credentials = credentials
        self._join_address = join_address
        self._changing = threading.Lock()
        self._ended = False
        self._successor: Successor | None = None
        self._threads: list[Thread] = []
        self._store: StandbyStore | None = None
        self._address: Address | None = None  # where it listens
        self._silent: set[int] = set()  # ranks that do not answer at all, as when the network is cut
        control.on_prepare(self._prepare)
        control.on_orphaned(self._look_for_others)

    def end(self) -> None:
        """Begin nothing more."""
        with self._changing:
            self._ended, self._successor = True, None
        for thread in self._threads:
            thread.join(_END_S)

    def step_back(self) -> None:
        """Take over from no store any more, before this rank closes its control connection."""
        self.end()
        if self._store is not None:
            self._store.step_back()

    def drain(self, timeout_s: float) -> None:
        """If this rank has taken over, wait until no other rank is connected."""
        if self._store is not None:
            self._store.drain(timeout_s)

    def close(self) -> None:
        """Close the standby store, if this rank has one."""
        if self._store is not None:
            self._store.close()

    def _prepare(self, message: Prepare | Successor) -> None:
        if isinstance(message, Prepare):
            self._stand_by(message.store, message.gone)
            return
        with self._changing:
            self._successor = message
        self._begin(self._connect, message)

    def _begin(self, function: Callable[..., None], *args: object) -> bool:
        """Call a function in the background; return whether that could begin."""
        with self._changing, contextlib.suppress(RuntimeError):  # no memory for a thread, or the interpreter is ending
            if self._ended:
                return False
            thread = Thread(target=function, args=args, name="oneaccord-standby", daemon=True)
            thread.start()
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]
            return True
        return False

    def _connect(self, successor: Successor) -> None:
        def is_vain() -> bool:
            return self._ended or successor is not self._successor

        try:
            address, rank = (successor.host, successor.port), self._control.rank
            credentials = self._credentials.towards(_whom(successor.rank), successor.rank)
            sock = dial_patiently(address, credentials, _HELLO, rank, Deadline(_CONNECT_S), is_vain)
        except (OSError, OneAccordError) as error:
            _log.debug("rank %d does not reach rank %d, the store's standby: %s", self._control.rank, successor.rank, error)
            return
        with self._changing:
            if is_vain():
                sock.close()
            else:
                self._control.follow(sock, successor.rank)

    def _look_for_others(self, attempt: int = 0, waited_s: float = 0.0, pause_s: float = _PAUSE_S) -> None:
        """Find the rank at which the survivors gather, or let them gather here; again and again, for a while."""
        if not self._begin(self._look_once, attempt, waited_s, pause_s):
            self._control.give_up_looking()

    def _look_once(self, attempt: int, waited_s: float, pause_s: float) -> None:
        if self._control.searching is None:
            return
        try:
            silent_s = self._find_others(attempt, waited_s)
        except (OSError, OneAccordError) as error:
            _log.warning("rank %d cannot look for the survivors: %s", self._control.rank, error)
            silent_s = math.inf
        if silent_s is None:
            return
        if waited_s + silent_s > _LOOKING_S:
            self._control.give_up_looking()
            return
        later = attempt + 1, waited_s + silent_s + pause_s, min(1.5 * pause_s, _LONGEST_PAUSE_S)
        self._loop.call(lambda: self._loop.call_later(pause_s, partial(self._look_for_others, *later)))

    def _find_others(self, attempt: int, waited_s: float) -> float | None:
        """Look for the survivors once; return how long no rank has answered, None if they are found.

        The first survivor waits for the others at once, unless another one does. The next ones wait when they have found none for a while.
        """
        control, lost = self._control, self._control.lost
        here = [
            rank for rank in self._in_order(lost) if rank == control.rank or (rank not in lost and not control.has_ended(rank))
        ]
        turn_s = _TURN_S * here.index(control.rank)
        others = [rank for rank in here if rank != control.rank and rank not in self._silent]
        first, more = others[:_FIRST], others[_FIRST:]
        at = _MORE * attempt % max(1, len(more))
        silent_s = 0.0
        for rank in () if self._is_known else [*first, *more[at : at + _MORE]]:
            began = time.monotonic()
            if self._reach(rank):
                return None
            if time.monotonic() - began > _TRY_S / 2:
                self._silent.add(rank)
                silent_s += _TRY_S
                if waited_s + silent_s >= turn_s:
                    break
        if self._is_known or waited_s + silent_s >= turn_s:
            self._gather(lost)
            if self._reach(control.rank):
                return None
        return silent_s

    def _in_order(self, lost: Collection[int]) -> list[int]:
        """Return all ranks in the order in which they wait for the others: one of each host before the next ones, and last the hosts that may have died with the store."""
        hosts = self._control.hosts
        doubtful = {hosts[rank] for rank in lost}
        return sorted(range(len(hosts)), key=lambda rank: (hosts[rank] in doubtful, hosts[:rank].count(hosts[rank]), rank))

    @property
    def _is_known(self) -> bool:
        """Whether others may come here, or have come."""
        return self._store is not None

    def _gather(self, lost: Collection[int]) -> None:
        control = self._control
        with self._changing:
            place = control.take_place() if self._store is None and not self._ended else None
            if place is not None:
                self._address = place.getsockname()[:2]
                self._make_store(place, NOBODY, ())
            if self._store is not None:
                self._store.gather(lost, control.searching)

    def _reach(self, rank: int) -> bool:
        """Connect to a rank if it waits for the others; return whether it does."""
        address = self._address if rank == self._control.rank else self._control.place_of(rank)
        if address is None:
            return False
        try:
            sock = dial(address, self._credentials.towards(_whom(rank), rank), _HELLO, Deadline(_TRY_S), lambda: self._ended)
        except (OSError, OverflowError, OneAccordError) as error:  # OverflowError: an impossible port
            _log.debug("rank %d does not find the survivors at rank %d: %s", self._control.rank, rank, error)
            return False
        with self._changing:
            if self._ended:
                sock.close()
            else:
                self._control.join_others(sock, rank)
        return True

    def _stand_by(self, store: int, gone: Collection[int]) -> None:
        control = self._control
        try:
            sock = control.take_place() or guarded_bind((control.host, 0), self._credentials)
        except (OSError, OneAccordError) as error:  # as when no descriptors are left
            _log.warning("rank %d cannot be the standby for the store of rank %d: %s", control.rank, store, error)
            return
        host, port = sock.getsockname()[:2]
        with self._changing:
            if self._ended:
                sock.close()
                return
            self._address = host, port
            self._make_store(sock, store, gone)
        control.stand_by((host, port))

    def _make_store(self, sock: socket.socket, store: int, gone: Collection[int]) -> None:
        control, here = self._control, (self._control.rank, self._control.world_size)
        if self._store is not None:  # others were to gather here, but the store was only slow
            self._store.close()
        self._store = control.standby_store = StandbyStore(
            self._loop,
            sock,
            self._credentials.towards(_whom(here[0])),
            *here,
            store,
            self._liveness,
            gone,
            control.has_ended,
            self._join_address,
        )


def _whom(rank: int) -> str:
    """Return what a connection to a standby is to."""
    return f"rank {rank} (standby)"
