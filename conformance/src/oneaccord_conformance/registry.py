"""The class of a check, and the list of all."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from oneaccord import UsageError

if TYPE_CHECKING:
    from oneaccord_conformance.worlds import WorldMaker

__all__ = ["CHAPTERS", "Check", "all_checks", "check", "choose"]

CHAPTERS: Final[dict[str, str]] = {
    "transport": "the transport by itself, without core",
    "bytes": "every collective, dtype, reduction, size and layout gives exact values",
    "messages": "sends and receives keep values and order",
    "tags": "messages with tags: any sender, any number on the way, probes and threads",
    "windows": "one-sided calls: elements, atomic changes, locks and epochs",
    "async": "calls in the background",
    "groups": "groups of some of the ranks",
    "threads": "several threads of a rank",
    "mismatches": "all ranks learn that they do not make the same call",
    "deadlines": "a late rank is named in time",
    "close": "leaving a group in every state",
    "leaks": "nothing is left behind",
    "death": "a lost rank is named on every other",
    "speed": "calls reach a sane share of the machine's speed",
    "device": "arrays on GPUs",
}
"""The chapters with their subjects, in the order in which they run: the ones on which others rely come first. A chapter is a module of `oneaccord_conformance.chapters`."""

NEEDS: Final[dict[str, str]] = {
    "cpu": "it does not move the memory of the host: Backend.memory",
    "cuda": "it does not move the memory of GPUs: Backend.memory",
    "clock": "its spec declares 'virtual time'",
    "processes": "its ranks are not processes: its spec declares 'virtual time'",
    "threads": "its ranks live in processes of their own, which have ended then",
}
"""The needs of a check, and why a backend lacks them."""


@dataclass(frozen=True, slots=True)
class Check:
    """One promise of the contract, and the function that examines whether a backend keeps it.

    Attributes
    ----------
    name
        The function's name without ``check_``.
    chapter
        One of `CHAPTERS`.
    promise
        One line: the first line of the function's docstring.
    needs
        The properties that the backend must have declared; it is skipped on others. See `NEEDS`.
    run
        The function: raises AssertionError, or an error of oneaccord, if the promise is broken.
    """

    name: str
    chapter: str
    promise: str
    needs: tuple[str, ...]
    run: Callable[[WorldMaker], None]

    @property
    def title(self) -> str:
        """The chapter and the name: ``"bytes.all_reduce"``."""
        return f"{self.chapter}.{self.name}"


_registered: dict[str, Check] = {}


def check(*, chapter: str, needs: str = "cpu") -> Callable[[Callable[[WorldMaker], None]], Callable[[WorldMaker], None]]:
    """Make a function ``check_NAME(worlds)`` a check of the suite.

    Parameters
    ----------
    chapter
        One of `CHAPTERS`.
    needs
        Words of `NEEDS` with spaces between them: the check is skipped if the backend has not declared them.

    Raises
    ------
    ValueError
        The function is no check: its name, chapter, needs or docstring is wrong, or another check has its name.
    """

    def register(function: Callable[[WorldMaker], None]) -> Callable[[WorldMaker], None]:
        name = function.__name__.removeprefix("check_")
        promise = (function.__doc__ or "").partition("\n")[0]
        wanted = tuple(needs.split())
        if name == function.__name__ or not promise or chapter not in CHAPTERS or not set(wanted) <= NEEDS.keys():
            raise ValueError(f"{function.__name__}: expected check_NAME, a docstring, a chapter and needs that there are")
        made = Check(name, chapter, promise, wanted, function)
        if made.title in _registered:
            raise ValueError(f"two checks have the name {made.title}")
        _registered[made.title] = made
        return function

    return register


def all_checks() -> list[Check]:
    """Return all checks of the suite, in the order in which they run."""
    for chapter in CHAPTERS:
        importlib.import_module(f"oneaccord_conformance.chapters.{chapter}_")
    order = list(CHAPTERS)
    return sorted(_registered.values(), key=lambda each: order.index(each.chapter))


def choose(chapters: list[str], only: list[str]) -> list[Check]:
    """Return the checks of some chapters, and of those the ones that are named; all if a list is empty.

    Parameters
    ----------
    chapters
        Names of chapters.
    only
        Names of checks, ``all_reduce`` or ``bytes.all_reduce``.

    Raises
    ------
    UsageError
        There is no such chapter or check.
    """
    found = all_checks()
    for name in chapters:
        if name not in CHAPTERS:
            raise UsageError(f"there is no chapter {name!r}; there are {', '.join(CHAPTERS)}")
    for name in only:
        if not any(name in (each.name, each.title) for each in found):
            raise UsageError(f"there is no check {name!r}; `oneaccord check --list` names all")
    return [
        each
        for each in found
        if (not chapters or each.chapter in chapters) and (not only or each.name in only or each.title in only)
    ]
