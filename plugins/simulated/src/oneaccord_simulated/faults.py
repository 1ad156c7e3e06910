"""The faults of a simulated world, with their times: plans as plain data, read from TOML files, or written by hand.

A plan is only data: the scheduler of the simulated world carries it out, and asks `Links` for each message. All times are
seconds of the virtual clock, all counts begin at 0, and a fault that lasts holds from ``from_s`` on, up to and without ``until_s``.

>>> plan = FaultPlan.of([Kill(rank=2, operation="all_reduce", nth=3), Cut(links=((0, 1),), from_s=0.5, until_s=2)])
>>> for fault in plan.faults:
...     print(fault.describe())
rank 2 is killed at all_reduce #3
the link 0-1 is cut from 0.5 s to 2 s
>>> plan.links(4).cut_until(1, 0, now_s=0.75)
2.0
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import math
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeAlias, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import ErrorDetails

from oneaccord.api import OPERATIONS, ConfigError, UsageError

__all__ = [
    "KINDS",
    "Corrupt",
    "Cut",
    "Delay",
    "Drop",
    "Fault",
    "FaultPlan",
    "Kill",
    "Links",
    "Partition",
    "Pause",
    "Slow",
    "When",
    "hint",
]


def _only(fits: Callable[[Any], bool], expected: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        if fits(value):
            return value
        raise ValueError(f"expected {expected}")

    return BeforeValidator(check)


def _operation(value: Any) -> Any:
    if value is None or value == "*" or value in OPERATIONS:
        return value
    raise ValueError(f"there is no such operation{hint(str(value), sorted(OPERATIONS))}, or '*' for any")


def _array(least: int, expected: str) -> BeforeValidator:
    return _only(lambda it: isinstance(it, tuple | list) and len(it) >= least, expected)


# Strict, because pydantic would otherwise take true for 1 and "2" for 2.
_Count = Annotated[int, Field(strict=True, ge=0)]
_Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
_SecondsOrInf = Annotated[float, Field(strict=True, ge=0)]
_Operation = Annotated[str | None, BeforeValidator(_operation)]
_End = Annotated[int | Literal["*"], _only(lambda it: it == "*" or (type(it) is int and it >= 0), "a rank, 0 or more, or '*'")]
_Link = Annotated[tuple[_End, _End], _array(2, "a pair of ranks, such as [0, 1] or [2, '*']")]
_Side = Annotated[tuple[_Count, ...], _array(1, "an array of ranks, such as [0, 1]")]


class _Model(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    if not TYPE_CHECKING:  # checkers know the arguments of a model from its fields

        def __init__(self, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise _refused(type(self), error) from None

        # So pydantic leaves it alone if a model is a part of a file, whose errors name the place there.
        __init__.__pydantic_base_init__ = True


class _OfRank(_Model):
    rank: _Count


class _Lasting(_Model):
    from_s: _Seconds = 0.0
    until_s: _SecondsOrInf = math.inf

    @model_validator(mode="after")
    def _check_order(self) -> _Lasting:
        if self.until_s <= self.from_s:
            raise ValueError(f"from_s is {self.from_s} and until_s {self.until_s}; expected an end after the beginning")
        return self

    def _while(self) -> str:
        if self.until_s == math.inf:
            return f"from {_seconds(self.from_s)} on" if self.from_s else "all the time"
        return f"{f'from {_seconds(self.from_s)} to' if self.from_s else 'until'} {_seconds(self.until_s)}"


class _OfLinks(_Lasting):
    links: Annotated[tuple[_Link, ...], _array(1, "an array of pairs of ranks, such as [[0, 1]]")]

    def _name(self) -> str:
        return f"link{'s' * (len(self.links) > 1)} {', '.join(f'{a}-{b}' for a, b in self.links)}"


class _OfMessage(_Model):
    source: _Count
    dest: _Count
    nth: _Count = 0

    def _name(self) -> str:
        return f"message #{self.nth} from rank {self.source} to rank {self.dest}"


class When(_Model):
    """A moment in the life of a rank: a virtual time, or one of its calls. Exactly one of ``at_s`` and ``operation`` is given.

    Attributes
    ----------
    at_s
        The virtual time in seconds.
    operation
        The operation that it calls, such as ``"all_reduce"`` or ``"send"``; ``"*"`` for any.
    nth
        Which of the rank's calls of that operation, counted from 0; with ``"*"``, which of all its calls.
    """

    at_s: _Seconds | None = None
    operation: _Operation = None
    nth: _Count = 0

    @model_validator(mode="after")
    def _check_one(self) -> When:
        if (self.at_s is None) == (self.operation is None):
            raise ValueError(f"at_s is {self.at_s} and operation {self.operation!r}; expected exactly one of them")
        if self.operation is None and self.nth:
            raise ValueError(f"nth is {self.nth}; expected an operation whose calls it counts")
        return self

    def _moment(self) -> str:
        if self.at_s is not None:
            return f"at {_seconds(self.at_s)}"
        return f"at its call #{self.nth}" if self.operation == "*" else f"at {self.operation} #{self.nth}"


class Kill(When, _OfRank):
    """The rank ``rank`` is gone at once, as by ``kill -9``; `When` gives the moment."""

    def describe(self) -> str:
        """Return one line for people, such as ``"rank 2 is killed at all_reduce #3"``."""
        return f"rank {self.rank} is killed {self._moment()}"


class Pause(When, _OfRank):
    """The rank ``rank`` stops, as by ``SIGSTOP``; `When` gives the moment.

    Attributes
    ----------
    for_s
        The seconds for which it stops; ``inf``, the default, is forever.
    """

    for_s: _SecondsOrInf = math.inf

    def describe(self) -> str:
        """Return one line, such as ``"rank 2 stands still at 0.5 s forever"``."""
        length = "ever" if self.for_s == math.inf else _seconds(self.for_s)
        return f"rank {self.rank} stands still {self._moment()} for {length}"


class Slow(_Lasting, _OfRank):
    """The rank ``rank`` is a straggler from ``from_s`` to ``until_s``, by default all the time.

    Attributes
    ----------
    factor
        How many times as long all takes that it declares as computing; above 0, and below 1 it is faster than the others.
    """

    factor: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]

    def describe(self) -> str:
        """Return one line for people, such as ``"rank 2 computes for 4 times as long until 2 s"``."""
        return f"rank {self.rank} computes for {self.factor:.15g} times as long {self._while()}"


class Cut(_OfLinks):
    """Messages on some links wait until the link is whole again: cut from ``from_s`` to ``until_s``, by default all the time.

    Attributes
    ----------
    links
        Pairs of ranks, both directions of each; a rank may be ``"*"`` for all others.
    """

    def describe(self) -> str:
        """Return one line for people, such as ``"the links 0-1, 2-* are cut from 0.5 s to 2 s"``."""
        return f"the {self._name()} {'are' if len(self.links) > 1 else 'is'} cut {self._while()}"


class Delay(_OfLinks):
    """Messages that leave on some ``links``, as in `Cut`, from ``from_s`` to ``until_s``, by default all the time, take longer.

    Attributes
    ----------
    by_s
        How many seconds longer each message takes.
    """

    by_s: _Seconds

    def describe(self) -> str:
        """Return one line for people, such as ``"messages on the link 0-1 take 0.25 s longer all the time"``."""
        return f"messages on the {self._name()} take {_seconds(self.by_s)} longer {self._while()}"


class Partition(_Lasting):
    """The links between ranks of different sides are cut from ``from_s`` until ``until_s``, when the world heals; by default never.

    Attributes
    ----------
    sides
        Two or more groups of ranks that have no rank in common. Ranks that stand in none form one more side together.
    """

    sides: Annotated[tuple[_Side, ...], _array(2, "an array of two or more sides, such as [[0, 1], [2]]")]

    @model_validator(mode="after")
    def _check_sides(self) -> Partition:
        for rank, times in Counter(rank for side in self.sides for rank in side).items():
            if times > 1:
                raise ValueError(f"rank {rank} is in the sides {times} times; expected once")
        return self

    def describe(self) -> str:
        """Return one line for people, such as ``"the sides 0,1 | 2,3 are cut off from each other and all others until 2 s"``."""
        sides = " | ".join(",".join(map(str, side)) for side in self.sides)
        return f"the sides {sides} are cut off from each other and all others {self._while()}"


class Drop(_OfMessage):
    """The ``nth`` message from ``source`` to ``dest``, counted from 0, is lost on the way."""

    def describe(self) -> str:
        """Return one line for people, such as ``"message #3 from rank 0 to rank 1 is lost"``."""
        return f"{self._name()} is lost"


class Corrupt(_OfMessage):
    """The ``nth`` message from ``source`` to ``dest``, counted from 0, arrives with a flipped bit.

    Attributes
    ----------
    bit
        Which bit of the payload, counted from 0; None for one that the run's seed chooses.
    """

    bit: _Count | None = None

    def describe(self) -> str:
        """Return one line for people, such as ``"bit 7 of message #3 from rank 0 to rank 1 is flipped"``."""
        return f"{'a bit' if self.bit is None else f'bit {self.bit}'} of {self._name()} is flipped"


Fault: TypeAlias = Kill | Pause | Slow | Cut | Delay | Partition | Drop | Corrupt
KINDS: Final[dict[str, type[Fault]]] = {model.__name__.lower(): model for model in get_args(Fault)}
_KIND_OF: Final[dict[type, str]] = {model: kind for kind, model in KINDS.items()}


# A plan as its file has it: an array of tables for each kind.
_TABLES: Final[dict[str, Any]] = {kind: (GenericAlias(tuple, (model, ...)), ()) for kind, model in KINDS.items()}
_File: Final[Any] = create_model("_File", __base__=_Model, summary=(str, ""), **_TABLES)


def _in_order(faults: Any) -> tuple[Fault, ...]:
    """Return the faults by kind, as a file has them, and within a kind as they were given."""
    # A model would iterate over its fields, and a text over its letters.
    given: tuple[Any, ...] = (
        (faults,) if isinstance(faults, BaseModel | str) or not isinstance(faults, Iterable) else (*faults,)
    )
    for fault in given:
        if type(fault) not in _KIND_OF:
            raise UsageError(
                f"{fault!r} is not a fault: expected faults such as Kill(rank=1, at_s=0.5); FaultPlan.load reads a file"
            )
    return tuple(sorted(given, key=lambda fault: [*_KIND_OF].index(type(fault))))


class FaultPlan(_Model):
    """All that goes wrong in one run.

    Attributes
    ----------
    summary
        One line for people.
    faults
        The faults, ordered by kind as a file has them, and within a kind as they were given.
    """

    summary: str = ""
    faults: Annotated[tuple[Fault, ...], BeforeValidator(_in_order)] = ()

    @classmethod
    def of(cls, faults: FaultPlan | Fault | Iterable[Fault]) -> FaultPlan:
        """Return a plan of the argument: a plan, which stays as it is, a fault, or several.

        Raises
        ------
        UsageError
            Something else is given.
        """
        return faults if isinstance(faults, FaultPlan) else cls(faults=_in_order(faults))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FaultPlan:
        """Read a plan from a TOML file, which has an array of tables for each kind of fault: ``[[kill]]``, ``[[cut]]``, ...

        Raises
        ------
        ConfigError
            The file cannot be read, is not TOML, or does not describe a plan; ``file``, ``key`` and ``value`` name the first fault.
        """
        file = str(path)
        try:
            read = _File.model_validate(tomllib.loads(Path(path).read_text(encoding="utf-8")))
        except ValidationError as error:
            raise _as_error(error, file) from None
        except OSError as error:
            raise ConfigError(f"the fault plan {file!r} cannot be read: {error.strerror or error}", file=file) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}: the fault plan cannot be read as TOML: {error}", file=file) from None
        return cls(summary=read.summary, faults=tuple(fault for kind in KINDS for fault in getattr(read, kind)))

    def to_toml(self) -> str:
        """Return the plan as the text of a file from which `load` reads an equal plan."""
        tables = [f"summary = {_toml(self.summary)}\n"] if self.summary else []
        for fault in self.faults:
            # The required keys of a model have no default, so that they are always written.
            rows = fault.model_dump(exclude_defaults=True).items()
            tables.append(f"[[{_KIND_OF[type(fault)]}]]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in rows))
        return "\n".join(tables)

    def check(self, world_size: int) -> None:
        """Check that the plan fits a world: its ranks are there, and no link or message leads from a rank to itself.

        Raises
        ------
        ConfigError
            It does not fit; ``key`` names the first such fault as a file would, and ``value`` is the rank or the pair.
        """
        # Faults of a kind stand together.
        for kind, faults in itertools.groupby(self.faults, lambda fault: _KIND_OF[type(fault)]):
            for index, fault in enumerate(faults):
                if wrong := _misfit(fault, world_size):
                    key, (value, words) = f"{kind}[{index}]", wrong
                    raise ConfigError(f"{key}: {fault.describe()}: {words}", key=key, value=value)

    def links(self, world_size: int) -> Links:
        """Return the faults for each message of a world.

        Raises
        ------
        ConfigError
            The plan does not fit the world; see `check`.
        """
        self.check(world_size)
        return Links(self)


def _misfit(fault: Fault, world_size: int) -> tuple[object, str] | None:
    """Return the faults that do not fit a world, with the reasons."""
    match fault:
        case Cut() | Delay():
            named: Iterable[tuple[_End, ...]] = fault.links
        case Partition():
            named = fault.sides
        case Drop() | Corrupt():
            named = [(fault.source, fault.dest)]
        case _:
            named = [(fault.rank,)]
    for ranks in named:
        for rank in ranks:
            if rank != "*" and rank >= world_size:
                return rank, f"a world of {world_size} has no rank {rank}; expected one from 0 to {world_size - 1}"
        if len(ranks) == 2 and ranks[0] == ranks[1] != "*":
            return ranks, f"rank {ranks[0]} has no link to itself; expected two ranks"
    return None


class Links:
    """The effect of a plan on the links of a world; `FaultPlan.links` makes it.

    Attributes
    ----------
    any
        Whether the plan does anything to any link.
    changes
        The times at which something is cut or heals: sorted, each once, and finite.
    """

    def __init__(self, plan: FaultPlan) -> None:
        cuts = [(fault, _touches(fault)) for fault in plan.faults if isinstance(fault, Cut | Partition)]
        delays = [(fault, _touches(fault)) for fault in plan.faults if isinstance(fault, Delay)]
        times = {time for fault, _ in cuts for time in (fault.from_s, fault.until_s)}
        self.any: bool = bool(cuts or delays)
        self.changes: tuple[float, ...] = tuple(sorted(times - {math.inf}))

        # The faults between two ranks are found at their first message: a large world has more pairs than ever exchange one.
        self._cuts = functools.cache(
            lambda a, b: _merged((fault.from_s, fault.until_s) for fault, touches in cuts if touches(a, b))
        )
        self._delays = functools.cache(
            lambda a, b: tuple((fault.from_s, fault.until_s, fault.by_s) for fault, touches in delays if touches(a, b))
        )

    def cut_until(self, a: int, b: int, now_s: float) -> float:
        """Return when the link between ``a`` and ``b`` is whole again: ``inf`` for never, and 0.0 if it is whole at ``now_s``.

        A cut that begins before another one ends, or just when it ends, prolongs it.
        """
        if self.any:
            for start, end in self._cuts(a, b):
                if start <= now_s < end:
                    return end
        return 0.0

    def delay_s(self, a: int, b: int, now_s: float) -> float:
        """Return by how many seconds a message between ``a`` and ``b`` is delayed at ``now_s``: the sum of all delays."""
        return sum((by_s for start, end, by_s in self._delays(a, b) if start <= now_s < end), start=0.0) if self.any else 0.0


def _touches(fault: Cut | Delay | Partition) -> Callable[[int, int], bool]:
    """Return a function that says whether the fault concerns the link between two ranks."""
    if isinstance(fault, Partition):
        side_of = {rank: side for side, ranks in enumerate(fault.sides) for rank in ranks}
        return lambda a, b: side_of.get(a) != side_of.get(b)
    ends = {*fault.links, *((b, a) for a, b in fault.links)}
    return lambda a, b: a != b and not ends.isdisjoint(((a, b), (a, "*"), ("*", b), ("*", "*")))


def _merged(windows: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Join the windows that overlap or touch."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(windows):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return tuple(joined)


def _seconds(value: float) -> str:
    return f"{value:.15g} s"


def _toml(value: object) -> str:
    """Write a text, a number, or an array of these as TOML."""
    if isinstance(value, str):
        # JSON escapes as TOML does, except for one control character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value)


def _refused(model: type[BaseModel], error: ValidationError) -> UsageError:
    """Return pydantic's findings about the arguments of a model, one line for each problem."""
    problems = []
    for detail in error.errors(include_url=False):
        key = ".".join(map(str, detail["loc"]))
        said = detail.get("ctx", {}).get("error")
        if isinstance(said, UsageError):
            problems.append(str(said))
            continue
        match detail["type"]:
            case "missing":
                words = f"{key} is missing"
            case "extra_forbidden":
                words = f"{key} is unknown{hint(key, model.model_fields)}"
            case _:
                words = (f"{key} = {detail['input']!r}: " if key else "") + _plainly(detail)
        problems.append(f"{model.__name__}: {words}")
    return UsageError("\n".join(problems))


def _as_error(error: ValidationError, file: str) -> ConfigError:
    """Return pydantic's findings, one line for each problem."""
    problems = []
    for detail in error.errors(include_url=False):
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"]).removeprefix(".")
        if detail["type"] == "missing":
            problems.append((f"{file}: {key} is missing, and it has no default", key, None))
        else:
            problems.append((f"{file}: {key} = {detail['input']!r}: {_words(detail)}", key, detail["input"]))
    _, key, value = problems[0]
    return ConfigError("\n".join(line for line, _, _ in problems), file=file, key=key, value=value)


def _words(detail: ErrorDetails) -> str:
    kind, *inner = map(str, detail["loc"])
    match detail["type"]:
        case "extra_forbidden":
            return f"this key is unknown{hint((kind, *inner)[-1], (KINDS[kind] if inner else _File).model_fields)}"
        case "tuple_type" | "model_type" if len(inner) <= 1:
            return f"expected an array of tables, each below a line [[{kind}]]"
    return _plainly(detail)


def _plainly(detail: ErrorDetails) -> str:
    return re.sub("Input should|Tuple should", "it should", detail["msg"].removeprefix("Value error, "))


def hint(name: str, valid: Collection[str]) -> str:
    """Return the end of a sentence about an unknown name: a suggestion, if there is one, and the valid names."""
    near = difflib.get_close_matches(name, valid, n=1)
    return (f"; did you mean {near[0]!r}?" if near else ".") + f" Valid here: {', '.join(valid)}"
