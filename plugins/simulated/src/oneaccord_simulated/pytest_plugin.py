"""The fixture ``world`` for pytest, and failures of ranks that read like those of any other test.

pytest imports this in every project of an environment in which it is installed, so it loads the simulated world only for a test that
needs one.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Generator, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from oneaccord.api import Group
    from oneaccord_simulated.exploring import Exploration, FaultsOfSeed
    from oneaccord_simulated.running import NetworkLike, Run

__all__ = ["World", "Worlds", "pytest_addoption", "pytest_report_header", "pytest_runtest_makereport", "world"]

_OPTION = "--oneaccord-seed"
_OURS = frozenset({"oneaccord", "oneaccord_simulated"})


class Worlds:
    """Makes the worlds of one test: the value of the fixture ``world``.

    Attributes
    ----------
    seed
        The seed of the command line; None if it has none.
    repeat_seed
        The seed that repeats the last run of the test; None if the command line does not matter to it.
    is_used
        Whether a world of the test was used.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed: int | None = seed
        self.repeat_seed: int | None = None
        self.is_used: bool = False

    def __repr__(self) -> str:
        return "<worlds of simulated ranks>"

    def __call__(
        self,
        world_size: int,
        *,
        network: NetworkLike = None,
        faults: FaultsOfSeed = None,
        timeout_s: float | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> World:
        """Return a world of so many ranks; the other arguments hold for all its runs, unless a run overrides them.

        Parameters
        ----------
        world_size, network, timeout_s, config
            As for `oneaccord_simulated.run`.
        faults
            As for `oneaccord_simulated.explore`.
        """
        return World(self, world_size, {"network": network, "faults": faults, "timeout_s": timeout_s, "config": config})


class World:
    """A number of simulated ranks, on which functions are run; each run has a world of its own."""

    def __init__(self, worlds: Worlds, world_size: int, defaults: Mapping[str, Any]) -> None:
        self.world_size: int = world_size
        self._worlds = worlds
        self._defaults = defaults

    def __repr__(self) -> str:
        return f"<world of {self.world_size} simulated ranks>"

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        seed: int | None = None,
        network: NetworkLike = None,
        faults: FaultsOfSeed = None,
        timeout_s: float | None = None,
        config: Mapping[str, Any] | None = None,
        check: bool = True,
        **kwargs: Any,
    ) -> Run[Any]:
        """Call ``function(group, *args, **kwargs)`` on every rank.

        Parameters
        ----------
        function, args, kwargs
            The program of a rank, and its arguments besides its group; pass an argument with one of the names below in a ``lambda``.
        seed
            An integer, 0 or more. By default the value of ``--oneaccord-seed``, and 0 without it.
        network, faults, timeout_s, config
            As for `oneaccord_simulated.run`; None is the world's own. ``faults`` may be a function, which is given the seed.
        check
            Whether to raise a rank's error.

        Returns
        -------
        Run
            With the results of all ranks, and the trace.

        Raises
        ------
        Exception
            As `oneaccord_simulated.run` does.
        """
        __tracebackhide__ = True
        from oneaccord_simulated.running import run

        worlds = self._worlds
        worlds.is_used = True
        if seed is None:
            seed = worlds.repeat_seed = worlds.seed or 0
        given = self._given(network=network, faults=faults, timeout_s=timeout_s, config=config)
        if callable(given["faults"]):
            given["faults"] = given["faults"](seed)
        return run(_bound(function, args, kwargs), self.world_size, seed, check=check, **given)

    def explore(
        self,
        function: Callable[..., Any],
        *args: Any,
        seeds: Iterable[int] = range(1000),
        network: NetworkLike = None,
        faults: FaultsOfSeed = None,
        timeout_s: float | None = None,
        config: Mapping[str, Any] | None = None,
        alike: bool = False,
        check: Callable[[Run[Any]], object] | None = None,
        expected: type[BaseException] | tuple[type[BaseException], ...] = (),
        **kwargs: Any,
    ) -> Exploration[Any]:
        """Call ``function(group, *args, **kwargs)`` on every rank, under one seed after the other.

        If ``--oneaccord-seed`` gives a seed, it comes right after the first.

        Parameters
        ----------
        function, args, kwargs
            The program of a rank, and its arguments besides its group.
        seeds, alike, check, expected
            As for `oneaccord_simulated.explore`.
        network, faults, timeout_s, config
            Likewise; None is the world's own.

        Returns
        -------
        Exploration
            How many seeds passed.

        Raises
        ------
        Exception
            The error of the first seed that failed, with the report as a note.
        """
        __tracebackhide__ = True
        from oneaccord_simulated.exploring import explore

        worlds = self._worlds
        worlds.is_used = True
        given = self._given(network=network, faults=faults, timeout_s=timeout_s, config=config)
        bound = _bound(function, args, kwargs)
        seeds = seeds if worlds.seed is None else _sooner(worlds.seed, seeds)
        exploration = explore(bound, self.world_size, seeds, alike=alike, check=check, expected=expected, **given)
        if exploration.failed:
            worlds.repeat_seed = exploration.seed
        exploration.raise_failure()
        return exploration

    def _given(self, **given: Any) -> dict[str, Any]:
        return {key: self._defaults[key] if value is None else value for key, value in given.items()}


def _bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Group], Any]:
    if not args and not kwargs:
        return function

    def bound(group: Group) -> Any:
        return function(group, *args, **kwargs)

    given = [*map(_brief, args), *(f"{key}={_brief(value)}" for key, value in kwargs.items())]
    bound.__name__ = f"lambda group: {getattr(function, '__name__', 'function')}(group, {', '.join(given)})"
    return bound


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 and "\n" not in text else "..."


def _sooner(seed: int, seeds: Iterable[int]) -> Iterable[int]:
    """Yield the seeds, but one of them right after the first, with which others may be compared."""
    rest = iter(seeds)
    for first in rest:
        yield first
        if first != seed:
            yield seed
        yield from (each for each in rest if each != seed)


# The functions that pytest calls

_WORLDS = pytest.StashKey[Worlds]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--oneaccord-seed``."""
    parser.getgroup("oneaccord").addoption(
        _OPTION,
        type=_seed,
        metavar="N",
        help="the seed of simulated worlds whose test gives none (0), and one that explorations try soon",
    )


def _seed(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed: expected an integer, 0 or more")
    return int(text)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return a line with the given seed."""
    seed = config.getoption(_OPTION)
    return [] if seed is None else [f"oneaccord: seed {seed}"]


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Worlds:
    """Worlds of simulated ranks: ``world(4).run(function)`` calls ``function(group)`` on each of four."""
    worlds = Worlds(request.config.getoption(_OPTION))
    request.node.stash[_WORLDS] = worlds
    return worlds


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let the failure of a test that used a world show the test's own lines alone, and say how to repeat it."""
    worlds = item.stash.get(_WORLDS, None)
    if worlds is not None and worlds.is_used and call.excinfo is not None:
        error = call.excinfo.value
        option = "" if worlds.repeat_seed is None else f" {_OPTION}={worlds.repeat_seed}"
        error.add_note(f"repeat with: pytest {shlex.quote(_node(item))}{option}")
        if not item.config.getoption("fulltrace"):
            _shorten(error)
            call.excinfo = pytest.ExceptionInfo.from_exception(error)
    return (yield)


def _node(item: pytest.Item) -> str:
    """Return the test as one names it from the working directory."""
    file, separator, name = item.nodeid.partition("::")
    path = os.path.relpath(item.config.rootpath / file, item.config.invocation_params.dir)
    return f"{path}{separator}{name}"


# Tracebacks


def _shorten(error: BaseException) -> None:
    """Remove our frames from the tracebacks of an error and of those that led to it."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = _users_part(each)
        waiting += [each.__cause__, each.__context__]


def _users_part(error: BaseException) -> TracebackType | None:
    """Return the traceback without our lines, save those that an unforeseen error comes from."""
    entries: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    theirs = [not _is_ours(entry) for entry in entries]
    if not any(theirs):
        return error.__traceback__
    last = len(entries) - theirs[::-1].index(True)
    shown = [entry for entry, is_theirs in zip(entries, theirs, strict=True) if is_theirs]
    if not _is_told(error):
        shown += entries[last:]
    kept: TracebackType | None = None
    for entry in reversed(shown):
        kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _is_ours(entry: TracebackType) -> bool:
    return str(entry.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in _OURS


def _is_told(error: BaseException) -> bool:
    """Return whether an error itself explains the fault of the program: those of oneaccord do, except for bugs."""
    from oneaccord.api import InternalError, OneAccordError

    return isinstance(error, OneAccordError) and not isinstance(error, InternalError)
