"""Which ranks of a group share memory. The names of hosts do not show it, so that ranks open each other's memory to find out.

Two containers may have one name and separate memory, or two names and one memory. Ranks that run on one system each make a file of memory, and try to
open that of the lowest rank through ``/proc``, then that of the next one. Ranks that opened the same file share memory. If those of one
system are divided after this, as containers with process numbers of their own are, the first rank of each part publishes a file in
``/dev/shm``, and parts whose ranks all find the same one are joined.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from oneaccord.calls.failures import awaited
from oneaccord.common.ranks import show_ranks
from oneaccord.contract.cards import write_card
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job
from oneaccord.runtime.host_memory import TOKEN_BYTES, CannotOpenError, SharedFile, boot_id

__all__ = ["Hosts", "Trade", "find_hosts"]

_log = logging.getLogger("oneaccord.job")


class Trade:
    """Trades cards with the other members of a group, in one call of all of them.

    Parameters
    ----------
    exchange
        ``exchange(name, card)`` returns the card of each member, in their order, and the first of as many unused numbers.
    name
        The call.

    Attributes
    ----------
    number
        The first unused number of the last exchange.
    """

    def __init__(self, exchange: Callable[[str, bytes], tuple[list[bytes], int]], name: str) -> None:
        self._exchange = exchange
        self.name: str = name
        self.number: int = 0

    def __call__(self, step: str, value: object) -> list[bytes]:
        """Give a value; return the card of each member."""
        cards, self.number = self._exchange(f"{self.name}, {step}", write_card(value))
        return cards


@dataclass(frozen=True, slots=True)
class Hosts:
    """The ranks of a group that share memory; numbers are ranks of the group.

    Attributes
    ----------
    firsts
        For each rank the first one with which it shares memory, which is itself if there is no lower one.
    named
        The first ranks whose memory the others open by its name in ``/dev/shm``, and not through ``/proc``.
    """

    firsts: tuple[int, ...]
    named: frozenset[int] = frozenset()

    def parts(self) -> dict[int, list[int]]:
        """Return the ranks of each host by the first of them, in order."""
        found: dict[int, list[int]] = {}
        for rank, first in enumerate(self.firsts):
            found.setdefault(first, []).append(rank)
        return found


@dataclass(frozen=True, slots=True)
class _Probe:
    """A rank's system, the host to which the config assigns it, and its file; ``name`` only in the second round."""

    system: str = ""
    host: int = 0
    pid: int = 0
    fd: int = -1
    name: str = ""
    token: bytes = b""


@dataclass(frozen=True, slots=True)
class _Opened:
    """The rank whose file this rank has opened, and the reason for the first failure."""

    rank: int
    why: str = ""


def find_hosts(job: Job, members: Members, trade: Trade, *, is_assigned: bool) -> Hosts:
    """Return which members share memory; all of them call it, and get the same.

    Parameters
    ----------
    job, members
        The job and the members of the group.
    trade
        Trades cards with the other members.
    is_assigned
        Whether the config says which ranks share a host; no others then share memory.
    """
    hosts = [job.hosts[rank] for rank in members.ranks]
    if job.meeting is None:  # the ranks are threads
        return Hosts(tuple(hosts.index(host) for host in hosts))
    if members.size == 1:
        return Hosts((0,))
    token = os.urandom(TOKEN_BYTES)
    assigned = hosts[members.rank] if is_assigned else 0
    file, why = _make(token, in_folder=False)
    try:
        mine = _Probe(boot_id(), assigned, os.getpid(), -1 if file is None else file.fd, "", token)
        cards = trade("hosts", mine)
        with awaited(job, members, trade.name):
            probes = job.read_cards(cards, _Probe, trade.name, members.ranks)
            systems = [(probe.system, probe.host) for probe in probes]
            opened = _open_first(members.rank, systems, probes, why)
        answers = job.read_cards(trade("opened", opened), _Opened, trade.name, members.ranks)
    finally:
        if file is not None:
            file.close()
    firsts = _firsts([answer.rank for answer in answers])
    found = Hosts(firsts)
    if _are_divided(systems, firsts):
        found = _by_names(job, members, trade, systems, firsts)
        _warn(members, systems, found, answers)
    return found


def _make(token: bytes, *, in_folder: bool) -> tuple[SharedFile | None, str]:
    try:
        return SharedFile.create(0, token, in_folder=in_folder), ""
    except (OSError, MemoryError) as error:
        return None, str(error)


def _open_first(own: int, systems: Sequence[Hashable], probes: Sequence[_Probe], why: str) -> _Opened:
    """Open the memory of the lowest rank of this system whose memory can be opened; it may be this rank's own."""
    for rank, probe in enumerate(probes[:own] if not why else ()):
        if systems[rank] == systems[own] and probe.fd >= 0:
            try:
                SharedFile.open(probe.pid, probe.fd, probe.token, 0).close()
            except CannotOpenError as error:
                why = why or str(error)
            else:
                return _Opened(rank, why)
    return _Opened(own, why)


def _firsts(opened: Sequence[int]) -> tuple[int, ...]:
    """Return for each rank the first one of its host: the one that it has opened, unless that has opened another one itself."""
    return tuple(rank if first == rank else first if opened[first] == first else rank for rank, first in enumerate(opened))


def _are_divided(systems: Sequence[Hashable], firsts: Sequence[int]) -> bool:
    """Return whether the ranks of a system do not all share memory."""
    return len(set(zip(systems, firsts, strict=True))) > len(set(systems))


def _by_names(job: Job, members: Members, trade: Trade, systems: Sequence[Hashable], firsts: tuple[int, ...]) -> Hosts:
    """Join parts of a system whose ranks all find the same file in ``/dev/shm``."""
    own, token = members.rank, os.urandom(TOKEN_BYTES)
    file, name = None, ""
    if firsts[own] == own:
        file, _ = _make(token, in_folder=True)
    try:
        if file is not None:
            try:
                name = file.publish()
            except OSError as error:
                _log.info("rank %d can publish no memory in /dev/shm: %s", members.ranks[own], error)
        cards = trade("names", _Probe(name=name, token=token))
        with awaited(job, members, trade.name):
            probes = job.read_cards(cards, _Probe, trade.name, members.ranks)
            here = (rank for rank, system in enumerate(systems) if system == systems[own])
            seen = next((rank for rank in here if _can_open_by_name(probes[rank])), -1)
        found = job.read_cards(trade("found", _Opened(seen)), _Opened, trade.name, members.ranks)
    finally:
        if file is not None:
            file.close()
    return _joined(firsts, [each.rank for each in found])


def _can_open_by_name(probe: _Probe) -> bool:
    if not probe.name:
        return False
    try:
        SharedFile.open_named(probe.name, probe.token, 0).close()
    except CannotOpenError:
        return False
    return True


def _joined(firsts: tuple[int, ...], seen: Sequence[int]) -> Hosts:
    """Join the parts whose members have all seen the first rank of one part, those of that part included."""
    by_part: dict[int, set[int]] = {}
    for rank, first in enumerate(firsts):
        by_part.setdefault(first, set()).add(seen[rank])
    sees = {first: next(iter(found)) for first, found in by_part.items() if len(found) == 1}
    target = {first: each for first, each in sees.items() if each >= 0 and sees.get(each) == each}
    joined = tuple(target.get(first, first) for first in firsts)
    return Hosts(joined, frozenset(each for first, each in target.items() if first != each))


def _warn(members: Members, systems: Sequence[Hashable], found: Hosts, answers: Sequence[_Opened]) -> None:
    """Say once for each system that its ranks do not all share memory, and why."""
    by_system: dict[Hashable, Mapping[int, list[int]]] = {}
    parts = found.parts()
    for system in systems:
        by_system[system] = {first: ranks for first, ranks in parts.items() if systems[first] == system}
    mine = by_system[systems[members.rank]]
    if len(mine) > 1 and members.rank == min(mine):
        why = next(
            (
                answers[rank].why
                for first, ranks in mine.items()
                if first != members.rank
                for rank in ranks
                if answers[rank].why
            ),
            "",
        )
        words = "; ".join(show_ranks([members.ranks[rank] for rank in ranks]) for ranks in mine.values())
        _log.warning("oneaccord: these ranks run on one system, and do not share memory with each other (%s): %s", why, words)
