"""``backend = "auto"`` in a world of several ranks: they meet first, and then choose one backend together.

Each rank publishes the backends that can run on its host. All compute the same order from the same cards and try the first. If it does not start
on one rank, such as shared memory between two containers, all of them try the next.
"""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import msgspec

from oneaccord.common.installing import install_command
from oneaccord.config import Resolved
from oneaccord.config.plugins import PluginManager
from oneaccord.config.plugins.choice import candidates
from oneaccord.contract.backend import BackendSpec
from oneaccord.contract.cards import write_card
from oneaccord.contract.deadline import Deadline
from oneaccord.errors import BackendUnavailableError, PluginError
from oneaccord.job.job import Job

__all__ = ["start_best"]

_log = logging.getLogger("oneaccord.job")


class _Candidate(msgspec.Struct, frozen=True):
    """A backend that can run on a rank."""

    name: str
    priority: int
    one_host: bool
    composed: bool = False


class _Card(msgspec.Struct, frozen=True):
    """The card of a rank: an identifier of its running system, and the backends that can run there."""

    system: str
    candidates: list[_Candidate]


def start_best(job: Job, resolved: Resolved, plugins: PluginManager, deadline: Deadline) -> None:
    """Start the best backend that every rank has and that starts on all of them; ``job.backend_name`` is its name then.

    The highest `BackendSpec.auto_priority` wins. Backends for ranks of one host are skipped if there are several hosts, and backends
    that are composed of others unless there are several hosts, one of them with several ranks.

    Raises
    ------
    BackendUnavailableError
        There is none; the message says why for each. It is the same on all ranks.
    CommError
        The job ended meanwhile.
    """
    specs, _ = candidates(plugins, resolved.lacking)
    own = _Card(
        _system(), [_Candidate(spec.name, spec.auto_priority or 0, spec.one_host, spec.parts is not None) for spec in specs]
    )
    answers = job.control.exchange("the choice of a backend", write_card(own), deadline)[0]
    names, reasons = _rank(job.read_cards(answers, _Card, "the choice of a backend"))
    for name, reason in reasons:
        _passed_over(job, name, reason)
    by_name = {spec.name: spec for spec in specs}
    for name in names:
        problem = _try(job, by_name[name], resolved, plugins, deadline)
        if not problem:
            job.backend_name = name
            _log.info("rank %d: 'auto' takes %s, the best that every rank has and that starts on all", job.rank, name)
            return
        _passed_over(job, name, problem)
        reasons.append((name, problem))
    raise BackendUnavailableError(
        "'auto' found no backend that can run on all ranks:"
        + "".join(f"\n  {name}: {reason}" for name, reason in reasons)
        + "\nname one of them as the backend to see why it cannot, or install tcp on all ranks: "
        + install_command("pip install 'oneaccord[tcp]'")
    )


def _passed_over(job: Job, name: str, reason: str) -> None:
    _log.info("rank %d: 'auto' passes %s over: %s", job.rank, name, reason)


def _rank(cards: list[_Card]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the backends to try, the best first, and the others with their obstacles."""
    known: dict[str, list[tuple[int, _Candidate]]] = {}
    for rank, card in enumerate(cards):
        for candidate in card.candidates:
            known.setdefault(candidate.name, []).append((rank, candidate))
    systems = {card.system for card in cards}
    several = len(systems) > 1
    mixed = several and len(systems) < len(cards)
    order: list[tuple[int, str]] = []
    passed_over: list[tuple[str, str]] = []
    for name, having in sorted(known.items()):
        lacking = set(range(len(cards))).difference(rank for rank, _ in having)
        if lacking:
            passed_over.append((name, f"rank {min(lacking)} cannot run it"))
        elif several and any(candidate.one_host for _, candidate in having):
            passed_over.append((name, "it is for ranks of one host, but these are on several"))
        elif not mixed and any(candidate.composed for _, candidate in having):
            passed_over.append((name, "it is for several hosts with several ranks each"))
        else:
            order.append((-max(candidate.priority for _, candidate in having), name))
    return [name for _, name in sorted(order)], passed_over


def _try(job: Job, spec: BackendSpec, resolved: Resolved, plugins: PluginManager, deadline: Deadline) -> str:
    """Start a backend on all ranks, or on none; return the obstacle, alike on all ranks."""
    # Loaded before any rank starts: a rank that cannot load it must not leave the others waiting inside.
    problem = ""
    try:
        plugins.load_factory(spec)
    except PluginError as error:
        problem = str(error)
    problem = _first_problem(job, f"backend {spec.name}: load", problem, deadline)
    if problem:
        return problem
    try:
        job.start_backend(spec, resolved, plugins, None, deadline)
    except PluginError as error:  # it cannot run here, or its factory makes no backend
        if deadline.passed():
            raise
        problem = str(error)
    problem = _first_problem(job, f"backend {spec.name}: start", problem, deadline)
    if problem and job.backend is not None:
        job.backend.abort()
        job.backend.close()
        job.backend = None
    return problem


def _first_problem(job: Job, name: str, problem: str, deadline: Deadline) -> str:
    answers = job.control.exchange(name, problem[:4000].encode(), deadline)[0]
    return next((f"{answer.decode(errors='replace')} (rank {rank})" for rank, answer in enumerate(answers) if answer), "")


def _system() -> str:
    """Return an identifier that all processes of one running system share, and no others, whatever the name of their host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
