"""The choice of an algorithm for a call."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from oneaccord.common.data import as_dataclass
from oneaccord.config.plugins.installed import did_you_mean
from oneaccord.config.select.rules import MAX_SEGMENTS, Call, Rule
from oneaccord.config.select.table import default_rules
from oneaccord.errors import ConfigError, DuplicatePluginError
from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord.schedule.contracts import PROMISES
from oneaccord.schedule.steps import Collective

__all__ = ["Choice", "Selector", "candidates", "default_segments", "lacks", "reproduces"]


@as_dataclass
class Choice(msgspec.Struct, frozen=True):
    """The algorithm of a call, the number of segments to build it with, and why; the row that decided, if it was one."""

    algorithm: Algorithm
    segments: int
    reason: str
    rule: Rule | None = None


class Selector:
    """Chooses algorithms by rules.

    Parameters
    ----------
    rules
        Read from the top; the first that fits a call wins. By default the table that comes with oneaccord.
    algorithms
        All that rules and overrides may name: those of oneaccord and of plugins.
    overrides
        From the name of a collective to that of the algorithm to use for it, such as ``{"all_reduce": "ring"}``, instead
        of the rules. If the algorithm cannot carry out a call, because it needs even blocks or several hosts with
        equally many ranks, the rules decide all the same.
    refused
        Algorithms that cannot be chosen, by the name of the collective and their own, each with the reason in words.

    Raises
    ------
    ConfigError
        A rule or an override names a collective or an algorithm that is not there, or one that is refused.
    DuplicatePluginError
        Two algorithms of one collective have one name.
    """

    def __init__(
        self,
        rules: Sequence[Rule] | None = None,
        algorithms: Iterable[Algorithm] = BUILTIN,
        overrides: Mapping[str, str] | None = None,
        refused: Mapping[tuple[str, str], str] | None = None,
    ) -> None:
        self._refused = dict(refused or {})
        self._algorithms: dict[Collective, dict[str, Algorithm]] = {collective: {} for collective in Collective}
        for algorithm in algorithms:
            named = self._algorithms[algorithm.collective]
            if algorithm.name in named:
                raise DuplicatePluginError(
                    f"two algorithms for {algorithm.collective.value} are called {algorithm.name!r}; rename one of them"
                )
            named[algorithm.name] = algorithm
        shipped = default_rules()
        self._rules = shipped if rules is None else tuple(rules)
        above = len(self._rules) - len(shipped)
        # A test checks the shipped rows, once for all: each start of a rank would pay for it.
        for rule in self._rules[:above] if self._rules[above:] == shipped else self._rules:
            self._check(rule)
        self._overrides: dict[Collective, Algorithm] = {}
        for name, algorithm_name in (overrides or {}).items():
            collective = _collective(name)
            wrong = self._wrong(collective, algorithm_name)
            if wrong is not None:
                raise ConfigError(f"the config names {wrong}", key=name, value=algorithm_name)
            self._overrides[collective] = self._algorithms[collective][algorithm_name]

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules, in the order in which they are read."""
        return self._rules

    @functools.cached_property
    def digest(self) -> str:
        """Eight hexadecimal digits that are the same for selectors which always choose alike; ranks compare it."""
        told = [replace(rule, reason="", origin="", file=None) for rule in self._rules]
        forced = sorted((collective.value, algorithm.name) for collective, algorithm in self._overrides.items())
        return hashlib.sha256(msgspec.json.encode((told, forced))).hexdigest()[:8]

    def algorithms(self, collective: Collective) -> tuple[Algorithm, ...]:
        """Return the algorithms that may be chosen for a collective."""
        return tuple(self._algorithms[collective].values())

    def choose(
        self,
        collective: Collective,
        nbytes: int,
        world_size: int,
        *,
        ranks_per_host: int = 1,
        even: bool = True,
        reproducible: bool = False,
    ) -> Choice:
        """Return the algorithm of a call. All ranks must ask with the same arguments.

        Parameters
        ----------
        collective
            The collective.
        nbytes
            The size of the vector, of the blocks of all ranks together, or of the blocks that one rank sends in all_to_all, in bytes.
        world_size
            The number of ranks.
        ranks_per_host
            The number of neighbouring ranks that share a host, ``world_size`` if all do; 1 if it is not known, or not the same on
            every host.
        even
            Whether the blocks of all ranks are of one size.
        reproducible
            Whether the reduction must be the one that all reproducible reductions share; no other algorithm is chosen then.

        Raises
        ------
        ConfigError
            The config asks for an algorithm whose reduction is another one, and ``reproducible`` is given; or no rule fits,
            which cannot be where the shipped ones are among them, and an algorithm has a reproducible reduction.
        """
        call = Call(collective, nbytes, world_size, ranks_per_host, even, reproducible)
        wanted = self._overrides.get(collective)
        instead = ""
        if wanted is not None:
            if not reproduces(wanted, call):
                names = [algorithm.name for algorithm in self.algorithms(collective) if algorithm.canonical]
                raise ConfigError(
                    f"reproducible {collective.value}: the config asks for the algorithm {wanted.name!r}, which combines in an "
                    f"order of its own; leave algorithms.{collective.value} out, or choose one of: {', '.join(names) or 'none'}",
                    key=collective.value,
                    value=wanted.name,
                )
            missing = lacks(wanted, call)
            if missing is None:
                return Choice(wanted, default_segments(wanted, nbytes, world_size), "the config asks for it")
            instead = f" (the config asks for {wanted.name}, which needs {missing})"
        algorithms = self._algorithms[collective]
        for rule in self._rules:
            if rule.collective is collective and _fits(rule, call):
                algorithm = algorithms[rule.algorithm]
                if reproduces(algorithm, call) and lacks(algorithm, call) is None:
                    segments = rule.segments or default_segments(algorithm, nbytes, world_size)
                    return Choice(algorithm, segments, rule.reason + instead, rule)
        kind = f"{'' if even else 'uneven '}{'reproducible ' if reproducible else ''}{collective.value}"
        raise ConfigError(
            f"no rule fits this {kind} of {nbytes} bytes in a world of {world_size}: end its rules with one that has no condition, and "
            "names an algorithm for calls of this kind",
            key=collective.value,
        )

    def _check(self, rule: Rule) -> None:
        wrong = self._wrong(rule.collective, rule.algorithm)
        if wrong is not None:
            key = f"{rule.collective.value}.algorithm"
            raise ConfigError(f"{rule.origin} names {wrong}", file=rule.file, key=key, value=rule.algorithm)
        algorithm = self._algorithms[rule.collective][rule.algorithm]
        if rule.segments not in (None, 1) and algorithm.segment_bytes is None:
            key = f"{rule.collective.value}.segments"
            raise ConfigError(
                f"{rule.origin}: segments = {rule.segments}: {algorithm.name} is not cut into segments; leave the key out",
                file=rule.file,
                key=key,
                value=rule.segments,
            )

    def _wrong(self, collective: Collective, name: str) -> str | None:
        """Say why an algorithm cannot be chosen; None if it can."""
        named = self._algorithms[collective]
        if name in named:
            return None
        text = f"the algorithm {name!r} for {collective.value}"
        refused = self._refused.get((collective.value, name))
        if refused is not None:
            return f"{text}, which was refused: {refused}"
        return f"{text}, which does not exist{did_you_mean(name, sorted(named))}"


def candidates(algorithms: Iterable[Algorithm], world_size: int, ranks_per_host: int = 1) -> list[Algorithm]:
    """Return those of some algorithms that can carry out a call with even blocks in a world.

    Parameters
    ----------
    algorithms
        All that might.
    world_size, ranks_per_host
        As for `Selector.choose`.
    """
    return [each for each in algorithms if lacks(each, Call(each.collective, 0, world_size, ranks_per_host)) is None]


def default_segments(algorithm: Algorithm, nbytes: int, world_size: int) -> int:
    """Return the least number of segments that are no larger than the algorithm asks for, as far as `MAX_SEGMENTS` allows.

    Parameters
    ----------
    algorithm
        The algorithm of the call.
    nbytes
        The size of the vector, or of the blocks of all ranks together, in bytes.
    world_size
        The number of ranks.
    """
    if algorithm.segment_bytes is None:
        return 1
    divided = algorithm.segment_bytes * (world_size if algorithm.blockwise else 1)
    return min(MAX_SEGMENTS, max(1, -(-nbytes // divided)))


def _fits(rule: Rule, call: Call) -> bool:
    """Return whether all conditions of a rule of the collective hold; what the algorithm itself needs is not asked here."""
    hosts = -(-call.world_size // call.ranks_per_host)  # the last one perhaps with fewer ranks
    return (
        _within(call.nbytes, rule.min_bytes, rule.max_bytes)
        and _within(call.world_size, rule.min_world, rule.max_world)
        and _within(hosts, rule.min_hosts, rule.max_hosts)
        and _within(call.ranks_per_host, rule.min_ranks_per_host, None)
        and (call.reproducible or not rule.reproducible)
        and not (rule.uneven and call.even)
        and not (rule.power_of_two and call.world_size & (call.world_size - 1))
    )


def _within(value: int, lowest: int | None, highest: int | None) -> bool:
    return (lowest is None or lowest <= value) and (highest is None or value <= highest)


def reproduces(algorithm: Algorithm, call: Call) -> bool:
    """Return whether an algorithm has the reduction that a call asks for: a reproducible one, which all canonical ones share, or any."""
    return not call.reproducible or algorithm.canonical or not PROMISES[call.collective].reduces


def lacks(algorithm: Algorithm, call: Call) -> str | None:
    """Return what an algorithm needs and the call does not have, in words that fit after "needs"; None if nothing is missing.

    `reproduces` checks the reduction that the call needs.
    """
    if algorithm.even and not call.even:
        return "blocks of one size"
    if algorithm.by_host and not call.by_host:
        return "several hosts with equally many ranks, two or more"
    return None


def _collective(name: str) -> Collective:
    names = {collective.value: collective for collective in Collective}
    if name not in names:
        raise ConfigError(
            f"the config names the collective {name!r}, which does not exist{did_you_mean(name, sorted(names))}", key=name
        )
    return names[name]
