"""Running a function under one seed after the other, until one shows a fault in it."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from oneaccord.api import Group, Network, UsageError, many
from oneaccord_simulated.faults import Fault, FaultPlan
from oneaccord_simulated.running import Faults, NetworkLike, Run, run

__all__ = ["Exploration", "FaultsOfSeed", "explore"]

T = TypeVar("T")

FaultsOfSeed = Faults | Callable[[int], Faults]
"""The faults: the same for every seed, or a function that returns them for a seed."""


class Exploration(Generic[T]):
    """The result of trying seeds. As a text it is a report.

    Attributes
    ----------
    seeds_run
        How many seeds were tried, the one that failed among them.
    seed
        The first seed that failed; None if none did.
    error
        Its error; None likewise.
    run
        The run of that seed; None likewise.
    repeat
        The Python expression that repeats it; empty likewise.
    """

    def __init__(
        self, name: str, seeds_run: int, run: Run[T] | None = None, error: BaseException | None = None, repeat: str = ""
    ) -> None:
        self.seeds_run: int = seeds_run
        self.run: Run[T] | None = run
        self.seed: int | None = None if run is None else run.seed
        self.error: BaseException | None = error
        self.repeat: str = repeat
        self._name = name

    @property
    def failed(self) -> bool:
        """Whether a seed failed."""
        return self.error is not None

    @property
    def story(self) -> str:
        """The end of the trace of the failed run, in lines; empty if none failed."""
        if self.run is None:
            return ""
        trace = self.run.trace
        # If no rank raised an error, all of them have finished, and the last events are not useful.
        return trace.story() if self.error is self.run.cause else trace.story(around=trace.duration_s)

    def __repr__(self) -> str:
        end = "" if self.error is None else f", seed {self.seed} failed: {type(self.error).__name__}"
        return f"<Exploration of {self._name}, {many(self.seeds_run, 'seed')}{end}>"

    def __str__(self) -> str:
        if self.error is None:
            return self._headline()
        return "\n".join([self._headline(), f"{type(self.error).__name__}: {self.error}", *self._particulars()])

    def raise_failure(self) -> None:
        """Raise the error, with the report as a note; do nothing if no seed failed.

        Raises
        ------
        Exception
            See `error`.
        """
        __tracebackhide__ = True
        if self.error is None:
            return
        note = "\n".join([self._headline(), *self._particulars()])
        if note not in getattr(self.error, "__notes__", ()):
            self.error.add_note(note)
        raise self.error

    def _headline(self) -> str:
        if self.error is None:
            return f"{self._name}: {many(self.seeds_run, 'seed')} passed"
        on = ""
        if self.run is not None and self.error is self.run.cause:
            on = f" on rank {getattr(self.error, 'rank', '?')} of {self.run.world_size}"
        return f"{self._name}: {many(self.seeds_run - 1, 'seed')} passed, seed {self.seed} failed{on}"

    def _particulars(self) -> list[str]:
        return ["the end of its trace:", textwrap.indent(self.story.rstrip(), "  "), f"repeat with: {self.repeat}"]


def explore(
    function: Callable[[Group], T],
    world_size: int,
    seeds: Iterable[int] = range(1000),
    network: NetworkLike = None,
    faults: FaultsOfSeed = None,
    *,
    config: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    alike: bool = False,
    check: Callable[[Run[T]], object] | None = None,
    expected: type[BaseException] | tuple[type[BaseException], ...] = (),
) -> Exploration[T]:
    """Run a function under one seed after the other; stop at the first that fails.

    A seed decides which rank goes first if several could, and which of its threads if a rank's program has several, so that other seeds
    find other orders of events.

    Parameters
    ----------
    function, world_size, network, config, timeout_s
        As for `run`.
    seeds
        The seeds, in the order in which they are tried.
    faults
        As for `run`, or a function that returns them for a seed: ``lambda seed: random_faults(seed, 4)``.
    alike
        Whether a seed fails, too, if its results are not those of the first one, bit by bit.
    check
        Called with every run that is not a failure already. An exception from it is one.
    expected
        Errors that are not failures when they end a run, such as `PeerLostError` if faults kill ranks. The results of such a run are not
        compared.

    Returns
    -------
    Exploration
        With the first seed that failed, if one did: nothing is raised for that, unless you call its ``raise_failure()``.

    Raises
    ------
    UsageError
        There is no seed, or one is no integer.
    UsageError, InvalidWorldSizeError, ConfigError
        The arguments describe no world.
    """
    if not isinstance(seeds, Iterable):
        raise UsageError(f"seeds is {seeds!r}; expected several, such as range(100)")
    given: dict[str, object] = {"network": network, "config": config, "timeout_s": timeout_s}
    resolved = Network.resolve(network)
    fixed = FaultPlan() if callable(faults) else _plan(faults)
    name = _name(function)
    first: tuple[int, list[T]] | None = None
    count = 0
    for seed in seeds:
        count += 1
        plan = _plan(faults(seed)) if callable(faults) else fixed
        done = run(function, world_size, seed, resolved, plan, config=config, timeout_s=timeout_s, check=False)
        error = done.cause if not isinstance(done.cause, expected) else None
        if error is None and check is not None:
            error = _raised_by(check, done)
        if error is None and alike and done.cause is None:
            first = first or (seed, done.results)
            error = _unlike(first, done)
        if error is not None:
            given["faults"] = faults if isinstance(faults, str | os.PathLike) else plan if plan.faults else None
            return Exploration(name, count, done, error, _call(name, world_size, seed, given))
        del done  # or it lives on while the next one runs
    if not count:
        raise UsageError("seeds is empty; expected one seed or more: nothing was run")
    return Exploration(name, count)


def _plan(faults: Faults) -> FaultPlan:
    """Return the plan that is meant: files are read and iterators consumed but once."""
    return FaultPlan.load(faults) if isinstance(faults, str | os.PathLike) else FaultPlan.of(() if faults is None else faults)


def _raised_by(check: Callable[[Run[T]], object], done: Run[T]) -> BaseException | None:
    try:
        check(done)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - any exception is the failure, also pytest.fail's, which is not an Exception
        return error
    return None


def _unlike(first: tuple[int, list[T]], done: Run[T]) -> AssertionError | None:
    seed, results = first
    for rank, (before, now) in enumerate(zip(results, done.results, strict=True)):
        if difference := _difference(before, now, "result"):
            return AssertionError(f"seed {done.seed} gives other results than seed {seed}: on rank {rank}, {difference}")
    return None


# The command that runs it again


def _name(function: Callable[..., object]) -> str:
    """Return the name of a function in the program; a substitute if it has none."""
    name = getattr(function, "__name__", "")
    return name if name.isidentifier() or name.startswith("lambda ") else "function"


def _call(name: str, world_size: int, seed: int, given: Mapping[str, object]) -> str:
    """Return the call that repeats a run."""
    more = "".join(f", {key}={_literal(value)}" for key, value in given.items() if value is not None)
    return f"run({name}, {world_size}, seed={seed}{more})"


def _literal(value: object) -> str:
    if isinstance(value, FaultPlan):
        return f"[{', '.join(map(_literal, value.faults))}]"
    if isinstance(value, Fault):  # what it requires has no default, and is always written
        rows = value.model_dump(exclude_defaults=True).items()
        return f"{type(value).__name__}({', '.join(f'{key}={each!r}' for key, each in rows)})"
    return repr(os.fspath(value) if isinstance(value, os.PathLike) else value)


# The place at which two results differ


def _difference(before: Any, now: Any, where: str) -> str | None:
    """Return the place and the kind of a difference between two values; None if they are alike bit by bit."""
    if type(before) is not type(now):
        return f"{where} is {_brief(now)}, and was {_brief(before)}"
    if isinstance(before, np.ndarray | np.generic | float | complex):
        return _of_arrays(np.asarray(before), np.asarray(now), where)
    if isinstance(before, Mapping):
        if before.keys() != now.keys():
            return f"{where} has the keys {_brief(list(now))}, and had {_brief(list(before))}"
        return _of_parts([(before[key], now[key], f"{where}[{key!r}]") for key in before])
    if isinstance(before, list | tuple):
        if len(before) != len(now):
            return f"{where} has the length {len(now)}, and had {len(before)}"
        return _of_parts([(*pair, f"{where}[{index}]") for index, pair in enumerate(zip(before, now, strict=True))])
    if is_dataclass(before):
        names = [each.name for each in fields(before)]
        return _of_parts([(getattr(before, name), getattr(now, name), f"{where}.{name}") for name in names])
    if before == now:
        return None
    return f"{where} is {_brief(now)}, and was {_brief(before)}"


def _of_parts(parts: Iterable[tuple[Any, Any, str]]) -> str | None:
    return next(filter(None, (_difference(*part) for part in parts)), None)


def _of_arrays(before: NDArray[Any], now: NDArray[Any], where: str) -> str | None:
    if (before.dtype, before.shape) != (now.dtype, now.shape):
        return f"{where} is {now.dtype}{list(now.shape)}, and was {before.dtype}{list(before.shape)}"
    if before.dtype.hasobject:
        return _difference(before.tolist(), now.tolist(), where)
    rows = [np.frombuffer(each.tobytes(), np.uint8).reshape(before.size, before.itemsize) for each in (before, now)]
    wrong = (rows[0] != rows[1]).any(axis=1)
    if not wrong.any():
        return None
    place = np.unravel_index(int(wrong.argmax()), before.shape)
    at = f"[{', '.join(map(str, place))}]" if place else ""
    values = [repr(each[place].item()) for each in (now, before)]
    if values[0] == values[1]:  # such as two kinds of NaN
        values = [f"{value} (0x{each[place].tobytes().hex()})" for value, each in zip(values, (now, before), strict=True)]
    of_all = f" ({int(wrong.sum())} of {before.size} elements differ)" if before.size > 1 else ""
    return f"{where}{at} is {values[0]}, and was {values[1]}{of_all}"


def _brief(value: object) -> str:
    return textwrap.shorten(repr(value), 80, placeholder=" ...")
