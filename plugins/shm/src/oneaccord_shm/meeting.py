"""How ranks open each other's memory: their cards, the failures to open it, and words for these that all ranks share."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from oneaccord.api import BackendUnavailableError, Bootstrap, CannotOpenError, boot_id, read_cards, write_card
from oneaccord_shm.kernel import address_of
from oneaccord_shm.lender import Lender, measured_bytes
from oneaccord_shm.plugin import ShmConfig
from oneaccord_shm.segment import TOKEN_BYTES, Segment

__all__ = ["Card", "Company", "meet"]

_MOST_WORDS = 2000
_REMEDY = 'use backend = "tcp", which needs none of this'


@dataclass(frozen=True, slots=True)
class Card:
    """The card of a rank for the others.

    Attributes
    ----------
    host, boot
        The name of its host, and an identifier of the running system.
    namespace
        An identifier of the container to which its process number belongs.
    pid, fd, token
        The place of its memory, and the bytes at its beginning.
    segment_bytes, heap_bytes
        How large it wants rings and heap to be.
    has_barrier
        Whether its threads take part in barriers.
    lent_bytes
        The length of messages from which on it wants to lend them.
    pledge_at
        The address of the token in its process, 0 if it reads no other process's memory and lets none read its own.
    problem
        The reason why it has no memory to share; empty if it has.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    fd: int
    token: bytes
    segment_bytes: int
    heap_bytes: int
    has_barrier: bool
    lent_bytes: int
    pledge_at: int
    problem: str = ""

    def __post_init__(self) -> None:
        if self.pid <= 0 or self.fd < -1 or not 0 <= self.heap_bytes < 1 << 48:
            raise ValueError(f"there is no such memory: {self}")


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - its target is not a path
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class _Seen:
    """The findings of a rank about the others: whose memory it cannot open and why, and whose processes it may read."""

    failures: list[tuple[int, str]]
    borrows: list[int]


@dataclass(frozen=True, slots=True)
class Company:
    """All ranks, as one of them has met them.

    Attributes
    ----------
    segments, cards
        The memory of each rank, and its card.
    lenders
        How to read the memory of each rank.
    borrowers
        The ranks that may read all memory of this one.
    """

    segments: list[Segment]
    cards: list[Card]
    lenders: list[Lender]
    borrowers: frozenset[int]


def meet(bootstrap: Bootstrap, config: ShmConfig, heap_bytes: int, *, has_barrier: bool) -> Company:
    """Make this rank's memory and open that of all others.

    When it returns, every rank has opened every other's memory, so that no rank needs to keep a way to it for the others.

    Raises
    ------
    BackendUnavailableError
        Some ranks cannot share memory; alike on all ranks, and nothing is left open.
    CommError
        The job ended.
    """
    token = os.urandom(TOKEN_BYTES)
    own: Segment | None = None
    problem = ""
    try:
        own = Segment.create(token, heap_bytes)
    except OSError as error:
        problem = f"{error.strerror or error}"
    opened: dict[int, Segment] = {} if own is None else {bootstrap.rank: own}
    try:
        fd = -1 if own is None else own.fd
        card = Card(
            socket.gethostname(),
            boot_id(),
            _namespace(),
            os.getpid(),
            fd,
            token,
            config.segment_bytes,
            heap_bytes,
            has_barrier,
            config.single_copy_bytes or (measured_bytes() if config.single_copy else 0),
            0 if own is None or not config.single_copy else address_of(own.page()),
            problem,
        )
        cards = read_cards(bootstrap.exchange("shm", write_card(card)), Card)
        _check_cards(cards)
        failures: dict[int, str] = {}
        for rank, other in enumerate(cards):
            if rank == bootstrap.rank:
                continue
            try:
                opened[rank] = Segment.open(other.pid, other.fd, other.token, other.heap_bytes)
            except CannotOpenError as error:
                failures[rank] = str(error)
        lenders = [
            Lender(other.pid, other.pledge_at if config.single_copy else 0, other.token, opened[rank])
            for rank, other in enumerate(cards)
            if rank in opened
        ]
        mine = _Seen(list(failures.items())[:50], [rank for rank, lender in enumerate(lenders) if lender.may_borrow])
        answers = read_cards(bootstrap.exchange("shm, opened", write_card(mine)), _Seen)
        if any(answer.failures for answer in answers):
            bootstrap.exchange("shm, not opened", b"")  # if a rank has died meanwhile, its death ends the job
        _check_answers([answer.failures for answer in answers], cards)
    except BaseException:
        for segment in opened.values():
            segment.close()
        raise
    borrowers = frozenset(rank for rank, answer in enumerate(answers) if bootstrap.rank in answer.borrows)
    return Company([opened[rank] for rank in range(len(cards))], cards, lenders, borrowers)


def _check_cards(cards: Sequence[Card]) -> None:
    hosts = _together(cards, [card.boot for card in cards])
    if len(hosts) > 1:
        raise _unavailable(f"the ranks are on {len(hosts)} hosts: {'; '.join(hosts)}")
    containers = _together(cards, [card.namespace for card in cards])
    if len(containers) > 1:
        raise _unavailable(
            f"the ranks are in {len(containers)} PID namespaces, usually containers, in which they cannot see each other's processes: "
            + "; ".join(containers)
        )
    problems = [f"rank {rank} cannot make any ({card.problem})" for rank, card in enumerate(cards) if card.problem]
    if problems:
        raise _unavailable("; ".join(problems))


def _check_answers(answers: Sequence[Sequence[tuple[int, str]]], cards: Sequence[Card]) -> None:
    failures = [
        f"rank {rank} (process {cards[rank].pid} on {cards[rank].host}) cannot open the memory of rank {other}: {reason}"
        for rank, answer in enumerate(answers)
        for other, reason in answer
    ]
    if failures:
        raise _unavailable("; ".join(failures))


def _unavailable(reason: str) -> BackendUnavailableError:
    words = reason if len(reason) <= _MOST_WORDS else f"{reason[:_MOST_WORDS]} ..."
    return BackendUnavailableError(
        f"the backend 'shm' needs memory that all ranks of one host share, which they do not: {words}; {_REMEDY}"
    )


def _together(cards: Sequence[Card], places: Sequence[str]) -> list[str]:
    """Return in words which ranks share a place."""
    found: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        found.setdefault(place, []).append(rank)
    return [f"{_ranks(ranks)} on {cards[ranks[0]].host}" for ranks in found.values()]


def _ranks(ranks: Sequence[int]) -> str:
    words = ", ".join(map(str, ranks[:20])) + (" and more" if len(ranks) > 20 else "")
    return f"rank {words}" if len(ranks) == 1 else f"ranks {words}"
