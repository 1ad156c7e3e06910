"""`WorldMaker`: the argument of every check."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from oneaccord.api import BackendSpec, BackendUnavailableError, Group, UsageError, describe_backend, install_command
from oneaccord_conformance import patience
from oneaccord_conformance.processes import ProcessJob
from oneaccord_conformance.ranks import Outcome, Program
from oneaccord_conformance.threads import ThreadJob

__all__ = ["WorldMaker"]

_LARGEST: Final = 9
_AT_ONCE: Final = 4


def _memory(group: Group) -> list[str]:
    """Return which memory the backend moves as it is configured, on every rank."""
    backend = group.backend()
    return sorted(backend.memory) if backend is not None else []


class WorldMaker:
    """Makes worlds of ranks on one backend, and runs programs on them.

    Ranks are threads of this process. If the backend says by `BackendUnavailableError` that it cannot have such, or has a launcher of its own,
    ``oneaccord run`` starts them. Worlds whose programs raised nothing are kept, and serve the next program.

    Parameters
    ----------
    backend
        The backend's name.
    config
        The content of a ``oneaccord.toml``, or the name of such a file.
    ranks
        How many ranks a world has unless a check asks for another number; at least 2.
    quick
        Whether checks may leave out some of their cases.

    Attributes
    ----------
    spec
        The backend's description of itself.
    has_threads
        Whether ranks may be threads of one process.

    Raises
    ------
    PluginError
        The backend is not installed, is broken, or cannot run here.
    UsageError
        The config is wrong.
    """

    def __init__(
        self, backend: str, config: Mapping[str, Any] | str | None = None, ranks: int = 4, *, quick: bool = False
    ) -> None:
        self.backend: str = backend
        self.config: Mapping[str, Any] | str | None = config
        self.ranks: int = ranks
        self.quick: bool = quick
        self.spec: BackendSpec = describe_backend(backend)
        self._kept: dict[int, ThreadJob | ProcessJob] = {}
        self._memory: frozenset[str] = frozenset(self.spec.devices)
        reason = self.spec.probe()
        if reason is not None:
            what_to_do = f"try: {install_command(self.spec.install)}" if self.spec.install else "see: oneaccord doctor"
            raise BackendUnavailableError(
                f"the backend {backend!r} cannot run here, and cannot be checked: {reason}; {what_to_do}"
            )
        self.has_threads: bool = self.spec.launcher is None
        self._try()

    @property
    def sizes(self) -> list[int]:
        """The sizes of worlds for a check that is about them: 1 to 9 if ranks are threads, otherwise 1 to ``ranks``."""
        if not self.has_threads:
            return list(range(1, self.ranks + 1))
        return sorted({1, 2, self.ranks, 7}) if self.quick else list(range(1, _LARGEST + 1))

    def lacks(self, need: str) -> bool:
        """Return whether the backend has declared that it lacks something: a word of `registry.NEEDS`."""
        if need in ("cpu", "cuda"):
            return need not in self._memory
        if need == "threads":
            return not self.has_threads
        return "virtual time" in self.spec.capabilities

    def run(self, program: Program, ranks: int | None = None, **facts: Any) -> list[Any]:
        """Run a program on every rank; return its result on each.

        Parameters
        ----------
        program
            A function of a module: ``program(group, **facts)``.
        ranks
            How many ranks the world has.
        facts
            Plain data.

        Raises
        ------
        AssertionError
            The program raised something on a rank, or did not end in time.
        """
        size = self.ranks if ranks is None else ranks
        job = self._kept.get(size)
        if job is None:
            job = self._kept[size] = self._start(size, patience.TIMEOUT_S)
        outcomes = job.run(program, facts, patience.PROGRAM_S)
        if any(each is None or each.errors for each in outcomes):
            del self._kept[size]
            text = _what_happened(program, job, outcomes)
            job.end(1.0)
            raise AssertionError(text)
        return [each.value for each in outcomes if each is not None]

    def attempt(
        self, program: Program, ranks: int | None = None, *, timeout_s: float | None = None, **facts: Any
    ) -> list[Outcome]:
        """Run a program on every rank of a new world, in which calls may fail; return its result on each.

        Parameters
        ----------
        program, ranks, facts
            As for `run`.
        timeout_s
            The timeout of the ranks' group; by default `patience.TIMEOUT_S`.

        Raises
        ------
        AssertionError
            The program did not end in time on a rank, or a rank did not leave the world.
        """
        size = self.ranks if ranks is None else ranks
        limit_s = patience.TIMEOUT_S if timeout_s is None else timeout_s
        job = self._start(size, limit_s)
        outcomes = job.run(program, facts, patience.PROGRAM_S)
        late = any(each is None for each in outcomes)
        text = _what_happened(program, job, outcomes) if late else ""
        fault = job.end(1.0 if late else limit_s + patience.TIMEOUT_S)
        if late or (fault and isinstance(job, ThreadJob)):  # processes that raised something do not end well, and need not
            raise AssertionError(text or f"after {program.__name__}: {fault}")
        return [each for each in outcomes if each is not None]

    def attempts(
        self, program: Program, each: Sequence[Mapping[str, Any]], ranks: int | None = None, *, timeout_s: float | None = None
    ) -> list[list[Outcome]]:
        """Do as `attempt` for several sets of facts, some of them at the same time if ranks are threads.

        Parameters
        ----------
        program, ranks, timeout_s
            As for `attempt`.
        each
            The facts of each attempt.

        Raises
        ------
        AssertionError
            As `attempt`, for the first one that fails.
        """
        with ThreadPoolExecutor(_AT_ONCE if self.has_threads else 1) as pool:
            begun = [pool.submit(self.attempt, program, ranks, timeout_s=timeout_s, **facts) for facts in each]
            try:
                return [future.result() for future in begun]
            finally:
                for future in begun:
                    future.cancel()

    @contextlib.contextmanager
    def processes(
        self, program: Program, ranks: int | None = None, *, timeout_s: float | None = None, **facts: Any
    ) -> Iterator[ProcessJob]:
        """Begin a program on ranks that are processes, which the check may signal; ranks that are left at the end are killed.

        Parameters
        ----------
        program, ranks, timeout_s, facts
            As for `attempt`.

        Yields
        ------
        ProcessJob
            Its ranks have come together, and the program has begun.
        """
        size = self.ranks if ranks is None else ranks
        limit_s = patience.TIMEOUT_S if timeout_s is None else timeout_s
        job = ProcessJob(self.backend, self.config, size, limit_s, keep_going=self.spec.launcher is None)
        try:
            job.begin(program, facts)
            yield job
        finally:
            job.end(0.0)

    def rest(self, patience_s: float = patience.TIMEOUT_S) -> str:
        """End the worlds that were kept; return the fault if one does not end well, otherwise an empty text."""
        for job in self._kept.values():
            job.leave()
        faults = [job.end(patience_s) for job in self._kept.values()]
        self._kept = {}
        return "\n".join(filter(None, faults))

    def _try(self) -> None:
        """Find, by a first world, what kind of ranks and which memory the backend supports. The checks will find other faults."""
        try:
            job = self._start(2, patience.TIMEOUT_S)
        except AssertionError:
            return
        outcomes = job.run(_memory, {}, patience.PROGRAM_S)
        first = outcomes[0]
        if first is None or first.errors:
            job.end(patience.TIMEOUT_S)
            if first is not None and "ConfigError" in first.errors:
                raise UsageError(f"the backend {self.backend!r} cannot be checked with this configuration: {first.text}")
            if self.has_threads and all(each is not None and "BackendUnavailableError" in each.errors for each in outcomes):
                self.has_threads = False
                self._try()
            return
        self._memory = frozenset(first.value)
        self._kept[2] = job

    def _start(self, size: int, timeout_s: float) -> ThreadJob | ProcessJob:
        if self.has_threads:
            return ThreadJob(self.backend, self.config, size, timeout_s)
        return ProcessJob(self.backend, self.config, size, timeout_s, is_virtual=self.lacks("clock"))


def _is_consequence(outcome: Outcome) -> int:
    """Return how likely an error is the consequence of another rank's: 0 for one of its own, 2 for one that only another rank's end brings."""
    if {"LinkLost", "PeerLostError", "AbortedError"}.intersection(outcome.errors):
        return 2
    return 1 if "CommError" in outcome.errors else 0


def _what_happened(program: Program, job: ThreadJob | ProcessJob, outcomes: list[Outcome | None]) -> str:
    """Return words for the fault: the ranks that hang, and the error that is the cause of the others."""
    size = len(outcomes)
    raised = {rank: each for rank, each in enumerate(outcomes) if each is not None and each.errors}
    cause = min(raised, key=lambda rank: (_is_consequence(raised[rank]), rank), default=None)
    lines = []
    if cause is not None:
        lines.append(f"rank {cause} of {size} raised {raised[cause].error}: {raised[cause].text}")
    late = [str(rank) for rank, each in enumerate(outcomes) if each is None]
    if late:
        lines.append(f"rank {', '.join(late)} of {size} did not return from {program.__name__}:\n{job.whereabouts()}")
    return "\n".join(lines)
