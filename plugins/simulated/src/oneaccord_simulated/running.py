"""Running a function on every rank of a simulated world."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from oneaccord.api import ClosedError, CommError, DeadlockError, Group, Network, ThreadWorld, UsageError, init
from oneaccord_simulated.faults import Fault, FaultPlan
from oneaccord_simulated.task import Stopped
from oneaccord_simulated.trace import Trace
from oneaccord_simulated.world import SimulatedRuntime

__all__ = ["Faults", "NetworkLike", "Run", "Simulation", "run"]

T = TypeVar("T")

NetworkLike = Network | str | os.PathLike[str] | None
"""A network, the name of a preset, or a TOML file; None if messages take no time."""
Faults = FaultPlan | Fault | Iterable[Fault] | str | os.PathLike[str] | None
"""A plan, faults, or a TOML file."""


class Run(Generic[T]):
    """The result of a run.

    Attributes
    ----------
    results
        The return value of the function on each rank, in the order of ranks, also if the group could not be left well after that; None for
        ranks on which it did not return.
    errors
        The errors of ranks, by rank.
    cause
        The error that ended the run, with an attribute ``rank``; None if no rank raised one.
    duration_s
        Seconds on the virtual clock until the last rank was done.
    trace
        All that happened.
    seed, world_size
        The seed and the size of the run.
    """

    def __init__(self, results: list[T], errors: dict[int, BaseException], cause: BaseException | None, trace: Trace) -> None:
        self.results: list[T] = results
        self.errors: dict[int, BaseException] = errors
        self.cause: BaseException | None = cause
        self.trace: Trace = trace
        self.duration_s: float = trace.duration_s
        self.seed: int = trace.seed
        self.world_size: int = trace.world_size

    def __repr__(self) -> str:
        end = "" if self.cause is None else f", failed: {type(self.cause).__name__}"
        return f"<Run of {self.world_size} ranks, seed {self.seed}, {self.duration_s:g} s{end}>"

    def trace_json(self) -> str:
        """Return the trace for Perfetto (ui.perfetto.dev) or ``chrome://tracing``: the same text for the same seed, byte by byte."""
        return self.trace.to_json()


class Simulation:
    """A world of simulated ranks, which runs once.

    Parameters
    ----------
    world_size, seed, network, faults
        As for `run`.
    keep_messages
        Whether the trace keeps every message.

    Attributes
    ----------
    world
        The meeting point of the ranks.
    runtime
        Their runtime.
    """

    def __init__(
        self, world_size: int, *, seed: int = 0, network: NetworkLike = None, faults: Faults = None, keep_messages: bool = True
    ) -> None:
        if type(seed) is not int or seed < 0:
            raise UsageError(f"seed is {seed!r}; expected an integer, 0 or more")
        plan = (
            FaultPlan.load(faults) if isinstance(faults, str | os.PathLike) else FaultPlan.of(() if faults is None else faults)
        )
        self.runtime: SimulatedRuntime = SimulatedRuntime(
            world_size, seed, Network.resolve(network), plan, keep_messages=keep_messages
        )
        self.world: ThreadWorld = self.runtime.world

    def execute(self, body: Callable[[int], T], *, also_threads: bool = False) -> Run[T]:
        """Call ``body(rank)`` on every rank; return the result, also if ranks raised errors.

        With ``also_threads`` the failure of a group is a failure of the run, too, if it ended a thread of the program and no rank raised
        an error: with processes such a program prints a traceback, and ends well.
        """
        results: dict[int, T] = {}
        errors: dict[int, BaseException] = {}

        def live(rank: int) -> None:
            try:
                with self.world.rank(rank):
                    results[rank] = body(rank)
            except Stopped:
                raise
            except BaseException as error:  # noqa: BLE001 - raised again after the wait for all ranks
                if (
                    not self.runtime.scheduler.is_stopping
                ):  # then it is the rank's way to the end, such as a lock that it does not hold
                    errors[rank] = error

        in_threads: dict[int, BaseException] = {}
        forsaken: dict[int, BaseException] = {}
        try:
            with self._deaths(in_threads):
                self.runtime.run(live)
        except DeadlockError as error:  # ranks wait for an event outside of this world, and are left there
            forsaken[error.rank or 0] = error
            errors |= forsaken
        if also_threads and not errors:
            errors = in_threads
        size = self.world.world_size
        outcomes: list[Any] = [results.get(rank) for rank in range(size)]
        return Run(outcomes, errors, self._cause(errors, forsaken), self.runtime.trace)

    @contextmanager
    def _deaths(self, errors: dict[int, BaseException]) -> Iterator[None]:
        """Note which failures of a group end threads of the program; they are reported as usual."""
        before, scheduler = threading.excepthook, self.runtime.scheduler

        def note(args: threading.ExceptHookArgs) -> None:
            error = args.exc_value
            is_failure = isinstance(error, CommError) and not isinstance(error, ClosedError) and not scheduler.is_stopping
            if is_failure and scheduler.is_of_program(args.thread):
                assert isinstance(error, CommError)
                errors.setdefault(error.rank or 0, error)
            before(args)

        threading.excepthook = note
        try:
            yield
        finally:
            if threading.excepthook is note:
                threading.excepthook = before

    def _cause(self, errors: dict[int, BaseException], forsaken: dict[int, BaseException]) -> BaseException | None:
        """Return the cause among the errors: that of the rank that stopped the others, or else the program's own.

        A rank that waits for an event that never comes is the cause of every deadline that others have missed meanwhile.
        """
        if not errors:
            return None
        causes = {rank: error for rank, error in errors.items() if not isinstance(error, CommError)} or forsaken or errors
        stopped_by = self.world.aborted_by
        rank = stopped_by if stopped_by in causes else next(iter(causes))
        error = causes[rank]
        trace = self.runtime.trace
        error.add_note(f"raised on rank {rank} of {trace.world_size}, in a simulated world of seed {trace.seed}")
        if getattr(error, "rank", None) is None:
            with suppress(AttributeError, TypeError):  # its class may allow no such thing
                error.rank = rank  # type: ignore[attr-defined]
        return error


def run(
    function: Callable[[Group], T],
    world_size: int,
    seed: int = 0,
    network: NetworkLike = None,
    faults: Faults = None,
    *,
    config: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    check: bool = True,
    keep_messages: bool = True,
) -> Run[T]:
    """Call ``function(group)`` on every rank of a world that lives in this process, on a clock of its own.

    One rank runs at a time; if several could run, the seed decides. The same function, seed, network and faults give
    the same run: the same order, the same times, the same trace.

    Parameters
    ----------
    function
        The program of a rank. It must not depend on chance or on the computer's clock, or the run can not be repeated.
    world_size
        How many ranks.
    seed
        An integer, 0 or more.
    network
        The times of messages; see `oneaccord.api.Network`. Without one they take no time.
    faults
        The faults, and their times.
    config
        The content of a ``oneaccord.toml``; files of the working directory are not read. Seed, network and faults are arguments instead.
        ``backend`` may be ``"hybrid"``, with the simulated one among its routes.
    timeout_s
        Virtual seconds that an operation may last.
    check
        Whether to raise a rank's error. Otherwise `Run.errors` and `Run.cause` hold it.
    keep_messages
        Whether the trace keeps every message, about 150 bytes each; if not, they are counted only.

    Returns
    -------
    Run
        With the results of all ranks.

    Raises
    ------
    UsageError, InvalidWorldSizeError, ConfigError
        The arguments describe no world, or the function is a coroutine's or a generator's.
    DeadlockError
        No rank could continue. The text says where each of them is.
    CommError
        The group failed in a thread that the program started, and no rank raised anything.
    Exception
        The error of ``function`` on the rank that failed first. The other ranks are stopped: their calls on the group raise
        `AbortedError`. The exception has the attributes ``rank`` and ``run``, and a note that names rank and seed.
    """
    __tracebackhide__ = True
    config = _checked(config or {})
    simulation = Simulation(world_size, seed=seed, network=network, faults=faults, keep_messages=keep_messages)

    returned: dict[int, Any] = {}  # also by ranks that could not leave well after that

    def body(rank: int) -> None:
        with init(_backend(config), config=config, timeout_s=timeout_s) as group:
            result = function(group)
            if inspect.iscoroutine(result) or inspect.isgenerator(result):
                result.close()
                name = getattr(function, "__name__", "the function")
                raise UsageError(
                    f"{name} returned a {type(result).__name__}, none of whose lines has run: give a function that runs it, such as "
                    "lambda group: asyncio.run(main(group))"
                )
            returned[rank] = result

    done: Run[Any] = simulation.execute(body, also_threads=True)
    killed = simulation.runtime.killed
    done.results = [None if rank in killed else returned.get(rank) for rank in range(world_size)]
    if check and done.cause is not None:
        with suppress(AttributeError, TypeError):
            done.cause.run = done  # type: ignore[attr-defined]
        raise done.cause
    return done


def _backend(config: Mapping[str, Any]) -> str:
    """Return which backend a config asks for: the simulated one, unless that is a part of another."""
    backend = config.get("backend", "auto")
    return "simulated" if backend == "auto" else str(backend)


def _checked(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuse settings that are for `oneaccord run`, and would change nothing here."""
    backend = _backend(config)
    if backend != "simulated" and not (backend == "hybrid" and _is_composed(config)):
        raise UsageError(
            f"config has backend = {backend!r}, but the ranks of this run are simulated: leave it out, or compose it with 'simulated', as "
            'backend = "hybrid" with routes = { cpu = "simulated", p2p = "tcp" }'
        )
    backends = config.get("backends", {})
    own = backends.get("simulated", {}) if isinstance(backends, Mapping) else {}
    for key in ("seed", "network", "faults", "trace"):
        if isinstance(own, Mapping) and key in own:
            instead = "Run.trace_json() returns the trace" if key == "trace" else f"give it as {key}="
            raise UsageError(f"config has backends.simulated.{key} = {own[key]!r}, which is for `oneaccord run`: {instead}")
    return config


def _is_composed(config: Mapping[str, Any]) -> bool:
    """Return whether the hybrid backend of a config has a simulated part."""
    table: Any = config
    for key in ("backends", "hybrid", "routes"):
        table = table.get(key) if isinstance(table, Mapping) else None
    return isinstance(table, Mapping) and "simulated" in table.values()
