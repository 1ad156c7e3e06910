"""A rank's part in going on without the store: connect to the rank that goes on in its place, or be that one."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

from manyhands.common.threads import Thread
from manyhands.contract.deadline import Deadline
from manyhands.control.credentials import Credentials
from manyhands.control.liveness import Liveness
from manyhands.control.lobby import Door
from manyhands.control.loop import Loop
from manyhands.control.network import dial, dial_patiently
from manyhands.control.protocol import Prepare, Successor
from manyhands.control.regrouping import Regrouping, regrouping_hello
from manyhands.control.remote import SocketControl
from manyhands.control.reserve import Reserve
from manyhands.errors import ManyHandsError
from manyhands.job.meeting import guarded_bind

__all__ = ["Standby"]

_log = logging.getLogger("manyhands.job")

_CONNECT_S, _END_S = 20.0, 0.5
"""How long to try to reach the store's successor, and how long to wait until the attempt has ended."""
_REGROUP_S, _PAUSE_S = 10.0, 0.02
"""How long to wait for the others where the store and its successor have both died, and how long between two attempts."""


class Standby:
    """What a rank does when the store says who is to go on in its place; it begins at once, in the background.

    Parameters
    ----------
    loop
        Where a `Reserve` runs.
    control
        This rank's control connection.
    credentials, has_secret
        What shows that a process belongs to this job, and whether the job has a secret.
    liveness
        How a silent rank is noticed.
    door
        Where ranks come later; None where none does.
    """

    def __init__(
        self,
        loop: Loop,
        control: SocketControl,
        credentials: Credentials,
        has_secret: bool,
        liveness: Liveness,
        door: Door | None,
    ) -> None:
        self._liveness = liveness
        self._loop = loop
        self._control = control
        self._credentials = credentials
        self._has_secret = has_secret
        self._door = door
        self._changing = threading.Lock()
        self._ended = False
        self._successor: Successor | None = None
        self._threads: list[Thread] = []
        self._reserve: Reserve | None = None
        control.on_prepare(self._prepare)
        if door is not None and door.roll().hosts == 1:  # whose launcher knows who lives
            control.on_orphaned(lambda: self._begin(self._regroup))

    def end(self) -> None:
        """Begin nothing any more."""
        with self._changing:
            self._ended, self._successor = True, None
        for thread in self._threads:
            thread.join(_END_S)

    def drain(self, timeout_s: float) -> None:
        """Where this rank goes on in the store's place, wait until no other rank is connected."""
        if self._reserve is not None:
            self._reserve.drain(timeout_s)

    def close(self) -> None:
        """Close the connections of the others."""
        if self._reserve is not None:
            self._reserve.close()

    def _prepare(self, message: Prepare | Successor) -> None:
        if isinstance(message, Prepare):
            self._stand_by(message.store, message.gone)
            return
        with self._changing:
            self._successor = message
        self._begin(self._connect, message)

    def _begin(self, function: Callable[..., None], *args: object) -> None:
        with self._changing, contextlib.suppress(RuntimeError):  # the interpreter is ending, and starts no more threads
            thread = Thread(target=function, args=args, name="manyhands-standby", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _connect(self, successor: Successor) -> None:
        def is_vain() -> bool:
            return self._ended or successor is not self._successor

        try:
            address, rank = (successor.host, successor.port), self._control.rank
            sock = dial_patiently(address, self._credentials, b"reserve", rank, Deadline(_CONNECT_S), is_vain)
        except (OSError, ManyHandsError) as error:
            _log.debug("rank %d does not reach rank %d, the store's successor: %s", self._control.rank, successor.rank, error)
            return
        with self._changing:
            if is_vain():
                sock.close()
            else:
                self._control.follow(sock, successor.rank)

    def _regroup(self) -> None:
        """Find those that are left at the door, or be the one that waits for them there."""
        control, door = self._control, self._door
        assert door is not None
        if self._reserve is not None:
            self._reserve.close()  # whoever has found this one there comes to the door as well
        deadline, hello = Deadline(_REGROUP_S), regrouping_hello(self._credentials)

        def is_vain() -> bool:
            return self._ended

        while not is_vain() and not deadline.passed():
            try:
                keeper = door.claim(control.rank)
                if keeper == control.rank and not isinstance(self._reserve, Regrouping):
                    self._wait_at(door, hello)
                sock = dial(door.address, door.credentials, hello, Deadline(1.0), is_vain)
            except (OSError, ManyHandsError) as error:
                _log.debug("rank %d does not find the others: %s", control.rank, error)
                time.sleep(_PAUSE_S)
                continue
            with self._changing:
                if is_vain():
                    sock.close()
                else:
                    control.follow(sock, keeper)
                return
        if not isinstance(self._reserve, Regrouping):
            door.disclaim()
        control.give_up_looking()

    def _wait_at(self, door: Door, hello: bytes) -> None:
        control = self._control
        with self._changing:
            if not self._ended:
                place = control.rank, control.world_size, self._liveness, control.last_words
                self._reserve = control.reserve = Regrouping(self._loop, door, hello, *place)

    def _stand_by(self, store: int, gone: Sequence[int]) -> None:
        control = self._control
        try:
            sock = guarded_bind((control.host, 0), self._has_secret)
        except (OSError, ManyHandsError) as error:  # as where there are no descriptors left
            _log.warning("rank %d cannot go on in the place of rank %d, should that die: %s", control.rank, store, error)
            return
        host, port = sock.getsockname()[:2]
        with self._changing:
            if self._ended:
                sock.close()
                return
            self._reserve = Reserve(
                self._loop, sock, self._credentials, control.rank, control.world_size, store, self._liveness, gone, self._door
            )
        control.stand_by(self._reserve, (host, port))
