"""Where the ranks that are left find each other again when the store and its successor have both died: at the door that the launcher has given them.

One of them waits there, which no other one does meanwhile (`Door.claim`), and the others connect to it. The launcher, which sees each death, tells how many
of them live. Once all those have come, that one goes on in the store's place, as a successor does, and tells all the same first cause: what one of them
was told before, or else what it has found itself.
"""

from __future__ import annotations

from manyhands.control.credentials import Credentials
from manyhands.control.liveness import Liveness
from manyhands.control.lobby import ORPHAN_HELLO, Door
from manyhands.control.loop import Loop
from manyhands.control.protocol import Verdict, decode_from_rank, ranks_in
from manyhands.control.proven import ProvenSocket
from manyhands.control.reserve import Reserve

__all__ = ["Regrouping", "regrouping_hello"]

_LOOK_S = 0.01
"""How often to look whether all have come."""
_REGROUP_S = 5.0
"""How long to wait for them."""


def regrouping_hello(job: Credentials) -> bytes:
    """Return what a rank of a job says at the door, which newcomers and the ranks of no other job say."""
    return ORPHAN_HELLO + job.of_job(b"regrouping").secret


class Regrouping(Reserve):
    """What the rank at the door knows, in the background loop.

    Parameters
    ----------
    loop
        Where it runs.
    door
        Where the others come; claimed by this rank, and given back at the end.
    hello
        What they say.
    rank, world_size
        This rank, and how many ranks the job had.
    liveness
        How a silent rank is noticed.
    found
        The first cause where none of those that come has been told another one.
    """

    def __init__(
        self, loop: Loop, door: Door, hello: bytes, rank: int, world_size: int, liveness: Liveness, found: Verdict | None
    ) -> None:
        self._hello = hello
        self._at_door = door
        self._left_s = _REGROUP_S
        nobody = -1  # of those that come has the store
        super().__init__(loop, door.listen(), door.credentials, rank, world_size, nobody, liveness, (), door)
        self._found = found
        loop.call(self._look)

    def _accept(self, sock: ProvenSocket, hello: bytes) -> None:
        if hello.startswith(self._hello):
            super()._accept(sock, hello)
        else:  # a newcomer, which tries again
            sock.close()

    def _hear(self, rank: int, frame: bytes | None) -> None:
        message = decode_from_rank(frame)
        if self._membership is None and message is not None:
            self._waiting.append((rank, message))
        else:
            super()._hear(rank, frame)

    def _begin(self) -> None:
        told = (join.verdict for join in self._members.values() if join.verdict is not None)
        known = (verdict for verdict in told if all(0 <= rank < self._world_size for rank in ranks_in(verdict)))
        self._verdict = next(known, self._found)
        super()._begin()

    def _look(self) -> None:
        """Go on where all that live have come, or no others come."""
        if self._closed:
            return
        self._left_s -= _LOOK_S
        is_complete = self._rank in self._members and len(self._seats) >= self._at_door.members()
        if not is_complete and self._left_s > 0:
            self._loop.call_later(_LOOK_S, self._look)
            return
        if is_complete:  # else those that did not come may live, and the larger part goes on
            self._ended = frozenset(range(self._world_size))
        self._listener.close()  # newcomers come here from now on
        self._begin()

    def _close(self) -> None:
        super()._close()
        self._at_door.disclaim()
