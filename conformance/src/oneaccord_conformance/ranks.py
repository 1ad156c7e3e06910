"""The functions for programs of checks: how a call ended, another group of the same ranks, and words for the check."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import oneaccord as oa
from oneaccord_conformance.patience import TIMEOUT_S

__all__ = ["HERE", "Here", "Outcome", "Program", "came_late", "ending", "join", "outcome_of", "tell", "until_failed"]

Program = Callable[..., Any]
"""``program(group, **facts)``: a function of a module, which runs on every rank. Its facts and its result are plain data, as JSON has it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call or of a program on one rank.

    Attributes
    ----------
    value
        The returned value.
    errors
        The names of the class of the exception and of that class's bases, the class first; empty if it returned.
    text
        The words of the error.
    peer
        The rank that the error names; None if it names none.
    took_s
        How many seconds it lasted.
    ended
        When it ended, by `time.monotonic`, which the processes of a host share.
    trace
        The traceback.
    """

    value: Any = None
    errors: tuple[str, ...] = ()
    text: str = ""
    peer: int | None = None
    took_s: float = 0.0
    ended: float = 0.0
    trace: str = ""

    @property
    def error(self) -> str:
        """The name of the error's class; empty if there was none."""
        return self.errors[0] if self.errors else ""

    def __str__(self) -> str:
        if not self.errors:
            return f"returned {self.value!r} after {self.took_s:.2f} s"
        return f"raised {self.error} after {self.took_s:.2f} s: {self.text}"


def outcome_of(call: Callable[[], Any]) -> tuple[Outcome, BaseException | None]:
    """Make a call; return its result, and its exception."""
    began = time.monotonic()
    try:
        value = call()
    except BaseException as error:  # noqa: BLE001 - the check gets any exception
        ended = time.monotonic()
        names = tuple(kind.__name__ for kind in type(error).__mro__)
        peer = getattr(error, "peer", None)
        trace = "".join(traceback.format_exception(error))
        return Outcome(None, names, str(error), peer, ended - began, ended, trace), error
    ended = time.monotonic()
    return Outcome(value, took_s=ended - began, ended=ended), None


def ending(call: Callable[[], Any]) -> dict[str, Any]:
    """Make a call; return how it ended, as the facts of an `Outcome` that a program can return.

    A result that is an array is left out.
    """
    outcome, error = outcome_of(call)
    if error is not None and not isinstance(error, Exception):
        raise error
    value = outcome.value if isinstance(outcome.value, bool | int | float | str | list | None) else None
    return {
        "value": value,
        "errors": outcome.errors,
        "text": outcome.text,
        "peer": outcome.peer,
        "took_s": outcome.took_s,
        "ended": outcome.ended,
        "trace": outcome.trace,
    }


@dataclass(frozen=True, slots=True)
class Here:
    """A rank of a world of the suite.

    Attributes
    ----------
    backend, config, timeout_s
        The settings of its groups.
    say
        Gives a word to the check.
    """

    backend: str | None
    config: Mapping[str, Any] | str | None
    timeout_s: float
    say: Callable[[str], None]

    def join(self, timeout_s: float | None = None) -> oa.Group:
        """Make a group of all ranks."""
        return oa.init(self.backend, config=self.config, timeout_s=self.timeout_s if timeout_s is None else timeout_s)


HERE: ContextVar[Here] = ContextVar("oneaccord_conformance_here")
"""The rank that the calling thread is."""


def join(timeout_s: float | None = None) -> oa.Group:
    """Make another group of all ranks of this world, as `oneaccord.init` does; the group before must have been closed."""
    return HERE.get().join(timeout_s)


def until_failed(group: oa.Group, patience_s: float = TIMEOUT_S) -> None:
    """Wait until a group knows that its job has failed, without a call on it; return after the patience all the same."""
    limit = time.monotonic() + patience_s
    while "failed" not in repr(group) and time.monotonic() < limit:
        oa.sleep(0.005)


def came_late(endings: Iterable[Mapping[str, Any] | None], timeout_s: float) -> set[int]:
    """Return which ranks began a call when the timeout of the first one was half over: such a rank had no processor, and may be named as late.

    Parameters
    ----------
    endings
        The result of `ending` on each rank; None for one that is not examined.
    timeout_s
        The timeout of the call.
    """
    began = {rank: each["ended"] - each["took_s"] for rank, each in enumerate(endings) if each is not None}
    return {rank for rank, each in began.items() if each - min(began.values()) > timeout_s / 2}


def tell(word: str) -> None:
    """Send a word to the check; see `ProcessJob.told`."""
    HERE.get().say(word)
