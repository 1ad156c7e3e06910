"""Which algorithm carries out a call: a table that is read from the top, and what the config says instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from manyhands.algorithms.registry import BUILTIN, Algorithm
from manyhands.errors import ConfigError, DuplicatePluginError
from manyhands.schedule.steps import Collective

__all__ = ["DEFAULT_RULES", "MAX_SEGMENTS", "Choice", "Rule", "Selector"]

MAX_SEGMENTS = 64
"""The most segments that a vector or block is cut into: beyond it, the work for each step costs more than overlap gains."""

_KIB = 1024


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table.

    Attributes
    ----------
    collective, algorithm
        The collective, and the name of the algorithm that this row chooses for it.
    max_bytes
        The largest call that the row is for, in bytes; None for any.
    max_world
        The largest world that the row is for; None for any.
    reason
        Why, for people.
    """

    collective: Collective
    algorithm: str
    max_bytes: int | None
    max_world: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The algorithm of a call, the number of segments to build it with, and why."""

    algorithm: Algorithm
    segments: int
    reason: str


DEFAULT_RULES: tuple[Rule, ...] = (
    Rule(Collective.ALL_REDUCE, "recursive_doubling", 64 * _KIB, None, "latency counts: the fewest steps"),
    Rule(Collective.ALL_REDUCE, "recursive_doubling", 128 * _KIB, 2, "two ranks: one exchange instead of two"),
    Rule(Collective.ALL_REDUCE, "ring", None, None, "bandwidth counts: the fewest bytes"),
    Rule(Collective.REDUCE, "binomial", None, None, "few steps, in the order of ranks"),
    Rule(Collective.BROADCAST, "binomial", 256 * _KIB, None, "latency counts: the fewest steps"),
    Rule(Collective.BROADCAST, "binomial", None, 2, "two ranks: nobody to pass segments on to"),
    Rule(Collective.BROADCAST, "chain", None, None, "bandwidth counts: every rank sends the vector once at most"),
    Rule(Collective.ALL_GATHER, "bruck", 64 * _KIB, None, "latency counts: the fewest steps"),
    Rule(Collective.ALL_GATHER, "ring", None, None, "bandwidth counts: neighbours talk, in segments"),
    Rule(Collective.GATHER, "binomial", None, None, "few steps"),
    Rule(Collective.SCATTER, "binomial", None, None, "few steps"),
    Rule(Collective.REDUCE_SCATTER, "ring", None, None, "the fewest bytes"),
    Rule(Collective.ALL_TO_ALL, "pairwise", None, None, "every block goes straight to where it belongs"),
    Rule(Collective.BARRIER, "dissemination", None, None, "the fewest steps"),
)
"""The rules that hold unless others are given; the first that fits wins."""


class Selector:
    """Chooses algorithms by rules.

    Parameters
    ----------
    rules
        Read from the top; the first that fits a call wins.
    algorithms
        All that rules and overrides may name: those of manyhands and of plugins.
    overrides
        From the name of a collective to that of the algorithm to use for it always, such as ``{"all_reduce": "ring"}``.

    Raises
    ------
    ConfigError
        A rule or an override names a collective or an algorithm that is not there.
    DuplicatePluginError
        Two algorithms of one collective have one name.
    """

    def __init__(
        self,
        rules: Sequence[Rule] = DEFAULT_RULES,
        algorithms: Iterable[Algorithm] = BUILTIN,
        overrides: Mapping[str, str] | None = None,
    ) -> None:
        self._algorithms: dict[Collective, dict[str, Algorithm]] = {collective: {} for collective in Collective}
        for algorithm in algorithms:
            named = self._algorithms[algorithm.collective]
            if algorithm.name in named:
                raise DuplicatePluginError(
                    f"two algorithms for {algorithm.collective.value} are called {algorithm.name!r}; "
                    "one of them needs another name"
                )
            named[algorithm.name] = algorithm
        self._rules = tuple((rule, self._find(rule.collective, rule.algorithm, "a rule")) for rule in rules)
        self._overrides: dict[Collective, Algorithm] = {}
        for name, algorithm_name in (overrides or {}).items():
            collective = _collective(name)
            self._overrides[collective] = self._find(collective, algorithm_name, "the config")

    def choose(self, collective: Collective, nbytes: int, world_size: int) -> Choice:
        """Return the algorithm of a call. All ranks must ask with the same arguments.

        Parameters
        ----------
        collective
            What is called.
        nbytes
            The size of the vector, or of the blocks of all ranks together, in bytes.
        world_size
            The number of ranks.

        Raises
        ------
        ConfigError
            No rule fits.
        """
        override = self._overrides.get(collective)
        if override is not None:
            return Choice(override, _segments(override, nbytes, world_size), "the config asks for it")
        for rule, algorithm in self._rules:
            if (
                rule.collective is collective
                and (rule.max_bytes is None or nbytes <= rule.max_bytes)
                and (rule.max_world is None or world_size <= rule.max_world)
            ):
                return Choice(algorithm, _segments(algorithm, nbytes, world_size), rule.reason)
        raise ConfigError(
            f"no rule fits {collective.value} of {nbytes} bytes in a world of {world_size}; "
            "end the rules of each collective with one that has neither max_bytes nor max_world",
            key=collective.value,
        )

    def _find(self, collective: Collective, name: str, who: str) -> Algorithm:
        named = self._algorithms[collective]
        if name not in named:
            raise ConfigError(
                f"{who} names the algorithm {name!r} for {collective.value}, which is not there{_nearest(name, named)}",
                key=collective.value,
                value=name,
            )
        return named[name]


def _collective(name: str) -> Collective:
    names = {collective.value: collective for collective in Collective}
    if name not in names:
        raise ConfigError(f"the config names the collective {name!r}, which is not there{_nearest(name, names)}", key=name)
    return names[name]


def _nearest(name: str, valid: Iterable[str]) -> str:
    known = sorted(valid)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{hint} Known are: {', '.join(known) or 'none'}"


def _segments(algorithm: Algorithm, nbytes: int, world_size: int) -> int:
    """Return the least number of segments that are no larger than the algorithm asks for, as far as `MAX_SEGMENTS` allows."""
    if algorithm.segment_bytes is None:
        return 1
    divided = algorithm.segment_bytes * (world_size if algorithm.blockwise else 1)
    return min(MAX_SEGMENTS, max(1, -(-nbytes // divided)))
