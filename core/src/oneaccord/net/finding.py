"""How a rank finds rank 0, which may still be on its way, and may be at one of several places."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator, Sequence

from oneaccord.contract.deadline import Deadline
from oneaccord.errors import AuthenticationError, DeadlineError, RendezvousError
from oneaccord.net.credentials import Credentials
from oneaccord.net.network import Address, AnotherSecretError, dial, show_address
from oneaccord.net.proven import ProvenSocket

__all__ = ["Search", "dial_patiently"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25
_FIRST_TURN_S, _LONGER = 1.0, 1.25
"""How long an attempt at one of several places may take, and how much longer in each later round: the listener may be busy, or no program of ours."""
_MAX_NAMED = 4
"""The most places that an error describes."""


def _alternating(places: Sequence[Address]) -> Iterator[Address | None]:
    """Return places again and again, in turn one with the first port among them and one of the rest; None if there are none."""
    near = [place for place in places if place[1] == places[0][1]]
    far = [place for place in places if place[1] != places[0][1]]
    turns = [itertools.cycle(each) for each in (near, far) if each]
    return itertools.chain.from_iterable(zip(*turns, strict=True)) if turns else itertools.repeat(None)


class Search:
    """The search for rank 0: its places are dialled in rounds until the deadline.

    Each round dials the places with the first port, of which one is most likely right, and one of the others: many ranks that wait for rank 0 must not
    flood its host. Every second time that one has the second port, which rank 0 takes if another program has the first.

    Parameters
    ----------
    places
        Where rank 0 may listen, the likeliest first.
    credentials, hello
        As for `dial`.
    rank
        The rank that searches, for the error; -1 for a new one.
    deadline
        The end of the search.
    cancelled
        Asked now and then whether to give up.
    """

    def __init__(
        self,
        places: Sequence[Address],
        credentials: Credentials,
        hello: bytes,
        rank: int,
        deadline: Deadline,
        cancelled: Callable[[], bool],
    ) -> None:
        self._places = places
        self._credentials = credentials
        self._hello = hello
        self._rank = rank
        self._deadline = deadline
        self._cancelled = cancelled
        self._findings: dict[Address, str] = {}
        self._unresolved: OSError | None = None
        self._likely = [place for place in places if place[1] == places[0][1]]
        self._others = _alternating([place for place in places if place[1] != places[0][1]])
        self._round: list[Address] = []
        self._place = places[0]
        self._is_first = True
        self._pause_s = _FIRST_PAUSE_S
        self._turn_s = _FIRST_TURN_S

    def note(self, finding: str) -> None:
        """Note that the place that was dialled last is not that of rank 0."""
        self._findings[self._place] = finding

    def dial(self) -> tuple[ProvenSocket, Address]:
        """Return a connection to the next place that answers, and that place.

        Raises
        ------
        RendezvousError, AuthenticationError
            As `dial`, if there is one place; or no rank was there in time.
        DeadlineError
            The name of the host did not resolve in time.
        """
        while not self._deadline.passed() and not self._cancelled():
            if not self._round:
                self._begin_round()
                continue
            self._place = self._round.pop(0)
            sock = self._try(self._place)
            if sock is not None:
                return sock, self._place
        raise self._failure()

    def _begin_round(self) -> None:
        if not self._is_first:
            time.sleep(min(self._pause_s, self._deadline.remaining()))
            self._pause_s = min(self._pause_s * 1.5, _LONGEST_PAUSE_S)
            self._turn_s *= _LONGER
        self._is_first = False
        other = next(self._others)
        self._round = [*self._likely, *([] if other is None else [other])]

    def _try(self, place: Address) -> ProvenSocket | None:
        is_only = len(self._places) == 1
        deadline = self._deadline if is_only else Deadline(max(0.001, min(self._turn_s, self._deadline.remaining())))
        try:
            return dial(place, self._credentials, self._hello, deadline, self._cancelled)
        except RendezvousError as error:
            is_own = isinstance(error, AuthenticationError) and not isinstance(error, AnotherSecretError)
            if is_only and isinstance(error, AnotherSecretError):
                raise AuthenticationError(str(error), rank=self._rank) from None
            if is_only or is_own:
                error.rank = self._rank
                raise
            self._findings[place] = str(error)
        except OSError as error:  # refused, reset, unreachable, unresolved, silent: rank 0 may still be on its way
            self._findings[place] = error.strerror or str(error)
            self._unresolved = error if isinstance(error, socket.gaierror) else None
        return None

    def _failure(self) -> RendezvousError | DeadlineError:
        who = f"rank {self._rank}" if self._rank >= 0 else "a new rank"
        first, within = self._places[0], f"within {self._deadline.timeout_s:g} s"
        if self._unresolved is not None:
            return DeadlineError(
                f"{who} could not reach rank 0 at {show_address(first)}: the name {first[0]!r} did not resolve {within} "
                f"({self._findings[first]}). Is it the name of rank 0's host?",
                rank=self._rank,
                peer=0,
            )
        if len(self._places) == 1:
            reason = self._findings.get(first, "there was no time for an attempt")
            return RendezvousError(
                f"{who} could not reach rank 0 at {show_address(first)} {within} ({reason}): is rank 0 running, "
                "and is that its address and port? If the other ranks have met without this process, another process has its rank",
                rank=self._rank,
                peer=0,
            )
        found = "; ".join(f"at {show_address(place)}: {why}" for place, why in [*self._findings.items()][:_MAX_NAMED])
        more = len(self._findings) - _MAX_NAMED
        return RendezvousError(
            f"{who} found rank 0 of {self._credentials.run!r} at none of {len(self._places)} places {within}: is rank 0 running? "
            f"{found or 'there was no time for an attempt'}{f'; and {more} more' if more > 0 else ''}. To name the place yourself, set "
            "ONEACCORD_RENDEZVOUS=host:port on all ranks",
            rank=self._rank,
            peer=0,
        )


def dial_patiently(
    address: Address, credentials: Credentials, hello: bytes, rank: int, deadline: Deadline, cancelled: Callable[[], bool]
) -> ProvenSocket:
    """Connect as `dial` to rank 0, which may still be on its way: again and again until the deadline, in the name of ``rank``.

    Raises
    ------
    RendezvousError, AuthenticationError, DeadlineError
        As `Search.dial`.
    """
    return Search([address], credentials, hello, rank, deadline, cancelled).dial()[0]
