"""From predicted times to the table that comes with oneaccord; `tools/make_selection_table.py` writes it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from oneaccord.common.units import bytes_text
from oneaccord.config.select import Rule, candidates, default_segments
from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord.schedule.simulation import PRESETS, Level, Network
from oneaccord.schedule.steps import Collective
from oneaccord_lab.simulation import Prepared
from oneaccord_lab.tuning.ranges import Kind, Range, kinds, losses, ranges

__all__ = ["LAYOUTS", "SIZES", "SLACK", "TOLERANCE", "Layout", "model_rules", "predict"]

SIZES: Final[tuple[int, ...]] = tuple(1 << power for power in (*range(3, 31, 2), 30))
"""8 bytes to 1 GiB."""

TOLERANCE: Final[float] = 0.15
"""How much longer than the best the choice of the table may take, at the sizes and in the worlds that were simulated."""

SLACK: Final[float] = 4.0
"""The factor by which the loss may be greater in large worlds, in which one row serves several networks: the table cannot know which one it is."""

_MESSAGES: Final[int] = 100_000
"""A call of more messages in a large world is priced by its formula: a table is made of thousands of calls."""

_HOPELESS: Final[float] = 2.0
"""An algorithm that is so many times slower than another one by its formula alone is not simulated: no row may lose that much."""

_LAPTOP: Final[Network] = PRESETS["laptop"]

# Hosts as one finds them in a rack: one 10 Gbit/s card, which moves about 1.2 GB/s by TCP, and some 30 us from one Python process
# to another on the next host. Ranks of one host talk over loopback, as on the laptop.
_RACK: Final[Network] = Network(
    topology="fat_tree",
    summary="hosts with one 10 Gbit/s Ethernet card each at one switch",
    reduction_bytes_per_s=_LAPTOP.reduction_bytes_per_s,
    host=_LAPTOP.host,
    nic=Level(latency_s=15e-6, bandwidth_bytes_per_s=1.2e9, gap_s=5e-6),
    spine=Level(latency_s=1e-6, bandwidth_bytes_per_s=12e9, gap_s=0),
    hosts_per_leaf=64,
    oversubscription=8,
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The placement of ranks on hosts, and the network for simulations.

    Attributes
    ----------
    name
        For people.
    network
        The network.
    ranks_per_host
        The number of neighbouring ranks that share a host; 0 if all do.
    worlds
        The numbers of ranks that are simulated, ascending.
    slack
        How many times as much as elsewhere may be lost here.
    every
        Every how many of `SIZES` are simulated; times between two lie on a straight line. It divides their number less one.
    """

    name: str
    network: Network
    ranks_per_host: int
    worlds: tuple[int, ...]
    slack: float = 1.0
    every: int = 1

    def neighbours(self, world_size: int) -> int:
        """Return how many ranks share a host in one of the worlds."""
        return self.ranks_per_host or world_size

    def far(self, network: Network, *worlds: int) -> Layout:
        """Return the same layout in large worlds on a network."""
        return replace(self, network=network, worlds=worlds, slack=SLACK, every=2)


_HOST: Final[Layout] = Layout("one host", _LAPTOP, 0, (2, 3, 4, 6, 8, 12, 16, 24, 32))
_HOSTS: Final[Layout] = Layout("hosts of 8 ranks", _RACK, 8, (16, 24, 32, 48, 64))
_LONELY: Final[Layout] = Layout("hosts of one rank", _RACK, 1, (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64))


def _everywhere(layout: Layout) -> tuple[Layout, ...]:
    """Return a layout with its large worlds, on slow and on fast hosts."""
    return (
        layout,
        layout.far(_RACK, 128, 256, 1024, 65536),
        layout.far(PRESETS["fat-tree"], 128, 256, 384, 1024, 1536, 4096, 12288, 65536),
    )


_ONE: Final = (_HOST, _HOST.far(_LAPTOP, 64, 128))
_SEVERAL: Final = (*_everywhere(_HOSTS), _HOSTS.far(PRESETS["torus"], 256, 1024))
_EACH: Final = _everywhere(_LONELY)

LAYOUTS: Final[tuple[Layout, ...]] = (*_ONE, *_SEVERAL, *_EACH)
"""The layouts that the table distinguishes, each in small worlds and in large ones."""

Times = Mapping[tuple[Layout, int], Sequence[Mapping[str, float]]]
"""For each layout and world, the times of all algorithms for each of `SIZES`; or the loss of each, which slack reduces."""

# The ways to let layouts share rows, each with the conditions of the rows; the first conditions go before the others.
_ANYWHERE: Final[Rule] = Rule(Collective.BARRIER, "")
_ON_ONE_HOST: Final[Rule] = replace(_ANYWHERE, max_hosts=1)
_ON_FULL_HOSTS: Final[Rule] = replace(_ANYWHERE, min_hosts=2, min_ranks_per_host=2)
_GROUPINGS: Final[tuple[tuple[tuple[tuple[Layout, ...], Rule], ...], ...]] = (
    ((LAYOUTS, _ANYWHERE),),
    ((_ONE, _ON_ONE_HOST), ((*_SEVERAL, *_EACH), _ANYWHERE)),
    ((_SEVERAL, _ON_FULL_HOSTS), ((*_ONE, *_EACH), _ANYWHERE)),
    ((_ONE, _ON_ONE_HOST), (_SEVERAL, _ON_FULL_HOSTS), (_EACH, _ANYWHERE)),
)


@functools.cache
def predict(algorithm: Algorithm, layout: Layout, world_size: int, nbytes: int) -> float:
    """Return the seconds of a call, with as many segments as a selector would choose."""
    return _prepared(algorithm, layout, world_size, default_segments(algorithm, nbytes, world_size)).at(nbytes).time_s


@functools.lru_cache(maxsize=8)
def _prepared(algorithm: Algorithm, layout: Layout, world_size: int, segments: int) -> Prepared:
    network = layout.network.with_ranks_per_host(layout.neighbours(world_size))
    most = _MESSAGES if layout.slack > 1 else None
    return Prepared.of(algorithm, world_size, network, segments=segments, most_messages=most)


def _least(algorithm: Algorithm, layout: Layout, world_size: int, nbytes: int) -> float:
    """Return the least seconds of a call, by its formula with the fastest links, if four steps may overlap."""
    if algorithm.cost is None:
        return 0.0
    network, segments = layout.network, default_segments(algorithm, nbytes, world_size)
    cost = algorithm.cost(world_size, nbytes, segments, layout.neighbours(world_size))
    # From host to host a message passes two cards.
    levels = [level for level in (network.host, network.wire, network.link, network.nic) if level is not None]
    latency = min(level.latency_s * (2 if level is network.nic else 1) for level in levels)
    return cost.steps * latency / 4 + cost.path_bytes / max(level.bandwidth_bytes_per_s for level in levels)


def model_rules(
    predicted: Callable[[Algorithm, Layout, int, int], float] = predict, tolerance: float = TOLERANCE
) -> list[Rule]:
    """Return the rows of a table for every collective.

    Parameters
    ----------
    predicted
        Returns the seconds of an algorithm in a layout and world for a size; by default the simulator does.
    tolerance
        The loss against the best that is taken for the sake of fewer rows.

    Returns
    -------
    list of Rule
        For each collective rows for reproducible calls and for uneven blocks, if not all its algorithms serve these, and then
        the rows for all calls.
    """
    rules: list[Rule] = []
    for collective in Collective:
        own = {each.name: each for each in BUILTIN if each.collective is collective}
        sizes = (0,) if collective is Collective.BARRIER else SIZES
        times = {
            (layout, world): _cases(own.values(), layout, world, sizes, predicted)
            for layout in LAYOUTS
            for world in layout.worlds
        }
        for kind in kinds(collective, own):
            chosen = {
                place: [{name: seconds for name, seconds in case.items() if name in kind.names} for case in cases]
                for place, cases in times.items()
            }
            rules += _fewest_rows(collective, sizes, chosen, kind, tolerance)
    return rules


def _cases(
    algorithms: Collection[Algorithm],
    layout: Layout,
    world: int,
    sizes: Sequence[int],
    predicted: Callable[[Algorithm, Layout, int, int], float],
) -> list[dict[str, float]]:
    """Return the times of all algorithms that can serve a place, for each size; of hopeless ones a time that is too short."""
    able = candidates(algorithms, world, layout.neighbours(world))
    found: list[dict[str, float]] = []
    for size in sizes[:: layout.every]:
        least = {each.name: _least(each, layout, world, size) for each in able}
        case: dict[str, float] = {}
        for each in sorted(able, key=lambda each: least[each.name]):
            # By those alone that serve every kind of call that it serves.
            rivals = [case[o.name] for o in able if o.name in case and o.canonical >= each.canonical and o.even <= each.even]
            hopeless = layout.slack > 1 and least[each.name] > _HOPELESS * min(rivals, default=math.inf)
            case[each.name] = least[each.name] if hopeless else predicted(each, layout, world, size)
        if found:
            before, first = found[-1], sizes[len(found) - 1]
            for between in sizes[len(found) : len(found) - 1 + layout.every]:
                share = (between - first) / (size - first)
                found.append({name: before[name] + share * (seconds - before[name]) for name, seconds in case.items()})
        found.append(case)
    return found


def _fewest_rows(collective: Collective, sizes: Sequence[int], times: Times, kind: Kind, tolerance: float) -> list[Rule]:
    """Return the fewest rows that lose no more than is allowed, over all ways to let layouts share them."""
    lost = {
        place: [{name: loss / place[0].slack for name, loss in losses(case).items()} for case in cases]
        for place, cases in times.items()
    }
    found: list[list[Rule]] = []
    for grouping in _GROUPINGS:
        rows: list[Rule] | None = []
        for layouts, conditions in grouping:
            here = {place: cases for place, cases in lost.items() if place[0] in layouts}
            some = _rows_of_layouts(collective, sizes, times, here, conditions, kind, tolerance)
            rows = None if rows is None or some is None else rows + some
        if rows is not None:
            found.append(rows)
    return min(found, key=len)


@dataclass(frozen=True, slots=True)
class _Block:
    """Neighbouring worlds that share rows."""

    places: tuple[tuple[Layout, int], ...]
    found: tuple[Range, ...]


def _rows_of_layouts(
    collective: Collective,
    sizes: Sequence[int],
    times: Times,
    lost: Times,
    conditions: Rule,
    kind: Kind,
    tolerance: float,
) -> list[Rule] | None:
    """Return the fewest rows for some layouts together: for all worlds alike, or with rows of their own for powers of two."""
    worlds = sorted({world for _, world in lost})
    powers = [world for world in worlds if world & (world - 1) == 0]
    together = _blocks(lost, worlds, tolerance)
    apart = [_blocks(lost, some, tolerance) for some in (powers, [world for world in worlds if world not in powers])]
    options: list[list[tuple[list[_Block], bool]]] = []
    if together is not None:
        options.append([(together, False)])
    if apart[0] is not None and apart[1] is not None:
        options.append([(apart[0], True), (apart[1], False)])
    if not options:
        return None
    best = min(options, key=lambda option: sum(len(block.found) for blocks, _ in option for block in blocks))
    rows = []
    for blocks, power_of_two in best:
        for block in blocks:
            largest = None if block is blocks[-1] else max(world for _, world in block.places)
            for each in block.found:
                last = each.last == len(sizes) - 1
                rows.append(
                    replace(
                        conditions,
                        collective=collective,
                        algorithm=each.name,
                        max_bytes=None if last else min(2 * sizes[each.last], (sizes[each.last] + sizes[each.last + 1]) // 2),
                        max_world=largest,
                        reason=_reason(collective, each, block, sizes, times, kind),
                        power_of_two=power_of_two,
                        reproducible=kind.reproducible,
                        uneven=kind.uneven,
                    )
                )
    return rows


def _blocks(lost: Times, worlds: Sequence[int], tolerance: float) -> list[_Block] | None:
    """Divide worlds into neighbours that share rows, so that there are as few rows as possible; None if that is impossible."""
    alone = [_worst([cases for place, cases in lost.items() if place[1] == world]) for world in worlds]
    best: list[tuple[int, list[_Block]] | None] = [(0, [])]
    for stop in range(1, len(worlds) + 1):
        options: list[tuple[int, list[_Block]]] = []
        worst: list[dict[str, float]] | None = None
        for start in reversed(range(stop)):
            worst = alone[start] if worst is None else _worst([alone[start], worst])
            found = ranges(worst, tolerance)
            if found is None:
                break  # nor is there for more worlds
            before = best[start]
            if before is not None:
                places = tuple(place for place in lost if place[1] in worlds[start:stop])
                options.insert(0, (before[0] + len(found), [*before[1], _Block(places, tuple(found))]))
        best.append(min(options, key=lambda option: option[0], default=None))
    last = best[-1]
    return None if last is None else last[1]


def _worst(places: Sequence[Sequence[Mapping[str, float]]]) -> list[dict[str, float]]:
    """Return for each size the loss of each algorithm in the worst of some places."""
    # An algorithm that cannot serve one of them is skipped there, and the row would not keep its promise.
    return [
        {name: max(case.get(name, math.inf) for case in cases) for name in set().union(*cases)}
        for cases in zip(*places, strict=True)
    ]


def _reason(collective: Collective, each: Range, block: _Block, sizes: Sequence[int], times: Times, kind: Kind) -> str:
    """Return the model's reason for the row: about all calls of the row, not about one of them."""
    places = sorted(block.places, key=lambda place: place[1])
    first, last = places[0][1], places[-1][1]
    ranks = f"{first:,} ranks" if first == last else f"{first:,} to {last:,} ranks"
    smallest, largest = (bytes_text(sizes[index]) for index in (each.first, each.last))
    size = "" if collective is Collective.BARRIER else f", {smallest}" if smallest == largest else f", {smallest} to {largest}"
    hosts = " and ".join(dict.fromkeys(layout.name for layout, _ in places))
    text = f"in the model, {ranks} on {hosts}{size}{kind.words}"
    lost = [
        losses(times[place][index])
        for place in places
        for index in range(each.first, each.last + 1)
        if index % place[0].every == 0
    ]
    if all(len(case) == 1 for case in lost):
        return f"{text}: there is no other"
    behind = [case[each.name] for case in lost]
    best = sum(not loss for loss in behind)
    if best == len(behind):
        return f"{text}: the fastest in all {best} cases"
    return f"{text}: the fastest in {best} of {len(behind)} cases, else at most {math.ceil(100 * max(behind))}% slower"
